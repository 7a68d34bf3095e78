"""Default and signal: what part of a readout is the instance, and what part is a standing pull towards "yes".

Problem. A model that says "yes" to everything is right half the time, and two presentations on which it does so agree
perfectly. The share of right answers cannot tell this from knowing.

Mechanism. The items come in cells of a balanced design (ordering: query direction x gold), so that over the cells
nothing about an instance is on average for or against "yes". With m(c) the mean readout logit(yes) - logit(no) in cell
c:

    default δ = mean of m(c) over all cells
    signal  s = (mean of m(c) over gold-yes cells - mean of m(c) over gold-no cells) / 2

With as many gold-yes as gold-no cells the readout is δ + s on average when the gold answer is yes and δ - s when it is
no. An answer follows the default wherever |δ| exceeds what the instance adds. Cells count equally, whatever their size.

Intervals are percentile bootstraps, stratified by cell: rows are drawn again within their cell, so every resample has
the design's cells and sizes. The mean of a resampled cell depends on how often each row was drawn, so one draw of
counts serves all layers at once, as a matrix product. Layers therefore share their resamples.

Constraints. A declared cell without rows, or a gold answer without cells, leaves the design unbalanced: the numbers are
then NaN with a `reason`, never 0. A cell with one row has no spread to resample, so the intervals are NaN. Rows whose
readout is NaN do not count towards `n`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray, IntArray, binary, checked, same_rows
from probes.errors import ProbeError
from probes.keyed import generator

# Counts of one block of resamples: 32 MiB, however many rows and resamples there are.
_BLOCK = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Default `delta` and `signal` in logits with their intervals; `n` rows counted, `cells` in the design.

    `reason` is empty unless a number is NaN, and then says why.
    """

    delta: float
    delta_low: float
    delta_high: float
    signal: float
    signal_low: float
    signal_high: float
    n: int
    cells: int
    level: float
    method: str
    reason: str = ""


