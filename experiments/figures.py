"""Figures of a table: columns over a parameter, one line for each combination of row keys, with interval bands.

Problem. A profile over sizes is read from its shape, and a shape without intervals invites reading noise. Mechanism: the
figure is drawn from the table that `FigureSpec.table` describes, so that each point is a number of that table with its
own interval and reason. One panel for each column and each value of the panel keys; the first line key sets the colour,
the others the style of the line.

Constraint. An undefined point (κ of a constant output) is no 0 and no gap to be overlooked: the line breaks and a cross
stands at the foot of the panel. The file is the same to the byte for the same table, so that figures can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from experiments.errors import RunError
from experiments.table_columns import counted

if TYPE_CHECKING:
    import pandas as pd

    from experiments.table_columns import Column
    from experiments.table_specs import Shown

STYLES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 2, 1, 2)))
PANEL_WIDTH, PANEL_HEIGHT, TITLE_HEIGHT, LEGEND_HEIGHT = 350, 285, 34, 22
IN_A_ROW = 3
LABELS_AT_MOST = 9
NAMED = {"n": "n (problem size)", "n_parameters": "number of parameters"}


class Curves(Protocol):
    """What curves are drawn from, whatever their numbers count; `FigureSpec` says what each part means."""

    @property
    def x(self) -> str: ...
    @property
    def y(self) -> tuple[str, ...]: ...
    @property
    def lines(self) -> tuple[str, ...]: ...
    @property
    def panels(self) -> tuple[str, ...]: ...
    @property
    def title(self) -> str: ...
    @property
    def known(self) -> Mapping[str, Column[Any]]: ...
    def table(self) -> Shown: ...


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of all panels: the row keys that it stands for, and its look."""

    values: tuple[Any, ...]
    label: str
    colour: str
    marker: str
    style: Any


@dataclass(frozen=True, slots=True)
class _Panel:
    """One panel: its column, and the row keys that it stands for."""

    column: str
    values: tuple[Any, ...]
    title: str


