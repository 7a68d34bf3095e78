"""How good a gradient's estimate of a sweep is, so that a user knows when it is enough.

Problem. "Attribution patching correlates with activation patching" is true on some models and false on others, and a high
correlation can come from the last layers alone. A user wants to know: would I have picked the same heads?

Mechanism. The exact sweep is run on some instances too, and both are compared cell by cell, on the mean effects over these
instances, which is what heads are ranked by:

- Pearson and Spearman over cells: are sizes and ranks the same;
- sign agreement, over the cells whose exact effect is told from 0 by its interval (others have no sign to agree on);
- overlap of the k largest;
- slope of the exact on the estimated effects, through 0: below 1 the estimate is too large.

Intervals draw whole instances again, in estimate and exact sweep together, and compare the means of each resample.

Constraints. The result holds for these cells, this donor and these instances. Where few instances make the exact means
noisy, the correlations are those of noisy means. With fewer than three cells, or if no cell moves, there is nothing to
correlate: NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patching.edits import PatchError
from patching.statistics import (
    Interval,
    check_level,
    drawn_counts,
    group_codes,
    group_sums,
    mean_interval,
)


@dataclass(frozen=True, slots=True)
class EstimateQuality:
    """Agreement of estimated with exact effects over ``cells`` cells, means over ``n`` rows of ``n_groups`` instances.

    ``signed`` cells had an exact effect whose interval excludes 0, and count for ``sign_agreement``; ``overlap`` is the
    share of the ``k`` largest exact effects, by size, that are among the ``k`` largest estimates.
    """

    pearson: Interval
    spearman: Interval
    sign_agreement: Interval
    overlap: Interval
    slope: Interval
    signed: int
    k: int
    cells: int
    n: int
    n_groups: int

    def enough(self, *, spearman: float = 0.9, overlap: float = 0.8) -> bool:
        """Whether ranks and the top k are kept: both intervals lie above these bars."""
        return self.spearman.low >= spearman and self.overlap.low >= overlap


def estimate_quality(
    estimate: np.ndarray,
    exact: np.ndarray,
    *,
    groups: Sequence[Any] | None = None,
    k: int = 10,
    seed: int,
    resamples: int = 1000,
    level: float = 0.95,
) -> EstimateQuality:
    """Compare ``[row, cell]`` estimates with the exact effects of the same rows and cells.

    Give both the same sign convention, for example each through ``effects.signed_effect``.
    """
    check_level(level, resamples)
    one, two = np.asarray(estimate, dtype=np.float64), np.asarray(exact, dtype=np.float64)
    if one.ndim != 2 or one.shape != two.shape or not one.size:
        raise PatchError(f"estimate has shape {list(one.shape)} and exact {list(two.shape)}; give the same [row, cell]")
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        raise PatchError("estimates or exact effects hold values that are not finite; leave those rows out")
    if not 0 < k <= one.shape[1]:
        raise PatchError(f"k is {k}; give 1 to {one.shape[1]}, the number of cells")
    codes = group_codes(groups, len(one))
    sums = np.stack([group_sums(one, codes), group_sums(two, codes)], axis=1)  # [group, which, cell]
    sizes = np.bincount(codes).astype(float)
    interval = mean_interval(two, groups=groups, seed=seed, level=level)
    signed = (interval.low > 0) | (interval.high < 0)

    def statistics(means: np.ndarray) -> np.ndarray:
        """``[resample, statistic]`` of means ``[resample, which, cell]``."""
        first, second = means[:, 0], means[:, 1]
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = (first * second).sum(axis=1) / (first**2).sum(axis=1)
            same = (np.sign(first[:, signed]) == np.sign(second[:, signed])).sum(axis=1) / signed.sum()
        ranks = [_correlation(*(_ranks(values) for values in (first, second)))]
        return np.stack([_correlation(first, second), *ranks, same, _overlap(first, second, k), slope], axis=1)

    value = statistics((sums.sum(axis=0) / sizes.sum())[None])[0]
    drawn = np.concatenate(
        [
            statistics(np.einsum("rg,gwc->rwc", counts, sums) / (counts @ sizes)[:, None, None])
            for counts in drawn_counts(len(sizes), resamples=resamples, seed=seed, purpose="gradients.quality")
        ]
    )
    intervals = []
    for number, middle in enumerate(value):
        defined = drawn[np.isfinite(drawn[:, number]), number]
        low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]) if len(defined) else (np.nan, np.nan)
        if len(sizes) < 2 or not np.isfinite(middle):
            low = high = np.nan
        intervals.append(Interval(float(middle), float(low), float(high)))
    pearson, spearman, same, overlap, slope = intervals
    return EstimateQuality(
        pearson, spearman, same, overlap, slope, int(signed.sum()), k, one.shape[1], len(one), len(sizes)
    )


def _correlation(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Pearson's correlation of each row; NaN where a side does not vary, or for fewer than three columns."""
    if one.shape[1] < 3:
        return np.full(len(one), np.nan)
    first, second = (values - values.mean(axis=1, keepdims=True) for values in (one, two))
    size = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 0, (first * second).sum(axis=1) / size, np.nan)


def _ranks(values: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values, axis=1)
    return ranks


def _overlap(one: np.ndarray, two: np.ndarray, k: int) -> np.ndarray:
    """Share of the k largest sizes that both rows have in common; ties go to the earlier cell."""
    marks = []
    for values in (one, two):
        order = np.argsort(-np.abs(values), axis=1, kind="stable")[:, :k]
        mark = np.zeros(values.shape, dtype=bool)
        np.put_along_axis(mark, order, True, axis=1)
        marks.append(mark)
    return (marks[0] & marks[1]).sum(axis=1) / k
