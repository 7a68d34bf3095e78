"""Scores that are NaN never come back as numbers of a sweep.

Gemma 2's eager attention takes its softmax in float32. A float64 model's mask holds float64's lowest number, which is minus
infinity in float32: the row of a pad, all of it masked, becomes NaN, and from there every token that multiplies it by 0.
Unpadded prompts have no such row.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import PatchError, full_forward, head_cells, head_map, sweep
from tests.patching.by_hand import HandEdit, run
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gemma2


@pytest.fixture(scope="module")
def gemma():
    hf_model, tokenizer = tiny_gemma2()
    model = from_modules(hf_model.to(torch.float64), tokenizer)
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS), head_cells(head_map(model))


@pytest.mark.parametrize("checks", [0, 20])
def test_padding_that_gives_nan_is_refused_with_the_way_out(gemma, checks):
    model, prompts, answers, cells = gemma
    for swept in (sweep, full_forward):
        with pytest.raises(PatchError, match=r"scores that are NaN.*softmax in float32.*set batch_tokens=1") as caught:
            swept(model, prompts, cells, answers=answers, seed=0, check_cells=checks)
        assert "\n" not in str(caught.value)


def test_without_padding_the_cheap_engine_is_used_and_right(gemma):
    model, prompts, answers, cells = gemma
    result = sweep(model, prompts, cells, answers=answers, seed=0, batch_tokens=1)
    assert result.engine == "prefix" and result.check_max_abs < 1e-5
    for item, prompt in enumerate(prompts):
        for column, cell in enumerate(cells):
            head = cell.edits[0].head * 16, cell.edits[0].head * 16 + 16
            logits = run(
                model.hf_model, "gemma2", prompt.ids, [HandEdit("z", cell.edits[0].layer, [-1], torch.zeros_like, head)]
            )
            expected = [float(torch.logsumexp(logits[list(ids)], 0)) for ids in answers.ids]
            np.testing.assert_allclose(result.logit[item, column], expected, atol=1e-5)


def test_equal_lengths_need_no_padding(gemma):
    model, prompts, answers, cells = gemma
    result = sweep(model, [prompts[0], prompts[0]], cells, answers=answers, seed=0)
    assert result.engine == "prefix" and np.isfinite(result.logit).all()
