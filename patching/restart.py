"""The restart engine: one unpatched run, then for each cell only the blocks from the edited layer on.

An edit at earlier positions changes every later token, so nothing before the answer can be shared. But it changes nothing
*below* its layer. One run without edits keeps the residual stream between blocks; a cell that edits layer ``l`` starts
from there, with cells of one layer as rows of one batch. Over all layers that is half a forward pass a cell, in place of
one.

The blocks below are not cut out of the model. Its own ``forward`` runs, so that masks, positions, rotary tables and what
else a model hands to its blocks are its own; but for the length of a pass the blocks below hand their input on, and the
last of them returns the stored residual. Nothing is replaced in the module tree: a ``forward`` is set on the block itself,
which hides that of its class, and taken away again on every way out. Edits of ``resid_post`` need not even run their own
block: its stored output is edited.

In the block that runs first, the mixer is skipped too if no edit reaches its input: it hands on its out-projection of the
heads kept from the unpatched run, or of the edited ones. That is done where the out-projection's output was the mixer's.

Blocks that share something on the side (keys and values that later layers read again) pass it on in a mapping. What stood
in there behind the last block or mixer that is skipped is put in there again.

Constraints. What is kept is about twice ``restart layers × items × tokens × d_model``; items are run in batches for which
that is at most ``KEPT_BYTES``, or one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from activations.batching import Padded, pad
from activations.structure import first, hidden_argument, hooks
from patching.runs import UNPATCHED, Rows, Runs
from patching.writing import with_hidden

if TYPE_CHECKING:
    from activations.model import Model
    from patching.edits import Cell

KEPT_BYTES = 1 << 30
"""Most bytes of residuals kept for a batch of items."""
_ABSENT = object()


class Mark(NamedTuple):
    """What a module gave in the unpatched run: its output, and what it shared on the side, by argument name."""

    output: Any
    side: dict[str, dict[Any, Any]]


@dataclass(slots=True)
class Kept:
    """What one unpatched run left behind, by the block at which a restart begins.

    ``below`` are the outputs of the blocks before it; ``mixed`` those of the block's mixer, with ``heads``, what its
    out-projection was given.
    """

    below: dict[int, Mark] = field(default_factory=dict)
    mixed: dict[int, Mark] = field(default_factory=dict)
    heads: dict[int, Tensor] = field(default_factory=dict)


def start_of(cell: Cell, n_layers: int) -> int:
    """The first block that has to run: that of the lowest edit, or the one behind it if its output is what is edited."""
    return min((edit.layer + (edit.site == "resid_post") for edit in cell.edits), default=n_layers)


def past_mixer(cell: Cell, start: int) -> bool:
    """Whether the cell leaves the input of the mixer in its first block alone."""
    return bool(cell.edits) and all(
        edit.layer >= start and (edit.site, edit.layer) != ("resid_pre", start) for edit in cell.edits
    )


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, cell_budget: int, batch_tokens: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    model, n_layers = runs.model, runs.model.n_layers
    groups: dict[tuple[int, bool], list[int]] = {}
    for place, number in enumerate(cells):
        # A run without edits may start anywhere; from the middle, so that a check of it tests the restart.
        start = n_layers // 2 if number == UNPATCHED else start_of(runs.cells[number], n_layers)
        past = number != UNPATCHED and past_mixer(runs.cells[number], start)
        groups.setdefault((start, past), []).append(place)
    padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
    unpatched, kept = _unpatched(runs, padded, items, sorted(groups))
    result = unpatched.unsqueeze(1).repeat(1, 1 + len(cells), 1)
    most = rows_at_once(padded.input_ids.shape[1], cell_budget, batch_tokens)
    for (start, past), places in sorted(groups.items()):
        todo = [(row, place) for place in places for row in range(len(items))]
        for first_pair in range(0, len(todo), most):
            part = todo[first_pair : first_pair + most]
            row = torch.tensor([one for one, _ in part], device=padded.input_ids.device)
            again = Padded(*(tensor[row] for tensor in padded))
            rows = Rows.pairs([(items[one], cells[place]) for one, place in part], padded.input_ids.shape[1])
            with starting(model, start, kept, row, past_mixer=past):
                scores = runs(again, rows, share=1 - start / n_layers)
            result[[one for one, _ in part], [1 + place for _, place in part]] = scores
    return result


def rows_at_once(length: int, cell_budget: int, batch_tokens: int) -> int:
    """Runs in one forward pass, of prompts padded to this length."""
    return max(1, min(cell_budget, batch_tokens // length))


def tokens(lengths: Sequence[int], starts: Sequence[int], n_layers: int) -> float:
    """Tokens one batch puts through the model, pads included and skipped blocks not."""
    return len(lengths) * max(lengths) * (1 + sum(1 - start / n_layers for start in starts))


def kept_bytes(model: Model, starts: Sequence[int], length: int) -> int:
    """Bytes kept for one item of this padded length, about."""
    return 2 * len(set(starts)) * length * model.d_model * model.dtype.itemsize


def _unpatched(
    runs: Runs, padded: Padded, items: Sequence[int], wanted: Sequence[tuple[int, bool]]
) -> tuple[Tensor, Kept]:
    """The scores ``[item, label]`` of the run without edits, and what restarts need of it."""
    kept, model = Kept(), runs.model
    written: dict[int, Tensor] = {}

    def mark(into: dict[int, Mark], start: int) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            side = {name: dict(value) for name, value in kwargs.items() if isinstance(value, MutableMapping) and value}
            # A clone: what comes next may write to the tensor it is given.
            into[start] = Mark(with_hidden(output, first(output).clone()), side)

        return after

    def keep_heads(start: int) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            kept.heads[start], written[start] = hidden_argument(args, kwargs).clone(), first(output).clone()

        return after

    handles: list[Any] = []
    with hooks(handles):
        for start in {start for start, _ in wanted} - {0}:
            block = model.module(model.structure.blocks[start - 1])
            handles.append(block.register_forward_hook(mark(kept.below, start), with_kwargs=True))
        for start in {start for start, past in wanted if past}:
            if (out := model.structure.out_projections[start]) is not None:
                mixer, projection = model.module(out.rpartition(".")[0]), model.module(out)
                handles.append(projection.register_forward_hook(keep_heads(start), with_kwargs=True))
                handles.append(mixer.register_forward_hook(mark(kept.mixed, start), with_kwargs=True))
        rows = Rows.pairs([(item, UNPATCHED) for item in items], padded.input_ids.shape[1])
        scores = runs(padded, rows)
    for start, (output, side) in list(kept.mixed.items()):
        if start in written and torch.equal(written[start], first(output)):
            kept.mixed[start] = Mark(
                with_hidden(output, first(output)[:0].clone()), side
            )  # its form is all that is needed
        else:
            del kept.mixed[start]
    return scores, kept


@contextmanager
def starting(model: Model, start: int, kept: Kept, row: Tensor, *, past_mixer: bool) -> Iterator[None]:
    """Here forward passes skip the blocks below ``start``; batch row ``i`` goes on from kept row ``row[i]``."""
    replaced: list[tuple[nn.Module, Any]] = []

    def set_forward(name: str, forward: Any) -> None:
        module = model.module(name)
        replaced.append((module, module.__dict__.get("forward", _ABSENT)))
        module.__dict__["forward"] = forward

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        return with_hidden(kept.below[start].output, hidden_argument(args, kwargs))

    def resume(*args: Any, **kwargs: Any) -> Any:
        output, side = kept.below[start]
        _share(kwargs, side, row)
        return with_hidden(output, _selected(first(output), row))

    def project(*args: Any, **kwargs: Any) -> Any:
        output, side = kept.mixed[start]
        _share(kwargs, side, row)
        return with_hidden(output, model.module(out or "")(_selected(kept.heads[start], row)))

    try:
        for number in range(start):
            set_forward(model.structure.blocks[number], resume if number == start - 1 else hand_on)
        out = model.structure.out_projections[start] if start < model.n_layers else None
        if past_mixer and out is not None and start in kept.mixed:
            set_forward(out.rpartition(".")[0], project)
        yield
    finally:
        for module, own in replaced:
            if own is _ABSENT:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _share(kwargs: dict[str, Any], side: dict[str, dict[Any, Any]], row: Tensor) -> None:
    for name, shared in side.items():
        kwargs[name].update({key: _selected(value, row) for key, value in shared.items()})


def _selected(value: Any, row: Tensor) -> Any:
    """The kept rows of a tensor, or of every tensor in a tuple or mapping."""
    if isinstance(value, Tensor):
        return value[row.to(value.device)]
    if isinstance(value, (list, tuple)):
        return type(value)(_selected(inner, row) for inner in value)
    if isinstance(value, Mapping):
        return {key: _selected(inner, row) for key, inner in value.items()}
    return value
