"""Probes of made-up activations through the code of a run: the null of what they read, and studies of few instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import fitting, probe_tables
from experiments.config import load
from experiments.fitting import Material
from experiments.items import PAIR
from experiments.probe_measures import by_layer
from probes.linear import fit_probes

CELLS = ("forward-yes", "forward-no", "converse-yes", "converse-no")


@dataclass(frozen=True)
class InMemory:
    """Activations ``[layer, row, feature]`` where a run has a store."""

    values: np.ndarray

    def stack(self, site: str, layers: Sequence[int], rows: np.ndarray) -> np.ndarray:
        return self.values[:, rows]

    def read(self, site: str, layer: int, rows: np.ndarray) -> np.ndarray:
        return np.ones((len(rows), 3))


def made(instances: int, *, seed: int, folds: int = 5) -> Material:
    """One setting, two arms. Activations hold the question phrase and nothing else; 4 of 5 answers follow the phrase."""
    rng = np.random.default_rng(seed)
    config = load(None, ["n=4", "probe.shuffles=39", "probe.penalty=0.1", f"probe.folds={folds}", "resamples=100",
                         "probe.target=answer"], {})  # fmt: skip
    cells = [CELLS[number % 4] for number in range(instances)]
    parts = [
        pd.DataFrame({"setting": "n=4", "n": 4, "key": [f"k{number:03d}" for number in range(instances)],
                      "presentation": kind, "cell": cells, "gold": [cell.split("-")[1] for cell in cells]})
        for kind in PAIR
    ]  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    forward = table["cell"].str.startswith("forward").to_numpy()
    follows = rng.random(len(table)) < 0.8
    answer = np.where(forward == follows, "yes", "no")
    table = table.assign(answer=answer, correct=answer == table["gold"])
    acts = rng.normal(size=(3, len(table), 8))
    acts[..., 0] += 6.0 * forward
    return Material(
        stores={arm: InMemory(acts) for arm in ("base", "grpo")},  # type: ignore[dict-item]
        tables={"base": table, "grpo": table}, tokens=[[1, 2]] * len(table), params={"n=4": {"n": 4}},
        labels=("yes", "no"), layers=3, config=config,
    )  # fmt: skip


def curve_of(material: Material, target: str) -> fitting.Curve:
    found = fitting.curves(material.params, material.config)
    return next(one for one in found if (one.target, one.presentation) == (target, "original"))


def test_a_probe_of_the_question_phrase_transfers_no_answer() -> None:
    """Beyond the phrase nothing is there, so nothing may beat labels exchanged within a phrase, on the other rows too."""
    low, areas = 0, []
    for seed in range(6):
        material = made(80, seed=seed)
        folds = fitting.shared_folds(material.tables["base"], 5, 1)
        one = fitting.fit_arm(material, curve_of(material, "answer"), "base", folds)
        assert one.result is not None
        read = one.result.readings["base, equivalent, all"]
        low += read.p_max <= 0.05
        areas.append(read.auroc.max())
        wide = fitting.tried(
            lambda material=material, one=one, folds=folds: fit_probes(  # type: ignore[misc]
                fitting.activations(material, "base", one.rows), one.rows.labels, one.rows.keys,
                readings={name: _without(material, target) for name, target in one.targets.items()},
                **fitting.how(material, "base", one.rows, folds),
            )
        )[0]  # fmt: skip
        assert wide is not None and wide.readings["base, equivalent, all"].p_max <= 0.05, "the control"
    assert low <= 1 and min(areas) > 0.65


def _without(material: Material, target: fitting.Target) -> Any:
    from probes.linear import Reading

    return Reading(fitting.activations(material, target.arm, target.rows), target.rows.labels, target.rows.keys)


def test_two_instances_a_fold_have_numbers_and_no_intervals() -> None:
    """Nothing can be drawn again where each fold has one instance of each answer; the run has paid and goes on."""
    material = made(10, seed=0)
    table = material.tables["base"].assign(answer=["yes", "no"] * 10)
    material = fitting.Material(
        stores=material.stores, tables={"base": table, "grpo": table}, tokens=material.tokens, params=material.params,
        labels=material.labels, layers=3, config=material.config,
    )  # fmt: skip
    dealt = {f"k{number:03d}": number // 2 for number in range(10)}
    found = probe_tables.fit(material, [curve_of(material, "answer")], dealt, {})
    curves = found["probe_curves"]
    resid = curves[curves["features"] == "resid_post"]
    assert resid["auroc"].notna().all() and resid["first_layer_low"].isna().all()
    assert resid["first_layer_never"].isna().all()
    assert resid["first_layer_reason"].str.startswith("no interval: no fold holds two instances").all()
    change = found["probe_change"]
    assert change["difference"].tolist() == [0.0] * 3
    assert change[["low", "high", "p", "p_max"]].isna().all().all()
    assert change["reason"].str.startswith("no interval: no fold holds two instances").all()


def test_features_that_never_change_decode_no_share_of_rows() -> None:
    material = made(40, seed=1)
    folds = fitting.shared_folds(material.tables["base"], 5, 1)
    curves = probe_tables.fit(material, [curve_of(material, "answer")], folds, {})["probe_curves"]
    constant = curves[curves["features"].isin(["embed", "length"])]
    assert len(constant) == 4 and constant["decodable_share"].isna().all()
    assert set(constant["decodable_reason"]) == {"all features are the same in all rows"}
    resid = curves[curves["features"] == "resid_post"]
    assert resid["decodable_share"].notna().all() and set(resid["decodable_reason"]) == {""}


@pytest.mark.parametrize(("as_good", "above"), [(4, True), (5, False)])
def test_above_null_in_a_table_is_the_rule_of_the_p_value(as_good: int, above: bool) -> None:
    """99 shuffles: 5 in 100 are allowed, the observed labeling one of them. An interpolated quantile lets a sixth pass."""
    import dataclasses

    rng = np.random.default_rng(0)
    labels, keys = np.arange(40) % 2, np.array([f"k{number}" for number in range(40)])
    acts = rng.normal(size=(2, 40, 5)) + 0.4 * labels[:, None]
    result = fit_probes(acts, labels, keys, shuffles=19, seed=0, readings={"same": _same(acts, labels, keys)})
    rows = fitting.Rows(np.arange(40), labels, keys)
    for found in (result, result.readings["same"]):
        best = float(found.auroc.max())
        null = np.full((99, 2), 0.4)
        null[:as_good] = best + 1e-3
        null[as_good : as_good + 5] = best - 1e-6
        changed = dataclasses.replace(found, null=null)
        table = by_layer(changed, rows, "")
        assert table["above_null"][int(found.auroc.argmax())] == above == (changed.p_max <= 0.05)


def _same(acts: np.ndarray, labels: np.ndarray, keys: np.ndarray) -> Any:
    from probes.linear import Reading

    return Reading(acts, labels, keys)
