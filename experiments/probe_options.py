"""What is refused of the options of a run's probes, since it can't apply; before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.config import FOLDS
from experiments.errors import UsageError
from experiments.probe_units import TEMPLATE, fold_count, holding, one_label, unit_names, units_said

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import ProbeSettings


def check(probe: ProbeSettings, params: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse options that can't apply.

    Raises:
        UsageError: naming the key.
    """
    if probe.member == "mean_difference" and probe.penalty is not None:
        raise UsageError(
            f"probe.penalty is {_plain(probe.penalty)} but probe.member is mean_difference, which has none: leave one out"
        )
    if probe.inner_folds is not None and (probe.penalty is None or len(probe.penalty) == 1):
        given = "there is none" if probe.penalty is None else f"probe.penalty is {_plain(probe.penalty)}"
        raise UsageError(
            f"probe.inner_folds is {probe.inner_folds} but {given}: inner folds choose between several penalties, so "
            "give several or leave it out"
        )
    if probe.held_out is None:
        check_inner_folds(probe, FOLDS if probe.folds is None else probe.folds, f"probe.folds is {probe.folds}")
        return
    if probe.folds is not None:
        raise UsageError(
            f"probe.folds is {probe.folds} but probe.held_out is {probe.held_out}, which makes a fold of each value: "
            "leave one out"
        )
    if probe.splits != 1:
        raise UsageError(
            f"probe.splits is {probe.splits} but probe.held_out is {probe.held_out}, whose folds can be dealt "
            "one way only: leave one out"
        )
    if probe.held_out == TEMPLATE:
        return
    known = tuple(next(iter(params.values())))
    values = {str(one.get(probe.held_out)) for one in params.values()}
    if probe.held_out not in known:
        raise UsageError(
            f"probe.held_out is {probe.held_out!r}: choose {TEMPLATE} or a parameter of the family ({', '.join(known)})"
        )
    if len(values) < 2:
        raise UsageError(
            f"probe.held_out is {probe.held_out} but the run has one value of it, {values.pop()}: sweep it, for example "
            f"--set {probe.held_out}=A,B, or leave it out"
        )


def check_inner_folds(probe: ProbeSettings, folds: int, made: str) -> None:
    """Refuse to choose a penalty where the other folds can't be made into inner folds.

    Args:
        folds: how many there are.
        made: why so many, for the message.

    Raises:
        UsageError: naming the keys.
    """
    if probe.penalty is None or len(probe.penalty) == 1:
        return
    one = "give one, for example --set probe.penalty=0.01"
    if folds == 2:
        raise UsageError(
            f"{made} and probe.penalty {_plain(probe.penalty)}: with one of two folds held out, none is left to choose a "
            f"penalty on; {one}"
        )
    if probe.inner_folds is not None and probe.inner_folds > folds - 1:
        raise UsageError(
            f"probe.inner_folds is {probe.inner_folds} but {made}, and those that are not held out make the inner folds: "
            f"give at most {folds - 1}, or leave it out"
        )


def check_units(probe: ProbeSettings, params: Mapping[str, Mapping[str, Any]], table: pd.DataFrame) -> None:
    """Refuse units that can't be held out: too few of them, or of a gold answer that they determine, or shared instances.

    Where the same instances stand under every value, as orders do under relations, the other values hold the instances
    of the one that is held out, and nothing is left to train on.

    Args:
        table: setting, key, cell and gold of every prompt of a presentation, and its template where there is one.

    Raises:
        UsageError: naming the unit.
    """
    if probe.held_out is None:
        return
    units, gold = unit_names(probe.held_out, params, table), table["gold"].to_numpy(dtype=str)
    names = list(np.unique(units))
    if len(names) < 2:
        raise UsageError(
            f"probe.held_out is {probe.held_out}, of which the items have one value, {names[0]}: leave it out"
        )
    if single := one_label(units, gold):
        check_few(probe, units, gold, single[0])
        return
    keys = table["key"].to_numpy()
    for unit in names:
        left = (units != unit) & ~np.isin(keys, keys[units == unit])
        if len(np.unique(gold[left])) < 2:
            raise UsageError(
                f"probe.held_out is {probe.held_out}, but the instances of {unit} stand under other values of it too, so "
                "nothing is left to train on: leave it out (tables/transfer reads each value by probes of the others), "
                f"then give the run to `probe fit --held-out {probe.held_out}`"
            )
    check_inner_folds(probe, len(names), units_said(probe.held_out, names))


def check_few(probe: ProbeSettings, units: np.ndarray, gold: np.ndarray, first: str) -> None:
    """Refuse units of one gold answer each that can't be dealt to folds, two of either answer to each side.

    Args:
        units, gold: of every prompt.
        first: such a unit, for the message.

    Raises:
        UsageError: naming it.
    """
    counts = holding(units, gold)
    if len(counts) < 2 or min(counts.values()) < 2:
        said = ", ".join(f"{count} with {label}" for label, count in counts.items())
        raise UsageError(
            f"probe.held_out is {probe.held_out}, but all prompts of {first} have one gold answer, and units of one answer "
            f"are held out several together, of which there have to be two of either (there are {said}): hold out another "
            "unit"
        )
    count = fold_count(units, gold, folds=FOLDS)
    check_inner_folds(probe, count, f"probe.held_out is {probe.held_out}, whose values are dealt to {count} folds")


def _plain(penalty: Sequence[float]) -> str:
    return ", ".join(f"{one:g}" for one in penalty)
