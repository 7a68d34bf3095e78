"""Two probes with a closed form: ridge regression on ±1 targets, and the difference of the class means.

Ridge minimises  |y - X w - b|^2 + |w|^2 / C  with y = +1 for label 1 and -1 for label 0: scikit-learn's RidgeClassifier
with alpha = 1 / C. C is used so that a larger penalty number means the same for every member: weaker regularisation.
Decision values are on the scale of the targets, not in logits. One factorisation serves all label sets.

The mean difference is the direction from the mean of class 0 to the mean of class 1, with the intercept at the midpoint
between them. It has nothing to tune. It finds the direction along which the classes lie apart even where a penalised
probe prefers a combination of features that predicts better.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from probes.arrays import FloatArray
from probes.directions import Directions, both_classes


class Ridge:
    """Training rows [row, feature] on which any number of label sets and penalties can be fitted."""

    def __init__(self, rows: FloatArray) -> None:
        self._mean = rows.mean(axis=0)
        self._rows = rows - self._mean
        self._wide = rows.shape[0] <= rows.shape[1]
        self._gram = self._rows @ self._rows.T if self._wide else self._rows.T @ self._rows

    def fit(self, labels: npt.ArrayLike, *, penalty: float) -> Directions:
        """Fit every column of `labels` [row, set] (0/1) with C = `penalty`."""
        targets = 2.0 * both_classes(labels) - 1.0
        level = targets.mean(axis=0)
        system = self._gram + np.eye(len(self._gram)) / penalty
        factor = cho_factor(system, lower=True, overwrite_a=True, check_finite=False)
        right = targets - level
        if self._wide:
            weights = self._rows.T @ cho_solve(factor, right, check_finite=False)
        else:
            weights = cho_solve(factor, self._rows.T @ right, check_finite=False)
        return Directions(weights=weights, intercept=level - self._mean @ weights)


class MeanDifference:
    """Training rows [row, feature] whose class means are compared, for any number of label sets."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows

    def fit(self, labels: npt.ArrayLike, *, penalty: float) -> Directions:
        """Return the direction of every column of `labels` [row, set] (0/1); `penalty` has no part in it."""
        del penalty
        targets = both_classes(labels)
        ones = self._rows.T @ (targets / targets.sum(axis=0))
        zeros = self._rows.T @ ((1 - targets) / (1 - targets).sum(axis=0))
        weights = ones - zeros
        return Directions(weights=weights, intercept=-((ones + zeros) / 2 * weights).sum(axis=0))
