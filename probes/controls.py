"""Controls over the layers of a probe study: from which layer on, and is one model's layer better than another's?

Both questions look at all layers of the same rows at once. Layers share their rows, so their errors move together, and
an answer that treats them one by one is too sure or too shy. Here all layers meet the same draws of instances
(`probes.resampling`), each on the scale of its own standard error (`probes.heldout`: folds are not independent, so the
plain bootstrap over held-out margins is too narrow).

- `auroc_interval` (in `probes.intervals`): the AUROC of one layer.
- `first_layer_interval`: the first layer that reaches a threshold.
- `contrast`: the difference between two results on the same rows, groups and folds, over all layers.
- `minimum_detectable_auroc`, `rows_needed` (in `probes.power`): what a study of a given size would find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from probes.arrays import FloatArray
from probes.errors import ProbeError
from probes.heldout import HeldOut, Study, check_level, in_step, study, tail, upper_quantile, variance
from probes.intervals import AurocInterval, auroc_interval
from probes.keyed import generator
from probes.power import minimum_detectable_auroc, rows_needed
from probes.resampling import draw_instances, resampled_auroc

__all__ = [
    "AurocInterval",
    "Contrast",
    "FirstLayer",
    "auroc_interval",
    "contrast",
    "first_layer_interval",
    "minimum_detectable_auroc",
    "rows_needed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLayer:
    """The first layer whose AUROC reaches `threshold`, with an interval from `low` to `high` at confidence `level`.

    A layer is None where none reaches it; `reason` then says so. `high` None means that the interval includes "no
    layer". `never_share` is the share of draws in which no layer reaches the threshold. `n` counts rows.
    """

    layer: int | None
    low: int | None
    high: int | None
    never_share: float
    threshold: float
    level: float
    n: int
    n_groups: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Contrast:
    """AUROC of the second result less that of the first, [layer], with `low` and `high` at confidence `level`.

    `p_value` [layer] judges each layer alone, `p_max` the largest difference in either direction over all layers. A
    layer on which no draw changes the difference (both results rank every row right, say) has no interval: it is NaN,
    has no part in `p_max`, and `reason` names it.
    """

    difference: FloatArray
    low: FloatArray
    high: FloatArray
    p_value: FloatArray
    p_max: float
    level: float
    n: int
    n_groups: int
    method: str
    reason: str = ""


def first_layer_interval(
    result: HeldOut,
    *,
    threshold: float = 0.9,
    level: float = 0.95,
    resamples: int = 2000,
    directions: float | None = None,
    layers: Sequence[int] | None = None,
    seed: int,
) -> FirstLayer:
    """Return the first layer whose AUROC reaches `threshold`, and the layers among which it may truly lie.

    In a draw, a layer reaches the threshold if its AUROC would at the layer's own deviation in that draw, measured in
    standard errors at the threshold. Layers whose AUROC no draw changes, such as those at 1, share a standard normal
    deviation: one of them alone rules out "no layer" where its `auroc_interval` lies above the threshold, up to the
    chance of the draws. Of several layers, the best has to lie further above the threshold than the best of layers just
    below it would by chance: else `high` is None, however few draws reach no layer. `directions` as in `auroc_interval`.
    `layers` numbers the layers, ascending, where the result has some of a model's only: they are then what is returned
    and said, instead of places in the result.
    """
    if not 0 < threshold < 1:
        raise ProbeError(f"threshold is {threshold}; it must lie between 0 and 1, such as 0.9")
    check_level(level, directions)
    rows = study(result)
    count = len(rows.auroc)
    numbers = list(range(count)) if layers is None else [int(layer) for layer in layers]
    if len(numbers) != count or numbers != sorted(set(numbers)):
        raise ProbeError(f"layers is {numbers}; needed an ascending number for each of the result's {count} layers")
    draws = draw_instances(rows, resamples, generator(seed, "probes.first_layer"))
    deviation, spread = _standardised(resampled_auroc(rows, draws.counts))
    # A layer that no draw changes (every row ranked right) would reach the threshold in every draw. It moves by a normal
    # deviation, as the score interval has it. Such layers move together: nothing in the draws says otherwise.
    normal = generator(seed, "probes.first_layer.normal").standard_normal((resamples, 1))
    deviation = np.where(spread > 0, deviation, normal)
    error = np.sqrt(variance(rows, np.full(count, threshold), directions))
    score = (rows.auroc - threshold) / error
    reached = deviation >= -score
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), count)
    tails = (1 - level) / 2
    low = int(np.quantile(first, tails, method="lower"))
    high = int(np.quantile(first, 1 - tails, method="higher"))
    # The best of several layers just below the threshold lies above it by chance. As far as this one does? The draws say
    # how far layers move together; each alone is normal, where draws of a layer near 1 are skewed.
    downward = ndtri((rankdata(-deviation, axis=0) - 0.5) / resamples)
    if (downward.max(axis=1) >= score.max()).mean() > tails:
        high = count
    observed = np.flatnonzero(rows.auroc >= threshold)
    best = int(rows.auroc.argmax())
    return FirstLayer(
        layer=numbers[observed[0]] if len(observed) else None,
        low=numbers[low] if low < count else None,
        high=numbers[high] if high < count else None,
        never_share=float((first == count).mean()),
        threshold=threshold,
        level=level,
        n=rows.n,
        n_groups=rows.n_groups,
        method=(
            f"first layer with AUROC >= {threshold:g}; {level:.0%} of {resamples} draws of instances within folds, the "
            "same for all layers, scaled to the cross-validated standard error"
        ),
        reason=""
        if len(observed)
        else f"no layer reaches {threshold:g}; the best is layer {numbers[best]} with {rows.auroc[best]:.3f}",
    )


def contrast(
    before: HeldOut,
    after: HeldOut,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    directions: float | None = None,
    seed: int,
) -> Contrast:
    """Return the AUROC of `after` less that of `before` at each layer: base and adapter, original and equivalent.

    Both results need the same rows in one order, the same groups and the same folds. An instance drawn again is drawn
    in both, so what makes instances easy or hard for both drops out. The estimand is the difference between the two
    sets of fitted probes on fresh rows (`probes.heldout`).
    """
    check_level(level, directions)
    first, second = study(before), study(after)
    _same_design(first, second)
    difference = second.auroc - first.auroc
    draws = draw_instances(first, resamples, generator(seed, "probes.contrast"))
    drawn = resampled_auroc(second, draws.counts) - resampled_auroc(first, draws.counts)
    deviation, spread = _standardised(drawn)
    together = np.maximum(*(in_step(of.auroc, of.training / of.instances, directions) for of in (first, second)))
    error = np.where(spread > 0, spread * np.sqrt(draws.shortfall * together), np.nan)
    score = np.abs(difference) / error
    known = np.isfinite(score)
    p_max = float("nan")
    if known.any():
        largest = np.abs(deviation[:, known]).max(axis=1)
        p_max = float((1 + (largest >= score[known].max()).sum()) / (1 + resamples))
    width = upper_quantile(level) * error
    flat = ", ".join(str(layer) for layer in np.flatnonzero(~known).tolist())
    return Contrast(
        difference=difference,
        low=np.maximum(difference - width, -1.0),
        high=np.minimum(difference + width, 1.0),
        p_value=2 * tail(score),
        p_max=p_max,
        level=level,
        n=first.n,
        n_groups=first.n_groups,
        method=(
            f"difference of cross-validated AUROC on the same rows, {level:.0%} normal interval from {resamples} paired "
            "draws of instances within folds, folds not independent; p_max from the largest difference of each draw"
        ),
        reason=f"no draw of instances changes the difference at layers {flat}" if flat else "",
    )


def _standardised(drawn: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the draws [draw, layer] as deviations in standard errors, 0 where a layer does not vary, and those errors."""
    spread = drawn.std(axis=0, ddof=1)
    spread = np.where(spread > 1e-12, spread, 0.0)
    centred = drawn - drawn.mean(axis=0)
    deviation: FloatArray = np.divide(centred, spread, out=np.zeros_like(drawn), where=spread > 0)
    return deviation, spread


def _same_design(first: Study, second: Study) -> None:
    """Refuse two studies that differ in layers, rows, labels, groups or folds; the message names the first that does."""
    if first.margins.shape != second.margins.shape:
        raise ProbeError(
            f"the results have margins of shape {first.margins.shape} and {second.margins.shape} [layer, row]; a "
            "contrast needs the same layers and rows"
        )
    for name, one, other, remedy in (
        ("labels", first.labels, second.labels, "both need the same rows in one order"),
        ("groups", first.groups, second.groups, "both need the same instances in one order"),
        ("folds", first.folds, second.folds, "fit both with the same folds (assigned=) or the same seed and groups"),
    ):
        differing = int((one != other).sum())
        if differing:
            raise ProbeError(f"{name} of the two results differ in {differing} of {len(one)} rows; {remedy}")
