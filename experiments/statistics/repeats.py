"""How much of a disagreement is decoding noise: the same prompt sent twice.

Invariance compares two presentations, so it falls short of 1 also for a model that answers the same prompt differently
each time. The control sends the original again, under the same decoding. Repeat agreement is a measured reference, not a
lower bound of invariance, and the difference is no causal share of error: answers can be less certain in one presentation.
Each of the two conditions on parsed answers in its own pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics.columns import MISSING, coded, inside
from experiments.statistics.contrasts import contrast
from experiments.statistics.shares import Share, share


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """`invariance` (original and equivalent), `agreement` (original and its repeat) and ι - agreement on `n` instances.

    `low` and `high` are the paired bootstrap interval of the `difference`. `support_both` counts the instances with all
    three answers.
    """

    invariance: Share
    agreement: Share
    difference: float
    low: float
    high: float
    n: int
    support_invariance: int
    support_agreement: int
    support_both: int
    undefined: int
    method: str
    reason: str = ""


def repeat_agreement(
    original: Sequence[str | None],
    repeat: Sequence[str | None],
    equivalent: Sequence[str | None],
    *,
    resamples: int = 2000,
    seed: int,
    level: float = 0.95,
    clusters: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
) -> Repeat:
    """Return repeat agreement beside invariance, and their paired difference over instances."""
    first, again, other = coded(original=original, repeat=repeat, equivalent=equivalent)
    inside("level", level)
    unused = np.zeros(len(first), dtype=np.int64)  # agreement needs no gold
    change = contrast(
        (first, again, unused), (first, other, unused), statistics=("invariance",), resamples=resamples, level=level,
        seed=seed, purpose="statistics.repeat_agreement", clusters=clusters, strata=strata,
    )["invariance"]  # fmt: skip
    parsed = [column != MISSING for column in (first, again, other)]

    def agreement(column: np.ndarray) -> Share:
        both = parsed[0] & (column != MISSING)
        return share(((first == column) & both).sum(), both.sum(), level=level)

    return Repeat(
        invariance=agreement(other), agreement=agreement(again), difference=change.difference, low=change.low,
        high=change.high, n=len(first), support_invariance=change.support_after, support_agreement=change.support_before,
        support_both=int((parsed[0] & parsed[1] & parsed[2]).sum()), undefined=change.undefined,
        method=change.method, reason=_reason(change.support_before, change.support_after),
    )  # fmt: skip


def _reason(agreement: int, invariance: int) -> str:
    missing = [
        name for name, n in (("original and repeat", agreement), ("original and equivalent", invariance)) if not n
    ]
    return f"no instance has parsed answers to {' and none to '.join(missing)}" if missing else ""
