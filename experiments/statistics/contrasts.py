"""Intervals for one arm and for the difference of two arms on the same instances.

`pair_interval` gives every statistic of one arm, `compare_arms` its change from one arm (a base model) to another (its
adapter). Both resample instances with everything that belongs to them (`experiments.statistics.resampling`); what the ends
of an interval are is in `experiments.statistics.bootstrap`.

Without strata, instances are taken as drawn at random. A balanced design fixes more than that (as many instances of each
gold answer and cell), and for a model whose accuracy differs much between cells its intervals are then too wide. Pass the
cells as `strata` to have the design's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.statistics.bootstrap import Codes, bootstrap
from experiments.statistics.columns import coded

DEFAULT = ("accuracy_original", "accuracy_equivalent", "invariance", "robust", "kappa")


class Arm(NamedTuple):
    """The answers of one arm (a base model, an adapter) to both presentations of the same instances."""

    original: Sequence[str | None]
    equivalent: Sequence[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A statistic of one arm on `n` pairs, of which `support` counted, with its bootstrap interval.

    The support is in prompts for a statistic over both presentations. `undefined` resamples gave no number (a constant
    output has no κ) and are left out of the interval.
    """

    statistic: str
    value: float
    low: float
    high: float
    n: int
    support: int
    undefined: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A statistic of two arms on the same `n` pairs: `difference` = after - before, with its paired interval.

    The supports are the pairs that counted in each arm (prompts, for a statistic over both presentations). `undefined`
    resamples gave no number (a constant output has no κ) and are left out of the interval.
    """

    statistic: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    n: int
    support_before: int
    support_after: int
    undefined: int
    method: str
    reason: str = ""


def pair_interval(
    original: Sequence[str | None],
    equivalent: Sequence[str | None],
    gold: Sequence[str],
    *,
    statistics: Sequence[str] = DEFAULT,
    strata: Sequence[Hashable] | None = None,
    sizes: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> dict[str, Interval]:
    """Return statistics of one arm with bootstrap intervals over instances.

    Arguments are those of `compare_arms`.
    """
    first, second, truth = coded(original=original, equivalent=equivalent, gold=gold)
    found = bootstrap(
        [(first, second, truth)], statistics=statistics, strata=strata, sizes=sizes, clusters=clusters, resamples=resamples,
        level=level, seed=seed, purpose="statistics.pair_interval",
    )  # fmt: skip
    return {
        name: Interval(
            statistic=name, value=float(found.data[0, i]), low=ends.low, high=ends.high, n=len(truth),
            support=found.supports[0][i], undefined=ends.undefined, method=found.method, reason=ends.reason,
        )
        for i, (name, ends) in enumerate(zip(statistics, found.ends, strict=True))
    }  # fmt: skip


def compare_arms(
    before: Arm,
    after: Arm,
    gold: Sequence[str],
    *,
    statistics: Sequence[str] = DEFAULT,
    strata: Sequence[Hashable] | None = None,
    sizes: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> dict[str, Contrast]:
    """Compare two arms on the same instances: a paired bootstrap of each statistic's difference.

    Args:
        before, after: the answers of each arm, one entry a pair.
        gold: the answer that both presentations of a pair share.
        statistics: names in `STATISTICS`. The mean κ̄ ("kappa_bar") needs `sizes`; each arm averages the sizes at which
            its κ is defined.
        strata: a label a pair (a relation); resamples keep the number of pairs of each.
        sizes: the size of each pair; sizes are strata too.
        clusters: the instance of each pair, if one instance stands under several settings: its pairs are drawn together.
            With strata, instances with as many pairs in every stratum are drawn from each other.
        resamples: how many.
        level: of the intervals.
        seed: decides the resamples.
    """
    truth, *answers = coded(**{"gold": gold, "before.original": before.original, "before.equivalent": before.equivalent,
                       "after.original": after.original, "after.equivalent": after.equivalent})  # fmt: skip
    return contrast(
        (answers[0], answers[1], truth), (answers[2], answers[3], truth), statistics=statistics, strata=strata, sizes=sizes,
        clusters=clusters, resamples=resamples, level=level, seed=seed, purpose="statistics.compare_arms",
    )  # fmt: skip


def contrast(
    before: Codes,
    after: Codes,
    *,
    statistics: Sequence[str],
    resamples: int,
    level: float,
    seed: int,
    purpose: str,
    strata: Sequence[Hashable] | None = None,
    sizes: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> dict[str, Contrast]:
    """Compare two sets of numbered answers to the same instances."""
    found = bootstrap(
        [before, after], statistics=statistics, strata=strata, sizes=sizes, clusters=clusters, resamples=resamples,
        level=level, seed=seed, purpose=purpose,
    )  # fmt: skip
    old, new = found.data.tolist()
    return {
        name: Contrast(
            statistic=name, before=old[i], after=new[i], difference=new[i] - old[i], low=ends.low, high=ends.high,
            n=len(before[0]), support_before=found.supports[0][i], support_after=found.supports[1][i],
            undefined=ends.undefined, method=f"paired {found.method}", reason=ends.reason,
        )
        for i, (name, ends) in enumerate(zip(statistics, found.ends, strict=True))
    }  # fmt: skip
