"""Intervals, tests and sizes for effects of edits: arrays in, small frozen results out.

Problem. The rows of a patching study are not independent. Both directions of a pair, several settings of one instance and
all cells of a row move together, and a grid of cells is many tests at once. Intervals that take rows for draws are too
narrow, and the best of 448 heads looks like a finding in pure noise.

Mechanism. ``groups`` names the instance of each row; rows of one instance are drawn, left out and turned around together.
Without it every row is an instance of its own.

- A mean has a percentile bootstrap interval over instances, with its ends moved out by Student's t (Hesterberg 2015):
  the plain percentile interval of 20 instances covers 92 % instead of 95 %. Where instances hold unequally many rows,
  the degrees of freedom are those of the equivalent number of equal ones.
- A share has a Wilson interval. Where instances have several rows, it is taken at the number of independent rows that
  their variance between instances amounts to, which is never more than the rows and never less than the instances.
- ``sign_flip_p`` compares each cell with the largest of all cells when whole instances change sign at random. That holds
  the chance of one false finding among all cells, however they are correlated.
- ``items_needed`` and ``detectable_effect`` say beforehand what a study of a given size can find.

Constraints. Sign flips suppose that without an effect an instance is as likely to move one way as the other. One instance
has no spread: the interval is NaN. Undefined is NaN, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import Any

import numpy as np

from patching.controls import keyed_generator
from patching.edits import PatchError

_ELEMENTS = 1 << 24
"""Entries of a resampling matrix held at once; resampling goes on in blocks, so memory stays flat."""
_MOST_ITEMS = 10_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A mean over rows for each cell, with an interval over instances.

    Attributes:
        mean, low, high: one value a cell; NaN where no row counted, and no interval where one instance did.
        n: rows that counted, one value a cell.
        n_groups: instances that counted, one value a cell.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray
    n_groups: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """A share of rows for each cell, with a Wilson interval; ``count`` of ``n`` rows of ``n_groups`` instances."""

    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    n: int
    n_groups: int


@dataclass(frozen=True, slots=True)
class Interval:
    """One number with its interval over instances; NaN where it is undefined."""

    value: float
    low: float
    high: float


def group_codes(groups: Sequence[Any] | np.ndarray | None, rows: int) -> np.ndarray:
    """The instance of each row as a number from 0 on; without ``groups`` each row is its own."""
    if groups is None:
        return np.arange(rows)
    if len(groups) != rows:
        raise PatchError(f"{len(groups)} groups for {rows} rows; give the instance of each row")
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64)


def group_sums(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Sums ``[group, ...]`` of ``[row, ...]`` over the rows of each group."""
    sums = np.zeros((int(codes.max(initial=-1)) + 1, *values.shape[1:]))
    np.add.at(sums, codes, values)
    return sums


