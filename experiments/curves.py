"""Selections from the tables of probes, and what ``results.json`` says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.fitting import BASELINES
from experiments.groups import ALL
from experiments.items import PAIR
from experiments.probe_targets import EVERY

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config

RESID = "resid_post"


def main_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows about the gold answer, of probes on the residual stream, trained and read on all rows of a presentation."""
    where = {"target": "gold", "features": "resid_post", "trained": ALL}
    if "trained" in table:  # a curve's rows; elsewhere the column setting is that of a prompt
        where["setting"] = ALL
    for column, value in where.items():
        if column in table:
            table = table[table[column] == value]
    return table[table["presentation"] != EVERY].reset_index(drop=True)


def curve_rows(table: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows of a table that have these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    return table


SUMMARY = ("auroc", "auroc_low", "auroc_high", "layer", "p_max", "first_layer", "first_layer_low", "first_layer_high",
           "first_layer_never", "first_layer_reason", "detectable_auroc", "n", "instances", "method", "reason")  # fmt: skip
INTEGERS = ("layer", "first_layer", "first_layer_low", "first_layer_high")


def probes(tables: Mapping[str, pd.DataFrame], arm: str, config: Config) -> dict[str, Any]:
    """What probes for the gold answer found, by presentation; those for other targets stand under ``targets``.

    So do probes for the gold answer over presentations that flip it.

    Args:
        tables: probes, probe_curves, probe_change and transfer of all arms.
    """
    found: dict[str, Any] = {}
    for target in config.probe.target:
        kinds = dict.fromkeys(curve_rows(tables["probe_curves"], arm=arm, target=target)["presentation"])
        shown = {kind: _presentation(tables, arm, target, kind) for kind in kinds}
        if target == "gold":
            found |= {kind: shown.pop(kind) for kind in PAIR}
        if shown:
            found.setdefault("targets", {})[target] = shown
    return found


def _presentation(tables: Mapping[str, pd.DataFrame], arm: str, target: str, kind: str) -> dict[str, Any]:
    about = {"arm": arm, "target": target, "presentation": kind}
    curves = curve_rows(tables["probe_curves"], **about)
    whole = _summary(curve_rows(curves, trained=ALL, features=RESID))
    layers = curve_rows(tables["probes"], **about)
    at = curve_rows(layers, trained=ALL, features=RESID, setting=ALL, layer=whole["layer"]).to_dict("records")
    found = {
        **whole,
        "transfer_auroc": at[0]["transfer_auroc"] if at else None,
        "null_high_at_layer": at[0]["null_high"] if at else None,
        "selectivity": at[0]["selectivity"] if at else None,
        "above_null_layers": int(curve_rows(layers, trained=ALL, features=RESID, setting=ALL)["above_null"].sum()),
        "baselines": {name: _summary(curve_rows(curves, trained=ALL, features=name)) for name in BASELINES},
        "settings": {
            str(one["setting"]): _summary(curve_rows(curves, setting=one["setting"]))
            for one in curve_rows(curves, trained="setting", features=RESID).to_dict("records")
        },
    }
    change = curve_rows(tables["probe_change"], **about) if len(tables["probe_change"]) else tables["probe_change"]
    if len(change):
        found["change"] = _change(curve_rows(change, trained=ALL), whole["layer"])
    return found


def _summary(rows: pd.DataFrame) -> dict[str, Any]:
    (one,) = rows.to_dict("records")
    return {name: _whole(one[name]) if name in INTEGERS else one[name] for name in SUMMARY}


def _change(rows: pd.DataFrame, layer: int | None) -> dict[str, Any]:
    """The paired change from the base at the layer that is best for this arm, or why there is none."""
    at = rows if layer is None else rows[rows["layer"] == layer]
    one = at.iloc[0]
    return {
        "layer": layer,
        **{name: one[name] for name in ("difference", "low", "high", "p", "p_max", "n", "method", "reason")},
    }


def _whole(value: Any) -> int | None:
    return None if value is None or not np.isfinite(value) else int(value)
