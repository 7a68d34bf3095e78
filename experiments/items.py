"""The items of a run: matched sets on disk, and the flat rows that every later table uses.

A row is one presentation of one instance under one setting. The order of rows is fixed by the items file, so arrays from
the activation store and columns from tables line up by position. The same instance may stand under two settings (one
relation and another): ``key`` is then shared, which is what folds are grouped by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING

from experiments.errors import RunError, UsageError
from experiments.pairing import may_flip
from experiments.rundir import RunDirectory, atomic
from tasks.files import from_record, to_record

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import AnyConfig, Asking, Setting
    from tasks.contracts import Family, MatchedSet, Presentation


# The presentations that a whole study is about, and a table where nothing else is asked for.
PAIR = ("original", "equivalent")


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


def check_labels(family: Family) -> None:
    """Answers have to be yes or no.

    Raises:
        UsageError: the family has other answers.
    """
    labels = None if family.answers is None else tuple(family.answers)
    if labels != ("yes", "no"):
        found = "free-form answers" if labels is None else f"the labels {', '.join(labels)}"
        raise UsageError(
            f"family {family.name!r} has {found}: runs read yes against no, so name the labels yes and no, in "
            "this order, and list what the model says as their variants"
        )


def for_pairs(config: AnyConfig, family: Family) -> AnyConfig:
    """The configuration of a study of pairs: original and equivalent, where the family's own default is another."""
    offered = {parameter.name: parameter for parameter in family.parameters()}.get("presentations")
    if offered is None or "presentations" in config.params or "equivalent" in offered.default:
        return config
    return config.model_copy(update={"params": {**config.params, "presentations": list(PAIR)}})


def check_presentations(family: Family, grid: Sequence[Setting]) -> None:
    """A whole study is about pairs: original and equivalent have to be there, and the answer next after the prompt."""
    check_labels(family)
    for setting in grid:
        kinds = setting.params.get("presentations", ["original", "equivalent"])
        if "equivalent" not in kinds:
            raise UsageError(f"presentations is {', '.join(kinds)}: a run compares original with equivalent, add it")
        if setting.params.get("prompt") == "reasoning":
            raise UsageError(
                "prompt is 'reasoning': readouts are taken right after the prompt, where a model that reasons "
                "first has no answer; use prompt=direct, or `probe eval`"
            )


def make(
    run: RunDirectory,
    config: Asking,
    family: Family,
    grid: Sequence[Setting],
    pairs: Sequence[tuple[str, str]] = (PAIR,),
) -> None:
    """Write the run's items, unless they are there: a set at a time, whatever their number.

    Args:
        pairs: kinds of presentations that the run compares.

    Raises:
        RunError: the family has fewer distinct sets than asked for, or a set lacks one of the pairs.
    """
    if run.items.exists():
        return
    most = None if config.limit == "all" else config.limit
    with atomic(run.items) as file:
        for setting in grid:
            count = 0
            for matched in islice(family.generate(setting.params, seed=config.seed, split=config.split), most):
                for pair in pairs:
                    _check_pair(family, matched, pair)
                record = {"setting": setting.label, **to_record(matched, version=family.version)}
                file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
                count += 1
            if most is not None and count < most:
                raise RunError(f"{setting.label} gives {count} sets, not {config.limit}: lower --limit")


def stored(run: RunDirectory) -> Iterator[tuple[str, list[Item]]]:
    """Label and items of each setting, in order, one setting in memory at a time.

    Raises:
        RunError: a line is damaged.
    """
    records = run.records(run.items, keys=("setting", "key", "presentations"))
    for label, group in groupby(records, key=lambda record: record["setting"]):
        yield label, [Item(label, from_record(record)) for record in group]


def _check_pair(family: Family, matched: MatchedSet, pair: tuple[str, str]) -> None:
    """Two presentations of a set keep the gold answer, unless the family says that one of the kinds flips it."""
    kinds = [shown.kind for shown in matched.presentations]
    for kind in pair:
        if kinds.count(kind) != 1:
            raise RunError(
                f"family {family.name!r} renders {', '.join(kinds)}: a run needs one {pair[0]} and one {pair[1]} a set"
            )
    golds, declared = [matched[kind].gold for kind in pair], may_flip(family, pair)
    if (golds[0] != golds[1]) != declared:
        done, said = ("keeps", "flip it") if declared else ("flips", "keep it")
        raise RunError(
            f"family {family.name!r} {done} the gold answer between {pair[0]} ({golds[0]}) and {pair[1]} ({golds[1]}), and "
            f"its `flipped` says that they {said}: list there the kinds that flip it, in every set, and no others"
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
