"""The measures of an ablation as sums over instances, so that a resample is one row of weights.

Everything that ``heads_ablation`` reports is made of totals: sums of readouts and numbers of rows in each cell, and how
many pairs are both right, both wrong or one right. An instance adds a fixed amount to each total, whether it counts once,
not at all or three times in a resample. So all resamples are one matrix product, and leaving out each instance is a
subtraction.

The definitions are those of the whole project: δ and s are taken over cells that count equally, R, D and U over pairs.
They are written down here again, in a few lines, because this room stands below the one that holds them; a test keeps
the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patching.edits import PatchError
from patching.statistics import group_codes, group_sums

PRESENTATIONS = ("original", "equivalent")
MEASURES = (
    "signal_original",
    "signal_equivalent",
    "signal_mean",
    "default_original",
    "default_equivalent",
    "accuracy_original",
    "accuracy_equivalent",
    "accuracy_mean",
    "invariance",
    "robust",
    "shared_wrong",
    "unstable",
)
SIGNALS = MEASURES[:3]
SHARES_REMOVED = tuple(name.replace("signal", "share_removed") for name in SIGNALS)
STATISTICS = (*MEASURES, *SHARES_REMOVED)


@dataclass(frozen=True, slots=True, eq=False)
class Design:
    """Readouts of pairs as totals.

    Attributes:
        columns: ``[instance, total]``: pairs; pairs of each cell; for each cell, arm and presentation the readout's sum;
            for each arm how many are right in the original, in the equivalent, in both.
        stratum: the cell of each instance; 0 throughout where an instance has pairs of several cells.
        sides: 1 for gold-yes cells, -1 for gold-no cells.
        arms: readouts side by side: without ablation, then each set.
        n: pairs.
        reason: why δ and s are NaN, if they are.
    """

    columns: np.ndarray
    stratum: np.ndarray
    sides: np.ndarray
    arms: int
    n: int
    reason: str

    @classmethod
    def of(
        cls,
        before: np.ndarray,
        after: Mapping[str, np.ndarray],
        presentations: Sequence[str],
        keys: Sequence[Any],
        cells: Sequence[str],
        gold: np.ndarray,
        groups: Sequence[Any] | None,
    ) -> Design:
        """Check that rows make pairs and sum them up; PatchError names what does not fit."""
        rows = len(before)
        given: dict[str, Sequence[Any] | np.ndarray] = {
            "presentations": presentations,
            "keys": keys,
            "cells": cells,
            "gold": gold,
        }
        given.update(after)
        if groups is not None:
            given["groups"] = groups
        for name, values in given.items():
            if len(values) != rows:
                raise PatchError(
                    f"{name} has {len(values)} rows and before has {rows}; give the same rows in one order"
                )
        readout = np.stack([np.asarray(one, dtype=np.float64) for one in (before, *after.values())], axis=1)
        if not np.isfinite(readout).all():
            raise PatchError(f"{int((~np.isfinite(readout)).sum())} readouts are not finite; run those cells again")
        answers = np.asarray(gold)
        if not np.isin(answers, (-1, 1)).all():
            raise PatchError(f"gold holds {sorted(set(np.unique(answers).tolist()) - {-1, 1})[:3]}; allowed: +1 and -1")
        pairs = _pairs(presentations, keys, cells)
        names = sorted({str(cells[one]) for one, _ in pairs})
        cell = np.array([names.index(str(cells[one])) for one, _ in pairs])
        sides = np.zeros(len(names))
        for number, (one, _) in zip(cell, pairs, strict=True):
            if sides[number] not in (0, answers[one]):
                raise PatchError(
                    f"cell {names[number]!r} holds rows of gold yes and gold no; a cell has one gold answer"
                )
            sides[number] = answers[one]
        both = np.array(pairs)  # [pair, presentation]
        shown = readout[both]  # [pair, presentation, arm]
        right = np.sign(shown) == answers[both][:, :, None]
        inside = np.eye(len(names))[cell]  # [pair, cell]
        sums = inside[:, :, None, None] * shown[:, None]  # [pair, cell, presentation, arm]
        counted = np.stack([right[:, 0], right[:, 1], right.all(axis=1)], axis=1)  # [pair, event, arm]
        columns = np.hstack(
            [np.ones((len(pairs), 1)), inside, sums.reshape(len(pairs), -1), counted.reshape(len(pairs), -1)]
        )
        codes = group_codes(None if groups is None else [groups[one] for one, _ in pairs], len(pairs))
        first = np.full(int(codes.max()) + 1, -1)
        first[codes] = cell
        stratum = first if (first[codes] == cell).all() else np.zeros_like(first)
        missing = sorted({"yes", "no"} - {"yes" if side > 0 else "no" for side in sides})
        reason = f"δ and s are undefined: no cell has gold {missing[0]}" if missing else ""
        return cls(group_sums(columns, codes), stratum, sides, readout.shape[1], len(pairs), reason)

    def values(self, totals: np.ndarray) -> np.ndarray:
        """The measures ``[..., arm, measure]`` of totals ``[..., total]``; NaN where one is undefined."""
        lead, cells = totals.shape[:-1], len(self.sides)
        pairs, inside = totals[..., 0], totals[..., 1 : 1 + cells]
        end = 1 + cells + cells * 2 * self.arms
        sums = totals[..., 1 + cells : end].reshape(*lead, cells, 2, self.arms)
        counted = totals[..., end:].reshape(*lead, 3, self.arms)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums / inside[..., None, None]
            first, second, robust = np.moveaxis(counted / pairs[..., None, None], -2, 0)
        default = means.mean(axis=-3)  # [..., presentation, arm]
        if self.reason:
            default = signal = np.full_like(default, np.nan)
        else:
            signal = (
                means[..., self.sides > 0, :, :].mean(axis=-3) - means[..., self.sides < 0, :, :].mean(axis=-3)
            ) / 2
        wrong = 1 - first - second + robust
        return np.stack(
            [
                signal[..., 0, :],
                signal[..., 1, :],
                signal.mean(axis=-2),
                default[..., 0, :],
                default[..., 1, :],
                first,
                second,
                (first + second) / 2,
                robust + wrong,
                robust,
                wrong,
                first + second - 2 * robust,
            ],
            axis=-1,
        )

    def changes(self, values: np.ndarray) -> np.ndarray:
        """``[..., set, statistic]``: each measure after less before, and the shares of s that are gone."""
        before, after = values[..., :1, :], values[..., 1:, :]
        with np.errstate(invalid="ignore", divide="ignore"):
            removed = 1 - after[..., : len(SIGNALS)] / before[..., : len(SIGNALS)]
        return np.concatenate([after - before, removed], axis=-1)


def _pairs(presentations: Sequence[str], keys: Sequence[Any], cells: Sequence[str]) -> list[tuple[int, int]]:
    """(row of the original, row of the equivalent) of each key, in the order in which keys occur."""
    found: dict[Any, dict[str, int]] = {}
    for row, (kind, key) in enumerate(zip(presentations, keys, strict=True)):
        if kind not in PRESENTATIONS:
            raise PatchError(f"row {row} is of presentation {kind!r}; allowed: {', '.join(PRESENTATIONS)}")
        own = found.setdefault(key, {})
        if kind in own:
            raise PatchError(f"key {key!r} has two rows of its {kind}; give one key a pair and the instance in groups")
        own[kind] = row
    pairs = []
    for key, own in found.items():
        if len(own) < 2:
            raise PatchError(f"key {key!r} has no {PRESENTATIONS[PRESENTATIONS[0] in own]}; give both presentations")
        one, two = (own[kind] for kind in PRESENTATIONS)
        if cells[one] != cells[two]:
            raise PatchError(f"key {key!r} is in cells {cells[one]!r} and {cells[two]!r}; a pair has one cell")
        pairs.append((one, two))
    if not pairs:
        raise PatchError("no pairs to compare; give both presentations of at least one instance")
    return pairs


def freedom(without: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Degrees of freedom of each statistic's variance, from its values ``[instance, statistic]`` without each instance.

    The variance is a sum of squares over instances, so its own variance follows from how unequal they are.
    """
    sizes = np.bincount(stratum)[:, None]
    known = np.isfinite(without).all(axis=0)

    def centred(values: np.ndarray) -> np.ndarray:
        return values - (group_sums(values, stratum) / sizes)[stratum]

    squares = centred(np.where(known, without, 0.0)) ** 2
    variance, spread = squares.sum(axis=0), (centred(squares) ** 2).sum(axis=0)
    # Squares that are equal up to rounding leave the variance certain.
    equal = spread <= 1e-12 * (squares**2).sum(axis=0)
    return np.where(equal, np.inf, 2 * variance**2 / np.where(equal, 1.0, spread))
