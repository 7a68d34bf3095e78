"""Patching between presentations: every cell, every donor, in chunks of recipients that a kill can lose one of.

A *cell* is one place that is patched: a site, a layer, a position, and where the site is ``z`` a head. At one position all
cells and all donors go through one sweep (``patching.sweep``), which at the answer costs about one forward pass a
recipient for all of them together, and elsewhere about half a pass a cell.

Donors at the answer come from the arm's store, which was captured with the readouts. Donors at spans and at all tokens are
run once more beside their recipients, a chunk at a time: a store of every token of every prompt would be far larger than
what the chosen pairs need. Chunks are smaller there: donors have to fit into memory, and a kill should not cost an hour.

Positions are swept one after the other, since each leaves out other rows (see ``patch_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.intervention_stage import CELL_BUDGET, CHUNK, IDENTITY, Arm, recipients, row_name, swept
from experiments.patch_options import ALL, ANSWER, HEADS, PatchSettings, layers_of
from experiments.patch_rows import SAME_CELL, UNRELATED, Move, Tokens, moves

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from patching.edits import Cell
    from patching.plan import SweepPlan

MATCHED, RANDOM, OWN = "matched", "random", "own"
DONOR_BYTES = 1 << 29  # of the donors of one chunk, at positions of several tokens
CHUNK_PASSES = 400  # forward passes of one chunk there, about: what a kill can lose
COST = ["engine", "forward_passes", "checked", "check_max_abs", "check_bound"]
COLUMNS = [*IDENTITY, "pair", "kind", "direction", "donor", "site", "layer", "head", "position", "unpatched",
           "donor_difference", "patched", *COST]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """What a cell edits, position aside; ``head`` is None but for ``z``."""

    site: str
    layer: int
    head: int | None = None


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The sweeps of one arm: for each its position and moves, and the moves left out."""

    chunks: list[tuple[str, list[Move]]]
    left_out: pd.DataFrame


def places(patch: PatchSettings, model: Model) -> list[Place]:
    """The cells of every position, site by site and layer by layer."""
    found = []
    for site in patch.sites:
        for layer in layers_of(patch, model, site):
            heads = range(model.heads(layer) or 0) if site == HEADS else (None,)
            found += [Place(site, layer, head) for head in heads]
    return found


def donor_names(patch: PatchSettings) -> tuple[str, ...]:
    """The donors of every cell: the matched one first."""
    return (MATCHED, *patch.controls)


def cells_of(of: Sequence[Place], donors: Sequence[str], position: str) -> list[Cell]:
    """Each place with each donor, donor by donor."""
    from patching.edits import Cell, Edit

    at = position if position in (ANSWER, ALL) else f"span:{position}"
    return [
        Cell(
            f"{name}.{one.site}.{one.layer}{'' if one.head is None else f'.{one.head}'}",
            (Edit(one.site, one.layer, one.head, name, at),),
        )
        for name in donors
        for one in of
    ]


def sweeps(arm: Arm, patch: PatchSettings, positions: Sequence[str], tokens: Tokens) -> Sweeps:
    """What is swept of an arm, in the chunks in which it is.

    Raises:
        UsageError: a control that needs another instance has none.
    """
    import pandas as pd

    chunks: list[tuple[str, list[Move]]] = []
    left = []
    for position in positions:
        found, without = moves(arm, patch, position, tokens)
        left.append(without)
        size = CHUNK if position == ANSWER else _fitting(arm.model, patch, position, found, tokens)
        chunks += [(position, found[start : start + size]) for start in range(0, len(found), size)]
    whole = [one for one in left if len(one)] or left[:1]
    return Sweeps(chunks, pd.concat(whole, ignore_index=True))


