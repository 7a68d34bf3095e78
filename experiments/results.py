"""The headline numbers, each with its n, interval and method.

``results.json`` is computed from the tables alone. A number that is undefined is null with a ``reason``, never 0. What
is written here depends only on the tables, so a resumed run and an uninterrupted one give the same file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.ablate_results import ablation
from experiments.curves import probes
from experiments.inside import DECOMPOSED, PAIR, design
from experiments.instances import by_instance, share_at, share_of
from experiments.intervention_stage import cost_of as cost
from experiments.link import ABOVE_CHANCE, KINDS, OUTCOMES
from experiments.patch_effects import residual
from experiments.patch_options import DONORS
from experiments.profiles import contrast, profile, reading
from experiments.statistics import Share

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config


def headline(tables: Mapping[str, pd.DataFrame], arms: Sequence[str], labels: Sequence[str], config: Config) -> Any:
    """All results as JSON values.

    Args:
        tables: by name, with a column ``arm``.
        arms: ``base`` first.
        labels: the family's labels, the first is "yes".
    """
    of = {name: {arm: _of(table, arm) for arm in arms} for name, table in tables.items()}
    found = {
        "arms": {
            arm: {
                "behaviour": behaviour(of["behaviour"][arm], of["readout"][arm], config),
                "decomposition": decomposition(of["decomposition"][arm]),
                "probes": probes(tables, arm, config),
                "lens": settled(of["lens"][arm]),
                "components": components(of["components"][arm]),
                "patching": patching(of["patch"][arm], config),
                "ablation": ablation(
                    of["heads"][arm] if "heads" in of else None,
                    of["ablate"][arm],
                    of["readout"][arm],
                    labels,
                    config,
                ),
                "link": link(of["attribution"][arm]),
                "attribution": labels_found(of["attribution_shares"][arm], of["attribution_calibration"][arm]),
            }
            for arm in arms
        },
        "comparison": {
            arm: compare(of["behaviour"], of["readout"], arm, labels, config) for arm in arms if arm != "base"
        },
    }
    return plain(found)


def behaviour(table: pd.DataFrame, readout: pd.DataFrame, config: Config) -> dict[str, Any]:
    """Competence profile, reading of the answers, and whether the text says what the readout says."""
    same = table["answer"].to_numpy(dtype=object, na_value=None) == np.where(readout["difference"] > 0, "yes", "no")
    read = table["answer"].notna().to_numpy()
    return {
        **profile(table, resamples=config.resamples, seed=config.seed),
        **reading(table),
        "text_equals_readout": share_of(same[read], table["key"][read]),
        "off_label_mass": {"value": float(readout["off_label_mass"].mean()), "n": len(readout), "method": "mean"},
    }


def decomposition(table: pd.DataFrame) -> dict[str, Any]:
    """δ and s by presentation and setting."""
    found: dict[str, Any] = {}
    for record in table.to_dict("records"):
        values = {name: record[name] for name in DECOMPOSED}
        found.setdefault(str(record["presentation"]), {})[str(record["setting"])] = {
            **values, "n": record["n"], "method": record["method"], "reason": record["reason"]
        }  # fmt: skip
    return found


def settled(table: pd.DataFrame) -> dict[str, Any]:
    """Where the answer settles through the lens, and how often the gold answer led and was overtaken."""
    found = {}
    for kind, part in table.groupby("presentation", sort=False):
        one = part.iloc[0]
        found[str(kind)] = {
            "settled": {"value": one["settled"], "low": one["settled_low"], "high": one["settled_high"], "n": one["n"],
                        "method": "median over prompts of the first layer from which the answer stays, by instance"},
            "overtaken": {"value": one["overtaken"], "mirror": one["overtaken_mirror"], "n": one["n"],
                          "method": "share of wrong readouts in which the gold answer led at an earlier layer; mirror: of "
                          "right readouts in which the wrong answer did"},
        }  # fmt: skip
    return found


TOP = 10  # components listed by signal and by default


def components(table: pd.DataFrame) -> dict[str, Any]:
    """The components with the largest part of δ and s, and those whose part changed most from the base."""
    found: dict[str, Any] = {}
    for (kind, what), part in table.groupby(["presentation", "what"], sort=False) if len(table) else ():
        parts = part[part["kind"] != "readout"]
        found.setdefault(str(kind), {})[str(what)] = {
            **{by: _largest(parts, by) for by in ("signal", "delta")}, "method": part["method"].iloc[0]
        }  # fmt: skip
    return found


def _largest(parts: pd.DataFrame, by: str) -> list[dict[str, Any]]:
    order = parts[by].abs().sort_values(ascending=False, kind="stable").index[:TOP]
    names = ("component", by, f"{by}_low", f"{by}_high", "n", "reason")
    return [{name: one[name] for name in names} for one in parts.loc[order].to_dict("records")]


def labels_found(shares: pd.DataFrame, calibration: pd.DataFrame) -> dict[str, Any]:
    """How often each label of failure occurs among wrong readouts, and how often it comes back."""
    whole = shares[shares["stratum"] == "all"]
    return {
        "shares": {str(one["label"]): _without(one, "stratum", "of", "label") for one in whole.to_dict("records")},
        "calibration": [_without(one) for one in calibration.to_dict("records")],
    }


def _without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {str(name): value for name, value in record.items() if name not in names}


def patching(table: pd.DataFrame, config: Config) -> dict[str, Any]:
    """Patching by recipient, donor and layer, with the checks.

    ``curves``: of the disagreeing pairs, how often the readout flips to the matched donor's, and how far it moves toward
    it. ``agreeing``: of the pairs that agree, how often the readout changes its answer at all.
    """
    from patching.effects import mean_interval, share_flipped, signed_effect

    table = residual(table)
    layers = sorted(int(layer) for layer in table["layer"].unique())
    found: dict[str, Any] = {"layers": layers, "curves": {}, "agreeing": agreeing(table), **cost(table)}
    for kind in PAIR:
        part = table[(table["presentation"] == kind) & (table["pair"] == "disagreeing")]
        curves: dict[str, dict[str, Any]] = {}
        for donor in DONORS:
            wide = wide_by_layer(part[part["donor"] == donor])
            if wide is None:
                curves[donor] = {"flipped": None, "n": 0, "reason": "no disagreeing pair"}
                continue
            flipped, n = share_flipped(wide.values, wide.unpatched, wide.donor)
            instances = wide.table["key"][np.sign(wide.unpatched) * np.sign(wide.donor) < 0].nunique()
            shares = [share_at(round(float(value) * n) if n else 0, n, instances) for value in flipped]
            toward = np.where(wide.donor > 0, 1, -1)
            effects = signed_effect(wide.values, wide.unpatched, toward)
            once = by_instance(effects.T, wide.table, by=("key",))
            moved = mean_interval(once.values.T, seed=config.seed, resamples=config.resamples)
            curves[donor] = {
                "flipped": [one.value for one in shares],
                "low": [one.low for one in shares],
                "high": [one.high for one in shares],
                "effect": moved.mean.tolist(),
                "effect_low": moved.low.tolist(),
                "effect_high": moved.high.tolist(),
                "n": n,
                "method": f"share of recipients whose readout takes the matched donor's sign, {shares[0].method}; effect "
                f"in logits toward the matched donor's answer, bootstrap over instances ({config.resamples} resamples)",
            }
        found["curves"][kind] = curves
    return found


def agreeing(table: pd.DataFrame) -> dict[str, Any]:
    """Of the pairs whose readouts agree: how often a donor's residual changes the answer, by recipient and layer."""
    found: dict[str, Any] = {}
    for kind in PAIR:
        part = table[(table["presentation"] == kind) & (table["pair"] == "agreeing")]
        found[kind] = {}
        for donor in DONORS:
            wide = wide_by_layer(part[part["donor"] == donor])
            if wide is None:
                found[kind][donor] = {"changed": None, "n": 0, "reason": "no agreeing pair"}
                continue
            changed = np.sign(wide.values) != np.sign(wide.unpatched)[:, None]
            shares = [share_of(at_layer, wide.table["key"]) for at_layer in changed.T]
            found[kind][donor] = {
                "changed": [one.value for one in shares],
                "low": [one.low for one in shares],
                "high": [one.high for one in shares],
                "n": len(wide.values),
                "method": f"share of recipients whose readout changes its sign, {shares[0].method}",
            }
    return found


