"""From a sweep's numbers to effects: arrays in, arrays and small frozen results out, nothing but numpy.

Everything is measured in logits first. The *signed effect* is how far an edit moves the answer difference toward a
named answer; it exists for every item, it adds up, and its mean has an interval. Two derived numbers are popular and
need care:

- *share flipped*: among the items whose recipient and donor answer differently, how often the edited run gives the
  donor's answer. Items that agree cannot flip, so they are not counted, and the count is reported.
- *normalised restoration*, (patched - recipient) / (donor - recipient): 1 is restored, 0 is no effect. The ratio
  explodes where donor and recipient hardly differ, so those items are left out by a margin that is fixed *before* the
  result is seen. Left out means NaN, never 0, with the number kept.

An item is one draw: intervals resample items and carry all cells of an item together. A grid of cells is many tests,
so ``sign_flip_p`` compares each cell with the largest cell of runs in which whole items change sign at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from patching.controls import keyed_generator
from patching.edits import ZERO, Cell, Edit, PatchError

_ELEMENTS = 1 << 24
"""Bootstrap weights held at once; resampling goes on in blocks, so memory stays flat."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over items for each cell, with a percentile bootstrap interval by item.

    Attributes:
        mean, low, high: one value a cell; NaN where no item counted.
        n: items that counted, one value a cell.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


@dataclass(frozen=True, slots=True)
class Restoration:
    """Normalised restoration ``[item, cell]``; NaN where |donor - recipient| does not pass the margin."""

    values: np.ndarray
    kept: np.ndarray
    n: int
    margin: float


@dataclass(frozen=True, slots=True)
class HeadEffect:
    """Mean signed effect of one head over items, in logits."""

    layer: int
    head: int
    mean: float
    low: float
    high: float
    n: int


def signed_effect(difference: np.ndarray, unpatched: np.ndarray, toward: np.ndarray) -> np.ndarray:
    """Change of the readout in logits, counted positive toward an answer.

    Args:
        difference: ``[item, cell]`` readout of the edited runs (logit of the first label minus the second).
        unpatched: ``[item]`` readout of the unpatched runs.
        toward: ``[item]``, +1 where the first label is the answer to count toward, -1 where it is the second.
    """
    toward = np.asarray(toward)
    if not np.isin(toward, (-1, 1)).all():
        raise PatchError(f"toward holds {sorted(set(np.unique(toward).tolist()) - {-1, 1})[:3]}; allowed: +1 and -1")
    _same_items(difference, unpatched, toward)
    return (difference - np.asarray(unpatched)[:, None]) * toward[:, None]


def share_flipped(difference: np.ndarray, unpatched: np.ndarray, donor: np.ndarray) -> tuple[np.ndarray, int]:
    """For each cell the share of items that now give the donor's answer, and the number of items that could flip.

    Only items whose unpatched and donor answers differ count. With none, every share is NaN.
    """
    _same_items(difference, unpatched, donor)
    able = np.sign(unpatched) * np.sign(donor) < 0
    if not able.any():
        return np.full(difference.shape[1], np.nan), 0
    return (np.sign(difference[able]) == np.sign(np.asarray(donor)[able])[:, None]).mean(axis=0), int(able.sum())


def restoration(difference: np.ndarray, unpatched: np.ndarray, donor: np.ndarray, *, margin: float) -> Restoration:
    """(patched - recipient) / (donor - recipient), kept where |donor - recipient| > ``margin`` (fixed beforehand)."""
    _same_items(difference, unpatched, donor)
    if not margin > 0:
        raise PatchError(f"margin is {margin}; give a positive number of logits, or ratios explode where runs agree")
    recipient = np.asarray(unpatched, dtype=np.float64)
    gap = np.asarray(donor, dtype=np.float64) - recipient
    kept = np.abs(gap) > margin
    values = (difference - recipient[:, None]) / np.where(kept, gap, np.nan)[:, None]
    return Restoration(values, kept, int(kept.sum()), margin)


