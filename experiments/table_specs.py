"""What a table or a figure of pairs is asked to show, as a configuration says it.

A specification is checked where it is read: unknown columns, names that stand twice and pairs that would be pooled are
refused before a model is asked. Which parameters and presentations there are is known only with the settings, see
``tables.check``. ``Shown`` is what tables have in common, whatever their rows count.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from experiments.config import Section
from experiments.table_columns import COLUMNS, Column
from experiments.table_pairs import ONLY_FOR, Group


class Shown(Section):
    """What every table has, whatever its rows count: rows, columns of `known`, and how these are printed.

    Everything that `rows` doesn't name is pooled. `across` is one of the rows, printed side by side.
    """

    rows: tuple[str, ...] = Field(("arm",), min_length=1, description="row keys")
    columns: tuple[str, ...] = Field(min_length=1, description="columns, by name")
    across: str | None = Field(None, description="row key whose values are printed side by side")
    title: str = Field("", description="heading of the table")

    @property
    def known(self) -> Mapping[str, Column[Any]]:
        """The columns that there are."""
        raise NotImplementedError

    @property
    def below(self) -> tuple[str, ...]:
        """Columns that pool what is printed side by side; they stand once, at the end."""
        return ()

    @property
    def every(self) -> tuple[str, ...]:
        return (*self.columns, *self.below)

    def narrow(self) -> Shown:
        """The same with nothing side by side."""
        return self.model_copy(update={"across": None})

    def parts(self, columns: tuple[str, ...], title: str) -> Shown:
        """Some of the columns of a narrow table, under another heading."""
        return self.model_copy(update={"columns": columns, "title": title})


class TableSpec(Shown):
    """What a table of pairs shows."""

    of: Literal["pairs"] = Field("pairs", description="what is counted: pairs or answers")
    rows: tuple[str, ...] = Field(("arm",), min_length=1, description="row keys: arm, pair, cell, all or a parameter")
    pairs: tuple[tuple[str, str], ...] = Field(
        (("original", "equivalent"),), min_length=1, description="pairs compared"
    )

    @property
    def known(self) -> Mapping[str, Column[Group]]:
        return COLUMNS

    @field_validator("columns")
    @classmethod
    def _columns_exist(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        return existing(columns, COLUMNS, "columns")

    @field_validator("rows")
    @classmethod
    def _rows_once(cls, rows: tuple[str, ...]) -> tuple[str, ...]:
        return distinct(rows, "rows")

    @model_validator(mode="after")
    def _fits_together(self) -> TableSpec:
        _check_pairs(self.pairs, self.rows, "rows")
        fits_together(self)
        return self


class FigureSpec(Section):
    """What a figure shows: `y` over `x`, a line for each combination of `lines`, a panel for each of `panels` and `y`."""

    of: Literal["pairs"] = Field("pairs", description="what is counted: pairs or answers")
    x: str = Field(description="parameter on the horizontal axis")
    y: tuple[str, ...] = Field(min_length=1, description="columns, a panel each")
    lines: tuple[str, ...] = Field(("arm",), min_length=1, description="row keys that tell lines apart")
    panels: tuple[str, ...] = Field((), description="row keys that tell panels apart")
    pairs: tuple[tuple[str, str], ...] = Field(
        (("original", "equivalent"),), min_length=1, description="pairs compared"
    )
    title: str = Field("", description="heading of the figure")

    @property
    def known(self) -> Mapping[str, Column[Group]]:
        return COLUMNS

    @model_validator(mode="after")
    def _fits_together(self) -> FigureSpec:
        self.table()
        return self

    def table(self) -> TableSpec:
        """The table that the figure is drawn from."""
        rows = distinct((self.x, *self.panels, *self.lines), "x, panels and lines")
        return TableSpec(rows=rows, columns=self.y, pairs=self.pairs, title=self.title)


def existing(names: tuple[str, ...], known: Mapping[str, Any], what: str) -> tuple[str, ...]:
    """Names of columns, each known and there once."""
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise problem(f"column {name!r} is unknown{hint}: choose from {', '.join(known)}")
    return distinct(names, what)


def distinct(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise problem(f"{what} name {name!r} twice: once is enough")
    return names


def fits_together(spec: Shown) -> None:
    """What holds between the rows and columns of any table."""
    if both := [row for row in spec.rows if row in spec.every]:
        raise problem(f"{both[0]!r} stands in rows and in columns: a parameter of this name can't be a row here")
    if spec.across is not None and spec.across not in spec.rows:
        raise problem(f"across is {spec.across!r}: choose one of the rows, {', '.join(spec.rows)}")


def _check_pairs(pairs: tuple[tuple[str, str], ...], rows: tuple[str, ...], what: str) -> None:
    for first, second in pairs:
        if first == second:
            raise problem(f"the pair {first}/{second} is one presentation twice: compare two, or use 'repeat'")
        if pairs.count((first, second)) > 1:
            raise problem(f"pairs name {first}/{second} twice: once is enough")
    # A parameter that only some pairs depend on tells these from the others: rho is 0 where nothing distracts.
    told = [tuple(bool(set(kinds) & set(pair)) for name, kinds in ONLY_FOR.items() if name in rows) for pair in pairs]
    if "pair" not in rows and len(set(told)) < len(pairs):
        raise problem(f"{len(pairs)} pairs would be pooled: add 'pair' to {what}")


def problem(text: str) -> PydanticCustomError:
    """What is wrong with a specification, in words of our own."""
    # The text stands in a template of its own, in which braces have a meaning.
    return PydanticCustomError("table", "{text}", {"text": text})
