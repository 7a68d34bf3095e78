"""``probe lens``: numbers against transformers alone, the model known by its hashes, and stores that can't be read."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from activations.sources import BUILTIN
from activations.store import ActivationStore, StoreWriter
from experiments.cli import _guarded
from experiments.lens_command import LEAST_TUNED
from probes.errors import ProbeError
from probes.tuned_lens import fit_tuned_lens
from tests.tiny_models import tiny_llama, tiny_tokenizer

FAST = ("--resamples", "100")


def probe(*words: Any) -> tuple[int, str, str]:
    """The command in this process, behind its error boundary."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["probe", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = _guarded()
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def read(*words: Any) -> dict[str, Any]:
    code, out, err = probe("lens", *words, *FAST, "--json")
    assert code == 0, err
    return json.loads(out)


def refused(said: str, *words: Any, code: int = 2) -> None:
    found, out, err = probe("lens", *words)
    assert (found, out) == (code, ""), (found, out, err)
    lines = [line for line in err.splitlines() if line.startswith("probe: ")]
    assert len(lines) == 1 and "Traceback" not in err
    assert said in lines[0], err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens")
    for arm in ("base", "grpo"):
        options = ("--limit", "20", "--arm", arm, "--positions", "answer,query/mean", "--out", path / arm)
        code, _, err = probe("capture", "--set", "n=4", *options)
        assert code == 0, err
    return path


