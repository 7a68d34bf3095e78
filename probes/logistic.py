"""L2 logistic regression for many label sets on the same rows, solved together.

Problem. A probe with a label-shuffle null fits the same rows again and again: layers x folds x (1 + shuffles) is easily
15,000 fits. A library that fits one label set at a time spends its time re-reading the same matrix.

Objective, for each label set, with C = `penalty` and an intercept that is not penalised (scikit-learn's convention):

    |w|^2 / 2  +  C * sum over rows of log(1 + exp(m)) - y * m,      m = x . w + b

Mechanism.
1. Newton's method, all label sets side by side, each Newton system solved by preconditioned conjugate gradients. The
   preconditioner is the Hessian with one row weight for all rows and sets. `probes.logistic_spaces` chooses coordinates
   in which it is the identity, so that an iteration is one product shared by all label sets, or two when rows outnumber
   features. The preconditioner does not change the solution.
2. Two precisions. Gradients and the state are float64; the directions, which only have to point downhill, are found in
   float32. An error there costs a step, not exactness.
3. Start. With one weight for all rows, Newton's system is solved in closed form: the ridge solution. Scaled by a
   one-dimensional search, it lands near the optimum. If the rows weigh much less there, the preconditioner is renewed.
4. Damping. A step is halved until the objective no longer rises notably at its end, separately for each label set.
5. Stopping. A label set is done, and leaves the batch, when a whole Newton step moved its weights by at most `tolerance`
   in Euclidean norm and its gradient fell as it should after such a step. The error that is left is a small part of that
   step, since the step was solved to a tenth and Newton's own error is the square: at the default no weight is off
   by more than about 2e-5. If a label set does not get there, the whole fit is an error: a half-fitted probe looks like
   a weak one.

Constraints. The batch holds a few [row, label set] arrays. Float32 directions bound how large C may get: on standardised
features the weights are right to 1e-4 up to C = 100 and beyond, and a set whose gradient does not fall is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray
from probes.directions import Directions, both_classes
from probes.errors import ConvergenceError
from probes.logistic_spaces import FeatureSpace, RowSpace, Small, dot

TOLERANCE = 1e-3
# How far each Newton system is solved: the residual in its natural norm, relative to where it began.
_LOOSEST, _TIGHTEST = 0.5, 0.1
# A last step must have brought the squared gradient down to this part, or to this part of where it began.
_FALL, _FLOOR = 0.1, 1e-12
# A squared gradient that is rounding and nothing else: where features are constant, the start is the optimum.
_ROUNDING = 1e-20
_MOST_ITERATIONS = 200
# A step may leave this part of its initial slope going up.
_OVERSHOOT = 0.25
_SHORTEST_STEP = 1e-8
# The preconditioner's row weight, of the penalty, until rows turn out to weigh much less (their most is 1/4).
_TYPICAL_WEIGHT = 0.06
# Then, as part of the smallest mean over label sets. Below every set's own mean, the directions that
# the rows do not span (eigenvalue 1) stay inside each set's spectrum, where conjugate gradients do not amplify them.
_SHARED_WEIGHT = 0.5
# Of the penalty: where every row of a set is certain, its curvature says nothing about the steps before.
_LEAST_WEIGHT = 1e-6


class Logistic:
    """Training rows [row, feature] on which any number of label sets and penalties can be fitted."""

    def __init__(self, rows: FloatArray) -> None:
        self._mean = rows.mean(axis=0)
        centred = rows - self._mean
        self._space = RowSpace(centred) if rows.shape[0] <= rows.shape[1] else FeatureSpace(centred)

    def fit(
        self, labels: npt.ArrayLike, *, penalty: float, tolerance: float = TOLERANCE, max_steps: int = 50
    ) -> Directions:
        """Fit every column of `labels` [row, set] (0/1) with C = `penalty`."""
        targets = both_classes(labels)
        # Under an absurd penalty float32 overflows. What follows from that never counts as converged, so it is refused.
        with np.errstate(over="ignore", invalid="ignore"):
            state, intercept, steps = _newton(
                self._space, targets, penalty=penalty, tolerance=tolerance, max_steps=max_steps
            )
        weights = self._space.weights(state)
        return Directions(weights=weights, intercept=intercept - self._mean @ weights, steps=steps)


def fit_logistic(
    rows: FloatArray,
    labels: npt.ArrayLike,
    *,
    penalty: float = 1.0,
    tolerance: float = TOLERANCE,
    max_steps: int = 50,
) -> Directions:
    """Fit `rows` [row, feature] to every column of `labels` [row, set] (0/1); each column needs both classes."""
    return Logistic(rows).fit(labels, penalty=penalty, tolerance=tolerance, max_steps=max_steps)


def _newton(
    space: RowSpace | FeatureSpace, targets: FloatArray, *, penalty: float, tolerance: float, max_steps: int
) -> tuple[FloatArray, FloatArray, int]:
    """Minimise the objective of every label set; return the states, intercepts and the steps of the slowest."""
    sets = targets.shape[1]
    solution, offsets = np.zeros((space.size, sets)), np.zeros(sets)
    active = np.arange(sets)
    space.precondition(_TYPICAL_WEIGHT * penalty)
    state, intercept, margins = _start(space, targets, penalty)
    near = np.zeros(sets, dtype=np.bool_)
    first = last = np.full(sets, np.inf, dtype=np.float32)
    for step in range(max_steps + 1):
        chance = _sigmoid(margins)
        pull = penalty * (chance - targets)
        curvature = penalty * chance * (1 - chance)
        if step == 0:
            shared = _SHARED_WEIGHT * float(curvature.mean(axis=0).min())
            if shared < space.weight / 4:
                space.precondition(max(shared, _LEAST_WEIGHT * penalty))
        slope, level = space.gradient(state, pull), pull.sum(axis=0)
        begin = _Energy.of(space, -slope, -level)
        if step == 0:
            first = begin.value
        done = (near & (begin.value <= _FALL * last)) | (begin.value <= _FLOOR * first) | (begin.value <= _ROUNDING)
        if done.any():
            solution[:, active[done]], offsets[active[done]] = state[:, done], intercept[done]
            if done.all():
                return solution, offsets, step
            going = ~done
            active, targets, intercept, begin = active[going], targets[:, going], intercept[going], begin.of_sets(going)
            state, margins, first, last = state[:, going], margins[:, going], first[going], last[going]
            pull, curvature = pull[:, going], curvature[:, going]
        # The nearer the optimum, the more exactly: superlinear convergence.
        enough = np.clip(np.sqrt(begin.value / last), _TIGHTEST, _LOOSEST)
        move, shift = _direction(space, curvature, begin, goal=enough * enough * begin.value)
        last = begin.value
        delta, image = space.step(move)
        along = image + shift
        # The objective along the step of length t has the slope `rising` + t * `square` + the rows' own part.
        rising, square = space.dot(state, delta, image), space.dot(delta, delta, image)
        length = _damping(margins, along, targets, pull, rising=rising, square=square, penalty=penalty)
        state += length * delta
        intercept = intercept + length * shift
        margins += length * along
        # A damped step says nothing about how near the end is.
        near = (square <= tolerance**2) & (length == 1.0)
    raise ConvergenceError(
        f"{len(active)} of {sets} label sets did not converge in {max_steps} Newton steps at penalty (C) {penalty:g} "
        f"(last step {float(np.sqrt(square.max())):.1e}, needed {tolerance:.0e}); use a smaller penalty (C)"
    )


def _start(
    space: RowSpace | FeatureSpace, targets: FloatArray, penalty: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the scaled ridge solution: states, intercepts and margins."""
    share = targets.mean(axis=0)
    intercept = np.log(share / (1 - share))
    state, image = space.step(space.gradient(np.zeros((space.size, len(share))), penalty * (targets - share)))
    square = space.dot(state, state, image)
    length = np.ones(len(share))
    for _ in range(3):  # Newton's method for the best length; the objective is convex along it
        chance = _sigmoid(intercept + length * image)
        slope = length * square + penalty * dot(chance - targets, image)
        bend = square + penalty * dot(chance * (1 - chance) * image, image)
        length = np.clip(length - _ratio(slope, bend), 0.25 * length, 4.0 * length)
    return length * state, intercept, intercept + length * image


