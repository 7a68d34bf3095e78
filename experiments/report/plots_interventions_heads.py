"""Drawings about heads: grids of layers by heads, and what a model does before and after some are ablated.

A grid has a cell for each head that exists. Layers of hybrid models have fewer heads or none: what does not exist is
hatched, never white, since white means no effect.

Before and after stand as bars with intervals; beside the ablated heads stand as many random heads, a tick for each set. A
change that random heads make as well is the price of cutting anything, so the second drawing shows the change by the top
heads less that by each control, with an interval that is paired by instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.report.drawing import INK, SOFT, Figure, Key, Panel, arm_looks, drawn, percent_axis
from experiments.report.intervention_source import (
    HEADS,
    WAYS,
    Interventions,
    Sweep,
    exceeding,
    in_order,
    position_name,
)
from experiments.report.plots_interventions_maps import HATCH, WRITTEN, shade, ticks
from experiments.report.source import shown
from experiments.report.text import listed, plural, signed

if TYPE_CHECKING:
    import pandas as pd

SHARES = (
    ("accuracy_original", "accuracy,\noriginal"),
    ("accuracy_equivalent", "accuracy,\nequivalent"),
    ("invariance", "ι"),
    ("robust", "R"),
    ("shared_wrong", "D"),
    ("unstable", "U"),
)
LOGITS = (
    ("signal_original", "s,\noriginal"),
    ("signal_equivalent", "s,\nequivalent"),
    ("default_original", "δ,\noriginal"),
    ("default_equivalent", "δ,\nequivalent"),
)
MEASURE_NAMES = {
    "signal_original": "s, original",
    "signal_equivalent": "s, equivalent",
    "signal_mean": "s, mean of both",
    "default_original": "δ, original",
    "default_equivalent": "δ, equivalent",
    "accuracy_original": "accuracy, original",
    "accuracy_equivalent": "accuracy, equivalent",
    "accuracy_mean": "accuracy, mean of both",
    "invariance": "invariance ι",
    "robust": "R, both right",
    "shared_wrong": "D, both wrong",
    "unstable": "U, one right",
    "share_removed_original": "share of s removed, original",
    "share_removed_equivalent": "share of s removed, equivalent",
    "share_removed_mean": "share of s removed, mean",
}
IN_LOGITS = tuple(name for name in MEASURE_NAMES if name.startswith(("signal", "default")))
CONTROL_SETS = ("random", "same layers")
SET_NAMES = {"random": "random heads", "same layers": "random heads of the same layers"}
TINTS = {"random": "#b9c0c8", "same layers": "#dfe3e8"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Values ``[layer, head]``, NaN where there is no head; some in outline, some with a dot."""

    values: np.ndarray
    outlined: frozenset[tuple[int, int]] = frozenset()
    dotted: frozenset[tuple[int, int]] = frozenset()


def grid_of(
    rows: pd.DataFrame, layers: int, value: str, *, outlined: Sequence[bool] = (), dotted: Sequence[bool] = ()
) -> Grid:
    """A grid of table rows with ``layer`` and ``head``."""
    places = [(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)]
    values = np.full((layers, 1 + max((head for _, head in places), default=0)), np.nan)
    for place, one in zip(places, rows[value].to_numpy(dtype=float), strict=True):
        values[place] = one

    def marked(flags: Sequence[bool]) -> frozenset[tuple[int, int]]:
        return frozenset(place for place, flag in zip(places, flags, strict=False) if flag)

    return Grid(values, marked(outlined), marked(dotted))


def grids(name: str, shown_grids: Mapping[str, Grid], *, label: str, caption: str, keys: tuple[Key, ...]) -> Figure:
    """A figure of grids by heading, on one colour scale."""
    known = [np.abs(one.values[np.isfinite(one.values)]) for one in shown_grids.values()]
    bound = float(max((values.max() for values in known if len(values)), default=0.0)) or 1.0
    panels = tuple(
        drawn(
            f"{name}-{number}",
            partial(paint_grid, grid=grid, bound=bound, label=label),
            title=title,
            description=f"Heat map of layers by heads: {label}. Cells that do not exist are hatched",
            height=130 + min(420, 34 * len(grid.values)),
        )
        for number, (title, grid) in enumerate(shown_grids.items())
    )
    hatched = any(not np.isfinite(one.values).all() for one in shown_grids.values())
    return Figure(name, panels, caption, (*keys, *((Key("no such head", HATCH, "hatch"),) if hatched else ())))


