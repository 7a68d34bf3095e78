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
the design's cells and sizes. Plain percentiles are too narrow where cells are small: with 8 rows in each of four cells,
95% intervals hold the truth in 91% of simulated studies. Two things are missing, and both are put in. Drawing n rows
with replacement understates the variance of their mean by (n - 1) / n, so each cell's deviations are stretched by the
root of the inverse. And the spread itself is estimated from few rows, so the percentiles are taken further out, at the
normal probability of Student's t quantile with Satterthwaite's degrees of freedom (Hesterberg 2015). With that, 8 to 25
rows a cell cover 93 to 96%, also with skewed readouts or with cells that differ in spread. With both at once, so that
one small lopsided cell holds nearly all the spread, it is 90 to 93%, and 83% if one row in five of 8 lies far off.

The mean of a resampled cell depends on how often each row was drawn, so one draw of counts serves all layers,
components and settings at once, as a matrix product. All numbers of one call therefore share their resamples.

Constraints. A declared cell without rows, or a gold answer without cells, leaves the design unbalanced: the numbers are
then NaN with a `reason`, never 0. A cell with one row has no spread to resample, so the intervals are NaN. Rows whose
readout is NaN do not count towards `n`; an infinite readout is refused. Rows are taken to be independent: give one row
an instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, binary, checked, same_rows
from probes.errors import ProbeError
from probes.keyed import generator

