"""Drawings of a patching study: curves by layer with their controls.

What counts in a curve is not its height but where the matched donor parts from its controls. So every panel shows both,
with their intervals, and below them the difference, paired by instance, beside zero. A square at the foot marks a layer at
which the matched donor does more than every control by the rule that was fixed beforehand. A curve that climbs by
construction says so inside the panel, and the layer at which it has to arrive is shaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.report.drawing import (
    CONTROL,
    INK,
    SOFT,
    Figure,
    Key,
    arm_keys,
    arm_looks,
    drawn,
    every,
    layer_axis,
    percent_axis,
)
from experiments.report.intervention_source import (
    ALL,
    HEADS,
    KINDS,
    WAYS,
    Interventions,
    Sweep,
    exceeding,
    position_name,
    truth,
)
from experiments.report.source import shown
from experiments.report.text import plural, signed

if TYPE_CHECKING:
    import pandas as pd

FLATTENED = 2.5  # an axis of effects is stretched up to this much to hold the random direction too
FEW_POSITIONS = 2  # up to this many have a curve each; more are shown as a map, with a curve at the answer position
LINES = {"unrelated": "-", "random": ":", "same cell": "--"}
LOOKS = {"unrelated": "line", "random": "dotted", "same cell": "dashed"}
CONTROL_NAMES = {
    "unrelated": "unrelated instance",
    "random": "random direction",
    "same cell": "instance of the same cell",
}


def layer_curves(source: Interventions) -> Iterator[tuple[str, Figure]]:
    """The kind of pair and a figure, for each kind, site and position with a curve; panels are arms and directions."""
    found: dict[tuple[str, str, str], list[Sweep]] = {}
    for sweep in source.sweeps:
        if sweep.site != HEADS and sweep.kind != ALL and sweep.measured and _has_curve(source, sweep):
            found.setdefault((sweep.kind, sweep.site, sweep.position), []).append(sweep)
    for number, key in enumerate(sorted(found, key=lambda one: KINDS.index(one[0]))):
        yield key[0], _curve_figure(source, f"layers-{number}", found[key])


def _has_curve(source: Interventions, sweep: Sweep) -> bool:
    table = source.tables["patch_effects"]
    positions = table.loc[table["site"] == sweep.site, "position"].unique()
    return len(positions) <= FEW_POSITIONS or sweep.position in ("answer", "all")


def _curve_figure(source: Interventions, name: str, group: Sequence[Sweep]) -> Figure:
    first = group[0]
    flips = first.kind == "disagreement"
    looks = arm_looks(source.arms)
    limits = {
        arm: [
            effect_limits(*_extent([sweep for sweep in group if sweep.arm == arm], column))
            for column in ("effect", "above")
        ]
        for arm in source.arms
        if any(sweep.arm == arm for sweep in group)
    }
    panels = tuple(
        drawn(
            f"{name}-{number}",
            partial(
                _curve, sweep=sweep, look=looks[sweep.arm], layers=source.layers, flips=flips, limits=limits[sweep.arm]
            ),
            title=f"{shown(sweep.arm)}: {sweep.direction}, {WAYS[sweep.direction]} (n = {sweep.n}, "
            f"{plural(sweep.groups, 'instance')})",
            description=f"{'Share flipped, ' if flips else ''}effect in logits and effect less each control, by layer "
            f"and donor; {sweep.kind}, {sweep.place}",
            height=560 if flips else 380,
            heights=(1, 1, 1) if flips else (1, 1),
        )
        for number, sweep in enumerate(group)
    )
    controls = [control for control in CONTROL_NAMES if any(control in sweep.controls for sweep in group)]
    keys = [*arm_keys(list(dict.fromkeys(sweep.arm for sweep in group)))]
    keys += [Key(CONTROL_NAMES[control], CONTROL, LOOKS[control]) for control in controls]
    if any(exceeding(source, sweep) for sweep in group):
        keys.append(Key("does more than every control", INK, "square"))
    return Figure(name, panels, _curve_caption(first, flips=flips), tuple(keys))


def _curve_caption(sweep: Sweep, *, flips: bool) -> str:
    what = {
        "disagreement": "pairs whose two readouts disagree",
        "agreement": "pairs whose two readouts are both right: nothing is to be restored",
        "shared error": "pairs whose two readouts are both wrong: the donor carries the wrong answer too",
    }[sweep.kind]
    parts = [
        f"{shown(sweep.site)} at {position_name(sweep.position)}, one layer at a time, in {what}; n counts recipients."
    ]
    if flips:
        parts.append("Top: share of recipients whose readout takes the donor's sign, Wilson 95%.")
    parts.append(
        f"{'Middle' if flips else 'Above'}: mean change of the readout toward the matched donor's answer. "
        f"{'Bottom' if flips else 'Below'}: the matched donor's effect less that of each control, on the same "
        "recipients: above zero it does more than that control. Bands are 95% bootstrap intervals over instances."
    )
    if not flips:
        parts.append(
            "The matched donor has the recipient's own answer here. Where it exceeds a control, that control moves the "
            "readout further away from this answer."
        )
    if sweep.monotone:
        parts.append(
            "A curve over the residual stream at the answer position climbs by construction: at the last layer "
            "(shaded) the readout is the donor's, whatever the model does."
        )
    return " ".join(parts)


def _curve(
    axes: Any, sweep: Sweep, look: tuple[str, str], layers: int, flips: bool, limits: Sequence[tuple[float, float]]
) -> None:
    places = list(np.atleast_1d(axes))
    if flips:
        _by_donor(places[0], sweep, look, layers, "flipped")
        places[0].set_ylim(-0.03, 1.03)
        percent_axis(places[0].yaxis)
        places[0].set_ylabel("share flipped")
    middle, bottom = places[-2:]
    _by_donor(middle, sweep, look, layers, "effect")
    middle.set_ylim(*limits[0])
    middle.set_ylabel("effect (logits)")
    beyond(middle, sweep, limits[0], "effect")
    _less_controls(bottom, sweep, layers)
    bottom.set_ylim(*limits[1])
    bottom.set_ylabel("less control (logits)")
    beyond(bottom, sweep, limits[1], "above")
    for one in (middle, bottom):
        one.axhline(0, color=SOFT, linewidth=0.9, zorder=1)
    if sweep.monotone and flips:
        middle.text(0.012, 0.97, "climbs by construction", transform=middle.transAxes, va="top", color=SOFT, fontsize=10,
                    fontstyle="italic", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
    for number, one in enumerate(places):
        layer_axis(one, layers)
        if sweep.site == "resid_pre":
            one.set_xlabel("layer (before block)")
        elif sweep.site not in ("resid_post",):
            one.set_xlabel("layer")
        if sweep.monotone:
            one.axvspan(layers - 1.5, one.get_xlim()[1], color="#f0f1f3", linewidth=0, zorder=0)
        if number < len(places) - 1:
            one.set_xlabel("")
            one.tick_params(labelbottom=False)


def _by_donor(axes: Any, sweep: Sweep, look: tuple[str, str], layers: int, value: str) -> None:
    """One number by layer: the controls in grey, the matched donor in the arm's look above them."""
    for name, rows in (*reversed(sweep.controls.items()), ("", sweep.matched)):
        colour, marker, line = (CONTROL, None, LINES[name]) if name else (look[0], look[1], "-")
        _line(axes, rows, value, colour=colour, marker=marker, line=line, layers=layers, wide=not name)


