"""The table of a study: answers, default and signal, and where the answer is readable, side by side (paper 000, table 11).

A row is an arm and a group of settings, a column has a number for each presentation of the pair. What is about answers
comes from the behaviour table, as ``probe eval`` makes it; δ and s from the decomposition of the same group; the first
layer from probes that were trained on this group's rows; AUROC from the probes of all rows, read in this group at the one
layer that is best for the base model over all rows, so that groups and arms are compared at one place.

Like every table it carries ``_low``, ``_high``, ``_n``, ``_method`` and ``_reason`` beside each number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.config import RunTable
from experiments.groups import ALL, Group, grouped
from experiments.items import PAIR

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from experiments.config import Config

HEADS = {"accuracy": "accuracy", "yes_rate": "yes-rate", "delta": "δ", "signal": "s", "auroc": "AUROC",
         "first_layer": "first layer"}  # fmt: skip
ANSWERS = ("accuracy", "yes_rate")
UNLIMITED = 100_000  # characters; no table is as wide
Fields = dict[str, Any]


def make(tables: Mapping[str, pd.DataFrame], params: Mapping[str, Mapping[str, Any]], config: Config) -> pd.DataFrame:
    """One row an arm and group.

    Args:
        tables: behaviour, decomposition, probes and probe_curves of a run, with their column ``arm``.
        params: family parameters by setting.

    Raises:
        UsageError: the table's rows name a parameter that the run does not sweep.
    """
    import pandas as pd

    chosen = grouped(params, config.table.rows)
    answers = _answers(tables["behaviour"], params, chosen, config)
    records = []
    for arm in tables["behaviour"]["arm"].drop_duplicates():
        for group in chosen:
            named = group.axis if config.table.rows is None else config.table.rows
            fixed = {name: params[group.settings[0]][name] for name in named}
            record: Fields = {**fixed, "arm": arm, "pairs": answers[arm, group.label]["pairs"]}
            for column in config.table.columns:
                for kind in PAIR:
                    name = f"{column}_{kind}"
                    if column in ANSWERS:
                        found = {
                            f"{name}{end}": answers[arm, group.label][f"{name}{end}"]
                            for end in ("", "_low", "_high", "_n", "_method", "_reason")
                        }
                    else:
                        found = _MAKERS[column](tables, arm, group, kind, name, config)
                    record |= found
            records.append(record)
    return pd.DataFrame(records)


def show(made: pd.DataFrame, spec: RunTable, arms: int) -> Table:
    """As rich prints it: a line for each presentation, intervals beside the numbers.

    On a narrower terminal intervals stand below their numbers, and if that is not enough the columns are cut into several
    tables, one below the other. A file has no width.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console()
    drawn = _drawn(made, spec, arms, spec.columns, below=False)
    if not (console.is_terminal or "COLUMNS" in os.environ):
        return drawn

    def fits(table: Table) -> bool:
        unlimited = console.options.update(width=UNLIMITED)
        return Measurement.get(console, unlimited, table).maximum <= console.width

    for below in (False, True):
        drawn = _drawn(made, spec, arms, spec.columns, below=below)
        if fits(drawn):
            return drawn
    parts: list[tuple[str, ...]] = [()]
    for name in spec.columns:
        if parts[-1] and not fits(_drawn(made, spec, arms, (*parts[-1], name), below=True)):
            parts.append(())
        parts[-1] = (*parts[-1], name)
    whole = Table.grid()
    for part in parts:
        whole.add_row(_drawn(made, spec, arms, part, below=True, first=part is parts[0], last=part is parts[-1]))
    return whole


