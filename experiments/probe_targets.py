"""What the probes of a run are trained to read, and on which presentations.

=====================  ============================================================================================
target                 trained on
=====================  ============================================================================================
gold, answer, correct  the original, and the equivalent, each alone
presentation           both together, which it tells apart
gold, once more        every presentation together, where some of them flip the gold answer
derived by the family  every presentation together
=====================  ============================================================================================

Where all presentations keep the gold answer, a probe for it may have learned what the instance is and not what is to be
said; over presentations that flip it the two come apart. The same holds for what a family derives, such as how a question
is put, which is one and the same within a presentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError
from experiments.items import PAIR
from tasks.targets import STANDARD

if TYPE_CHECKING:
    from experiments.config import Config
    from experiments.items import Row
    from tasks.contracts import Family

BOTH, EVERY = "both", "every"


def presentations(target: str, params: Mapping[str, Mapping[str, Any]], config: Config) -> tuple[str, ...]:
    """What the curves of a target are trained on: kinds of presentation, ``both`` of the pair, or ``every`` one."""
    if target == "presentation":
        return (BOTH,)
    if target not in STANDARD:
        return (EVERY,)
    return (*PAIR, EVERY) if target == "gold" and _flips(params, config) else PAIR


def _flips(params: Mapping[str, Mapping[str, Any]], config: Config) -> bool:
    """Whether the run asks a presentation that flips the gold answer."""
    from tasks.contracts import Directional
    from tasks.registry import family as family_named

    asked = {kind for one in params.values() for kind in one.get("presentations", PAIR)}
    if asked <= {*PAIR, "repeat"}:
        return False
    family = family_named(config.family)
    return isinstance(family, Directional) and bool(asked & set(family.flipped))


def column(target: str) -> str:
    """Where a table of rows has a derived target's labels: NaN where it is undefined."""
    return f"target {target}"


def derived(config: Config) -> tuple[str, ...]:
    """The targets that only the family can tell."""
    return tuple(target for target in config.probe.target if target not in STANDARD)


def check(config: Config, family: Family) -> None:
    """Refuse a target that neither every study nor this family has.

    Raises:
        UsageError: naming it.
    """
    from tasks.contracts import TaskError
    from tasks.targets import target_named

    for target in derived(config):
        try:
            target_named(family, target)
        except TaskError as error:
            raise UsageError(f"probe.target: {error}") from None


def labels(family: Family, target: str, asked: Sequence[Row]) -> np.ndarray:
    """1, 0 or NaN for each row."""
    from tasks.targets import target_label

    found = [target_label(family, target, row.matched, row.presentation) for row in asked]
    return np.array([np.nan if label is None else label for label in found], dtype=float)