def link(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Outcome class × verdict: how often readable, signal against default, and how often patching repaired."""
    rows = []
    for outcome in OUTCOMES:
        for correct in (True, False):
            part = table[(table["outcome"] == outcome) & (table["correct"] == correct)]
            if part.empty:
                continue
            repaired = {}
            for donor in DONORS:
                tried = part[f"repaired_{donor}"].dropna()
                repaired[donor] = share_of(tried.to_numpy(dtype=bool), part["key"][tried.index])
            rows.append(
                {
                    "outcome": outcome,
                    "answered": "right" if correct else "wrong",
                    "n": len(part),
                    "patch_layer": {
                        kind: int(layer) for kind, layer in part.groupby("presentation")["patch_layer"].first().items()
                    },
                    "decodable": readable(part),
                    "signal": _mean(part["signal"]),
                    "default": _mean(part["default"]),
                    "kinds": {
                        kind: share_of((part["kind"] == kind).to_numpy(dtype=bool), part["key"]) for kind in KINDS
                    }
                    if not correct
                    else None,
                    "repaired": repaired if not correct else None,
                }
            )
    return rows


def readable(part: pd.DataFrame) -> Share:
    """Share of the prompts whose presentation has a probe better than chance; the others have no verdict."""
    asked = part["decodable"].dropna()
    found = share_of(asked.to_numpy(dtype=bool), part["key"][asked.index])
    if len(asked):
        return found
    return dataclasses.replace(found, reason=f"no probe beats shuffled labels at p = {ABOVE_CHANCE}")


def compare(
    behaviour_of: Mapping[str, pd.DataFrame],
    readout_of: Mapping[str, pd.DataFrame],
    arm: str,
    labels: Sequence[str],
    config: Config,
) -> dict[str, Any]:
    """Base against one adapter on the same items: paired intervals on every difference."""
    from probes.decompose import paired_difference

    found = contrast(behaviour_of["base"], behaviour_of[arm], resamples=config.resamples, seed=config.seed)
    for kind in PAIR:
        first, second = (t[t["presentation"] == kind] for t in (readout_of["base"], readout_of[arm]))
        once = by_instance(np.stack([first["difference"].to_numpy(), second["difference"].to_numpy()]), first)
        change = paired_difference(
            once.values[0],
            once.values[1],
            once.table["cell"].to_numpy(),
            once.gold(labels[0]),
            resamples=config.resamples,
            declared=design(first, labels),
            seed=config.seed,
        )
        found[f"readout_{kind}"] = {**dataclasses.asdict(change), "method": once.method(change.method)}
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class WideByLayer:
    """A patch table with one row a recipient: patched readouts ``[item, layer]``, unpatched and donor ``[item]``.

    ``table`` is about the recipients.
    """

    values: np.ndarray
    unpatched: np.ndarray
    donor: np.ndarray
    table: pd.DataFrame


def wide_by_layer(table: pd.DataFrame) -> WideByLayer | None:
    """None if the table has no rows."""
    if table.empty:
        return None
    row = ["setting", "key", "presentation"]
    wide = table.pivot(index=row, columns="layer", values="patched")
    about = table.drop_duplicates(row).set_index(row).loc[wide.index].reset_index()
    return WideByLayer(wide.to_numpy(), about["unpatched"].to_numpy(), about["donor_difference"].to_numpy(), about)


def plain(value: Any) -> Any:
    """JSON values: dataclasses as objects, numpy scalars as numbers, NaN as null."""
    if isinstance(value, Share):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _of(table: pd.DataFrame, arm: str) -> pd.DataFrame:
    return table[table["arm"] == arm].drop(columns="arm").reset_index(drop=True)


def _mean(values: pd.Series) -> dict[str, Any]:
    return {"value": float(values.mean()), "lower_quartile": float(values.quantile(0.25)),
            "upper_quartile": float(values.quantile(0.75)), "n": len(values),
            "method": "mean with quartiles of the prompts"}  # fmt: skip
