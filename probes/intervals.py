"""An interval for the cross-validated AUROC of each layer.

Problem. A probe study holds 60 to 400 rows. Its AUROC moves by several hundredths from one draw of rows to the next,
and near 1 the estimate sticks at the edge: five folds of twelve rows often rank every row right although fresh rows
would not all be. Textbook intervals fail here in two ways. They take the folds for independent (see `probes.heldout`),
and they estimate the spread from the held-out placements, which show none when every row is right.

Mechanism. A score interval: the values θ that a test would not reject,

    |AUROC - θ|  ≤  z · sqrt(variance at θ),

with the variance of `probes.heldout` evaluated at θ itself, not at the estimate. So the interval is not symmetric, it
stays inside [0, 1], and it has a width at an estimate of exactly 1. Nothing is random, so there is no seed.

Constraint. Scores should be roughly normal within a class, as sums over many features are. The interval belongs to one
layer; over many layers about one in twenty misses, and the best layer's estimate is too high by luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from probes.arrays import FloatArray
from probes.heldout import HeldOut, check_level, study, upper_quantile, variance

_HALVINGS = 50


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AurocInterval:
    """`auroc`, `low` and `high` [layer] at confidence `level`; the estimand is defined in `probes.heldout`.

    `instances` [layer] says by how much rows of one instance widen the variance (1 = not at all). `n` rows of
    `n_groups` instances count; rows of folds that hold one class do not.
    """

    auroc: FloatArray
    low: FloatArray
    high: FloatArray
    instances: FloatArray
    level: float
    n: int
    n_groups: int
    method: str


def auroc_interval(result: HeldOut, *, level: float = 0.95, directions: float | None = None) -> AurocInterval:
    """Return an interval for the mean over folds of the AUROC that the fitted probes have on fresh rows, per layer.

    `directions` is the number of independent directions of the features if known (their number, if they are nearly
    uncorrelated); None means twice the training rows, which suits residual streams.
    """
    check_level(level, directions)
    rows = study(result)
    quantile = upper_quantile(level)

    def limit(edge: float) -> FloatArray:
        inside, outside = rows.auroc, np.full_like(rows.auroc, edge)
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            kept = np.abs(rows.auroc - middle) <= quantile * np.sqrt(variance(rows, middle, directions))
            inside, outside = np.where(kept, middle, inside), np.where(kept, outside, middle)
        return (inside + outside) / 2

    return AurocInterval(
        auroc=rows.auroc,
        low=limit(0.0),
        high=limit(1.0),
        instances=rows.instances,
        level=level,
        n=rows.n,
        n_groups=rows.n_groups,
        method=(
            f"{level:.0%} score interval for the mean over {len(rows.rows)} folds of the fitted probes' AUROC on fresh "
            "rows; binormal variance, correlation within instances, folds not independent"
        ),
    )