def by_transformers(folder: Path, kind: str) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """Logits ``[layer, row, token]`` of every block through norm and head, gold ``[row]``, and the items."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(BUILTIN), AutoModelForCausalLM.from_pretrained(BUILTIN)
    items = [json.loads(line) for line in (folder / "base/items.jsonl").read_text().splitlines()]
    found, gold = [], []
    for one in items:
        shown = next(shown for shown in one["presentations"] if shown["kind"] == kind)
        text = tokenizer.apply_chat_template(shown["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            seen = model(ids, output_hidden_states=True)
            # transformers has put the last one through the norm already.
            layers = [model.lm_head(model.model.norm(hidden[0, -1])) for hidden in seen.hidden_states[1:-1]]
        found.append(torch.stack([*layers, seen.logits[0, -1]]))
        gold.append(shown["gold"] == "yes")
    return torch.stack(found, 1).double().numpy(), np.array(gold), items


@pytest.mark.parametrize("kind", ["original", "equivalent"])
def test_numbers_are_those_of_transformers(folder: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    logits, gold, items = by_transformers(folder, kind)
    content = ActivationStore.open(folder / "base").manifest["content"]
    score = [np.log(np.exp(logits[..., list(ids)]).sum(-1)) for ids in content["answers"]]
    difference, whole = score[0] - score[1], np.log(np.exp(logits).sum(-1))
    cells = np.array([one["cell"] for one in items])
    means = {cell: difference[:, cells == cell].mean(1) for cell in sorted(set(cells))}
    yes, no = ([mean for cell, mean in means.items() if cell.endswith(gold)] for gold in ("yes", "no"))
    right = np.where(gold, score[0], score[1])
    rank = 1 + (logits > right[..., None]).sum(-1)
    assert [len(ids) for ids in content["answers"]] == [1, 1]  # so that a label's rank is that of its one token
    found = read(folder / "base", "--presentation", kind)
    assert (found["adapter"], found["rows"]) == (None, 20)
    assert found["gap"] <= found["bound"] == 1e-5
    table = pd.DataFrame(found["layers"])
    assert table["delta"].to_numpy() == pytest.approx(np.mean([*yes, *no], axis=0), abs=1e-4)
    assert table["signal"].to_numpy() == pytest.approx((np.mean(yes, 0) - np.mean(no, 0)) / 2, abs=1e-4)
    assert table["readout"].to_numpy() == pytest.approx(difference.mean(1), abs=1e-4)
    assert table["accuracy"].tolist() == pytest.approx(((difference > 0) == gold).mean(1))
    mass = 1 - np.exp(score[0] - whole) - np.exp(score[1] - whole)
    assert table["off_label_mass"].to_numpy() == pytest.approx(mass.mean(1), abs=1e-5)
    assert table["gold_rank"].tolist() == np.median(rank, axis=1).tolist()
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN)
    for layer, one in table.iterrows():
        token, count = max(
            zip(*np.unique(logits[layer].argmax(-1), return_counts=True), strict=True), key=lambda x: x[1]
        )
        assert (one["top_token"], one["top_share"]) == (tokenizer.decode([token]), pytest.approx(count / 20))
    (whole_rows,) = found["presentations"]
    signs = np.sign(difference)
    first = [next(n for n in range(4) if (row[n:] == row[-1]).all()) for row in signs.T]
    assert whole_rows["settled"] == np.median(first)
    wrong, right_rows = (difference[-1] > 0) != gold, (difference[-1] > 0) == gold
    ahead = (difference > 0) == gold
    assert (whole_rows["wrong"], whole_rows["right"]) == (wrong.sum(), right_rows.sum())
    if wrong.any():
        assert whole_rows["overtaken"] == pytest.approx(ahead[:-1, wrong].any(0).mean())
    assert whole_rows["overtaken_mirror"] == pytest.approx((~ahead[:-1, right_rows]).any(0).mean())


def test_the_adapter_is_switched_on_and_known_by_its_hash(folder: Path) -> None:
    base, grpo = (read(folder / arm) for arm in ("base", "grpo"))
    assert (base["adapter"], grpo["adapter"]) == (None, "grpo")
    store = ActivationStore.open(folder / "grpo")
    at = store.select(presentation="original", label="answer")
    difference = np.subtract(*store.readout["logit"][at].T.astype(float))
    last = [one for one in grpo["layers"] if one["presentation"] == "original"][-1]
    assert last["readout"] == pytest.approx(difference.mean(), abs=1e-5)
    other = [one for one in base["layers"] if one["presentation"] == "original"][-1]
    assert abs(other["readout"] - last["readout"]) > 1e-3


def test_tuned_lens_stands_beside_and_is_read_on_held_out_instances(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(folder / "base", "--tuned", "--out", tmp_path / "t.parquet")
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert table["lens"].tolist() == (["logit"] * 4 + ["tuned"] * 4) * 2
    tuned = table[table["lens"] == "tuned"]
    assert (tuned["n"] == 5).all()  # a quarter of 20 instances
    assert (tuned["kl_tuned"] <= tuned["kl_lens"] * 1.2 + 1e-9).all()
    assert tuned.groupby("presentation")["kl_lens"].last().tolist() == pytest.approx([0, 0], abs=1e-9)
    assert table.loc[table["lens"] == "logit", "kl_lens"].isna().all()
    assert [one["lens"] for one in found["presentations"]] == ["logit", "tuned"] * 2
    # Which layers kept the plain lens, of how many rows it reads the held-out ones, and where a constant does as well.
    assert all((one["how"] == "") == (one["lens"] == "logit") for one in found["layers"])
    assert tuned.groupby("presentation")["how"].last().tolist() == ["identity: last layer"] * 2
    plain = tuned["how"].str.startswith("identity")
    assert (tuned.loc[plain, "kl_tuned"] == tuned.loc[plain, "kl_lens"]).all()
    for one in found["presentations"]:
        rows = table[(table["presentation"] == one["presentation"]) & (table["lens"] == one["lens"])]
        worse = rows.loc[rows["kl_tuned"] > rows["kl_constant"], "layer"].tolist()
        assert (one["of"], one["worse_than_constant"]) == (20, worse)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = probe("lens", folder / "base", "--tuned", *FAST)
    assert code == 0 and all(len(line) <= 80 or str(folder) in line for line in out.splitlines())
    for words in (
        "original, tuned lens, 5 of 20 rows, of instances that fitted nothing",
        "KL lens  tuned  constant",
        "keeps the plain lens: layer ",
        "one row counted in",
        "δ [95%]",
        "the answer settles at layer",
        "off-label",
    ):
        assert words in out


def test_a_tuned_lens_needs_as_many_instances_as_it_says(folder: Path, tmp_path: Path) -> None:
    assert probe("capture", "--set", "n=4", "--limit", "4", "--out", tmp_path / "s")[0] == 0
    refused("--tuned needs 8 instances or more", tmp_path / "s", "--tuned", "--out", tmp_path / "t.csv")
    assert not (tmp_path / "t.csv").exists()
    rows, head = torch.randn(2, LEAST_TUNED, 3).numpy(), torch.randn(5, 3)

    def logits(resid: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        return resid @ (head if tokens is None else head[tokens]).T

    for count in (LEAST_TUNED - 1, LEAST_TUNED):
        names = [min(row, count - 1) for row in range(LEAST_TUNED)]
        if count < LEAST_TUNED:
            with pytest.raises(ProbeError, match="7 instances"):
                fit_tuned_lens(rows, logits, names, iterations=1, seed=0)
        else:
            fit_tuned_lens(rows, logits, names, iterations=1, seed=0)


def test_the_store_of_another_model_or_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    network, tokenizer = tiny_llama()
    network.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    refused("give the model of the store as --model", folder / "base", "--model", tmp_path / "tiny", code=1)
    refused("is of the base model: leave it out", folder / "base", "--adapter", "builtin")
    other = tmp_path / "grpo"
    shutil.copytree(BUILTIN.parent / "grpo", other)
    weights = other / "adapter_model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights)
    refused("was made with an adapter of weights", folder / "grpo", "--adapter", other, code=1)


def test_a_model_that_cannot_be_looked_into_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    refused("so it is no causal language model; give one", folder / "base", "--model", tmp_path / "bert", code=1)


def test_a_store_without_a_readout_can_not_be_checked(tmp_path: Path) -> None:
    """As captures of prompts that reason first are."""
    index = {"key": ["k"], "presentation": ["original"], "label": ["answer"], "position": [1], "n_tokens": [9]}
    with StoreWriter(
        tmp_path / "s", datasets={("resid_post", 0): 4}, dtype="float32", n_layers=1, shards=[[0]], rows=index,
        content={"model": {"weights": "abc"}}, notes={},
    ) as writer:  # fmt: skip
        for shard in writer.missing:
            writer.write(shard, {("resid_post", 0): np.ones((1, 4), dtype=np.float32)})
    (tmp_path / "s/items.jsonl").write_text("")
    refused("holds no scores of two answer labels", tmp_path / "s")


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (("--sites", "z"), "holds z and no resid_post, which a lens reads"),
        (("--layers", "0-2"), "lacks resid_post of the last layer, 3"),
        (("--positions", "query"), "has rows at query and none at answer"),
    ],
)
def test_a_store_that_lacks_what_a_lens_reads(tmp_path: Path, capture: tuple[str, ...], said: str) -> None:
    code, _, err = probe("capture", "--set", "n=4", "--limit", "2", *capture, "--out", tmp_path / "s")
    assert code == 0, err
    refused(said, tmp_path / "s")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--presentation", "negated"), "presentation is 'negated': the store has original, equivalent"),
        (("--presentation", ","), "presentation is '': the store has original, equivalent"),
        (("--resamples", "3"), "resamples is '3': give an integer of at least 100"),
        (("--out", "t"), "out is 't': give a file that ends in"),
    ],
)
def test_options_that_can_not_apply(folder: Path, words: tuple[str, ...], said: str) -> None:
    refused(said, folder / "base", *words)


def test_some_layers_keep_their_numbers(tmp_path: Path) -> None:
    assert probe("capture", "--set", "n=4", "--limit", "8", "--layers", "1,3", "--out", tmp_path / "s")[0] == 0
    found = read(tmp_path / "s", "--presentation", "original")
    assert [one["layer"] for one in found["layers"]] == [1, 3]
    assert found["presentations"][0]["settled"] in (1, 2, 3)
