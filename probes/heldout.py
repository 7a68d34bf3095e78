"""How far a cross-validated AUROC may lie from the truth: the variance that its intervals and power figures share.

Estimand. Each fold's probe, once fitted, has an AUROC on fresh rows of the population: the chance that it ranks a new
row of class 1 above a new row of class 0. The estimand θ is the mean of these over the scored folds. It belongs to the
probes that were fitted on this study's training rows, not to probes of all possible studies.

Variance. Three parts are multiplied.

1. Rows. In a fold with m rows of class 1 and n of class 0, an AUROC θ has the variance

       [θ(1 - θ) + (m + n - 2)(Q - θ²)] / (m n)

   with Q the chance that two rows of one class both beat the same row of the other. Q is taken from the binormal model
   (normal scores of equal spread in both classes), where it follows from θ alone. Folds hold out different rows, so the
   variance of their mean is the sum over folds / folds².
2. Instances. Rows of one instance are alike. With ρ the correlation of held-out margins in an instance (measured, after
   taking off the mean of each fold and class), the variance grows by 1 + ρ (rows an instance - 1), or shrinks where an
   instance holds both classes.
3. Cross-validation. Held-out rows of one fold are training rows of the others: row i helps to judge row r and row r
   helps to judge i, by the same product of the two. What the weights owe to chance therefore enters twice and in step,
   and the folds are not independent. With h the share of the weights' variance that is noise, the variance grows by
   1 + h. Under labels that say nothing h is 1: the null of a cross-validated AUROC has nearly twice the
   textbook variance. An interval that leaves this out covers about 83 % where it says 95 %.
   A probe trained on N rows in d directions has (Φ⁻¹(θ))² = 2 (d / N) (1 - h)² / h, which gives h.

Constraint. d is a property of the features that margins do not show. The default, d = 2 N, fits residual streams that
are wider than the study has rows. With d far below N it is too cautious: 24 features and 200 rows gave 97 to 98.5 %
coverage for 95 %, and 94 to 97 % once d = 24 was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri, owens_t

from probes.arrays import FloatArray, IntArray, binary, checked, same_rows
from probes.auroc import auroc
from probes.errors import ProbeError
from probes.folds import group_codes

_DIRECTIONS_A_ROW = 2.0
_LARGEST_CORRELATION = 0.95


class HeldOut(Protocol):
    """Held-out margins [layer, row] with the labels, folds and groups [row] they rest on, as a ProbeResult has them."""

    @property
    def margins(self) -> FloatArray: ...
    @property
    def labels(self) -> IntArray: ...
    @property
    def folds(self) -> IntArray: ...
    @property
    def groups(self) -> IntArray: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Study:
    """Checked arrays of a result, restricted to scored folds, and what the variance needs.

    `rows` [fold] lists the rows of each scored fold; `ones` and `zeros` [fold] count its classes; `training` is the mean
    number of rows a probe was trained on; `instances` [layer] is the factor of part 2 above.
    """

    margins: FloatArray
    labels: IntArray
    folds: IntArray
    groups: IntArray
    rows: tuple[IntArray, ...]
    ones: FloatArray
    zeros: FloatArray
    auroc: FloatArray
    training: float
    instances: FloatArray

    @property
    def n(self) -> int:
        """How many rows lie in scored folds."""
        return sum(len(rows) for rows in self.rows)

    @property
    def n_groups(self) -> int:
        """How many instances those rows come from."""
        return len(np.unique(self.groups[np.concatenate(self.rows)]))


def study(result: HeldOut) -> Study:
    """Check `result` and measure what part 1 and 2 of the variance need; at least one fold must hold both classes."""
    margins = checked("margins", result.margins, ("layer", "row")).astype(np.float64)
    labels = binary("labels", result.labels)
    folds = checked("folds", result.folds, ("row",)).astype(np.int64)
    groups = group_codes(result.groups)
    for name, found in (("labels", labels), ("folds", folds), ("groups", groups)):
        same_rows(name, len(found), "margins", margins.shape[1])
    if not np.isfinite(margins).all():
        raise ProbeError(f"margins holds {int((~np.isfinite(margins)).sum())} values that are not finite; fit again")
    names = np.unique(folds)
    rows = tuple(
        held_out
        for held_out in (np.flatnonzero(folds == fold) for fold in names)
        if len(np.unique(labels[held_out])) == 2
    )
    if not rows:
        raise ProbeError(
            f"each of {len(names)} folds holds rows of one class ({len(labels)} rows); an AUROC needs a fold with both, "
            "use fewer folds or more groups of the rarer label"
        )
    ones = np.array([labels[held_out].sum() for held_out in rows], dtype=np.float64)
    zeros = np.array([len(held_out) for held_out in rows]) - ones
    areas = [auroc(margins[:, held_out].T, np.repeat(labels[held_out, None], len(margins), 1)) for held_out in rows]
    return Study(
        margins=margins,
        labels=labels,
        folds=folds,
        groups=groups,
        rows=rows,
        ones=ones,
        zeros=zeros,
        auroc=np.mean(areas, axis=0),
        training=float(np.mean([len(labels) - (folds == folds[held_out[0]]).sum() for held_out in rows])),
        instances=_instances(margins, labels, groups, rows),
    )


def row_variance(theta: FloatArray, ones: FloatArray, zeros: FloatArray) -> FloatArray:
    """Return the variance of the mean of per-fold AUROC at `theta` […] for folds of `ones` and `zeros` [fold] rows.

    This is part 1 of the module text: independent rows, binormal scores, fixed probes.
    """
    at = np.asarray(theta, dtype=np.float64)[..., None]
    quantile = ndtri(at)
    # Two normal scores that share the row they are compared with are correlated by 1/2; Owen's T gives their joint chance.
    both = at - 2 * owens_t(quantile, 1 / np.sqrt(3))
    fold = (at * (1 - at) + (ones + zeros - 2) * (both - at**2)) / (ones * zeros)
    variance: FloatArray = np.maximum(fold, 0).sum(axis=-1) / len(ones) ** 2
    return variance


def in_step(theta: FloatArray, training: float | FloatArray, directions: float | None) -> FloatArray:
    """Return the factor of part 3: how much cross-validation adds at AUROC `theta` with `training` rows a probe."""
    ratio = _DIRECTIONS_A_ROW if directions is None else directions / training
    half = 1 + np.square(ndtri(np.clip(theta, 1e-12, 1 - 1e-12))) / (4 * ratio)
    # The smaller root of h² - 2 half h + 1 = 0, written so that a large `half` does not cancel.
    noise: FloatArray = 1 / (half + np.sqrt(np.square(half) - 1))
    return 1 + noise


def variance(of: Study, theta: FloatArray, directions: float | None) -> FloatArray:
    """Return the variance of each layer's AUROC if the estimand were `theta` [layer] (all three parts)."""
    rows = row_variance(theta, of.ones, of.zeros)
    return rows * of.instances * in_step(theta, of.training / of.instances, directions)


