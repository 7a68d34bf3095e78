"""Linear probes over layers: is the answer readable from the activations, at which layer, and beyond chance?

Problem. A classifier on thousands of features fits anything, so a probe's number means nothing without its controls.
Three of them are part of every result here:

* folds grouped by instance, with standardisation refitted on each training side (see `probes.folds`);
* a label-shuffle null in which every shuffle repeats the whole procedure, standardisation and fit, on all layers;
* the best layer judged against the best layer of each shuffle, since a maximum over layers is above 0.5 by luck alone.

With `transfer`, each probe trained on one presentation's rows is also asked to read the held-out instances in the other
presentation: the same direction, not a new probe.

AUROC is computed in each fold and averaged. Decision values of different folds come from different fits, whose offsets
differ, so the pooled AUROC mixes scales; it is given beside the mean, not instead of it. A fold whose held-out rows
hold one class has no AUROC: it is NaN in `fold_auroc`, left out of the mean, and counted in `excluded_folds`.

All label sets of a layer and fold (the real labels and all shuffles) are fitted together by `probes.logistic`, and
layers run side by side (`probes.parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, binary, checked, finite, same_rows
from probes.auroc import auroc
from probes.errors import ProbeError
from probes.folds import assign_folds, group_codes, scorable, shuffled_labels
from probes.logistic import Standardiser, fit_logistic
from probes.parallel import for_each


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbeResult:
    """What the probes of all layers found, with the folds and null draws it rests on.

    `auroc` [layer] is the mean over scored folds of `fold_auroc` [layer, fold]; `pooled` [layer] ranks all held-out
    rows together. `margins` [layer, row] are held-out decision values in logits: row r is judged by the probe that did
    not train on its fold, `folds[r]`. `null` [shuffle, layer] repeats `auroc` on shuffled labels. The `transfer_`
    fields are the same for the other presentation, and None if there was none. `n` counts rows, `n_groups` instances.
    """

    auroc: FloatArray
    pooled: FloatArray
    fold_auroc: FloatArray
    null: FloatArray
    margins: FloatArray
    transfer_auroc: FloatArray | None
    transfer_null: FloatArray | None
    transfer_margins: FloatArray | None
    folds: IntArray
    labels: IntArray
    n: int
    n_groups: int
    penalty: float
    method: str

    @property
    def excluded_folds(self) -> int:
        """How many folds had no AUROC because their held-out rows hold one class."""
        return int(np.isnan(self.fold_auroc[0]).sum())

    @property
    def p_value(self) -> FloatArray:
        """Chance per layer of an AUROC this high under the null, (1 + shuffles at least as high) / (1 + shuffles).

        Each layer is judged alone; over many layers use `p_max`. NaN if no shuffle was run.
        """
        return _p_value(self.auroc, self.null)

    @property
    def transfer_p_value(self) -> FloatArray | None:
        """The same for the other presentation."""
        if self.transfer_auroc is None or self.transfer_null is None:
            return None
        return _p_value(self.transfer_auroc, self.transfer_null)

    @property
    def p_max(self) -> float:
        """Chance of a best layer this good: the maximum over layers against each shuffle's own maximum."""
        return float(_p_value(self.auroc.max(keepdims=True), self.null.max(axis=1, keepdims=True))[0])

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
        return self._right(self.margins)

    @property
    def transfer_decodable(self) -> BoolArray | None:
        """The same for the rows of the other presentation, at the same layers."""
        return None if self.transfer_margins is None else self._right(self.transfer_margins)

    def _right(self, margins: FloatArray) -> BoolArray:
        at_layer = margins[self.chosen_layer[self.folds], np.arange(self.n)]
        right: BoolArray = np.where(self.labels == 1, at_layer > 0, at_layer < 0)
        return right


