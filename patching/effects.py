"""From a sweep's numbers to effects: arrays in, arrays and small frozen results out, nothing but numpy.

Everything is measured in logits first. The *signed effect* is how far an edit moves the answer difference toward a
named answer; it exists for every item, it adds up, and its mean has an interval. Two derived numbers are popular and
need care:

- *share flipped*: among the items whose recipient and donor answer differently, how often the edited run gives the
  donor's answer. Items that agree cannot flip, so they are not counted, and the count is reported.
- *normalised restoration*, (patched - recipient) / (donor - recipient): 1 is restored, 0 is no effect. The ratio
  explodes where donor and recipient hardly differ, so those items are left out by a margin that is fixed *before* the
  result is seen. Left out means NaN, never 0, with the number kept.

An item is one draw, or where several rows belong to one instance, the instance is; intervals and tests that respect this
are in ``statistics.py``. Whole studies, with the controls beside the effect, are put together in ``studies.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patching.controls import keyed_generator
from patching.edits import ANSWER, ZERO, Cell, Edit, PatchError
from patching.statistics import mean_interval


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
    same_items(difference, unpatched, toward)
    return (difference - np.asarray(unpatched)[:, None]) * toward[:, None]


def share_flipped(difference: np.ndarray, unpatched: np.ndarray, donor: np.ndarray) -> tuple[np.ndarray, int]:
    """For each cell the share of items that now give the donor's answer, and the number of items that could flip.

    Only items whose unpatched and donor answers differ count. With none, every share is NaN.
    """
    same_items(difference, unpatched, donor)
    able = np.sign(unpatched) * np.sign(donor) < 0
    if not able.any():
        return np.full(difference.shape[1], np.nan), 0
    return (np.sign(difference[able]) == np.sign(np.asarray(donor)[able])[:, None]).mean(axis=0), int(able.sum())


def restoration(difference: np.ndarray, unpatched: np.ndarray, donor: np.ndarray, *, margin: float) -> Restoration:
    """(patched - recipient) / (donor - recipient), kept where |donor - recipient| > ``margin`` (fixed beforehand)."""
    same_items(difference, unpatched, donor)
    if not margin > 0:
        raise PatchError(f"margin is {margin}; give a positive number of logits, or ratios explode where runs agree")
    recipient = np.asarray(unpatched, dtype=np.float64)
    gap = np.asarray(donor, dtype=np.float64) - recipient
    kept = np.abs(gap) > margin
    values = (difference - recipient[:, None]) / np.where(kept, gap, np.nan)[:, None]
    return Restoration(values, kept, int(kept.sum()), margin)


def rank_heads(
    effects: np.ndarray,
    cells: Sequence[Cell],
    *,
    groups: Sequence[Any] | np.ndarray | None = None,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[HeadEffect, ...]:
    """Heads by mean signed effect, largest first, with intervals over instances (``groups``, one a row).

    The heads are those of the cells, which come from the model's head map: layers without heads do not appear. The
    intervals are of each head by itself; that the first of many heads is the largest is partly luck, so test it on rows
    that did not rank it (``heads.py``).
    """
    heads = [single_head(cell) for cell in cells]
    if effects.shape[1] != len(heads):
        raise PatchError(
            f"effects have {effects.shape[1]} cells but {len(heads)} were named; pass the sweep's own cells"
        )
    estimate = mean_interval(effects, groups=groups, seed=seed, resamples=resamples, level=level)
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
    """``count`` different random sets of ``size`` heads, none of them among the excluded: the control for a chosen set.

    Few heads make few different sets, so there may be fewer of them: a set counted twice would be no further evidence.
    Draw ``i`` depends on the seed and ``i`` alone, so asking for more sets later keeps the first ones.
    """
    chosen = set(exclude)
    pool = [(layer, head) for layer, n in enumerate(heads) for head in range(n or 0) if (layer, head) not in chosen]
    if not 0 < size <= len(pool):
        raise PatchError(f"a random set of {size} heads is asked for; {len(pool)} heads are left after the exclusion")
    sets: dict[tuple[tuple[int, int], ...], None] = {}
    for index in range(20 * count):
        picked = keyed_generator("effects.head_set", seed, index).choice(len(pool), size=size, replace=False)
        sets.setdefault(tuple(sorted(pool[int(i)] for i in picked)))
        if len(sets) == count:
            break
    return list(sets)


def head_set_cell(name: str, heads: Iterable[tuple[int, int]], *, source: str = ZERO, position: str = ANSWER) -> Cell:
    """One cell that edits several heads together, at the answer position or at ``all`` positions."""
    return Cell(name, tuple(Edit("z", layer, head, source, position) for layer, head in heads))


def single_head(cell: Cell) -> tuple[int, int]:
    """(layer, head) of a cell that edits one head."""
    if len(cell.edits) != 1 or cell.edits[0].site != "z" or cell.edits[0].head is None:
        raise PatchError(f"cell {cell.name!r} is not one head; rank only cells made by head_cells")
    return cell.edits[0].layer, cell.edits[0].head


def same_items(difference: np.ndarray, *others: np.ndarray) -> None:
    """Refuse readouts ``[item, cell]`` beside arrays ``[item]`` of another length."""
    sizes = [len(np.asarray(other)) for other in others]
    if difference.ndim != 2 or any(size != len(difference) for size in sizes):
        raise PatchError(f"difference has shape {list(difference.shape)} and the rest {sizes} items; give [item, cell]")