def draw(frame: pd.DataFrame, spec: Curves) -> str:
    """The figure as one SVG file.

    Args:
        frame: what `make_table`, or `make_answer_table`, gives for `spec.table()`.

    Raises:
        RunError: the frame lacks what the figure shows.
    """
    needed = [*spec.table().rows, *(each for name in spec.y for each in (name, *_ends(name, spec.known[name])))]
    lacking = [name for name in needed if name not in frame]
    if lacking or frame.empty:
        raise RunError(
            f"the figure needs {lacking[0]!r} and the table has {', '.join(frame.columns)}: make it from FigureSpec.table()"
            if lacking
            else "the figure's table has no rows: ask a model first"
        )
    lines, panels = _lines(frame, spec), _panels(frame, spec)
    ticks = list(frame[spec.x].drop_duplicates())
    across = 2 if len(panels) == 2 * 2 else min(IN_A_ROW, len(panels))
    down = math.ceil(len(panels) / across)
    keys = math.ceil(len(lines) / _legend_columns(lines, across)) if _needs_legend(lines, frame, spec) else 0

    def paint(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        figure.get_layout_engine().set(h_pad=7 / 72)
        grid = figure.subplots(down, across, squeeze=False).ravel()
        for place, panel in zip(grid, panels, strict=False):
            _paint_panel(place, frame, spec, panel, lines, ticks)
        for place in grid[len(panels) :]:
            place.remove()
        _same_scale(grid, panels)
        if spec.title:
            figure.suptitle(spec.title, fontsize=13, fontweight="bold")
        if keys:
            _legend(figure, lines, frame, spec, across)

    return drawn_alone(
        paint,
        title=spec.title or ", ".join(spec.known[name].label for name in spec.y),
        about=f"{', '.join(spec.known[name].about for name in spec.y)}; over {spec.x}, with 95% intervals",
        width=PANEL_WIDTH * across + (70 if across == 1 else 0),
        height=PANEL_HEIGHT * down + (TITLE_HEIGHT if spec.title else 0) + LEGEND_HEIGHT * keys,
    )


def drawn_alone(paint: Callable[[Any], None], *, title: str, about: str, width: int, height: int) -> str:
    """A drawing as a file of its own, which needs the address of the format; inside a page it does without."""
    from experiments.report.drawing import drawn

    panel = drawn("figure", paint, title=title, description=about, width=width, height=height)
    return str(panel.svg).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _ends(name: str, column: Column[Any]) -> tuple[str, ...]:
    return (f"{name}_low", f"{name}_high") if column.interval else ()


def _combinations(frame: pd.DataFrame, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(frame[list(keys)].drop_duplicates().itertuples(index=False, name=None)) if keys else [()]


def _lines(frame: pd.DataFrame, spec: Curves) -> list[_Line]:
    from experiments.report.drawing import arm_looks
    from experiments.report.source import shown

    combinations = _combinations(frame, spec.lines)
    first = list(dict.fromkeys(values[0] for values in combinations))
    rest = list(dict.fromkeys(values[1:] for values in combinations))
    # One value of the first key leaves the colours to the others.
    colour_of: Mapping[Any, tuple[str, str]] = arm_looks(first if len(first) > 1 else rest)  # type: ignore[arg-type]  # any names will do
    lines = []
    for values in combinations:
        number = rest.index(values[1:])
        # More values than colours: the next round of colours has another style.
        turn = (first.index(values[0]) if len(first) > 1 else number) // 6
        colour, marker = colour_of[values[0] if len(first) > 1 else values[1:]]
        style = STYLES[((number if len(first) > 1 else 0) + turn) % len(STYLES)]
        lines.append(_Line(values, ", ".join(shown(str(value)) for value in values), colour, marker, style))
    return lines


def _panels(frame: pd.DataFrame, spec: Curves) -> list[_Panel]:
    panels = []
    for values in _combinations(frame, spec.panels):
        for name in spec.y:
            parts = [f"{key} {value}" for key, value in zip(spec.panels, values, strict=True)]
            title = ", ".join([*parts, *([_heading(name, spec.known[name])] if len(spec.y) > 1 or not parts else [])])
            panels.append(_Panel(name, values, title))
    return panels


def _heading(name: str, column: Column[Any]) -> str:
    """A column's name as words: figures have no table head that explains a letter."""
    words = name.replace("_", " ")
    label = column.label
    return words[0].upper() + words[1:] + (f" ({label})" if len(label) < 3 and label.lower() != words else "")


def _select(frame: pd.DataFrame, keys: Sequence[str], values: tuple[Any, ...]) -> pd.DataFrame:
    for key, value in zip(keys, values, strict=True):
        frame = frame[frame[key] == value]
    return frame


def _paint_panel(
    axes: Any, frame: pd.DataFrame, spec: Curves, panel: _Panel, lines: Sequence[_Line], ticks: list[Any]
) -> None:
    from experiments.report.drawing import SOFT, percent_axis

    column = spec.known[panel.column]
    part = _select(frame, spec.panels, panel.values)
    place_of = _places(ticks)
    for number, line in enumerate(lines):
        rows = _select(part, spec.lines, line.values)
        if rows.empty:
            continue
        x = np.array([place_of[value] for value in rows[spec.x]], dtype=float)
        y = rows[panel.column].to_numpy(dtype=float)
        axes.plot(x, y, color=line.colour, marker=line.marker, linestyle=line.style, markeredgewidth=0)
        if column.interval:
            low, high = (rows[end].to_numpy(dtype=float) for end in _ends(panel.column, column))
            axes.fill_between(x, low, high, color=line.colour, alpha=0.14, linewidth=0)
            if len(rows) == 1:  # a band needs two points
                axes.vlines(x, low, high, color=line.colour, alpha=0.5, linewidth=1.0)
        missing = x[~np.isfinite(y)]
        if len(missing):
            # At the foot, a little apart for each line; in axes coordinates, whatever the numbers are.
            foot = np.full(len(missing), 0.025 + 0.035 * (number % 6))
            axes.plot(missing, foot, color=line.colour, marker="x", linestyle="none",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_title(panel.title, fontsize=11, loc="left")
    if len(spec.y) == 1 and spec.panels:
        axes.set_ylabel(_heading(panel.column, column))
    _horizontal(axes, spec.x, ticks)
    axes.grid(axis="x", visible=False)
    if column.unit in ("percent", "range"):
        axes.set_ylim(-0.02, 1.02)
        axes.axhline(0.5, color=SOFT, linewidth=0.9, linestyle=":")
    elif column.unit in ("points", "kappa"):
        axes.axhline(0.0, color=SOFT, linewidth=0.9, linestyle=":")
    if column.unit == "kappa":
        axes.set_ylim(min(axes.get_ylim()[0], -0.1), 1.02)
    if column.unit in ("percent", "range", "points"):
        percent_axis(axes.yaxis)


def _same_scale(places: Sequence[Any], panels: Sequence[_Panel]) -> None:
    """Panels of one column are compared by eye."""
    for name in {panel.column for panel in panels}:
        same = [place for place, panel in zip(places, panels, strict=False) if panel.column == name]
        ends = [place.get_ylim() for place in same]
        for place in same:
            place.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def _on_log_scale(ticks: Sequence[Any]) -> bool:
    """Sizes that double are evenly spaced on a logarithmic axis."""
    return len(ticks) > 1 and _are_numbers(ticks) and min(ticks) > 0 and max(ticks) / min(ticks) >= 4


def _are_numbers(ticks: Sequence[Any]) -> bool:
    return all(isinstance(tick, (int, float, np.number)) and not isinstance(tick, bool) for tick in ticks)


def _places(ticks: Sequence[Any]) -> dict[Any, float]:
    """Numbers stand at their value, words at their rank."""
    return {tick: float(tick) if _are_numbers(ticks) else float(rank) for rank, tick in enumerate(ticks)}


def _horizontal(axes: Any, name: str, ticks: list[Any]) -> None:
    from matplotlib.ticker import NullLocator

    places = list(_places(ticks).values())
    if _on_log_scale(ticks):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        factor = (max(places) / min(places)) ** 0.05
        axes.set_xlim(min(places) / factor, max(places) * factor)
    step = math.ceil(len(ticks) / LABELS_AT_MOST)
    # Counted from the last, which is the one that a reader looks for.
    named = [(len(ticks) - 1 - number) % step == 0 for number in range(len(ticks))]
    labels = [
        counted(tick) if named[number] and _are_numbers(ticks) else str(tick) if named[number] else ""
        for number, tick in enumerate(ticks)
    ]
    axes.set_xticks(places, labels)
    axes.set_xlabel(NAMED.get(name, name))


def _needs_legend(lines: Sequence[_Line], frame: pd.DataFrame, spec: Curves) -> bool:
    return len(lines) > 1 or _has_missing(frame, spec)


def _has_missing(frame: pd.DataFrame, spec: Curves) -> bool:
    return bool(frame[list(spec.y)].isna().any(axis=None))


def _legend_columns(lines: Sequence[_Line], across: int) -> int:
    """As many entries in a row as the width holds."""
    longest = max(len(line.label) for line in lines)
    return max(1, min(len(lines) + 1, int(across * PANEL_WIDTH / (7.2 * longest + 60))))


def _legend(figure: Any, lines: Sequence[_Line], frame: pd.DataFrame, spec: Curves, across: int) -> None:
    from matplotlib.lines import Line2D

    from experiments.report.drawing import SOFT

    handles = [
        Line2D([], [], color=line.colour, marker=line.marker, linestyle=line.style, markeredgewidth=0, label=line.label)
        for line in lines
    ]
    if _has_missing(frame, spec):
        handles.append(Line2D([], [], color=SOFT, marker="x", linestyle="none", label="undefined"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), _legend_columns(lines, across)),
        frameon=False, handlelength=2.6,
    )  # fmt: skip
