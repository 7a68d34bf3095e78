"""Direct-path patching: what a head does to the logits by itself, with everything behind it held as it was.

Problem. Patching a head moves the readout by two ways: what the head writes is read by the unembedding, and it is read by
later layers, which then write something else. A head that looks causal may only feed the one that is. Path patching
separates the two, and is usually run as several forward passes with most of the network frozen by hooks.

Mechanism. Between a head and the logits along the direct path there is only the head's out-projection, the norm behind it
where the model has one, the residual stream, the final norm and the unembedding. With all later blocks (and this block's
MLP) held at what they wrote, the last residual is the old one plus the change of what the head's mixer adds. So no pass is
run: ``z`` and the last residual of the answer position, as stored, are enough, and the arithmetic is exact (float64).

Two variants answer two questions. ``difference`` recomputes the norms on the changed rows: what the model would say.
``frozen`` keeps each norm's scale at the recipient's own: the part that adds up over heads, as direct logit attribution
counts it. They part where a head makes the residual much longer or shorter.

The indirect part of a head is the exact sweep's effect less the direct one.

Constraints. Replacements of ``z`` at the answer position only. A layer whose block cannot be taken apart (see
``activations.additions``) has no direct path that could be named, and is refused. Rows must come from the model as it is
now: same weights, same adapter in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from activations.additions import Addition, additions
from activations.frozen import FrozenNorm, call, columns, place, precision
from activations.readout import label_scores
from activations.structure import apply_scale
from patching.donors import Donor, by_layer, check_donors_fit
from patching.edits import ANSWER, ZERO, Cell, Edit, PatchError, check_cells_fit
from patching.studies_capture import donor_from_run

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.donors import Vectors

_ROWS = 4096
"""Rows that a module is called with at one time."""


@dataclass(frozen=True, slots=True, eq=False)
class DirectPath:
    """Readouts with heads replaced along the direct path, float64.

    Attributes:
        cells: cell names, the columns.
        difference: ``[item, cell]``, first label minus second, norms recomputed.
        frozen: the same with every norm's scale as it was.
        unpatched: ``[item]``.
    """

    cells: tuple[str, ...]
    difference: np.ndarray
    frozen: np.ndarray
    unpatched: np.ndarray


def answer_rows(
    model: Model, prompts: Sequence[Prompt], cells: Sequence[Cell], *, batch_tokens: int = 8192
) -> dict[str, dict[int, np.ndarray]]:
    """The rows that ``direct_effects`` needs for these cells, from one pass of the model as it is now."""
    places = {(edit.site, edit.layer) for cell in cells for edit in cell.edits} | {("resid_post", model.n_layers - 1)}
    wanted = [Cell(f"{site}.{layer}", (Edit(site, layer),)) for site, layer in sorted(places)]
    found = donor_from_run(model, prompts, wanted, batch_tokens=batch_tokens)
    return {site: positions[ANSWER] for site, positions in found.items()}


def direct_effects(
    model: Model,
    own: Mapping[str, Vectors],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
) -> DirectPath:
    """Replace heads in the direct path to the logits alone.

    Args:
        own: the recipients' rows at the answer position: ``z`` of every edited layer and ``resid_post`` of the last one,
            each ``[item, layer, width]`` or ``{layer: [item, width]}``; from ``answer_rows`` or ``donor_from_store``.
        cells: replacements at ``z``, heads or whole layers, several at once where a cell lists them.
        answers: two labels or more; the difference is first minus second.
        donors: as for ``sweep``.
    """
    if len(answers.labels) < 2:
        raise PatchError(
            f"a direct path needs two answer labels, got {list(answers.labels)}; give for example yes and no"
        )
    if odd := [e for c in cells for e in c.edits if e.site != "z" or e.how != "replace" or e.position != ANSWER]:
        raise PatchError(
            f"edit {odd[0]}: a direct path is cut for replacements of z at the answer position; sweep it instead"
        )
    widths = check_cells_fit(model, cells, donors or {})
    last = model.n_layers - 1
    held = {site: by_layer(vectors) for site, vectors in own.items()}
    for site, layer in [*widths, ("resid_post", last)]:
        if layer not in held.get(site, {}):
            raise PatchError(
                f"the recipients' rows hold no {site} of layer {layer}; capture it, or take answer_rows(...)"
            )
    n = len(held["resid_post"][last])
    values = check_donors_fit(cells, donors or {}, widths, {ANSWER: [1] * n})
    for (site, layer), width in {**widths, ("resid_post", last): model.d_model}.items():
        if held[site][layer].shape != (n, width):
            raise PatchError(
                f"the recipients' {site} of layer {layer} has shape {list(held[site][layer].shape)}; {[n, width]} is needed"
            )
    found = additions(model)
    for layer in {layer for _, layer in widths}:
        if found[layer].heads is None:
            raise PatchError(
                f"layer {layer} of {model.name!r} adds its heads' output in a way that cannot be cut; sweep it"
            )
    end = _End(model, answers, torch.as_tensor(held["resid_post"][last]))
    real, frozen = np.empty((n, len(cells))), np.empty((n, len(cells)))
    for column, cell in enumerate(cells):
        moved: list[Tensor] = [torch.zeros_like(end.stream), torch.zeros_like(end.stream)]
        for layer in sorted({edit.layer for edit in cell.edits}):
            old = torch.as_tensor(held["z"][layer])
            new = old.clone()
            for edit in cell.edits:
                if edit.layer == layer:
                    given = None if edit.source == ZERO else values[edit.source, "z", layer, ANSWER]
                    _replace(new, edit, int(found[layer].heads or 1), given)
            later = float(np.prod([one.keep for one in found[layer + 1 :]]))
            for total, step in zip(moved, _written(model, found[layer], old, new), strict=True):
                total += later * step.to(total.device)
        real[:, column], frozen[:, column] = end.real(moved[0]), end.frozen(moved[1])
    return DirectPath(tuple(cell.name for cell in cells), real, frozen, end.real(torch.zeros_like(end.stream)))


def _replace(z: Tensor, edit: Edit, heads: int, given: Any) -> None:
    """Write an edit into ``z`` ``[item, width]``, in place."""
    view = z.unflatten(-1, (heads, -1))
    value = torch.zeros_like(view) if given is None else torch.as_tensor(np.asarray(given)).to(z.dtype).view_as(view)
    which = slice(None) if edit.head is None else edit.head
    view[:, which] = value[:, which]


def _written(model: Model, addition: Addition, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Change of what the mixer adds to the block's output, ``[item, d_model]``: norms recomputed, and frozen."""
    module = model.module(addition.out)
    device = place(module, model.device)
    parts = []
    with torch.no_grad():
        for z in (old, new):
            pieces = torch.split(z.to(device, precision(device)), _ROWS)
            parts.append(torch.cat([call(module, piece) for piece in pieces]))
    factor = addition.keep * addition.scale
    before, after = parts
    step = after - before
    if addition.post is None:
        return factor * step, factor * step
    norm = FrozenNorm.of(model, addition.post)
    output, scale = norm.at(before)
    with torch.no_grad():
        real = call(norm.module, after) - output
    return factor * real, factor * norm.weight * _projected(norm, step) * scale


