"""Drawings of what is inside, by layer: probes over all rows and by setting, and the logit lens."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from experiments.curves import RESID, curve_rows, main_rows
from experiments.groups import ALL
from experiments.items import PAIR
from experiments.report.drawing import (
    NULL,
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
from experiments.report.source import Source, shown

OTHER = {"original": "equivalent", "equivalent": "original"}


def probes(source: Source) -> Figure:
    """AUROC by layer, one panel for each presentation that the probes are trained on."""
    looks = arm_looks(source.arms)
    panels = []
    for kind in PAIR:
        parts = {arm: curve_rows(main_rows(source.of("probes", arm)), presentation=kind) for arm in source.arms}
        marks = {arm: _baselines(source, arm, kind) for arm in source.arms}
        n = int(next(iter(parts.values()))["n"].iloc[0])
        panels.append(
            drawn(
                f"probes-{kind}",
                partial(_probes, source=source, looks=looks, parts=parts, marks=marks),
                title=f"Trained on {kind} (n = {n})",
                description="AUROC of the gold-answer probe by layer, with its null band and its baselines",
                height=300,
            )
        )
    return Figure(
        "probes",
        tuple(panels),
        "Mean AUROC over held-out folds at the answer position; the tinted band is its 95% interval at each layer. Sand: "
        "where 95% of refits with shuffled labels fall, at each layer, the widest over the arms. Left of the first layer: "
        "what probes read without the model, off the last token’s embedding (e), the prompt’s length (l) and its bag of "
        f"tokens (t). Dotted line: the threshold for “readable”, {source.resolved['probe']['threshold']}.",
        (
            *arm_keys(source.arms),
            Key("read on the presentation it was trained on", SOFT),
            Key("the same probe, read on the other presentation", SOFT, "dashed"),
            Key("shuffled labels", NULL, "band"),
            Key("baseline", SOFT, "tick"),
        ),
    )


def _baselines(source: Source, arm: str, kind: str) -> dict[str, float]:
    found = source.arm(arm)["probes"][kind]["baselines"]
    return {name: one["auroc"] for name, one in found.items() if one["auroc"] is not None}


def _probes(axes: Any, source: Source, looks: Any, parts: dict[str, Any], marks: dict[str, dict[str, float]]) -> None:
    layer = next(iter(parts.values()))["layer"].to_numpy()
    low = np.fmin.reduce([part["null_low"].to_numpy(dtype=float) for part in parts.values()])
    high = np.fmax.reduce([part["null_high"].to_numpy(dtype=float) for part in parts.values()])
    axes.fill_between(layer, low, high, color=NULL, linewidth=0)
    for arm, part in parts.items():
        colour, marker = looks[arm]
        axes.fill_between(layer, part["auroc_low"], part["auroc_high"], color=colour, alpha=0.13, linewidth=0)
        axes.plot(layer, part["transfer_auroc"], color=colour, linestyle=(0, (4, 2)), linewidth=1.5)
        axes.plot(layer, part["auroc"], color=colour, marker=marker, markersize=4.5, markevery=every(source.layers))
    axes.axhline(source.resolved["probe"]["threshold"], color=SOFT, linewidth=0.9, linestyle=":")
    layer_axis(axes, source.layers)
    left, right = axes.get_xlim()
    step = (right - left) / 26
    for arm, one in marks.items():
        for place, (name, value) in enumerate(one.items()):
            middle = left - step * (len(one) - place - 0.5) * 1.25
            axes.plot([middle - 0.45 * step, middle + 0.45 * step], [value, value], color=looks[arm][0], linewidth=2.4)
            axes.annotate(
                name[0], (middle, 0.02), xycoords=("data", "axes fraction"), ha="center", color=SOFT, fontsize=10
            )
    axes.axvline(left, color=SOFT, linewidth=0.6)
    axes.set_xlim(left - step * 1.25 * len(next(iter(marks.values()), ())) - 0.3 * step, right)
    known = [value for one in marks.values() for value in one.values()]
    floor = min([0.3, float(np.nanmin(low)) - 0.02, *(value - 0.04 for value in known)])
    axes.set_ylim(floor, 1.03)
    axes.set_ylabel("AUROC (0.5: guessing)")


def by_setting(source: Source) -> list[Figure]:
    """For each swept parameter the curve in each of its values; none where nothing is swept."""
    found = []
    axes = [axis for axis in dict.fromkeys(group.axis for group in source.groups) if len(axis) == 1]
    for number, axis in enumerate(axes):
        shown_groups = [group for group in source.groups if group.axis == axis][:MOST]
        colours = _ramp(len(shown_groups))
        panels = []
        for place, arm in enumerate(source.arms):
            table = curve_rows(source.of("probes", arm), target="gold", features=RESID, trained=ALL)
            for kind in PAIR:
                parts = [curve_rows(table, presentation=kind, setting=group.label) for group in shown_groups]
                panels.append(
                    drawn(
                        f"by-setting-{number}-{place}-{kind}",
                        partial(_by_setting, source=source, parts=parts, colours=colours),
                        title=f"{shown(arm)}, {kind}",
                        description=f"AUROC of the gold-answer probe by layer, a line for each {axis[0]}",
                        height=250,
                    )
                )
        counts = sorted({int(part["n"].iloc[0]) for part in parts})
        n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        found.append(
            Figure(
                f"by-setting-{number}",
                tuple(panels),
                f"The probe that was trained on all rows, read on the held-out rows of one {axis[0]} at a time ({n} each, "
                "95% intervals tinted). Probes trained on one of them alone, read in the others, are in the transfer.",
                tuple(Key(shown(group.label), colour) for group, colour in zip(shown_groups, colours, strict=True)),
            )
        )
    return found


MOST = 8  # lines in a panel


def _ramp(count: int) -> list[str]:
    """Colours from light to dark, so that an order of sizes is an order of shades."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis_r"](0.18 + 0.72 * place / max(1, count - 1))) for place in range(count)]


