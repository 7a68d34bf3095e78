"""How well estimates agree with exact sweeps: against scipy, and on networks where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from activations import answer_tokens, from_modules
from patching import (
    PatchError,
    attribution,
    donor_from_run,
    estimate_quality,
    head_cells,
    head_map,
    sweep,
)
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gpt2, tiny_llama


def drawn(noise, seed=0, rows=30, cells=40):
    rng = np.random.default_rng(seed)
    exact = rng.normal(size=cells) + rng.normal(0, 0.3, (rows, cells))
    return 0.5 * exact + noise * rng.normal(size=cells), exact


def test_the_numbers_are_scipys_on_the_means():
    estimate, exact = drawn(0.3)
    found = estimate_quality(estimate, exact, k=8, seed=0)
    one, two = estimate.mean(axis=0), exact.mean(axis=0)
    assert found.pearson.value == pytest.approx(stats.pearsonr(one, two).statistic)
    assert found.spearman.value == pytest.approx(stats.spearmanr(one, two).statistic)
    tops = [set(np.argsort(-np.abs(values))[:8]) for values in (one, two)]
    assert found.overlap.value == len(tops[0] & tops[1]) / 8
    assert found.slope.value == pytest.approx(np.linalg.lstsq(one[:, None], two, rcond=None)[0][0])
    assert found.signed < 40 and found.sign_agreement.value > 0.8
    for interval in (found.pearson, found.spearman, found.overlap, found.slope):
        assert interval.low <= interval.value <= interval.high
    assert (found.cells, found.n, found.n_groups) == (40, 30, 30)


def test_enough_is_a_matter_of_the_lower_end():
    good = estimate_quality(*drawn(0.0), k=8, seed=0)
    assert good.pearson.value == pytest.approx(1) and good.slope.value == pytest.approx(2) and good.enough()
    assert not estimate_quality(*drawn(0.6), k=8, seed=0).enough()
    few = estimate_quality(
        *(values[:2] + np.random.default_rng(1).normal(0, 2, (2, 40)) for values in drawn(0.0)), k=8, seed=0
    )
    assert not few.enough(), "two instances show nothing"


def test_instances_are_drawn_with_all_their_rows():
    estimate, exact = drawn(0.3)
    once = estimate_quality(estimate, exact, k=8, seed=0)
    twice = estimate_quality(
        np.repeat(estimate, 3, axis=0), np.repeat(exact, 3, axis=0), groups=np.repeat(np.arange(30), 3), k=8, seed=0
    )
    np.testing.assert_allclose([twice.pearson.low, twice.slope.high], [once.pearson.low, once.slope.high])
    assert (twice.n, twice.n_groups) == (90, 30)


def test_what_has_no_correlation_is_nan():
    flat = estimate_quality(np.zeros((5, 6)), np.ones((5, 6)), k=2, seed=0)
    assert np.isnan([flat.pearson.value, flat.spearman.low, flat.slope.value]).all()
    assert np.isnan(estimate_quality(np.ones((5, 2)), np.ones((5, 2)), k=1, seed=0).pearson.value)
    assert np.isnan(estimate_quality(np.eye(4)[:1], np.eye(4)[:1], k=1, seed=0).pearson.low), "one row has no spread"
    with pytest.raises(PatchError, match=r"estimate has shape \[5, 6\] and exact \[5, 5\]"):
        estimate_quality(np.zeros((5, 6)), np.zeros((5, 5)), k=2, seed=0)
    with pytest.raises(PatchError, match="k is 7; give 1 to 6"):
        estimate_quality(np.zeros((5, 6)), np.zeros((5, 6)), k=7, seed=0)
    with pytest.raises(PatchError, match="not finite"):
        estimate_quality(np.full((5, 6), np.nan), np.zeros((5, 6)), k=2, seed=0)


def test_the_nearer_the_donor_the_better_the_estimate():
    """Donors on the way from the recipient's own activation to another's: the estimate is exact in the limit."""
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model.to(torch.float64), tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = head_cells(head_map(model), source="other")
    own = donor_from_run(model, prompts, cells)["z"]["answer"]
    quality = []
    for way in (1.0, 0.1, 0.01):
        other = {layer: rows + way * (np.roll(rows, 1, axis=0) - rows) for layer, rows in own.items()}
        donors = {"other": {"z": other}}
        found = attribution(model, prompts, cells, answers=answers, donors=donors)
        exact = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
        quality.append(
            estimate_quality(found.estimate, exact.difference - exact.unpatched[:, None], k=4, seed=0, resamples=50)
        )
    assert quality[2].pearson.value > 0.9999 and quality[2].slope.value == pytest.approx(1, abs=0.02)
    assert quality[0].pearson.value < quality[1].pearson.value < quality[2].pearson.value


def test_a_network_that_is_linear_behind_a_head_is_estimated_exactly():
    """The last layer with its MLP silenced, one token a label, and norms that do not bend: only LayerNorm remains."""
    hf_model, tokenizer = tiny_gpt2()
    with torch.no_grad():
        hf_model.transformer.h[-1].mlp.c_proj.weight.zero_()
        hf_model.transformer.wte.weight.mul_(100)  # a residual so long that no head changes its length
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, {"yes": ("Yes",), "no": ("No",)})
    cells = [cell for cell in head_cells(head_map(model)) if cell.edits[0].layer == 2]
    found = attribution(model, prompts, cells, answers=answers)
    exact = sweep(model, prompts, cells, answers=answers, seed=0)
    moved = exact.difference - exact.unpatched[:, None]
    np.testing.assert_allclose(found.estimate, moved, rtol=0.05, atol=0.02 * np.abs(moved).max())
    assert estimate_quality(found.estimate, moved, k=2, seed=0, resamples=50).pearson.value > 0.999
