"""The shipped pair: the weights give the committed readouts and have what a study needs."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from activations.model import load
from activations.readout import answer_tokens, read
from experiments.builtin import card, tokenizer
from tasks.ordering import Ordering


@pytest.fixture(scope="module")
def model():
    return load("builtin", adapters=("builtin",))


def test_the_committed_weights_give_the_committed_readouts(model) -> None:
    committed = json.loads((card.FOLDER / card.READOUTS).read_text())
    prompts, answers = model.encode(card.reference_chats()), answer_tokens(model, Ordering.answers)
    assert set(committed) == {"base", "grpo"}
    for arm, expected in committed.items():
        with model.use(None if arm == "base" else arm):
            found = read(model, prompts, answers).difference.numpy()
        np.testing.assert_allclose(found, expected, atol=5e-4)


def test_the_pair_is_worth_studying(model) -> None:
    """Original accuracy, default, and all three outcomes in the base; a stronger signal in the adapter; n = 4 … 8."""
    sets = [
        matched
        for n in (4, 6, 8)
        for matched in islice(Ordering().generate({"n": n, "names": "builtin"}, seed=1, split="test"), 100)
    ]
    answers = answer_tokens(model, Ordering.answers)
    gold = np.array([1 if matched.instance.gold == "yes" else -1 for matched in sets])
    readout = {}
    for arm in (None, "grpo"):
        with model.use(arm):
            for kind in ("original", "equivalent"):
                prompts = model.encode([matched[kind].chat() for matched in sets])
                readout[arm, kind] = read(model, prompts, answers).difference.numpy()

    def signal(values: np.ndarray) -> float:
        return float(values[gold > 0].mean() - values[gold < 0].mean()) / 2

    base = readout[None, "original"]
    right = {kind: readout[None, kind] * gold > 0 for kind in ("original", "equivalent")}
    assert right["original"].mean() >= 0.75
    assert abs(base[gold > 0].mean() + base[gold < 0].mean()) / 2 >= 0.5
    for outcome in (
        right["original"] & right["equivalent"],
        ~right["original"] & ~right["equivalent"],
        right["original"] ^ right["equivalent"],
    ):
        assert outcome.sum() >= 10
    assert signal(readout["grpo", "original"]) >= 1.5 * signal(base)


def test_both_parts_are_small_safetensors_with_a_card() -> None:
    files = [path for path in card.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8 * 2**20
    assert {path.name for path in files if path.suffix in (".bin", ".pt", ".pkl")} == set()
    assert "make builtin" in (card.FOLDER / "README.md").read_text()


def test_the_shipped_tokenizer_is_the_one_the_script_builds(model) -> None:
    built = tokenizer.build()
    assert built.get_vocab() == model.tokenizer.get_vocab()
    text = "These people stand in one line: Amy, Bob.\n\nBob is behind Amy.\n\nIs Amy in front of Bob?"
    assert built(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    assert built.chat_template == model.tokenizer.chat_template
