"""Fit one layer's translator: from few rows, for a large vocabulary, without overfitting.

Problem. A translator of width 576 has 332 thousand numbers and a run has a few hundred rows. Plain gradient descent on
KL would fit the rows.

Mechanism, three steps, each judged on validation instances that no step trains on:

1. Start. A ridge regression from the layer's rows to the last layer's rows has a closed form. It is solved in the
   principal directions of the training rows (nothing else is ever observed), for a grid of penalties, around two bases:
   the row itself (scale 1, the logit lens) and nothing (scale 0, where the layer's own coordinates are of no use; with an
   infinite penalty that is a constant). Validation picks one.
2. Refinement. L-BFGS on KL(final || translated) from there, in coordinates that a ridge has shrunk, so that rarely seen
   directions move last; it stops when the validation part stops to improve. Where directions help little, the offset is
   refined alone first: most of what there is to win is then the right constant.
3. Decision, on the whole vocabulary: the translator is kept if its KL lies below the logit lens' on validation instances
   by a one-sided t test at 5%, and else the layer keeps the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray, IntArray
from probes.tuned_objective import Judge, Objective, Part, Rows

PENALTIES = (1e-8, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0, np.inf)
"""Ridge penalties in units of the mean squared singular value; infinity leaves the offset alone."""
_PATIENCE = 5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Translator:
    """An affine map of rows: `scale` * rows + rows @ `down` @ `up` + `offset`; how it was chosen in `how`.

    In residual form (rows + A rows + b) its A is (`scale` - 1) times the identity plus a matrix of rank `down`.shape[1].
    """

    scale: float
    down: Rows
    up: Rows
    offset: Rows
    how: str

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and not self.up.any() and not self.offset.any()

    def __call__(self, rows: npt.NDArray[np.floating]) -> Rows:
        """Translate `rows` [row, feature]; the identity returns them bit for bit."""
        given: Rows = np.asarray(rows, dtype=np.float32)
        if self.is_identity:
            return given
        moved = np.float32(self.scale) * given + (given @ self.down) @ self.up + self.offset
        return moved.astype(np.float32, copy=False)


def identity(features: int, how: str) -> Translator:
    """Return the translator of the plain lens."""
    empty = np.zeros((features, 0), dtype=np.float32)
    return Translator(scale=1.0, down=empty, up=empty.T, offset=np.zeros(features, dtype=np.float32), how=how)


@dataclass(frozen=True, slots=True, eq=False)
class _Directions:
    """Principal directions of the training rows: `mean` [feature], `axes` [feature, k], `size` [k], `left` [row, k]."""

    mean: FloatArray
    axes: FloatArray
    size: FloatArray
    left: FloatArray


def _directions(rows: FloatArray, rank: int) -> _Directions:
    mean = rows.mean(axis=0)
    left, size, axes = np.linalg.svd(rows - mean, full_matrices=False)
    kept = min(rank, int((size > 1e-6 * size[0]).sum()))
    return _Directions(mean, axes[:kept].T, size[:kept], left[:, :kept])


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    translator: Translator
    value: float
    """KL on the validation rows."""
    ridge: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerFit:
    """What all layers of one fit share: who judges, which rows are for what, and the instances of validation rows."""

    judge: Judge
    train: IntArray
    validation: IntArray
    blocks: IntArray
    rank: int
    iterations: int

    def fit(self, rows: Rows, part: Part | None) -> Translator:
        """Return the translator of a layer's `rows` [row, feature], trained on `part` of the vocabulary."""
        plain = identity(rows.shape[1], "identity: no translation did better on validation instances")
        there = _directions(rows[self.train].astype(np.float64), self.rank)
        unit = float(np.square(there.size).mean()) if len(there.size) else 1.0
        judged = Objective(self.judge, self.validation, part)
        trained = Objective(self.judge, self.train, part)
        ridges = self._ridges(rows, there, unit, judged)
        constant = ridges[-1]
        best = min([_Candidate(plain, judged.value(rows[self.validation]), 1.0), *ridges], key=lambda one: one.value)
        if best.value > 0.5 * constant.value:
            nowhere = _Directions(there.mean, there.axes[:, :0], there.size[:0], there.left[:, :0])
            starts = [constant] if best.translator.up.any() else [constant, best]
            moved = [self._refined(one, rows, nowhere, unit, trained, judged) for one in starts]
            best = min([best, *moved], key=lambda one: one.value)
        refined = self._refined(best, rows, there, unit * max(1.0, best.ridge), trained, judged)
        return self._decide(plain, [refined.translator, best.translator], rows)

    def _ridges(self, rows: Rows, there: _Directions, unit: float, judged: Objective) -> list[_Candidate]:
        """All ridge solutions; the last one is the constant."""
        seen, wanted = rows[self.train].astype(np.float64), self.judge.final[self.train].astype(np.float64)
        found = []
        for scale in (1.0, 0.0):
            target = wanted - scale * seen
            middle = target.mean(axis=0)
            projected = there.left.T @ (target - middle)
            for penalty in PENALTIES:
                up = (there.size / (there.size**2 + penalty * unit))[:, None] * projected
                how = f"ridge {penalty:g} around {'the row' if scale else 'nothing'}"
                one = _translator(scale, there, up, middle, how)
                value = judged.value(one(rows[self.validation]))
                found.append(_Candidate(one, value, penalty if np.isfinite(penalty) else 1.0))
        return found

    def _decide(self, plain: Translator, candidates: list[Translator], rows: Rows) -> Translator:
        from scipy.special import stdtrit

        before = self.judge.kl(rows[self.validation], self.validation)
        winner, margin = plain, 0.0
        for one in candidates:
            if one.is_identity:
                continue
            after = self.judge.kl(one(rows[self.validation]), self.validation)
            gain = _by_block(before - after, self.blocks)
            error = float(gain.std(ddof=1) / np.sqrt(len(gain)))
            if gain.mean() > error * stdtrit(len(gain) - 1, 0.95) and gain.mean() > margin:
                winner, margin = one, float(gain.mean())
        return winner

    def _refined(
        self,
        start: _Candidate,
        rows: Rows,
        there: _Directions,
        ridge: float,
        trained: Objective,
        judged: Objective,
    ) -> _Candidate:
        """Lower the training rows' KL from `start` on; return the step that was best on validation rows."""
        from scipy.optimize import minimize

        if self.iterations == 0:
            return start
        features, directions = rows.shape[1], len(there.size)
        # Unit variance in each direction, less where a ridge shrinks it; steps in units of the target's spread.
        shrunk = np.sqrt(len(self.train) / (there.size**2 + ridge))
        spread = float(self.judge.final[self.train].std())
        parts = (self.train, self.validation)
        base, base_validation = (start.translator(rows[at]) for at in parts)
        seen, seen_validation = (((rows[at] - there.mean) @ there.axes) * shrunk for at in parts)

        def split(numbers: FloatArray) -> tuple[FloatArray, FloatArray]:
            return numbers[features:].reshape(directions, features) * spread, numbers[:features] * spread

        def moved(onto: Rows, at: FloatArray, numbers: FloatArray) -> Rows:
            up, offset = split(numbers)
            placed: Rows = (onto + at @ up + offset).astype(np.float32)
            return placed

        def loss(numbers: FloatArray) -> tuple[float, FloatArray]:
            value, slope = trained.value_and_gradient(moved(base, seen, numbers))
            return value, np.concatenate([slope.sum(axis=0), (seen.T @ slope).ravel()]).astype(np.float64) * spread

        best: tuple[FloatArray, int] | None = None
        best_value, since, steps = start.value, 0, 0

        def watch(intermediate_result: object) -> None:
            nonlocal best, best_value, since, steps
            numbers = np.asarray(intermediate_result.x)  # type: ignore[attr-defined]
            value, steps, since = judged.value(moved(base_validation, seen_validation, numbers)), steps + 1, since + 1
            if value < best_value:
                best, best_value, since = (numbers.copy(), steps), value, 0
            if since >= _PATIENCE:
                raise StopIteration

        minimize(
            loss,
            np.zeros(features * (1 + directions)),
            jac=True,
            method="L-BFGS-B",
            callback=watch,
            options={"maxiter": self.iterations, "maxcor": 5},
        )
        if best is None:
            return start
        up, offset = split(best[0])
        added = _translator(0.0, there, shrunk[:, None] * up, offset, "")
        return _Candidate(_sum(start.translator, added, best[1]), best_value, start.ridge)


def _translator(scale: float, there: _Directions, up: FloatArray, middle: FloatArray, how: str) -> Translator:
    """Return the map x -> scale x + (x - mean) axes up + middle."""
    return Translator(
        scale=scale,
        down=there.axes.astype(np.float32),
        up=up.astype(np.float32),
        offset=(middle - there.mean @ there.axes @ up).astype(np.float32),
        how=how,
    )


def _sum(start: Translator, added: Translator, steps: int) -> Translator:
    """Return `start` with a refinement of so many steps; one that moved the offset alone has no directions."""
    if not added.down.shape[1]:
        down, up = start.down, start.up
    else:
        old = start.up if len(start.up) else np.zeros_like(added.up)
        down, up = added.down, old + added.up
    how = "the row" if start.is_identity else start.how
    offset = start.offset + added.offset
    return Translator(scale=start.scale, down=down, up=up, offset=offset, how=f"{how}, refined in {steps} steps")


def _by_block(values: FloatArray, blocks: IntArray) -> FloatArray:
    """Return the mean of each instance's rows."""
    codes = np.unique(blocks, return_inverse=True)[1]
    means: FloatArray = np.bincount(codes, values) / np.bincount(codes)
    return means
