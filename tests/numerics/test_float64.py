"""The identities of this package in float64, where rounding leaves 1e-12 and a real mistake leaves what it is.

A float32 difference may be called rounding only because these pass. Three structures are not here: linear attention and
eager softmax (hybrid, Gemma 2) compute in float32 inside whatever the weights are, and the grouped expert product of
transformers takes no float64.
"""

from __future__ import annotations

import pytest
import torch

from activations import answer_tokens, from_modules, read
from activations.checks import run
from activations.readout import from_logits
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES

EXACT = ["llama", "qwen3", "gpt2", "neox", "granite", "cohere"]


@pytest.mark.parametrize("name", EXACT)
def test_padding_and_lens_are_exact(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model.double(), tokenizer)
    prompts = model.encode(MESSAGES)
    batch, singles = run(model, prompts), [run(model, [prompt]) for prompt in prompts]
    logits = torch.cat([single.logits for single in singles])
    residuals = torch.cat([single.residuals for single in singles], dim=1)
    assert (batch.logits - logits).abs().max() < 1e-12
    assert (batch.residuals - residuals).abs().max() < 1e-12
    assert (model.logits(residuals[-1]) - logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", EXACT)
def test_the_readout_is_exact(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model.double(), tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    with torch.inference_mode():
        logits = torch.cat([hf_model(torch.tensor([prompt.ids])).logits[:, -1] for prompt in prompts])
    wanted = torch.stack([logits[:, list(ids)].logsumexp(-1) for ids in answers.ids], dim=-1)
    got = read(model, prompts, answers)
    assert got.logit.dtype == torch.float64
    assert (got.logit - wanted).abs().max() < 1e-12
    assert (got.logsumexp - logits.logsumexp(-1)).abs().max() < 1e-12
    assert torch.equal(got.top, from_logits(logits, answers).top)