def _projected(norm: FrozenNorm, rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True) if norm.centred else rows


class _End:
    """The way from the last residual to the answer scores, in float64, for changed residuals."""

    def __init__(self, model: Model, answers: AnswerTokens, stream: Tensor) -> None:
        structure = model.structure
        self.structure, self.norm = structure, FrozenNorm.of(model, structure.final_norm)
        head = model.module(structure.head)
        self.device = place(head, model.device)
        ids = [token for variants in answers.ids[:2] for token in variants]
        self.tokens, self.biases = columns(head, model.d_model, ids, self.device)
        first = len(answers.ids[0])
        self.variants = (tuple(range(first)), tuple(range(first, len(ids))))
        where = self.norm.weight.device
        self.stream = stream.to(where, precision(where))
        self.output, self.scale = self.norm.at(self.stream)

    def real(self, moved: Tensor) -> np.ndarray:
        with torch.no_grad():
            return self._readout(call(self.norm.module, self.stream + moved))

    def frozen(self, moved: Tensor) -> np.ndarray:
        return self._readout(self.output + self.norm.weight * _projected(self.norm, moved) * self.scale)

    def _readout(self, normed: Tensor) -> np.ndarray:
        raw = normed.to(self.device, self.tokens.dtype) @ self.tokens.T + self.biases
        logits = apply_scale(raw, self.structure.logit_scale, self.structure.softcap)
        scores = label_scores(logits, self.variants)
        return (scores[:, 0] - scores[:, 1]).cpu().numpy()
