"""What a probe study of a given size can find, before it is run.

Problem. "Not decodable" may mean that nothing is there, or that 40 rows could not have shown it. A study should say in
advance which AUROC it would find with good chance.

Mechanism. The study finds the label if its AUROC exceeds what shuffled labels reach in a share `alpha` of studies. With
the standard errors of `probes.heldout` at 1/2 and at the AUROC θ that the fitted probes have on fresh rows,

    power(θ) = Φ( (θ - critical) / error(θ) ),     critical = 1/2 + Φ⁻¹(1 - alpha / layers) · error(1/2).

The variance is the binormal one (normal scores of equal spread in both classes), times what cross-validation adds. The
best of several layers is judged against the best layer of each shuffle. Without shuffles that is bounded by Bonferroni,
alpha / layers, which overstates the hurdle where layers are alike; with the `null` of an earlier result of this size,
the quantile of its own maximum over layers is used.

Constraint. θ is the AUROC of a probe fitted on that many rows, not that of the best direction. Normal approximations
hold from about 20 rows a class. Rows of one instance count as one if they agree fully: enter instances then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from probes.arrays import FloatArray, checked
from probes.errors import ProbeError
from probes.heldout import in_step, row_variance, tail

_HALVINGS = 60
_MOST_ROWS = 10_000_000


def minimum_detectable_auroc(
    ones: int,
    zeros: int,
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    layers: int = 1,
    null: npt.ArrayLike | None = None,
    folds: int = 5,
    directions: float | None = None,
) -> float:
    """Return the smallest AUROC that `ones` rows of class 1 and `zeros` of class 0 would show with chance `power`.

    The test is one-sided at level `alpha`, over `layers` layers, or against `null` [shuffle, layer] of a ProbeResult of
    that size. NaN if even an AUROC of 1 would not be found (too few rows for so many layers).
    """
    _check(alpha, power, layers, folds, directions)
    if min(ones, zeros) < folds:
        raise ProbeError(
            f"{ones} rows of class 1 and {zeros} of class 0; {folds} folds need at least {folds} of each, use fewer folds"
        )
    bar = _critical(ones, zeros, alpha, layers, null, folds, directions)
    if not bar < 1:
        return float("nan")
    below, above = bar, 1.0
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        chance = _power(middle, bar, ones, zeros, folds, directions)
        below, above = (below, middle) if chance >= power else (middle, above)
    return above


def rows_needed(
    auroc: float,
    *,
    share: float = 0.5,
    alpha: float = 0.05,
    power: float = 0.8,
    layers: int = 1,
    folds: int = 5,
    directions: float | None = None,
) -> int:
    """Return the smallest number of rows, `share` of them of class 1, that show an AUROC of `auroc` with chance `power`.

    The inverse of `minimum_detectable_auroc`.
    """
    _check(alpha, power, layers, folds, directions)
    if not 0.5 < auroc < 1:
        raise ProbeError(f"auroc is {auroc}; it must lie between 0.5 and 1 to be found by a probe")
    if not 0 < share < 1:
        raise ProbeError(f"share is {share}; the share of rows of class 1 must lie between 0 and 1")

    def enough(rows: int) -> bool:
        ones = round(rows * share)
        if min(ones, rows - ones) < folds:
            return False
        bar = _critical(ones, rows - ones, alpha, layers, None, folds, directions)
        return bar < auroc and _power(auroc, bar, ones, rows - ones, folds, directions) >= power

    above = 2 * folds
    while not enough(above):
        above *= 2
        if above > _MOST_ROWS:
            raise ProbeError(f"an AUROC of {auroc} needs more than {_MOST_ROWS} rows; it cannot be told from chance")
    below = above // 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if enough(middle) else (middle, above)
    return above


def _critical(
    ones: int,
    zeros: int,
    alpha: float,
    layers: int,
    null: npt.ArrayLike | None,
    folds: int,
    directions: float | None,
) -> float:
    if null is not None:
        draws = checked("null", null, ("shuffle", "layer")).astype(np.float64)
        if len(draws) < 1 / alpha - 1:
            raise ProbeError(
                f"null holds {len(draws)} shuffles; at least {int(np.ceil(1 / alpha - 1))} are needed at alpha {alpha:g}"
            )
        return float(np.quantile(draws.max(axis=1), 1 - alpha, method="higher"))
    return float(0.5 + ndtri(1 - alpha / layers) * _error(0.5, ones, zeros, folds, directions))


def _power(theta: float, critical: float, ones: int, zeros: int, folds: int, directions: float | None) -> float:
    error = _error(theta, ones, zeros, folds, directions)
    if error == 0:
        return float(theta >= critical)
    return float(tail(np.asarray((critical - theta) / error)))


def _error(theta: float, ones: int, zeros: int, folds: int, directions: float | None) -> float:
    """Return the standard error of a cross-validated AUROC of `theta`; classes are spread evenly over the folds."""
    at: FloatArray = np.asarray(theta, dtype=np.float64)
    rows = row_variance(at, np.full(folds, ones / folds), np.full(folds, zeros / folds))
    training = (ones + zeros) * (1 - 1 / folds)
    return float(np.sqrt(rows * in_step(at, training, directions)))


def _check(alpha: float, power: float, layers: int, folds: int, directions: float | None) -> None:
    for name, value in (("alpha", alpha), ("power", power)):
        if not 0 < value < 1:
            raise ProbeError(f"{name} is {value}; it must lie between 0 and 1")
    if layers < 1 or folds < 2:
        raise ProbeError(f"layers is {layers} and folds {folds}; needed at least 1 layer and 2 folds")
    if directions is not None and not directions > 0:
        raise ProbeError(f"directions is {directions}; it must be above 0, such as the number of features")
