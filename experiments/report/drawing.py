"""From matplotlib to an SVG that can stand inside the page.

Problem. A figure file carries a date, random ids, a document header and links to schema addresses; two figures in one
page share ids; and a user's own matplotlib settings change the picture. Mechanism: every panel is drawn inside ``drawn``,
which starts from matplotlib's defaults, applies one style, and hands back the bare ``<svg>`` element with ids that no
other figure has. The caller's settings are restored, no backend is chosen and nothing is left open.

Panels are small (about half the page), so that two stand side by side on a desk and one above the other on a phone,
at the same letter size. Text stays text: it can be searched, copied and read aloud.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from markupsafe import Markup

from experiments.report.source import shown

INK, SOFT, GRID, PAPER = "#22272e", "#5b6570", "#e3e6ea", "#ffffff"
# Okabe and Ito's colours, which stay apart for colour-blind readers; marker and line style always differ as well.
ARM_COLOURS = ("#3d434b", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#56b4e9")
ARM_MARKERS = ("o", "s", "^", "D", "v", "P")
RIGHT, WRONG = "#009e73", "#d55e00"
KIND_COLOURS = {"overridden": "#e69f00", "lost": "#cc79a7", "reversed": "#56b4e9", "not_decodable": "#9aa2ab",
                "mixed": "#d9dde2", "text": "#f0e442"}  # fmt: skip
CONTROL = "#8a929b"
NULL = "#efe6cf"
WIDTH = 500  # of a panel, in pixels: two stand side by side
NARROW = 350  # three do

_STYLE = {
    "svg.hashsalt": "pairlens",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # ships with matplotlib, so the layout is the same everywhere
    "font.size": 11,
    "text.parse_math": False,  # names may hold a dollar sign
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.6,
    "figure.facecolor": PAPER,
}


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend.

    ``look``: line, dashed, dotted, open (dashed with an open marker), band, box, frame, outline, hatch, tick, tick-up,
    ring, dot, square or mark.
    """

    label: str
    colour: str
    look: str = "line"
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing with its heading."""

    title: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels with a common legend and caption, which says what n is. ``narrow`` panels stand three in a row."""

    name: str
    panels: tuple[Panel, ...]
    caption: str
    keys: tuple[Key, ...] = ()
    narrow: bool = False


def drawn(
    name: str,
    paint: Callable[[Any], None],
    *,
    title: str,
    description: str,
    height: int,
    width: int = WIDTH,
    heights: Sequence[float] | None = None,
) -> Panel:
    """Draw one panel.

    Args:
        name: unique in the page; prefix of all ids.
        paint: draws on the axes it is given (an array of them where ``heights`` has several).
        title: heading, printed by the page.
        description: what a reader who can't see the drawing is told.
        height, width: in pixels.
        heights: relative heights of axes that stand above each other on one x axis.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # The browser has the letters that the layout font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        canvas = Canvas(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        if heights is None:
            paint(canvas.subplots())
        else:
            paint(canvas.subplots(len(heights), 1, sharex=False, height_ratios=list(heights)))
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Panel(title, _inline(out.getvalue(), name, f"{title}. {description}"))


def arm_looks(arms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each arm, the same in every figure."""
    return {
        arm: (ARM_COLOURS[number % len(ARM_COLOURS)], ARM_MARKERS[number % len(ARM_MARKERS)])
        for number, arm in enumerate(arms)
    }


def arm_keys(arms: Sequence[str]) -> tuple[Key, ...]:
    return tuple(Key(shown(arm), colour, marker=marker) for arm, (colour, marker) in arm_looks(arms).items())


def dodge(arms: Sequence[str], step: float) -> dict[str, float]:
    """Small shifts that keep the intervals of several arms from lying on each other."""
    return {arm: (number - (len(arms) - 1) / 2) * step for number, arm in enumerate(arms)}


def layer_axis(axes: Any, layers: int) -> None:
    """Whole numbers only, and no more labels than fit."""
    step = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if layers / step <= 12)
    axes.set_xticks(range(0, layers, step))
    axes.set_xlim(-0.35 - 0.02 * layers, layers - 0.65 + 0.02 * layers)
    axes.set_xlabel("layer (after block)")


def every(layers: int) -> int:
    """At which layers a curve carries its marker: at all of a few, at some of many."""
    return max(1, round(layers / 12))


def percent_axis(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _inline(svg: str, name: str, description: str) -> Markup:
    """The bare element: no header, no schema addresses, ids of its own, a description, and a size that can shrink."""
    start = svg.index("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[start:], flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)  # speaks about every element of the page
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'\b(?:xlink:)?href="#', f'href="#{name}-', svg)
    svg = svg.replace('xlink:href="data:', 'href="data:').replace("url(#", f"url(#{name}-")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    head = f'<svg class="plot" role="img" aria-labelledby="{name}-title" {box[0]}><title id="{name}-title">'
    body = svg[svg.index(">") + 1 :].strip()
    return Markup(head + escape(description) + "</title>" + _compact(body))


def _compact(svg: str) -> str:
    """Coordinates to a hundredth of a pixel, and no indentation: half the bytes, the same picture."""

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"(\d+\.\d{2})\d+", r"\1", attribute[0])

    svg = re.sub(r'\b(?:d|transform|x|y|width|height)="[^"]*"', rounded, svg)
    return re.sub(r"\n\s*", " ", svg).replace("> <", "><")
