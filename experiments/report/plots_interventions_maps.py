"""Drawings of a patching study at several positions: maps of layers by positions, and how any map is shaded.

A map has a cell for each layer and position that was measured. What was not, or does not exist, is hatched on grey and
never white, since white means no effect. Beside the effect stands the effect less that of the control that comes nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.report.drawing import INK, Figure, Key, Panel, drawn
from experiments.report.intervention_source import (
    DECIDING,
    HEADS,
    RESIDUAL,
    Interventions,
    Sweep,
    exceeding,
    in_order,
    position_name,
)
from experiments.report.source import shown
from experiments.report.text import signed

WRITTEN = 80  # cells of a map up to this number have their effect written into them
WRITTEN_ACROSS = 8  # where so many fit side by side
DRAWN = 3000  # cells up to this number are drawn as shapes, more as one image
BLANK, HATCH = "#dfe2e6", "#b3bac2"  # what does not exist or was not measured
LABEL = 26  # characters of a position's name


def span_maps(source: Interventions) -> Iterator[Figure]:
    """For each site with several positions: layer by position, the effect and what it is beyond its nearest control."""
    found: dict[str, dict[tuple[str, str], list[Sweep]]] = {}
    for sweep in source.main:
        if sweep.site != HEADS:
            found.setdefault(sweep.site, {}).setdefault((sweep.arm, sweep.direction), []).append(sweep)
    for number, (site, by_panel) in enumerate(found.items()):
        positions = in_order([sweep.position for group in by_panel.values() for sweep in group])
        if len(positions) < 2:
            continue
        shades = [
            (value, title, {key: _grid(group, positions, source.layers, value) for key, group in by_panel.items()})
            for value, title in (("effect", "effect"), ("above", "less the nearest control"))
        ]
        bound = max((_largest(grid) for _, _, grids in shades for grid in grids.values()), default=0.0) or 1.0
        panels = [
            _map_panel(source, f"spans-{number}-{place}-{value}", grids[key], (key, title), positions, bound, group)
            for place, (key, group) in enumerate(by_panel.items())
            for value, title, grids in shades
            if np.isfinite(grids[key]).any()
        ]
        if panels:
            yield Figure(
                f"spans-{number}",
                tuple(panels),
                _map_caption(source, site),
                _map_keys([grid for _, _, grids in shades for grid in grids.values()]),
            )


def _map_panel(
    source: Interventions,
    name: str,
    grid: np.ndarray,
    about: tuple[tuple[str, str], str],
    positions: Sequence[str],
    bound: float,
    group: Sequence[Sweep],
) -> Panel:
    (arm, direction), title = about
    counts = {sweep.position: sweep.n for sweep in group}
    names = [f"{shortened_name(position)} ({counts.get(position, 0)})" for position in positions]
    dots = {
        (positions.index(sweep.position), int(layer))
        for sweep in group
        for layer in sweep.matched["layer"].iloc[exceeding(source, sweep)]
    }
    return drawn(
        name,
        partial(_map, grid=grid, names=names, bound=bound, dots=dots),
        title=f"{shown(arm)}: {direction}, {title}",
        description=f"Heat map of layers by positions, {title}, in logits",
        height=105 + 26 * max(len(positions), 4),
    )


def _map_caption(source: Interventions, site: str) -> str:
    last = " At the answer position the last layer restores by construction." if site in RESIDUAL else ""
    return (
        f"{shown(site)}, one layer and one position at a time, in pairs of the kind “{source.kind}”. First the mean "
        "change of the readout toward the matched donor's answer, then the same less that of the control that comes "
        "nearest to it (paired by recipient; donors of the same cell are left out). In parentheses stands n. Rows "
        "whose donor and recipient have unequal numbers of tokens at a position are left out of it. All panels share "
        f"one colour scale.{last}"
    )


def _map_keys(grids: Sequence[np.ndarray]) -> tuple[Key, ...]:
    blank = any(not np.isfinite(grid).all() for grid in grids)
    return (Key("does more than every control", INK, "dot"), *((Key("not measured", HATCH, "hatch"),) if blank else ()))


def _grid(group: Sequence[Sweep], positions: Sequence[str], layers: int, value: str) -> np.ndarray:
    grid = np.full((len(positions), layers), np.nan)
    for sweep in group:
        place = positions.index(sweep.position)
        if value == "effect":
            grid[place, sweep.matched["layer"].to_numpy(dtype=int)] = sweep.matched["effect"].to_numpy(dtype=float)
            continue
        for name, rows in sweep.controls.items():
            if name in DECIDING:
                at = rows["layer"].to_numpy(dtype=int)
                grid[place, at] = np.fmin(grid[place, at], rows["above"].to_numpy(dtype=float))
    return grid


def _largest(grid: np.ndarray) -> float:
    known = np.abs(grid[np.isfinite(grid)])
    return float(known.max()) if len(known) else 0.0


def _map(axes: Any, grid: np.ndarray, names: Sequence[str], bound: float, dots: set[tuple[int, int]]) -> None:
    shade(axes, grid, bound, label="logits")
    axes.invert_yaxis()
    written = grid.size <= WRITTEN and grid.shape[1] <= WRITTEN_ACROSS
    across, down = (0.9, 0.2) if written else (0.5, 0.5)
    for place, layer in zip(*np.nonzero(np.isfinite(grid)), strict=True):
        tint = "white" if abs(grid[place, layer]) > 0.6 * bound else INK
        if written:
            axes.text(layer + 0.5, place + 0.5, signed(float(grid[place, layer])), ha="center", va="center", color=tint,
                      fontsize=10)  # fmt: skip
        if (place, layer) in dots:
            axes.plot([layer + across], [place + down], marker="o", markersize=4 if grid.shape[1] <= 16 else 2.6,
                      color=tint, markeredgewidth=0)  # fmt: skip
    axes.set_yticks(np.arange(len(names)) + 0.5, names)
    ticks(axes.xaxis, grid.shape[1], axes.set_xticks)
    axes.tick_params(length=0)
    axes.set_xlabel("layer")


def shortened_name(position: str) -> str:
    name = {"answer": "answer", "all": "all"}.get(position, position_name(position))
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def shade(axes: Any, grid: np.ndarray, bound: float, *, label: str) -> None:
    """The cells in colour, what does not exist or was not measured hatched, and the colour bar."""
    axes.grid(visible=False)
    axes.set_facecolor(BLANK)  # darker than the colour of no effect, also where cells are too small for the hatching
    axes.patch.set(hatch="////", edgecolor=HATCH)
    mesh = axes.pcolormesh(
        np.ma.masked_invalid(grid), cmap="RdBu_r", vmin=-bound, vmax=bound, edgecolors="white",
        linewidth=0.8 if grid.size <= DRAWN else 0, rasterized=grid.size > DRAWN,
    )  # fmt: skip
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(label)


def ticks(axis: Any, size: int, place: Any) -> None:
    """Whole numbers in the middle of the cells, no more than fit."""
    step = next(step for step in (1, 2, 4, 8, 10, 20, 50, 1000) if size / step <= 16)
    place(np.arange(0, size, step) + 0.5, [str(one) for one in range(0, size, step)])
    axis.set_tick_params(length=0)
