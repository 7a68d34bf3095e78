"""What a block adds to the residual stream, and in which arrangement: the recipe by which its output is taken apart.

Problem. A decomposition needs ``output = input + attention + MLP`` and each head's share of the attention. In many
blocks this is not the whole story: a second norm stands behind the out-projection (Gemma 2, OLMo 2), the additions are
multiplied by a constant (Granite), a third part is added and the sum multiplied (Gemma 4). A decomposition that ignores
this still gives numbers.

Mechanism. One short prompt is run and watched, and each arrangement is accepted only where it reproduces the block's
output. In general it is

    output = keep * (input + scale * post(out-projection) + MLP) + rest

with `post` a norm or nothing. What a site carries is read from there; what none carries is the difference of two sites
that do. A layer in which no arrangement fits is refused with the reason.

The result belongs to the model, whatever adapter is on, and is found once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from activations.checks import probe_prompts
from activations.errors import ModelError
from activations.sites import taps
from activations.structure import FULL
from activations.watch import Run

if TYPE_CHECKING:
    from activations.model import Model

_FOUND: WeakKeyDictionary[Model, tuple[Addition, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """The arrangement of one block; sites name where a part is read."""

    out: str
    """The mixer's out-projection."""
    heads: int | None
    """Heads that the mixer's part is cut into; None: it stays one component."""
    post: str | None = None
    """The norm between out-projection and addition."""
    scale: float = 1.0
    """What the out-projection's output is multiplied by before it is added."""
    mixer: str = "attn_out"
    """``attn_out``, or ``resid_mid``: the mixer's part is what lies between it and the block's input."""
    mlp: str | None = "mlp_out"
    """``mlp_out``, or ``resid_mid``: the MLP's part is what lies between it and the output; None: there is no MLP."""
    keep: float = 1.0
    """What the block multiplies its whole sum by."""
    rest: bool = False
    """Whether a third part is added: what is left of the output."""

    def sites(self) -> tuple[str, ...]:
        """The sites of this layer, and ``resid_pre`` of it, that taking it apart needs."""
        found = {"z" if self.heads else self.mixer, *([self.mlp] if self.mlp else ())}
        if "resid_mid" in found:
            found |= {"resid_pre"} if self.mixer == "resid_mid" and not self.heads else set()
            found |= {"resid_post"} if self.mlp == "resid_mid" else set()
        if self.rest:
            found |= {"resid_pre", "resid_post", self.mixer}
        return tuple(sorted(found))


def additions(model: Model) -> tuple[Addition, ...]:
    """The arrangement of each layer; ModelError names the first one that cannot be taken apart, and why."""
    if model not in _FOUND:
        names: dict[Any, str] = {module: name for name, module in model.hf_model.named_modules()}
        run = Run(model.hf_model, torch.tensor([probe_prompts(model)[1].ids], device=model.device), names)
        _FOUND[model] = tuple(_addition(model, run, layer) for layer in range(model.n_layers))
    return _FOUND[model]


def _addition(model: Model, run: Run, layer: int) -> Addition:
    structure = model.structure
    block, out, heads = structure.blocks[layer], structure.out_projections[layer], structure.heads[layer]
    attn, mlp, unsplit = structure.attn_out[layer], structure.mlp_out[layer], structure.unsplit[layer]
    if out is None:
        raise _refusal(model, layer, unsplit)
    before, after = run.inputs[block].double(), run.outputs[block].double()
    if attn is None:
        middle = _middle(model, run, layer)
        scale = None if middle is None else _factor(middle - before, run.outputs[out])
        if middle is None or scale is None or not any(_steps(run, block, after - middle)):
            raise _refusal(model, layer, unsplit)
        return Addition(out=out, heads=heads, scale=scale, mixer="resid_mid", mlp="resid_mid")
    split: dict[str, Any] = {"out": out, **_link(run, out, attn, heads)}
    if unsplit is None:
        return Addition(**split)
    total = before + run.outputs[attn].double()
    if mlp is None:
        if _close(total, after, run):
            return Addition(**split, mlp=None)
        if taps(model, ("resid_mid", layer)) and any(_steps(run, block, after - total)):
            return Addition(**split, mlp="resid_mid")
        raise _refusal(model, layer, unsplit)
    keep = _kept(run, block, total + run.outputs[mlp].double(), after)
    if keep is None:
        raise _refusal(model, layer, unsplit)
    return Addition(**split, keep=keep, rest=True)


def _refusal(model: Model, layer: int, unsplit: str | None) -> ModelError:
    return ModelError(
        f"layer {layer} of {model.name!r} cannot be taken apart into heads and MLP: {unsplit or 'no arrangement fits'}; "
        "use the logit lens, or ablation, for this model"
    )


def _link(run: Run, out: str, attn: str, heads: int | None) -> dict[str, Any]:
    """How the out-projection's output becomes what is added."""
    made, added = run.outputs[out], run.outputs[attn]
    if heads is None or made.shape != added.shape:
        return {"heads": None}
    if torch.equal(added, made):
        return {"heads": heads}
    read = run.inputs.get(attn)
    if read is not None and torch.equal(read, made):
        return {"heads": heads, "post": attn}
    scale = _factor(added, made)
    return {"heads": None} if scale is None else {"heads": heads, "scale": scale}


def _middle(model: Model, run: Run, layer: int) -> Tensor | None:
    """The tensor that ``resid_mid`` names, where one module receives it."""
    found = taps(model, ("resid_mid", layer))
    return run.inputs[found[0][0]].double() if len(found) == 1 else None


def _same_shape(run: Run, block: str, like: Tensor) -> Iterator[Tensor]:
    for name in run.order:
        value = run.outputs.get(name)
        if value is None or not name.startswith(block + ".") or value.shape[-1:] != like.shape[-1:]:
            continue
        if value.numel() == like.numel():  # some blocks lay the tokens of all prompts end to end
            yield value.reshape(like.shape)


def _steps(run: Run, block: str, step: Tensor) -> Iterator[bool]:
    """Whether each tensor in the block is what was added, up to a factor."""
    return (_factor(step, value) is not None for value in _same_shape(run, block, step))


def _kept(run: Run, block: str, total: Tensor, after: Tensor) -> float | None:
    """The factor in ``after = factor * (total + part)``, with the module's output that fits best as the part."""
    best: tuple[float, float] | None = None
    for part in _same_shape(run, block, total):
        given = total + part.double()
        factor, gap = _fit(after, given)
        if gap <= _room(part) and (best is None or gap < best[0]):
            best = gap, factor
    return None if best is None else best[1]


def _factor(step: Tensor, value: Tensor) -> float | None:
    """The number that ``value`` was multiplied by to give ``step``; 1 exactly where they are equal."""
    factor, gap = _fit(step.double(), value.double())
    if gap > _room(value):
        return None
    return 1.0 if torch.equal(step.double(), value.double()) else factor


def _fit(wanted: Tensor, given: Tensor) -> tuple[float, float]:
    one, two = wanted.flatten(), given.flatten()
    factor = float(torch.dot(one, two) / torch.dot(two, two).clamp(min=1e-30))
    size = float(one.abs().max())
    return factor, float((one - factor * two).abs().max()) / size if size > 0 and factor else float("inf")


def _room(value: Tensor) -> float:
    return 1e-4 if value.dtype in FULL else 5e-2


def _close(made: Tensor, wanted: Tensor, run: Run) -> bool:
    bound = 1e-5 if run.logits.dtype in FULL else 5e-2
    return float((made - wanted).abs().max()) <= bound * float(wanted.abs().max())