def _less_controls(axes: Any, sweep: Sweep, layers: int) -> None:
    for name, rows in reversed(sweep.controls.items()):
        _line(axes, rows, "above", colour=INK, marker=None, line=LINES[name], layers=layers, wide=False)
    marked = np.array(
        [layer for layer in _specific(sweep) if not (sweep.monotone and layer == layers - 1)], dtype=float
    )
    axes.plot(marked, np.full(len(marked), 0.04), linestyle="none", marker="s", markersize=5, color=INK,
              transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
    if not sweep.decided:
        why = "too few instances to decide" if sweep.controls else "no control was run"
        axes.text(0.012, 0.96, why, transform=axes.transAxes, va="top", color=SOFT, fontsize=10, fontstyle="italic",
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip


def _specific(sweep: Sweep) -> list[int]:
    return [int(layer) for layer in sweep.matched.loc[sweep.matched["specific"].map(truth), "layer"]]


def _line(
    axes: Any, rows: pd.DataFrame, value: str, *, colour: str, marker: str | None, line: str, layers: int, wide: bool
) -> None:
    layer = rows["layer"].to_numpy(dtype=float)
    middle, low, high = (rows[f"{value}{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high"))
    if len(layer) == 1:  # no curve: the interval as a bar
        shift = 0.0 if wide else {"-": 0.12, ":": -0.12}.get(line, 0.2)
        axes.errorbar(layer + shift, middle, yerr=_reach(middle, low, high), color=colour, marker=marker or "o",
                      markerfacecolor=colour if marker else "white", capsize=3, linestyle="none")  # fmt: skip
        return
    axes.fill_between(layer, low, high, color=colour, alpha=0.18 if wide else 0.1, linewidth=0)
    axes.plot(layer, middle, color=colour, linestyle=line, marker=marker, markersize=4.5, markevery=every(layers),
              linewidth=2.0 if wide else 1.5)  # fmt: skip


def _reach(middle: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Lengths of an error bar; none where the interval is undefined."""
    return np.nan_to_num(np.maximum(np.stack([middle - low, high - middle]), 0.0))


def _extent(group: Sequence[Sweep], value: str) -> tuple[np.ndarray, np.ndarray]:
    """Everything that is drawn of a number, and of the random direction."""
    core, random = [np.zeros(1)], [np.zeros(1)]
    for sweep in group:
        parts = dict(sweep.controls) if value == "above" else {"": sweep.matched, **sweep.controls}
        for name, rows in parts.items():
            found = rows[[value, f"{value}_low", f"{value}_high"]].to_numpy(dtype=float).ravel()
            (random if name == "random" else core).append(found)
    return np.concatenate(core), np.concatenate(random)


def effect_limits(core: np.ndarray, random: np.ndarray) -> tuple[float, float]:
    """The axis of effects: all of them, unless the random direction would flatten the other curves."""
    low, high = float(np.nanmin(core)), float(np.nanmax(core))
    both = np.concatenate([core, random])
    least, most = float(np.nanmin(both)), float(np.nanmax(both))
    margin = 0.06 * max(high - low, 0.1)
    if high > low and most - least > FLATTENED * (high - low):
        return low - margin, high + 4 * margin  # room for a note on how far the random direction goes
    margin = 0.06 * max(most - least, 0.1)
    return least - margin, most + margin


def beyond(axes: Any, sweep: Sweep, limits: tuple[float, float], value: str) -> None:
    """Say how far the random direction goes where the axis does not follow it."""
    if "random" not in sweep.controls:
        return
    found = sweep.controls["random"][value].dropna().to_numpy(dtype=float)
    if len(found) and (found.min() < limits[0] or found.max() > limits[1]):
        text = f"random direction, beyond the axis: {signed(found.min())} to {signed(found.max())}"
        axes.text(0.988, 0.97, text, transform=axes.transAxes, va="top", ha="right", color=SOFT, fontsize=10,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})  # fmt: skip


def less_controls(source: Interventions) -> Figure | None:
    """The matched donor less each control, by layer, in disagreeing pairs; panels are arms and directions."""
    group = [
        sweep for sweep in source.sweeps
        if (sweep.kind, sweep.site, sweep.position) == ("disagreement", "resid_post", "answer")
        and sweep.controls and sweep.measured
    ]  # fmt: skip
    if not group:
        return None
    limits = {
        arm: effect_limits(*_extent([sweep for sweep in group if sweep.arm == arm], "above")) for arm in source.arms
    }
    panels = tuple(
        drawn(
            f"less-controls-{number}",
            partial(_less_panel, sweep=sweep, layers=source.layers, limits=limits[sweep.arm]),
            title=f"{shown(sweep.arm)}: {WAYS[sweep.direction]} (n = {sweep.n}, {plural(sweep.groups, 'instance')})",
            description="Effect of the matched donor less that of each control, by layer, with 95% intervals",
            height=210,
        )
        for number, sweep in enumerate(group)
    )
    controls = [control for control in CONTROL_NAMES if any(control in sweep.controls for sweep in group)]
    keys = [Key(f"less {CONTROL_NAMES[control]}", INK, LOOKS[control]) for control in controls]
    return Figure(
        "less-controls",
        panels,
        "The matched donor's mean effect less that of each control, on the same recipients, with 95% bootstrap intervals "
        "over instances; above zero it does more than that control. A square marks a layer at which it does more than "
        "every control, by a p over all layers; the last layer (shaded) restores by construction and does not count.",
        (*keys, Key("does more than every control", INK, "square")),
    )


def _less_panel(axes: Any, sweep: Sweep, layers: int, limits: tuple[float, float]) -> None:
    _less_controls(axes, sweep, layers)
    axes.set_ylim(*limits)
    beyond(axes, sweep, limits, "above")
    axes.axhline(0, color=SOFT, linewidth=0.9, zorder=1)
    axes.set_ylabel("logits")
    layer_axis(axes, layers)
    axes.axvspan(layers - 1.5, axes.get_xlim()[1], color="#f0f1f3", linewidth=0, zorder=0)
