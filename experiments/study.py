"""What the stages of a run share, and how they keep tables of single arms until all are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from experiments import items
from experiments.config import AnyConfig
from experiments.progress import Reporter
from experiments.rundir import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from tasks.contracts import Family


@dataclass(frozen=True, slots=True)
class Study(Generic[AnyConfig]):
    """A command that looks inside a model, in progress. ``params`` are the family's parameters by setting."""

    run: RunDirectory
    config: AnyConfig
    family: Family
    params: Mapping[str, Mapping[str, Any]]
    model: Model
    arms: tuple[str, ...]
    asked: list[items.Row]
    prompts: list[Prompt]
    answers: AnswerTokens
    reporter: Reporter


def once(run: RunDirectory, name: str, arm: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """An arm's table, computed unless it is there; always read back, so that a resumed run sees the same bytes."""
    if not run.has_table(name) and not run.has_table(f"{name}-{arm}"):
        run.write_table(f"{name}-{arm}", make())
    return arm_table(run, name, arm)


def arm_table(run: RunDirectory, name: str, arm: str) -> pd.DataFrame:
    """The rows of one arm, from its own table or from the joined one."""
    if run.has_table(f"{name}-{arm}"):
        return run.table(f"{name}-{arm}")
    table = run.table(name)
    return table[table["arm"] == arm].drop(columns="arm").reset_index(drop=True)


def join(run: RunDirectory, name: str, arms: Sequence[str]) -> None:
    """One tidy table with a column ``arm`` out of the tables of the arms."""
    import pandas as pd

    if run.has_table(name):
        return
    parts = []
    for arm in arms:
        part = run.table(f"{name}-{arm}")
        part.insert(0, "arm", arm)
        parts.append(part)
    run.write_table(name, pd.concat(parts, ignore_index=True))


def stacked(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One table; without parts an empty one, such as the change of a run without adapters."""
    import pandas as pd

    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({"arm": pd.array([], dtype="string")})