@dataclass(frozen=True, slots=True, eq=False)
class _Energy:
    """A residual (the negative gradient) in float32, what it does to the margins, and its squared norm by set."""

    residual: Small
    rest: Small
    image: Small
    value: Small
    scale: np.float32

    @classmethod
    def of(cls, space: RowSpace | FeatureSpace, residual: FloatArray, rest: FloatArray) -> _Energy:
        """Measure the residual of weights (in coordinates) and of intercepts [set]."""
        left, right = residual.astype(np.float32), rest.astype(np.float32)
        image = space.image(left)
        scale = np.float32(1 / (len(image) * space.weight))
        return cls(left, right, image, space.inner(left, image, left) + scale * right * right, scale)

    def of_sets(self, sets: BoolArray) -> _Energy:
        """Keep some label sets."""
        return _Energy(self.residual[:, sets], self.rest[sets], self.image[:, sets], self.value[sets], self.scale)


def _direction(
    space: RowSpace | FeatureSpace, curvature: FloatArray, begin: _Energy, *, goal: Small
) -> tuple[FloatArray, FloatArray]:
    """Solve the Newton systems by conjugate gradients until the energy is at the `goal` [set]; return the moves.

    Stopping early is safe at any point: conjugate gradients from zero always give a direction of descent.
    """
    weight = curvature.astype(np.float32)
    residual, rest, energy, scale = begin.residual, begin.rest, begin.value, begin.scale
    search, seen, offset = residual.copy(), begin.image.copy(), scale * rest
    move, shift = np.zeros_like(residual), np.zeros_like(rest)
    pull, part = np.empty_like(weight), np.empty_like(residual)
    every = np.ones(len(weight), dtype=np.float32)
    for _ in range(_MOST_ITERATIONS):
        np.add(seen, offset, out=pull)
        pull *= weight
        change = every @ pull
        product = space.product(search, seen, pull)
        advance = _ratio(energy, space.inner(search, seen, product) + offset * change)
        move += np.multiply(advance, search, out=part)
        shift += advance * offset
        product *= advance
        residual -= product
        space.centre(residual)
        rest = rest - advance * change
        image = space.image(residual)
        last, energy = energy, space.inner(residual, image, residual) + scale * rest * rest
        # Not above 0 is rounding: that label set is solved as far as float32 goes.
        if ((energy <= goal) | ~(energy > 0)).all():
            break
        again = _ratio(energy, last)
        search *= again
        search += residual
        seen *= again
        seen += image
        offset = again * offset + scale * rest
    return move.astype(np.float64), shift.astype(np.float64)


