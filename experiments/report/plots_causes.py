"""Drawings of what moves the answer: patching by layer, heads, ablation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.inside import PAIR
from experiments.report.drawing import (
    CONTROL,
    INK,
    SOFT,
    Figure,
    Key,
    Panel,
    arm_keys,
    arm_looks,
    drawn,
    every,
    layer_axis,
    percent_axis,
)
from experiments.report.plots_inside import OTHER
from experiments.report.plots_interventions import effect_limits
from experiments.report.plots_interventions_heads import Grid, paint_grid
from experiments.report.source import Source, shown
from experiments.report.text import signed


def patching(source: Source) -> Figure | None:
    """Share flipped and mean effect by layer and donor, a panel an arm and direction; None where no pair disagrees."""
    panels = []
    for number, arm in enumerate(source.arms):
        found = source.arm(arm)["patching"]
        limits = _effect_limits(found["curves"])
        for kind in reversed(PAIR):  # the recipient
            curves = found["curves"][kind]
            if curves["matched"]["flipped"] is None:
                continue
            panels.append(
                drawn(
                    f"patching-{number}-{kind}",
                    partial(
                        _patching,
                        source=source,
                        look=arm_looks(source.arms)[arm],
                        layers=found["layers"],
                        curves=curves,
                        limits=limits,
                    ),
                    title=f"{shown(arm)}: {OTHER[kind]} → {kind} (n = {curves['matched']['n']})",
                    description="Share of disagreeing recipients that take the donor's answer, and mean effect in "
                    "logits, by layer and donor",
                    height=440,
                    heights=(1, 1),
                )
            )
    if not panels:
        return None
    return Figure(
        "patching",
        tuple(panels),
        "One layer's residual at the answer position is replaced; n is the number of recipients whose pair disagrees. "
        "“original → equivalent”: donors are original prompts, recipients the equivalent ones. Above: the share whose "
        "readout takes the sign of the pair's other presentation, with 95% Wilson intervals. Below: the mean change of "
        "the readout toward that answer, with 95% bootstrap intervals over pairs, on one axis for both directions of "
        "an arm. Wiping out the recipient's own readout moves it toward the other answer too. So in both what counts "
        "is where, before the last layer (shaded), the matched donor parts from both controls; at the last layer it "
        "moves by the whole distance between the two readouts.",
        _keys(source),
    )


def agreeing(source: Source) -> Figure | None:
    """Share of agreeing recipients that change their answer, by layer and donor; None where no pair agrees."""
    panels = []
    for number, arm in enumerate(source.arms):
        found = source.arm(arm)["patching"]
        for kind in reversed(PAIR):
            curves = found["agreeing"][kind]
            if curves["matched"]["changed"] is None:
                continue
            panels.append(
                drawn(
                    f"agreeing-{number}-{kind}",
                    partial(
                        _agreeing,
                        source=source,
                        look=arm_looks(source.arms)[arm],
                        layers=found["layers"],
                        curves=curves,
                    ),
                    title=f"{shown(arm)}: {OTHER[kind]} → {kind} (n = {curves['matched']['n']})",
                    description="Share of agreeing recipients whose answer changes, by layer and donor",
                    height=190,
                )
            )
    if not panels:
        return None
    return Figure(
        "agreeing",
        tuple(panels),
        "The same replacement in pairs whose two readouts agree: the share of recipients whose readout changes its "
        "sign, with 95% Wilson intervals; n is their number. There is nothing to restore here, so every change is a "
        "disturbance, or the answer of an unrelated instance. At the last layer (shaded) the matched donor changes "
        "nothing by construction.",
        _keys(source),
    )


def _keys(source: Source) -> tuple[Key, ...]:
    return (*arm_keys(source.arms), Key("unrelated instance", CONTROL), Key("random direction", CONTROL, "dotted"))


def _patching(
    axes: Any,
    source: Source,
    look: tuple[str, str],
    layers: Sequence[int],
    curves: dict[str, Any],
    limits: tuple[float, float],
) -> None:
    _by_donor(axes[0], source, look, layers, curves, ("flipped", "low", "high"))
    axes[0].set_ylim(-0.03, 1.03)
    percent_axis(axes[0].yaxis)
    axes[0].set_ylabel("share flipped")
    axes[0].set_xlabel("")
    axes[0].tick_params(labelbottom=False)
    _by_donor(axes[1], source, look, layers, curves, ("effect", "effect_low", "effect_high"))
    axes[1].axhline(0, color=SOFT, linewidth=0.9, zorder=1)
    axes[1].set_ylim(*limits)
    axes[1].set_ylabel("mean effect (logits)")
    if curves["random"]["flipped"] is not None:
        random = _numbers(curves["random"]["effect"])
        if random.min() < limits[0] or random.max() > limits[1]:
            text = f"random direction, beyond the axis: {signed(random.min())} to {signed(random.max())}"
            axes[1].text(
                0.01,
                0.985,
                text,
                transform=axes[1].transAxes,
                va="top",
                color=SOFT,
                fontsize=10,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
            )


def _agreeing(axes: Any, source: Source, look: tuple[str, str], layers: Sequence[int], curves: dict[str, Any]) -> None:
    _by_donor(axes, source, look, layers, curves, ("changed", "low", "high"))
    axes.set_ylim(-0.03, 1.03)
    percent_axis(axes.yaxis)
    axes.set_ylabel("share changed")


def _by_donor(
    axes: Any,
    source: Source,
    look: tuple[str, str],
    layers: Sequence[int],
    curves: dict[str, Any],
    names: tuple[str, str, str],
) -> None:
    """One number by layer: the matched donor in the arm's look, with its interval, and the controls in grey."""
    colour, marker = look
    value, low, high = names
    for donor, line, tint in (("random", ":", CONTROL), ("unrelated", "-", CONTROL), ("matched", "-", colour)):
        one = curves[donor]
        if one.get(value) is None:
            continue
        if donor == "matched":
            axes.fill_between(layers, _numbers(one[low]), _numbers(one[high]), color=tint, alpha=0.18, linewidth=0)
        axes.plot(
            layers,
            _numbers(one[value]),
            color=tint,
            linestyle=line,
            marker=marker if donor == "matched" else None,
            markersize=4.5,
            markevery=every(source.layers),
            linewidth=2.0 if donor == "matched" else 1.5,
        )
    layer_axis(axes, source.layers)
    axes.axvspan(source.layers - 1.5, axes.get_xlim()[1], color="#f0f1f3", linewidth=0, zorder=0)


