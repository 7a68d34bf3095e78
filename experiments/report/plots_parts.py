"""Drawings of what lies behind the curves: transfer between settings, components, and how failures are labelled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from experiments.curves import RESID, curve_rows
from experiments.groups import Group
from experiments.items import PAIR
from experiments.link import LABELS
from experiments.report.drawing import (
    CONTROL,
    INK,
    KIND_COLOURS,
    SOFT,
    Figure,
    Key,
    arm_keys,
    arm_looks,
    dodge,
    drawn,
    percent_axis,
)
from experiments.report.source import Source, shown
from experiments.report.text import signed

SIDES = 8  # settings in a transfer map
TOP = 8  # components of each arm


def transfer(source: Source) -> list[Figure]:
    """Trained on one value of a parameter, read on another, a figure a parameter; none where nothing is swept."""
    found = []
    axes = [axis for axis in dict.fromkeys(group.axis for group in source.groups) if len(axis) == 1]
    for number, axis in enumerate(axes):
        sides = [group for group in source.groups if group.axis == axis][:SIDES]
        names = [shown(one.label) for one in sides]
        panels = []
        for place, arm in enumerate(source.arms):
            for kind in PAIR:
                values, ends, layers = _between(source, arm, kind, sides)
                panels.append(
                    drawn(
                        f"transfer-{number}-{place}-{kind}",
                        partial(_map, values=values, ends=ends, layers=layers, sides=names, axis=axis[0]),
                        title=f"{shown(arm)}, {kind}",
                        description=f"AUROC of probes trained on one {axis[0]} and read on another",
                        height=100 + 46 * len(sides),
                    )
                )
        found.append(
            Figure(
                f"transfer-{number}",
                tuple(panels),
                f"Each row is a probe that was trained on one {axis[0]} alone, read at the layer that is best on its own "
                "held-out rows; columns are the rows it reads, brackets 95% intervals. An instance is judged by a probe "
                "that did not see it. A dash: too few instances of one gold answer for a probe.",
            )
        )
    return found


def _between(
    source: Source, arm: str, kind: str, sides: list[Group]
) -> tuple[np.ndarray, np.ndarray, list[int | None]]:
    """AUROC [trained, read], both ends of its interval [trained, read, end], and the layer of each row."""
    about = {"target": "gold", "presentation": kind, "trained": "setting"}
    own = curve_rows(source.of("probes", arm), features=RESID, **about)
    other = curve_rows(source.of("transfer", arm), read_arm=arm, read_presentation=kind, **about)
    values, ends = np.full((len(sides), len(sides)), np.nan), np.full((len(sides), len(sides), 2), np.nan)
    layers: list[int | None] = []
    for row, trained in enumerate(sides):
        curve = curve_rows(own, setting=trained.label)
        auroc = curve["auroc"].to_numpy(dtype=float)
        best = int(np.nanargmax(auroc)) if np.isfinite(auroc).any() else None
        layers.append(best)
        for column, read in enumerate(sides):
            if best is None:
                continue
            part = curve_rows(other, setting=trained.label, read_setting=read.label, layer=best)
            part = curve_rows(curve, layer=best) if row == column else part
            if len(part):
                values[row, column] = part["auroc"].iloc[0]
                ends[row, column] = part[["auroc_low", "auroc_high"]].iloc[0]
    return values, ends, layers


def _map(
    axes: Any, values: np.ndarray, ends: np.ndarray, layers: list[int | None], sides: list[str], axis: str
) -> None:
    axes.imshow(values, cmap="RdBu", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        low, high = ends[row, column]
        text = "–" if np.isnan(value) else f"{value:.2f}" + (f"\n[{low:.2f}, {high:.2f}]" if len(sides) < 6 else "")
        dark = not np.isnan(value) and abs(value - 0.5) > 0.3
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else INK,
                  fontweight="bold" if row == column else "normal")  # fmt: skip
    names = [one.split("=", 1)[-1] for one in sides]
    axes.set_xticks(range(len(sides)), names, rotation=0 if max(map(len, names)) < 8 else 25,
                    ha="center" if max(map(len, names)) < 8 else "right")  # fmt: skip
    axes.set_yticks(range(len(sides)), [
        name if layer is None else f"{name} (layer {layer})" for name, layer in zip(names, layers, strict=True)
    ])  # fmt: skip
    axes.set_xlabel(f"read on {axis}")
    axes.set_ylabel(f"trained on {axis}")
    axes.grid(visible=False)


def components(source: Source) -> Figure | None:
    """The largest parts of δ and s, one arm beside the other; None where a model can't be taken apart."""
    if source.tables["components"].empty:
        return None
    panels = []
    for kind in PAIR:
        for by, name in (("signal", "signal s"), ("delta", "default δ")):
            tables = {
                arm: curve_rows(source.of("components", arm), presentation=kind, what="value").set_index("component")
                for arm in source.arms
            }
            order = _largest(tables, by)
            panels.append(
                drawn(
                    f"components-{kind}-{by}",
                    partial(_components, source=source, tables=tables, order=order, by=by, name=name),
                    title=f"{name}, {kind}",
                    description=f"The components with the largest part of the {name}, by arm",
                    height=90 + 24 * len(order),
                )
            )
    return Figure(
        "components",
        tuple(panels),
        f"Parts of the readout that single components write, in logits: the {TOP} largest of each arm, of all heads, MLPs "
        "and the embedding. LxHy is head y of layer x. They add up to δ and s at the output. Bars are 95% intervals for "
        "one component alone, and these were picked as the largest: a reason to ablate one, not a test of it.",
        arm_keys(source.arms),
    )


