"""Numerical checks of one loaded model, live, on the prompts that will be used.

Most mistakes in this field give plausible numbers: a padded batch that attends to its pads, a lens through the wrong
norm, heads cut behind the projection that mixes them, an adapter that never landed. Each has an identity that holds
exactly or to rounding when all is well, and breaks by orders of magnitude when not. ``check`` evaluates them and
returns a table; ``self_test`` is the short form run at load, which refuses the model.

Bounds are stated beside each value. Differences are taken relative to the largest entry of their row where that entry
is above 1: logits of 30 and residual entries in the thousands cannot agree to 5e-5 in float32, whose own spacing there
is coarser. Half precision gets one loose bound, 5e-2, because its rounding depends on the batch shape. The tests run
the same identities in float64, where what remains of a true identity is 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations.batching import forward_arguments, pad
from activations.errors import ModelError
from activations.prompts import Prompt
from activations.structure import FULL, first, hidden_argument, hooks

if TYPE_CHECKING:
    from activations.model import Model

_HEAD_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One identity: the largest deviation found, the deviation allowed, and what was compared."""

    name: str
    value: float | None
    """None where a library cannot be compared; the note then says why."""
    bound: float
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: logits ``[row, vocabulary]`` and residuals ``[layer + 1, row, d]`` at the answer position."""

    logits: Tensor
    residuals: Tensor
    """Entry 0 is the first block's input, entry l + 1 the output of block l."""


def check(model: Model, prompts: Sequence[Prompt], *, backends: Sequence[str] = ()) -> list[Check]:
    """All identities that apply to this model; ``backends`` adds agreement with other libraries, by name.

    Adapters are checked too, each with its own agreement rows.
    """
    from activations.backends import backend
    from activations.backends.agreement import agreement

    for name in backends:
        backend(name)  # an unknown or missing library is named before anything runs
    if not prompts:
        raise ModelError("no prompts to check with; give two or more, of different lengths")
    prompts = list(prompts)[:8]
    rows = [*self_checks(model, prompts)]
    with model.use(None):
        rows += [heads_by_weights(model, prompts), *sums(model, prompts)]
    rows += [adapter_restores(model, prompts, name) for name in model.adapter_names]
    for adapter in (None, *model.adapter_names) if backends else ():
        with model.use(adapter):
            for name in backends:
                rows += agreement(model, prompts, name, f", {adapter}" if adapter else "")
    return rows


def self_test(model: Model) -> None:
    """Refuse a model whose basic identities fail; runs a few short made-up prompts."""
    for row in self_checks(model, probe_prompts(model)):
        if not row.ok and row.value is not None:
            raise ModelError(
                f"model {model.name!r} fails its self-test '{row.name}': {row.value:.1e}, allowed {row.bound:.0e}; try "
                "dtype=float32 or another device, or pass verify=False to look into it"
            )


def self_checks(model: Model, prompts: Sequence[Prompt]) -> Iterable[Check]:
    """Padding, lens and hooks, on the model as it is now."""
    batch = run(model, prompts)
    singles = [run(model, [prompt]) for prompt in prompts]
    logits = torch.cat([single.logits for single in singles])
    residuals = torch.cat([single.residuals for single in singles], dim=1)
    lengths = sorted({len(prompt.ids) for prompt in prompts})
    note = f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens"
    yield _row("padded = single, logits", _relative(batch.logits, logits, 1.0), _bound(model, 5e-5), note)
    yield _row(
        "padded = single, residuals", _relative(batch.residuals, residuals, 1.0), _bound(model, 5e-5), "all layers"
    )
    lens = model.logits(residuals[-1])
    yield _row("lens at the last layer = logits", _relative(lens, logits), _bound(model, 1e-5), "relative")
    yield _row(
        "capture hooks on = off", _gap(batch.logits, run(model, prompts, hooked=False).logits), 0.0, "bit for bit"
    )


def heads_by_weights(model: Model, prompts: Sequence[Prompt]) -> Check:
    """Zeroing a head at the out-projection's input equals zeroing its weight columns, which are then restored."""
    structure = model.structure
    layers = [layer for layer in range(model.n_layers) if structure.heads[layer]]
    if not layers:
        return _row("head zeroed = its weight columns zeroed", 0.0, 1e-6, "no layer has a head map")
    chosen = sorted({layers[round(i * (len(layers) - 1) / (_HEAD_LAYERS - 1))] for i in range(_HEAD_LAYERS)})
    worst, least = 0.0, float("inf")
    plain = run(model, prompts).logits
    for layer in chosen:
        name, width = structure.out_projections[layer], structure.d_head[layer]
        module = model.module(str(name))
        base: Any = getattr(module, "base_layer", module)
        if width is None or not base.weight.is_floating_point():
            continue
        for head in sorted({0, (structure.heads[layer] or 1) - 1}):
            cut = slice(head * width, (head + 1) * width)
            with hooks([module.register_forward_pre_hook(_zero(cut))]):
                by_hook = run(model, prompts).logits
            columns = base.weight.data[cut] if type(base).__name__ == "Conv1D" else base.weight.data[:, cut]
            kept = columns.clone()
            try:
                columns.zero_()
                by_weight = run(model, prompts).logits
            finally:
                columns.copy_(kept)
            worst = max(worst, _gap(by_hook, by_weight))
            least = min(least, _gap(by_hook, plain))
    restored = _gap(plain, run(model, prompts).logits)
    state = "exactly" if restored == 0 else "NOT exactly"
    note = f"layers {chosen}; smallest effect {least:.1e}; weights restored {state}"
    bound = _bound(model, 1e-6)
    ok = worst <= bound and restored == 0.0 and least > 0
    return Check("head zeroed = its weight columns zeroed", worst, bound, ok, note)


