"""A patching study: the effect of each cell beside its controls, both with intervals by instance.

Problem. "Putting the original's residual into the equivalent's run restores the answer at layer 20" says little. At the
answer position a later layer must restore more than an earlier one, whatever the model does: nothing of the recipient's
own computation is left above the edit. And a donor can move the answer by damage alone. So the number that counts is not
the effect but by how much it exceeds that of the controls, on the same instances.

Mechanism. ``run_study`` sweeps the cells with the matched donor and with every control in one sweep; ``patch_study`` makes
a study of the readouts. For each cell it holds

- the *effect*: change of the readout in logits, counted toward the donor's answer. It exists for every row;
- the *share flipped* to the donor's answer, among the rows whose two answers differ, with a Wilson interval;
- the *restoration*, only over rows whose donor and recipient differ by more than a margin fixed beforehand;
- for each control the same, and ``above``: effect of the matched donor less that of the control, row by row. ``above``
  is where a cell is specific to what the matched donor carries. Its p holds over all cells together.

Controls answer different questions. An unrelated instance's activation is as natural as the matched one and carries
another content. One of the same cell (asked the same way, same gold answer) carries the answer and not the instance: what
exceeds it is the instance's own. A random direction of the donor's norm does damage of that size and carries nothing.
The recipient's own activation must change nothing; if it does, the run is wrong and refused.

Constraints. Rows of one instance, such as both directions of a pair, share a group. A donor whose readout is exactly 0
has no answer: its rows are left out and counted in ``tied``. ``monotone`` marks cells that replace the residual stream at
the answer position in one layer each: their curve climbs to the donor's own readout by construction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from patching.edits import ANSWER, Cell, PatchError
from patching.effects import restoration, same_items, signed_effect
from patching.statistics import Estimate, Shares, mean_interval, share_interval, sign_flip_p

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.donors import Donor
    from patching.sweeping import SweepResult

MATCHED, OWN, SAME_CELL = "matched", "own", "same cell"
KINDS = ("agreement", "disagreement", "shared error")
OWN_BOUND = 1e-3
"""Largest change in logits that the recipient's own activation may make: rounding, in full precision."""
_RESIDUAL = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True, slots=True, eq=False)
class CellEffects:
    """What one donor does in each cell.

    Attributes:
        effect: logits toward the matched donor's answer.
        p: of the effect, corrected for all cells (``sign_flip_p``).
        flipped: share of rows that give the donor's answer, among those whose answers differ.
        restored: mean restoration of the ``kept`` rows, whose donor and recipient differ by more than the margin.
    """

    effect: Estimate
    p: np.ndarray
    flipped: Shares
    restored: Estimate
    kept: int


@dataclass(frozen=True, slots=True, eq=False)
class Above:
    """Effect of the matched donor less a control's, paired by row; each p is corrected for all cells.

    ``difference`` is in logits; ``flipped`` is the same for the share of answers flipped, over rows that could flip. An
    unrelated donor's readout can be large in either direction, so shares often tell the two apart where logits do not.
    """

    difference: Estimate
    p: np.ndarray
    flipped: Estimate
    p_flipped: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """Effects of the matched donor and of the controls, for each cell.

    Attributes:
        cells: the cells' names, in the order of every array.
        matched, controls, above: see the module's docstring; the controls by name.
        own_change: largest change by the recipient's own activation, in logits; NaN where that was not run.
        monotone: whether the curve climbs by construction.
        margin: what ``restored`` was filtered by, in logits.
        n, n_groups: rows and instances; ``tied`` rows had a donor without an answer and are not among them.
        method: how the numbers were made, for a table's caption.
    """

    cells: tuple[str, ...]
    matched: CellEffects
    controls: Mapping[str, CellEffects]
    above: Mapping[str, Above]
    own_change: float
    monotone: bool
    margin: float
    n: int
    n_groups: int
    tied: int
    method: str

    def specific(
        self, alpha: float = 0.05, *, by: str = "difference", against: Collection[str] | None = None
    ) -> np.ndarray:
        """``[cell]``: the matched donor does more than every control, by ``difference`` or ``flipped``, each p <= alpha.

        Say beforehand which of the two decides, and ``against`` which controls: all but ``same cell`` if nothing is said,
        since a donor of the same cell carries the answer as well. To exceed that one too is to carry more than the answer.
        """
        named = [name for name in self.above if name != SAME_CELL] if against is None else list(against)
        if missing := [name for name in named if name not in self.above] or ([] if named else ["unrelated"]):
            have = ", ".join(self.above) or "none"
            raise PatchError(f"this study has no control {missing[0]!r} to exceed (controls: {have}); run it too")
        if by not in ("difference", "flipped"):
            raise PatchError(f"by is {by!r}; allowed: difference, flipped")
        compared = [
            (one.difference, one.p) if by == "difference" else (one.flipped, one.p_flipped)
            for one in (self.above[name] for name in named)
        ]
        return np.all([(estimate.mean > 0) & (p <= alpha) for estimate, p in compared], axis=0)


