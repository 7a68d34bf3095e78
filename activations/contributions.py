"""Direct logit attribution: each row's readout as a sum over the parts that wrote to the residual stream.

Problem. The readout says what the model leans to, and not who said so. The residual stream is a sum, of the embedding,
each head and each MLP, and what stands between it and the readout is nearly linear. So the readout can be shared out.
"Nearly" is where such tables go wrong: a norm's bias, a second norm behind attention, a softcap or an adapter on the
out-projection that was left out changes every number and none looks odd.

Mechanism. For each row one direction u [d_model] is derived, with

    readout = u . residual + biases + remainders

by going backwards from the readout: through the log-sum-exp over an answer's variants, linear at the row's own weights
of the variants; through the softcap, linear at the row's own logits; through the unembedding; and through the final
norm with its scale frozen at the row's own residual. u is then the gradient of the readout but for the norm's scale.
A head's part is its slice of `z`, through the out-projection (and the norm behind it, where there is one, frozen as
well), times u. `additions` says what a block adds, `frozen` takes directions through modules.

    embed               the first block's input, learned positions included
    L3H2, L3 bias       a head; what the mixer adds whatever the heads say
    L3 mixer            the whole mixer of a layer whose heads cannot be told apart
    L3 mlp, L3 rest     the MLP, experts and all; a third addition (Gemma 4)
    norm bias, unembedding bias
    spelling            log-sum-exp less its linear part: the difference of the entropies over the variants
    softcap             the softcapped logits less their linear part
    rounding            what is missing of the readout that was stored

Everything is arithmetic on stored rows and weights in float64; no forward pass is run. The last entry is the check: the
parts must add up to the readout that the model gave, row by row, or nothing is returned.

Constraints. What a part contributes here is its *direct* effect; what later layers make of it is theirs. Freezing the
norm means that a part that only makes the residual longer is credited with nothing. Rows must be answer rows. The
model must be as it was at capture: same weights, same adapter in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from activations.additions import Addition, additions
from activations.errors import ModelError, StoreError
from activations.frozen import FrozenNorm, call, columns, place, precision, pull
from activations.sites import Where, describe
from activations.store_format import ANSWER_LABEL
from activations.structure import FULL, apply_scale

if TYPE_CHECKING:
    from activations.model import Model
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore

Read = Callable[[str, int], Any]
"""A site and a layer to its rows [row, width], numpy or torch."""
_BLOCK = 1 << 26  # bytes of one float64 array of rows
BOUND, BOUND_HALF = 1e-4, 5e-2
"""Allowed between the parts' sum and the readout, relative to the row's largest part. In float64 throughout 1e-14 to
1e-12 remains, so what is left otherwise is rounding of the forward pass and the store: with float32 weights 1e-7 to 4e-6
(30 layers), stored as float16 6e-4, as bfloat16 5e-3, and with bfloat16 weights 9e-3."""


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a readout. `kind` is embed, head, bias, mixer, mlp, rest, norm_bias, unembedding_bias, spelling,
    softcap or rounding; `layer` and `head` are None where a part has none."""

    kind: str
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """``L3H2``, ``L3 mlp``, ``norm bias``."""
        if self.layer is None:
            return self.kind.replace("_", " ")
        return f"L{self.layer}H{self.head}" if self.head is not None else f"L{self.layer} {self.kind}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Contributions:
    """The parts of each row's readout, in logits; over the components they add up to `readout`.

    `values` [component, row] and `readout` [row] (first label minus second, as stored) are float64; `rows` are the
    store's row numbers. `residual` [row] is what the other parts leave of the readout, which `values` holds too, as its
    last component `rounding`. `gap` is its largest size relative to its row's largest part, at most `bound`.
    """

    components: tuple[Component, ...]
    values: np.ndarray
    readout: np.ndarray
    rows: np.ndarray
    residual: np.ndarray
    gap: float
    bound: float
    method: str = "direct logit attribution, norms frozen at each row's own scale, log-sum-exp and softcap linearised"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)


