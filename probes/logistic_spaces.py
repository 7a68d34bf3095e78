"""Coordinates for the logistic solver, in which its preconditioner is the identity.

With X the centred training rows and c one weight for all rows, the approximate Hessian is P = I + c X'X. Every quantity
of the weights w can be held in one of two ways:

* `FeatureSpace` (rows outnumber features): w = A v with A'PA = 1, from the Cholesky factor of P. The exact Hessian
  becomes 1 + T'(W - c)T with T = XA and W the rows' own weights: two products with T an iteration.
* `RowSpace` (features outnumber rows): w = X'a with a in row coordinates, and K = XX'. The gradient is X' times a row
  vector too, and the preconditioner acts on it as (1 + cK)^-1. Conjugate gradients then need only S = K (1 + cK)^-1, the
  smoother that gives the margins of a preconditioned row vector: one product with S an iteration, and inner products
  taken through S.

Neither loses precision to the size of K: the norm of S, like that of T'T, is at most 1 / c. But row coordinates are not
unique. X is centred, so adding a constant to all rows changes nothing, and so it is with equal rows. What S does not
see, conjugate gradients do not control: it grows from one iteration to the next until its rounding drowns the rest.
`centre` takes out the constant, and the float32 copy of S is lifted a little, so that the rest is seen and kept small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky, solve_triangular
from scipy.linalg.lapack import dpotrf, dpotri

from probes.arrays import FloatArray

Small = npt.NDArray[np.float32]

# Relative to the norm of S; a hundred times the rounding of float32. Directions need no more exactness than that.
_LIFT = 1e-5


def dot(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the inner product of each pair of columns."""
    products: npt.NDArray[Any] = np.einsum("ij,ij->j", left, right)
    return products


def _inverse(system: FloatArray) -> FloatArray:
    """Return the inverse of a symmetric positive definite matrix, which is overwritten."""
    factor, failed = dpotrf(system, lower=1, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError(f"the matrix is not positive definite at row {failed}")
    # The lower triangle is filled; what is above it stays what it was.
    triangle = np.tril(dpotri(factor, lower=1, overwrite_c=1)[0])
    inverse: FloatArray = triangle + np.tril(triangle, -1).T
    return inverse


class RowSpace:
    """Weights held as X'a: states and directions are [row, set]."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows
        self._kernel = rows @ rows.T
        self.size = len(rows)
        self._even = np.full(self.size, 1 / self.size, dtype=np.float32)

    def precondition(self, weight: float) -> None:
        """Use `weight` as the curvature of every row."""
        self.weight = weight
        system = weight * self._kernel
        system.flat[:: self.size + 1] += 1.0
        # With S = (weight K + 1)^-1 K, weight S = 1 - (weight K + 1)^-1: the inverse alone is a third of a solve.
        inverse = _inverse(system)
        inverse *= -1.0
        inverse.flat[:: self.size + 1] += 1.0
        inverse /= weight
        self._smooth = inverse
        self._small = self._smooth.astype(np.float32)
        self._small.flat[:: self.size + 1] += np.float32(_LIFT / weight)

    def gradient(self, state: FloatArray, pull: FloatArray) -> FloatArray:
        """Return the gradient of the weights, given `pull` [row, set], the loss's derivative by the margins."""
        slope = state + pull
        slope -= slope.mean(axis=0)
        return slope

    def image(self, vector: Small) -> Small:
        """Return how a direction moves the margins."""
        image: Small = self._small @ vector
        return image

    def inner(self, left: Small, image: Small, right: Small) -> Small:
        """Return the inner products of directions, given the image of the left ones."""
        return dot(image, right)

    def product(self, vector: Small, image: Small, pull: Small) -> Small:
        """Return the Hessian's product; `pull` is the row weight times the margins' movement."""
        product = pull
        product += vector
        product -= np.float32(self.weight) * image
        return product

    def centre(self, vector: Small) -> None:
        """Take out what the rows cannot see."""
        vector -= self._even @ vector

    def step(self, move: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return a direction as a change of state, and how it moves the margins, in float64."""
        image = self._smooth @ move
        return move - self.weight * image, image

    def dot(self, state: FloatArray, delta: FloatArray, image: FloatArray) -> FloatArray:
        """Return the inner product of the weights of `state` with those of a step whose image is `image`."""
        return dot(state, image)

    def weights(self, state: FloatArray) -> FloatArray:
        """Return the weights [feature, set]."""
        weights: FloatArray = self._rows.T @ state
        return weights


class FeatureSpace:
    """Weights held as they are: states are [feature, set], directions are in the preconditioner's coordinates."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows
        self._gram = rows.T @ rows
        self.size = rows.shape[1]

    def precondition(self, weight: float) -> None:
        """Use `weight` as the curvature of every row."""
        self.weight = weight
        system = weight * self._gram
        system.flat[:: self.size + 1] += 1.0
        self._factor = cholesky(system, lower=True, overwrite_a=True, check_finite=False)
        across = solve_triangular(self._factor, self._rows.T, lower=True, check_finite=False)
        self._back = np.ascontiguousarray(across, dtype=np.float32)
        self._forth = np.ascontiguousarray(across.T, dtype=np.float32)

    def gradient(self, state: FloatArray, pull: FloatArray) -> FloatArray:
        """Return the gradient of the weights, given `pull` [row, set], the loss's derivative by the margins."""
        slope = state + self._rows.T @ pull
        whole: FloatArray = solve_triangular(self._factor, slope, lower=True, check_finite=False)
        return whole

    def image(self, vector: Small) -> Small:
        """Return how a direction moves the margins."""
        image: Small = self._forth @ vector
        return image

    def inner(self, left: Small, image: Small, right: Small) -> Small:
        """Return the inner products of directions, given the image of the left ones."""
        return dot(left, right)

    def product(self, vector: Small, image: Small, pull: Small) -> Small:
        """Return the Hessian's product; `pull` is the row weight times the margins' movement."""
        product: Small = self._back @ (pull - np.float32(self.weight) * image)
        product += vector
        return product

    def centre(self, vector: Small) -> None:
        """Do nothing: these coordinates are unique."""

    def step(self, move: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return a direction as a change of state, and how it moves the margins, in float64."""
        delta = solve_triangular(self._factor, move, lower=True, trans="T", check_finite=False)
        return delta, self._rows @ delta

    def dot(self, state: FloatArray, delta: FloatArray, image: FloatArray) -> FloatArray:
        """Return the inner product of the weights of `state` with those of a step."""
        return dot(state, delta)

    def weights(self, state: FloatArray) -> FloatArray:
        """Return the weights [feature, set]."""
        return state
