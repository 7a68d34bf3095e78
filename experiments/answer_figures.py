"""What a figure of answers is asked to show, and the two kinds that are no curves: points and heat maps.

Three kinds (``figure: {of: answers, kind: …}``):

* ``lines``: columns `y` over the row key `x`, as figures of pairs are drawn (scaling: cells over ``n_parameters``);
* ``points``: one column against another, a point for each combination of `lines` (floor against |bias|);
* ``heat``: one column, `value`, by row keys: `y` from above to below, `x` from left to right.

Each number is one of the table that `AnswerFigureSpec.table` describes. Where floor stands over |bias|, two lines say what
is possible: Acc(Yes) and Acc(No) are 1 at most, so no point lies above 1 - |bias|, and since floor + |bias| / 2 is the mean
of the four cells, a model whose cells average to one half lies on (1 - |bias|) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from experiments.answer_columns import ANSWER_COLUMNS, AnswerGroup
from experiments.answer_tables import AnswerTableSpec, Values
from experiments.config import Section
from experiments.errors import RunError
from experiments.figures import draw, drawn_alone
from experiments.table_columns import Column
from experiments.table_specs import distinct, existing, problem

if TYPE_CHECKING:
    import pandas as pd

CELL_WIDTH, CELL_HEIGHT = 34, 21  # pixels of a heat map's cell
LETTER = 6.4  # pixels of a letter on an axis
SIDE, MARGIN = 430, 60  # pixels: a panel of points; what surrounds a heat map
NAMED_AT_MOST = 32  # points that carry their name
FEW_FOR_R = 3


class AnswerFigureSpec(Section):
    """What a figure of answers shows; see the module for what each kind takes."""

    of: Literal["answers"] = Field(description="what is counted: pairs or answers")
    kind: Literal["lines", "points", "heat"] = Field("lines", description="curves, points or a heat map")
    x: str = Field(description="row key on the horizontal axis; of points, a column")
    y: Values = Field(min_length=1, description="columns, a panel each; of points, one; of a heat map, row keys")
    value: str | None = Field(None, description="column of a heat map")
    lines: Values = Field(("arm",), min_length=1, description="row keys that tell lines or points apart")
    panels: Values = Field((), description="row keys that tell panels apart")
    only: dict[str, Values] = Field(default_factory=dict, description="by row key, the values that count")
    without: dict[str, Values] = Field(default_factory=dict, description="by row key, the values that don't")
    title: str = Field("", description="heading of the figure")

    @property
    def known(self) -> Mapping[str, Column[AnswerGroup]]:
        return ANSWER_COLUMNS

    @model_validator(mode="after")
    def _fits_together(self) -> AnswerFigureSpec:
        if (self.value is not None) != (self.kind == "heat"):
            raise problem(f"value is {self.value!r} and kind {self.kind}: heat maps, and only they, show one value")
        if self.kind == "points" and len(self.y) > 1:
            raise problem(f"y is {', '.join(self.y)}: points have one column there")
        existing(self._columns(), ANSWER_COLUMNS, "x, y and value")
        self.table()
        return self

    def _columns(self) -> Values:
        if self.kind == "heat":
            return (str(self.value),)
        return (self.x, *self.y) if self.kind == "points" else self.y

    def table(self) -> AnswerTableSpec:
        """The table that the figure is drawn from."""
        rows = {
            "lines": (self.x, *self.panels, *self.lines),
            "points": (*self.panels, *self.lines),
            "heat": (*self.panels, *self.y, self.x),
        }[self.kind]
        return AnswerTableSpec(
            of="answers", rows=distinct(rows, "x, y, panels and lines"), columns=self._columns(), only=self.only,
            without=self.without, title=self.title,
        )  # fmt: skip


def draw_answers(frame: pd.DataFrame, spec: AnswerFigureSpec) -> str:
    """The figure as one SVG file.

    Args:
        frame: what `make_answer_table` gives for `spec.table()`.

    Raises:
        RunError: the frame lacks what the figure shows.
    """
    if spec.kind == "lines":
        return draw(frame, spec)
    needed = [*spec.table().rows, *spec.table().columns]
    lacking = [name for name in needed if name not in frame]
    if lacking or frame.empty:
        what = f"needs {lacking[0]!r}, which its table lacks" if lacking else "has no rows"
        raise RunError(f"the figure {what}: make the table from AnswerFigureSpec.table()")
    return _points(frame, spec) if spec.kind == "points" else _heat(frame, spec)


def _panels(frame: pd.DataFrame, spec: AnswerFigureSpec) -> list[tuple[str, pd.DataFrame]]:
    if not spec.panels:
        return [("", frame)]
    grouped = frame.groupby(list(spec.panels), sort=False, dropna=False)
    return [
        (", ".join(f"{key} {value}" for key, value in zip(spec.panels, values, strict=True)), part)
        for values, part in grouped
    ]


# --- points ----------------------------------------------------------------------------------------------------------


def _points(frame: pd.DataFrame, spec: AnswerFigureSpec) -> str:
    from experiments.report.drawing import ARM_COLOURS, SOFT, percent_axis

    (y,), panels = spec.y, _panels(frame, spec)
    bound = (spec.x, y) == ("abs_bias", "floor")

    def paint(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        for place, (heading, part) in zip(figure.subplots(1, len(panels), squeeze=False).ravel(), panels, strict=True):
            whole = np.isfinite(part[[spec.x, y]].to_numpy(dtype=float)).all(axis=1)
            rows = part[whole]
            across, up = (rows[name].to_numpy(dtype=float) for name in (spec.x, y))
            errors = [_reach(rows, name) for name in (spec.x, y)]
            place.errorbar(
                across, up, xerr=errors[0], yerr=errors[1], fmt="none", ecolor=SOFT, elinewidth=0.8, alpha=0.7
            )
            place.plot(across, up, "o", color=ARM_COLOURS[1], markeredgewidth=0)
            for values, one, other in zip(rows[list(spec.lines)].itertuples(index=False), across, up, strict=True):
                if len(rows) <= NAMED_AT_MOST:
                    # Away from the edge, so that a name is not cut.
                    side = -1 if one > 0.6 else 1
                    place.annotate(
                        ", ".join(map(str, values)), (one, other), xytext=(7 * side, 5), textcoords="offset points",
                        fontsize=9, ha="left" if side > 0 else "right",
                    )  # fmt: skip
            if bound:
                ends = np.array([0.0, 1.0])
                words: dict[str, Any] = {
                    "fontsize": 9,
                    "color": SOFT,
                    "rotation_mode": "anchor",
                    "transform_rotates_text": True,
                }
                place.plot(ends, 1 - ends, color=SOFT, linewidth=0.9)
                place.text(0.06, 0.95, "no higher is possible", rotation=-45, **words)
                place.plot(ends, (1 - ends) / 2, color=SOFT, linewidth=0.9, linestyle="--")
                place.text(0.03, 0.45, "cells average one half", rotation=-26.6, **words)
                place.axhline(0.5, color=SOFT, linewidth=0.9, linestyle=":")
            for axis, name in ((place.xaxis, spec.x), (place.yaxis, y)):
                if spec.known[name].unit in ("percent", "points"):
                    percent_axis(axis)
            for name, limits in ((spec.x, place.set_xlim), (y, place.set_ylim)):
                if spec.known[name].unit == "percent":
                    limits(-0.02, 1.02)
            place.set_xlabel(spec.known[spec.x].label)
            place.set_ylabel(spec.known[y].label)
            place.set_title("\n".join([*filter(None, [heading]), _told(across, up, len(part) - len(rows))]), fontsize=10,
                            loc="left")  # fmt: skip
        if spec.title:
            figure.suptitle(spec.title, fontsize=13, fontweight="bold")

    about = f"{spec.known[y].about}; over {spec.known[spec.x].about}; with 95% intervals"
    return drawn_alone(paint, title=spec.title or spec.known[y].label, about=about, width=SIDE * len(panels) + 40,
                       height=SIDE + 60)  # fmt: skip


def _reach(rows: pd.DataFrame, name: str) -> np.ndarray:
    """How far the interval reaches to either side; nothing where there is none."""
    value = rows[name].to_numpy(dtype=float)
    ends = [
        rows[f"{name}_{end}"].to_numpy(dtype=float) if f"{name}_{end}" in rows else value for end in ("low", "high")
    ]
    return np.nan_to_num(np.stack([np.maximum(value - ends[0], 0), np.maximum(ends[1] - value, 0)]))


def _told(across: np.ndarray, up: np.ndarray, missing: int) -> str:
    """How many points there are, and their correlation where there are enough."""
    parts = [f"{len(across)} point{'s' if len(across) != 1 else ''}"]
    if len(across) >= FEW_FOR_R and np.ptp(across) > 0 and np.ptp(up) > 0:
        parts.append(f"r = {np.corrcoef(across, up)[0, 1]:+.2f}".replace("-", "−"))
    return ", ".join([*parts, *([f"{missing} undefined"] if missing else [])])


# --- heat map --------------------------------------------------------------------------------------------------------


def _heat(frame: pd.DataFrame, spec: AnswerFigureSpec) -> str:
    from matplotlib.ticker import PercentFormatter

    panels, value = _panels(frame, spec), str(spec.value)
    column = spec.known[value]
    ticks = list(frame[spec.x].drop_duplicates())
    rows = list(frame[list(spec.y)].drop_duplicates().itertuples(index=False, name=None))
    names = [", ".join(map(str, one)) for one in rows]
    beside, under = (math.ceil(LETTER * max(len(str(one)) for one in labels)) for labels in (names, ticks))
    signed = column.unit == "points"

    def paint(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        grid = figure.subplots(1, len(panels), squeeze=False).ravel()
        for number, (place, (heading, part)) in enumerate(zip(grid, panels, strict=True)):
            index = {(tuple(one[:-1]), one[-1]): score for *one, score in
                     part[[*spec.y, spec.x, value]].itertuples(index=False, name=None)}  # fmt: skip
            shown = np.array([[index.get((row, tick), np.nan) for tick in ticks] for row in rows], dtype=float)
            image = place.imshow(shown, aspect="auto", cmap="RdBu", vmin=-1.0 if signed else 0.0, vmax=1.0)
            for (row, one), score in np.ndenumerate(shown):
                dark = np.isfinite(score) and abs(score if signed else 2 * score - 1) > 0.6
                text = "–" if not np.isfinite(score) else f"{100 * score:.0f}".replace("-", "−")
                place.text(one, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else "black",
                           in_layout=False)  # fmt: skip
            place.grid(visible=False)
            place.set_xticks(range(len(ticks)), [str(tick) for tick in ticks], rotation=90, fontsize=9.5)
            place.set_yticks(range(len(names)) if number == 0 else [], names if number == 0 else [], fontsize=9.5)
            place.tick_params(length=0)
            if heading:
                place.set_title(heading, fontsize=11, loc="left")
        bar = figure.colorbar(image, ax=list(grid), shrink=0.9, pad=0.01, aspect=30)
        bar.ax.set_title(column.label, fontsize=10)
        if column.unit in ("percent", "points"):
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if spec.title:
            figure.suptitle(spec.title, fontsize=13, fontweight="bold")

    about = f"{column.about}; {', '.join(spec.y)} from above to below, {spec.x} from left to right"
    return drawn_alone(
        paint, title=spec.title or column.label, about=about,
        width=beside + MARGIN + len(panels) * (CELL_WIDTH * len(ticks) + 14) + 60,
        height=under + MARGIN + CELL_HEIGHT * len(rows) + (30 if spec.title else 0),
    )  # fmt: skip
