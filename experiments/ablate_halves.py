"""Which pairs rank the heads and which pairs they are cut on.

The first of many heads by effect is partly the luckiest, so heads are never judged on the instances that chose them.

* Without more, the instances are dealt into two halves within each setting and cell, so that both have the whole design.
* ``held_out`` names a swept parameter, say the relation: pairs of its ``test`` values are cut, the others rank. The same
  order of names under two relations is one instance and not two. An instance that stands on both sides is therefore dealt
  to one of them, and its pairs on the other side are left out.
* Heads that were given are ranked by nobody, and are cut on every pair.

Where a head is replaced by its mean or by another instance's activation, these come from the other side, or, for given
heads, from the other half: ``fold`` says for each pair which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from experiments.ablate_options import AblateSettings

RANKED, TESTED = "ranked", "tested"
Name = tuple[str, str]
"""Setting and instance key of a pair."""


@dataclass(frozen=True, slots=True)
class Halves:
    """The side of each pair.

    Attributes:
        ranked, tested: names of the pairs of either side.
        units: what is held out, of every setting: a value of the parameter, or the setting itself.
        fold: 0 or 1 for each pair that is used; pairs of one fold may not see each other's activations as a reference.
        left_out: pairs of no side, because their instance is on the other one.
    """

    ranked: frozenset[Name]
    tested: frozenset[Name]
    units: Mapping[str, str]
    fold: Mapping[Name, int]
    left_out: int


def halves(table: pd.DataFrame, how: AblateSettings, params: Mapping[str, Mapping[str, Any]]) -> Halves:
    """Deal the pairs out.

    Args:
        table: setting, key and cell of every prompt.
        params: family parameters by setting.

    Raises:
        UsageError: nothing is left to rank heads on, or to cut them on.
    """
    pairs = table.drop_duplicates(["setting", "key"])
    names = list(zip(pairs["setting"], pairs["key"], strict=True))
    cells = dict(zip(names, pairs["cell"], strict=True))
    if how.held_out is None:
        dealt = _dealt(names, lambda name: (name[0], cells[name]))
        ranked, tested = ([name for name in names if dealt[name] == side] for side in (0, 1))
        units = {setting: setting for setting in params}
        if how.chosen is not None:
            return Halves(frozenset(), frozenset(names), units, dealt, 0)
    else:
        units = {setting: str(values[how.held_out]) for setting, values in params.items()}
        outside = set(test_values(how, params))
        ranked, tested = ([name for name in names if (units[name[0]] in outside) == out] for out in (False, True))
    both = {key for _, key in ranked} & {key for _, key in tested}
    if both:
        # One deal for all settings: an instance is on one side of every one of them.
        cell_of = {key: cell for (_, key), cell in cells.items() if key in both}
        side = {
            name[1]: number for name, number in _dealt([("", key) for key in cell_of], lambda n: cell_of[n[1]]).items()
        }
        ranked = [name for name in ranked if side.get(name[1], 0) == 0]
        tested = [name for name in tested if side.get(name[1], 1) == 1]
    for done, left in (("rank heads on", ranked), ("cut them on", tested)):
        if not left:
            shared = f" ({len(both)} instances stand on both sides, and each can be used on one)" if both else ""
            raise UsageError(
                f"of {len(names)} pairs none is left to {done}{shared}: raise limit, or leave held_out out"
            )
    fold = {**dict.fromkeys(ranked, 0), **dict.fromkeys(tested, 1)}
    return Halves(frozenset(ranked), frozenset(tested), units, fold, len(names) - len(ranked) - len(tested))


def test_values(how: AblateSettings, params: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The values of ``held_out`` that heads are cut on: those asked for, or the last one."""
    values = list(dict.fromkeys(str(one[str(how.held_out)]) for one in params.values()))
    return tuple(map(str, how.test)) if how.test is not None else (values[-1],)


def by_half(key: str) -> bytes:
    """The order in which instances are dealt out, the same for every seed."""
    return hashlib.sha256(f"half {key}".encode()).digest()


def _dealt(names: Iterable[Name], stratum: Any) -> dict[Name, int]:
    """0 and 1 in turn within each stratum."""
    taken: dict[Any, int] = {}
    found = {}
    for name in sorted(names, key=lambda one: by_half(one[1])):
        where = stratum(name)
        found[name] = taken.get(where, 0) % 2
        taken[where] = taken.get(where, 0) + 1
    return found
