"""Drawings of what goes with a patching study: activations moved between base and adapter, and gradient estimates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.report.drawing import (
    ARM_COLOURS,
    INK,
    SOFT,
    Figure,
    Key,
    arm_looks,
    drawn,
    every,
    layer_axis,
    percent_axis,
)
from experiments.report.intervention_source import WAYS, Interventions, position_name
from experiments.report.source import shown
from experiments.report.text import plural

if TYPE_CHECKING:
    import pandas as pd

INTO = {
    "base→adapter": ("the adapter's run with the base's activation", "--", "white"),
    "adapter→base": ("the base's run with the adapter's activation", "-", ""),
}


def transplants(source: Interventions) -> Iterator[Figure]:
    """For each site the share of the adapter's gain that a layer carries, both ways; a panel an adapter."""
    table = source.tables["transplant"]
    if table.empty:
        return
    wanted = list(table[["site", "position"]].drop_duplicates().itertuples(index=False, name=None))
    for number, (site, position) in enumerate(wanted):
        panels = []
        for place, arm in enumerate(source.arms):
            rows = source.of("transplant", arm, site=site, position=position)
            if rows.empty or rows["share"].isna().all():
                continue
            panels.append(
                drawn(
                    f"transplant-{number}-{place}",
                    partial(_transplant, rows=rows, colour=arm_looks(source.arms)[arm][0], layers=source.layers),
                    title=f"{shown(arm)}: {shown(site)} (n = {int(rows['n'].max())} prompts, "
                    f"{plural(int(rows['n_groups'].max()), 'instance')})",
                    description="Share of the adapter's gain that each layer's activation carries, both ways",
                    height=300,
                )
            )
        if panels:
            yield Figure(
                f"transplant-{number}",
                tuple(panels),
                f"One layer's {shown(site)} of one arm, at {position_name(position)}, is put into the other arm's "
                "run, on identical tokens. Solid: the part of the adapter's gain toward the gold answer that the "
                "adapter's activation brings into the base. Dashed: the part that the base's activation takes out of "
                "the adapter. 100% is all of the gain; bands are 95% bootstrap intervals over instances."
                + (
                    " A residual curve at the answer position reaches 100% at the last layer by construction."
                    if str(site).startswith("resid") and position == "answer"
                    else ""
                ),
                (Key("brought into the base", INK), Key("taken out of the adapter", INK, "dashed")),
            )


def _transplant(axes: Any, rows: pd.DataFrame, colour: str, layers: int) -> None:
    for direction, (_, line, face) in INTO.items():
        one = rows[rows["direction"] == direction].sort_values("layer")
        layer = one["layer"].to_numpy(dtype=float)
        share, low, high = (one[name].to_numpy(dtype=float) for name in ("share", "share_low", "share_high"))
        axes.fill_between(layer, low, high, color=colour, alpha=0.14, linewidth=0)
        axes.plot(layer, share, color=colour, linestyle=line, marker="o", markerfacecolor=face or colour, markersize=4.5,
                  markevery=every(layers))  # fmt: skip
    for value in (0, 1):
        axes.axhline(value, color=SOFT, linewidth=0.9, linestyle="-" if value == 0 else ":", zorder=1)
    percent_axis(axes.yaxis)
    axes.set_ylabel("share of the gain")
    layer_axis(axes, layers)
    if str(rows["site"].iloc[0]) != "resid_post":
        axes.set_xlabel("layer")


def estimates(source: Interventions) -> Figure | None:
    """Estimated against exact effects, a point a cell; a panel an arm and direction."""
    table = source.tables["patch_estimates"]
    if table.empty:
        return None
    panels = []
    colours = _site_colours(table)
    for number, arm in enumerate(source.arms):
        rows = source.of("patch_estimates", arm)
        for place, direction in enumerate(rows["direction"].unique() if len(rows) else ()):
            part = rows[(rows["direction"] == direction) & rows["estimate"].notna() & rows["exact"].notna()]
            if len(part):
                panels.append(
                    drawn(
                        f"estimates-{number}-{place}",
                        partial(_estimates, rows=part, colours=colours),
                        title=f"{shown(arm)}: {shown(direction)}, {WAYS.get(str(direction), '')} ({len(part)} cells)",
                        description="Estimated against exact mean effects in logits, a point a cell",
                        height=360,
                    )
                )
    if not panels:
        return None
    keys = tuple(Key(shown(site), colour, "dot") for site, colour in colours.items()) if len(colours) > 1 else ()
    return Figure(
        "estimates",
        tuple(panels),
        "Mean effect of each cell: estimated from one gradient, and by the exact sweep of the same rows. On the line "
        "both are the same. Whether the estimate is enough is in the table below.",
        keys,
    )


def _site_colours(table: pd.DataFrame) -> dict[str, str]:
    return {
        str(site): ARM_COLOURS[number % len(ARM_COLOURS)] for number, site in enumerate(table["site"].drop_duplicates())
    }


def _estimates(axes: Any, rows: pd.DataFrame, colours: dict[str, str]) -> None:
    for site, part in rows.groupby("site", sort=False):
        axes.plot(part["exact"], part["estimate"], linestyle="none", marker="o", markersize=4.5, alpha=0.75,
                  color=colours[str(site)], markeredgewidth=0)  # fmt: skip
    values = rows[["exact", "estimate"]].to_numpy(dtype=float)
    low, high = float(min(values.min(), 0)), float(max(values.max(), 0))
    margin = 0.06 * max(high - low, 0.1)
    ends = np.array([low - margin, high + margin])
    axes.plot(ends, ends, color=SOFT, linewidth=1, linestyle=":")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("exact effect (logits)")
    axes.set_ylabel("estimate (logits)")