def mean_interval(values: np.ndarray, *, seed: int, resamples: int = 2000, level: float = 0.95) -> Estimate:
    """Mean of ``[item, cell]`` values for each cell with a bootstrap interval by item; NaN values do not count."""
    values = np.asarray(values, dtype=np.float64)
    present = np.isfinite(values)
    n = present.sum(axis=0)
    filled = np.where(present, values, 0.0)
    weight = present.astype(np.float64)
    items = len(values)
    rng = keyed_generator("effects.bootstrap", seed, items)
    means = np.empty((resamples, values.shape[1]))
    block = max(1, _ELEMENTS // max(items, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        for start in range(0, resamples, block):
            size = min(block, resamples - start)
            counts = rng.multinomial(items, np.full(items, 1 / items), size=size) if items else np.zeros((size, 0))
            means[start : start + size] = (counts @ filled) / (counts @ weight)
        mean = filled.sum(axis=0) / n
    low, high = np.full(len(n), np.nan), np.full(len(n), np.nan)
    counted = n > 0
    if counted.any():
        tail = (1 - level) / 2
        low[counted], high[counted] = np.nanquantile(means[:, counted], [tail, 1 - tail], axis=0)
    return Estimate(mean, low, high, n)


def sign_flip_p(effects: np.ndarray, *, seed: int, permutations: int = 2000) -> np.ndarray:
    """For each cell the p of its |t|, against the largest |t| over all cells when whole items flip sign.

    One family-wise corrected p a cell, two-sided, (1 + exceedances) / (1 + permutations). NaN below two items.
    """
    effects = np.asarray(effects, dtype=np.float64)
    items, cells = effects.shape
    if items < 2 or not np.isfinite(effects).all():
        return np.full(cells, np.nan)
    squares = (effects**2).sum(axis=0)

    def statistic(means: np.ndarray) -> np.ndarray:
        variance = np.maximum(squares / items - means**2, 0.0) / (items - 1)
        return np.divide(np.abs(means), np.sqrt(variance), out=np.zeros_like(means), where=variance > 0)

    observed = statistic(effects.mean(axis=0))
    rng = keyed_generator("effects.sign_flip", seed, items)
    exceeded = np.zeros(cells, dtype=np.int64)
    block = max(1, _ELEMENTS // max(items, cells))
    for start in range(0, permutations, block):
        signs = rng.integers(0, 2, size=(min(block, permutations - start), items)) * 2.0 - 1.0
        largest = statistic(signs @ effects / items).max(axis=1)
        exceeded += (largest[:, None] >= observed[None, :]).sum(axis=0)
    return (1 + exceeded) / (1 + permutations)


def rank_heads(
    effects: np.ndarray, cells: Sequence[Cell], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[HeadEffect, ...]:
    """Heads by mean signed effect, largest first, with bootstrap intervals by item.

    The heads are those of the cells, which come from the model's head map: layers without heads do not appear.
    """
    heads = [_single_head(cell) for cell in cells]
    if effects.shape[1] != len(heads):
        raise PatchError(
            f"effects have {effects.shape[1]} cells but {len(heads)} were named; pass the sweep's own cells"
        )
    estimate = mean_interval(effects, seed=seed, resamples=resamples, level=level)
    ranked = [
        HeadEffect(layer, head, float(mean), float(low), float(high), int(n))
        for (layer, head), mean, low, high, n in zip(
            heads, estimate.mean, estimate.low, estimate.high, estimate.n, strict=True
        )
    ]
    return tuple(sorted(ranked, key=lambda one: (np.isnan(one.mean), -one.mean, one.layer, one.head)))


def random_head_sets(
    heads: Sequence[int | None], *, size: int, count: int, exclude: Iterable[tuple[int, int]], seed: int
) -> list[tuple[tuple[int, int], ...]]:
    """``count`` random sets of ``size`` heads, none of them among the excluded: the control for a chosen set.

    Set ``i`` depends on the seed and ``i`` alone, so asking for more sets later keeps the first ones.
    """
    chosen = set(exclude)
    pool = [(layer, head) for layer, n in enumerate(heads) for head in range(n or 0) if (layer, head) not in chosen]
    if not 0 < size <= len(pool):
        raise PatchError(f"a random set of {size} heads is asked for; {len(pool)} heads are left after the exclusion")
    sets = []
    for index in range(count):
        picked = keyed_generator("effects.head_set", seed, index).choice(len(pool), size=size, replace=False)
        sets.append(tuple(sorted(pool[int(i)] for i in picked)))
    return sets


def head_set_cell(name: str, heads: Iterable[tuple[int, int]], *, source: str = ZERO) -> Cell:
    """One cell that edits several heads together."""
    return Cell(name, tuple(Edit("z", layer, head, source) for layer, head in heads))


def _single_head(cell: Cell) -> tuple[int, int]:
    if len(cell.edits) != 1 or cell.edits[0].site != "z" or cell.edits[0].head is None:
        raise PatchError(f"cell {cell.name!r} is not one head; rank only cells made by head_cells")
    return cell.edits[0].layer, cell.edits[0].head


def _same_items(difference: np.ndarray, *others: np.ndarray) -> None:
    sizes = [len(np.asarray(other)) for other in others]
    if difference.ndim != 2 or any(size != len(difference) for size in sizes):
        raise PatchError(f"difference has shape {list(difference.shape)} and the rest {sizes} items; give [item, cell]")