# Counts of one block of resamples: 32 MiB, however many rows and resamples there are.
_BLOCK = 2**22
LARGEST = 1e70  # the degrees of freedom take the fourth power of a readout
ALL = "all"
"""The name under which `decompose_settings` gives the numbers over all settings."""


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

    The first axis may be anything that has a readout for the same rows: layers, components, sites. A row counts if its
    readout is a number at every layer.
    """
    study = _Study.of(readout, cells, gold, resamples=resamples, level=level, declared=declared)
    return study.decompose(study.counted, seed=seed, method=_method("", "cells", resamples))


def decompose_settings(
    readout: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    settings: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> dict[str, tuple[Decomposition, ...]]:
    """Split each layer of `readout` [layer, row] over all `settings` [row] (key "all") and within each, in sorted order.

    Every setting is held against the same design, so one that lacks a cell is NaN with a reason. Over all settings a
    cell is the mean of its rows, drawn again within cell and setting: how many rows a setting has is not chance. All
    share their resamples. Where a cell has a single row in some setting, rows are drawn within the cell instead.
    """
    study = _Study.of(readout, cells, gold, resamples=resamples, level=level, declared=declared)
    names = checked("settings", settings, ("row",)).astype(str)
    same_rows("settings", len(names), "readout", study.values.shape[1])
    if ALL in names:
        raise ProbeError(f"a setting is called {ALL!r}, the name of the numbers over all settings; rename it")
    every = sorted(set(names.tolist()))
    sizes = [int((study.counted & (study.names == c) & (names == one)).sum()) for c in study.design for one in every]
    strata = None if 1 in sizes or len(every) == 1 else names
    within = "cells" if strata is None else "cells and settings"
    found = {ALL: study.decompose(study.counted, strata, seed=seed, method=_method("", within, resamples))}
    for one in every:
        chosen = study.counted & (names == one)
        found[one] = study.decompose(chosen, names, seed=seed, method=_method("", "cells", resamples))
    return found


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
    return paired_difference_layers(
        first[None], second[None], cells, gold, resamples=resamples, level=level, declared=declared, seed=seed
    )[0]


def paired_difference_layers(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> tuple[Decomposition, ...]:
    """Return `paired_difference` for each layer or component of `before` and `after` [layer, row], sharing resamples.

    A row counts if both its readouts are numbers at every layer.
    """
    first, second = checked("before", before, ("layer", "row")), checked("after", after, ("layer", "row"))
    same_rows("after", second.shape[1], "before", first.shape[1])
    if len(first) != len(second):
        raise ProbeError(f"after has {len(second)} layers and before has {len(first)}; both need the same in one order")
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused by size, below
        change = second.astype(np.float64) - first.astype(np.float64)
    if np.isnan(change[~(np.isnan(first) | np.isnan(second))]).any():
        raise ProbeError(
            "before and after are infinite in the same place; they must be finite, or NaN where not to count"
        )
    study = _Study.of(change, cells, gold, resamples=resamples, level=level, declared=declared)
    return study.decompose(
        study.counted, seed=seed, method=_method("change over the same rows, ", "cells", resamples, "paired ")
    )


def _method(what: str, within: str, resamples: int, paired: str = "") -> str:
    return (
        f"{what}mean over cells, {paired}percentile bootstrap within {within} ({resamples} resamples), "
        "widened for few rows by t"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Study:
    """Checked input: `values` [layer, row], cell `names` [row], which rows are `counted` [row], and the `design`."""

    values: FloatArray
    names: npt.NDArray[np.str_]
    counted: BoolArray
    design: dict[str, int]
    resamples: int
    level: float

    @staticmethod
    def of(
        readout: npt.ArrayLike,
        cells: npt.ArrayLike,
        gold: npt.ArrayLike,
        *,
        resamples: int,
        level: float,
        declared: Mapping[str, int] | None,
    ) -> _Study:
        values = checked("readout", readout, ("layer", "row")).astype(np.float64)
        names = checked("cells", cells, ("row",)).astype(str)
        answers = binary("gold", gold)
        same_rows("cells", len(names), "readout", values.shape[1])
        same_rows("gold", len(answers), "readout", values.shape[1])
        if resamples < 1 or not 0 < level < 1:
            raise ProbeError(f"resamples is {resamples} and level {level}; needed at least 1 and between 0 and 1")
        largest = float(np.abs(values[~np.isnan(values)]).max(initial=0.0))
        if largest > LARGEST:
            raise ProbeError(
                f"readout holds {largest:.3g} in size, whose variance overflows float64; it must be at most {LARGEST:g}, "
                "or NaN for a row that is not to count: scale or check the readouts"
            )
        counted = np.all(np.isfinite(values), axis=0)
        return _Study(values, names, counted, _design(names, answers, declared), resamples, level)

    def decompose(
        self, chosen: BoolArray, strata: npt.NDArray[np.str_] | None = None, *, seed: int, method: str
    ) -> tuple[Decomposition, ...]:
        """Split the `chosen` rows; rows are drawn within their cell, and within `strata` [row] if given."""
        members = {cell: np.flatnonzero((self.names == cell) & chosen) for cell in self.design}
        empty = [cell for cell, rows in members.items() if len(rows) == 0]
        single = [cell for cell, rows in members.items() if len(rows) == 1]
        numbers = np.full((len(self.values), 6), np.nan)
        reason = ""
        if empty:
            reason = f"no row counted in {len(empty)} of {len(members)} cells: {', '.join(empty)}"
        elif len(set(self.design.values())) < 2:
            reason = (
                f"all {len(members)} cells have gold {'yes' if 1 in self.design.values() else 'no'}; both are needed"
            )
        else:
            weights = _weights(list(self.design.values()))
            means = np.stack([self.values[:, rows].mean(axis=1) for rows in members.values()])
            numbers[:, [0, 3]] = (weights @ means).T
            if single:
                reason = f"no interval: one row counted in {len(single)} of {len(members)} cells: {', '.join(single)}"
            else:
                numbers[:, [1, 4]], numbers[:, [2, 5]] = self._ends(members, strata, weights, seed)
                numbers[:, [1, 2]] += numbers[:, [0]]
                numbers[:, [4, 5]] += numbers[:, [3]]
        n = sum(len(rows) for rows in members.values())
        return tuple(
            Decomposition(
                delta=delta,
                delta_low=delta_low,
                delta_high=delta_high,
                signal=signal,
                signal_low=signal_low,
                signal_high=signal_high,
                n=n,
                cells=len(members),
                level=self.level,
                method=method,
                reason=reason,
            )
            for delta, delta_low, delta_high, signal, signal_low, signal_high in numbers.tolist()
        )

    def _ends(
        self,
        members: Mapping[str, npt.NDArray[np.intp]],
        strata: npt.NDArray[np.str_] | None,
        weights: FloatArray,
        seed: int,
    ) -> tuple[FloatArray, FloatArray]:
        """Return how far the ends of the intervals lie below and above the values, [layer, statistic] each."""
        layers = len(self.values)
        moved = np.zeros((len(weights), self.resamples, layers))
        variance, squares = np.zeros((len(weights), layers)), np.zeros((len(weights), layers))
        for cell, rows in members.items():
            weight = weights[:, list(self.design).index(cell)]
            parts = [rows] if strata is None else [rows[strata[rows] == one] for one in sorted(set(strata[rows]))]
            for part in parts:
                count, key = len(part), (cell,) if strata is None else (cell, str(strata[part[0]]))
                share = (weight * count / len(rows))[:, None]
                values = self.values[:, part]
                drawn = _resampled_means(values, self.resamples, generator(seed, "probes.decompose", *key))
                moved += share[:, None] * (drawn - values.mean(axis=1)) * np.sqrt(count / (count - 1))
                spread = share**2 * values.var(axis=1, ddof=1) / count
                variance += spread
                squares += spread**2 / (count - 1)
        tails = _outer_tails(variance, squares, self.level)
        ends = np.array(
            [
                [
                    np.quantile(moved[one, :, layer], [tails[one, layer], 1 - tails[one, layer]])
                    for one in range(len(moved))
                ]
                for layer in range(layers)
            ]
        )
        return ends[..., 0], ends[..., 1]


def _outer_tails(variance: FloatArray, squares: FloatArray, level: float) -> FloatArray:
    """Return the normal probability beyond the t quantile, with Satterthwaite's degrees of freedom; like `variance`."""
    from scipy.special import ndtr, stdtrit

    # Without any spread there is nothing to widen.
    freedom = np.divide(variance**2, squares, out=np.full_like(variance, 1e9), where=squares > 0)
    tails: FloatArray = ndtr(stdtrit(np.minimum(freedom, 1e9), (1 - level) / 2))
    return tails


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


def _weights(sides: Sequence[int]) -> FloatArray:
    """Return the weights of cell means in δ and s, [statistic, cell]; `sides` is 1 for gold-yes cells."""
    yes = np.array(sides) == 1
    signal = np.where(yes, 1 / yes.sum(), -1 / (~yes).sum()) / 2
    return np.stack([np.full(len(yes), 1 / len(yes)), signal])


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
