"""Pairs of answers, and an estimate from the pairs of one row of a table.

Problem. A behaviour table has one row a prompt; every number of a table is about pairs. Mechanism: `joined` puts the two
answers of a pair (and the repeated answer, where it is the control) into one row; `Group` holds the pairs of one row of
a table and turns events and sums into an `Estimate` with its interval. Before that `refuse_damaged` looks for what would
give wrong numbers without a sign: rows that stand twice, arms that were asked different items, versions that differ. Where
the second presentation flips the gold answer its answers are turned (`pairing`), so that agreement is what is right.

Constraint. An instance may stand in a group several times, under two relations or for two arms. Such pairs are no
independent draws, and a Wilson interval over them is too narrow. Every interval then resamples instances, each with all
its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError
from experiments.pairing import TURNED, as_answers_to_first, flips
from experiments.statistics import PairProfile, Share, pair_interval, pair_profile, share, unanimous

if TYPE_CHECKING:
    import pandas as pd

Params = Mapping[str, Mapping[str, Any]]

IDENTITY = ["arm", "setting", "key", "presentation"]
# A parameter that only some presentations depend on. Under every other value of it the rest are the same prompts again.
ONLY_FOR = {"rho": ("distracted", "distracted_equivalent")}
CONTROL = "repeat"
UNDEFINED = float("nan")
NOTHING = "no pair of this row has what the column counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its interval, the count `n` behind it and the method; NaN with a `reason`."""

    value: float
    low: float = UNDEFINED
    high: float = UNDEFINED
    n: int = 0
    method: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Group:
    """The pairs of one row of a table.

    Args:
        pairs: one row a pair: key, n (problem size), gold, and for both presentations `first` and `second` (answers,
            None where not read), `first_status`, `first_tokens`, …; `turned`; `repeat` where the control was asked for.
        seed, resamples, level: of the bootstrap.
    """

    pairs: pd.DataFrame
    seed: int
    resamples: int
    level: float = 0.95

    @cached_property
    def profile(self) -> PairProfile:
        return pair_profile(*self.columns, level=self.level)

    @property
    def columns(self) -> tuple[list[str | None], list[str | None], list[str]]:
        """Answers to both presentations, and gold."""
        return self.pairs["first"].tolist(), self.pairs["second"].tolist(), self.pairs["gold"].tolist()

    @cached_property
    def common(self) -> Group:
        """The support: the pairs whose two answers were read."""
        both = self.pairs["first"].notna() & self.pairs["second"].notna()
        return Group(self.pairs[both].reset_index(drop=True), self.seed, self.resamples, self.level)

    @cached_property
    def repeated(self) -> Group:
        """The same prompts with their repetition as the second presentation."""
        return Group(self.pairs.assign(second=self.pairs["repeat"]), self.seed, self.resamples, self.level)

    @property
    def clusters(self) -> list[str] | None:
        """The instance of each pair; None where no instance stands here twice."""
        return self.pairs["key"].tolist() if self.pairs["key"].duplicated().any() else None

    @property
    def turned(self) -> bool:
        """Whether answers were turned, since the second presentation flips the gold answer."""
        return "turned" in self.pairs and bool(self.pairs["turned"].any())

    @property
    def sizes(self) -> list[int] | None:
        """Problem size of each pair; None where the family has no n."""
        sizes = self.pairs["n"]
        return None if sizes.isna().any() else sizes.astype(int).tolist()

    def right(self, side: str) -> np.ndarray:
        return (self.pairs[side] == self.pairs["gold"]).to_numpy(dtype=bool, na_value=False)

    def estimate(self, statistic: str, counted: Share | None = None) -> Estimate:
        """One of the statistics of `experiments.statistics`: a share with its Wilson interval, else a bootstrap.

        Args:
            counted: the statistic as a share.
        """
        found = self._estimate(statistic, counted)
        if not found.method or not self.turned:
            return found
        return replace(found, method=f"{found.method}; {TURNED}")

    def _estimate(self, statistic: str, counted: Share | None) -> Estimate:
        if counted is not None and (counted.n == 0 or self.clusters is None):
            return Estimate(
                value=counted.value, low=counted.low, high=counted.high, n=counted.n, method=counted.method,
                reason="" if counted.n else NOTHING,
            )  # fmt: skip
        if self.pairs.empty:
            return Estimate(value=UNDEFINED, reason=NOTHING)
        if counted is not None:
            same = unanimous(counted.count, counted.n, self.pairs["key"].tolist(), level=self.level)
            if same is not None:
                return Estimate(value=same.value, low=same.low, high=same.high, n=same.n, method=same.method)
        found = pair_interval(
            *self.columns, statistics=[statistic], sizes=self.sizes if statistic == "kappa_bar" else None,
            clusters=self.clusters, resamples=self.resamples, seed=self.seed, level=self.level,
        )[statistic]  # fmt: skip
        return Estimate(value=found.value, low=found.low, high=found.high, n=found.support, method=found.method,
                        reason=found.reason)  # fmt: skip

    def event(self, shown: np.ndarray) -> Estimate:
        """How many of the pairs show an event."""
        if self.clusters is None:
            return self.estimate("", share(int(shown.sum()), len(shown), level=self.level))
        # The share of an event is the yes-rate of a column that says yes where it happens.
        said = np.where(shown, "yes", "no").tolist()
        marked = Group(self.pairs.assign(first=said, second=said, gold=said), self.seed, self.resamples, self.level)
        return marked.estimate("yes_rate_original", share(int(shown.sum()), len(shown), level=self.level))


