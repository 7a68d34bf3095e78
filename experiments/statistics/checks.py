"""What accuracies can and can't say about pairs, checked on the data.

With answers of two kinds and one gold, the shares R, D, U of a pair and the mean accuracy A = (A0 + A1) / 2 on the same
support are tied (`identities`):

* A = R + U / 2 = 1/2 + (R - D) / 2, hence |A - 1/2| <= ι / 2;
* the pooled chance reference exceeds the one with separate yes-rates by (q0 - q1)² / 2.

Accuracies alone leave R open: anything from max(0, A0 + A1 - 1) to min(A0, A1) fits (`frechet`). The width of that
interval is what is unknown about robust answers until pairs are matched.

Each side is computed on its own, from its own counts. So a difference means that columns were misaligned, supports mixed
or gold changed between presentations, not that arithmetic failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics.chance import kappa
from experiments.statistics.columns import MISSING, coded

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Frechet:
    """The interval that the accuracies on the support leave for R, and `robust`, the R of the matched pairs."""

    low: float
    high: float
    robust: float
    holds: bool
    n: int
    support: int
    method: str = "max(0, A0 + A1 - 1) to min(A0, A1), accuracies on the pairs with two parsed answers"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identities:
    """Mean accuracy on the support three ways: from answers, from R + U / 2, from 1/2 + (R - D) / 2.

    `reference_difference` is the pooled less the separate chance reference, `from_yes_rates` is (q0 - q1)² / 2.
    `largest_error` is the largest difference between two sides of one identity.
    """

    mean_accuracy: float
    from_robust: float
    from_difference: float
    reference_difference: float
    from_yes_rates: float
    largest_error: float
    bound_holds: bool
    n: int
    support: int
    method: str = "each side from its own counts, on the pairs with two parsed answers"
    reason: str = ""


def frechet(first: Sequence[str | None], second: Sequence[str | None], gold: Sequence[str]) -> Frechet:
    """Return what the two accuracies alone say about R, and check that R is inside."""
    right_first, right_second, support, n = _rights(first, second, gold)
    if support == 0:
        none = np.nan
        return Frechet(low=none, high=none, robust=none, holds=True, n=n, support=0, reason=_no_pair(n))
    a, b, robust = int(right_first.sum()), int(right_second.sum()), int((right_first & right_second).sum())
    low, high = max(0, a + b - support), min(a, b)
    return Frechet(
        low=low / support,
        high=high / support,
        robust=robust / support,
        holds=low <= robust <= high,
        n=n,
        support=support,
    )


def identities(first: Sequence[str | None], second: Sequence[str | None], gold: Sequence[str]) -> Identities:
    """Evaluate both sides of every identity of matched pairs on the data."""
    right_first, right_second, support, n = _rights(first, second, gold)
    if support == 0:
        none = np.nan
        return Identities(
            mean_accuracy=none, from_robust=none, from_difference=none, reference_difference=none, from_yes_rates=none,
            largest_error=none, bound_holds=True, n=n, support=0, reason=_no_pair(n),
        )  # fmt: skip
    mean = float((right_first.mean() + right_second.mean()) / 2)
    robust, wrong = float((right_first & right_second).mean()), float((~right_first & ~right_second).mean())
    unstable = float((right_first ^ right_second).mean())
    from_robust, from_difference = robust + unstable / 2, 0.5 + (robust - wrong) / 2
    references = kappa(*coded(first=first, second=second))
    from_yes_rates = (references.q_first - references.q_second) ** 2 / 2
    errors = (
        from_robust - mean,
        from_difference - mean,
        robust + wrong + unstable - 1,
        references.iota - (robust + wrong),
        references.reference_difference - from_yes_rates,
    )
    return Identities(
        mean_accuracy=mean,
        from_robust=from_robust,
        from_difference=from_difference,
        reference_difference=references.reference_difference,
        from_yes_rates=from_yes_rates,
        largest_error=max(map(abs, errors)),
        bound_holds=abs(mean - 0.5) <= (robust + wrong) / 2 + _ROUNDING,
        n=n,
        support=support,
    )


def _rights(
    first: Sequence[str | None], second: Sequence[str | None], gold: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return which answers are right on the support, the support and the number of pairs."""
    given, other, truth = coded(first=first, second=second, gold=gold)
    both = (given != MISSING) & (other != MISSING)
    return (given == truth)[both], (other == truth)[both], int(both.sum()), len(truth)


def _no_pair(n: int) -> str:
    return f"none of {n} pairs has two parsed answers"