def paint_grid(axes: Any, grid: Grid, bound: float, label: str) -> None:
    from matplotlib.patches import Rectangle

    values = grid.values
    layers, count = values.shape
    shade(axes, values, bound, label=label)
    for layer, head in sorted(grid.outlined):
        axes.add_patch(Rectangle((head, layer), 1, 1, fill=False, edgecolor=INK, linewidth=1.8, zorder=3))
    for layer in range(layers):
        for head in range(count):
            if not np.isfinite(values[layer, head]):
                continue
            tint = "white" if abs(values[layer, head]) > 0.6 * bound else INK
            if values.size <= WRITTEN:
                axes.text(head + 0.5, layer + 0.5, signed(float(values[layer, head])), ha="center", va="center",
                          color=tint, fontsize=10)  # fmt: skip
            if (layer, head) in grid.dotted:
                across, up, size = (0.86, 0.82, 3.6) if values.size <= WRITTEN else (0.5, 0.5, 2.4)
                axes.plot([head + across], [layer + up], marker="o", markersize=size, color=tint, markeredgewidth=0)
    ticks(axes.xaxis, count, axes.set_xticks)
    ticks(axes.yaxis, layers, axes.set_yticks)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")


def patched_heads(source: Interventions) -> Iterator[Figure]:
    """A figure for each position at which every head was patched by itself; panels are arms and directions.

    Of several positions, those where no head does more than its controls are left to the table.
    """
    found: dict[str, list[Sweep]] = {}
    for sweep in source.main:
        if sweep.site == HEADS and sweep.measured:
            found.setdefault(sweep.position, []).append(sweep)
    drawn_at = [
        position
        for position in in_order(list(found))
        if position == "answer" or len(found) == 1 or any(exceeding(source, sweep) for sweep in found[position])
    ]
    left = [position_name(position) for position in in_order(list(found)) if position not in drawn_at]
    for number, position in enumerate(drawn_at):
        made = {}
        for sweep in found[position]:
            specific = set(exceeding(source, sweep))
            flags = [place in specific for place in range(len(sweep.matched))]
            title = f"{shown(sweep.arm)}: {sweep.direction}, {WAYS[sweep.direction]} (n = {sweep.n})"
            made[title] = grid_of(sweep.matched, source.layers, "effect", outlined=flags)
        outlined = any(one.outlined for one in made.values())
        caption = (
            f"Mean change of the readout, in logits toward the matched donor's answer, when one head's output at "
            f"{position_name(position)} is replaced by that of the pair's other presentation; pairs of the kind "
            f"“{source.kind}”. All panels share one colour scale."
        )
        if left and number == len(drawn_at) - 1:
            caption += f" Not drawn, since no head was found to do more there than every control: {listed(left)}."
        yield grids(
            f"patched-heads-{number}",
            made,
            label="effect (logits)",
            caption=caption,
            keys=(Key("does more than every control", INK, "outline"),) if outlined else (),
        )


def ranking(source: Interventions) -> Figure | None:
    """Effect of patching each head on the instances that rank them; None where heads were named instead."""
    made = {}
    for arm in source.arms:
        rows = source.of("head_effects", arm, half="ranked")
        if len(rows):
            title = f"{shown(arm)} (n = {int(rows['n'].max())}, {plural(int(rows['n_groups'].max()), 'instance')})"
            made[title] = grid_of(rows, source.layers, "effect", outlined=rows["chosen"].to_list())
    if not made:
        return None
    return grids(
        "ranking",
        made,
        label="effect (logits)",
        caption="Mean change of the readout, in logits toward the donor's readout, when one head's output at the answer "
        "position is replaced by that of the pair's other presentation, on the instances that rank the heads. Those in "
        "outline are ablated, on other instances. All panels share one colour scale.",
        keys=(Key("ablated", INK, "outline"),),
    )


