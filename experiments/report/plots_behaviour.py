"""Drawings of what was answered: readouts by gold answer, kinds of failure, profiles over settings, differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.inside import PAIR
from experiments.link import KINDS
from experiments.report.drawing import (
    INK,
    KIND_COLOURS,
    NARROW,
    RIGHT,
    SOFT,
    WRONG,
    Figure,
    Key,
    Panel,
    arm_keys,
    arm_looks,
    dodge,
    drawn,
    percent_axis,
)
from experiments.report.source import Source, shown
from experiments.report.text import OUTCOME_NAMES

BINS = 40
COMPARABLE = 4  # arms whose ranges of readouts differ by less share one axis


def readouts(source: Source) -> Figure:
    """Each prompt's readout, gold yes above the axis and gold no below, right and wrong by side of zero."""
    edges_of = {arm: _edge(source.of("readout", arm)["difference"]) for arm in source.arms}
    widest, narrowest = max(edges_of.values()), min(edges_of.values())
    if widest <= COMPARABLE * narrowest:
        edges_of = dict.fromkeys(edges_of, widest)
    panels = []
    for number, arm in enumerate(source.arms):
        table = source.of("readout", arm)
        edge = edges_of[arm]
        # An even number of bins, so that one edge is zero and no bar is right and wrong at once.
        edges = np.linspace(-edge, edge, BINS + 1)
        for kind in PAIR:
            part = table[table["presentation"] == kind]
            counts = {
                gold: np.histogram(part.loc[part["gold"] == gold, "difference"], edges)[0] for gold in ("yes", "no")
            }
            delta = source.arm(arm)["decomposition"][kind]["all"]["delta"]
            panels.append(
                drawn(
                    f"readout-{number}-{kind}",
                    partial(_readout, counts=counts, edges=edges, delta=delta),
                    title=f"{shown(arm)}, {kind} (n = {len(part)})",
                    description="Histogram of readouts, gold yes above the axis and gold no below",
                    height=230,
                )
            )
    return Figure(
        "readouts",
        tuple(panels),
        "Readout, logit(yes) − logit(no), of every prompt; bars above the line have gold answer yes, bars below it gold "
        "answer no. The dashed line is the default δ. Without a default the means of the two heaps would lie equally far "
        "from zero; a default moves both together."
        + ("" if len(set(edges_of.values())) == 1 else " The x axis differs between arms."),
        (
            Key("readout gives the gold answer", RIGHT, "box"),
            Key("readout gives the other answer", WRONG, "box"),
            Key("default δ", INK, "dashed"),
        ),
    )


def _edge(readout: Any) -> float:
    return float(np.ceil(max(readout.abs().max(), 0.5) * 1.02 * 10) / 10)


