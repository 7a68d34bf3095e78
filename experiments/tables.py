"""Tables of pairs, made from a behaviour table alone.

Problem. A study has arms, settings and presentations; a table shows a few of these as rows and pools the rest. Which
pairs are pooled, what a pair is, and which rows are one family of tests has to be said once, in the configuration, and
hold for every number of the table. Mechanism: a `TableSpec` names rows, columns and pairs; `make_table` joins the two
answers of each pair, groups the pairs by the row keys and computes each column of `COLUMNS` in each group. A damaged
behaviour table is refused with the row that is wrong, since every number downstream would be wrong without a sign.

Constraints. Order of rows is order of first appearance, in the settings and arms as they were asked. Fractions stay
fractions in the data frame; `show_table` prints percent. A number that is undefined is NaN with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError
from experiments.pairing import TURNED
from experiments.statistics import holm
from experiments.table_columns import COLUMNS, Column, counted
from experiments.table_pairs import CONTROL, ONLY_FOR, Estimate, Group, Params, joined, refuse_damaged
from experiments.table_specs import FigureSpec, Shown, TableSpec

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

__all__ = ["COLUMNS", "FigureSpec", "TableSpec", "check", "make_table", "printed", "show_table", "show_within"]

# Row keys that are no family parameters.
OTHER_ROWS = ("arm", "pair", "cell", "all")
UNKNOWN = "–"


def check(spec: TableSpec, params: Params) -> None:
    """Refuse a table that these settings can't give; worth asking before a model is.

    Raises:
        UsageError: a row key that a setting lacks, a presentation that isn't rendered.
    """
    for row in spec.rows:
        if row not in OTHER_ROWS:
            for label, values in params.items():
                if row not in values:
                    raise UsageError(
                        f"table row {row!r} is no parameter of setting {label!r}: choose from "
                        f"{', '.join([*OTHER_ROWS, *values])}"
                    )
    wanted = [kind for pair in spec.pairs for kind in pair]
    controls = [name for name in spec.columns if COLUMNS[name].needs]
    for first, second in spec.pairs if controls else ():
        if first != "original":
            raise UsageError(
                f"column {controls[0]!r} repeats the original, but the pair {first}/{second} starts with {first!r}: "
                "leave the column out, or compare with original"
            )
    wanted += [COLUMNS[name].needs for name in controls]
    for label, values in params.items():
        rendered = values.get("presentations", wanted)
        missing = [kind for kind in wanted if kind not in rendered]
        if missing:
            raise UsageError(
                f"the table needs presentation {missing[0]!r} and setting {label!r} renders {', '.join(rendered)}: "
                "add it to params.presentations"
            )


def make_table(
    behaviour: pd.DataFrame, params: Params, spec: TableSpec, *, seed: int, resamples: int, level: float = 0.95
) -> pd.DataFrame:
    """One row a combination of row keys: the keys, then each column.

    A column that has an interval comes with `_low` and `_high`, each but a count with `_n`, `_method` and `_reason`.

    Args:
        behaviour: one row an arm and presentation, as a run's behaviour table.
        params: parameters by setting label.

    Raises:
        UsageError: the table doesn't fit the settings.
        RunError: a row of the behaviour table is wrong.
    """
    import pandas as pd

    check(spec, params)
    refuse_damaged(behaviour, params)
    repeat = any(COLUMNS[name].needs == CONTROL for name in spec.columns)
    pairs = pd.concat([joined(behaviour, params, pair, repeat=repeat) for pair in spec.pairs], ignore_index=True)
    keys = [f"row {row}" for row in spec.rows]
    for row, key in zip(spec.rows, keys, strict=True):
        pairs[key] = _row_values(row, pairs, behaviour, params, spec)
    records: list[dict[str, Any]] = []
    for values, part in pairs.groupby(keys, sort=True, observed=True):
        group = Group(part.reset_index(drop=True), seed, resamples, level)
        found = {name: COLUMNS[name].compute(group) for name in spec.columns}
        records.append({**dict(zip(spec.rows, values, strict=True)), **found})
    return in_columns(records, spec)


def show_table(frame: pd.DataFrame, spec: Shown, *, intervals: bool | None = None) -> Table:
    """The table as rich prints it: percent with one decimal, κ with two.

    Args:
        intervals: below the numbers; by default where nothing is printed side by side.
    """
    from rich.markup import escape
    from rich.table import Table

    intervals = spec.across is None if intervals is None else intervals
    fixed = [row for row in spec.rows if row != spec.across]
    sides = list(frame[spec.across].drop_duplicates()) if spec.across else [None]
    drawn = Table(title=escape(spec.title) or None, title_justify="left",
                  caption=escape(_caption(frame, spec, intervals)), caption_justify="left")  # fmt: skip
    for row in fixed:
        drawn.add_column("" if row == "all" else escape(row), no_wrap=True)
    for side in sides:
        # A pair's name is long: let it break where it is joined.
        above = [] if side is None else str(side).split("/") if spec.across == "pair" else [str(spec.across), str(side)]
        for name in spec.columns:
            label = [spec.known[name].label] if side is None or len(spec.columns) > 1 else []
            # A digit that is folded or cut off is another number.
            drawn.add_column(escape("\n".join([*above, *label])), justify="right", no_wrap=True)
    for name in spec.below:
        drawn.add_column(escape(spec.known[name].label), justify="right", no_wrap=True)
    grouped = frame.groupby(fixed, sort=False, dropna=False) if fixed else [((), frame)]
    for values, part in grouped:
        cells = [escape(counted(value) if isinstance(value, (int, float)) else str(value)) for value in values]
        for side in sides:
            rows = part if side is None else part[part[spec.across] == side]
            cells += [_cell(rows.iloc[0], spec, name, intervals) if len(rows) else "" for name in spec.columns]
        cells += [_cell(part.iloc[0], spec, name, intervals) for name in spec.below]
        drawn.add_row(*cells)
    return drawn


def show_within(frame: pd.DataFrame, spec: Shown, console: Console) -> list[Table]:
    """The table so that it fits the console: without intervals where they don't, then cut into several tables.

    Numbers are never folded. What fits in no way (one column beside long row keys) is wider than the console.
    """
    from rich.measure import Measurement

    def fits(drawn: Table) -> bool:
        unlimited = console.options.update(width=100_000)
        return Measurement.get(console, unlimited, drawn).maximum <= console.width

    narrow = spec.narrow()
    for one, intervals in ((spec, None), (spec, False), (narrow, False)):
        drawn = show_table(frame, one, intervals=intervals)
        if fits(drawn):
            return [drawn]
    parts: list[list[str]] = [[]]
    for name in narrow.columns:
        if parts[-1] and not fits(show_table(frame, narrow.parts((*parts[-1], name), spec.title), intervals=False)):
            parts.append([])
        parts[-1].append(name)
    titles = (spec.title, *[""] * (len(parts) - 1))
    return [
        show_table(frame, narrow.parts(tuple(part), title), intervals=False)
        for part, title in zip(parts, titles, strict=True)
    ]


def printed(value: float | None, column: Column[Any]) -> str:
    """A number in its column's unit; a dash where it is undefined (JSON has null for it)."""
    if value is None or not np.isfinite(value):
        return UNKNOWN
    match column.unit:
        case "percent" | "range":
            return f"{100 * value:.1f}"
        case "points":
            return f"{round(100 * value, 1) + 0.0:+.1f}"  # no minus before a zero
        case "kappa":
            return f"{value:.2f}"
        case "p":
            return "<0.001" if value < 0.001 else f"{value:.3f}"
        case "count":
            return f"{value:.0f}"
        case _:
            return f"{value:.1f}"


