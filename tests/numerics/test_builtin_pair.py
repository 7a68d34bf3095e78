"""Store, lens, heads, adapter and sweep on the built-in pair: trained weights, against plain transformers calls."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from activations.backends.agreement import SITES, agreement
from activations.capturing import Plan, capture
from activations.checks import check
from activations.model import Model, load
from activations.prompts import Prompt
from activations.readout import answer_tokens
from patching.edits import Cell, Edit, head_cells, head_map, layer_cells
from patching.sweeping import full_forward, sweep
from tasks.ordering import Ordering


@pytest.fixture(scope="module")
def model() -> Model:
    return load("builtin", adapters=("builtin",))


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    sets = [
        matched
        for n in (4, 6, 8)
        for matched in islice(Ordering().generate({"n": n, "names": "builtin"}, seed=2, split="test"), 4)
    ]
    return model.encode([shown.chat() for matched in sets for shown in matched.presentations])


def test_the_whole_table_of_checks_holds(model: Model, prompts: list[Prompt]) -> None:
    table = check(model, prompts[:8])
    assert {one.name for one in table if not one.ok} == set()
    assert any("adapter grpo" in one.name for one in table)


@pytest.mark.parametrize("peer", ["transformer_lens", "nnsight"])
def test_the_libraries_agree(model: Model, prompts: list[Prompt], peer: str) -> None:
    for arm in (None, "grpo"):
        with model.use(arm):
            rows = agreement(model, prompts[:4], peer)
        assert [row.name for row in rows] == [f"hf = {peer}, {what}" for what in ("logits", *SITES)]
        assert all(row.value is not None and row.value <= 5e-5 for row in rows), rows


@pytest.mark.parametrize("arm", [None, "grpo"])
def test_the_store_holds_what_transformers_computes(
    model: Model, prompts: list[Prompt], tmp_path: Path, arm: str | None
) -> None:
    """Hidden states of single, unpadded prompts, asked from transformers; its last one is after the final norm."""
    answers = answer_tokens(model, Ordering.answers)
    with model.use(arm):
        store = capture(model, prompts, Plan(batch_tokens=500), tmp_path / "store", answers=answers)
        for row, prompt in enumerate(prompts):
            with torch.no_grad():
                plain = model.hf_model(torch.tensor([prompt.ids]), output_hidden_states=True, use_cache=False)
            for layer in range(model.n_layers - 1):
                np.testing.assert_allclose(
                    store["resid_post", layer][row], plain.hidden_states[layer + 1][0, -1].numpy(), atol=5e-5
                )
            last = torch.from_numpy(store["resid_post", -1][row : row + 1])
            logits = model.logits(last)[0].numpy()
            np.testing.assert_allclose(logits, plain.logits[0, -1].numpy(), rtol=1e-5, atol=5e-5)
            yes, no = (plain.logits[0, -1, list(ids)].logsumexp(-1).item() for ids in answers.ids)
            np.testing.assert_allclose(store.readout["logit"][row], [yes, no], atol=5e-5)


@pytest.mark.parametrize("arm", [None, "grpo"])
def test_a_sweep_equals_plain_forwards(model: Model, prompts: list[Prompt], arm: str | None) -> None:
    answers = answer_tokens(model, Ordering.answers)
    donor = np.random.default_rng(0).standard_normal((len(prompts), model.n_layers, model.d_model)).astype(np.float32)
    cells = [
        *layer_cells(model.n_layers, source="noise"),
        *head_cells(head_map(model)),
        Cell("three", tuple(Edit("z", 3, head) for head in (1, 2, 3))),
    ]
    with model.use(arm):
        fast = sweep(model, prompts, cells, answers=answers, donors={"noise": {"resid_post": donor}}, seed=0)
        slow = full_forward(model, prompts, cells, answers=answers, donors={"noise": {"resid_post": donor}}, seed=0)
    assert fast.engine == "branch"
    np.testing.assert_allclose(fast.difference, slow.difference, atol=1e-4)
    assert np.abs(fast.difference - fast.unpatched[:, None]).max() > 1
    assert fast.forward_passes < 2 < slow.forward_passes
