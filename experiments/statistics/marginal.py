"""Whether two columns of answers to the same items are right equally often: McNemar's test, Holm, the gap.

Two accuracies on the same items are not independent samples, so only the items that change count: b are right in the
first column only, c in the second only. The test is exact binomial up to 25 of them, continuity-corrected chi-squared
above. A gap near 0 does not mean stable answers, since b and c can both be large; that is what R, D and U are for
(`pair_profile`). An answer that did not parse is wrong here, so failures of format count.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics.columns import coded, flags, inside
from experiments.statistics.contrasts import pair_interval
from experiments.statistics.shares import Share, share

_EXACT_UP_TO = 25  # discordant pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemar:
    """Test of two marginal accuracies on the same `n` items; `b` first right only, `c` second right only."""

    b: int
    c: int
    p: float
    n: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalGap:
    """`gap` = accuracy of the `first` less the `second` column on the same `n` items, over all prompts.

    `low` and `high` are its paired bootstrap interval, `p` is McNemar's, with `b` and `c` the discordant counts.
    """

    first: Share
    second: Share
    b: int
    c: int
    gap: float
    low: float
    high: float
    p: float
    n: int
    method: str
    reason: str = ""


def mcnemar(first_right: Sequence[bool], second_right: Sequence[bool]) -> McNemar:
    """Test whether two answer columns for the same items are right equally often."""
    first, second = flags(first=first_right, second=second_right)
    return discordance(first, second)


def discordance(first: np.ndarray, second: np.ndarray) -> McNemar:
    """Test two columns of booleans."""
    from statsmodels.stats.contingency_tables import mcnemar as test

    b, c = int((first & ~second).sum()), int((~first & second).sum())
    exact = b + c <= _EXACT_UP_TO
    method = f"McNemar, {'exact binomial' if exact else 'chi-squared, continuity-corrected'}"
    if len(first) == 0:
        return McNemar(b=0, c=0, p=np.nan, n=0, method=method, reason="nothing to count")
    table = [[int((first & second).sum()), b], [c, int((~first & ~second).sum())]]
    return McNemar(b=b, c=c, p=float(test(table, exact=exact).pvalue), n=len(first), method=method)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm-adjusted p-values for a declared family of comparisons; NaN stays NaN and is not in the family."""
    tested = {name: inside(f"p of {name}", p, ends=True) for name, p in p_values.items() if p == p}
    if not tested:
        return dict(p_values)
    # By hand: statsmodels collects all garbage at each call, which takes longer than the rest of a comparison.
    p = np.array(list(tested.values()))
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = dict(zip((list(tested)[place] for place in order), np.minimum(stepped, 1).tolist(), strict=True))
    return {**p_values, **adjusted}


def marginal_gap(
    first: Sequence[str | None],
    second: Sequence[str | None],
    gold: Sequence[str],
    *,
    strata: Sequence[Hashable] | None = None,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int,
) -> MarginalGap:
    """Return the accuracy gap of two presentations (or two arms) on the same items, its interval and its test.

    Adjust the p-values of several arms with `holm`. With `clusters` only the interval knows that rows belong together;
    McNemar's test takes items as independent.
    """
    given, other, truth = coded(first=first, second=second, gold=gold)
    test = discordance(given == truth, other == truth)
    interval = pair_interval(
        first, second, gold, statistics=("accuracy_gap",), strata=strata, clusters=clusters, resamples=resamples,
        level=level, seed=seed,
    )["accuracy_gap"]  # fmt: skip
    return MarginalGap(
        first=share((given == truth).sum(), test.n, level=level),
        second=share((other == truth).sum(), test.n, level=level),
        b=test.b, c=test.c, gap=interval.value, low=interval.low, high=interval.high, p=test.p, n=test.n,
        method=f"{test.method}; paired {interval.method}", reason=interval.reason,
    )  # fmt: skip
