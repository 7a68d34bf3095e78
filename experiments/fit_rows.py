"""The rows that `probe fit` trains on and reads: their labels, the units that are held out, and what is refused of them.

A label comes from the items (gold), from the row itself (presentation), from a run's behaviour table (answer, correct), or
from the family, which derives targets of its own. A row without a label has no part in anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from experiments import fitting, probe_options, probe_units
from experiments.config import FOLDS
from experiments.errors import UsageError
from experiments.fit_options import PRESENTATION, Choice, as_flags
from experiments.fitting import Rows
from experiments.store_items import Asked, Opened, answers

if TYPE_CHECKING:
    from tasks.contracts import Family

ON_ANSWERS = ("answer", "correct")


def check_presentations(asked: Asked, chosen: Choice) -> None:
    kinds = list(dict.fromkeys(asked.table["presentation"]))
    for name, wanted in (("train", chosen.train), ("read", chosen.read)):
        for kind in wanted:
            if kind not in kinds:
                raise UsageError(
                    f"--{name} is {kind!r}, but the rows at {chosen.position} are of {', '.join(kinds)}: name one of "
                    "these, or capture the position in it"
                )


def labels(opened: Opened, asked: Asked, target: str, train: Sequence[str]) -> tuple[np.ndarray, str]:
    """1, 0 or NaN for each row, and a note on those without a label."""
    table = asked.table
    if target == "gold":
        golds = list(dict.fromkeys(table["gold"].astype(str)))
        if not set(golds) <= {"yes", "no"}:
            raise UsageError(
                f"--target is gold, but the items have the gold answers {', '.join(golds[:4])}, and probes tell yes from "
                "no: choose another target"
            )
        return (table["gold"] == "yes").to_numpy(dtype=float), ""
    if target == PRESENTATION:
        # Of two presentations that are trained on, the second.
        return (table["presentation"] == train[-1]).to_numpy(dtype=float), ""
    if target in ON_ANSWERS:
        said = answers(opened, asked)
        if target == "correct":
            return said["correct"].to_numpy(dtype=float), ""
        given = np.where(said["answer"].isna(), np.nan, (said["answer"] == "yes").to_numpy(dtype=float, na_value=0.0))
        unread = int(np.isnan(given).sum())
        return given, f"{unread} of {len(given)} answers were not read and have no label" if unread else ""
    from tasks.targets import target_label

    family = _family(opened, asked, target)
    found = [target_label(family, target, row.matched, row.presentation) for row in asked.rows]
    derived = np.array([np.nan if label is None else label for label in found], dtype=float)
    undefined = int(np.isnan(derived).sum())
    return derived, f"{target} is undefined in {undefined} of {len(derived)} rows" if undefined else ""


def _family(opened: Opened, asked: Asked, target: str) -> Family:
    from tasks.contracts import TaskError
    from tasks.registry import family as family_named
    from tasks.targets import target_named

    try:
        family = family_named(opened.family or asked.family)
    except TaskError as error:
        if opened.family is not None:
            raise
        raise UsageError(
            f"--target is {target!r}, which only the family can tell, and {error}: name its file with --family"
        ) from None
    if (family.name, family.version) != (asked.family, asked.version):
        raise UsageError(
            f"the items are of {asked.family} version {asked.version} and this is {family.name} version {family.version}: "
            "capture again, or give the family of that version"
        )
    target_named(family, target)
    return family


def meaning(opened: Opened, asked: Asked, target: str, train: Sequence[str]) -> str:
    """What a 1 and a 0 say, in words."""
    if target == PRESENTATION:
        return f"1 is {train[-1]}, 0 is {train[0]}"
    if target in fitting.LABEL_WORDS:
        zero, one = fitting.LABEL_WORDS[target]
        return f"1 is {one}, 0 is {zero}"
    from tasks.targets import target_named

    return f"1: {target_named(_family(opened, asked, target), target).help}"


def rows(asked: Asked, labels: np.ndarray, kinds: Sequence[str]) -> Rows:
    """The labelled rows of these presentations; ``place`` is that in the table."""
    shown = asked.table["presentation"].to_numpy()
    place = np.flatnonzero(np.isin(shown, kinds))
    place = place[~np.isnan(labels[place])]
    return Rows(place, labels[place].astype(int), asked.table["key"].to_numpy()[place])


def units(asked: Asked, own: Rows, chosen: Choice) -> np.ndarray | None:
    name = chosen.config.probe.held_out
    return None if name is None else probe_units.unit_names(name, asked.params, asked.table.iloc[own.place])


def crossed(own: Rows, units: np.ndarray) -> bool:
    """Whether every instance stands under more than one unit."""
    return all(len(np.unique(units[own.keys == key])) > 1 for key in np.unique(own.keys))


def whole(own: Rows, units: np.ndarray) -> bool:
    """Whether some unit has one label, so that folds are made of several whole units."""
    return not crossed(own, units) and bool(probe_units.one_label(units, own.labels))


def by_unit(asked: Asked, own: Rows, others: Mapping[str, Rows], chosen: Choice) -> tuple[Rows, dict[str, Rows], str]:
    """The same rows with their units in the place of instances, and a note that says so."""

    def named(rows: Rows) -> Rows:
        keys = probe_units.unit_names(str(chosen.config.probe.held_out), asked.params, asked.table.iloc[rows.place])
        return replace(rows, keys=keys)

    mine = named(own)
    held_out = chosen.config.probe.held_out
    note = (
        f"values of {held_out} have one label each: {len(np.unique(mine.keys))} of them are dealt to "
        f"{probe_units.fold_count(mine.keys, mine.labels, folds=FOLDS)} folds and count as the instances"
    )
    return mine, {kind: named(rows) for kind, rows in others.items()}, note


def check_rows(asked: Asked, own: Rows, units: np.ndarray | None, chosen: Choice) -> None:
    """Refuse rows that no probe can be trained on."""
    words = fitting.LABEL_WORDS.get(chosen.target, (f"not {chosen.target}", chosen.target))
    if chosen.target == PRESENTATION:
        words = (chosen.train[0], chosen.train[1])
    if len(own.place) == 0:
        raise UsageError(f"no row of {', '.join(chosen.train)} has the target {chosen.target}: choose another")
    counts = [len(np.unique(own.keys[own.labels == label])) for label in (0, 1)]
    for label, count in enumerate(counts):
        if count == 0:
            raise UsageError(
                f"all {len(own.place)} rows of {', '.join(chosen.train)} are {words[1 - label]}, and a probe needs both: "
                "choose another target, or capture more instances"
            )
    probe = chosen.config.probe
    if units is None or crossed(own, units):
        folds = probe.folds or FOLDS
        if min(counts) < folds:
            advice = "lower --folds, or capture more instances" if min(counts) > 1 else "capture more instances"
            fewer, all_ = words[int(np.argmin(counts))], len(np.unique(own.keys))
            raise UsageError(
                f"{fewer}: {min(counts)} of {all_} instances, and each of {folds} folds needs one; {advice}"
            )
    else:
        single = probe_units.one_label(units, own.labels)
        if single and min(probe_units.holding(units, own.labels).values()) < 2:
            label = int(own.labels[units == single[0]][0])
            raise UsageError(
                f"--held-out is {probe.held_out}, but all rows of {probe.held_out} {single[0]} are {words[label]}, and a "
                f"fold needs both: leave --held-out out, or name a parameter whose values each have {words[0]} and "
                f"{words[1]}, or of which at least two have either"
            )
    if units is None:
        return
    names = list(dict.fromkeys(units))
    if len(names) < 2:
        raise UsageError(
            f"--held-out is {probe.held_out}, of which these rows have one value, {names[0]}: leave it out"
        )
    if crossed(own, units):
        count, made = FOLDS, f"instances are dealt to {FOLDS} folds"
    elif whole(own, units):
        count = probe_units.fold_count(units, own.labels, folds=FOLDS)
        made = f"values of {probe.held_out} have one label each and are dealt to {count} folds"
    else:
        count, made = len(names), probe_units.units_said(str(probe.held_out), names)
    try:
        probe_options.check_inner_folds(probe, count, made)
    except UsageError as error:
        raise as_flags(error) from None
