"""What ``probe compare`` prints of many models: their table, and the trends of its columns with their size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from experiments.summary import print_whole, terminal

if TYPE_CHECKING:
    from experiments.comparing_models import ModelTable


def show_models(found: ModelTable) -> None:
    """Print the table over models, and Spearman's ρ of every column."""
    from rich.markup import escape
    from rich.table import Table

    from experiments.tables import show_within

    screen = terminal()
    for note in found.notes:
        screen.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    for part in show_within(found.table, found.spec, screen):
        print_whole(screen, part)
    trends = found.trends
    if trends.empty:
        return
    reasons = trends["reason"].unique()
    if trends["rho"].isna().all() and len(reasons) == 1:
        screen.print(f"over model size: {reasons[0]}", highlight=False, soft_wrap=True, markup=False)
        return
    keys = list(trends.columns[: trends.columns.get_loc("column")])
    table = Table(title="Over model size: Spearman's ρ", title_justify="left", caption_justify="left",
                  caption=escape("\n".join(sorted({*trends["method"], *(one for one in reasons if one)}))))  # fmt: skip
    for name in (*keys, "column"):
        table.add_column(escape(name), no_wrap=True)
    for name in ("ρ", "95%", "p", "p Holm", "models"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in trends.to_dict("records"):
        label = found.spec.known[one["column"]].label
        ends = "–" if math.isnan(one["low"]) else f"{one['low']:+.2f} – {one['high']:+.2f}"
        table.add_row(*(escape(str(one[key])) for key in keys), escape(label), _number(one["rho"], "+.2f"), ends,
                      _number(one["p"], ".3f"), _number(one["p_holm"], ".3f"), str(one["models"]))  # fmt: skip
    print_whole(screen, table)


def _number(value: Any, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
