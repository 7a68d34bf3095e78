"""Tables whose rows count answers, not pairs: made from a behaviour table and the facts of its questions.

Problem. The four cells of validity and negation, and every breakdown of them, are shares of single answers. Which answers
a row pools, what tells rows apart and what is compared with what has to be said once, in the configuration. Mechanism: an
`AnswerTableSpec` (``table: {of: answers, …}``) names rows, columns, which answers count (`only`, `without`), and one row
key to compare `over`; `make_answer_table` joins the facts to the answers, groups them by the row keys and computes each
column of `ANSWER_COLUMNS` in each group.

Constraints. Any fact of a question, any parameter and any fact of an arm can be a row key; nothing is known of a family by
name. A matched set is drawn with all its rows, for all arms of the row together; strata are the templates, where questions
have one, else the cells. So intervals are about other contents, not about other templates or other models. The prompt
that is sent again as a control (``repeat``) does not count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from experiments.answer_columns import ANSWER_COLUMNS, REFERRING, RELATIVE, AnswerGroup, Peers
from experiments.answer_facts import IDENTITY, Facts, in_order
from experiments.errors import RunError, UsageError
from experiments.table_columns import Column
from experiments.table_pairs import CONTROL, Params, refuse_damaged
from experiments.table_specs import Shown, distinct, existing, fits_together, problem
from experiments.tables import in_columns, plain_value

if TYPE_CHECKING:
    import pandas as pd

# Row keys that every behaviour table has, and those that say something about its arms once a model is loaded.
OTHER_ROWS = ("arm", "presentation", "setting", "cell", "all")
UNKNOWN = "unknown"
OF_ARMS = ("model", "series", "n_parameters")
Values = tuple[str, ...]


class AnswerTableSpec(Shown):
    """What a table of answers shows. Columns of `beside` pool what is printed side by side, and stand at the end."""

    of: Literal["answers"] = Field(description="what is counted: pairs or answers")
    only: dict[str, Values] = Field(default_factory=dict, description="by row key, the values that count")
    without: dict[str, Values] = Field(default_factory=dict, description="by row key, the values that don't")
    over: str | None = Field(None, description="row key whose values are compared")
    reference: Values = Field((), description="values that others are compared with; several count as one")
    blocks: Values = Field(("key",), min_length=1, description="row keys that make answers comparable, or key")
    beside: Values = Field((), description="columns about all values of `across` together")
    sort: str | None = Field(None, description="column by which rows are sorted, largest first")

    @field_validator("only", "without", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: _several(one) for key, one in value.items()}
        return {} if value is None else value

    @field_validator("reference", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return _several(value)

    @property
    def known(self) -> Mapping[str, Column[AnswerGroup]]:
        return ANSWER_COLUMNS

    @property
    def below(self) -> tuple[str, ...]:
        return self.beside

    def narrow(self) -> AnswerTableSpec:
        return self.model_copy(update={"across": None, "columns": self.every, "beside": ()})

    def parts(self, columns: tuple[str, ...], title: str) -> AnswerTableSpec:
        return self.model_copy(update={"columns": columns, "beside": (), "title": title})

    @field_validator("columns", "beside")
    @classmethod
    def _columns_exist(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        return existing(columns, ANSWER_COLUMNS, "columns")

    @field_validator("rows", "blocks")
    @classmethod
    def _once(cls, rows: tuple[str, ...]) -> tuple[str, ...]:
        return distinct(rows, "rows")

    @model_validator(mode="after")
    def _fits(self) -> AnswerTableSpec:
        distinct(self.every, "columns and beside")
        fits_together(self)
        if self.beside and self.across is None:
            raise problem(f"beside names {self.beside[0]!r} but nothing is printed across: put it into columns")
        relative = [name for name in self.every if name in RELATIVE]
        if relative and self.over is None:
            raise problem(f"column {relative[0]!r} compares rows: say over which row key, for example over: activity")
        referring = [name for name in self.every if name in REFERRING]
        if referring and not self.reference:
            raise problem(f"column {referring[0]!r} compares with one value of {self.over}: say which as reference")
        told = self.columns if self.across == self.over else self.every
        if lost := [name for name in self.beside if name in REFERRING[:-1] and name not in told]:
            raise problem(
                f"column {lost[0]!r} tells the values of {self.over!r} apart, which stand across: put it into columns"
            )
        needing = [name for name in told if name in REFERRING[:-1]]
        if needing and self.over not in self.rows:
            raise problem(f"column {needing[0]!r} tells the values of {self.over!r} apart: add it to rows")
        if self.over is not None and self.over in self.blocks:
            raise problem(f"blocks names {self.over!r}, which is compared: a block has to hold several of its values")
        if self.sort is not None and self.sort not in self.every:
            raise problem(f"sort is {self.sort!r}: choose one of the columns, {', '.join(self.every)}")
        return self


def check_answers(spec: AnswerTableSpec, facts: Facts, params: Params, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a table that these questions can't give; worth asking before a model is.

    Args:
        arms: facts of each arm, as far as they are known.

    Raises:
        UsageError: a row key that nothing has, a value that no question has.
    """
    known = _row_keys(facts, params, arms)
    for what, keys in (("table row", spec.rows), ("only", spec.only), ("without", spec.without),
                       ("over", () if spec.over is None else (spec.over,)),
                       ("blocks", [one for one in spec.blocks if one != "key"])):  # fmt: skip
        known = known if what == "table row" else [key for key in known if key != "all"]
        for key in keys:
            if key not in known:
                close = get_close_matches(key, known, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise UsageError(f"{what} names {key!r}, which no question has{hint}: choose from {', '.join(known)}")
    if any(name in REFERRING for name in spec.every) and spec.over in facts.table:
        values = facts.table[spec.over].astype(str).unique()
        if not set(values) & set(spec.reference) or set(values) <= set(spec.reference):
            raise UsageError(
                f"reference is {', '.join(spec.reference)} and the questions have {spec.over} {', '.join(values)}: ask one "
                "of the reference's and one to compare with it"
            )
    allowed = {value for listed in facts.choices.values() for value in listed}
    for what, chosen in (("only", spec.only), ("without", spec.without)):
        for key, values in chosen.items():
            if key not in facts.table:
                continue
            there = [str(one) for one in facts.table[key].unique()]
            for value in values:
                # What is left out, or chosen among others, may be missing where less is rendered.
                if value not in there and not (value in allowed and (what == "without" or set(values) & set(there))):
                    raise UsageError(f"{what}.{key} is {value!r}: the questions have {', '.join(there)}")


def make_answer_table(
    behaviour: pd.DataFrame,
    facts: Facts,
    params: Params,
    spec: AnswerTableSpec,
    *,
    seed: int,
    resamples: int,
    level: float = 0.95,
    arms: Mapping[str, Mapping[str, Any]] | None = None,
) -> pd.DataFrame:
    """One row a combination of row keys: the keys, then each column.

    A column that has an interval comes with `_low` and `_high`, each but a count with `_n`, `_method` and `_reason`. A
    column of `beside` has the same number in every row that differs in `across` alone.

    Args:
        behaviour: one row an arm and presentation, as a run's behaviour table; several runs as arms of their own names.
        facts: of the same questions.
        params: parameters by setting label.
        arms: by arm, facts about it that can be row keys (model, n_parameters, …).

    Raises:
        UsageError: the table doesn't fit the questions.
        RunError: a row of the behaviour table is wrong, or no answer counts.
    """
    import pandas as pd

    arms = arms or {}
    check_answers(spec, facts, params, arms)
    refuse_damaged(behaviour, params)
    rows = _with_facts(behaviour, facts, params, arms)
    _check_values(rows, facts, spec)
    rows = _chosen(rows, spec)
    if any(name in REFERRING for name in spec.every):
        _check_reference(rows[f"fact {spec.over}"], spec)
    rows = rows.reset_index(drop=True).assign(**_derived(rows, facts, spec))
    for key in spec.rows:
        values = pd.Series(["all"] * len(rows)) if key == "all" else rows[f"fact {key}"]
        rows[f"row {key}"] = pd.Categorical(values, in_order(list(dict.fromkeys(values)), facts.choices))
    keys, chosen = [f"row {key}" for key in spec.rows], {"seed": seed, "resamples": resamples, "level": level}
    beside = _beside(rows, spec, chosen)
    peers = _peers(rows, [key for key in spec.rows if key != spec.over], spec, chosen)
    alone = all(name in REFERRING for name in spec.columns)
    records = []
    for values, part in rows.groupby(keys, sort=True, observed=True):
        named = dict(zip(spec.rows, values, strict=True))
        near = peers.get(tuple(named[key] for key in spec.rows if key != spec.over))
        member = named.get(spec.over) if spec.over is not None else None
        if alone and near is not None and member in near.pooled:
            continue  # the reference differs from nothing, and the table shows nothing else
        group = AnswerGroup(part.reset_index(drop=True), chosen, near, member)
        found = {name: ANSWER_COLUMNS[name].compute(group) for name in spec.columns}
        pooled = {} if not spec.beside else beside[tuple(named[key] for key in spec.rows if key != spec.across)]
        records.append({**named, **found, **pooled})
    made = in_columns(records, spec)
    return made if spec.sort is None else _sorted(made, spec)


def _beside(rows: pd.DataFrame, spec: AnswerTableSpec, chosen: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """The columns that pool what stands side by side, by the other row keys."""
    if not spec.beside:
        return {}
    kept = [key for key in spec.rows if key != spec.across]
    peers = _peers(rows, [key for key in kept if key != spec.over], spec, chosen)
    found = {}
    for values, part in _grouped(rows, kept):
        named = dict(zip(kept, values, strict=True))
        near = peers.get(tuple(named[key] for key in kept if key != spec.over))
        group = AnswerGroup(part.reset_index(drop=True), chosen, near, named.get(spec.over) if spec.over else None)
        found[values] = {name: ANSWER_COLUMNS[name].compute(group) for name in spec.beside}
    return found


def _peers(
    rows: pd.DataFrame, keys: Sequence[str], spec: AnswerTableSpec, chosen: Mapping[str, Any]
) -> dict[Any, Peers]:
    """What each row is compared with, by the row keys that it shares with it."""
    if spec.over is None:
        return {}
    found = {}
    for values, part in _grouped(rows, keys):
        named = [one for one in part["member"].drop_duplicates() if str(one) in spec.reference]
        reference = None if not named else named[0] if len(named) == 1 else " and ".join(map(str, named))
        if len(named) > 1:
            part = part.assign(member=part["member"].where(~part["member"].isin(named), reference))
        found[values] = Peers(part.reset_index(drop=True), spec.over, reference, frozenset(named), chosen)
    return found


def _grouped(rows: pd.DataFrame, keys: Sequence[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    if not keys:
        return [((), rows)]
    return [(tuple(values), part) for values, part in rows.groupby([f"row {key}" for key in keys], observed=True)]


def _row_keys(facts: Facts, params: Params, arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    of_settings = [name for name in next(iter(params.values()), {}) if all(name in one for one in params.values())]
    of_arms = dict.fromkeys(name for one in arms.values() for name in one)
    return list(dict.fromkeys([*OTHER_ROWS, *facts.names, *of_settings, *OF_ARMS, *of_arms]))


def _with_facts(
    behaviour: pd.DataFrame, facts: Facts, params: Params, arms: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """The answers with every row key as a column ``fact KEY``."""
    identity = list(IDENTITY)
    known = facts.table.rename(columns={name: f"fact {name}" for name in facts.names}).assign(
        place=range(len(facts.table))
    )
    rows = behaviour.merge(known, on=identity, how="left", validate="many_to_one", indicator="found")
    lost = rows[rows["found"] != "both"]
    if len(lost):
        named = ", ".join(str(lost.iloc[0][name])[:16] for name in identity)
        raise RunError(f"the answer to {named} has no item: put the run's items.jsonl back")
    # In the order of arms and items, whatever that of the table is: rows and resamples follow from it.
    ranks = {arm: rank for rank, arm in enumerate(dict.fromkeys(behaviour["arm"]))}
    rows = rows.assign(rank=rows["arm"].map(ranks)).sort_values(["rank", "place"], ignore_index=True)
    added: dict[str, Any] = {f"fact {name}": rows[name] for name in OTHER_ROWS if name != "all"}
    for name in _row_keys(facts, params, arms):
        if f"fact {name}" in rows or name in OTHER_ROWS:
            continue
        of_setting = {label: plain_value(one[name]) for label, one in params.items() if name in one}
        of_arm = {arm: arms.get(arm, {}).get(name, UNKNOWN) for arm in rows["arm"].unique()}
        added[f"fact {name}"] = rows["setting"].map(of_setting) if of_setting else rows["arm"].map(of_arm)
    return rows.assign(**added)


def _chosen(rows: pd.DataFrame, spec: AnswerTableSpec) -> pd.DataFrame:
    """The answers that count."""
    counted = np.ones(len(rows), dtype=bool)
    if CONTROL not in spec.only.get("presentation", ()) and "presentation" not in spec.rows:
        counted &= (rows["presentation"] != CONTROL).to_numpy()
    for key, values in spec.only.items():
        counted &= rows[f"fact {key}"].astype(str).isin(values).to_numpy()
    for key, values in spec.without.items():
        counted &= ~rows[f"fact {key}"].astype(str).isin(values).to_numpy()
    if not counted.any():
        said = "; ".join(f"{key} {', '.join(one)}" for key, one in {**spec.only, **spec.without}.items())
        raise RunError(f"no answer is left for the table ({said}): leave out one of the conditions in only and without")
    return rows[counted]


def _check_values(rows: pd.DataFrame, facts: Facts, spec: AnswerTableSpec) -> None:
    """Refuse a value of only or without that no answer has, where the key is no fact of the question."""
    for what, chosen in (("only", spec.only), ("without", spec.without)):
        for key, values in chosen.items():
            there = dict.fromkeys(rows[f"fact {key}"].astype(str)) if key not in facts.table else values
            if unknown := [value for value in values if value not in there]:
                raise UsageError(f"{what}.{key} is {unknown[0]!r}: the answers have {', '.join(there)}")


def _check_reference(values: pd.Series, spec: AnswerTableSpec) -> None:
    there = dict.fromkeys(values.astype(str))
    if not set(there) & set(spec.reference) or set(there) <= set(spec.reference):
        raise UsageError(
            f"reference is {', '.join(spec.reference)} and the answers that count have {spec.over} {', '.join(there)}: "
            "leave one of the reference's and one to compare with it"
        )


def _derived(rows: pd.DataFrame, facts: Facts, spec: AnswerTableSpec) -> dict[str, Any]:
    """What the columns count by."""
    rows = rows.reset_index(drop=True)
    answer = rows["answer"].astype(object)

    def first(*names: str) -> pd.Series:
        return next(rows[f"fact {name}"] for name in names if f"fact {name}" in rows)

    blocks = [rows["key" if name == "key" else f"fact {name}"].tolist() for name in spec.blocks]
    found: dict[str, Any] = {
        "answer": answer.where(answer.notna(), None),
        "correct": (answer == rows["gold"]).fillna(False).astype(bool),
        "valid": rows["fact validity"] == "valid",
        "negated": rows["fact polarity"] == "negated",
        "stratum": first("template", "cell"),
        "pattern": first("pattern", "template", "cell"),
        "frame": first("form", "presentation"),
        "negation": rows["fact negation"] if "negation" in facts.names else "none",
        "asked": list(zip(rows["arm"], rows["setting"], strict=True)),
        "block": list(zip(*blocks, strict=True)),
    }
    return found if spec.over is None else {**found, "member": rows[f"fact {spec.over}"].tolist()}


def _sorted(made: pd.DataFrame, spec: AnswerTableSpec) -> pd.DataFrame:
    """Rows by the column, largest first; what stands side by side stays together, in its order."""
    kept = [key for key in spec.rows if key != spec.across]
    if spec.across is None or not kept:
        return made.sort_values(spec.sort, ascending=False, kind="stable", ignore_index=True)
    largest = made.groupby(kept, sort=False, dropna=False)[spec.sort].transform("max")
    order = (-largest).argsort(kind="stable")
    return made.iloc[order].reset_index(drop=True)


def _several(value: Any) -> Any:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)