def check_level(level: float, directions: float | None) -> None:
    """Refuse a confidence level outside (0, 1) and a number of directions that is not positive."""
    if not 0 < level < 1:
        raise ProbeError(f"level is {level}; it must lie between 0 and 1, such as 0.95")
    if directions is not None and not directions > 0:
        raise ProbeError(f"directions is {directions}; it must be above 0, such as the number of features")


def upper_quantile(level: float) -> float:
    """Return the normal quantile that leaves half of 1 - `level` above it."""
    return float(ndtri((1 + level) / 2))


def tail(value: FloatArray) -> FloatArray:
    """Return the chance of a standard normal value above `value`."""
    above: FloatArray = ndtr(-value)
    return above


def _instances(margins: FloatArray, labels: IntArray, groups: IntArray, rows: tuple[IntArray, ...]) -> FloatArray:
    """Return by how much rows of one instance change the variance, per layer."""
    total = np.zeros(len(margins))  # products of two rows of one instance, over their spread
    constant, slope = 0.0, 0.0  # what centring takes off those products: constant, and slope in the correlation
    pairs, signed, weights = 0.0, 0.0, 0.0
    for held_out in rows:
        classes, codes = labels[held_out], groups[held_out]
        share = np.where(classes == 1, 1 / classes.sum(), 1 / (classes == 0).sum())
        weights += float(np.square(share).sum())
        belongs = (codes[:, None] == np.unique(codes)).astype(np.float64)  # [row, instance]
        if belongs.shape[1] == len(held_out):
            continue
        values = margins[:, held_out].copy()
        for label in (0, 1):
            values[:, classes == label] -= values[:, classes == label].mean(axis=1, keepdims=True)
        spread = np.square(values).sum(axis=1, keepdims=True) / max(len(held_out) - 2, 1)
        values = np.divide(values, np.sqrt(spread), out=np.zeros_like(values), where=spread > 0)
        # Over the rows of an instance, (sum)² - sum of squares is the sum of products of two of them.
        total += np.square(values @ belongs).sum(axis=1) - np.square(values).sum(axis=1)
        pairs += float(np.square(belongs.sum(axis=0)).sum() - len(held_out))
        signs = np.where(classes == 1, share, -share)
        signed += float(np.square(signs @ belongs).sum() - np.square(share).sum())
        for label in (0, 1):
            count = belongs[classes == label].sum(axis=0)
            lost = count * (count - 1) / (classes == label).sum()
            constant += float(lost.sum())
            slope += float((lost * (count - 1)).sum())
    if pairs == 0:
        return np.ones(len(margins))
    # The products' expected sum is pairs · ρ - constant - slope · ρ; solved for ρ.
    correlation = np.clip((total + constant) / max(pairs - slope, 0.1 * pairs), 0, _LARGEST_CORRELATION)
    factor: FloatArray = 1 + correlation * signed / weights
    return factor