def fit_probes(
    features: npt.NDArray[np.floating],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    transfer: npt.NDArray[np.floating] | None = None,
    folds: int = 5,
    penalty: float = 1.0,
    shuffles: int = 100,
    stratified: bool = True,
    seed: int,
) -> ProbeResult:
    """Fit a probe for `labels` [row] (0/1) to every layer of `features` [layer, row, feature], with its controls.

    `groups` [row] names each row's instance. `transfer` [layer, row, feature] holds the same rows in the other
    presentation. `penalty` is scikit-learn's C: larger means weaker regularisation. `stratified` chooses
    StratifiedGroupKFold over GroupKFold. Equal arguments give equal results; `shuffles=0` leaves p-values NaN.
    """
    acts, target, codes = _inputs(features, labels, groups, transfer, penalty=penalty, shuffles=shuffles)
    assigned = assign_folds(target, codes, folds=folds, stratified=stratified, seed=seed)
    scored = scorable(target, assigned, folds=folds)
    shuffled = shuffled_labels(target, codes, assigned, shuffles=shuffles, seed=seed)
    sets = np.concatenate([target[:, None], shuffled], axis=1)

    layers, rows = acts.shape[:2]
    sources = [acts] if transfer is None else [acts, np.asarray(transfer)]
    # Real labels are set 0, shuffles follow; the first axis is the presentation that is read.
    scores = np.full((len(sources), layers, folds, 1 + shuffles), np.nan)
    margins = np.zeros((len(sources), layers, rows))

    def fit_layer(layer: int) -> None:
        for fold in range(folds):
            training, held_out = assigned != fold, assigned == fold
            standardise = Standardiser.of(acts[layer, training])
            probe = fit_logistic(standardise(acts[layer, training]), sets[training], penalty=penalty)
            for index, source in enumerate(sources):
                decisions = probe.decision(standardise(source[layer, held_out]))
                margins[index, layer, held_out] = decisions[:, 0]
                if scored[fold]:
                    scores[index, layer, fold] = auroc(decisions, sets[held_out])

    for_each(layers, fit_layer)
    means = scores[:, :, scored].mean(axis=2)
    moved = transfer is not None
    splitter = "StratifiedGroupKFold" if stratified else "GroupKFold"
    return ProbeResult(
        auroc=means[0, :, 0],
        pooled=auroc(margins[0].T, np.repeat(target[:, None], layers, axis=1)),
        fold_auroc=scores[0, :, :, 0],
        null=means[0, :, 1:].T,
        margins=margins[0],
        transfer_auroc=means[1, :, 0] if moved else None,
        transfer_null=means[1, :, 1:].T if moved else None,
        transfer_margins=margins[1] if moved else None,
        folds=assigned,
        labels=target,
        n=rows,
        n_groups=len(np.unique(codes)),
        penalty=penalty,
        method=(
            f"L2 logistic regression (C={penalty:g}), standardised on training rows; {folds} folds by group "
            f"({splitter}), mean of per-fold AUROC; null of {shuffles} label shuffles over groups, all refitted"
        ),
    )


def _inputs(
    features: npt.NDArray[np.floating],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    transfer: npt.NDArray[np.floating] | None,
    *,
    penalty: float,
    shuffles: int,
) -> tuple[npt.NDArray[np.floating], IntArray, IntArray]:
    """Check everything that can be checked before the first fit."""
    acts = checked("features", features, ("layer", "row", "feature"))
    target = binary("labels", labels)
    codes = group_codes(groups)
    same_rows("labels", len(target), "features", acts.shape[1])
    same_rows("groups", len(codes), "features", acts.shape[1])
    if not penalty > 0:
        raise ProbeError(f"penalty (C) is {penalty}; it must be above 0")
    if shuffles < 0:
        raise ProbeError(f"shuffles is {shuffles}; it must be 0 or more")
    if len(np.unique(target)) < 2:
        raise ProbeError(f"all {len(target)} labels are {target[0]}; a probe needs rows of both classes")
    finite("features", acts)
    if transfer is not None:
        if np.shape(transfer) != acts.shape:
            raise ProbeError(
                f"transfer has shape {np.shape(transfer)} and features {acts.shape}; both need the same layers, "
                "rows and features, row for row the same instance"
            )
        finite("transfer", np.asarray(transfer))
    return acts, target, codes


def _p_value(observed: FloatArray, null: FloatArray) -> FloatArray:
    """Return (1 + draws at least as high) / (1 + draws) for each column; the 1 counts the observed labeling itself."""
    if len(null) == 0:
        return np.full(len(observed), np.nan)
    # Fits agree to about 1e-8, so equal rankings give equal AUROC; the slack only covers the rounding of the mean.
    as_high = (null >= observed - 1e-12).sum(axis=0)
    p_values: FloatArray = (1 + as_high) / (1 + len(null))
    return p_values