def _fitting(model: Model, patch: PatchSettings, position: str, found: Sequence[Move], tokens: Tokens) -> int:
    """Recipients whose donors fit into ``DONOR_BYTES`` together, and whose cells into ``CHUNK_PASSES``."""
    longest = max((len(tokens.at(one.transfer.recipient, position)) for one in found), default=1)
    numbers, donors = sum(_widths(model, patch).values()), len(donor_names(patch))
    passes = len(places(patch, model)) * donors / 2
    return max(1, min(CHUNK, DONOR_BYTES // (4 * longest * numbers * donors), round(CHUNK_PASSES / passes)))


def _widths(model: Model, patch: PatchSettings) -> dict[tuple[str, int], int]:
    from activations.sites import choose

    found: dict[tuple[str, int], int] = {}
    for site in patch.sites:
        found.update(choose(model, [site], layers_of(patch, model, site)))
    return found


def patch_table(
    arm: Arm,
    patch: PatchSettings,
    planned: Sweeps,
    tokens: Tokens,
    done: Callable[[int], None],
    *,
    estimate: bool = False,
) -> pd.DataFrame:
    """Readouts with every cell patched, a row for each recipient, donor and cell.

    Args:
        estimate: also what a gradient estimates of each matched cell: the column ``estimate``, change of the readout.

    Raises:
        PatchError: the recipient's own activation changes the readout.
    """
    cells_at = places(patch, arm.model)
    share = -(-patch.check_cells // max(1, len(planned.chunks)))

    def compute(chunk: tuple[str, list[Move]]) -> pd.DataFrame:
        position, own = chunk
        donors = _donors(arm, patch, position, own, tokens)
        transfers = [one.transfer for one in own]
        spots = _spots(position, own, tokens)
        cells = cells_of(cells_at, donor_names(patch), position)
        result = swept(arm, transfers, cells, donors, check_cells=share, cell_budget=patch.cell_budget, spots=spots)
        values = dict(
            zip(donor_names(patch), np.split(result.difference, len(donor_names(patch)), axis=1), strict=True)
        )
        if OWN in values:
            _refuse_own(values[OWN], result.unpatched, result.check_bound)
        about = recipients(arm, transfers, result).assign(
            kind=[one.kind for one in own], direction=[one.direction for one in own], position=position
        )
        estimates = None
        if estimate:
            estimates = _estimated(arm, own, cells_of(cells_at, (MATCHED,), position), donors[MATCHED], spots)
        return _long(about, cells_at, values, estimates)

    if not planned.chunks and not arm.run.has_table(f"patch-{arm.name}"):
        arm.run.write_table(f"patch-{arm.name}", _empty(arm, estimate))
    return arm.run.build_table(f"patch-{arm.name}", planned.chunks, compute, done)


def _long(
    about: pd.DataFrame, of: Sequence[Place], values: Mapping[str, np.ndarray], estimates: np.ndarray | None
) -> pd.DataFrame:
    """A row for each recipient, donor and cell: donor by donor, cell by cell, recipients in their order."""
    import pandas as pd

    rows, cells, names = len(about), len(of), list(values)
    found = about.loc[np.tile(np.arange(rows), cells * len(names))].reset_index(drop=True)

    def each(column: Sequence[Any]) -> np.ndarray:
        return np.tile(np.repeat(np.asarray(column), rows), len(names))

    found = found.assign(
        donor=np.repeat(np.asarray(names, dtype=object), cells * rows),
        site=each([one.site for one in of]),
        layer=each([one.layer for one in of]),
        head=pd.array(each([-1 if one.head is None else one.head for one in of]), dtype="Int64"),
        patched=np.concatenate([values[name].T.ravel() for name in names]).astype(np.float64),
    )
    found["head"] = found["head"].mask(found["head"] < 0)
    if estimates is None:
        return found[COLUMNS]
    unknown = np.full(rows * cells * (len(names) - 1), np.nan)
    return found[COLUMNS].assign(estimate=np.concatenate([estimates.T.ravel().astype(np.float64), unknown]))


def _empty(arm: Arm, estimate: bool) -> pd.DataFrame:
    """The table of an arm without a pair of the kinds asked for."""
    import pandas as pd

    numbers = ("unpatched", "donor_difference", "patched", "forward_passes", "check_max_abs", "check_bound", "estimate")
    whole = ("n", "layer", "head", "checked")
    names = [*COLUMNS, *(["estimate"] if estimate else [])]
    return pd.DataFrame(
        {
            name: pd.array([], dtype="float64" if name in numbers else "Int64" if name in whole else "str")
            for name in names
        }
    )


def _spots(position: str, own: Sequence[Move], tokens: Tokens) -> list[dict[str, tuple[int, ...]]] | None:
    if position in (ANSWER, ALL):
        return None
    return [{position: tokens.at(one.transfer.recipient, position)} for one in own]


def _donors(arm: Arm, patch: PatchSettings, position: str, own: Sequence[Move], tokens: Tokens) -> dict[str, Any]:
    """The vectors of every donor of these moves, in the order of the moves."""
    from patching.controls import norm_matched_random
    from patching.edits import head_map

    rows = {
        MATCHED: [one.transfer.donor for one in own],
        UNRELATED: [one.transfer.unrelated for one in own],
        SAME_CELL: [one.same_cell for one in own],
        OWN: [one.transfer.recipient for one in own],
    }
    made: dict[str, Any] = {}
    for name in (MATCHED, *(one for one in patch.controls if one != RANDOM)):
        made[name] = (
            _stored(arm, patch, rows[name]) if position == ANSWER else _run(arm, patch, position, rows[name], tokens)
        )
    if RANDOM in patch.controls:
        keys = [row_name(arm.table, one.transfer.recipient) for one in own]
        made[RANDOM] = norm_matched_random(
            made[MATCHED], keys=keys, seed=arm.config.seed, heads=head_map(arm.model) if HEADS in patch.sites else None
        )
    return made


def _stored(arm: Arm, patch: PatchSettings, rows: Sequence[int]) -> dict[str, dict[int, np.ndarray]]:
    """Activations at the answer, from the arm's store, where a row is a prompt."""
    from patching.donors import donor_from_store

    return {
        site: donor_from_store(arm.store, rows, sites=(site,), layers=layers_of(patch, arm.model, site))[site]
        for site in patch.sites
    }


def _run(arm: Arm, patch: PatchSettings, position: str, rows: Sequence[int], tokens: Tokens) -> dict[str, Any]:
    """Activations at a position of several tokens, from runs of these prompts: ``{site: {position: {layer: vectors}}}``."""
    from patching.edits import Cell, Edit
    from patching.studies_capture import donor_from_run

    at = position if position == ALL else f"span:{position}"
    cells = [
        Cell(f"{site}.{layer}", (Edit(site, layer, None, MATCHED, at),)) for site, layer in _widths(arm.model, patch)
    ]
    spots = None if position == ALL else [{position: tokens.at(row, position)} for row in rows]
    prompts = [arm.prompts[row] for row in rows]
    return donor_from_run(arm.model, prompts, cells, spots=spots, batch_tokens=arm.config.batch_tokens)


def _estimated(
    arm: Arm, own: Sequence[Move], cells: Sequence[Cell], donor: Any, spots: list[dict[str, tuple[int, ...]]] | None
) -> np.ndarray:
    """``[move, cell]``, change of the readout as a gradient estimates it."""
    from patching.gradients import attribution

    prompts = [arm.prompts[one.transfer.recipient] for one in own]
    tokens = min(4096, arm.config.batch_tokens)  # a backward pass keeps all activations of a batch
    return attribution(
        arm.model, prompts, cells, answers=arm.answers, donors={MATCHED: donor}, spots=spots, batch_tokens=tokens
    ).estimate


def _refuse_own(values: np.ndarray, unpatched: np.ndarray, bound: float) -> None:
    from patching.controls import largest_change
    from patching.edits import PatchError
    from patching.studies import OWN_BOUND

    change, allowed = largest_change(values, unpatched), max(OWN_BOUND, 2 * bound)
    if not change <= allowed:
        raise PatchError(
            f"the recipient's own activation changes the readout by {change:.1e} (allowed {allowed:.0e}): store "
            "and model are not of one kind; delete the run's activations and repeat the command"
        )


def price(
    patch: PatchSettings,
    model: Model,
    prompts: Sequence[Prompt],
    rows: Mapping[str, Sequence[int]],
    tokens: Tokens,
    *,
    batch_tokens: int,
) -> dict[str, SweepPlan]:
    """What the sweeps of an arm cost at each position, if these rows are the recipients."""
    from patching.plan import sweep_plan

    found = {}
    for position, chosen in rows.items():
        spots = None if position in (ANSWER, ALL) else [{position: tokens.at(row, position)} for row in chosen]
        found[position] = sweep_plan(
            model,
            [prompts[row] for row in chosen],
            cells_of(places(patch, model), donor_names(patch), position),
            spots=spots,
            cell_budget=patch.cell_budget or CELL_BUDGET,
            batch_tokens=batch_tokens,
            check_cells=patch.check_cells,
        )
    return found
