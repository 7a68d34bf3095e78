"""The identities of this package in float64, where rounding leaves 1e-12 and a real mistake leaves what it is.

A float32 difference may be called rounding only because these pass, on every structure of the matrix. Many networks
compute parts in float32 whatever their weights are: norms, written-out softmax, the state of linear attention. A model
of float64 weights would hide a mistake behind that. So the passes here run under `Wide`, which turns each request for
float32 into one for float64; the grouped product of experts takes no float64 and is written out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from activations import answer_tokens, from_modules, read
from activations.checks import heads_by_weights, run, self_checks, sums
from activations.model import Model
from activations.readout import from_logits
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter


class Wide(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **kwargs)


def _wide(name: str, folder: Path | None = None) -> Model:
    hf_model, tokenizer = BUILDERS[name]()
    if any(parameter.ndim == 3 for parameter in hf_model.parameters()):
        hf_model.set_experts_implementation("eager")
    adapters = [] if folder is None else [str(tiny_adapter(hf_model, folder))]
    return from_modules(hf_model.double(), tokenizer, adapters=adapters)


QUICK = ("llama", "gpt2", "hybrid", "gemma2", "gpt_oss", "falcon")
ADAPTED = [pytest.param(n, True, marks=() if n in QUICK else pytest.mark.slow, id=f"{n}-adapter") for n in BUILDERS]


@pytest.mark.parametrize(("name", "adapted"), [*((name, False) for name in BUILDERS), *ADAPTED])
def test_padding_lens_heads_and_sums_are_exact(name: str, adapted: bool, tmp_path: Path) -> None:
    with Wide():
        model = _wide(name, tmp_path / "one" if adapted else None)
        model.hf_model.double()  # the adapter's layers too
        prompts = model.encode(MESSAGES)
        with model.use("one" if adapted else None):
            rows = [*self_checks(model, prompts), *sums(model, prompts)]
            if not adapted:  # an adapter on the out-projection has columns of its own
                rows.append(heads_by_weights(model, prompts))
            batch = run(model, prompts)
    assert batch.logits.dtype == batch.residuals.dtype == torch.float64
    assert {row.name: row.value for row in rows if row.value is None or row.value > 1e-12} == {}


@pytest.mark.parametrize("name", QUICK)
def test_the_readout_is_exact(name: str) -> None:
    with Wide():
        model = _wide(name)
        prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
        with torch.inference_mode():
            logits = torch.cat([model.hf_model(torch.tensor([prompt.ids])).logits[:, -1] for prompt in prompts])
        wanted = torch.stack([logits[:, list(ids)].logsumexp(-1) for ids in answers.ids], dim=-1)
        got = read(model, prompts, answers)
    assert got.logit.dtype == torch.float64
    assert (got.logit - wanted).abs().max() < 1e-12
    assert (got.logsumexp - logits.logsumexp(-1)).abs().max() < 1e-12
    assert torch.equal(got.top, from_logits(logits, answers).top)
