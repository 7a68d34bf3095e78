"""Linear probes over layers: is the answer readable from the activations, at which layer, and beyond chance?

Problem. A classifier on thousands of features fits anything, so a probe's number means nothing without its controls.
They are part of every result here:

* folds grouped by instance, or by a unit that is held out whole, with standardisation refitted on each training side
  (see `probes.folds`);
* a label-shuffle null in which every shuffle repeats the whole procedure on all layers: standardisation, choice of the
  penalty (`probes.selection`) and fit;
* the best layer judged against the best layer of each shuffle, since a maximum over layers is above 0.5 by luck alone.

Members. `logistic` (`probes.logistic`) is the default. `ridge` and `mean_difference` (`probes.ridge`) ask whether an
answer depends on the kind of probe: what only one of them reads is a finding about that one.

With `readings`, each probe is also asked to read other rows of held-out instances, for example the other presentation:
the same direction, not a new probe (`probes.readings`).

AUROC is computed in each fold and averaged. Decision values of different folds come from different fits, whose offsets
differ, so the pooled AUROC mixes scales; it is given beside the mean, not instead of it. A fold whose held-out rows
hold one class has no AUROC: it is NaN in `fold_auroc`, left out of the mean, and counted in `excluded_folds`.

All label sets of a layer and fold (the real labels and all shuffles) are fitted together, and layers run side by side
(`probes.parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, binary, checked, finite, same_rows
from probes.auroc import auroc
from probes.directions import Directions, Standardiser
from probes.errors import ProbeError
from probes.folds import assign_folds, given_folds, group_codes, scorable, shuffled_labels, training_rows, unit_folds
from probes.logistic import Logistic
from probes.parallel import for_each
from probes.readings import Prepared, Reading, mean_over_folds, prepare
from probes.results import ProbeResult, ReadingResult
from probes.ridge import MeanDifference, Ridge
from probes.selection import InnerFit, choose, inner_fits, log_loss, squared_error

__all__ = ["MEMBERS", "PENALTIES", "ProbeResult", "Reading", "ReadingResult", "fit_probes"]

MEMBERS = ("logistic", "ridge", "mean_difference")
# For inner folds. Measured on 120 to 1,000 rows of 576 standardised features with a decaying spectrum: AUROC at 1 and at
# 10 differs by less than 0.01, the best ridge is near 0.01, and below 1e-4 the direction hardly changes any more.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Beyond, the L2 term is lost in rounding: there is nothing left of a penalty.
LARGEST_PENALTY = 1e6
_DEFAULT_PENALTY = 1.0

_SOLVERS: dict[str, Callable[[FloatArray], Logistic | Ridge | MeanDifference]] = {
    "logistic": Logistic,
    "ridge": Ridge,
    "mean_difference": MeanDifference,
}
_NAMES = {
    "logistic": "L2 logistic regression",
    "ridge": "ridge regression on ±1 targets, alpha = 1 / C",
    "mean_difference": "difference of class means, intercept at the midpoint",
}
_LOSSES = {"logistic": log_loss, "ridge": squared_error}


def fit_probes(
    features: npt.NDArray[np.floating],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    held_out: npt.ArrayLike | None = None,
    strata: npt.ArrayLike | None = None,
    readings: Mapping[str, Reading] | None = None,
    member: str = "logistic",
    penalty: float | Sequence[float] = _DEFAULT_PENALTY,
    inner_folds: int | None = None,
    folds: int | None = None,
    stratified: bool | None = None,
    assigned: npt.ArrayLike | None = None,
    shuffles: int = 100,
    allow_constant: bool = False,
    seed: int,
) -> ProbeResult:
    """Fit a probe for `labels` [row] (0/1) to every layer of `features` [layer, row, feature], with its controls.

    `groups` [row] names each row's instance. Folds are one of three: `folds` (5) by group, `stratified` by class
    (StratifiedGroupKFold) or not (GroupKFold); one per unit named in `held_out` [row]; or `assigned` [row] as given
    (`folds` is then how many were dealt, of which these rows may lack some).
    `strata` [row] limits the shuffles: labels are exchanged among groups of one stratum only. `readings` are other rows
    that the same probes read.

    `penalty` is scikit-learn's C: larger means weaker regularisation. A sequence (say `PENALTIES`) is chosen from by
    inner folds: the other folds in turn, or merged into `inner_folds` of them. The mean difference has no penalty.

    A layer whose features are all constant is an error, unless `allow_constant`; its AUROC is then 0.5. Equal arguments
    give equal results; `shuffles=0` leaves p-values NaN.
    """
    acts, target, codes = _inputs(features, labels, groups, shuffles=shuffles, allow_constant=allow_constant)
    grid = _grid(penalty, member, inner_folds)
    dealt = _dealt(target, codes, held_out, assigned, folds=folds, stratified=stratified, seed=seed)
    training = training_rows(dealt.folds, target, codes, dealt.units)
    count = len(training)
    scored = scorable(target, dealt.folds, folds=count)
    cells = None if strata is None else group_codes(strata)
    if cells is not None:
        same_rows("strata", len(cells), "features", acts.shape[1])
    shuffled = shuffled_labels(target, codes, dealt.folds, shuffles=shuffles, strata=cells, seed=seed)
    # Real labels are set 0, shuffles follow.
    sets = np.concatenate([target[:, None], shuffled], axis=1)
    _check_training_classes(sets, training)
    inner = inner_fits(training, dealt.folds, sets, inner_folds=inner_folds) if len(grid) > 1 else []
    others = {
        name: prepare(name, one, training=acts, groups=groups, assigned=dealt.folds, sets=sets, seed=seed)
        for name, one in (readings or {}).items()
    }
    judged = [Prepared(acts, target, dealt.folds, sets, scored), *others.values()]
    areas = [np.full((len(acts), count, sets.shape[1]), np.nan) for _ in judged]
    margins = [np.zeros((len(acts), len(one.labels))) for one in judged]
    chosen_penalty = np.full((len(acts), count), np.nan)

    def fit_layer(layer: int) -> None:
        chosen = _choice(acts[layer], inner, sets, grid, member, folds=count)
        chosen_penalty[layer] = np.asarray(grid)[chosen[:, 0]]
        for fold in range(count):
            standardise = Standardiser.of(acts[layer, training[fold]])
            rows = standardise(acts[layer, training[fold]])
            probe = _fit(_SOLVERS[member](rows), sets[training[fold]], chosen[fold], grid)
            for index, one in enumerate(judged):
                here = one.folds == fold
                decisions = probe.decision(standardise(one.features[layer, here]))
                margins[index][layer, here] = decisions[:, 0]
                if one.scored[fold]:
                    areas[index][layer, fold] = auroc(decisions, one.sets[here])

    for_each(len(acts), fit_layer)
    means = [mean_over_folds(area, one.scored) for area, one in zip(areas, judged, strict=True)]
    return ProbeResult(
        auroc=means[0][:, 0],
        pooled=auroc(margins[0].T, np.repeat(target[:, None], len(acts), axis=1)),
        fold_auroc=areas[0][:, :, 0],
        null=means[0][:, 1:].T,
        margins=margins[0],
        folds=dealt.folds,
        labels=target,
        groups=codes,
        n=len(target),
        n_groups=len(np.unique(codes)),
        member=member,
        penalty=grid if len(grid) > 1 else grid[0],
        chosen_penalty=chosen_penalty,
        method=_method(member, grid, dealt.words, shuffles=shuffles, strata=cells is not None, inner=inner),
        units=dealt.units,
        readings={
            name: _reading(one, areas[index], means[index], margins[index])
            for index, (name, one) in enumerate(others.items(), start=1)
        },
    )


def _inputs(
    features: npt.NDArray[np.floating],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    shuffles: int,
    allow_constant: bool,
) -> tuple[npt.NDArray[np.floating], IntArray, IntArray]:
    """Check the arrays before the first fit."""
    acts = checked("features", features, ("layer", "row", "feature"))
    target = binary("labels", labels)
    codes = group_codes(groups)
    same_rows("labels", len(target), "features", acts.shape[1])
    same_rows("groups", len(codes), "features", acts.shape[1])
    if shuffles < 0:
        raise ProbeError(f"shuffles is {shuffles}; it must be 0 or more")
    if len(np.unique(target)) < 2:
        raise ProbeError(f"all {len(target)} labels are {target[0]}; a probe needs rows of both classes")
    finite("features", acts)
    constant = [layer for layer, rows in enumerate(acts) if (rows == rows[0]).all()]
    if constant and not allow_constant:
        raise ProbeError(
            f"all {acts.shape[2]} features are the same in all {acts.shape[1]} rows at layer {constant[0]} "
            f"({len(constant)} such layers), as the embedding of one token is that ends every prompt; leave the layer "
            "out, read another position, or allow_constant=True for AUROC 0.5"
        )
    return acts, target, codes


def _grid(penalty: float | Sequence[float], member: str, inner_folds: int | None) -> tuple[float, ...]:
    """Return the penalties to choose from, ascending; one, if there is no choice."""
    if member not in MEMBERS:
        raise ProbeError(f"member is {member!r}; allowed: {', '.join(MEMBERS)}")
    values = np.atleast_1d(np.asarray(penalty, dtype=np.float64))
    if values.ndim != 1 or len(values) == 0:
        raise ProbeError(f"penalty has shape {values.shape}; needed one number, or a sequence of at least one")
    if member == "mean_difference":
        if values.tolist() != [_DEFAULT_PENALTY] or inner_folds is not None:
            raise ProbeError(
                f"penalty is {penalty} and inner_folds {inner_folds}, but mean_difference has no penalty; leave both out"
            )
        return (float("nan"),)
    wrong = values[~((values > 0) & (values <= LARGEST_PENALTY))]
    if len(wrong):
        raise ProbeError(f"penalty (C) is {wrong[0]:g}; it must be above 0 and at most {LARGEST_PENALTY:g}")
    if len(values) == 1 and inner_folds is not None:
        raise ProbeError(f"inner_folds is {inner_folds} with one penalty ({values[0]:g}); give several to choose from")
    return tuple(float(value) for value in np.unique(values))


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """The fold of each row, the names of held-out units, and the words for `method`."""

    folds: IntArray
    units: tuple[str, ...]
    words: str


def _dealt(
    labels: IntArray,
    groups: IntArray,
    held_out: npt.ArrayLike | None,
    assigned: npt.ArrayLike | None,
    *,
    folds: int | None,
    stratified: bool | None,
    seed: int,
) -> _Dealt:
    """Deal rows to folds in the one way that was asked for."""
    asked = [
        name
        for name, value in (
            ("held_out", held_out),
            ("assigned", assigned),
            ("folds", folds),
            ("stratified", stratified),
        )
        if value is not None
    ]
    if len(asked) > 1 and asked not in (["folds", "stratified"], ["assigned", "folds"]):
        raise ProbeError(f"{' and '.join(asked)} each say what the folds are; give one of them")
    if held_out is not None:
        codes, names = unit_folds(held_out, labels)
        return _Dealt(codes, names, f"{len(names)} folds, one a held-out unit")
    if assigned is not None:
        codes = given_folds(assigned, labels, groups, folds=folds)
        return _Dealt(codes, (), f"{int(codes.max()) + 1} folds as given")
    count, balanced = 5 if folds is None else folds, stratified is not False
    codes = assign_folds(labels, groups, folds=count, stratified=balanced, seed=seed)
    return _Dealt(codes, (), f"{count} folds by group ({'StratifiedGroupKFold' if balanced else 'GroupKFold'})")


def _check_training_classes(sets: IntArray, training: BoolArray) -> None:
    """Refuse shuffles that leave a training side with one class; possible only where groups span held-out units."""
    for fold, rows in enumerate(training):
        ones = sets[rows].sum(axis=0)
        bad = int(((ones == 0) | (ones == rows.sum())).sum())
        if bad:
            raise ProbeError(
                f"{bad} of {sets.shape[1] - 1} shuffles leave one class in the {int(rows.sum())} training rows of fold "
                f"{fold}; use more groups or coarser strata"
            )


def _choice(
    rows: npt.NDArray[np.floating],
    inner: Sequence[InnerFit],
    sets: IntArray,
    grid: Sequence[float],
    member: str,
    *,
    folds: int,
) -> IntArray:
    """Return the index of each outer fold's and label set's penalty, [fold, set], at the layer with these `rows`."""
    if not inner:
        return np.zeros((folds, sets.shape[1]), dtype=np.int64)

    def judge(training: BoolArray, judged: BoolArray) -> Callable[[float], FloatArray]:
        standardise = Standardiser.of(rows[training])
        solver = _SOLVERS[member](standardise(rows[training]))
        shown = standardise(rows[judged])
        return lambda penalty: solver.fit(sets[training], penalty=penalty).decision(shown)

    return choose(inner, judge, sets, grid, _LOSSES[member], folds=folds)


def _fit(
    solver: Logistic | Ridge | MeanDifference, sets: IntArray, chosen: IntArray, grid: Sequence[float]
) -> Directions:
    """Fit each label set [row, set] with its `chosen` [set] penalty, those of one penalty together."""
    used = np.unique(chosen)
    if len(used) == 1:
        return solver.fit(sets, penalty=grid[used[0]])
    parts = {index: solver.fit(sets[:, chosen == index], penalty=grid[index]) for index in used.tolist()}
    size = len(next(iter(parts.values())).weights)
    weights, intercept = np.empty((size, sets.shape[1])), np.empty(sets.shape[1])
    for index, part in parts.items():
        weights[:, chosen == index], intercept[chosen == index] = part.weights, part.intercept
    return Directions(weights=weights, intercept=intercept)


def _reading(one: Prepared, areas: FloatArray, means: FloatArray, margins: FloatArray) -> ReadingResult:
    """Gather what the probes read."""
    return ReadingResult(
        auroc=means[:, 0],
        fold_auroc=areas[:, :, 0],
        null=means[:, 1:].T if one.exchanged else np.full_like(means[:, 1:].T, np.nan),
        margins=margins,
        folds=one.folds,
        labels=one.labels,
        n=len(one.labels),
        reason=one.reason,
    )


def _method(
    member: str, grid: Sequence[float], folds: str, *, shuffles: int, strata: bool, inner: Sequence[InnerFit]
) -> str:
    """Say in one line how the numbers came about."""
    penalty = ""
    if inner:
        blocks = 1 + max(block for fit in inner for _, block, _ in fit.uses)
        criterion = "log-loss" if member == "logistic" else "squared error"
        shown = ", ".join(f"{value:g}" for value in grid)
        penalty = f" (C of {shown} by held-out {criterion} in {blocks} inner folds, anew for every layer, fold and set)"
    elif member != "mean_difference":
        penalty = f" (C={grid[0]:g})"
    within = "over groups within strata" if strata else "over groups"
    return (
        f"{_NAMES[member]}{penalty}, standardised on training rows; {folds}, mean of per-fold AUROC; "
        f"null of {shuffles} label shuffles {within}, all refitted"
    )
