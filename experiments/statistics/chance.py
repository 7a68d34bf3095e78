"""How much of an agreement two independent answerers would show: κ and its mean over sizes.

A model that always says "yes" agrees with itself everywhere. κ = (ι - ι_e) / (1 - ι_e) takes off the agreement ι_e of two
answers that are independent of each other, at the yes-rates the model has. There are two such references, both on the
common support (the pairs whose two answers parsed):

* pooled, one yes-rate q for both presentations: ι_e = q² + (1 - q)². This is the one that tables report as κ.
* separate, the yes-rates q0 and q1 of each presentation: ι_e = q0 q1 + (1 - q0)(1 - q1). With it κ is Cohen's.

The pooled one is larger by (q0 - q1)² / 2, so it also penalises presentations that differ in yes-rate. Neither says that
answers were independent, nor anything of correctness. A constant output has no κ: NaN, with the reason, never 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics.columns import MISSING, coded, groups, same_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Kappa:
    """Chance-corrected invariance on `support` pairs: `iota`, its reference `iota_e` at pooled yes-rate `q`, and κ.

    `separate` is κ under `iota_e_separate`, the reference with the yes-rates `q_first` and `q_second` of the two
    presentations on the same support; `reference_difference` = iota_e - iota_e_separate = (q_first - q_second)² / 2.
    """

    value: float
    iota: float
    iota_e: float
    q: float
    separate: float
    iota_e_separate: float
    q_first: float
    q_second: float
    reference_difference: float
    support: int
    method: str = "(iota - iota_e) / (1 - iota_e), iota_e = q^2 + (1 - q)^2 with pooled yes-rate q"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KappaBar:
    """Mean of κ over the sizes where it is defined; `undefined` names the sizes left out.

    `separate` is the mean of κ under the reference with separate yes-rates, over the same sizes.
    """

    value: float
    separate: float
    by_size: Mapping[Hashable, Kappa]
    undefined: tuple[Hashable, ...]
    n: int
    support: int
    method: str = "mean over sizes of kappa within the size"
    reason: str = ""


def kappa_bar(sizes: Sequence[Hashable], original: Sequence[str | None], equivalent: Sequence[str | None]) -> KappaBar:
    """Return κ̄, the mean over `sizes` (one a pair) of κ within each size; sizes without a κ are named and left out."""
    first, second = coded(original=original, equivalent=equivalent)
    same_length(sizes=sizes, original=first)
    names, members = groups(sizes)
    by_size = {name: kappa(first[members == i], second[members == i]) for i, name in enumerate(names)}
    undefined = tuple(name for name, one in by_size.items() if np.isnan(one.value))
    known = [one for one in by_size.values() if not np.isnan(one.value)]
    return KappaBar(
        value=float(np.mean([one.value for one in known])) if known else np.nan,
        separate=float(np.mean([one.separate for one in known])) if known else np.nan,
        by_size=by_size,
        undefined=undefined,
        n=len(first),
        support=sum(one.support for one in by_size.values()),
        reason="" if known else f"kappa is undefined at all {len(names)} sizes",
    )


def kappa(first: np.ndarray, second: np.ndarray) -> Kappa:
    """Return κ of two columns of numbered answers, on the pairs where both parsed."""
    both = (first != MISSING) & (second != MISSING)
    support = int(both.sum())
    if support == 0:
        none = np.nan
        return Kappa(
            value=none, iota=none, iota_e=none, q=none, separate=none, iota_e_separate=none, q_first=none,
            q_second=none, reference_difference=none, support=0,
            reason=f"none of {len(first)} pairs has two parsed answers",
        )  # fmt: skip
    first, second = first[both], second[both]
    iota, q_first, q_second = float((first == second).mean()), float(first.mean()), float(second.mean())
    q = float((first.sum() + second.sum()) / (2 * support))
    iota_e = q**2 + (1 - q) ** 2
    iota_e_separate = q_first * q_second + (1 - q_first) * (1 - q_second)
    constant = q in (0.0, 1.0)  # exactly then either reference is 1
    return Kappa(
        value=np.nan if constant else (iota - iota_e) / (1 - iota_e),
        iota=iota,
        iota_e=iota_e,
        q=q,
        separate=np.nan if constant else (iota - iota_e_separate) / (1 - iota_e_separate),
        iota_e_separate=iota_e_separate,
        q_first=q_first,
        q_second=q_second,
        reference_difference=iota_e - iota_e_separate,
        support=support,
        reason=f"all {2 * support} parsed answers are {'yes' if q else 'no'}" if constant else "",
    )
