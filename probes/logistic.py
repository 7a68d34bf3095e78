"""L2 logistic regression for many label sets on the same rows, solved together.

Problem. A probe with a label-shuffle null fits the same rows again and again: layers x folds x (1 + shuffles) is easily
15,000 fits. A library that fits one label set at a time spends its time re-reading the same matrix.

Objective, for each label set, with C = `penalty` and an intercept that is not penalised (scikit-learn's convention):

    |w|^2 / 2  +  C * sum over rows of log(1 + exp(m)) - y * m,      m = x . w + b

Mechanism.
1. Rotation. The L2 term does not change when the features are rotated, and the optimal w lies in the span of the rows.
   So the rows are expressed once in their own singular basis: min(rows, features) columns, mutually orthogonal. This is
   exact, and the solution is rotated back.
2. Newton's method, all label sets side by side. Each Newton system is solved by conjugate gradients, whose only
   expensive step is one product with the rows, shared by all label sets. In the singular basis the Hessian with equal
   row weights is diagonal; that diagonal, at the label set's mean row weight, is the preconditioner.
3. Damping. A step is halved until the objective falls (Armijo), separately for each label set.
4. Stopping. A label set is done, and leaves the batch, when its gradient norm is `tolerance` times the one at zero
   weights. The objective is 1-strongly convex in w, so the remaining error in w is at most about that gradient norm. If
   any label set does not get there, the whole fit is an error: a half-fitted probe looks like a weak one.

Constraints. The batch holds [rows, label sets] arrays in float64, so memory is a few times rows x label sets. The basis
comes from the smaller Gram matrix, whose rounding is about 1e-16 times its largest eigenvalue; times C, that bounds how
exact the weights are. It is far below 1e-4 for standardised features and C up to about 1,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from probes.arrays import FloatArray, IntArray
from probes.errors import ConvergenceError, ProbeError

# Sufficient decrease of the line search, and the slack that keeps rounding in the objective from rejecting a good step.
_ARMIJO = 1e-4
_SLACK = 1e-10
_SHORTEST_STEP = 1e-10


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
class Logistic:
    """The optimum of every label set: weights [feature, set], intercept [set], and the steps the slowest one took."""

    weights: FloatArray
    intercept: FloatArray
    steps: int

    def decision(self, rows: FloatArray) -> FloatArray:
        """Return the decision values [row, set] in logits; positive means label 1."""
        values: FloatArray = rows @ self.weights + self.intercept
        return values


def fit_logistic(
    rows: FloatArray,
    labels: IntArray | FloatArray,
    *,
    penalty: float = 1.0,
    tolerance: float = 1e-8,
    max_steps: int = 100,
) -> Logistic:
    """Fit `rows` [row, feature] to every column of `labels` [row, set] (0/1); each column needs both classes."""
    targets = np.asarray(labels, dtype=np.float64)
    share = targets.mean(axis=0)
    if ((share == 0) | (share == 1)).any():
        constant = int(((share == 0) | (share == 1)).sum())
        raise ProbeError(
            f"{constant} of {targets.shape[1]} label sets have one class in {len(targets)} training rows; "
            "each needs rows of both"
        )
    basis, unrotate = _singular_basis(rows)
    # The intercept rides along as a last column of ones with ridge 0, so every formula below covers it.
    columns = np.hstack([basis, np.ones((len(basis), 1))])
    start = np.zeros((columns.shape[1], targets.shape[1]))
    start[-1] = np.log(share / (1 - share))
    solution, steps = _newton(columns, targets, start, penalty=penalty, tolerance=tolerance, max_steps=max_steps)
    return Logistic(weights=unrotate(solution[:-1]), intercept=solution[-1], steps=steps)


def _singular_basis(rows: FloatArray) -> tuple[FloatArray, Callable[[FloatArray], FloatArray]]:
    """Return the rows in their singular basis [row, rank], and the way back for weights, [rank, set] to [feature, set].

    The smaller Gram matrix is decomposed. Directions whose eigenvalue is below its rounding error are dropped: they
    carry no measurable part of any row, and dividing by their size would only amplify noise.
    """
    wide = rows.shape[0] < rows.shape[1]
    gram = rows @ rows.T if wide else rows.T @ rows
    values, vectors = np.linalg.eigh(gram)
    keep = values > values[-1] * len(gram) * np.finfo(np.float64).eps
    values, vectors = values[keep], vectors[:, keep]
    if wide:
        size = np.sqrt(values)
        return vectors * size, lambda weights: rows.T @ (vectors @ (weights / size[:, None]))
    return rows @ vectors, lambda weights: vectors @ weights


def _newton(
    columns: FloatArray, labels: FloatArray, start: FloatArray, *, penalty: float, tolerance: float, max_steps: int
) -> tuple[FloatArray, int]:
    """Minimise the objective of every label set; return the coefficients [column, set] and the number of steps."""
    ridge = np.ones((len(start), 1))
    ridge[-1] = 0.0
    sizes = np.square(columns).sum(axis=0)[:, None]
    solution = np.empty_like(start)
    active = np.arange(start.shape[1])
    weights, margins = start, columns @ start
    initial = np.zeros(0)
    floor = penalty * len(labels) * 1e3 * np.finfo(np.float64).eps
    for step in range(max_steps + 1):
        chance = expit(margins)
        gradient = ridge * weights + penalty * (columns.T @ (chance - labels))
        norm = np.sqrt(_dot(gradient, gradient))
        if step == 0:
            initial = norm
        # Constant features make the start the optimum; its gradient is then rounding, which no step can halve.
        going = norm > np.maximum(tolerance * initial, floor)
        solution[:, active[~going]] = weights[:, ~going]
        if not going.any():
            return solution, step
        if not going.all():
            active, norm, initial = active[going], norm[going], initial[going]
            labels, chance, gradient = labels[:, going], chance[:, going], gradient[:, going]
            weights, margins = weights[:, going], margins[:, going]
        curvature = penalty * chance * (1 - chance)
        # Superlinear convergence: the nearer the optimum, the more exactly the Newton system is solved.
        enough = norm * np.minimum(0.5, np.sqrt(norm / initial))
        move, shift = _direction(columns, ridge, sizes, curvature, gradient, enough=enough)
        length = _step_length(ridge, weights, move, margins, shift, labels, penalty=penalty, slope=_dot(gradient, move))
        weights = weights + length * move
        margins = margins + length * shift
    raise ConvergenceError(
        f"{len(active)} label sets did not converge in {max_steps} Newton steps "
        f"(gradient {float((norm / initial).max()):.1e} of its start, needed {tolerance:.0e}); "
        "use a smaller penalty (C)"
    )


def _direction(
    columns: FloatArray,
    ridge: FloatArray,
    sizes: FloatArray,
    curvature: FloatArray,
    gradient: FloatArray,
    *,
    enough: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Solve the Newton systems by preconditioned conjugate gradients; return the moves and how they shift the margins.

    Stopping early is safe at any point: conjugate gradients from zero always give a direction of descent.
    """
    inverse = 1.0 / np.maximum(ridge + sizes * curvature.mean(axis=0), np.finfo(np.float64).tiny)
    move = np.zeros_like(gradient)
    shift = np.zeros_like(curvature)
    residual = -gradient
    search = inverse * residual
    energy = _dot(residual, search)
    for _ in range(2 * len(columns)):
        image = columns @ search
        product = ridge * search + columns.T @ (curvature * image)
        advance = _ratio(energy, _dot(search, product))
        move += advance * search
        shift += advance * image
        residual -= advance * product
        if (_dot(residual, residual) <= np.square(enough)).all():
            break
        scaled = inverse * residual
        previous, energy = energy, _dot(residual, scaled)
        search *= _ratio(energy, previous)
        search += scaled
    return move, shift