def refuse_damaged(behaviour: pd.DataFrame, params: Params) -> None:
    lacking = [name for name in [*IDENTITY, "cell", "gold", "answer"] if name not in behaviour]
    if lacking:
        raise RunError(f"the behaviour table has no column {lacking[0]!r}: it has {', '.join(behaviour.columns)}")
    if behaviour.empty:
        raise RunError("the behaviour table has no rows: ask a model first")
    for name in behaviour.columns:
        if name.endswith("version") and behaviour[name].nunique(dropna=False) > 1:
            values = ", ".join(str(value) for value in behaviour[name].drop_duplicates())
            raise RunError(f"the behaviour table mixes versions: {name} is {values}; make one table for each")
    unknown = behaviour.loc[~behaviour["setting"].isin(list(params)), "setting"]
    if len(unknown):
        raise RunError(
            f"setting {unknown.iloc[0]!r} of the behaviour table has no params: known are {', '.join(params)}"
        )
    bad = ~behaviour["gold"].isin(["yes", "no"]) | ~(
        behaviour["answer"].isin(["yes", "no"]) | behaviour["answer"].isna()
    )
    if bad.any():
        row = behaviour[bad].iloc[0]
        raise RunError(f"{_named(row)}: gold is {row['gold']!r} and answer {row['answer']!r}; allowed are yes and no")
    twice = behaviour.duplicated(IDENTITY)
    if twice.any():
        raise RunError(f"{_named(behaviour[twice].iloc[0])} stands twice in the behaviour table: keep one of the rows")
    arms = behaviour.groupby(IDENTITY[1:], sort=False)["arm"].transform("size")
    if (arms != behaviour["arm"].nunique()).any():
        row = behaviour[arms != behaviour["arm"].nunique()].iloc[0]
        raise RunError(f"{_named(row)} was not asked in every arm: a table compares arms on the same items")


def _place(half: pd.DataFrame, place: int) -> str:
    return _named(half.reset_index().iloc[place])


def _named(row: pd.Series) -> str:
    return ", ".join(f"{name} {row[name]!r}" for name in IDENTITY if name in row)


def joined(behaviour: pd.DataFrame, params: Params, pair: tuple[str, str], *, repeat: bool) -> pd.DataFrame:
    """One row an arm and matched set: both answers of the pair, with what belongs to them."""
    import pandas as pd

    sides = {"first": pair[0], "second": pair[1], **({"repeat": CONTROL} if repeat else {})}
    shown = behaviour[behaviour["setting"].isin(_settings_of(pair, params))]
    index = ["arm", "setting", "key"]
    halves: dict[str, pd.DataFrame] = {}
    for side, kind in sides.items():
        halves[side] = shown[shown["presentation"] == kind].set_index(index)
        if halves[side].empty:
            kinds = ", ".join(behaviour["presentation"].drop_duplicates())
            raise RunError(f"a table of {pair[0]} and {pair[1]} needs {kind!r}, but there are answers to {kinds} only")
    first = halves["first"]
    columns: dict[str, Any] = {"gold": first["gold"], "cell": first["cell"], "turned": False}
    for side, half in halves.items():
        alone = first.index.symmetric_difference(half.index, sort=False)
        if len(alone):
            row = pd.Series(dict(zip(index, alone[0], strict=True)))
            missing = sides[side] if alone[0] in first.index else pair[0]
            raise RunError(f"{_named(row)} has no answer to {missing!r}: a pair needs both")
        half = half.loc[first.index]
        flipped = flips(first["gold"], half["gold"], told=partial(_place, half))
        columns["turned"] = columns["turned"] or flipped
        columns[side] = as_answers_to_first(half["answer"], flipped=flipped)
        columns[f"{side}_status"] = half.get("status", "")
        columns[f"{side}_tokens"] = half.get("n_tokens", np.nan)
    found = pd.DataFrame(columns, index=first.index).reset_index()
    sizes = {label: values.get("n") for label, values in params.items()}
    # In one order whatever that of the table is, so that a bootstrap draws the same.
    rank = {label: number for number, label in enumerate(params)}
    found = found.sort_values(index, key=lambda column: column.map(rank) if column.name == "setting" else column)
    return found.assign(n=found["setting"].map(sizes), pair="/".join(pair))


def _settings_of(pair: tuple[str, str], params: Params) -> list[str]:
    """Settings in which this pair is asked anew: not where they differ only in what does not touch it."""
    idle = [name for name, kinds in ONLY_FOR.items() if not set(kinds) & set(pair)]
    seen: dict[str, str] = {}
    for label, values in params.items():
        rest = {name: value for name, value in values.items() if name not in idle}
        seen.setdefault(repr(sorted(rest.items())), label)
    return list(seen.values())