def _readout(axes: Any, counts: Mapping[str, np.ndarray], edges: np.ndarray, delta: float | None) -> None:
    middle, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    top = max(1, *(int(count.max()) for count in counts.values()))
    for gold, side in (("yes", 1), ("no", -1)):
        right = (middle > 0) == (gold == "yes")
        axes.bar(middle, side * counts[gold], width * 0.92, color=np.where(right, RIGHT, WRONG).tolist())
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_ylim(-1.18 * top, 1.18 * top)
    axes.set_xlim(edges[0], edges[-1])
    if delta is not None:
        axes.axvline(delta, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
        align = "left" if delta < edges[-1] * 0.8 else "right"
        axes.annotate(
            "δ",
            (delta, 1.16 * top),
            (4 if align == "left" else -4, 0),
            textcoords="offset points",
            ha=align,
            va="top",
            fontsize=12,
        )
    axes.text(0.01, 0.98, "gold yes", transform=axes.transAxes, va="top", color=SOFT)
    axes.text(0.99, 0.02, "gold no", transform=axes.transAxes, va="bottom", ha="right", color=SOFT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("readout (logits):\u2003← no\u2003\u2003yes →")
    axes.set_ylabel("prompts")


def failures(source: Source) -> Figure | None:
    """Kinds of wrong answers by arm and outcome; None where nothing is wrong."""
    rows = []
    for arm in source.arms:
        for row in source.arm(arm)["link"]:
            if row["kinds"] is not None:
                counts = [row["kinds"][kind]["count"] for kind in KINDS]
                rows.append((f"{shown(arm)}: {OUTCOME_NAMES[row['outcome']]}", counts))
    if not rows:
        return None
    return Figure(
        "failures",
        (
            drawn(
                "failures",
                lambda axes: _failures(axes, rows),
                title="Wrong answers by what was measured inside",
                description="Stacked bars, one for each arm and outcome",
                height=90 + 34 * len(rows),
            ),
        ),
        "Every wrongly answered prompt by the kind of failure; an answer that was not read counts as wrong, and the number "
        "behind a bar is n. Bars of the base and of an adapter are counts over the same prompts.",
        tuple(Key(kind, KIND_COLOURS[kind], "box") for kind in KINDS),
    )


def _failures(axes: Any, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
    longest = max(sum(counts) for _, counts in rows)
    for place, (_, counts) in enumerate(rows):
        left = 0
        for kind, count in zip(KINDS, counts, strict=True):
            axes.barh(place, count, left=left, color=KIND_COLOURS[kind], height=0.62, edgecolor="white", linewidth=1)
            if count > 0.03 * longest:
                axes.text(left + count / 2, place, str(count), ha="center", va="center", fontsize=10.5)
            left += count
        axes.text(left + 0.008 * longest, place, f"n = {left}", va="center", color=SOFT, fontsize=10.5)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.14 * longest)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("wrongly answered prompts")


def profile(source: Source) -> Figure:
    """Accuracy, invariance and robust correctness over the settings, with Wilson intervals."""
    height = 270
    panels = (
        _profile_panel(source, "accuracy", "Accuracy on each presentation", _accuracies, height),
        _profile_panel(source, "invariance", "Invariance ι: both answers the same", _invariances, height),
        _profile_panel(source, "robust", "R: both answers right", _robust, height),
    )
    return Figure(
        "profile",
        panels,
        "Bars are 95% Wilson intervals. Accuracy counts answers that were not read as wrong, on all pairs; ι and R are "
        "over the pairs whose two answers were read; n is in the table below. The short dash below each ι is ιₑ, the "
        "agreement that two independent answers with this arm's yes-rate would have. Dotted: 50%.",
        (
            *arm_keys(source.arms),
            Key("original", SOFT, "line"),
            Key("equivalent", SOFT, "open"),
            Key("ιₑ, agreement by yes-rate alone", SOFT, "tick"),
        ),
        narrow=True,
    )


Series = Callable[[dict[str, Any]], list[tuple[dict[str, Any], bool]]]


def _accuracies(one: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    return [(one["original"]["accuracy"], False), (one["equivalent"]["accuracy"], True)]


def _invariances(one: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    return [(one["invariance"], False)]


def _robust(one: dict[str, Any]) -> list[tuple[dict[str, Any], bool]]:
    return [(one["robust"], False)]


def _profile_panel(source: Source, name: str, title: str, series: Series, height: int) -> Panel:
    looks, shift = arm_looks(source.arms), dodge(source.arms, 0.14)
    ticks = [source.tick(setting) for setting in source.settings]
    ordered = source.axis != "setting" and all(_is_number(tick) for tick in ticks)

    def paint(axes: Any) -> None:
        for arm in source.arms:
            colour, marker = looks[arm]
            profiles = [source.profile(arm, setting) for setting in source.settings]
            for part in range(len(series(profiles[0]))):
                shares = [series(one)[part][0] for one in profiles]
                opened = series(profiles[0])[part][1]
                known = [place for place, share in enumerate(shares) if share["value"] is not None]
                if not known:
                    continue
                x = np.array(known) + shift[arm] + (0.05 if opened else 0.0)
                y = np.array([shares[i]["value"] for i in known])
                low, high = (np.array([shares[i][end] for i in known]) for end in ("low", "high"))
                style = ("--" if opened else "-") if ordered else "none"
                axes.errorbar(
                    x,
                    y,
                    [np.maximum(y - low, 0), np.maximum(high - y, 0)],
                    color=colour,
                    marker=marker,
                    linestyle=style,
                    elinewidth=1.0,
                    markerfacecolor="white" if opened else colour,
                    markeredgecolor=colour,
                    linewidth=1.5,
                )
            if name == "invariance":
                for place, one in enumerate(profiles):
                    if one["kappa"]["iota_e"] is not None:
                        axes.plot(
                            np.array([-0.06, 0.06]) + place + shift[arm],
                            [one["kappa"]["iota_e"]] * 2,
                            color=colour,
                            linewidth=2.2,
                        )
        axes.set_xticks(range(len(ticks)), [shown(tick) for tick in ticks])
        if not ordered and max(map(len, ticks)) * len(ticks) > 56:
            axes.tick_params(axis="x", labelrotation=25)
            for label in axes.get_xticklabels():
                label.set_ha("right")
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.set_xlabel("n (problem size)" if source.axis == "n" else source.axis)
        axes.set_ylim(-0.02, 1.04)
        percent_axis(axes.yaxis)
        axes.set_ylabel({"accuracy": "accuracy", "invariance": "share of pairs", "robust": "share of pairs"}[name])
        axes.grid(axis="x", visible=False)
        if name == "accuracy":
            axes.axhline(0.5, color=SOFT, linewidth=0.9, linestyle=":")

    return drawn(
        f"profile-{name}",
        paint,
        title=title,
        description=f"By {source.axis}, with intervals",
        height=height,
        width=NARROW,
    )


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()


SHARES = (
    ("accuracy_original", "accuracy, original"),
    ("accuracy_equivalent", "accuracy, equivalent"),
    ("invariance", "invariance ι"),
    ("robust", "R, both right"),
)
READOUTS = (
    ("readout_original", "delta", "δ, original"),
    ("readout_equivalent", "delta", "δ, equivalent"),
    ("readout_original", "signal", "s, original"),
    ("readout_equivalent", "signal", "s, equivalent"),
)

Interval = tuple[float | None, float | None, float | None]


def differences(source: Source) -> Figure | None:
    """Adapter less base with paired intervals; None where the run has no adapter."""
    comparison: dict[str, Any] = source.results["comparison"]
    if not comparison:
        return None
    shares = {arm: [_of(found[key], "difference") for key, _ in SHARES] for arm, found in comparison.items()}
    kappas = {arm: [_of(found["kappa"], "difference")] for arm, found in comparison.items()}
    logits = {arm: [_of(found[key], name, name) for key, name, _ in READOUTS] for arm, found in comparison.items()}

    def behaviour(axes: Any) -> None:
        points = {arm: [_hundred(one) for one in rows] for arm, rows in shares.items()}
        _forest(axes[0], source.arms, points, [label for _, label in SHARES], "percentage points")
        _forest(axes[1], source.arms, kappas, ["κ"], "difference of κ (no unit)")

    def readout(axes: Any) -> None:
        _forest(axes, source.arms, logits, [label for _, _, label in READOUTS], "logits")

    height = 250 + 40 * len(comparison)
    return Figure(
        "differences",
        (
            drawn(
                "differences-answers",
                behaviour,
                title="Answers: adapter less base",
                height=height,
                heights=(4, 1),
                description="Forest plot of paired differences",
            ),
            drawn(
                "differences-readout",
                readout,
                title="Readout: adapter less base",
                height=height,
                description="Forest plot of paired differences",
            ),
        ),
        f"Paired 95% bootstrap intervals over the same {source.profile('base')['n']} pairs; an interval that crosses "
        "the line at zero shows no difference.",
        arm_keys(source.arms)[1:],
    )


def _of(found: dict[str, Any], value: str, prefix: str = "") -> Interval:
    ends = (f"{prefix}_low", f"{prefix}_high") if prefix else ("low", "high")
    return found[value], found[ends[0]], found[ends[1]]


def _hundred(interval: Interval) -> Interval:
    value, low, high = (None if one is None else 100 * one for one in interval)
    return value, low, high


def _forest(
    axes: Any, arms: Sequence[str], rows: Mapping[str, Sequence[Interval]], labels: Sequence[str], unit: str
) -> None:
    looks, shift = arm_looks(arms), dodge(list(rows), 0.24)
    axes.axvline(0, color=SOFT, linewidth=1)
    for arm, intervals in rows.items():
        colour, marker = looks[arm]
        for place, (value, low, high) in enumerate(intervals):
            y = place + shift[arm]
            if value is None:
                axes.text(0, y, "  undefined", va="center", color=SOFT, fontsize=10)
                continue
            if low is not None and high is not None:
                axes.plot([low, high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
            axes.plot([value], [y], color=colour, marker=marker, markersize=7)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.08)
    axes.set_xlabel(unit)
