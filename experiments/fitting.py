"""The probes of a study: which are fitted, on which rows, with which folds, and what they are asked to read.

One *curve* is a probe at every layer for one target, trained on one presentation's rows of one group of settings
(``trained``: all rows of the run, or the rows of the group itself). Every curve is fitted for each arm.

Curves are compared with each other, so folds are shared: an instance lies in the same fold for every presentation, group
and arm. They are dealt once, stratified by setting and cell, from the items alone. The shuffle null exchanges labels
among instances of one setting and question phrase, in what the probes are read on too. Where folds hold out units that
have one gold answer each (templates), units are dealt to folds and take the place of instances; see ``probe_units``.

A curve trained on all rows is also read group by group, in the other presentation and in the other arm; one trained on a
group is read in the other groups that fix the same parameters. All of these are the same probes: a row is judged by the
one that held its instance out.

Baselines stand beside every curve over all rows: a probe on the embedding of the last token, on the prompt's length and
on its bag of tokens. What they can read needs no model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from experiments.groups import ALL, Group, groups
from experiments.items import PAIR
from experiments.probe_targets import BOTH, EVERY, column, presentations
from experiments.probe_units import phrases, unit_names
from tasks.targets import STANDARD

if TYPE_CHECKING:
    import pandas as pd

    from activations.store import ActivationStore
    from experiments.config import Config
    from probes.linear import ProbeResult

T = TypeVar("T")
OTHER = dict(zip(PAIR, PAIR[::-1], strict=True))
BASELINES = ("embed", "length", "tokens")
EXCHANGEABLE = 4  # rows of a stratum in a fold, on average, below which the null exchanges labels more widely


@dataclass(frozen=True, slots=True)
class Curve:
    """One probe a layer: what it reads and which rows it is trained on. ``trained`` is ``all`` or ``setting``."""

    target: str
    presentation: str
    group: Group

    @property
    def trained(self) -> str:
        return ALL if self.group.label == ALL else "setting"

    @property
    def is_main(self) -> bool:
        """The curves that the link and the summary use."""
        return self.target == "gold" and self.trained == ALL

    @property
    def name(self) -> str:
        return f"{self.target}, {self.presentation}, {self.group.label}"


@dataclass(frozen=True, slots=True)
class Material:
    """What all curves of a run are fitted from; rows stand in the same order for every arm.

    Attributes:
        tables: readouts of each arm, with ``answer`` and ``correct`` of its text; labels of derived targets, and
            ``template``, where there are any.
        tokens: ids of each row's prompt.
        params: family parameters by setting.
        whole: whether folds are made of whole units, several each, that take the place of instances.
    """

    stores: Mapping[str, ActivationStore]
    tables: Mapping[str, pd.DataFrame]
    tokens: Sequence[Sequence[int]]
    params: Mapping[str, Mapping[str, Any]]
    labels: Sequence[str]
    layers: int
    config: Config
    whole: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.tables)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one arm with their labels, 0 or 1; ``keys`` are their instances, or the units that stand in for these."""

    place: np.ndarray
    labels: np.ndarray
    keys: np.ndarray

    def within(self, chosen: np.ndarray) -> Rows:
        return Rows(self.place[chosen], self.labels[chosen], self.keys[chosen])


def curves(params: Mapping[str, Mapping[str, Any]], config: Config) -> list[Curve]:
    """All curves of a run, in the order in which they are fitted."""
    found = []
    for target in config.probe.target:
        for kind in presentations(target, params, config):
            found += [Curve(target, kind, group) for group in groups(params, config.table.rows)]
    return found


def fits(params: Mapping[str, Mapping[str, Any]], layers: int, arms: int, config: Config) -> int:
    """How many probes a run fits at least, shuffles and folds included: what the probing stage costs."""
    one = layers * (1 + config.probe.shuffles) * (config.probe.folds or 2) * len(config.probe.penalty or (1,))
    return len(curves(params, config)) * arms * one


def strata(table: pd.DataFrame, folds: int) -> np.ndarray | None:
    """Among which rows the null exchanges labels: setting and question phrase, as far as there are enough of them.

    Labels are exchanged inside a fold. A stratum that has one or two rows there has nothing to exchange, and shuffles
    that leave labels where they are would lift the null toward the result. So the finest strata are taken that have
    ``EXCHANGEABLE`` rows in a fold on average: setting and phrase, the setting, or none. Where the phrase gives the gold
    answer away (a family whose cells are its golds) it is left out.
    """
    setting = table["setting"].astype(str).to_numpy()
    phrase = phrases(table)
    both = {tuple(pair) for pair in zip(phrase, table["gold"], strict=True)}
    telling = len({gold for _, gold in both}) > 1 and len(both) == len({name for name, _ in both})
    finest = np.array([f"{one} {other}" for one, other in zip(setting, phrase, strict=True)])
    for names in (setting,) if telling else (finest, setting):
        count = len(np.unique(names))
        if count > 1 and len(names) >= EXCHANGEABLE * folds * count:
            return names
    return None


