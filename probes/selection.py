"""Which penalty: chosen by inner folds, inside every outer training side, anew for every label set.

A penalty chosen on rows that are scored afterwards makes the score too good, and a null that skips the choice does not
know by how much. So the choice sees an outer fold's training rows only, and each shuffle repeats it: separately for each
layer, fold and label set.

Inner folds are the study's other folds, held out in turn inside the training side. They keep groups (and held-out units)
whole, and since labels are exchanged inside folds, every label set has the same classes on every inner side. A fit that
leaves out folds i and j serves twice: judged on j it chooses for i, judged on i it chooses for j. `inner_folds` merges
the other folds into fewer, which costs less when there are many.

Criterion: the loss that the member itself minimises, on inner held-out rows, averaged over inner folds: log-loss for
the logistic probe, squared error on ±1 targets for ridge. AUROC would choose by few pairs of rows, leaves ties wherever
the classes separate, and is undefined where an inner fold holds one class. Equal losses go to the strongest penalty.
The price: log-loss also punishes overconfidence, so where the label is weakly readable it chooses stronger penalties
than AUROC would (on 400 rows of 576 features, AUROC 0.72 where C = 1 gives 0.77).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from probes.arrays import BoolArray, FloatArray, IntArray
from probes.errors import ProbeError

# Fits the training rows and returns, for one penalty, the decision values [row, set] of the judged rows.
Judge = Callable[[BoolArray, BoolArray], Callable[[float], FloatArray]]


@dataclass(frozen=True, slots=True, eq=False)
class InnerFit:
    """One inner fit: the rows it trains on, the rows it judges, and for which outer fold (and block) each is judged."""

    training: BoolArray
    judged: BoolArray
    uses: tuple[tuple[int, int, BoolArray], ...]  # outer fold, inner block, rows


def inner_fits(training: BoolArray, assigned: IntArray, sets: IntArray, *, inner_folds: int | None) -> list[InnerFit]:
    """Plan the inner fits of all outer folds; `training` [fold, row] are the outer training sides."""
    folds = len(training)
    parts = folds - 1 if inner_folds is None else inner_folds
    if folds < 3 or not 2 <= parts <= folds - 1:
        raise ProbeError(
            f"{folds} folds leave {folds - 1} for the inner folds that choose a penalty, and inner_folds is {parts}; "
            "needed 3 folds or more and inner_folds from 2 to folds - 1, or give one penalty"
        )
    plans: dict[frozenset[int], list[tuple[int, int, BoolArray]]] = {}
    for fold in range(folds):
        others = [other for other in range(folds) if other != fold]
        for block, members in enumerate(np.array_split(others, parts)):
            rows = np.isin(assigned, members) & training[fold]
            if not rows.any():
                raise ProbeError(
                    f"inner folds {members.tolist()} hold no training row of fold {fold}, since all their groups occur "
                    "in it; give one penalty, or use fewer inner_folds"
                )
            plans.setdefault(frozenset([fold, *members.tolist()]), []).append((fold, block, rows))
    fits = []
    for left_out, uses in plans.items():
        kept: BoolArray = np.logical_and.reduce(training[sorted(left_out)], axis=0)
        ones = sets[kept].sum(axis=0)
        bad = int(((ones == 0) | (ones == kept.sum())).sum())
        if bad:
            raise ProbeError(
                f"inner folds are impossible: without folds {sorted(left_out)}, {bad} of {sets.shape[1]} label sets have "
                f"one class in {int(kept.sum())} training rows; give one penalty, or use more groups"
            )
        judged: BoolArray = np.logical_or.reduce([use[2] for use in uses])
        fits.append(InnerFit(training=kept, judged=judged, uses=tuple(uses)))
    return fits


def choose(
    fits: Sequence[InnerFit],
    judge: Judge,
    sets: IntArray,
    penalties: Sequence[float],
    loss: Callable[[FloatArray, FloatArray], FloatArray],
    *,
    folds: int,
) -> IntArray:
    """Return the index of the chosen penalty for each outer fold and label set, [fold, set], at one layer."""
    total = np.zeros((folds, len(penalties), sets.shape[1]))
    for fit in fits:
        decide = judge(fit.training, fit.judged)
        for index, penalty in enumerate(penalties):
            losses = loss(decide(penalty), sets[fit.judged].astype(np.float64))
            for fold, _, rows in fit.uses:
                total[fold, index] += losses[rows[fit.judged]].mean(axis=0)
    best: IntArray = total.argmin(axis=1).astype(np.int64)
    return best


def log_loss(decisions: FloatArray, labels: FloatArray) -> FloatArray:
    """Return the log-loss of each row and label set."""
    losses: FloatArray = np.logaddexp(0.0, decisions) - labels * decisions
    return losses


def squared_error(decisions: FloatArray, labels: FloatArray) -> FloatArray:
    """Return the squared distance of each decision value from its ±1 target."""
    losses: FloatArray = np.square(decisions - (2.0 * labels - 1.0))
    return losses
