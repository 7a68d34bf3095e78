"""Folds that keep an instance whole, and label shuffles that keep the folds.

Two presentations of one instance share their logic, so a fold that splits them lets the probe recognise the instance
instead of reading the answer. Rows therefore carry a group, and no group is trained on by the probe that judges it.

Folds may also hold out a whole unit (a relation, a size, a template), one fold a unit. A group may then occur in several
units; its rows are left out of the training side of each of them.

The shuffle null asks what AUROC the same procedure gives when the labels say nothing. What may be exchanged follows from
the groups. A group with one label is a block: its rows stay together, and blocks exchange labels. A group with both
labels permutes them among its own rows; if it spans several folds or strata, each of its parts is treated like a group.
With strata, blocks exchange labels only within their stratum.

Labels are exchanged inside a fold, never across folds. Each shuffle then has the folds of the study, stratified alike,
so one set of training rows serves all label sets, and no shuffle meets a fold with one class that the study did not.
Held-out labels are also shuffled independently of training labels, so with groups of equal size the expected AUROC of
the null is 0.5 exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

from probes.arrays import BoolArray, IntArray, checked, named, same_rows
from probes.errors import ProbeError
from probes.keyed import generator


def group_codes(groups: npt.ArrayLike) -> IntArray:
    """Number the groups 0, 1, … in sorted order of their names; a missing name is refused, not made one instance."""
    names = checked("groups", groups, ("row",))
    named("groups", names)
    _, codes = np.unique(names, return_inverse=True)
    return codes.astype(np.int64)


def assign_folds(labels: IntArray, groups: IntArray, *, folds: int, stratified: bool, seed: int) -> IntArray:
    """Return the fold of each row; `stratified` balances the classes over folds, as far as whole groups allow.

    Every training side (all folds but one) holds both classes, else `ProbeError`. A held-out side may hold one class:
    its AUROC is undefined, which `scorable` tells.
    """
    count = len(np.unique(groups))
    if folds < 2:
        raise ProbeError(f"folds is {folds}; cross-validation needs at least 2")
    if count < folds:
        raise ProbeError(f"{count} groups in {len(labels)} rows; {folds} folds need at least {folds} groups")
    for label in (0, 1):
        holding = len(np.unique(groups[labels == label]))
        if holding < 2:
            raise ProbeError(
                f"label {label} occurs in {holding} of {count} groups ({len(labels)} rows); a probe needs each label "
                "in at least 2 groups, so that one can be held out"
            )
    splitter = (
        StratifiedGroupKFold(folds, shuffle=True, random_state=int(generator(seed, "probes.folds").integers(2**31)))
        if stratified
        else GroupKFold(folds)
    )
    assigned = np.full(len(labels), -1, dtype=np.int64)
    with warnings.catch_warnings():
        # It warns when a class has fewer rows than folds; such folds are excluded and counted by the caller.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        for fold, (_, held_out) in enumerate(splitter.split(np.zeros((len(labels), 1)), labels, groups)):
            assigned[held_out] = fold
    for fold in range(folds):
        missing = {0, 1} - set(labels[assigned != fold].tolist())
        if missing:
            raise ProbeError(
                f"all rows with label {missing.pop()} fall into fold {fold} of {folds} ({count} groups), so its "
                "training side has one class; use more groups or another fold count"
            )
    return assigned


def scorable(labels: IntArray, assigned: IntArray, *, folds: int) -> BoolArray:
    """Return for each fold whether its held-out rows hold both classes; needs at least two such folds."""
    both = np.array([len(np.unique(labels[assigned == fold])) == 2 for fold in range(folds)])
    if both.sum() < 2:
        raise ProbeError(
            f"{int(both.sum())} of {folds} folds hold both classes ({len(labels)} rows); at least 2 are needed, "
            "use fewer folds or more groups of the rarer label"
        )
    return both


def given_folds(assigned: npt.ArrayLike, labels: IntArray, groups: IntArray, *, folds: int | None = None) -> IntArray:
    """Return folds that the caller dealt, renumbered 0, 1, …; a group may not lie in two of them.

    `folds` is how many were dealt to more rows than these; here some of them may have no row, but not others.
    """
    given = checked("assigned", assigned, ("row",))
    same_rows("assigned", len(given), "labels", len(labels))
    named("assigned", given)
    names, codes = np.unique(given, return_inverse=True)
    if len(names) < 2:
        raise ProbeError(f"assigned holds 1 fold ({names[0]}); cross-validation needs at least 2")
    if folds is not None and len(names) > folds:
        raise ProbeError(f"assigned holds {len(names)} folds and folds is {folds}; give the number that was dealt")
    pairs = np.unique(np.stack([groups, codes]), axis=1)
    split = int((np.bincount(pairs[0]) > 1).sum())
    if split:
        raise ProbeError(
            f"assigned puts {split} of {len(np.unique(groups))} groups into more than one fold; a group must be whole, "
            "deal folds by group"
        )
    return codes.astype(np.int64)


def unit_folds(held_out: npt.ArrayLike, labels: IntArray) -> tuple[IntArray, tuple[str, ...]]:
    """Return one fold a held-out unit, in sorted order of their names, and the names; each needs both classes."""
    units = checked("held_out", held_out, ("row",))
    same_rows("held_out", len(units), "labels", len(labels))
    named("held_out", units)
    names, codes = np.unique(units, return_inverse=True)
    if len(names) < 2:
        raise ProbeError(f"held_out holds 1 unit ({names[0]}); needed at least 2, one to hold out and one to train on")
    for unit, name in enumerate(names.tolist()):
        found = set(labels[codes == unit].tolist())
        if len(found) < 2:
            raise ProbeError(
                f"held-out unit {name!r} has label {found.pop()} on all its {int((codes == unit).sum())} rows; "
                "its AUROC needs both classes, add rows or merge it with another unit"
            )
    return codes.astype(np.int64), tuple(str(name) for name in names.tolist())


def training_rows(assigned: IntArray, labels: IntArray, groups: IntArray, names: Sequence[str] = ()) -> BoolArray:
    """Return which rows each fold trains on, [fold, row]: other folds' rows whose group has no row in this fold."""
    folds = int(assigned.max()) + 1
    training = np.stack([~np.isin(groups, groups[assigned == fold]) for fold in range(folds)])
    for fold, rows in enumerate(training):
        name = f"held-out unit {names[fold]!r}" if names else f"fold {fold} of {folds}"
        missing = {0, 1} - set(labels[rows].tolist())
        if missing:
            raise ProbeError(
                f"{name} leaves {int(rows.sum())} training rows and none with label {missing.pop()}, once groups that "
                "occur in it are left out; use more groups, or read fully crossed units through readings"
            )
    return training


