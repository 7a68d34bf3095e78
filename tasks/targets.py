"""What a probe may be trained to read beside the gold answer: targets that a family derives from its own instances.

A gold answer is worked out in steps, and each step is something that a layer may hold: which end of the order the first
name is, how the question is put. Only the family knows such things, so it may offer them by one more method:

    def targets(self) -> Mapping[str, DerivedTarget]

A family without it offers none. This module is the only place that asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from tasks.contracts import DerivedTarget, Family, MatchedSet, Presentation, TaskError

# What every study has; a derived target can't take these names.
STANDARD = ("gold", "answer", "correct", "presentation")


@runtime_checkable
class OffersTargets(Protocol):
    """A family that derives targets."""

    def targets(self) -> Mapping[str, DerivedTarget]: ...


def targets_of(family: Family) -> Mapping[str, DerivedTarget]:
    """The targets that a family offers by name; empty if it offers none.

    Raises:
        TaskError: one of them bears the name of a standard target.
    """
    if not isinstance(family, OffersTargets):
        return MappingProxyType({})
    found = family.targets()
    for name in STANDARD:
        if name in found:
            raise TaskError(f"family {family.name!r} offers a target {name!r}, which every study has: rename it")
    return found


def target_named(family: Family, name: str) -> DerivedTarget:
    """The family's target with this name.

    Raises:
        TaskError: there is none.
    """
    offered = targets_of(family)
    if name in offered:
        return offered[name]
    close = get_close_matches(name, [*STANDARD, *offered], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    own = f"or of {family.name}: {', '.join(offered)}" if offered else f"since {family.name} derives none"
    raise TaskError(f"unknown target {name!r}: {hint}choose {', '.join(STANDARD)}, {own}")


def target_label(family: Family, name: str, matched: MatchedSet, presentation: Presentation) -> int | None:
    """The label of one presentation: 1, 0, or None where the target is undefined.

    Raises:
        TaskError: there is no such target, or the family gives something else.
    """
    found = target_named(family, name).label(matched, presentation)
    if found is not None and found not in (0, 1):
        place = f"{matched.instance.key[:12]} {presentation.kind}"
        raise TaskError(f"target {name!r} of {family.name!r} is {found!r} for {place}: a target is 0, 1 or None")
    return None if found is None else int(found)
