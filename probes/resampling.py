"""Many AUROCs of resampled instances at once.

Problem. An interval for a first layer, or for a difference over all layers, needs what the AUROCs of all layers do
together when instances are drawn again. A loop over 2,000 draws x 30 layers x 5 folds that ranks the rows each time
takes minutes.

Mechanism. Drawing rows again does not change their order, only how often each counts. So the margins of a fold and
layer are sorted once, and a draw is a weight for each row: the AUROC is the weight of class 1 times the weight of class 0
below it (half of it at a tie), which one cumulative sum gives for all draws. All layers meet the same draws, so they
move together as they do in the study.

Instances are drawn within their fold, and among those with the same labels (all 1, all 0, or both). Each draw then has
the classes of the study in every fold. The probes are not refitted: a refit on repeated rows would hold copies of
training rows out, and would answer another question.

Constraint. Among G instances, drawing again shows only (G - 1) / G of the variance. `Draws.shortfall` is the factor
that puts it back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probes.arrays import FloatArray, IntArray
from probes.errors import ProbeError
from probes.heldout import Study

# Weights of one block of draws: 32 MiB, however many rows and draws there are.
_BLOCK = 2**22


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How often each row counts in each draw, `counts` [draw, row], and the factor `shortfall` on a draw's variance."""

    counts: IntArray
    shortfall: float


def draw_instances(study: Study, resamples: int, rng: np.random.Generator) -> Draws:
    """Draw the instances of `study` again, `resamples` times; rows of folds without both classes count 0."""
    if resamples < 2:
        raise ProbeError(f"resamples is {resamples}; at least 2 are needed, 2000 is usual")
    counts = np.zeros((resamples, len(study.labels)), dtype=np.int64)
    factors, sizes = [], []
    for rows in study.rows:
        labels, groups = study.labels[rows], study.groups[rows]
        _, codes = np.unique(groups, return_inverse=True)
        share = np.bincount(codes, labels) / np.bincount(codes)
        for members in (share == 1, share == 0, (share > 0) & (share < 1)):
            instances = np.flatnonzero(members)
            if len(instances) == 0:
                continue
            drawn = rng.multinomial(len(instances), np.full(len(instances), 1 / len(instances)), size=resamples)
            belongs = members[codes]
            counts[:, rows[belongs]] = drawn[:, np.searchsorted(instances, codes[belongs])]
            if len(instances) > 1:
                factors.append(len(instances) / (len(instances) - 1))
                sizes.append(int(belongs.sum()))
    if not factors:
        raise ProbeError(
            f"no fold holds two instances of one class ({study.n_groups} instances in {len(study.rows)} folds), so "
            "nothing can be drawn again; use fewer folds or more instances"
        )
    return Draws(counts=counts, shortfall=float(np.average(factors, weights=sizes)))


def resampled_auroc(study: Study, counts: IntArray) -> FloatArray:
    """Return the mean over scored folds of the AUROC of each draw at each layer, [draw, layer].

    A draw that leaves a fold without one of the classes has no AUROC there: NaN.
    """
    layers = len(study.margins)
    total = np.zeros((len(counts), layers))
    for rows in study.rows:
        block = max(1, _BLOCK // len(rows))
        for start in range(0, len(counts), block):
            weights = counts[start : start + block, rows].astype(np.float64)
            for layer in range(layers):
                area = weighted_auroc(study.margins[layer, rows], study.labels[rows], weights)
                total[start : start + block, layer] += area
    return total / len(study.rows)


def weighted_auroc(scores: FloatArray, labels: IntArray, weights: FloatArray) -> FloatArray:
    """Return the AUROC [draw] of `scores` [row] against `labels` [row], each row counting `weights` [draw, row] times."""
    order = np.argsort(scores, kind="stable")
    ordered, positive = scores[order], labels[order] == 1
    weights = weights[:, order]
    below = np.zeros((len(weights), len(order) + 1))
    np.cumsum(np.where(positive, 0.0, weights), axis=1, out=below[:, 1:])
    above = ordered[positive]
    first, last = np.searchsorted(ordered, above, "left"), np.searchsorted(ordered, above, "right")
    ones = weights[:, positive]
    won = np.einsum("ij,ij->i", ones, below[:, first] + below[:, last]) / 2
    pairs = ones.sum(axis=1) * below[:, -1]
    areas: FloatArray = np.divide(won, pairs, out=np.full(len(won), np.nan), where=pairs > 0)
    return areas
