"""The items of a run: matched sets on disk, and the flat rows that every later table uses.

A row is one presentation of one instance under one setting. The order of rows is fixed by the items file, so arrays from
the activation store and columns from tables line up by position. The same instance may stand under two settings (one
relation and another): ``key`` is then shared, which is what folds are grouped by.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from experiments.errors import RunError, UsageError
from experiments.rundir import RunDirectory
from tasks.files import from_record, to_line

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config, Setting
    from tasks.contracts import Family, MatchedSet, Presentation


@dataclass(frozen=True, slots=True)
class Item:
    """A matched set and the setting it was drawn under."""

    setting: str
    matched: MatchedSet


@dataclass(frozen=True, slots=True)
class Row:
    """One presentation to ask."""

    setting: str
    matched: MatchedSet
    presentation: Presentation

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.setting, self.matched.instance.key, self.presentation.kind


def check_presentations(family: Family, grid: Sequence[Setting]) -> None:
    """A run is about pairs: the original and its equivalent have to be there, and answers have to be labels."""
    labels = None if family.answers is None else tuple(family.answers)
    if labels != ("yes", "no"):
        found = "free-form answers" if labels is None else f"the labels {', '.join(labels)}"
        raise UsageError(
            f"family {family.name!r} has {found}: `probe run` reads yes against no, so name the labels yes and no, in "
            "this order, and list what the model says as their variants"
        )
    for setting in grid:
        kinds = setting.params.get("presentations", ["original", "equivalent"])
        if "equivalent" not in kinds:
            raise UsageError(f"presentations is {', '.join(kinds)}: a run compares original with equivalent, add it")


def make(run: RunDirectory, config: Config, family: Family, grid: Sequence[Setting]) -> list[Item]:
    """The run's items, generated and written once, read back after that.

    Raises:
        RunError: the family has fewer distinct sets than asked for.
    """
    if not run.items.exists():
        lines: list[str] = []
        for setting in grid:
            sets = list(islice(family.generate(setting.params, seed=config.seed, split=config.split), config.limit))
            if len(sets) < config.limit:
                raise RunError(f"{setting.label} gives {len(sets)} sets, not {config.limit}: lower --limit")
            for matched in sets:
                _check_pair(family, matched)
                record = json.loads(to_line(matched, version=family.version))
                lines.append(json.dumps({"setting": setting.label, **record}, ensure_ascii=False) + "\n")
        run.write_text("items.jsonl", "".join(lines))
    records = run.read_records(run.items)
    return [Item(record["setting"], from_record(record)) for record in records]


def _check_pair(family: Family, matched: MatchedSet) -> None:
    """Every number of a run is about two presentations with one gold answer."""
    kinds = [shown.kind for shown in matched.presentations]
    for kind in ("original", "equivalent"):
        if kinds.count(kind) != 1:
            raise RunError(
                f"family {family.name!r} renders {', '.join(kinds)}: a run needs one original and one equivalent a set"
            )
    golds = [matched[kind].gold for kind in ("original", "equivalent")]
    if golds[0] != golds[1]:
        raise RunError(
            f"family {family.name!r} flips the gold answer between original ({golds[0]}) and equivalent ({golds[1]}): "
            "a run compares presentations that keep it, so give the flipping one another name"
        )


def rows(items: Sequence[Item]) -> list[Row]:
    """All presentations of all items, in file order."""
    return [Row(item.setting, item.matched, shown) for item in items for shown in item.matched.presentations]


def frame(asked: Sequence[Row]) -> pd.DataFrame:
    """The columns that identify a row in every table: setting, n, key, presentation, cell, gold."""
    import pandas as pd

    return pd.DataFrame(
        {
            "setting": [row.setting for row in asked],
            "n": pd.array([row.matched.instance.params.get("n") for row in asked], dtype="Int64"),
            "key": [row.matched.instance.key for row in asked],
            "presentation": [row.presentation.kind for row in asked],
            "cell": [row.matched.instance.cell for row in asked],
            "gold": [row.presentation.gold for row in asked],
        }
    )