def one_by_one(source: Interventions) -> Figure | None:
    """Change of s with each head ablated by itself; None where that was not asked for."""
    table = source.tables["head_grid"]
    if table.empty:
        return None
    measures = [str(name) for name in table["measure"].unique() if str(name).startswith("signal")]
    measures = ["signal_mean"] if "signal_mean" in measures else measures
    made = {}
    for arm in source.arms:
        for measure in measures:
            rows = source.of("head_grid", arm, measure=measure)
            if len(rows):
                apart = ((rows["low"] > 0) | (rows["high"] < 0)).to_list()
                title = f"{shown(arm)}: {MEASURE_NAMES.get(measure, measure)} (n = {int(rows['n'].max())})"
                made[title] = grid_of(rows, source.layers, "value", dotted=apart)
    if not made:
        return None
    return grids(
        "one-by-one",
        made,
        label="change of s (logits)",
        caption="Change of the signal s, in logits, with each head ablated by itself. A dot marks a head whose 95% "
        "interval leaves out 0, each by itself: of many heads without an effect one in twenty would have one. All "
        "panels share one colour scale.",
        keys=(Key("interval leaves out 0", INK, "dot"),),
    )


def before_after(source: Interventions) -> Figure | None:
    """Shares and logits before and after, the top heads beside the control sets; a panel an arm."""
    panels: list[Panel] = []
    families: dict[str, None] = {}
    for number, arm in enumerate(source.arms):
        rows = source.of("ablation", arm)
        if rows.empty:
            continue
        families |= dict.fromkeys(name for name in CONTROL_SETS if (rows["family"] == name).any())
        top = rows[rows["family"] == "top"]
        panels.append(
            drawn(
                f"before-after-{number}",
                partial(_before_after, rows=rows, colour=arm_looks(source.arms)[arm][0]),
                title=f"{shown(arm)} (n = {int(top['n'].max())} pairs, {plural(int(top['n_groups'].max()), 'instance')})",
                description="Bars before and after ablation: shares of answers above, signal and default in logits below",
                height=470,
                heights=(1, 1),
            )
        )
    if not panels:
        return None
    looks = arm_looks(source.arms)
    keys = [Key("nothing ablated", INK, "frame")]
    keys += [Key(f"{shown(arm)}: top heads ablated", looks[arm][0], "box") for arm in source.arms]
    keys += [Key(f"{SET_NAMES[name]}, mean; a tick for each set", TINTS[name], "box") for name in families]
    return Figure(
        "before-after",
        tuple(panels),
        "Pairs that take no part in the ranking. Answers are signs of the readout. Whiskers are 95% intervals by "
        "instance; control bars are means over the sets. What the top heads do counts only as far as the control sets "
        "do not do it too.",
        tuple(keys),
    )


def _before_after(axes: Any, rows: pd.DataFrame, colour: str) -> None:
    families = [name for name in CONTROL_SETS if (rows["family"] == name).any()]
    bars = 2 + len(families)
    width = 0.82 / bars
    for one, measures, unit in ((axes[0], SHARES, "share"), (axes[1], LOGITS, "logits")):
        there = [(name, label) for name, label in measures if (rows["measure"] == name).any()]
        for place, (name, _) in enumerate(there):
            at = rows[rows["measure"] == name]
            top = at[at["family"] == "top"].iloc[0]
            left = place - 0.41 + width / 2
            looks: list[tuple[str, dict[str, Any]]] = [
                ("before", {"color": "white", "edgecolor": INK, "linewidth": 1.2}),
                ("after", {"color": colour}),
            ]
            for step, (end, look) in enumerate(looks):
                _bar(one, left + step * width, width, *(float(top[f"{end}{side}"]) for side in ("", "_low", "_high")),
                     look=look)  # fmt: skip
            for step, family in enumerate(families, start=2):
                values = at.loc[at["family"] == family, "after"].dropna().to_numpy(dtype=float)
                if len(values):
                    x = left + step * width
                    one.bar(x, values.mean(), width * 0.9, color=TINTS[family])
                    one.plot(np.full(len(values), x), values, linestyle="none", marker="_", markersize=width * 60,
                             color=SOFT, markeredgewidth=1.1)  # fmt: skip
        one.set_xticks(range(len(there)), [label for _, label in there])
        one.tick_params(axis="x", length=0)
        one.grid(axis="x", visible=False)
        one.set_ylabel(unit)
    percent_axis(axes[0].yaxis)
    axes[0].set_ylim(0, 1.04)
    axes[1].axhline(0, color=SOFT, linewidth=1)
    if not axes[1].get_xticks().size:
        axes[1].set_visible(False)


