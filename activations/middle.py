"""The residual stream between attention and MLP: which module sees it.

Problem. No module of a block is called `resid_mid`. In a sequential block it is the input of the second norm, or of the
MLP itself where norms stand behind (OLMo 2); in a parallel block there is no such tensor, though `resid_pre + attn_out`
can be computed there all the same and would look like one.

Mechanism. One short prompt is run and watched. `resid_mid` is the first tensor that a module inside the block receives
and that equals the block's input plus the attention output, bit for bit or to rounding. Where the residual addition is
scaled (Granite) there is no attention output to compare with; there it is the tensor whose distance from the block's
input is a multiple of what the out-projection wrote. If nothing receives it, attention's output is set to zero once: a
block whose MLP notices is sequential, and its `resid_mid` is the sum of two tensors that are captured; one whose MLP
does not is parallel and has none.

The prompt is a made-up one. The result belongs to the model, whatever adapter is on, and is found once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from activations.structure import FULL, first, hooks
from activations.watch import Run, plain_forward

if TYPE_CHECKING:
    from activations.model import Model
    from activations.sites import Tap

_FOUND: WeakKeyDictionary[Model, tuple[tuple[Tap, ...], ...]] = WeakKeyDictionary()
_LENGTH = 8


def middles(model: Model) -> tuple[tuple[Tap, ...], ...]:
    """For each layer what carries `resid_mid`: one module's input, two tensors to add, or () in parallel blocks."""
    if model not in _FOUND:
        names: dict[Any, str] = {module: name for name, module in model.hf_model.named_modules()}
        special = set(model.tokenizer.all_special_ids)
        ordinary = [token for token in range(min(model.d_vocab, 4096)) if token not in special] or [0]
        ids = [ordinary[(3 + 7 * column) % len(ordinary)] for column in range(_LENGTH)]
        run = Run(model.hf_model, torch.tensor([ids], device=model.device), names)
        _FOUND[model] = tuple(_middle(model, run, layer) for layer in range(model.n_layers))
    return _FOUND[model]


def _middle(model: Model, run: Run, layer: int) -> tuple[Tap, ...]:
    structure = model.structure
    block, out, attn = structure.blocks[layer], structure.out_projections[layer], structure.attn_out[layer]
    if out is None:
        return ()
    before = run.inputs[block]
    wanted = before + run.outputs[attn] if attn else None
    found = []
    for name in run.order[run.order.index(out) :]:
        value = run.inputs.get(name)
        if value is None or not name.startswith(block + ".") or value.shape != before.shape:
            continue
        if _same(value, wanted) if wanted is not None else _multiple(value - before, run.outputs[out]):
            found.append(name)
    if found:  # several where the MLP reads it without a norm: then the MLP itself and not a projection inside it
        outermost = min(found, key=lambda name: name.count("."))
        return ((outermost.removesuffix(".base_layer"), True),)
    mlp = structure.mlp_out[layer]
    return ((block, True), (attn, False)) if attn and mlp and _notices(model, run, attn, mlp) else ()


def _same(value: Tensor, wanted: Tensor) -> bool:
    bound = 1e-6 * float(wanted.abs().max()) if value.dtype in FULL else 0.0
    return float((value - wanted).abs().max()) <= bound


def _multiple(step: Tensor, written: Tensor) -> bool:
    """Whether ``step`` is ``written`` times a number other than zero."""
    one, two = step.double().flatten(), written.double().flatten()
    factor = torch.dot(one, two) / torch.dot(two, two).clamp(min=1e-30)
    size = float(one.abs().max())
    return size > 0 and float((one - factor * two).abs().max()) <= (1e-4 if step.dtype in FULL else 5e-2) * size


def _notices(model: Model, run: Run, attn: str, mlp: str) -> bool:
    kept: list[Tensor] = []

    def silence(module: Any, args: Any, output: Any) -> Any:
        nothing = torch.zeros_like(first(output))
        return (nothing, *output[1:]) if isinstance(output, (tuple, list)) else nothing

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(first(output).detach().cpu())

    handles = [model.module(attn).register_forward_hook(silence), model.module(mlp).register_forward_hook(keep)]
    with hooks(handles), torch.inference_mode():
        plain_forward(model.hf_model, run.ids)
    return not torch.equal(kept[0], run.outputs[mlp])