def _by_setting(axes: Any, source: Source, parts: list[Any], colours: list[str]) -> None:
    for part, colour in zip(parts, colours, strict=True):
        axes.fill_between(part["layer"], part["auroc_low"], part["auroc_high"], color=colour, alpha=0.1, linewidth=0)
        axes.plot(part["layer"], part["auroc"], color=colour)
    axes.axhline(0.5, color=SOFT, linewidth=0.8)
    axes.axhline(source.resolved["probe"]["threshold"], color=SOFT, linewidth=0.9, linestyle=":")
    lowest = np.nanmin([np.nanmin(part["auroc"].to_numpy(dtype=float), initial=0.2) for part in parts])
    axes.set_ylim(max(-0.03, lowest - 0.03), 1.03)
    axes.set_ylabel("AUROC")
    layer_axis(axes, source.layers)


def lens(source: Source) -> Figure:
    """Default, signal and off-label mass by layer, one panel a presentation."""
    looks = arm_looks(source.arms)
    limits = [_limits(source, name) for name in ("delta", "signal")]
    panels = []
    for kind in (*PAIR, *source.unpaired):
        parts = {arm: part[part["presentation"] == kind] for arm, part in _by_arm(source, "lens")}
        n = int(next(iter(parts.values()))["n"].iloc[0])

        def paint(axes: Any, parts: dict[str, Any] = parts) -> None:
            for arm, part in parts.items():
                colour, marker = looks[arm]
                layer = part["layer"].to_numpy()
                for place, name in enumerate(("delta", "signal")):
                    axes[place].fill_between(
                        layer, part[f"{name}_low"], part[f"{name}_high"], color=colour, alpha=0.18, linewidth=0
                    )
                    axes[place].plot(
                        layer, part[name], color=colour, marker=marker, markersize=4.5, markevery=every(source.layers)
                    )
                axes[2].plot(layer, part["off_label_mass"], color=colour, linewidth=1.2)
            for one, label in zip(axes, ("default δ (logits)", "signal s (logits)", "off-label"), strict=True):
                one.set_ylabel(label)
                layer_axis(one, source.layers)
            for one, limit in zip(axes[:2], limits, strict=True):
                one.set_ylim(*limit)
                one.axhline(0, color=SOFT, linewidth=0.9)
                one.set_xlabel("")
                one.tick_params(labelbottom=False)
            axes[2].set_ylim(-0.05, 1.05)
            axes[2].set_yticks([0, 0.5, 1])
            percent_axis(axes[2].yaxis)

        panels.append(
            drawn(
                f"lens-{kind}",
                paint,
                title=f"{kind} (n = {n})",
                description="Default, signal and off-label mass through the logit lens, by layer",
                height=440,
                heights=(3, 3, 1.2),
            )
        )
    return Figure(
        "lens",
        tuple(panels),
        "The model's own final norm and unembedding, applied after each block at the answer position; bands are 95% "
        "bootstrap intervals within cells. Off-label: the probability that the lens gives to tokens that are no answer. "
        "Where it is near 100% the model has not turned to the answer yet, and δ and s there compare two unlikely tokens.",
        arm_keys(source.arms),
    )


def _limits(source: Source, name: str) -> tuple[float, float]:
    """One axis for all presentations and arms, so that panels can be compared."""
    values = source.tables["lens"][[name, f"{name}_low", f"{name}_high"]].to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    margin = 0.06 * max(high - low, 0.1)
    return min(low, 0.0) - margin, max(high, 0.0) + margin


def _by_arm(source: Source, table: str) -> list[tuple[str, Any]]:
    return [(arm, source.of(table, arm)) for arm in source.arms]