def required_sites(model: Model) -> tuple[str, ...]:
    """The sites to capture at the answer position, each with its layer (``blocks.3.z``), so that any plan can add them.

    ModelError names the first layer that cannot be taken apart, and why.
    """
    return tuple(site if site == "embed" else f"blocks.{layer}.{site}" for site, layer in _places(model))


def components(model: Model) -> tuple[Component, ...]:
    """The parts of this model's readout, in the order of the forward pass; the same for every adapter."""
    found = [Component("embed")]
    for layer, addition in enumerate(additions(model)):
        if addition.heads:
            found += [Component("head", layer, head) for head in range(addition.heads)]
            found.append(Component("bias", layer))
        else:
            found.append(Component("mixer", layer))
        found += [Component("mlp", layer)] * (addition.mlp is not None) + [Component("rest", layer)] * addition.rest
    ends = ["norm_bias", "unembedding_bias", "spelling", *(["softcap"] if model.structure.softcap else []), "rounding"]
    return tuple(found + [Component(kind) for kind in ends])


def contributions(
    model: Model,
    store: ActivationStore,
    answers: AnswerTokens,
    *,
    rows: Sequence[int] | np.ndarray | None = None,
    bound: float | None = None,
) -> Contributions:
    """Share out the readout of these rows of a store (all its answer rows, if none are named).

    The store must hold the sites of `required_sites` and the readout of the same answers. Rows are worked through in
    blocks, so that memory does not grow with their number, but for the result [component, row]. ModelError if the parts
    of a row miss its readout by more than `bound` times its largest part; the message names the layer where the sum
    first leaves the residual stream that was stored.
    """
    numbers = _answer_rows(store, rows)
    _refuse_others(model, store, answers)
    parts = components(model)
    exact = model.dtype in FULL and store.dtype == "float32"
    bound = (BOUND if exact else BOUND_HALF) if bound is None else bound
    stored = store.readout["logit"][numbers].astype(np.float64)
    readout = stored[:, 0] - stored[:, 1]
    values = np.empty((len(parts), len(numbers)))
    width = max(store.width(*where) for where in _places(model))
    order = np.argsort(np.argsort(store.disk_order)[numbers])  # each block then touches few shards
    gap = 0.0
    for block in np.array_split(order, min(len(order), -(-len(order) * width * 8 // _BLOCK))):
        chosen = numbers[block]
        read = _reader(store, chosen)
        split = _split(model, answers, read)
        values[:-1, block] = split.values.cpu().numpy()
        values[-1, block] = readout[block] - values[:-1, block].sum(axis=0)
        gaps = np.abs(values[-1, block]) / np.abs(values[:-1, block]).max(axis=0)
        if not (gaps <= bound).all():
            worst = int(np.argmax(np.where(np.isnan(gaps), np.inf, gaps)))
            where = _departure(model, store, split, read, worst, bound)
            raise ModelError(
                f"the parts of row {chosen[worst]} of {store.directory} miss its readout by {gaps[worst]:.1e} of the "
                f"largest part, allowed {bound:.0e}; {where}; capture it again with this model, or use ablation"
            )
        gap = max(gap, float(gaps.max()))
    return Contributions(
        components=parts, values=values, readout=readout, rows=numbers, residual=values[-1], gap=gap, bound=bound
    )


def split_rows(model: Model, answers: AnswerTokens, read: Read) -> tuple[Tensor, Tensor]:
    """The same for rows in memory: [component, row] without `rounding`, and the readout [row] of their residual.

    `read` gives the rows [row, width] of each site of `required_sites`; nothing is checked against a stored readout.
    """
    split = _split(model, answers, read)
    return split.values, split.readout


def _places(model: Model) -> list[Where]:
    wanted: set[Where] = {("embed", 0), ("resid_post", model.n_layers - 1)}
    for layer, addition in enumerate(additions(model)):
        for site in addition.sites():
            if site == "resid_pre":
                wanted.add(("resid_post", layer - 1) if layer else ("embed", 0))
            else:
                wanted.add((site, layer))
    return sorted(wanted, key=lambda where: (where[1], where[0] != "embed", where[0]))


def _answer_rows(store: ActivationStore, rows: Sequence[int] | np.ndarray | None) -> np.ndarray:
    if rows is None:
        return store.select(label=ANSWER_LABEL)
    numbers = store.row_numbers(rows)
    index: dict[str, list[Any]] = store.manifest["rows"]
    if not len(numbers):
        raise StoreError("no rows to split; name at least one, or leave rows out for all answer rows")
    for row in numbers.tolist():
        if index["position"][row] != index["n_tokens"][row] - 1:
            raise StoreError(
                f"row {row} of {store.directory} is at {index['label'][row]!r} and not at the answer, and a readout is "
                f"of the answer; choose rows with store.select(label={ANSWER_LABEL!r})"
            )
    return numbers


def _refuse_others(model: Model, store: ActivationStore, answers: AnswerTokens) -> None:
    """Refuse a store of another adapter or other answers, or one that lacks a site."""
    content = store.manifest["content"]
    adapter = {} if model.active is None else model.identity["adapters"][model.active]
    if any(content["adapter"][key] != adapter.get(key) for key in ("weights", "config")):
        captured = store.manifest["notes"].get("adapter")
        then, now = (f"adapter {name!r}" if name else "the base" for name in (captured, model.active))
        raise ModelError(
            f"{store.directory} was captured with {then} and {now} is in use now; call this inside "
            f"`with model.use({captured!r})`"
        )
    if len(answers.labels) < 2 or content["answers"] != [list(ids) for ids in answers.ids]:
        raise StoreError(
            f"{store.directory} holds the readout of {content['labels']} with tokens {content['answers']}, and "
            f"{list(answers.labels)} with {[list(ids) for ids in answers.ids]} were given; give two labels, the same"
        )
    held = {(site, layer) for site, layers in store.layers.items() for layer in layers}
    lacking = [
        where
        for where in _places(model)
        if where not in held and not (where[0] == "embed" and ("resid_pre", 0) in held)
    ]
    if lacking:
        raise StoreError(
            f"{store.directory} lacks {describe(lacking)}, which the parts of a readout are made from; capture into "
            "another directory with the sites of required_sites(model)"
        )


def _reader(store: ActivationStore, rows: np.ndarray) -> Read:
    return lambda site, layer: store.read(site, layer, rows)


@dataclass(frozen=True, slots=True)
class _Split:
    """Parts [component, row] without the rounding, the readout of the residual [row], and the direction u [row, d]."""

    values: Tensor
    readout: Tensor
    direction: Tensor


def _split(model: Model, answers: AnswerTokens, read: Read) -> _Split:
    end, ends = _ends(model, answers, read)
    direction, readout = end
    parts: list[Tensor] = []
    gains = _gains(additions(model))
    for layer, (addition, gain) in enumerate(zip(additions(model), gains[1:], strict=True)):
        own = _layer(model, layer, addition, direction, read)
        parts += [part.to(direction.device) * gain for part in own]
    embed = (_rows(read("embed", 0), direction) * direction).sum(-1) * gains[0]
    return _Split(torch.stack([embed, *parts, *ends]), readout, direction)


def _gains(found: Sequence[Addition]) -> list[float]:
    """What the last block's output holds of the embedding, and of each block's output: the product of later `keep`."""
    gains = [1.0]
    for addition in reversed(found):
        gains.append(gains[-1] * addition.keep)
    return gains[::-1]


def _rows(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like.device, like.dtype)


def _ends(model: Model, answers: AnswerTokens, read: Read) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The direction u [row, d] and the readout [row] of the last residual, and the parts behind the residual stream."""
    structure = model.structure
    norm, head = FrozenNorm.of(model, structure.final_norm), model.module(structure.head)
    device = place(head, model.device)
    ids = [token for variants in answers.ids[:2] for token in variants]
    tokens, biases = columns(head, model.d_model, ids, device)
    stream = torch.as_tensor(read("resid_post", model.n_layers - 1)).to(norm.weight.device, precision(device))
    normed, scale = norm.at(stream)
    raw = normed.to(device) @ tokens.T + biases  # [row, token]
    capped = apply_scale(raw, structure.logit_scale, structure.softcap)
    slope = torch.full_like(raw, structure.logit_scale)
    if structure.softcap is not None:
        slope = slope * (1 - (capped / structure.softcap) ** 2)
    sides = capped.split([len(variants) for variants in answers.ids[:2]], dim=-1)
    shares = torch.cat([sides[0].softmax(-1), -sides[1].softmax(-1)], dim=-1)
    readout = sides[0].logsumexp(-1) - sides[1].logsumexp(-1)
    weights = shares * slope
    behind = (weights @ tokens).to(norm.weight.device)  # the direction behind the norm
    norm_bias, bias = behind @ norm.bias, (weights * biases).sum(-1)
    linear = (shares * capped).sum(-1)
    parts = [norm_bias.to(device), bias, readout - linear]
    if structure.softcap is not None:
        parts.append(linear - (weights * raw).sum(-1))
    return (norm.pull(behind, scale).to(device), readout), parts


def _layer(model: Model, layer: int, addition: Addition, direction: Tensor, read: Read) -> list[Tensor]:
    """The parts of one block [row], in the order of `components`, as its own output holds them."""

    def at(site: str) -> Tensor:
        if site == "resid_pre":
            site, n = ("resid_post", layer - 1) if layer else ("embed", 0)
            return _rows(read(site, n), direction)
        return _rows(read(site, layer), direction)

    def along(value: Tensor) -> Tensor:
        return (value * direction).sum(-1)

    def mixer() -> Tensor:
        return at("resid_mid") - at("resid_pre") if addition.mixer == "resid_mid" else at("attn_out")

    parts = _heads(model, layer, addition, direction, read) if addition.heads else [along(mixer())]
    if addition.mlp is not None:
        mlp = at("resid_post") - at("resid_mid") if addition.mlp == "resid_mid" else at("mlp_out")
        parts.append(along(mlp))
    parts = [addition.keep * part for part in parts]
    if addition.rest:
        parts.append(along(at("resid_post") - addition.keep * (at("resid_pre") + mixer() + mlp)))
    return parts


def _heads(model: Model, layer: int, addition: Addition, direction: Tensor, read: Read) -> list[Tensor]:
    module = model.module(addition.out)
    device = place(module, model.device)
    z = torch.as_tensor(read("z", layer)).to(device, direction.dtype)
    before, bias = direction.to(device), torch.zeros(len(z), device=device, dtype=direction.dtype)
    if addition.post is not None:
        norm = FrozenNorm.of(model, addition.post)
        with torch.no_grad():
            _, scale = norm.at(call(module, z).to(norm.weight.device))
        there = direction.to(norm.weight.device)
        bias = (there @ norm.bias).to(device)
        before = norm.pull(there, scale).to(device)
    weights, own = pull(module, z, before)
    heads = (z * weights).unflatten(-1, (int(addition.heads or 1), -1)).sum(-1) * addition.scale
    return [*heads.unbind(-1), bias + addition.scale * (before @ own)]


def _departure(model: Model, store: ActivationStore, split: _Split, read: Read, row: int, bound: float) -> str:
    """Where the parts' running sum of a row first leaves the stored residual stream."""
    held = store.layers.get("resid_post", ())
    parts, gains = components(model), _gains(additions(model))
    values, direction = split.values[:, row].cpu(), split.direction[row].cpu()
    size = float(values.abs().max())
    for layer in held:
        made = sum(
            float(v)
            for v, part in zip(values, parts, strict=False)
            if part.kind == "embed" or (part.layer is not None and part.layer <= layer)
        )
        stream = torch.as_tensor(read("resid_post", layer)[row]).to(direction.dtype)
        if not abs(made - gains[layer + 1] * float(stream @ direction)) <= bound * size:
            return f"their sum first leaves the residual stream at layer {layer}" + (
                ""
                if len(held) == model.n_layers
                else f" among the stored ones ({describe([('resid_post', n) for n in held])})"
            )
    return "their sum follows the residual stream, and its readout is not the stored one: this is another model"
