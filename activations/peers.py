"""Agreement with other interpretability libraries on the same weights.

TransformerLens and nnsight run the same network by their own machinery. If logits and residual streams agree with ours
to float32 rounding, neither the hooks nor the position handling here can be at fault. Each library gets a deep copy of
the network and the tokenizer, because both change what they are given (attention implementation, padding side).

The base is compared. TransformerLens splits joint query-key-value weights (GPT-2) by itself and leaves out an adapter
on them, so with an adapter in use its numbers are not a reference there; nnsight's are.

Prompts are run one by one and unpadded in the other library, so that the comparison covers our padding as well.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations.checks import Check, Pass, run
from activations.errors import ModelError
from activations.structure import FULL

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt

BOUND = 5e-5
"""Relative to a row's largest entry where that is above 1, as in :mod:`activations.checks`."""


def agreement(model: Model, prompts: Sequence[Prompt], peer: str) -> list[Check]:
    """Two rows, logits and residuals, for ``transformer_lens`` or ``nnsight``, on the model as it is now."""
    if importlib.util.find_spec(peer) is None:
        raise ModelError(f"library {peer!r} is not installed; run: pip install {peer.replace('_', '-')}")
    theirs = {"transformer_lens": by_transformer_lens, "nnsight": by_nnsight}[peer](model, prompts)
    ours = run(model, prompts)
    bound = BOUND if model.dtype in FULL else 5e-2
    rows = []
    for name, one, two in (("logits", ours.logits, theirs.logits), ("residuals", ours.residuals, theirs.residuals)):
        gap = (one.float() - two.float()).abs().amax(-1)
        value = float((gap / two.float().abs().amax(-1).clamp(min=1.0)).max())
        rows.append(Check(f"hf = {peer}, {name}", value, bound, value <= bound, f"{len(prompts)} prompts"))
    return rows


def by_transformer_lens(model: Model, prompts: Sequence[Prompt]) -> Pass:
    """The same numbers from a TransformerBridge."""
    from transformer_lens.model_bridge import TransformerBridge

    network = copy.deepcopy(model.hf_model)
    network.config.architectures = network.config.architectures or [type(network).__name__]
    with tempfile.TemporaryDirectory() as folder:  # the bridge reads its tokenizer again, from a folder or the hub
        model.tokenizer.save_pretrained(folder)
        tokenizer = type(model.tokenizer).from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            model.name, hf_model=network, tokenizer=tokenizer, dtype=model.dtype, device=str(model.device)
        )
    logits, residuals = [], []
    for prompt in prompts:
        kept: list[Tensor] = []

        def keep(value: Tensor, hook: Any, kept: list[Tensor] = kept) -> None:
            kept.append(value[0, -1].float().clone())

        points = [("blocks.0.hook_resid_pre", keep)]
        points += [(f"blocks.{layer}.hook_resid_post", keep) for layer in range(model.n_layers)]
        ids = torch.tensor([prompt.ids], device=model.device)
        with torch.inference_mode():
            out = bridge.run_with_hooks(ids, attention_mask=torch.ones_like(ids), fwd_hooks=points)
        logits.append(out[0, -1].float())
        residuals.append(torch.stack(kept))
    return Pass(torch.stack(logits), torch.stack(residuals, dim=1))


def by_nnsight(model: Model, prompts: Sequence[Prompt]) -> Pass:
    """The same numbers from nnsight traces."""
    import nnsight
    from nnsight.modeling.transformers import TransformersModel

    network, tokenizer = copy.deepcopy(model.hf_model), copy.deepcopy(model.tokenizer)
    traced = TransformersModel(network, tokenizer=tokenizer)
    blocks = [_envoy(traced, name) for name in model.structure.blocks]
    logits, residuals = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad(), traced.trace(inputs, use_cache=False):
            start = blocks[0].input[:, -1].clone().save()
            ends = nnsight.save([block.output[:, -1].clone() for block in blocks])
            out = traced.output.logits[:, -1].clone().save()
        logits.append(out[0].float())
        residuals.append(torch.stack([start[0].float(), *[end[0].float() for end in ends]]))
    return Pass(torch.stack(logits), torch.stack(residuals, dim=1))


def _envoy(traced: Any, name: str) -> Any:
    place = traced
    for part in name.split("."):
        place = place[int(part)] if part.isdigit() else getattr(place, part)
    return place