def varied_strata(table: pd.DataFrame, labels: np.ndarray, folds: int) -> np.ndarray | None:
    """As ``strata``, but none in which most rows have nothing to exchange their label with."""
    for names in (strata(table, folds), table["setting"].astype(str).to_numpy()):
        if names is None:
            return None
        several = {name for name in np.unique(names) if len(np.unique(labels[names == name])) == 2}
        if np.isin(names, list(several)).mean() > 0.5 and len(np.unique(names)) > 1:
            return names
    return None


def shared_folds(table: pd.DataFrame, folds: int, seed: int) -> dict[str, int]:
    """The fold of each instance, the same for every curve.

    Stratified by setting and cell as far as whole instances allow, so that a curve of one setting has both golds in
    each fold wherever there are enough instances.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    shown = table[table["presentation"] == PAIR[0]].astype({"setting": str, "cell": str, "gold": str})
    keys = shown["key"].to_numpy()
    # The finest of which every fold can have one.
    for names in (shown["setting"] + " " + shown["cell"], shown["setting"] + " " + shown["gold"], shown["gold"]):
        if names.value_counts().min() >= folds:
            break
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed % 2**32)
    found: dict[str, int] = {}
    with warnings.catch_warnings():
        # Of a cell with fewer instances than folds, some folds have none; a curve says how many folds it left out.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        for fold, (_, held_out) in enumerate(splitter.split(keys, names.astype("category").cat.codes, keys)):
            found.update(dict.fromkeys(keys[held_out], fold))
    return found


def rows(material: Material, arm: str, target: str, presentation: str) -> Rows:
    """The rows that have this target, with their labels; answers that were not read have none."""
    table = material.tables[arm]
    every = tuple(dict.fromkeys(table["presentation"])) if presentation == EVERY else (presentation,)
    kinds = PAIR if presentation == BOTH else every
    place = np.concatenate([np.flatnonzero((table["presentation"] == kind).to_numpy()) for kind in kinds])
    shown = table.iloc[place]
    if target == "presentation":
        label = (shown["presentation"] == PAIR[1]).to_numpy()
    elif target == "correct":
        label = shown["correct"].to_numpy(dtype=bool)
    elif target in STANDARD:
        label = (shown[target] == material.labels[0]).fillna(False).to_numpy(dtype=bool)
    else:
        known = shown[column(target)].notna().to_numpy()
        place, shown = place[known], shown[known]
        label = shown[column(target)].to_numpy(dtype=float)
    found = Rows(place, label.astype(int), evidence(material, shown))
    return found.within(shown["answer"].notna().to_numpy()) if target == "answer" else found


def evidence(material: Material, shown: pd.DataFrame) -> np.ndarray:
    """What counts as one observation, of each row: its instance, or the unit that folds hold out with others."""
    name = material.config.probe.held_out
    if material.whole and name is not None:
        return unit_names(name, material.params, shown)
    return shown["key"].to_numpy()


def in_group(material: Material, arm: str, found: Rows, group: Group) -> Rows:
    """The rows of a group of settings."""
    return found.within(group.holds(material.tables[arm].iloc[found.place]))


def activations(material: Material, arm: str, found: Rows) -> np.ndarray:
    """``resid_post`` of these rows, ``[layer, row, d_model]``."""
    return material.stores[arm].stack("resid_post", range(material.layers), found.place)


def not_fitted(material: Material, curve: Curve, arm: str, found: Rows) -> str:
    """Why these rows can't train a probe; empty if they can."""
    counts = [len(np.unique(found.keys[found.labels == label])) for label in (0, 1)]
    probe = material.config.probe
    words = LABEL_WORDS.get(curve.target, (f"not {curve.target}", curve.target))
    if len(found.labels) == 0:
        return "no row has this target"
    for label, count in enumerate(counts):
        if count == 0:
            return f"all {len(found.labels)} rows are {words[1 - label]}"
    if probe.held_out is not None and not material.whole:
        names = held_out(material, arm, found)
        assert names is not None
        values = sorted(set(names))
        if len(values) < 2:
            return f"probe.held_out is {probe.held_out}, of which {curve.group.label} has one value, {values[0]}"
        return ""
    needed = probe.folds or 0
    if curve.trained != ALL and min(counts) < needed:
        fewer = words[int(np.argmin(counts))]
        return f"{min(counts)} instances are {fewer}, and each of {needed} folds needs one"
    return ""


LABEL_WORDS = {
    "gold": ("gold no", "gold yes"),
    "answer": ("answered no", "answered yes"),
    "correct": ("wrong", "right"),
    "presentation": PAIR,
}


def held_out(material: Material, arm: str, found: Rows) -> np.ndarray | None:
    """The unit that folds hold out whole, of these rows."""
    name = material.config.probe.held_out
    return None if name is None else unit_names(name, material.params, material.tables[arm].iloc[found.place])