def patch_study(
    cells: Sequence[Cell],
    matched: np.ndarray,
    unpatched: np.ndarray,
    donor: np.ndarray,
    *,
    controls: Mapping[str, np.ndarray] | None = None,
    own: np.ndarray | None = None,
    own_bound: float = OWN_BOUND,
    groups: Sequence[Any] | None = None,
    margin: float,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Study:
    """Make a study of readouts.

    Args:
        cells: what was swept, in the order of the columns.
        matched: ``[row, cell]`` readout (first label minus second) with the matched donor.
        unpatched, donor: ``[row]`` readout of the recipient's and of the matched donor's own run.
        controls: ``[row, cell]`` readouts with each control's activation in place of the matched one.
        own: ``[row, cell]`` readouts with the recipient's own activation.
        groups: the instance of each row.
        margin: logits by which donor and recipient must differ for a row to count in ``restored``; fix it beforehand.
    """
    others = dict(controls or {})
    for name, values in {MATCHED: matched, **others, **({} if own is None else {OWN: own})}.items():
        if np.shape(values) != (len(unpatched), len(cells)):
            raise PatchError(
                f"readouts of {name!r} have shape {list(np.shape(values))}; {[len(unpatched), len(cells)]} is needed"
            )
    same_items(matched, unpatched, donor, *([] if groups is None else [np.arange(len(groups))]))
    own_change = float("nan") if own is None else float(np.max(np.abs(own - np.asarray(unpatched)[:, None]), initial=0))
    if own is not None and not own_change <= own_bound:
        raise PatchError(
            f"the recipient's own activation changes the readout by {own_change:.1e} (allowed {own_bound:.0e}): donors "
            "and recipients are out of order, or were run on other weights; capture them again"
        )
    answered = np.sign(donor) != 0
    if not answered.any():
        raise PatchError(f"none of {len(answered)} rows has a donor with an answer; give donors whose readout is not 0")
    rows = np.flatnonzero(answered)
    before, given = np.asarray(unpatched, dtype=np.float64)[rows], np.asarray(donor, dtype=np.float64)[rows]
    names = rows.tolist() if groups is None else [groups[int(row)] for row in rows]
    able = before * given < 0
    able_names = [name for name, counts in zip(names, able, strict=True) if counts]
    how: dict[str, Any] = {"seed": seed, "resamples": resamples, "level": level}

    def moved(values: np.ndarray) -> np.ndarray:
        return signed_effect(np.asarray(values, dtype=np.float64)[rows], before, np.sign(given).astype(np.int64))

    def flips(values: np.ndarray) -> np.ndarray:
        return np.asarray(values, dtype=np.float64)[rows][able] * given[able, None] > 0

    def described(values: np.ndarray) -> CellEffects:
        patched, effects = np.asarray(values, dtype=np.float64)[rows], moved(values)
        restored = restoration(patched, before, given, margin=margin)
        return CellEffects(
            effect=mean_interval(effects, groups=names, **how),
            p=sign_flip_p(effects, groups=names, seed=seed),
            flipped=share_interval(flips(values), groups=able_names, level=level),
            restored=mean_interval(restored.values, groups=names, **how),
            kept=restored.n,
        )

    def exceeded(values: np.ndarray) -> Above:
        difference = moved(matched) - moved(values)
        hits, others = (flips(one).astype(np.float64) for one in (matched, values))
        return Above(
            mean_interval(difference, groups=names, **how),
            sign_flip_p(difference, groups=names, seed=seed),
            mean_interval(hits - others, groups=able_names, **how),
            sign_flip_p(hits - others, groups=able_names, seed=seed),
        )

    return Study(
        cells=tuple(cell.name for cell in cells),
        matched=described(matched),
        controls={name: described(values) for name, values in others.items()},
        above={name: exceeded(values) for name, values in others.items()},
        own_change=own_change,
        monotone=monotone_by_construction(cells),
        margin=margin,
        n=len(rows),
        n_groups=len(set(names)),
        tied=int((~answered).sum()),
        method=(
            f"logits toward the matched donor's answer; {level:.0%} bootstrap over instances ({resamples} resamples), "
            "ends moved out by t; shares with Wilson intervals; p by sign flips of instances, largest of all cells"
        ),
    )


def run_study(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor],
    donor_readout: np.ndarray,
    groups: Sequence[Any] | None = None,
    margin: float,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
    **options: Any,
) -> tuple[Study, SweepResult]:
    """Sweep the cells with every donor at once and make a study of it.

    Args:
        cells: edits whose source is ``matched``; edits of other sources are the same in every control.
        donors: ``matched``, any controls by name, and ``own`` if it is to be checked; see ``controls.control_donors``.
        donor_readout: ``[row]`` readout of the matched donor's own run.
        options: what else ``sweep`` takes (``spots``, ``cell_budget``, ``progress``, …).
    """
    from patching.sweeping import sweep

    if not any(edit.source == MATCHED for cell in cells for edit in cell.edits) or MATCHED not in donors:
        sources = sorted({edit.source for cell in cells for edit in cell.edits})
        raise PatchError(
            f"cells take from {sources} and donors are {sorted(donors)}; a study needs edits from {MATCHED!r} and a "
            "donor of that name"
        )
    names = [MATCHED, *(name for name in donors if name != MATCHED)]
    result = sweep(
        model,
        recipients,
        [_fed(cell, name) for name in names for cell in cells],
        answers=answers,
        donors=donors,
        seed=seed,
        **options,
    )
    parts = dict(zip(names, np.split(result.difference, len(names), axis=1), strict=True))
    study = patch_study(
        cells,
        parts.pop(MATCHED),
        result.unpatched,
        donor_readout,
        own=parts.pop(OWN, None),
        own_bound=max(OWN_BOUND, 2 * result.check_bound),
        controls=parts,
        groups=groups,
        margin=margin,
        seed=seed,
        resamples=resamples,
        level=level,
    )
    return study, result