def _step_length(
    ridge: FloatArray,
    weights: FloatArray,
    move: FloatArray,
    margins: FloatArray,
    shift: FloatArray,
    labels: FloatArray,
    *,
    penalty: float,
    slope: FloatArray,
) -> FloatArray:
    """Halve each label set's step until its objective falls by a fair part of what the slope promises."""

    def objective(length: FloatArray) -> FloatArray:
        moved, at = weights + length * move, margins + length * shift
        loss: FloatArray = (np.logaddexp(0.0, at) - labels * at).sum(axis=0)
        return 0.5 * _dot(ridge * moved, moved) + penalty * loss

    length = np.ones(weights.shape[1])
    now = objective(np.zeros_like(length))
    while True:
        failed = objective(length) > now + _ARMIJO * length * slope + _SLACK * np.abs(now)
        if not failed.any():
            return length
        length = np.where(failed, length / 2, length)
        if length.min() < _SHORTEST_STEP:
            raise ConvergenceError(
                f"the line search of {int(failed.sum())} label sets shrank below {_SHORTEST_STEP:.0e}; "
                "use a smaller penalty (C)"
            )


def _dot(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the inner product of each pair of columns."""
    products: FloatArray = np.einsum("ij,ij->j", left, right)
    return products


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Divide, with 0 where a label set is already solved exactly (0 / 0)."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