def shuffled_labels(
    labels: IntArray,
    groups: IntArray,
    assigned: IntArray,
    *,
    shuffles: int,
    strata: IntArray | None = None,
    seed: int,
) -> IntArray:
    """Return label sets [row, shuffle] with the labels exchanged inside each fold (see the module text)."""
    cells = np.zeros_like(labels) if strata is None else strata
    blocks: dict[tuple[tuple[int, int], ...], list[IntArray]] = {}  # (fold, stratum) pairs -> rows of each block
    mixed: list[IntArray] = []
    for rows in _runs(groups):
        places = sorted(set(zip(assigned[rows].tolist(), cells[rows].tolist(), strict=True)))
        whole = len(set(labels[rows].tolist())) == 1
        parts = [(places, rows)]
        if not whole and len(places) > 1:
            parts = [([place], rows[(assigned[rows] == place[0]) & (cells[rows] == place[1])]) for place in places]
        for where, part in parts:
            if len(set(labels[part].tolist())) == 2:
                mixed.append(part)
            else:
                blocks.setdefault(tuple(where), []).append(part)
    movable = mixed or any(len({int(labels[rows[0]]) for rows in same}) == 2 for same in blocks.values())
    if shuffles and not movable:
        raise ProbeError(
            f"no label can be exchanged: all groups within each of {len(blocks)} cells of fold and stratum have one "
            "label; use coarser strata, more groups or shuffles=0"
        )
    cells_of_blocks = [
        (np.concatenate(same), labels[[rows[0] for rows in same]], np.array([len(rows) for rows in same]))
        for same in blocks.values()
    ]
    sets = np.repeat(labels[:, None], shuffles, axis=1)
    for shuffle in range(shuffles):
        rng = generator(seed, "probes.shuffle", shuffle)
        for members, own, sizes in cells_of_blocks:
            sets[members, shuffle] = np.repeat(rng.permutation(own), sizes)
        for rows in mixed:
            sets[rows, shuffle] = rng.permutation(labels[rows])
    return sets


def _runs(groups: IntArray) -> list[IntArray]:
    """Return the rows of each group, in order of its code."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
