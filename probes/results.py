"""What probes found: the numbers, and everything an auditor needs to check them (folds, label shuffles, margins, n)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from probes.arrays import BoolArray, FloatArray, IntArray

# Of "above what luck gives": the chance that any layer of a study without signal is called so.
FAMILY_LEVEL = 0.05


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadingResult:
    """What the same probes read from other rows.

    `auroc` [layer] is the mean over the folds that hold both classes of `fold_auroc` [layer, fold]; `null`
    [shuffle, layer] repeats it on shuffled labels, NaN where none can be exchanged. `margins` [layer, row] come from
    the probe of the fold `folds` [row], which did not train on the row's group. Where no fold holds both classes, or
    one of several that have rows does, `auroc` is NaN, and `reason` says so.
    """

    auroc: FloatArray
    fold_auroc: FloatArray
    null: FloatArray
    margins: FloatArray
    folds: IntArray
    labels: IntArray
    n: int
    reason: str = ""

    @property
    def p_value(self) -> FloatArray:
        """Chance per layer of an AUROC this high under the null; see `ProbeResult.p_value`."""
        return p_values(self.auroc, self.null)

    @property
    def p_max(self) -> float:
        """Chance of a best layer this good: the maximum over layers against each shuffle's own maximum."""
        return _p_max(self.auroc, self.null)

    @property
    def above_null(self) -> BoolArray:
        """Whether each layer's AUROC beats the shuffles' best layers; see `ProbeResult.above_null`."""
        return above_null(self.auroc, self.null)

    @property
    def excluded_folds(self) -> int:
        """How many of the folds that have rows had no AUROC because their rows hold one class."""
        return _excluded(self.fold_auroc, self.folds)

    def decodable(self, chosen_layer: IntArray) -> BoolArray:
        """Whether each row's margin has the sign of its label, at its fold's `chosen_layer` [fold] of the probes."""
        return _right(self.margins, self.labels, chosen_layer[self.folds])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbeResult:
    """What the probes of all layers found, with the folds and null draws it rests on.

    `auroc` [layer] is the mean over scored folds of `fold_auroc` [layer, fold]; `pooled` [layer] ranks all held-out
    rows together. `margins` [layer, row] are held-out decision values: row r is judged by the probe that did not train
    on its fold, `folds[r]`. They are in logits for the logistic member, on the scale of ±1 targets for ridge, and in
    squared standard deviations for the mean difference. `null` [shuffle, layer] repeats `auroc` on shuffled labels.

    `groups` [row] are codes of the instances, `units` the names of held-out units by fold (empty without them).
    `penalty` is as it was given, `chosen_penalty` [layer, fold] what the real labels were fitted with; both are NaN for
    a member without one. `n` counts rows, `n_groups` instances.
    """

    auroc: FloatArray
    pooled: FloatArray
    fold_auroc: FloatArray
    null: FloatArray
    margins: FloatArray
    folds: IntArray
    labels: IntArray
    groups: IntArray
    n: int
    n_groups: int
    member: str
    penalty: float | tuple[float, ...]
    chosen_penalty: FloatArray
    method: str
    units: tuple[str, ...] = ()
    readings: Mapping[str, ReadingResult] = field(default_factory=dict)

    @property
    def excluded_folds(self) -> int:
        """How many folds had no AUROC because their held-out rows hold one class."""
        return _excluded(self.fold_auroc, self.folds)

    @property
    def p_value(self) -> FloatArray:
        """Chance per layer of an AUROC this high under the null, (1 + shuffles at least as high) / (1 + shuffles).

        Each layer is judged alone; over many layers use `p_max`. NaN if no shuffle was run.
        """
        return p_values(self.auroc, self.null)

    @property
    def p_max(self) -> float:
        """Chance of a best layer this good: the maximum over layers against each shuffle's own maximum."""
        return _p_max(self.auroc, self.null)

    @property
    def above_null(self) -> BoolArray:
        """Whether each layer's AUROC beats the shuffles' own maxima over layers: (1 + as good) / (1 + shuffles) <= 0.05.

        All layers are judged together: where no layer says anything, one study in twenty calls any layer above. That
        takes at least 19 shuffles; with fewer, no layer is called so. The best layer is above if and only if `p_max`
        is at most 0.05.
        """
        return above_null(self.auroc, self.null)

    @property
    def selectivity(self) -> FloatArray:
        """AUROC less the mean of the null, [layer]: what the labels add to what the procedure gives by itself."""
        if len(self.null) == 0:
            return np.full(len(self.auroc), np.nan)
        above: FloatArray = self.auroc - self.null.mean(axis=0)
        return above

    def null_band(self, quantiles: Sequence[float] = (0.025, 0.5, 0.975)) -> FloatArray:
        """Return the null's quantiles at each layer, [quantile, layer]: the band to draw behind `auroc`."""
        if len(self.null) == 0:
            return np.full((len(quantiles), self.null.shape[1]), np.nan)
        band: FloatArray = np.quantile(self.null, quantiles, axis=0)
        return band

    def first_layer(self, threshold: float = 0.9) -> int | None:
        """Return the first layer whose AUROC reaches `threshold`, or None if none does."""
        reached = np.flatnonzero(self.auroc >= threshold)
        return int(reached[0]) if len(reached) else None

    @property
    def chosen_layer(self) -> IntArray:
        """The layer used for each fold's rows, [fold]: best mean AUROC over the *other* folds, the lowest if tied.

        A row's own held-out score thus has no part in choosing the layer that judges it. What remains shared: the
        probes scored in the other folds had this fold's rows among their training rows. The choice is free of the reuse
        that inflates scores most, but it is not a nested cross-validation.
        """
        count = self.fold_auroc.shape[1]
        others = [np.nanmean(np.delete(self.fold_auroc, fold, axis=1), axis=1) for fold in range(count)]
        return np.array([int(means.argmax()) for means in others], dtype=np.int64)

    @property
    def decodable(self) -> BoolArray:
        """Whether each row's held-out margin, at its fold's `chosen_layer`, has the sign of its label."""
        return _right(self.margins, self.labels, self.chosen_layer[self.folds])