def monotone_by_construction(cells: Sequence[Cell]) -> bool:
    """Whether every cell replaces the residual stream at the answer position in one layer.

    The last such cell gives the donor's own readout whatever the model is, so a curve over them climbs by construction.
    """
    edits = [cell.edits[0] for cell in cells if len(cell.edits) == 1]
    return len(edits) == len(cells) > 0 and all(
        edit.site in _RESIDUAL and edit.position == ANSWER and edit.how == "replace" for edit in edits
    )


def pair_kind(recipient: np.ndarray, donor: np.ndarray, gold: np.ndarray) -> list[str]:
    """For each row ``disagreement``, ``agreement`` (both right) or ``shared error``, from readouts and gold (1 or -1).

    Repair and break are directions of a disagreement; an agreement shows what patching does where nothing is to be
    restored; in a shared error the donor carries the wrong answer too. A readout of exactly 0 is no answer, and so wrong.
    """
    if not np.isin(gold, (-1, 1)).all():
        raise PatchError(f"gold holds {sorted(set(np.unique(gold).tolist()) - {-1, 1})[:3]}; allowed: +1 and -1")
    first, second = np.sign(recipient), np.sign(donor)
    return [
        "disagreement" if one != two else "agreement" if one == right else "shared error"
        for one, two, right in zip(first, second, gold, strict=True)
    ]


def _fed(cell: Cell, name: str) -> Cell:
    edits = tuple(replace(edit, source=name) if edit.source == MATCHED else edit for edit in cell.edits)
    return Cell(f"{name}: {cell.name}", edits)
