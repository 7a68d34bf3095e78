"""Drawings of what is inside: probes and the logit lens by layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.inside import PAIR
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
from experiments.report.source import Source

OTHER = {"original": "equivalent", "equivalent": "original"}


def probes(source: Source) -> Figure:
    """AUROC by layer, one panel for each presentation that the probes are trained on."""
    looks = arm_looks(source.arms)
    panels = []
    for kind in PAIR:
        parts = {arm: part[part["presentation"] == kind] for arm, part in _by_arm(source, "probes")}
        n = int(next(iter(parts.values()))["n"].iloc[0])

        def paint(axes: Any, parts: dict[str, Any] = parts) -> None:
            layer = next(iter(parts.values()))["layer"].to_numpy()
            low = np.fmin.reduce([part["null_low"].to_numpy(dtype=float) for part in parts.values()])
            high = np.fmax.reduce([part["null_high"].to_numpy(dtype=float) for part in parts.values()])
            axes.fill_between(layer, low, high, color=NULL, linewidth=0)
            for arm, part in parts.items():
                colour, marker = looks[arm]
                axes.fill_between(layer, part["auroc_low"], part["auroc_high"], color=colour, alpha=0.13, linewidth=0)
                axes.plot(layer, part["transfer_auroc"], color=colour, linestyle=(0, (4, 2)), linewidth=1.5)
                axes.plot(
                    layer, part["auroc"], color=colour, marker=marker, markersize=4.5, markevery=every(source.layers)
                )
            axes.axhline(source.resolved["probe"]["threshold"], color=SOFT, linewidth=0.9, linestyle=":")
            axes.set_ylim(min(0.3, float(np.nanmin(low)) - 0.02), 1.03)
            axes.set_ylabel("AUROC (0.5: guessing)")
            layer_axis(axes, source.layers)

        panels.append(
            drawn(
                f"probes-{kind}",
                paint,
                title=f"Trained on {kind} (n = {n})",
                description="AUROC of the gold-answer probe by layer, with its null band",
                height=300,
            )
        )
    return Figure(
        "probes",
        tuple(panels),
        "Mean AUROC over held-out folds at the answer position; the tinted band spans the lowest and the highest fold. "
        "Sand: where 95% of refits with shuffled labels fall, at each layer, the widest over the arms. Dotted line: the "
        f"threshold for “readable”, {source.resolved['probe']['threshold']}.",
        (
            *arm_keys(source.arms),
            Key("read on the presentation it was trained on", SOFT),
            Key("the same probe, read on the other presentation", SOFT, "dashed"),
            Key("shuffled labels", NULL, "band"),
        ),
    )


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
