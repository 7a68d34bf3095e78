"""The probes of a whole run, recomputed from the stored activations with scikit-learn."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction import DictVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from statsmodels.stats.proportion import proportion_confint

from activations.store import ActivationStore
from experiments import fitting, probe_tables, results
from experiments.config import Config, load, settings
from experiments.inside import component_table, decomposition_table
from experiments.pipeline import run as run_study
from experiments.progress import Reporter
from probes.linear import Reading, fit_probes
from tasks.registry import family

PENALTY = 0.03
SMALL = ["n=4,6", "probe.shuffles=19", f"probe.penalty={PENALTY}", "probe.folds=3", "probe.splits=2", "resamples=100",
         "patch.pairs=4", "ablate.random_sets=1", "probe.target=correct", "limit=20"]  # fmt: skip


@dataclass(frozen=True)
class Run:
    path: Path
    config: Config

    def table(self, name: str, **where: Any) -> pd.DataFrame:
        found = pd.read_parquet(self.path / "tables" / f"{name}.parquet")
        for column, value in where.items():
            found = found[found[column] == value]
        return found.reset_index(drop=True)

    def store(self, arm: str) -> ActivationStore:
        return ActivationStore.open(self.path / "activations" / arm)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("stage") / "run"
    config = load(None, SMALL, {})
    run_study(config, path, config_text="", reporter=Reporter(quiet=True))
    return Run(path, config)


def rows_of(run: Run, arm: str, presentation: str, setting: str = "all") -> pd.DataFrame:
    """Readout rows with their places in the store and their folds, which every curve shares."""
    table = run.table("readout", arm=arm)
    table = table[table["presentation"] == presentation].assign(place=lambda one: one.index)
    verdicts = run.table("probe_rows", arm="base", target="gold", presentation="original")
    folds = dict(zip(verdicts["key"], verdicts["fold"], strict=True))
    table = table.assign(fold=table["key"].map(folds), label=(table["gold"] == "yes").astype(int))
    return table if setting == "all" else table[table["setting"] == setting]


def recomputed(run: Run, train: pd.DataFrame, arm: str, read: pd.DataFrame, read_arm: str, layer: int) -> float:
    """Mean of per-fold AUROC: fitted on the other folds' rows of one arm, read on this fold's rows of another."""
    own, other = run.store(arm)["resid_post", layer], run.store(read_arm)["resid_post", layer]
    return by_folds(own[train["place"]], train, other[read["place"]], read)


def by_folds(own: np.ndarray, train: pd.DataFrame, other: np.ndarray, read: pd.DataFrame) -> float:
    areas = []
    for fold in sorted(set(train["fold"])):
        inside, outside = (train["fold"] != fold).to_numpy(), (read["fold"] == fold).to_numpy()
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=PENALTY, tol=1e-10, max_iter=100_000))
        probe.fit(own[inside].astype(float), train["label"][inside])
        truth = read["label"][outside]
        if truth.nunique() == 2:
            areas.append(roc_auc_score(truth, probe.decision_function(other[outside].astype(float))))
    return float(np.mean(areas))


@pytest.mark.parametrize("arm", ["base", "grpo"])
@pytest.mark.parametrize("kind", ["original", "equivalent"])
def test_every_reading_of_the_probes_over_all_rows(run: Run, arm: str, kind: str) -> None:
    found = run.table("probes", arm=arm, target="gold", presentation=kind, trained="all", features="resid_post")
    assert list(dict.fromkeys(found["setting"])) == ["all", "n=4", "n=6"]
    train, other = rows_of(run, arm, kind), "equivalent" if kind == "original" else "original"
    partner = "grpo" if arm == "base" else "base"
    moved = run.table("transfer", arm=arm, target="gold", presentation=kind, trained="all", read_arm=partner)
    for one in found.to_dict("records"):
        if one["layer"] % 2:
            continue
        read = rows_of(run, arm, kind, one["setting"])
        assert one["auroc"] == pytest.approx(recomputed(run, train, arm, read, arm, one["layer"]), abs=1e-6)
        there = rows_of(run, arm, other, one["setting"])
        expected = recomputed(run, train, arm, there, arm, one["layer"])
        assert one["transfer_auroc"] == pytest.approx(expected, abs=1e-6)
        assert (one["n"], one["instances"]) == (len(read), read["key"].nunique())
        assert one["auroc_low"] <= one["auroc"] <= one["auroc_high"]
        assert one["null_low"] <= one["null_median"] <= one["null_high"]
    for layer in (1, 3):
        read = rows_of(run, partner, kind)
        expected = recomputed(run, train, arm, read, partner, layer)
        assert moved.set_index("layer").loc[layer, "auroc"] == pytest.approx(expected, abs=1e-6)


def test_probes_of_one_setting_and_what_they_read_in_the_other(run: Run) -> None:
    for setting, other in (("n=4", "n=6"), ("n=6", "n=4")):
        about = {"arm": "grpo", "target": "gold", "presentation": "original", "trained": "setting", "setting": setting}
        own, moved = run.table("probes", **about), run.table("transfer", **about, read_setting=other, read_arm="grpo")
        train, read = (rows_of(run, "grpo", "original", one) for one in (setting, other))
        for layer in (0, 3):
            assert own["auroc"][layer] == pytest.approx(recomputed(run, train, "grpo", train, "grpo", layer), abs=1e-6)
            # Instances of another size are unknown to the probes; which fold's probe judges them is dealt by name.
            dealt = dealt_folds(train, read, f"grpo, original, {other}")
            expected = recomputed(run, train, "grpo", read.assign(fold=dealt), "grpo", layer)
            assert moved["auroc"][layer] == pytest.approx(expected, abs=1e-6)
            assert sorted(np.bincount(dealt)) == [6, 7, 7]


def dealt_folds(train: pd.DataFrame, read: pd.DataFrame, name: str) -> np.ndarray:
    """The folds that ``fit_probes`` deals to rows it does not know; they depend on the names alone."""
    noise = np.random.default_rng(0)
    reading = Reading(noise.standard_normal((1, len(read), 3)), read["label"].to_numpy(), read["key"].to_numpy())
    fitted = fit_probes(noise.standard_normal((1, len(train), 3)), train["label"], train["key"], assigned=train["fold"],
                        readings={name: reading}, shuffles=1, seed=1)  # fmt: skip
    return fitted.readings[name].folds


def test_baselines_need_no_model(run: Run) -> None:
    found = run.table("probes", arm="base", target="gold", presentation="original", layer=-1)
    assert list(found["features"]) == ["embed", "length", "tokens"]
    assert found["auroc"][0] == 0.5, "every prompt ends in the same token"
    train = rows_of(run, "base", "original")
    from activations.model import load as load_model

    messages = {}
    for line in (run.path / "items.jsonl").read_text().splitlines():
        record = json.loads(line)
        shown = next(one for one in record["presentations"] if one["kind"] == "original")
        messages[record["setting"], record["key"]] = [(one["role"], one["content"]) for one in shown["messages"]]
    model = load_model("builtin")
    chats = [[{"role": role, "content": text} for role, text in messages[one]]
             for one in zip(train["setting"], train["key"], strict=True)]  # fmt: skip
    ids = [prompt.ids for prompt in model.encode(chats)]
    counts = DictVectorizer(sparse=False).fit_transform(
        [{str(t): float(row.count(t)) for t in row} for row in map(list, ids)]
    )
    assert found["auroc"][2] == pytest.approx(by_folds(counts, train, counts, train), abs=1e-6)
    lengths = np.array([[float(len(row))] for row in ids])
    assert found["auroc"][1] == pytest.approx(by_folds(lengths, train, lengths, train), abs=1e-6)


def test_another_target_has_labels_of_its_own(run: Run) -> None:
    curves = run.table("probe_curves", target="correct", features="resid_post", trained="all")
    behaviour = run.table("behaviour")
    for one in curves.to_dict("records"):
        right = behaviour[(behaviour["arm"] == one["arm"]) & (behaviour["presentation"] == one["presentation"])][
            "correct"
        ]
        assert (one["ones"], one["zeros"]) == (right.sum(), (~right).sum())
        assert (one["reason"] == "") == np.isfinite(one["auroc"])
    made = json.loads((run.path / "results.json").read_text())
    assert set(made["arms"]["base"]["probes"]["targets"]["correct"]) == {"original", "equivalent"}
    change = run.table("probe_change", target="correct")
    assert change["difference"].isna().all() and (change["reason"] != "").all()
    assert change["reason"].str.contains("the arms differ in correct").any()


def test_one_class_gives_no_number_but_a_reason(run: Run) -> None:
    """Every stage before has been paid for; a target that turns out constant must not end the run."""
    grid = settings(run.config, family("ordering"))
    tables = {}
    for arm in ("base", "grpo"):
        behaviour = run.table("behaviour", arm=arm)
        table = run.table("readout", arm=arm)
        tables[arm] = table.assign(answer=behaviour["answer"], correct=True)
    material = fitting.Material(
        stores={arm: run.store(arm) for arm in tables}, tables=tables, tokens=[[1]] * len(table),
        params={one.label: one.params for one in grid}, labels=("yes", "no"), layers=4, config=run.config,
    )  # fmt: skip
    curve = next(one for one in fitting.curves(material.params, run.config) if one.target == "correct")
    folds = fitting.shared_folds(tables["base"], 3, 1)
    made = probe_tables.fit(material, [curve], folds, {})
    probes = made["probes"]
    assert probes["auroc"].isna().all() and set(probes["reason"]) == {"all 40 rows are right"}
    assert made["probe_curves"]["p_max"].isna().all() and not made["probe_rows"]["decodable"].any()
    unread = {arm: table.assign(answer=pd.NA) for arm, table in tables.items()}
    none = fitting.rows(dataclasses.replace(material, tables=unread), "base", "answer", "original")
    assert len(none.place) == 0 and fitting.not_fitted(material, curve, "base", none) == "no row has this target"


def test_components_add_up_to_default_and_signal(run: Run) -> None:
    parts = run.table("components", what="value")
    split = run.table("decomposition", setting="all").set_index(["arm", "presentation"])
    for (arm, kind), table in parts.groupby(["arm", "presentation"]):
        own = table[table["kind"] != "readout"]
        whole = table[table["kind"] == "readout"].iloc[0]
        for name in ("delta", "signal"):
            assert own[name].sum() == pytest.approx(split.loc[(arm, kind), name], abs=1e-4)
            assert whole[name] == pytest.approx(split.loc[(arm, kind), name], abs=1e-4)
    change = run.table("components", what="change").set_index(["presentation", "component"])
    value = parts.set_index(["arm", "presentation", "component"])
    for (kind, name), one in change.iterrows():
        expected = value.loc[("grpo", kind, name), "signal"] - value.loc[("base", kind, name), "signal"]
        assert one["signal"] == pytest.approx(expected, abs=1e-9)


def test_the_printed_table_is_that_of_the_tables(run: Run) -> None:
    made = pd.read_csv(run.path / "table.csv")
    assert list(zip(made["n"], made["arm"], strict=True)) == [(4, "base"), (6, "base"), (4, "grpo"), (6, "grpo")]
    for one in made.to_dict("records"):
        setting = f"n={one['n']}"
        for kind in ("original", "equivalent"):
            right = run.table("behaviour", arm=one["arm"], setting=setting, presentation=kind)
            assert one[f"accuracy_{kind}"] == pytest.approx(right["correct"].mean())
            assert one[f"yes_rate_{kind}"] == pytest.approx((right["answer"].dropna() == "yes").mean())
            readout = run.table("readout", arm=one["arm"], setting=setting, presentation=kind)
            cells = readout.groupby("cell")["difference"].mean()
            yes, no = (cells[[name for name in cells.index if name.endswith(gold)]].mean() for gold in ("yes", "no"))
            assert one[f"delta_{kind}"] == pytest.approx(cells.mean())
            assert one[f"signal_{kind}"] == pytest.approx((yes - no) / 2)
            curve = run.table(
                "probes", arm=one["arm"], target="gold", setting=setting, presentation=kind, trained="setting"
            )
            reached = curve.loc[curve["auroc"] >= 0.9, "layer"]
            first = one[f"first_layer_{kind}"]
            assert (first == reached.iloc[0]) if len(reached) else np.isnan(first)


def test_a_lost_table_is_made_again_and_the_results_stay_the_same(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(run.path, out)
    for name in ("transfer", "components", "lens", "attribution_shares"):
        (out / "tables" / f"{name}.parquet").unlink()
    (out / "results.json").unlink()
    run_study(run.config, out, config_text="", reporter=Reporter(quiet=True))
    assert (out / "results.json").read_bytes() == (run.path / "results.json").read_bytes()
    before, after = (pd.read_parquet(path / "tables" / "transfer.parquet") for path in (run.path, out))
    pd.testing.assert_frame_equal(before, after)
    assert sorted(one.name for one in (out / "tables").iterdir()) == sorted(
        one.name for one in (run.path / "tables").iterdir()
    )


def test_an_instance_under_two_settings_counts_once(run: Run) -> None:
    """Doubling every row under another setting's name adds no evidence, so no interval may narrow."""
    table = run.table("readout", arm="base", setting="n=4")
    twice = pd.concat([table, table.assign(setting="again")], ignore_index=True)
    labels, one = ("yes", "no"), {"n=4": {"n": 4, "x": 1}}
    once = decomposition_table(table, labels, one, run.config).drop(columns="method")
    both = decomposition_table(twice, labels, {**one, "again": {"n": 4, "x": 2}}, run.config)
    pooled = both[both["setting"] == "all"]
    pd.testing.assert_frame_equal(once, pooled.drop(columns="method").reset_index(drop=True))
    assert pooled["method"].str.endswith("mean of each instance's rows").all()
    assert not both.loc[both["setting"] == "again", "method"].str.contains("instance").any()