def _cell(row: pd.Series, spec: Shown, name: str, intervals: bool) -> str:
    column = spec.known[name]
    if column.unit == "range":
        return f"{printed(row[f'{name}_low'], column)} – {printed(row[f'{name}_high'], column)}"
    text = printed(row[name], column)
    if intervals and column.interval and text != UNKNOWN:
        ends = [printed(row[f"{name}_{end}"], column) for end in ("low", "high")]
        return text if UNKNOWN in ends else f"{text}\n[dim]{' – '.join(ends)}[/dim]"
    return text


def _caption(frame: pd.DataFrame, spec: Shown, intervals: bool) -> str:
    """What the small numbers are, and why some are missing."""
    lines = []
    if {spec.known[name].unit for name in spec.every} & {"percent", "points", "range"}:
        lines.append("Shares in percent, differences in percentage points.")
    counts = frame[[f"{name}_n" for name in spec.every if f"{name}_n" in frame]].to_numpy(dtype=int)
    if counts.size:
        least, most = counts.min(), counts.max()
        lines.append(f"n = {least:,}." if least == most else f"n from {least:,} to {most:,}; each stands in table.csv.")
    if any(spec.known[name].interval for name in spec.every):
        lines.append("Below a number: its 95% interval." if intervals else "95% intervals stand in table.csv.")
    if any(frame[f"{name}_method"].str.contains(TURNED).any() for name in spec.every if f"{name}_method" in frame):
        lines.append("Where the second presentation flips the gold answer, its answers count turned, yes for no.")
    for name in spec.every:
        if f"{name}_reason" in frame:
            reasons = frame.loc[frame[f"{name}_reason"] != "", f"{name}_reason"]
            for reason, count in reasons.value_counts(sort=False).items():
                rows = "" if count == len(frame) else f" ({count} of {len(frame)} rows)"
                lines.append(f"{spec.known[name].label}: {reason}{rows}.")
    return "\n".join(lines)