def sums(model: Model, prompts: Sequence[Prompt]) -> list[Check]:
    """What attention and MLP add, added up: to the residual between them, and to that after the block."""
    from activations.backends import backend
    from activations.sites import taps

    structure = model.structure
    middles = [i for i in range(model.n_layers) if structure.attn_out[i] and taps(model, ("resid_mid", i))]
    whole = [i for i in range(model.n_layers) if structure.unsplit[i] is None]
    places = [(site, i) for i in middles for site in ("resid_pre", "attn_out", "resid_mid")]
    places += [(site, i) for i in whole for site in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
    with backend("hf").open(model) as session:
        kept = session.run(prompts, places).activations if places else {}

    def gap(layer: int, parts: Sequence[str], end: str) -> float:
        # in the model's own precision and order, so that half precision rounds as the model does
        made, wanted = kept["resid_pre", layer], kept[end, layer]
        size = max(float(made.abs().max()), float(wanted.abs().max()))
        for part in parts:
            made = made + kept[part, layer].to(made.device)
        return _gap(made, wanted.to(made.device)) / size

    reason = next((why for why in structure.unsplit if why), "")
    rows = []
    for name, layers, parts, end in (
        ("residual + attention = residual between", middles, ("attn_out",), "resid_mid"),
        ("residual + attention + MLP = next residual", whole, ("attn_out", "mlp_out"), "resid_post"),
    ):
        worst = max((gap(layer, parts, end) for layer in layers), default=0.0)
        note = f"relative; {len(layers)} of {model.n_layers} layers"
        if end == "resid_post" and reason:
            note += f": {reason}"
        elif end == "resid_mid" and not layers:
            note += ": parallel blocks or scaled additions"
        rows.append(_row(name, worst, _bound(model, 1e-5), note))
    return rows


def adapter_restores(model: Model, prompts: Sequence[Prompt], name: str) -> Check:
    """The base is the same, bit for bit, before an adapter is switched on and after it is switched off again."""
    with model.use(None):
        before = run(model, prompts).logits
        with model.use(name):
            during = run(model, prompts).logits
        after = run(model, prompts).logits
    effect = _gap(before, during)
    gap = _gap(before, after)
    return Check(
        f"base before = after adapter {name}", gap, 0.0, gap == 0.0 and effect > 0, f"its effect: {effect:.1e}"
    )


@torch.inference_mode()
def run(model: Model, prompts: Sequence[Prompt], *, hooked: bool = True) -> Pass:
    """One padded batch through the model as it is now."""
    kept: list[Tensor] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        kept.append(hidden_argument(args, kwargs)[:, -1].clone())

    def after(module: Any, args: Any, output: Any) -> None:
        kept.append(first(output)[:, -1].clone())

    handles: list[Any] = []
    padded = pad(prompts, model.device, model.pad_id)
    with hooks(handles):
        if hooked:
            blocks = [model.module(name) for name in model.structure.blocks]
            handles.append(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
            handles.extend(block.register_forward_hook(after) for block in blocks)
        logits = model.hf_model(**forward_arguments(model.hf_model, padded, keep=1)).logits[:, -1]
    place = logits.device
    residuals = torch.stack([entry.to(place) for entry in kept]) if kept else torch.empty(0, device=place)
    return Pass(logits, residuals)


def probe_prompts(model: Model) -> list[Prompt]:
    """Three made-up prompts of different lengths from ordinary token ids, for models whose words we do not know."""
    special = set(model.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(model.d_vocab, 4096)) if token not in special] or [0]
    return [
        Prompt(tuple(ordinary[(13 * index + 5 * length) % len(ordinary)] for index in range(length)), "")
        for length in (4, 9, 16)
    ]


def _zero(cut: slice) -> Callable[..., Any]:
    def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        value = args[0].clone()
        value[..., cut] = 0
        return (value, *args[1:])

    return before


def _gap(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).abs().max())


def _relative(one: Tensor, two: Tensor, least: float = 1e-12) -> float:
    """Largest difference of a row over that row's largest entry, or over ``least`` if that is larger."""
    gap = (one.double() - two.double()).abs().amax(-1)
    return float((gap / two.double().abs().amax(-1).clamp(min=least)).max())


def _bound(model: Model, full: float) -> float:
    return full if model.dtype in FULL else 5e-2


def _row(name: str, value: float, bound: float, note: str = "") -> Check:
    return Check(name, value, bound, value <= bound, note)
