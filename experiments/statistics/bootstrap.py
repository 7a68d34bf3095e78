"""Bootstrap intervals of any statistics, for one arm or for the change between two.

The interval is the percentile interval, with its ends moved out where few instances decide its width. Problem: with a
model that is nearly always right, or two arms that differ on a dozen of 200 instances, the resamples vary as much as those
few instances say, and that is a noisy estimate. The plain percentile interval then covers 92-93% instead of 95%. The same
happens to a mean of few numbers, and there the cure is Student's t in place of the normal. Here (after Hesterberg 2015,
"What teachers should know about the bootstrap") the percentiles are taken further out, at the normal probability of the t
quantile. The degrees of freedom are those of the variance estimate (Satterthwaite), from what leaving out each unit does
to the statistic; a share of one half has infinitely many, a dozen of discordant instances about 24. Bias correction with
acceleration (BCa) is no cure: for differences it estimates a skewness from the same few instances, and covers less.

Below about five instances that differ no resampling helps: the interval still covers too little, and where none differs it
has no width. That is no evidence that arms are equal; see `detectable_difference` for what the sample could show.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import combined, groups, inside, percent, same_length
from experiments.statistics.measures import KAPPAS, Measures
from experiments.statistics.resampling import CELLS, Resampler

Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # first answer, second answer, gold


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The ends of an interval, how many resamples gave no number, and why there is none."""

    low: float
    high: float
    undefined: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """Statistics of each arm [arm, statistic] with their supports, and intervals of the value or the change."""

    data: np.ndarray
    supports: list[list[int]]
    ends: list[Ends]
    method: str


def bootstrap(
    arms: Sequence[Codes],
    *,
    statistics: Sequence[str],
    resamples: int,
    level: float,
    seed: int,
    purpose: str,
    strata: Sequence[Hashable] | None = None,
    sizes: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> Bootstrap:
    """Compute statistics of the data and of its resamples; an instance is drawn with its answers in all arms."""
    n = len(arms[0][0])
    given = {"strata": strata, "sizes": sizes, "clusters": clusters}
    same_length(gold=arms[0][0], **{name: labels for name, labels in given.items() if labels is not None})
    inside("level", level)
    if not statistics:
        raise RunError("no statistic is given; name at least one of STATISTICS")
    if not isinstance(resamples, int | np.integer) or resamples < 1 or n == 0:
        raise RunError(f"{resamples} resamples of {n} instances; needed at least 1 of each")
    if sizes is None and (asked := [name for name in statistics if name.startswith("kappa_bar")]):
        raise RunError(f"{asked[0]} is a mean over sizes and no sizes were given; pass sizes, one an instance")
    size = np.zeros(n, dtype=np.int64) if sizes is None else groups(sizes)[1]
    labels = [size] if strata is None else [groups(strata)[1], size]

    # Pairs with the same answers in all arms, gold and size add the same to every total.
    pattern = combined(size, *(column + 1 for arm in arms for column in arm))
    at = np.unique(pattern, return_index=True)[1]
    measures = [Measures(statistics, one[at], other[at], truth[at], size[at]) for one, other, truth in arms]
    resampler = Resampler(pattern, labels=labels, clusters=clusters)
    added = resampler.totals(np.hstack([one.weights for one in measures]))
    cuts = np.cumsum([one.weights.shape[1] for one in measures])[:-1]

    def values(totals: np.ndarray) -> np.ndarray:
        parts = np.split(totals, cuts, axis=-1)
        return np.stack([one.values(part) for one, part in zip(measures, parts, strict=True)])

    def change(totals: np.ndarray) -> np.ndarray:
        found = values(totals)
        return found[1] - found[0] if len(arms) == 2 else found[0]

    whole = resampler.counts @ added
    step = max(1, CELLS // added.shape[1])
    without = [change(whole - added[begin : begin + step]) for begin in range(0, len(added), step)]
    freedom = resampler.freedom(np.concatenate(without))
    drawn = resampler.draws(int(resamples), seed=seed, purpose=purpose)
    resampled = np.concatenate([change(counts @ added) for counts in drawn])
    one_each = "every stratum holds one instance: nothing to draw anew" if resampler.fixed == resampler.strata else ""
    where = " in one arm" if len(arms) == 2 else ""
    ends = [
        _ends(f"{name} is undefined{where}", name, value, resampled[:, index], freedom[index], level, one_each)
        for index, (name, value) in enumerate(zip(statistics, change(whole), strict=True))
    ]
    method = f"percentile bootstrap {resampler.note}, {resamples} resamples, {percent(level)}, ends moved out by t"
    supports = [one.supports(part) for one, part in zip(measures, np.split(whole, cuts), strict=True)]
    return Bootstrap(data=values(whole), supports=supports, ends=ends, method=method)


def _ends(
    undefined: str, name: str, value: float, resampled: np.ndarray, freedom: float, level: float, one_each: str
) -> Ends:
    defined = resampled[np.isfinite(resampled)]
    lost = len(resampled) - len(defined)
    if not np.isfinite(value) or len(defined) == 0 or one_each:
        why = "constant output or no parsed pair" if name in KAPPAS else "nothing to count"
        reason = one_each if np.isfinite(value) and one_each else f"{undefined} ({why})"
        return Ends(low=np.nan, high=np.nan, undefined=lost, reason=reason)
    tail = outer_tail(level, freedom)
    low, high = np.quantile(defined, [tail, 1 - tail])
    return Ends(low=float(low), high=float(high), undefined=lost, reason="")


def outer_tail(level: float, freedom: float) -> float:
    """Return the normal probability beyond the t quantile of the level; (1 - level) / 2 with infinite freedom."""
    from scipy.special import ndtr, stdtrit

    tail = (1 - level) / 2
    return float(ndtr(stdtrit(freedom, tail))) if freedom < 1e6 else tail