def drawn_counts(groups: int, *, resamples: int, seed: int, purpose: str) -> Iterator[np.ndarray]:
    """Blocks ``[resample, group]`` of how often each group is drawn; as many draws as there are groups."""
    rng = keyed_generator(purpose, seed, groups)
    block = max(1, _ELEMENTS // max(groups, 1))
    for start in range(0, resamples, block):
        yield rng.multinomial(groups, np.full(groups, 1 / groups), size=min(block, resamples - start)).astype(float)


def moved_out(level: float, groups: float) -> float:
    """The tail that percentiles of a bootstrap over this many equal groups are read at; 0 for one group."""
    from scipy.special import ndtr, stdtrit

    if groups <= 1:
        return 0.0
    return float(ndtr(stdtrit(groups - 1, (1 - level) / 2) * sqrt(groups / (groups - 1))))


def mean_interval(
    values: np.ndarray,
    *,
    groups: Sequence[Any] | np.ndarray | None = None,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Estimate:
    """Mean of ``[row, cell]`` values for each cell, with an interval over instances; NaN values do not count."""
    check_level(level, resamples)
    values = np.asarray(values, dtype=np.float64)
    present = np.isfinite(values)
    codes = group_codes(groups, len(values))
    sums = group_sums(np.where(present, values, 0.0), codes)
    sizes = group_sums(present.astype(np.float64), codes)
    n, counted = present.sum(axis=0), (sizes > 0).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(axis=0) / n
        equal = sizes.sum(axis=0) ** 2 / (sizes**2).sum(axis=0)
    low, high = np.full(len(n), np.nan), np.full(len(n), np.nan)
    able = counted > 1
    if able.any():
        drawn = drawn_counts(len(sizes), resamples=resamples, seed=seed, purpose="effects.bootstrap")
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.concatenate([(counts @ sums[:, able]) / (counts @ sizes[:, able]) for counts in drawn])
        for column, cell in enumerate(np.flatnonzero(able)):
            tail = moved_out(level, float(equal[cell]))
            low[cell], high[cell] = np.nanquantile(means[:, column], [tail, 1 - tail])
    return Estimate(mean, low, high, n, counted)


def share_interval(
    hits: np.ndarray, *, groups: Sequence[Any] | np.ndarray | None = None, level: float = 0.95
) -> Shares:
    """Share of true rows of ``[row, cell]`` for each cell, with a Wilson interval over instances."""
    from scipy.special import ndtr, stdtrit
    from statsmodels.stats.proportion import proportion_confint

    check_level(level, 1)
    hits = np.asarray(hits, dtype=bool)
    n, cells = hits.shape
    codes = group_codes(groups, n)
    sizes = np.bincount(codes)
    count = hits.sum(axis=0)
    if not n:
        nothing = np.full(cells, np.nan)
        return Shares(nothing, nothing.copy(), nothing.copy(), count, 0, 0)
    share, alpha = count / n, 1 - level
    independent = np.full(cells, float(n))
    if len(sizes) == 1 and n > 1:  # several rows of one instance are one draw
        independent[:] = 1.0
    elif len(sizes) < n:
        residual = group_sums(hits - share, codes)
        variance = len(sizes) / (len(sizes) - 1) * (residual**2).sum(axis=0) / n**2
        with np.errstate(invalid="ignore", divide="ignore"):
            independent = share * (1 - share) / variance
        independent = np.clip(np.where(variance > 0, independent, 0.0), n**2 / (sizes**2).sum(), n)
        alpha = float(2 * ndtr(stdtrit(len(sizes) - 1, alpha / 2)))  # Wilson's z becomes Student's t
    low, high = proportion_confint(share * independent, independent, alpha=alpha, method="wilson")
    # At 0 and n an end is 0 or 1 exactly; rounding puts it a little beside.
    low, high = np.where(count == 0, 0.0, low), np.where(count == n, 1.0, high)
    return Shares(share, low, high, count, n, len(sizes))


def sign_flip_p(
    effects: np.ndarray,
    *,
    groups: Sequence[Any] | np.ndarray | None = None,
    seed: int,
    permutations: int = 2000,
) -> np.ndarray:
    """For each cell the p of its |t|, against the largest |t| over all cells when whole instances flip sign.

    One family-wise corrected p a cell, two-sided, (1 + exceedances) / (1 + permutations). NaN below two instances, or
    where an effect is not finite.
    """
    effects = np.asarray(effects, dtype=np.float64)
    sums = group_sums(effects, group_codes(groups, len(effects)))
    instances, cells = sums.shape
    if instances < 2 or not np.isfinite(sums).all():
        return np.full(cells, np.nan)
    squares = (sums**2).sum(axis=0)

    def statistic(means: np.ndarray) -> np.ndarray:
        variance = np.maximum(squares / instances - means**2, 0.0) / (instances - 1)
        # A mean that uses up all of the squares has no variance left; what is there then is rounding.
        known = variance > 1e-14 * squares / instances
        large = np.where(np.abs(means) > 0, np.inf, 0.0)
        return np.divide(np.abs(means), np.sqrt(variance), out=large, where=known)

    observed = statistic(sums.mean(axis=0))
    rng = keyed_generator("effects.sign_flip", seed, instances)
    exceeded = np.zeros(cells, dtype=np.int64)
    block = max(1, _ELEMENTS // max(instances, cells))
    for start in range(0, permutations, block):
        signs = rng.integers(0, 2, size=(min(block, permutations - start), instances)) * 2.0 - 1.0
        largest = statistic(signs @ sums / instances).max(axis=1)
        exceeded += (largest[:, None] >= observed[None, :] * (1 - 1e-9)).sum(axis=0)
    return (1 + exceeded) / (1 + permutations)


def items_needed(effect: float, spread: float, *, cells: int = 1, alpha: float = 0.05, power: float = 0.8) -> int:
    """The fewest instances that show a mean effect, where instances differ by a standard deviation of ``spread``.

    Two-sided. Over several cells the level is divided by their number, which asks for a few more than ``sign_flip_p``
    needs where cells are correlated. Both directions of a pair are one instance: its effect is their mean.
    """
    from statsmodels.stats.power import TTestPower

    _check_size(spread, cells, alpha, power)
    if not abs(effect) > 0:
        raise PatchError(f"effect is {effect}; give the size in logits that must not be missed, another number than 0")
    size = abs(effect) / spread
    tests = TTestPower()
    # Below this number no pattern of signs is rare enough to reach alpha.
    below, above = ceil(log2(2 / alpha)) - 1, 2 * ceil(log2(2 / alpha))
    while tests.power(size, above, alpha / cells) < power:
        below, above = above, 2 * above
        if above > _MOST_ITEMS:
            raise PatchError(f"an effect of {effect:g} with spread {spread:g} needs more than {_MOST_ITEMS} instances")
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if tests.power(size, middle, alpha / cells) >= power else (middle, above)
    return above


def detectable_effect(items: int, spread: float, *, cells: int = 1, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest mean effect that this many instances show; NaN where they are too few to show any."""
    from scipy.optimize import brentq
    from statsmodels.stats.power import TTestPower

    _check_size(spread, cells, alpha, power)
    if items < log2(2 / alpha):
        return float("nan")
    tests = TTestPower()

    def missing(size: float) -> float:
        return float(tests.power(size, items, alpha / cells)) - power

    upper = 1.0
    while missing(upper) < 0:
        upper *= 2
    return spread * float(brentq(missing, 1e-9, upper))


def check_level(level: float, resamples: int) -> None:
    """Refuse a confidence level or a number of resamples that cannot be meant."""
    if not 0 < level < 1 or resamples < 1:
        raise PatchError(f"level is {level} and resamples {resamples}; needed between 0 and 1, and at least 1")


def _check_size(spread: float, cells: int, alpha: float, power: float) -> None:
    if not spread > 0 or cells < 1:
        raise PatchError(
            f"spread is {spread} and cells {cells}; give a positive spread in logits and at least one cell"
        )
    if not (0 < alpha < 1 and alpha < power < 1):
        raise PatchError(f"alpha is {alpha} and power {power}; needed between 0 and 1, power above alpha")
