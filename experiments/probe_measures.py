"""What is said of one fitted probe curve: by layer, and over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.fitting import Material, Rows, tried

if TYPE_CHECKING:
    from probes.linear import ProbeResult, ReadingResult

LEVEL = 0.95
BY_LAYER = ("auroc", "auroc_low", "auroc_high", "pooled", "null_low", "null_median", "null_high", "p", "p_max",
            "selectivity", "penalty")  # fmt: skip
BY_CURVE = ("layer", "auroc", "auroc_low", "auroc_high", "null_high", "p_max", "first_layer", "first_layer_low",
            "first_layer_high", "first_layer_never", "detectable_auroc", "decodable_share")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutRows:
    """Held-out margins with the labels, folds and instances that they rest on, of a fit or of a reading."""

    margins: np.ndarray
    labels: np.ndarray
    folds: np.ndarray
    groups: np.ndarray


def by_layer(
    found: ProbeResult | ReadingResult | None, rows: Rows, reason: str, *, directions: float | None = None
) -> dict[str, Any]:
    """AUROC by layer with its interval and its null; NaN with the reason where nothing was fitted.

    Args:
        rows: those that were read.
        directions: number of the features, where that is far below the rows; see ``probes.heldout``.
    """
    from probes.controls import auroc_interval

    about = {"n": len(rows.place), "instances": len(np.unique(rows.keys))}
    if found is None:
        return {**dict.fromkeys(BY_LAYER, np.nan), "above_null": False, **about, "excluded_folds": 0, "method": "",
                "reason": reason}  # fmt: skip
    empty = np.isnan(found.fold_auroc[0])
    if empty.all():
        return by_layer(None, rows, getattr(found, "reason", f"no fold holds both classes ({len(rows.place)} rows)"))
    held_out = HeldOutRows(found.margins, found.labels, found.folds, rows.keys)
    interval = auroc_interval(held_out, level=LEVEL, directions=directions)
    low, middle, high = np.quantile(found.null, (0.025, 0.5, 0.975), axis=0)
    chosen = getattr(found, "chosen_penalty", None)
    return {
        "auroc": found.auroc,
        "auroc_low": interval.low,
        "auroc_high": interval.high,
        "pooled": getattr(found, "pooled", np.nan),
        "null_low": low,
        "null_median": middle,
        "null_high": high,
        "p": found.p_value,
        "p_max": found.p_max,
        "selectivity": found.auroc - found.null.mean(axis=0),
        "above_null": found.above_null,
        "penalty": np.nan if chosen is None else np.median(chosen, axis=1),
        **about,
        "excluded_folds": found.excluded_folds,
        "method": interval.method,
        "reason": "",
    }


def by_curve(
    material: Material,
    result: ProbeResult | None,
    rows: Rows,
    reason: str,
    *,
    single: bool,
    directions: float | None,
    constant: bool = False,
) -> dict[str, Any]:
    """Best layer, first layer that reaches the threshold, and the smallest AUROC that so few instances would show.

    Args:
        single: there is one layer, a baseline; then it is -1 and no first layer is asked for.
        constant: all features are the same in all rows. A margin is then the fit's intercept, which says which class its
            training rows have more of and nothing of the row: no share of it is counted.
    """
    from probes.controls import minimum_detectable_auroc

    ones, zeros = (len(np.unique(rows.keys[rows.labels == label])) for label in (1, 0))
    about = {"n": len(rows.place), "ones": ones, "zeros": zeros, "instances": len(np.unique(rows.keys))}
    if result is None:
        return {**about, **dict.fromkeys(BY_CURVE, np.nan), "first_layer_method": "", "first_layer_reason": reason,
                "decodable_reason": reason, "method": "", "reason": reason}  # fmt: skip
    layers = by_layer(result, rows, "", directions=directions)
    best = int(np.nanargmax(result.auroc))
    folds = result.fold_auroc.shape[1]
    found = {
        **about,
        "layer": -1 if single else best,
        **{name: float(layers[name][best]) for name in ("auroc", "auroc_low", "auroc_high", "null_high")},
        "p_max": result.p_max,
        "detectable_auroc": np.nan
        if single or min(ones, zeros) < folds
        else minimum_detectable_auroc(ones, zeros, null=result.null, folds=folds, directions=directions),
        "decodable_share": np.nan if constant else float(result.decodable.mean()),
        "decodable_reason": "all features are the same in all rows" if constant else "",
        "method": f"{result.method}{_whole(material)}; {layers['method']}",
        "reason": "",
    }
    if single:
        empty = dict.fromkeys(("first_layer", "first_layer_low", "first_layer_high", "first_layer_never"), np.nan)
        return {**found, **empty, "first_layer_method": "", "first_layer_reason": "a baseline has one layer"}
    config = material.config
    return {
        **found,
        **first_layer(
            HeldOutRows(result.margins, result.labels, result.folds, rows.keys),
            result.auroc,
            threshold=config.probe.threshold,
            resamples=config.resamples,
            directions=directions,
            seed=config.seed,
        ),
    }


def _whole(material: Material) -> str:
    """What counts as an instance, where it is none."""
    return (
        f", each of whole values of {material.config.probe.held_out}, which count as instances"
        if material.whole
        else ""
    )


def first_layer(
    held_out: HeldOutRows,
    auroc: np.ndarray,
    *,
    threshold: float,
    resamples: int,
    directions: float | None = None,
    layers: Sequence[int] | None = None,
    seed: int,
) -> dict[str, Any]:
    """The first layer that reaches `threshold`, with its interval; so few instances that none can be drawn have none.

    Args:
        layers: the layers' numbers, where they are some of a model's only.
    """
    from probes.controls import first_layer_interval

    found, reason = tried(
        lambda: first_layer_interval(
            held_out,
            threshold=threshold,
            level=LEVEL,
            resamples=resamples,
            directions=directions,
            layers=layers,
            seed=seed,
        )
    )
    if found is None:
        reached = np.flatnonzero(auroc >= threshold)
        empty = dict.fromkeys(("first_layer_low", "first_layer_high", "first_layer_never"), np.nan)
        first = None if len(reached) == 0 else int(reached[0]) if layers is None else layers[reached[0]]
        return {"first_layer": _number(first), **empty, "first_layer_method": "",
                "first_layer_reason": f"no interval: {reason}"}  # fmt: skip
    return {
        "first_layer": _number(found.layer),
        "first_layer_low": _number(found.low),
        "first_layer_high": _number(found.high),
        "first_layer_never": found.never_share,
        "first_layer_method": found.method,
        "first_layer_reason": found.reason,
    }


def _number(layer: int | None) -> float:
    return np.nan if layer is None else float(layer)