def _bar(axes: Any, x: float, width: float, value: float, low: float, high: float, *, look: dict[str, Any]) -> None:
    if not np.isfinite(value):
        axes.text(x, 0, "–", ha="center", va="bottom", color=SOFT)
        return
    axes.bar(x, value, width * 0.9, **look)
    if np.isfinite(low) and np.isfinite(high):
        axes.errorbar(
            x, value, yerr=[[max(value - low, 0)], [max(high - value, 0)]], color=INK, linewidth=1.1, capsize=2.5
        )


def beyond_controls(source: Interventions) -> Figure | None:
    """The change by the top heads less that by each control; a panel an arm. None where there was no control."""
    panels = []
    known: set[str] = set()
    keys = {"random": Key("less random heads", INK, marker="o"),
            "same layers": Key("less random heads of the same layers", INK, "open")}  # fmt: skip
    for number, arm in enumerate(source.arms):
        rows = source.of("ablation_above", arm)
        rows = rows[rows["control"].isin(CONTROL_SETS)] if len(rows) else rows
        if rows.empty or rows["value"].isna().all():
            continue
        known |= set(rows.loc[rows["value"].notna(), "control"])
        panels.append(
            drawn(
                f"beyond-{number}",
                partial(_beyond, rows=rows, colour=arm_looks(source.arms)[arm][0]),
                title=shown(arm),
                description="Change by the top heads less the mean change by the control sets, with 95% intervals",
                height=390,
                heights=(6, 4),
            )
        )
    if not panels:
        return None
    return Figure(
        "beyond-controls",
        tuple(panels),
        "The change by the top heads less the mean change by the control sets, with 95% intervals paired by instance. "
        "Where the interval holds 0, the top heads were not shown to do more than random ones.",
        tuple(key for control, key in keys.items() if control in known),
    )


def _beyond(axes: Any, rows: pd.DataFrame, colour: str) -> None:
    for one, measures, scale in ((axes[0], SHARES, 100.0), (axes[1], LOGITS, 1.0)):
        there = [name for name, _ in measures if (rows["measure"] == name).any()]
        for place, name in enumerate(there):
            for control, face, shift in (("random", colour, -0.14), ("same layers", "white", 0.14)):
                at = rows[(rows["measure"] == name) & (rows["control"] == control)]
                if at.empty or not np.isfinite(float(at["value"].iloc[0])):
                    continue
                value, low, high = (scale * float(at[end].iloc[0]) for end in ("value", "low", "high"))
                reach = [[max(value - low, 0)], [max(high - value, 0)]] if np.isfinite(low) else None
                one.errorbar([value], [place + shift], xerr=reach, marker="o", markersize=6, color=colour,
                             markerfacecolor=face, capsize=2.5, linewidth=1.4)  # fmt: skip
        one.axvline(0, color=SOFT, linewidth=1)
        one.set_yticks(range(len(there)), [MEASURE_NAMES[name] for name in there])
        one.set_ylim(len(there) - 0.5, -0.5)
        one.tick_params(axis="y", length=0)
        one.grid(axis="y", visible=False)
        one.margins(x=0.06)
    axes[0].set_xlabel("points")
    axes[1].set_xlabel("logits")
