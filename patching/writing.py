"""Writing into a running network: from a list of edited rows to hooks.

Problem. An engine runs many cells in one forward pass, each at its own place of a tensor: as a column of one sequence, or
as a row of a batch. A hook for each edit would launch a kernel for each cell, head and layer.

Mechanism. Edits that are alike in site, layer, position, source and how are one *step*: a list of (cell, head). For a pass
the step becomes index tensors over all rows it touches, and one assignment. Edits of one vector by one cell fall into
steps that follow each other in the cell's order.

How a site is written is not how it is read:

- ``resid_pre``, ``z``: the input of a module is replaced. ``resid_post``, ``attn_out``, ``mlp_out``: its output is. The
  hook edits a clone, because the tensor may still be read by the residual addition.
- ``resid_mid`` is read by a norm *and* by the residual addition behind the MLP. So the tensor that the norm is given is
  changed in place: it is the very tensor that the addition reads. Where no module receives it, attention's output is
  changed by the difference.

Modules are looked up by name at each pass, because an adapter replaces modules; the hook then sits on the wrapper, and the
adapter's own path sees the edited input too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from activations.sites import taps
from activations.structure import first, hidden_argument, replace_hidden
from patching.donors import check_directions
from patching.edits import ANSWER, ZERO, Cell, Edit, PatchError, Spots, tokens_of

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from patching.donors import Key

Functions = Mapping[str, Callable[[Tensor], Tensor]]
"""Functions of edits: vectors ``[vector, width]`` to as many of the same width, each by itself."""
UNPATCHED = -1
"""The cell number of a run without edits."""
_ORDER = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")
"""In which order a block passes its sites: hooks on one module run in the order of registration."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The runs inside one forward pass.

    Attributes:
        batch, slot: for each run its batch row, and the column of its answer position there. Its other tokens, where
            an edit wants them, stand to the left.
        item, cell: what the run is.
        shape: (batch rows, columns) of the hidden states.
    """

    batch: np.ndarray
    slot: np.ndarray
    item: np.ndarray
    cell: np.ndarray
    shape: tuple[int, int]

    @staticmethod
    def grid(items: Sequence[int], cells: Sequence[int], *, first_slot: int) -> Rows:
        """Every item (one a batch row) with every cell (one a column, from ``first_slot`` on)."""
        n, c = len(items), len(cells)
        return Rows(
            batch=np.repeat(np.arange(n), c),
            slot=np.tile(np.arange(first_slot, first_slot + c), n),
            item=np.repeat(np.asarray(items, dtype=np.int64), c),
            cell=np.tile(np.asarray(cells, dtype=np.int64), n),
            shape=(n, first_slot + c),
        )

    @staticmethod
    def pairs(pairs: Sequence[tuple[int, int]], columns: int) -> Rows:
        """One (item, cell) pair a batch row, padded on the left to ``columns``."""
        item, cell = np.asarray(pairs, dtype=np.int64).reshape(-1, 2).T
        n = len(pairs)
        return Rows(np.arange(n), np.full(n, columns - 1), item, cell, (n, columns))


class _Step(NamedTuple):
    """Edits of one site and layer that differ in cell and head alone; head is -1 where the whole vector is meant."""

    how: str
    scale: float
    source: str
    position: str
    cell: np.ndarray
    head: np.ndarray


class _Write(NamedTuple):
    """One step in one pass: the places it writes to, and what."""

    step: _Step
    places: list[Tensor]
    values: Tensor | None


class Writer:
    """The edits of a sweep, ready to be put into any pass."""

    def __init__(
        self,
        model: Model,
        recipients: Sequence[Prompt],
        cells: Sequence[Cell],
        values: Mapping[Key, np.ndarray | list[np.ndarray]],
        functions: Functions,
        spots: Spots | None,
    ) -> None:
        self.model, self.values, self.functions = model, values, functions
        self.answers = np.array([prompt.answer for prompt in recipients])
        positions = {edit.position for cell in cells for edit in cell.edits} - {ANSWER}
        self.tokens: dict[str, list[np.ndarray]] = {
            position: [
                np.asarray(tokens_of(prompt, position, spots[item] if spots is not None else {}), dtype=np.int64)
                for item, prompt in enumerate(recipients)
            ]
            for position in positions
        }
        self.steps = _steps(cells)
        for (site, layer), steps in self.steps.items():
            for step in steps:
                if step.how == "project_out":
                    key = step.source, site, layer, step.position
                    check_directions(key, values[key], model.heads(layer), np.unique(step.head).tolist())

    def install(self, handles: list[Any], rows: Rows) -> None:
        """Put hooks for the edits of these rows on the model; the caller owns the handles."""
        for (site, layer), steps in self.steps.items():
            writes = [write for step in steps if (write := self._write(site, layer, step, rows)) is not None]
            if writes:
                self._hook(handles, site, layer, partial(self._apply, writes, self.model.heads(layer)), rows.shape)

    def _write(self, site: str, layer: int, step: _Step, rows: Rows) -> _Write | None:
        run, edit = np.nonzero(rows.cell[:, None] == step.cell[None, :])
        if not len(run):
            return None
        item, head = rows.item[run], step.head[edit]
        batch, column = rows.batch[run], rows.slot[run]
        if step.position != ANSWER:
            tokens = [self.tokens[step.position][one] for one in item]
            counts = [len(one) for one in tokens]
            back = np.repeat(self.answers[item], counts) - np.concatenate(tokens)
            batch, column, head = (np.repeat(part, counts) for part in (batch, column, head))
            column = column - back
        index = [batch, column]
        if head[0] >= 0:
            index.append(head)
        values = None
        if step.source != ZERO and step.how != "function":
            given = self.values[step.source, site, layer, step.position]
            if isinstance(given, list):
                values = np.concatenate([given[one] for one in item])
            else:
                values = given[item if step.position == ANSWER else np.repeat(item, counts)]
            if head[0] >= 0:
                cut = values.reshape(len(values), int(self.model.heads(layer) or 1), -1)
                values = cut[np.arange(len(cut)), head]
        tensors = [torch.from_numpy(np.ascontiguousarray(part)) for part in index]
        return _Write(step, tensors, None if values is None else torch.from_numpy(np.ascontiguousarray(values)))

    def _apply(self, writes: Sequence[_Write], heads: int | None, view: Tensor) -> None:
        """Edit ``[batch, column, width]`` in place."""
        wide = torch.promote_types(view.dtype, torch.float32)
        for step, places, values in writes:
            here = tuple(part.to(view.device) for part in places)
            target = view if len(here) == 2 else view.unflatten(-1, (heads or 1, -1))
            if step.how == "replace" and values is None:
                target[here] = 0
            elif step.how == "replace" and values is not None:
                target[here] = values.to(view.device, view.dtype)
            elif step.how == "function":
                target[here] = self._called(step.source, target[here])
            elif values is not None:
                old, given = target[here].to(wide), values.to(view.device, wide)
                if step.how == "add":
                    new = old + step.scale * given
                else:
                    # Scaled first, so that the square of a tiny direction does not vanish.
                    unit = given / given.abs().amax(-1, keepdim=True)
                    unit = unit / unit.norm(dim=-1, keepdim=True)
                    new = old - (old * unit).sum(-1, keepdim=True) * unit
                target[here] = new.to(view.dtype)

    def _hook(
        self, handles: list[Any], site: str, layer: int, apply: Callable[[Tensor], None], shape: tuple[int, int]
    ) -> None:
        model = self.model

        def edited(tensor: Tensor) -> Tensor:
            changed = tensor.clone(memory_format=torch.contiguous_format)
            apply(changed.view(*shape, -1))
            return changed

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return replace_hidden(args, kwargs, edited(hidden_argument(args, kwargs)))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return with_hidden(output, edited(first(output)))

        carriers = [(model.module(name), is_input) for name, is_input in taps(model, (site, layer))]
        if site != "resid_mid":
            module, is_input = carriers[0]
            if is_input:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(after))
        elif len(carriers) == 1:

            def in_place(module: nn.Module, args: Any, kwargs: Any) -> None:
                apply(hidden_argument(args, kwargs).view(*shape, -1))

            handles.append(carriers[0][0].register_forward_pre_hook(in_place, with_kwargs=True))
        else:
            entered: list[Tensor] = []

            def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
                entered[:] = [hidden_argument(args, kwargs).clone()]

            def shift(module: nn.Module, args: Any, output: Any) -> Any:
                part = first(output)
                stream = entered.pop().view(part.shape)
                return with_hidden(output, edited(stream + part) - stream)

            (block, _), (attention, _) = carriers
            handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
            handles.append(attention.register_forward_hook(shift))

    def _called(self, name: str, vectors: Tensor) -> Tensor:
        made = self.functions[name](vectors)
        if not isinstance(made, Tensor) or made.shape != vectors.shape:
            got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise PatchError(f"function {name!r} gave {got} for vectors {list(vectors.shape)}; give the same shape")
        if not bool(made.isfinite().all()):
            raise PatchError(f"function {name!r} gave numbers that are not finite; give finite ones")
        return made.to(vectors.dtype)


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """A module's output with another hidden state, a tuple where it was one."""
    return type(output)((hidden, *output[1:])) if isinstance(output, (tuple, list)) else hidden


def _steps(cells: Sequence[Cell]) -> dict[tuple[str, int], list[_Step]]:
    """The steps of each (site, layer), in the order in which they have to be made."""
    found: dict[tuple[str, int], dict[tuple[Any, ...], list[tuple[int, int]]]] = {}
    for number, cell in enumerate(cells):
        earlier: dict[tuple[str, int], list[tuple[Edit, int]]] = {}
        for edit in cell.edits:
            where = edit.site, edit.layer
            before = earlier.setdefault(where, [])
            wave = 1 + max(
                (turn for other, turn in before if None in (edit.head, other.head) or edit.head == other.head),
                default=-1,
            )
            before.append((edit, wave))
            key = (wave, edit.how, edit.scale, edit.source, edit.position, edit.head is None)
            head = -1 if edit.head is None else edit.head
            found.setdefault(where, {}).setdefault(key, []).append((number, head))
    return {
        where: [_Step(*key[1:5], *np.asarray(found[where][key], dtype=np.int64).T) for key in sorted(found[where])]
        for where in sorted(found, key=lambda where: (where[1], _ORDER.index(where[0])))
    }
