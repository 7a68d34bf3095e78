"""Rows that a probe is asked to read although it was not fitted for them, and their null.

A reading is the same layers and features on other rows: the other presentation of each instance, another model's
activations of the same prompts, another position. The question is whether the same direction reads it, so no new probe
is fitted.

A row is judged by a probe that did not train on its instance: the one of the fold that held its group out. Groups that
the training data does not know are dealt to the folds, the classes evenly, and judged by the probe of theirs.

The null shuffles the labels of a reading too. If every group of the reading carries the labels that it has in training,
a shuffle gives it the labels that it gave there, so that both are exchanged alike. Otherwise the reading's own groups
exchange labels, within their fold (and within `strata`). Either way they are independent of what the probe trained on,
so the expected AUROC is 0.5. Where they have nothing to exchange there is no null: it is NaN, and p is 1.

The AUROC is the mean over the folds that hold both classes. Where the rows lie in several folds and one of these does,
there is no mean: one fold's probe on a part of the rows is no answer about all of them. Rows that lie in one fold, such as
those of a unit that it holds out, are judged by that fold alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, binary, checked, finite, same_rows
from probes.errors import ProbeError
from probes.folds import group_codes, shuffled_labels
from probes.keyed import generator


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Rows to read: `features` [layer, row, feature] with the training data's layers and features, `labels` [row] (0/1)
    and `groups` [row], which tie rows to the training instances. `strata` [row] limits its own exchange of labels.
    """

    features: npt.NDArray[np.floating]
    labels: npt.ArrayLike
    groups: npt.ArrayLike
    strata: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checked reading: its rows, the fold that judges each, label sets [row, 1 + shuffle], and which folds score.

    `reason` says why none does; `exchanged` whether a shuffle could move any label.
    """

    features: npt.NDArray[np.floating]
    labels: IntArray
    folds: IntArray
    sets: IntArray
    scored: BoolArray
    reason: str = ""
    exchanged: bool = True


def prepare(
    name: str,
    reading: Reading,
    *,
    training: npt.NDArray[np.floating],
    groups: npt.ArrayLike,
    assigned: IntArray,
    sets: IntArray,
    seed: int,
) -> Prepared:
    """Check a reading against the `training` features and deal its rows; `sets` [row, 1 + shuffle] are those labels."""
    title = f"readings[{name!r}]"
    acts = checked(f"{title}.features", reading.features, ("layer", "row", "feature"))
    if (acts.shape[0], acts.shape[2]) != (training.shape[0], training.shape[2]):
        raise ProbeError(
            f"{title}.features has shape {acts.shape} and features {training.shape}; both need the same layers and "
            "features, rows may differ"
        )
    finite(f"{title}.features", acts)
    labels = binary(f"{title}.labels", reading.labels)
    same_rows(f"{title}.labels", len(labels), f"{title}.features", acts.shape[1])
    known, own = np.asarray(groups), checked(f"{title}.groups", reading.groups, ("row",))
    same_rows(f"{title}.groups", len(own), f"{title}.features", acts.shape[1])
    codes = group_codes(np.concatenate([known, own]))
    before, after = codes[: len(known)], codes[len(known) :]
    count = int(assigned.max()) + 1
    folds = _deal(name, labels, before, after, assigned, count=count, seed=seed)
    shuffled, exchanged = _follow(labels, before, after, sets), True
    if shuffled is None:
        strata = None if reading.strata is None else group_codes(reading.strata)
        if strata is not None:
            same_rows(f"{title}.strata", len(strata), f"{title}.features", acts.shape[1])
        # One class has no null; neither has it an AUROC, which is then NaN.
        shuffles = sets.shape[1] - 1 if len(np.unique(labels)) == 2 else 0
        fixed = np.repeat(labels[:, None], sets.shape[1] - 1, axis=1)
        moved = _exchanged(labels, after, folds, strata, shuffles=shuffles, seed=seed) if shuffles else fixed
        exchanged = moved is not None
        shuffled = fixed if moved is None else moved
    scored, reason = _scored(labels, folds, count)
    return Prepared(acts, labels, folds, np.concatenate([labels[:, None], shuffled], axis=1), scored, reason, exchanged)


def _scored(labels: IntArray, folds: IntArray, count: int) -> tuple[BoolArray, str]:
    """Return which of `count` folds are scored, and why none is."""
    scored = np.array([len(np.unique(labels[folds == fold])) == 2 for fold in range(count)])
    held = len(np.unique(folds))
    if not scored.any():
        return scored, f"no fold of {count} holds both classes ({len(labels)} rows)"
    if scored.sum() == 1 and held > 1:
        said = f"1 of {held} folds with rows holds both classes ({len(labels)} rows); at least 2 are needed"
        return np.zeros(count, dtype=np.bool_), said
    return scored, ""


def _exchanged(
    labels: IntArray, groups: IntArray, folds: IntArray, strata: IntArray | None, *, shuffles: int, seed: int
) -> IntArray | None:
    """Return the labels exchanged among the reading's own groups, or None where there is nothing to exchange."""
    try:
        return shuffled_labels(labels, groups, folds, shuffles=shuffles, strata=strata, seed=seed)
    except ProbeError:  # its one error: each cell of fold and stratum has one label
        return None


def _deal(
    name: str, labels: IntArray, before: IntArray, after: IntArray, assigned: IntArray, *, count: int, seed: int
) -> IntArray:
    """Return the fold that judges each row of a reading."""
    # A group in several held-out units is left out of training by each of them; the first one judges it.
    place = dict(zip(before[::-1].tolist(), assigned[::-1].tolist(), strict=True))
    first = {group: int(labels[after == group][0]) for group in sorted(set(after.tolist()) - set(place))}
    offset = 0
    for label in (0, 1):
        unknown = [group for group, found in first.items() if found == label]
        order = generator(seed, "probes.readings", name, label).permutation(len(unknown))
        place |= {unknown[at]: (offset + turn) % count for turn, at in enumerate(order.tolist())}
        offset += len(unknown)
    return np.array([place[group] for group in after.tolist()], dtype=np.int64)


def _follow(labels: IntArray, before: IntArray, after: IntArray, sets: IntArray) -> IntArray | None:
    """Return the shuffles that the training groups underwent, or None if some group's labels are not the same there."""
    shuffled = np.empty((len(labels), sets.shape[1] - 1), dtype=np.int64)
    for group in np.unique(after).tolist():
        here, there = np.flatnonzero(after == group), np.flatnonzero(before == group)
        if len(there) == 0:
            return None
        one = len(set(labels[here].tolist()) | set(sets[there, 0].tolist())) == 1
        moved = sets[there, 1:]
        if one and (moved == moved[0]).all():
            shuffled[here] = moved[0]
        elif len(here) == len(there) and (labels[here] == sets[there, 0]).all():
            shuffled[here] = moved
        else:
            return None
    return shuffled


def mean_over_folds(areas: FloatArray, scored: BoolArray) -> FloatArray:
    """Return the mean of `areas` [layer, fold, set] over the scored folds, leaving out undefined ones."""
    defined = np.isfinite(areas) & scored[None, :, None]
    total, count = np.where(defined, areas, 0.0).sum(axis=1), defined.sum(axis=1)
    means: FloatArray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return means