def _damping(
    margins: FloatArray,
    along: FloatArray,
    targets: FloatArray,
    pull: FloatArray,
    *,
    rising: FloatArray,
    square: FloatArray,
    penalty: float,
) -> FloatArray:
    """Halve each label set's step until the objective, convex along it, is not left rising steeply at its end."""
    allowed = _OVERSHOOT * np.abs(rising + dot(pull, along))
    length = np.ones(len(rising))
    while True:
        ends = rising + length * square + penalty * dot(_sigmoid(margins + length * along) - targets, along)
        steep: BoolArray = ends > allowed + 1e-12
        if not steep.any():
            return length
        length = np.where(steep, length / 2, length)
        if length.min() < _SHORTEST_STEP:
            raise ConvergenceError(
                f"the line search of {int(steep.sum())} label sets shrank below {_SHORTEST_STEP:.0e} at penalty (C) "
                f"{penalty:g}; use a smaller penalty (C)"
            )


def _sigmoid(values: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-values)); the hyperbolic tangent is the faster way to it, and cannot overflow."""
    out = np.tanh(0.5 * values)
    out *= 0.5
    out += 0.5
    return out


def _ratio(numerator: npt.NDArray[Any], denominator: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Divide, with 0 where a label set is already solved exactly (0 / 0)."""
    ratio: npt.NDArray[Any] = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
    return ratio
