"""One edited forward pass: which rows are edited, the hooks that do it, and the answer scores that come out.

Every engine of this room runs some *rows*, a row being one run's state at the answer position. Engines differ only in
where rows lie inside a forward pass: as extra columns of one sequence, as batch rows over a shared prefix, or as the
last column of a sequence of their own. So each hands over ``place``, which turns a ``[batch, column, width]`` tensor
into a ``[batch, slot, width]`` *view* of the rows, and a ``Rows`` list that says which item and cell each edited slot
belongs to. The rest is the same for all, and is here.

Rules that keep the numbers right:

- A hook edits a clone. The tensor a block returns may still be the one the residual add reads.
- Modules are looked up by name at each run, because an adapter replaces modules; the hook then sits on the wrapper and
  the adapter's own path sees the edited input too.
- Hooks are removed on every way out, also after an exception.
- Only answer scores are kept. The unembedding runs on the few rows, for the few answer tokens, in float32 or better:
  ``[batch, column, vocabulary]`` is never built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.readout import label_scores
from activations.structure import FULL, apply_scale, first, hidden_argument, hooks, replace_hidden
from patching.edits import ZERO, Cell, Edit

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens

Place = Callable[[Tensor], Tensor]

UNPATCHED = -1
"""The cell number of a run without edits."""


@dataclass(frozen=True, slots=True)
class Rows:
    """For each run of a forward pass its batch row, its slot there, its item and its cell; four equally long arrays."""

    batch: np.ndarray
    slot: np.ndarray
    item: np.ndarray
    cell: np.ndarray

    @staticmethod
    def grid(items: Sequence[int], cells: Sequence[int], *, first_slot: int) -> Rows:
        """Every item (one a batch row) with every cell (one a slot, from ``first_slot`` on)."""
        n, c = len(items), len(cells)
        return Rows(
            batch=np.repeat(np.arange(n), c),
            slot=np.tile(np.arange(first_slot, first_slot + c), n),
            item=np.repeat(np.asarray(items, dtype=np.int64), c),
            cell=np.tile(np.asarray(cells, dtype=np.int64), n),
        )

    @staticmethod
    def pairs(pairs: Sequence[tuple[int, int]]) -> Rows:
        """One (item, cell) pair a batch row, in slot 0."""
        item, cell = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
        return Rows(batch=np.arange(len(pairs)), slot=np.zeros(len(pairs), dtype=np.int64), item=item, cell=cell)


@dataclass(frozen=True, slots=True)
class _Table:
    """The edits at one site and layer: cell, head (-1 for the residual stream) and source of each."""

    cell: np.ndarray
    head: np.ndarray
    source: np.ndarray


class Runs:
    """A model, its recipients and the cells to apply: what every engine works on.

    ``tokens`` counts the tokens put through the model, pads included: the price of a sweep as it was paid. ``scale`` is
    the largest logit seen in reference runs, of any token: what rounding is measured against.
    """

    def __init__(
        self,
        model: Model,
        recipients: Sequence[Prompt],
        cells: Sequence[Cell],
        vectors: Mapping[tuple[str, str, int], np.ndarray],
        answers: AnswerTokens,
    ) -> None:
        self.model = model
        self.recipients = recipients
        self.cells = cells
        self.vectors = vectors
        self.answers = answers
        self.sources = sorted({edit.source for cell in cells for edit in cell.edits})
        self.tables = _tables(model, cells, self.sources)
        self.tokens = 0
        self.scale = 1.0

    @property
    def half(self) -> bool:
        """Half precision: rounding depends on the shape of a batch, so nothing is asserted equal."""
        return self.model.dtype not in FULL

    def lengths(self, items: Sequence[int]) -> list[int]:
        return [len(self.recipients[item].ids) for item in items]

    @torch.no_grad()
    def __call__(self, arguments: Mapping[str, Any], place: Place, rows: Rows, *, reference: bool = False) -> Tensor:
        """Run the model once with the rows' edits; answer scores ``[batch, slot, label]``.

        A ``reference`` run has its one slot in the last column. Its scores are read from the logits the model itself
        returns, which is independent of the unembedding done here (half-precision logits are too coarse for that).
        """
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            kept.append(place(first(output)).clone())

        handles: list[Any] = []
        with hooks(handles):
            for (site, layer), table in self.tables.items():
                self._install(handles, site, layer, table, place, rows)
            handles.append(self.model.module(self.model.structure.blocks[-1]).register_forward_hook(keep))
            self.tokens += arguments["input_ids"].numel()
            output = self.model.hf_model(**arguments)
        if reference:
            logits = output.logits[:, -1]
            self.scale = max(self.scale, float(logits.abs().max()))
            if not self.half:
                return label_scores(logits, self.answers.ids).unsqueeze(1)
        return self.scores(kept[0])

    def scores(self, resid: Tensor) -> Tensor:
        """Answer scores ``[batch, slot, label]`` of last-block rows, from the answer tokens' rows of the unembedding."""
        structure = self.model.structure
        head = self.model.module(structure.head)
        flat = resid.flatten(0, 1)
        if type(head) is not nn.Linear:  # an adapter or a quantiser sits on the unembedding: use all of it
            return self.model.unembed(flat, self.answers).logit.unflatten(0, resid.shape[:2])
        wide = _wide(self.model.dtype)
        tokens = torch.tensor([token for variants in self.answers.ids for token in variants], device=head.weight.device)
        normed = _widened(self.model.module(structure.final_norm), flat.to(head.weight.device, wide), wide)
        bias = None if head.bias is None else head.bias[tokens].to(wide)
        logits = nn.functional.linear(normed.to(wide), head.weight[tokens].to(wide), bias)
        logits = apply_scale(logits, structure.logit_scale, structure.softcap)
        parts = logits.split([len(variants) for variants in self.answers.ids], dim=-1)
        return torch.stack([part.logsumexp(-1) for part in parts], dim=-1).unflatten(0, resid.shape[:2])

    def _install(self, handles: list[Any], site: str, layer: int, table: _Table, place: Place, rows: Rows) -> None:
        run, edit = np.nonzero(rows.cell[:, None] == table.cell[None, :])
        if not len(run):
            return
        model = self.model
        heads = model.heads(layer) if site == "z" else None
        values = self._values(site, layer, rows.item[run], table.head[edit], table.source[edit])
        index = [torch.from_numpy(part[run].copy()) for part in (rows.batch, rows.slot)]
        if heads is not None:
            index.append(torch.from_numpy(table.head[edit].copy()))

        def edited(tensor: Tensor) -> Tensor:
            changed = tensor.clone(memory_format=torch.contiguous_format)
            view = place(changed)
            if heads is not None:
                view = view.unflatten(-1, (heads, -1))
            view[tuple(part.to(view.device) for part in index)] = values.to(view.device, view.dtype)
            return changed

        if site == "resid_post":

            def after(module: nn.Module, args: Any, output: Any) -> Any:
                changed = edited(first(output))
                return type(output)((changed, *output[1:])) if isinstance(output, (tuple, list)) else changed

            handles.append(model.module(model.structure.blocks[layer]).register_forward_hook(after))
        else:

            def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
                return replace_hidden(args, kwargs, edited(hidden_argument(args, kwargs)))

            name = model.structure.out_projections[layer] or ""
            handles.append(model.module(name).register_forward_pre_hook(before, with_kwargs=True))

    def _values(self, site: str, layer: int, item: np.ndarray, head: np.ndarray, source: np.ndarray) -> Tensor:
        """The replacing vectors, one a row of the result: ``[edit, d_model]`` or ``[edit, d_head]``."""
        width = self.model.d_model if site == "resid_post" else int(self.model.structure.d_head[layer] or 0)
        given = [self.vectors[name, site, layer] for name in self.sources if (name, site, layer) in self.vectors]
        values = np.zeros((len(item), width), dtype=np.result_type(np.float32, *given))
        for number, name in enumerate(self.sources):
            here = source == number
            if name == ZERO or not here.any():
                continue
            vectors = self.vectors[name, site, layer]
            if site == "z":
                values[here] = vectors.reshape(len(vectors), -1, width)[item[here], head[here]]
            else:
                values[here] = vectors[item[here]]
        return torch.from_numpy(values)


def _tables(model: Model, cells: Sequence[Cell], sources: Sequence[str]) -> dict[tuple[str, int], _Table]:
    found: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for number, cell in enumerate(cells):
        for edit in cell.edits:
            entries = found.setdefault((edit.site, edit.layer), [])
            entries.extend((number, head, sources.index(edit.source)) for head in _heads(model, edit))
    return {where: _Table(*np.asarray(found[where], dtype=np.int64).T) for where in sorted(found)}


def _heads(model: Model, edit: Edit) -> Sequence[int]:
    if edit.site == "resid_post":
        return (-1,)
    return (edit.head,) if edit.head is not None else range(model.heads(edit.layer) or 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type scores are computed in: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def _widened(module: nn.Module, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Call a small module with its parameters in ``dtype``, the module itself untouched."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    if all(tensor.dtype == dtype for tensor in state.values()):
        return module(value)
    changed = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    return torch.func.functional_call(module, changed, (value,))