def _drawn(
    made: pd.DataFrame,
    spec: RunTable,
    arms: int,
    columns: Sequence[str],
    *,
    below: bool,
    first: bool = True,
    last: bool = True,
) -> Table:
    """Some columns; ``below`` puts each interval under its number, ``first`` and ``last`` part have title and caption."""
    from rich.markup import escape
    from rich.table import Table

    fixed = list(made.columns[: list(made.columns).index("arm")])
    drawn = Table(title=escape(spec.title) if first else None, title_justify="left", caption_justify="left",
                  caption=escape(_caption(spec)) if last else None)  # fmt: skip
    for name in (*fixed, "arm", "", "pairs"):
        drawn.add_column(escape(name), no_wrap=True, justify="right" if name == "pairs" else "left")
    for column in columns:
        drawn.add_column(HEADS[column], justify="right", no_wrap=True)
    for place, row in enumerate(made.to_dict("records")):
        for number, kind in enumerate(PAIR):
            said = [*(str(row[name]) for name in fixed), row["arm"]] if number == 0 else [""] * (len(fixed) + 1)
            pairs = f"{row['pairs']}" if number == 0 else ""
            cells = [_cell(row, one, kind) for one in columns]
            if below:
                cells = [cell.replace(" [", "\n[").replace("; ", "\n") for cell in cells]
            drawn.add_row(*map(escape, said), kind, pairs, *map(escape, cells),
                          end_section=number == 1 and (place + 1) % (len(made) // arms) == 0)  # fmt: skip
    return drawn


def _answers(
    behaviour: pd.DataFrame, params: Mapping[str, Mapping[str, Any]], chosen: list[Group], config: Config
) -> dict[tuple[str, str], Fields]:
    """The columns about answers, by arm and group."""
    from experiments.tables import TableSpec, make_table

    columns = ("pairs", *(f"{name}_{kind}" for name in ANSWERS for kind in PAIR))
    axis = chosen[0].axis or ("all",)
    spec = TableSpec(rows=("arm", *axis), columns=columns)
    made = make_table(behaviour, params, spec, seed=config.seed, resamples=config.resamples)
    # By value: the two tables need not have their rows in one order.
    labels = {tuple(str(params[group.settings[0]][name]) for name in group.axis): group.label for group in chosen}
    return {
        (row["arm"], labels[tuple(str(row[name]) for name in chosen[0].axis)]): row for row in made.to_dict("records")
    }


def _split(tables: Mapping[str, pd.DataFrame], arm: str, group: Group, kind: str, name: str, config: Config) -> Fields:
    column = name.removesuffix(f"_{kind}")
    one = _only(tables["decomposition"], arm=arm, presentation=kind, setting=group.label)
    return {name: one[column], f"{name}_low": one[f"{column}_low"], f"{name}_high": one[f"{column}_high"],
            f"{name}_n": one["n"], f"{name}_method": one["method"], f"{name}_reason": one["reason"]}  # fmt: skip


def _auroc(tables: Mapping[str, pd.DataFrame], arm: str, group: Group, kind: str, name: str, config: Config) -> Fields:
    curves = tables["probe_curves"]
    where = {"target": "gold", "features": "resid_post", "presentation": kind, "trained": ALL}
    layer = int(_only(curves, arm=curves["arm"].iloc[0], setting=ALL, **where)["layer"])
    one = _only(tables["probes"], arm=arm, setting=group.label, layer=layer, **where)
    return {name: one["auroc"], f"{name}_low": one["auroc_low"], f"{name}_high": one["auroc_high"],
            f"{name}_n": one["n"], f"{name}_layer": layer, f"{name}_p": one["p"],
            f"{name}_method": one["method"], f"{name}_reason": one["reason"]}  # fmt: skip


def _first(tables: Mapping[str, pd.DataFrame], arm: str, group: Group, kind: str, name: str, config: Config) -> Fields:
    trained = ALL if group.label == ALL else "setting"
    one = _only(tables["probe_curves"], arm=arm, target="gold", features="resid_post", presentation=kind,
                setting=group.label, trained=trained)  # fmt: skip
    found: Fields = {f"{name}{end}": one[f"first_layer{end}"] for end in ("", "_low", "_high", "_never", "_method")}
    return {**found, f"{name}_n": one["n"], f"{name}_reason": one["first_layer_reason"]}


_MAKERS = {"delta": _split, "signal": _split, "auroc": _auroc, "first_layer": _first}


def _only(table: pd.DataFrame, **where: Any) -> Fields:
    """The one row with these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    (found,) = table.to_dict("records")
    return found


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _cell(row: Mapping[str, Any], column: str, kind: str) -> str:
    name = f"{column}_{kind}"
    if column == "first_layer":
        return first_layer_text(row[name], row[f"{name}_low"], row[f"{name}_high"], row[f"{name}_never"])
    forms = {"accuracy": "{:.0%}", "yes_rate": "{:.0%}", "auroc": "{:.2f}"}
    value, low, high = (
        "–" if _missing(one) else forms.get(column, "{:+.2f}").format(one)
        for one in (row[name], row[f"{name}_low"], row[f"{name}_high"])
    )
    return value if value == "–" or low == "–" else f"{value} [{low.rstrip('%')}, {high.rstrip('%')}]"


def first_layer_text(layer: Any, low: Any, high: Any, never: Any) -> str:
    """``3 [2, 4]``, and in how many resamples no layer reaches the threshold; a dash stands for no such layer."""
    value, *ends = ("–" if _missing(one) else str(int(one)) for one in (layer, low, high))
    if _missing(never):
        return value
    often = f"; never in {never:.0%}" if never >= 0.005 else ""
    return f"{value} [{ends[0]}, {ends[1]}]{often}"


def _caption(spec: RunTable) -> str:
    lines = ["In brackets: 95% intervals; n, methods and reasons stand in table.csv."]
    if "auroc" in spec.columns:
        lines.append("AUROC: probes of all rows, read in these, at the layer that is best for the base over all rows.")
    if "first_layer" in spec.columns:
        lines.append("First layer: of probes trained on these rows; – where none reaches the threshold.")
    return "\n".join(lines)