def how(material: Material, arm: str, found: Rows, folds: Mapping[str, int] | None) -> dict[str, Any]:
    """The arguments of ``fit_probes`` that decide the probes, for these rows."""
    probe = material.config.probe
    options: dict[str, Any] = {"member": probe.member, "seed": material.config.seed, "shuffles": probe.shuffles}
    if probe.penalty is not None:
        options["penalty"] = probe.penalty[0] if len(probe.penalty) == 1 else probe.penalty
    if probe.inner_folds is not None:
        options["inner_folds"] = probe.inner_folds
    count = probe.folds or 0
    if folds is not None:
        count = probe.folds or max(folds.values()) + 1
        options |= {"folds": count, "assigned": np.array([folds[key] for key in found.keys])}
    elif not material.whole:
        options["held_out"] = units = held_out(material, arm, found)
        count = count if units is None else len(np.unique(units))
    options["strata"] = exchanged(material, arm, found, count)
    return options


def exchanged(material: Material, arm: str, found: Rows, folds: int) -> np.ndarray | None:
    """Among which of these rows the null exchanges labels; units of one label exchange theirs with each other."""
    if material.whole:
        return None
    return varied_strata(material.tables[arm].iloc[found.place], found.labels, folds)


def read_strata(material: Material, target: Target) -> np.ndarray | None:
    """Among which rows of a reading labels are exchanged: a rule like that of the curve's own rows."""
    units = None if material.whole else held_out(material, target.arm, target.rows)
    folds = (material.config.probe.folds or 0) if units is None else len(np.unique(units))
    return exchanged(material, target.arm, target.rows, folds)


def siblings(material: Material, curve: Curve) -> Iterator[Group]:
    """The groups that a curve's probes are read in: every group, or those that fix the same parameters."""
    for group in groups(material.params, material.config.table.rows):
        if group != curve.group and (curve.trained == ALL or group.axis == curve.group.axis):
            yield group


@dataclass(frozen=True, slots=True)
class Target:
    """Other rows that a curve's probes are read on, and whose they are."""

    arm: str
    presentation: str
    group: Group
    rows: Rows


@dataclass(frozen=True, slots=True)
class Fitted:
    """One curve of one arm: its rows, its probes, or why there are none."""

    arm: str
    curve: Curve
    rows: Rows
    targets: Mapping[str, Target]
    result: ProbeResult | None
    reason: str


def fit_arm(material: Material, curve: Curve, arm: str, folds: Mapping[str, int] | None) -> Fitted:
    """One curve of one arm, and read with it whatever it can be read on."""
    from probes.linear import fit_probes

    found = in_group(material, arm, rows(material, arm, curve.target, curve.presentation), curve.group)
    # Rows of unknown instances are dealt to folds by this name, so it says what they are and not where they stand.
    targets = {f"{one.arm}, {one.presentation}, {one.group.label}": one for one in _targets(material, curve, arm)}
    reason = not_fitted(material, curve, arm, found)
    if reason:
        return Fitted(arm, curve, found, targets, None, reason)
    result, reason = tried(
        lambda: fit_probes(
            activations(material, arm, found),
            found.labels,
            found.keys,
            readings={name: _reading(material, one) for name, one in targets.items()},
            **how(material, arm, found, folds),
        )
    )
    return Fitted(arm, curve, found, targets, result, reason)


def tried(fit: Callable[[], T]) -> tuple[T | None, str]:
    """What a fit or an interval gives, or in a line why these rows have none."""
    from probes.errors import ProbeError

    try:
        return fit(), ""
    except ProbeError as error:
        return None, str(error)


def _targets(material: Material, curve: Curve, arm: str) -> list[Target]:
    """Same rows in the other presentation and arm; other groups; groups in the other presentation."""

    def rows_of(arm: str, presentation: str, group: Group) -> Target:
        found = rows(material, arm, curve.target, presentation)
        return Target(arm, presentation, group, in_group(material, arm, found, group))

    shown, others = curve.presentation, list(siblings(material, curve))
    found = [rows_of(arm, shown, group) for group in others]
    if shown in PAIR and same_gold(material, curve.target):
        found += [
            rows_of(arm, OTHER[shown], group) for group in (curve.group, *(others if curve.trained == ALL else ()))
        ]
    # A probe of the base reads the adapters, and one of an adapter the base.
    partners = material.arms[1:] if arm == material.arms[0] else material.arms[:1]
    found += [rows_of(partner, shown, curve.group) for partner in partners]
    return [one for one in found if len(one.rows.place)]


def same_gold(material: Material, target: str) -> bool:
    """Whether both presentations of an instance have one gold answer; a presentation that flips it can't be read."""
    table = material.tables[material.arms[0]]
    table = table[table["presentation"].isin(PAIR)]
    golds = table.groupby(["setting", "key"])["gold"].nunique()
    return target != "gold" or bool((golds == 1).all())


def _reading(material: Material, target: Target) -> Any:
    from probes.linear import Reading

    rows = target.rows
    return Reading(activations(material, target.arm, rows), rows.labels, rows.keys, read_strata(material, target))