def _largest(tables: dict[str, Any], by: str) -> list[str]:
    chosen: dict[str, float] = {}
    for table in tables.values():
        parts = table[table["kind"] != "readout"][by].abs().sort_values(ascending=False, kind="stable")
        for name, size in parts.iloc[:TOP].items():
            chosen[str(name)] = max(float(size), chosen.get(str(name), 0.0))
    return sorted(chosen, key=lambda one: -chosen[one])


def _components(axes: Any, source: Source, tables: dict[str, Any], order: list[str], by: str, name: str) -> None:
    looks, shift = arm_looks(source.arms), dodge(source.arms, 0.22)
    for arm, table in tables.items():
        colour, marker = looks[arm]
        part = table.loc[order]
        place = np.arange(len(order)) + shift[arm]
        axes.hlines(place, part[f"{by}_low"], part[f"{by}_high"], color=colour, linewidth=1.4)
        axes.plot(part[by], place, marker, color=colour, markersize=5)
    axes.axvline(0, color=SOFT, linewidth=0.9)
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.set_xlabel(f"part of the {name} (logits)")


OUTCOMES = (("D", "both wrong", "o"), ("U", "one right", "s"), ("N", "not read", "^"))


def labels(source: Source) -> Figure | None:
    """Each label's share of the wrong readouts by outcome, beside what tossed verdicts would give."""
    table = curve_rows(source.tables["attribution_shares"], stratum="outcome")
    panels = []
    for place, arm in enumerate(source.arms):
        part = curve_rows(table, arm=arm)
        part = part[part["n"] > 0]
        if part.empty:
            continue
        counts = part.drop_duplicates("of").set_index("of")["n"]
        said = ", ".join(f"{name} {counts[one]}" for one, name, _ in OUTCOMES if one in counts)
        panels.append(
            drawn(
                f"labels-{place}",
                partial(_labels, part=part),
                title=f"{shown(arm)} (wrong readouts: {said})",
                description="Share of each label among wrong readouts, with intervals and the coin",
                height=260,
            )
        )
    if not panels:
        return None
    return Figure(
        "labels",
        tuple(panels),
        "Of the wrong readouts of an outcome, how many carry each label; bars are Wilson 95% intervals over instances. The "
        "diamond is the coin: the share that probes would give whose verdicts on these prompts were tossed. A label whose "
        "interval holds its coin was not shown to be more than that.",
        (
            *(
                Key(name, INK, marker=marker)
                for one, name, marker in OUTCOMES
                if (table["of"][table["n"] > 0] == one).any()
            ),
            Key("coin: verdicts by tosses", CONTROL, "mark"),
        ),
    )


def _labels(axes: Any, part: Any) -> None:
    there = [one for one in OUTCOMES if (part["of"] == one[0]).any()]
    for number, (outcome, _, marker) in enumerate(there):
        rows = part[part["of"] == outcome].set_index("label").loc[list(LABELS)]
        place = np.arange(len(LABELS)) + (number - (len(there) - 1) / 2) * 0.26
        for at, label in zip(place, LABELS, strict=True):
            one = rows.loc[label]
            axes.hlines(at, one["low"], one["high"], color=KIND_COLOURS[label], linewidth=5, alpha=0.75)
            axes.plot(one["value"], at, marker, color=INK, markersize=5)
            if np.isfinite(one["coin"]):
                axes.plot(
                    one["coin"], at, "d", color=CONTROL, markersize=6, markeredgecolor="white", markeredgewidth=0.6
                )
    axes.set_yticks(range(len(LABELS)), [label.replace("_", " ") for label in LABELS])
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    percent_axis(axes.xaxis)
    axes.set_xlabel("share of wrong readouts")


def component_change(source: Source) -> list[tuple[str, str]]:
    """For each adapter and presentation the components whose signal changed most, as text; empty without adapters."""
    found = []
    for arm in source.arms[1:]:
        for kind in PAIR:
            parts = source.arm(arm)["components"].get(kind, {}).get("change", {}).get("signal", [])
            told = [
                f"{one['component']} {signed(one['signal'])} [{signed(one['signal_low'])}, {signed(one['signal_high'])}]"
                for one in parts[:5]
                if one["signal"] is not None and one["signal_low"] is not None
            ]
            if told:
                found.append((f"{shown(arm)}, {kind}", "; ".join(told)))
    return found
