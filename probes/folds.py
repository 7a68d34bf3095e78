"""Folds that keep an instance whole, and label shuffles that keep the folds.

Two presentations of one instance share their logic, so a fold that splits them lets the probe recognise the instance
instead of reading the answer. Rows therefore carry a group, and a group lies in exactly one fold.

The shuffle null asks what AUROC the same procedure gives when the labels say nothing. What may be exchanged follows
from the groups: groups that each hold one label exchange their labels whole (rows of an instance stay together); a
group that holds both labels permutes them among its own rows.

Labels are exchanged inside a fold, never across folds. Each shuffle then has the folds of the study, stratified alike,
so one set of training rows serves all label sets, and no shuffle meets a fold with one class that the study did not.
Held-out labels are also shuffled independently of training labels, so the expected AUROC of the null is 0.5 exactly.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

from probes.arrays import BoolArray, IntArray, checked
from probes.errors import ProbeError
from probes.keyed import generator


def group_codes(groups: npt.ArrayLike) -> IntArray:
    """Number the groups 0, 1, … in sorted order of their names."""
    _, codes = np.unique(checked("groups", groups, ("row",)), return_inverse=True)
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


def shuffled_labels(labels: IntArray, groups: IntArray, assigned: IntArray, *, shuffles: int, seed: int) -> IntArray:
    """Return label sets [row, shuffle] with the labels exchanged inside each fold (see the module text)."""
    mixed: list[IntArray] = []  # rows of each group that holds both labels
    whole: dict[int, list[IntArray]] = {}  # fold -> rows of each of its one-label groups
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(np.unique(labels[rows])) == 2:
            mixed.append(rows)
        else:
            whole.setdefault(int(assigned[rows[0]]), []).append(rows)
    sets = np.repeat(labels[:, None], shuffles, axis=1)
    for shuffle in range(shuffles):
        rng = generator(seed, "probes.shuffle", shuffle)
        for blocks in whole.values():
            first = np.array([rows[0] for rows in blocks])
            sizes = [len(rows) for rows in blocks]
            sets[np.concatenate(blocks), shuffle] = np.repeat(rng.permutation(labels[first]), sizes)
        for rows in mixed:
            sets[rows, shuffle] = rng.permutation(labels[rows])
    return sets