def decompose(
    readout: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> Decomposition:
    """Split `readout` [row] into default and signal over its `cells` [row], whose answer is `gold` [row] (1 = yes).

    `declared` names the cells that the design has and their gold answer, so that one without rows is noticed; without
    it the cells are those that occur.
    """
    rows = checked("readout", readout, ("row",))
    return decompose_layers(rows[None], cells, gold, resamples=resamples, level=level, declared=declared, seed=seed)[0]


def decompose_layers(
    readout: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> tuple[Decomposition, ...]:
    """Split each layer of `readout` [layer, row]; all layers share rows, cells and resamples.

    A row counts if its readout is a number at every layer.
    """
    method = f"mean over cells, percentile bootstrap within cells ({resamples} resamples)"
    return _decompose(
        readout, cells, gold, resamples=resamples, level=level, declared=declared, seed=seed, method=method
    )


def paired_difference(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> Decomposition:
    """Return how default and signal change from readout `before` [row] to `after` [row] on the same instances.

    Row i is one instance in both (base and adapter, or original and equivalent). δ and s are linear in the readout, so
    their change is the decomposition of the row-wise change, and drawing a row draws it in both arms. That removes what
    makes instances differ from each other, which two separate intervals would leave in. A row counts if both its
    readouts are numbers.
    """
    first, second = checked("before", before, ("row",)), checked("after", after, ("row",))
    same_rows("after", len(second), "before", len(first))
    change = second.astype(np.float64) - first.astype(np.float64)
    method = (
        f"change over the same rows, mean over cells, paired percentile bootstrap within cells ({resamples} resamples)"
    )
    return _decompose(
        change[None], cells, gold, resamples=resamples, level=level, declared=declared, seed=seed, method=method
    )[0]


def _decompose(
    readout: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int,
    level: float,
    declared: Mapping[str, int] | None,
    seed: int,
    method: str,
) -> tuple[Decomposition, ...]:
    values = checked("readout", readout, ("layer", "row")).astype(np.float64)
    names = checked("cells", cells, ("row",)).astype(str)
    answers = binary("gold", gold)
    same_rows("cells", len(names), "readout", values.shape[1])
    same_rows("gold", len(answers), "readout", values.shape[1])
    if resamples < 1 or not 0 < level < 1:
        raise ProbeError(f"resamples is {resamples} and level {level}; needed at least 1 and between 0 and 1")
    design = _design(names, answers, declared)
    counted = np.all(np.isfinite(values), axis=0)
    members = {cell: np.flatnonzero((names == cell) & counted) for cell in design}
    n = sum(len(rows) for rows in members.values())

    def result(numbers: Sequence[float]) -> Decomposition:
        delta, delta_low, delta_high, signal, signal_low, signal_high = numbers
        return Decomposition(
            delta=delta,
            delta_low=delta_low,
            delta_high=delta_high,
            signal=signal,
            signal_low=signal_low,
            signal_high=signal_high,
            n=n,
            cells=len(design),
            level=level,
            method=method,
            reason=reason,
        )

    reason = ""
    empty = [cell for cell, rows in members.items() if len(rows) == 0]
    if empty:
        reason = f"no row counted in {len(empty)} of {len(design)} cells: {', '.join(empty)}"
    elif len(set(design.values())) < 2:
        reason = f"all {len(design)} cells have gold {'yes' if 1 in design.values() else 'no'}; both are needed"
    if reason:
        return (result([np.nan] * 6),) * len(values)

    sides = np.array(list(design.values()))
    means = np.stack([values[:, rows].mean(axis=1) for rows in members.values()])
    single = [cell for cell, rows in members.items() if len(rows) == 1]
    if single:
        reason = f"no interval: one row counted in {len(single)} of {len(design)} cells: {', '.join(single)}"
        tails = np.full((2, 2, len(values)), np.nan)
    else:
        draws = [
            _resampled_means(values[:, rows], resamples, generator(seed, "probes.decompose", cell))
            for cell, rows in members.items()
        ]
        quantiles = [(1 - level) / 2, (1 + level) / 2]
        tails = np.quantile(_default_and_signal(np.stack(draws), sides), quantiles, axis=1)
    default, signal = _default_and_signal(means, sides)
    numbers = np.stack([default, tails[0, 0], tails[1, 0], signal, tails[0, 1], tails[1, 1]], axis=1)
    return tuple(result(layer) for layer in numbers.tolist())


def _design(names: npt.NDArray[np.str_], gold: IntArray, declared: Mapping[str, int] | None) -> dict[str, int]:
    """Return each cell and its gold answer, in sorted order; a cell with two golds or an undeclared one is an error."""
    design: dict[str, int] = {}
    for cell in sorted(set(names.tolist())):
        answers = set(gold[names == cell].tolist())
        if len(answers) > 1:
            raise ProbeError(f"cell {cell!r} holds rows of gold yes and gold no; a cell needs one gold answer")
        design[cell] = answers.pop()
    if declared is None:
        return design
    for cell, answer in design.items():
        if declared.get(cell) != answer:
            found = f"declared gold {declared[cell]}" if cell in declared else "not declared"
            raise ProbeError(f"cell {cell!r} has gold {answer} and is {found}; declared: {', '.join(sorted(declared))}")
    return {cell: int(declared[cell]) for cell in sorted(declared)}


def _default_and_signal(means: FloatArray, sides: npt.NDArray[np.int_]) -> FloatArray:
    """Return δ and s, stacked, from cell means [cell, …]; `sides` [cell] is 1 for gold-yes cells."""
    yes, no = means[sides == 1].mean(axis=0), means[sides == 0].mean(axis=0)
    return np.stack([means.mean(axis=0), (yes - no) / 2])


def _resampled_means(values: FloatArray, resamples: int, rng: np.random.Generator) -> FloatArray:
    """Return the mean of `values` [layer, row] under row resampling with replacement, [resample, layer].

    How often each of m rows is drawn in m draws is multinomial, so counts are drawn directly.
    """
    rows = values.shape[1]
    even = np.full(rows, 1 / rows)
    block = max(1, _BLOCK // rows)
    blocks = [
        rng.multinomial(rows, even, size=min(block, resamples - start)) @ values.T / rows
        for start in range(0, resamples, block)
    ]
    means: FloatArray = np.concatenate(blocks)
    return means