def p_values(observed: FloatArray, null: FloatArray) -> FloatArray:
    """Return (1 + draws at least as high) / (1 + draws) for each column; the 1 counts the observed labeling itself.

    NaN where the observed value is undefined or nothing was drawn. An undefined draw counts as high.
    """
    if len(null) == 0:
        return np.full(len(observed), np.nan)
    # Equal rankings give equal AUROC; the slack only covers the rounding of the mean.
    as_high = (~(null < observed - 1e-12)).sum(axis=0)
    return np.where(np.isnan(observed), np.nan, (1 + as_high) / (1 + len(null)))


def above_null(observed: FloatArray, null: FloatArray) -> BoolArray:
    """Return for each column whether it beats the largest column of all but 5 % of the draws; False without draws."""
    if len(null) == 0:
        return np.zeros(len(observed), dtype=np.bool_)
    best = np.repeat(null.max(axis=1)[:, None], len(observed), axis=1)
    above: BoolArray = p_values(observed, best) <= FAMILY_LEVEL + 1e-12
    return above


def _excluded(fold_auroc: FloatArray, folds: IntArray) -> int:
    """Return how many folds have rows and no AUROC."""
    held = np.bincount(folds, minlength=fold_auroc.shape[1]) > 0
    return int((np.isnan(fold_auroc[0]) & held).sum())


def _p_max(observed: FloatArray, null: FloatArray) -> float:
    return float(p_values(observed.max(keepdims=True), null.max(axis=1, keepdims=True))[0])


def _right(margins: FloatArray, labels: IntArray, layers: IntArray) -> BoolArray:
    """Return whether each row's margin, at its layer, has the sign of its label; 0 is no answer."""
    at_layer = margins[layers, np.arange(len(labels))]
    right: BoolArray = np.where(labels == 1, at_layer > 0, at_layer < 0)
    return right
