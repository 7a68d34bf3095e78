"""What is refused of the options of a run's probes, since it can't apply; before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import ProbeSettings

TEMPLATE = "template"  # the question phrase as a unit that folds hold out
TOO_FEW_FOLDS = (
    "{}: with one of two folds held out, none is left to choose a penalty on; give one, for example "
    "--set probe.penalty=0.01"
)


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
        if probe.folds == 2 and probe.penalty is not None and len(probe.penalty) > 1:
            raise UsageError(TOO_FEW_FOLDS.format(f"probe.folds is 2 and probe.penalty {_plain(probe.penalty)}"))
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


def check_units(probe: ProbeSettings, params: Mapping[str, Mapping[str, Any]], table: pd.DataFrame) -> None:
    """Refuse units that can't be held out: too few of them, or one with a single gold answer.

    Args:
        table: setting, cell and gold of every prompt.

    Raises:
        UsageError: naming the unit.
    """
    if probe.held_out is None:
        return
    units = unit_names(probe.held_out, params, table)
    golds = table.groupby(units)["gold"].nunique()
    for unit, count in golds.items():
        if count < 2:
            raise UsageError(
                f"probe.held_out is {probe.held_out}, but all prompts of {unit} have one gold answer: hold out another unit"
            )
    if len(golds) < 2:
        raise UsageError(
            f"probe.held_out is {probe.held_out}, of which the items have one value, {units[0]}: leave it out"
        )
    if len(golds) == 2 and probe.penalty is not None and len(probe.penalty) > 1:
        said = f"probe.held_out is {probe.held_out}, of which there are two ({', '.join(map(str, golds.index))})"
        raise UsageError(TOO_FEW_FOLDS.format(said))


def unit_names(name: str, params: Mapping[str, Mapping[str, Any]], table: pd.DataFrame) -> np.ndarray:
    """The unit that folds hold out whole, of each row."""
    if name == TEMPLATE:
        return phrases(table)
    return np.array([str(params[setting][name]) for setting in table["setting"]])


def _plain(penalty: Sequence[float]) -> str:
    return ", ".join(f"{one:g}" for one in penalty)


def phrases(table: pd.DataFrame) -> np.ndarray:
    """Each row's question phrase: its cell without the gold answer, ``forward`` of ``forward-yes``."""
    return np.array(
        [
            str(cell).removesuffix(str(gold)).rstrip("-_ ") or str(cell)
            for cell, gold in zip(table["cell"], table["gold"], strict=True)
        ]
    )