def doubled(table: pd.DataFrame) -> pd.DataFrame:
    """Every row again under another setting: no new instance."""
    return pd.concat([table, table.assign(setting=table["setting"] + ", again")], ignore_index=True)


def test_no_interval_of_results_narrows_when_rows_repeat(run: Run) -> None:
    """An instance under two relations is one piece of evidence in every number that has an interval."""
    labels = ("yes", "no")
    readout, behaviour = (
        {arm: run.table(name, arm=arm) for arm in ("base", "grpo")} for name in ("readout", "behaviour")
    )
    tables = {name: run.table(name, arm="grpo") for name in ("patch", "heads", "ablate", "attribution")}
    once = {
        "compare": results.compare(behaviour, readout, "grpo", labels, run.config)["readout_original"],
        "patching": results.patching(tables["patch"], run.config),
        "ablation": results.ablation(tables["heads"], tables["ablate"], readout["grpo"], labels, run.config),
        "link": results.link(tables["attribution"]),
        "said": results.behaviour(behaviour["grpo"], readout["grpo"], run.config)["text_equals_readout"],
    }
    many = {name: doubled(table) for name, table in tables.items()}
    read, said = ({arm: doubled(table) for arm, table in of.items()} for of in (readout, behaviour))
    twice = {
        "compare": results.compare(said, read, "grpo", labels, run.config)["readout_original"],
        "patching": results.patching(many["patch"], run.config),
        "ablation": results.ablation(many["heads"], many["ablate"], read["grpo"], labels, run.config),
        "link": results.link(many["attribution"]),
        "said": results.behaviour(said["grpo"], read["grpo"], run.config)["text_equals_readout"],
    }
    assert len(ends(once)) > 100
    assert ends(twice) == pytest.approx(ends(once), nan_ok=True)
    n = {name: one["link"][0]["n"] for name, one in (("once", once), ("twice", twice))}
    assert n["twice"] == 2 * n["once"], "shares still count rows"