def _effect_limits(curves: dict[str, Any]) -> tuple[float, float]:
    """The axis of the effects of one arm: all of them, unless the random direction would flatten the other curves."""
    core, random = [np.zeros(1)], [np.zeros(1)]
    for found in curves.values():
        for donor, one in found.items():
            if one["flipped"] is not None:
                names = ("effect", "effect_low", "effect_high") if donor == "matched" else ("effect",)
                (random if donor == "random" else core).extend(_numbers(one[name]) for name in names)
    return effect_limits(np.concatenate(core), np.concatenate(random))


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    """As floats, what is undefined as NaN."""
    return np.array(values, dtype=float)


def cut(source: Source) -> str:
    """What is done to the heads, as a participle with its place."""
    how = source.resolved["ablate"]
    done = {"zero": "zeroed", "mean": "replaced by their mean", "resample": "replaced by another instance's"}
    where = {"answer": "at the answer position", "all": "at every position"}
    return f"{done[how.get('source', 'zero')]} {where[how.get('scope', 'answer')]}"


def heads(source: Source) -> Figure | None:
    """Mean effect of patching each head, layer by head, one colour scale for all arms; None where heads were given."""
    if not all(source.arm(arm)["ablation"]["ranking"] for arm in source.arms):
        return None
    grids = {arm: _grid(source, arm) for arm in source.arms}
    sizes = [abs(value) for grid in grids.values() for value in grid[np.isfinite(grid)].tolist()]
    bound = max(sizes, default=0.0) or 1.0
    k = source.resolved["ablate"]["heads"]
    panels = []
    for number, (arm, grid) in enumerate(grids.items()):
        ranking = source.arm(arm)["ablation"]["ranking"]
        top = [(one["layer"], one["head"]) for one in ranking[:k]]
        panels.append(
            drawn(
                f"heads-{number}",
                partial(paint_grid, grid=Grid(grid, frozenset(top)), bound=bound, label="effect (logits)"),
                title=f"{shown(arm)} (n = {ranking[0]['n']})",
                description=f"Heat map; the {k} largest are outlined",
                height=130 + min(420, 34 * source.layers),
            )
        )
    return Figure(
        "heads",
        tuple(panels),
        "Mean change of the readout, in logits toward the donor's readout, when one head's output at the answer "
        f"position is replaced by that of the pair's other presentation; n counts instances that rank. The {k} heads "
        "in outline are cut below, on other instances. All arms share one colour scale; a hatched cell is no head.",
    )


