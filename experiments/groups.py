"""Groups of settings: over what a number of a study is pooled.

A run that sweeps sizes and relations has a number for all of it, for each relation over its sizes, for each size over its
relations, and for each setting. All of them are named by a label that says which parameters are fixed: ``all``,
``relation=above_below``, ``n=8``, ``relation=above_below, n=8``. In tables this label stands in the column ``setting``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

ALL = "all"


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that are pooled. ``axis`` names the parameters that are fixed: none for ``all``."""

    label: str
    axis: tuple[str, ...]
    settings: tuple[str, ...]

    def holds(self, table: pd.DataFrame) -> np.ndarray:
        """Which rows of a table with the column ``setting`` belong here."""
        found: np.ndarray = table["setting"].isin(self.settings).to_numpy()
        return found


def swept(params: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The parameters that differ between settings, in the family's order.

    Args:
        params: values by the setting's label.
    """
    first = next(iter(params.values()))
    return tuple(name for name in first if len({str(values.get(name)) for values in params.values()}) > 1)


def groups(params: Mapping[str, Mapping[str, Any]], rows: Sequence[str] | None = None) -> list[Group]:
    """All settings together; with several swept parameters each value of each; and each setting.

    With one setting, ``all`` says everything.

    Args:
        rows: parameters that a table fixes together, for which there are groups as well.
    """
    axes = swept(params)
    found = [Group(ALL, (), tuple(params))]
    if len(axes) > 1:
        for axis in axes:
            found += _by(params, (axis,))
    together = grouped(params, rows)
    if 1 < len(together[0].axis) < len(axes):
        found += together
    if len(params) > 1:
        found += [Group(label, axes, (label,)) for label in params]
    return found


def grouped(params: Mapping[str, Mapping[str, Any]], rows: Sequence[str] | None) -> list[Group]:
    """The groups that have these parameters fixed, in the order of the settings; each setting if None.

    A parameter with one value fixes nothing.

    Raises:
        UsageError: no parameter of the family.
    """
    axes, known = swept(params), tuple(next(iter(params.values())))
    for name in rows or ():
        if name not in known:
            raise UsageError(f"table.rows names {name!r}, which is no parameter: choose from {', '.join(known)}")
    wanted = axes if rows is None else tuple(axis for axis in axes if axis in rows)
    if not wanted:
        return [Group(ALL, (), tuple(params))]
    if len(wanted) == len(axes):
        return [Group(label, axes, (label,)) for label in params]
    return _by(params, wanted)


def _by(params: Mapping[str, Mapping[str, Any]], axis: tuple[str, ...]) -> list[Group]:
    members: dict[str, list[str]] = {}
    for label, values in params.items():
        members.setdefault(", ".join(f"{name}={values[name]}" for name in axis), []).append(label)
    return [Group(label, axis, tuple(settings)) for label, settings in members.items()]