def ends(value: Any, path: str = "") -> dict[str, float]:
    """Every end of an interval in a tree of results, by its path."""
    value = results.plain(value)
    if isinstance(value, dict):
        return {k: v for name, one in value.items() for k, v in ends(one, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {k: v for at, one in enumerate(value) for k, v in ends(one, f"{path}/{at}").items()}
    last = [part for part in path.split("/") if not part.isdigit()][-1:]
    return {path: np.nan if value is None else value} if last and last[0].endswith(("low", "high")) else {}


def test_no_interval_of_a_component_or_lens_narrows_when_rows_repeat(run: Run) -> None:
    parts = {arm: run.table("contributions", arm=arm).drop(columns="arm") for arm in ("base", "grpo")}
    params = {one.label: one.params for one in settings(run.config, family("ordering"))}
    once = component_table(parts, ("yes", "no"), params, run.config)
    twice = component_table({arm: doubled(part) for arm, part in parts.items()}, ("yes", "no"), params, run.config)
    assert twice["method"].str.endswith("mean of each instance's rows").all()
    pd.testing.assert_frame_equal(once.drop(columns="method"), twice.drop(columns="method"))
    lens, split = run.table("lens", layer=3), run.table("decomposition", setting="all")
    assert list(lens["n"]) == list(split["n"])
    for name in ("delta", "delta_low", "signal", "signal_high"):
        assert lens[name].to_numpy() == pytest.approx(split[name].to_numpy(), abs=1e-4)


def test_shares_of_the_link_are_as_wide_as_their_instances(run: Run) -> None:
    found = json.loads((run.path / "results.json").read_text())["arms"]["base"]["link"]
    table = run.table("attribution", arm="base")
    for row in found:
        part = table[(table["outcome"] == row["outcome"]) & (table["correct"] == (row["answered"] == "right"))]
        asked = part[part["decodable"].notna()]
        one, instances = row["decodable"], asked["key"].nunique()
        assert (one["n"], one["count"]) == (len(asked), asked["decodable"].sum())
        if len(asked):
            low, high = proportion_confint(one["value"] * instances, instances, method="wilson")
            assert (one["low"], one["high"]) == pytest.approx((low, high), abs=1e-9)
        assert row["signal"]["lower_quartile"] <= row["signal"]["upper_quartile"] and "low" not in row["signal"]
    both = next(row for row in found if row["outcome"] == "R")
    assert "over" in both["decodable"]["method"], "both presentations of a pair are in"


def test_the_change_at_the_best_layer_has_the_p_of_all_layers(run: Run) -> None:
    change = run.table("probe_change", target="gold", presentation="original", trained="all")
    found = json.loads((run.path / "results.json").read_text())["arms"]["grpo"]["probes"]["original"]["change"]
    assert change["p_max"].nunique(dropna=False) == 1
    assert found["p_max"] == pytest.approx(change["p_max"].iloc[0]) and found["p_max"] >= 1 / 101
