"""What a fitted probe is: how rows are standardised, then one direction and an intercept for each label set.

Means and scales are measured on training rows only. Taken from all rows, they would carry the held-out rows into the
fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray
from probes.errors import ProbeError


@dataclass(frozen=True, slots=True, eq=False)
class Standardiser:
    """Feature means and scales of one set of training rows, to be applied to any rows.

    A constant feature gets scale 1. Its computed standard deviation is rounding, not spread, and dividing by it would
    turn a feature that says nothing into the largest one.
    """

    mean: FloatArray
    scale: FloatArray

    @classmethod
    def of(cls, rows: npt.NDArray[np.floating]) -> Standardiser:
        """Measure `rows` [row, feature] (population standard deviation, as scikit-learn's StandardScaler)."""
        mean = rows.mean(axis=0, dtype=np.float64)
        variance = np.square(rows - mean).mean(axis=0)
        epsilon = np.finfo(np.float64).eps
        rounding = len(rows) * epsilon * variance + np.square(len(rows) * mean * epsilon)
        scale = np.where(variance <= rounding, 1.0, np.sqrt(variance))
        return cls(mean=mean, scale=scale)

    def __call__(self, rows: npt.NDArray[np.floating]) -> FloatArray:
        """Return the standardised `rows` [row, feature] in float64."""
        standardised: FloatArray = (np.asarray(rows, dtype=np.float64) - self.mean) / self.scale
        return standardised


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """The fit of every label set: weights [feature, set], intercept [set]; `steps` of an iterative solver, else 0."""

    weights: FloatArray
    intercept: FloatArray
    steps: int = 0

    def decision(self, rows: FloatArray) -> FloatArray:
        """Return the decision values [row, set]; positive means label 1."""
        values: FloatArray = rows @ self.weights + self.intercept
        return values


def both_classes(labels: npt.ArrayLike) -> FloatArray:
    """Return label sets [row, set] as floats, or say how many of them have one class in these rows."""
    targets = np.asarray(labels, dtype=np.float64)
    share = targets.mean(axis=0)
    constant = int(((share == 0) | (share == 1)).sum())
    if constant:
        raise ProbeError(
            f"{constant} of {targets.shape[1]} label sets have one class in {len(targets)} training rows; "
            "each needs rows of both"
        )
    return targets