def _grid(source: Source, arm: str) -> np.ndarray:
    ranking = source.arm(arm)["ablation"]["ranking"]
    grid = np.full((source.layers, 1 + max(one["head"] for one in ranking)), np.nan)
    for one in ranking:
        grid[one["layer"], one["head"]] = np.nan if one["mean"] is None else one["mean"]
    return grid


SHARES = (
    ("original", "accuracy", "accuracy, original"),
    ("equivalent", "accuracy", "accuracy, equivalent"),
    ("", "invariance", "invariance ι"),
)
LOGITS = (
    ("original", "delta", "δ, original"),
    ("equivalent", "delta", "δ, equivalent"),
    ("original", "signal", "s, original"),
    ("equivalent", "signal", "s, equivalent"),
)


def ablation(source: Source) -> Figure:
    """No ablation, the top heads, and each random set, for shares and logits; a panel an arm."""
    panels: list[Panel] = []
    for number, arm in enumerate(source.arms):
        sets = source.arm(arm)["ablation"]["sets"]
        panels.append(
            drawn(
                f"ablation-{number}",
                partial(_ablation, look=arm_looks(source.arms)[arm], sets=sets),
                title=f"{shown(arm)} (n = {sets['none']['invariance']['n']} pairs)",
                description="Accuracy, invariance, default and signal: as they are, without the top, without random heads",
                height=400,
                heights=(3, 4),
            )
        )
    k = source.resolved["ablate"]["heads"]
    return Figure(
        "ablation",
        tuple(panels),
        f"Readouts of the problems that take no part in the ranking, with {k} heads {cut(source)}. Each grey tick is "
        f"one random set of {k} other heads. Answers are signs of the readout. The line joins none and top.",
        (
            Key("nothing cut", INK, "ring"),
            Key(f"top {k} cut", INK, "mark"),
            Key("a random set cut", CONTROL, "tick-up"),
        ),
    )


def _ablation(axes: Any, look: tuple[str, str], sets: dict[str, Any]) -> None:
    for one, rows, unit in ((axes[0], SHARES, "share"), (axes[1], LOGITS, "logits")):
        for place, (kind, name, _) in enumerate(rows):
            random = [ablated_value(found, kind, name) for label, found in sets.items() if label not in ("none", "top")]
            known = [value for value in random if value is not None]
            one.plot(
                known,
                [place] * len(known),
                linestyle="none",
                marker="|",
                markersize=13,
                color=CONTROL,
                markeredgewidth=1.3,
            )
            none, top = (ablated_value(sets[label], kind, name) for label in ("none", "top"))
            if none is not None and top is not None:
                one.plot([none, top], [place, place], color=look[0], linewidth=1.3)
                one.plot([none], [place], marker="o", color=look[0], markerfacecolor="white", markersize=8)
                one.plot([top], [place], marker="D", color=look[0], markersize=7)
        one.set_yticks(range(len(rows)), [label for _, _, label in rows])
        one.set_ylim(len(rows) - 0.5, -0.5)
        one.tick_params(axis="y", length=0)
        one.grid(axis="y", visible=False)
        one.margins(x=0.06)
        one.set_xlabel(unit)
    percent_axis(axes[0].xaxis)
    axes[0].set_xlim(-0.02, 1.02)
    axes[1].axvline(0, color=SOFT, linewidth=1)


def ablated_value(found: dict[str, Any], kind: str, name: str) -> float | None:
    """One number of an ablation set: a share, δ or s; of a presentation, or of the pairs where ``kind`` is empty."""
    value = found[kind][name] if kind else found[name]
    number: float | None = value["value"] if isinstance(value, dict) else value
    return number