def _row_values(
    row: str, pairs: pd.DataFrame, behaviour: pd.DataFrame, params: Params, spec: TableSpec
) -> pd.Categorical:
    """Values of a row key, in the order in which they were asked for."""
    import pandas as pd

    if row == "all":
        return pd.Categorical(["all"] * len(pairs))
    if row == "pair":
        return pd.Categorical(pairs[row], ["/".join(pair) for pair in spec.pairs])
    if row in OTHER_ROWS:
        return pd.Categorical(pairs[row], list(behaviour[row].drop_duplicates()))
    of_setting = {label: plain_value(values[row]) for label, values in params.items()}
    order = list(dict.fromkeys(of_setting.values()))
    column = pairs["setting"].map(of_setting).astype(object)
    if row in ONLY_FOR:
        # These pairs hold none of what the parameter counts.
        without = ["/".join(pair) for pair in spec.pairs if not set(ONLY_FOR[row]) & set(pair)]
        column = column.mask(pairs["pair"].isin(without), 0.0)
        order = list(dict.fromkeys([*([0.0] if without else []), *order]))
    return pd.Categorical(column, order)


def plain_value(value: Any) -> Any:
    """A value that can stand in a table: lists are joined, None is a word."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "none" if value is None else value


def in_columns(records: Sequence[Mapping[str, Any]], spec: Shown) -> pd.DataFrame:
    """The table from records that hold the row keys and an `Estimate` a column."""
    import pandas as pd

    columns: dict[str, Any] = {row: [record[row] for record in records] for row in spec.rows}
    for name in spec.every:
        column = spec.known[name]
        found: list[Estimate] = [record[name] for record in records]
        values = [one.value for one in found]
        if column.holm:
            values = list(holm({str(number): value for number, value in enumerate(values)}).values())
        columns[name] = pd.array(values, dtype="Int64") if column.unit == "count" else np.array(values, dtype=float)
        if column.interval:
            columns[f"{name}_low"] = [one.low for one in found]
            columns[f"{name}_high"] = [one.high for one in found]
        if column.unit != "count":
            columns[f"{name}_n"] = [one.n for one in found]
            tested = sum(np.isfinite(one.value) for one in found)
            columns[f"{name}_method"] = [
                f"{one.method}; Holm over {tested} rows" if column.holm and one.method else one.method for one in found
            ]
            columns[f"{name}_reason"] = [one.reason for one in found]
    return pd.DataFrame(columns)
