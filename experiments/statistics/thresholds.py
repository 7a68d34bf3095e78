"""Where invariance first falls below a threshold, and whether that place would be found again.

"Invariance holds up to n = 64" reads off the smallest size whose ι is below a threshold τ. If the curve runs close to τ
there, another sample of instances gives another size, and more instances do not help. So the place comes with its
reproducibility: the probability that fresh data of the same sample sizes cross at the same size, by parametric bootstrap
(each ι drawn anew from a binomial distribution at the observed value). Report shapes and κ̄ rather than the place, unless
the curve falls steeply through τ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import inside, same_length, whole
from probes.keyed import generator

_TIE = 1e-9  # in counts; 0.85 of 200 is 170 and not below


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The smallest `size` whose ι is below `threshold`; NaN with a `reason` if none is.

    `distribution` says how often resamples cross at each size, with None for those that never do; `reproducibility` is
    its entry for what was observed. `n` counts the pairs of all sizes.
    """

    size: float
    reproducibility: float
    distribution: Mapping[float | None, float]
    threshold: float
    n: int
    method: str
    reason: str = ""


def crossing(
    sizes: Sequence[float],
    iota: Sequence[float],
    counts: Sequence[int],
    *,
    threshold: float,
    resamples: int = 4000,
    seed: int,
) -> Crossing:
    """Find where ι crosses a threshold and how reproducible that is.

    Args:
        sizes: each size once, in any order.
        iota: invariance at each size; NaN where no pair counted.
        counts: the pairs that counted at each size, or the number in the fresh data that you ask about.
        threshold: τ, from 0 to 1.
        resamples: how many fresh data sets to draw.
        seed: decides them.
    """
    same_length(sizes=sizes, iota=iota, counts=counts)
    threshold, resamples = inside("threshold", threshold, ends=True), whole("resamples", resamples, 1)
    if bad := [size for size in sizes if not isinstance(size, Real) or not np.isfinite(size)]:
        raise RunError(f"size {bad[0]!r} is no number; a crossing needs sizes that can be put in order")
    sizes = list(sizes)  # by place, whatever index a column of a data frame has
    places, n = (
        np.asarray(sizes, dtype=float),
        np.array([whole("a count", count, 0) for count in counts], dtype=np.int64),
    )
    if len(np.unique(places)) < len(places):
        raise RunError(f"sizes {list(sizes)} hold one twice; pass one iota for each size")
    share = np.array([inside("iota", one, ends=True) if one == one else np.nan for one in iota])
    method = f"parametric bootstrap, binomial at each observed iota, {resamples} resamples"
    kept = np.isfinite(share) & (n > 0)
    order = np.argsort(places)
    order = order[kept[order]]
    if len(order) == 0:
        return Crossing(
            size=np.nan, reproducibility=np.nan, distribution={}, threshold=threshold, n=0, method=method,
            reason="no size has an iota",
        )  # fmt: skip
    names: list[float | None] = [sizes[index] for index in order]
    names.append(None)
    n, share = n[order], share[order]
    observed = _first_below(share * n, n, threshold)
    rng = generator(seed, "statistics.crossing")
    drawn = _first_below(rng.binomial(n, share, size=(resamples, len(n))), n, threshold)
    times = np.bincount(drawn, minlength=len(names)) / resamples
    found = names[int(observed)]
    left_out = f"; {len(places) - len(order)} sizes without an iota left out" if len(order) < len(places) else ""
    return Crossing(
        size=np.nan if found is None else float(found),
        reproducibility=float(times[observed]),
        distribution={name: float(times[i]) for i, name in enumerate(names)},
        threshold=threshold,
        n=int(n.sum()),
        method=method + left_out,
        reason=f"iota is {threshold:g} or more at all {len(order)} sizes" if found is None else "",
    )


def _first_below(agreeing: np.ndarray, n: np.ndarray, threshold: float) -> np.ndarray:
    """Return the index of the first size below the threshold, the number of sizes if there is none."""
    below = agreeing < threshold * n - _TIE
    return np.where(below.any(axis=-1), below.argmax(axis=-1), len(n))
