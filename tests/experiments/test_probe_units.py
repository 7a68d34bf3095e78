"""Templates that folds hold out whole: how they are dealt, and what probes can then read of what was planted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from activations.store import StoreWriter
from experiments import fitting, items, probe_options, probe_tables, probe_targets, probe_units, probing
from experiments.config import load, settings
from experiments.errors import UsageError
from experiments.fitting import Curve, Material
from experiments.groups import groups
from experiments.inside import decomposition_table
from experiments.probe_targets import EVERY
from tasks.files import to_record
from tasks.registry import family
from tests.experiments.made_store import probe

MODALS = family("modals")
KINDS = ("original", "equivalent", "truth_negated", "follow_negated")
ASKED = ("names=letters", f"presentations={','.join(KINDS)}", "probe.target=validity,polarity",
         "probe.held_out=template", "probe.penalty=0.1", "probe.shuffles=25", "resamples=100")  # fmt: skip
Plant = Callable[[dict[str, np.ndarray], np.random.Generator], np.ndarray]


class Store:
    """Activations in memory, the same at both layers but for noise."""

    def __init__(self, rows: np.ndarray, rng: np.random.Generator) -> None:
        self.layers = [rows + 0.1 * rng.standard_normal(rows.shape) for _ in range(2)]

    def stack(self, site: str, layers: Any, rows: np.ndarray) -> np.ndarray:
        return np.stack([self.layers[layer][rows] for layer in layers])

    def read(self, site: str, layer: int, rows: np.ndarray) -> np.ndarray:
        return self.layers[0][rows]


def material(plant: Plant, *changed: str, limit: int = 80, readout: Any = None) -> Material:
    """Half of the sets valid and half invalid; `plant` makes activations [row, feature] of what is known of the rows."""
    config = load(None, [*ASKED, *changed], {"family": "modals", "model": "made-up", "limit": limit})
    grid = settings(config, MODALS)
    sets = islice(MODALS.generate(grid[0].params, seed=1, split="test"), limit)
    asked = items.rows([items.Item(grid[0].label, matched) for matched in sets])
    table = probe_units.with_template(items.frame(asked), asked)
    known = {target: probe_targets.labels(MODALS, target, asked) for target in ("validity", "polarity")}
    known |= {"template": table["template"].to_numpy(dtype=str), "gold": (table["gold"] == "yes").to_numpy(dtype=float)}
    rng = np.random.default_rng(0)
    acts = plant(
        {name: np.where(one == 1, 1.0, -1.0) if name != "template" else one for name, one in known.items()}, rng
    )
    sign = np.where(known["gold"] == 1, 1.0, -1.0)
    table["difference"] = (readout or (lambda sign, rng: 0.7 + 0.2 * sign + 0.3 * rng.standard_normal(len(sign))))(
        sign, rng
    )
    table = table.assign(yes=table["difference"], no=0.0, answer=table["gold"].astype("string"), correct=True)
    table = table.assign(**{probe_targets.column(name): known[name] for name in ("validity", "polarity")})
    return Material(
        stores={"base": Store(acts, rng)},  # type: ignore[dict-item]
        tables={"base": table}, tokens=[[1]] * len(table), params={grid[0].label: grid[0].params}, labels=("yes", "no"),
        layers=2, config=config, whole=config.probe.held_out is not None,
    )  # fmt: skip


def wording(known: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """What tells every template apart and nothing that valid ones share, and the polarity."""
    _, code = np.unique(known["template"], return_inverse=True)
    rows = rng.standard_normal((len(code), 40))
    return rows + 12 * np.eye(40)[code] + 3 * known["polarity"][:, None] * np.eye(40)[20]


def inference(known: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """The licensed answer in one direction, whatever the template."""
    return rng.standard_normal((len(known["gold"]), 12)) + 3 * known["gold"][:, None] * np.eye(12)[0]


def fitted(made: Material, target: str, presentation: str) -> Any:
    folds = probing._folds(made, made.tables["base"])
    one = fitting.fit_arm(made, Curve(target, presentation, groups(made.params)[0]), "base", folds)
    assert one.result is not None, one.reason
    return one


def test_units_are_dealt_whole_and_each_fold_has_both_labels() -> None:
    made = material(wording)
    shown = made.tables["base"].query("presentation == 'original'")
    units, gold = shown["template"].to_numpy(dtype=str), shown["gold"].to_numpy(dtype=str)
    dealt = probe_units.dealt(units, gold, folds=5, seed=1)
    label = dict(zip(units, gold, strict=True))
    assert len(dealt) == 15 and probe_units.fold_count(units, gold, folds=5) == 4  # four templates are invalid
    assert sorted(Counter(fold for unit, fold in dealt.items() if label[unit] == "no").values()) == [1, 1, 1, 1]
    assert sorted(Counter(fold for unit, fold in dealt.items() if label[unit] == "yes").values()) == [2, 3, 3, 3]
    assert probe_units.one_label(units, gold) == sorted(set(units))
    assert probe_units.dealt(units, gold, folds=2, seed=1).keys() == dealt.keys()


def test_curves_of_what_the_family_derives_are_over_every_presentation() -> None:
    made = material(wording)
    found = [(one.target, one.presentation) for one in fitting.curves(made.params, made.config)]
    assert found == [
        ("gold", "original"),
        ("gold", "equivalent"),
        ("gold", EVERY),
        ("validity", EVERY),
        ("polarity", EVERY),
    ]
    kept = material(wording, "presentations=original,equivalent", "probe.target=gold")
    assert [one.presentation for one in fitting.curves(kept.params, kept.config)] == ["original", "equivalent"]
    ordering = load(None, ["n=4", "probe.target=front_half"], {})
    grid = {one.label: one.params for one in settings(ordering, family("ordering"))}
    assert ("front_half", EVERY) in [(one.target, one.presentation) for one in fitting.curves(grid, ordering)]


def test_wording_that_tells_templates_apart_is_no_validity() -> None:
    """A probe whose folds hold out instances reads it off the words; where templates are held out, nothing is left."""
    by_instance = fitted(material(wording, "probe.held_out=null"), "validity", EVERY).result
    by_template = fitted(material(wording), "validity", EVERY).result
    assert by_instance.auroc.min() > 0.98 and by_instance.p_max < 0.05
    assert by_template.p_max > 0.05 and by_template.n_groups == 15
    polarity = fitted(material(wording), "polarity", EVERY).result
    assert polarity.auroc.min() > 0.98 and polarity.p_max < 0.05
    # Neither of the two is the licensed answer, which no sum of them gives in a balanced design.
    assert fitted(material(wording), "gold", EVERY).result.p_max > 0.05


def test_held_out_templates_by_another_implementation() -> None:
    one = fitted(material(inference), "gold", EVERY)
    table = material(inference).tables["base"].iloc[one.rows.place]
    store = material(inference).stores["base"]
    folds = pd.Series(one.result.folds)
    assert (folds.groupby(table["template"].to_numpy()).nunique() == 1).all()
    assert (one.rows.keys == table["template"]).all() and one.result.n == len(table) == 4 * 80
    areas = []
    for fold in range(4):
        held = one.result.folds == fold
        rows = store.stack("resid_post", [1], one.rows.place)[0]
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, tol=1e-8, max_iter=10_000))
        model.fit(rows[~held], one.rows.labels[~held])
        areas.append(roc_auc_score(one.rows.labels[held], model.decision_function(rows[held])))
    assert one.result.auroc[1] == pytest.approx(np.mean(areas), abs=1e-4)


def labels_of(made: Material) -> Counter[str]:
    """How failures of a run are labelled."""
    folds = probing._folds(made, made.tables["base"])
    readout = made.tables["base"]
    split = decomposition_table(readout, made.labels, made.params, made.config)
    curves = probe_tables.chunks(fitting.curves(made.params, made.config))[0]
    assert [one.presentation for one in curves] == ["original", "equivalent", EVERY]
    found = probe_tables.fit(made, curves, folds, {"base": split})
    failures = found["failures"]
    assert set(failures["presentation"]) == {"original", "equivalent"} and len(failures) == 160
    assert set(found["attribution_calibration"]["presentation"]) == {"original", "equivalent"}
    return Counter(failures["cause"])


def leaning(sign: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A readout that follows the licensed answer and says yes to nearly everything all the same."""
    return 1.0 + 0.8 * sign + 0.15 * rng.standard_normal(len(sign))


def deaf(sign: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same lean, and nothing of the answer."""
    return 0.5 + 0.5 * rng.standard_normal(len(sign))


def test_an_answer_bias_and_a_missing_inference_get_different_labels() -> None:
    """Readouts wrong for one reason or for the other; the probes hold out templates in both."""
    biased = labels_of(material(inference, readout=lambda sign, rng: leaning(sign, rng) - 0.25 * (sign > 0)))
    wrong = {label: count for label, count in biased.items() if label != "right"}
    assert sum(wrong.values()) >= 30 and wrong.get("overridden", 0) >= 0.8 * sum(wrong.values()), biased
    missing = labels_of(material(wording, readout=deaf))
    wrong = {label: count for label, count in missing.items() if label != "right"}
    assert sum(wrong.values()) >= 30 and wrong.get("overridden", 0) == 0, missing
    assert wrong.get("not_decodable", 0) >= 0.8 * sum(wrong.values()), missing


def test_default_and_signal_of_a_negated_question_are_balanced_over_its_own_gold_answers() -> None:
    made = material(inference, readout=lambda sign, rng: 0.4 + 1.5 * sign + 0.05 * rng.standard_normal(len(sign)))
    split = decomposition_table(made.tables["base"], made.labels, made.params, made.config).set_index("presentation")
    assert list(split.index) == list(KINDS)
    for kind in KINDS:
        shown = made.tables["base"].query("presentation == @kind")
        means = shown.groupby("gold")["difference"].mean()
        assert split.loc[kind, "delta"] == pytest.approx((means["yes"] + means["no"]) / 2)
        assert split.loc[kind, "signal"] == pytest.approx((means["yes"] - means["no"]) / 2)


def test_templates_are_checked_before_a_model_is_loaded() -> None:
    made = material(wording, "probe.penalty=0.1")
    shown = made.tables["base"].query("presentation == 'original'")
    probe_options.check_units(made.config.probe, made.params, shown)
    few = shown[shown["gold"].eq("yes") | shown["template"].eq("might_probably")]
    with pytest.raises(
        UsageError, match=r"all prompts of .* have one gold answer.*11 with yes, 1 with no|1 with no, 11"
    ):
        probe_options.check_units(made.config.probe, made.params, few)
    several = load(None, [*ASKED, "probe.penalty=0.1,1", "probe.inner_folds=4"], {"family": "modals", "model": "x"})
    with pytest.raises(UsageError, match=r"inner_folds is 4 .* dealt to 4 folds, .* at most 3"):
        probe_options.check_units(several.probe, made.params, shown)
    with pytest.raises(UsageError, match=r"unknown target 'mood'.*validity, polarity"):
        probe_targets.check(load(None, ["probe.target=mood"], {"family": "modals", "model": "x"}), MODALS)


def test_a_run_asks_the_pair_where_the_family_would_ask_all_its_forms() -> None:
    config = load(None, [], {"family": "modals", "model": "x"})
    assert items.for_pairs(config, MODALS).params["presentations"] == ["original", "equivalent"]
    items.check_presentations(MODALS, settings(items.for_pairs(config, MODALS), MODALS))
    chosen = load(None, [f"presentations={','.join(KINDS)}"], {"family": "modals", "model": "x"})
    assert items.for_pairs(chosen, MODALS) is chosen
    ordering = load(None, [], {})
    assert items.for_pairs(ordering, family("ordering")) is ordering


def modals_store(path: Path, plant: Plant) -> Path:
    """A store of planted activations with its items, as `probe capture` leaves it."""
    made = material(plant)
    sets = islice(MODALS.generate(next(iter(made.params.values())), seed=1, split="test"), 80)
    table = made.tables["base"]
    index = {"key": table["key"].tolist(), "presentation": table["presentation"].tolist(), "label": ["answer"] * len(table),
             "position": [1] * len(table), "n_tokens": [9] * len(table)}  # fmt: skip
    acts = made.stores["base"].stack("resid_post", [0, 1], np.arange(len(table)))
    with StoreWriter(
        path, datasets={("resid_post", layer): acts.shape[2] for layer in (0, 1)}, dtype="float32", n_layers=2,
        shards=[list(range(len(table)))], rows=index, content={"model": {"weights": "abc"}}, notes={"adapter": None},
    ) as writer:  # fmt: skip
        for shard in writer.missing:
            writer.write(shard, {("resid_post", layer): acts[layer].astype(np.float32) for layer in (0, 1)})
    records = [{"setting": table["setting"].iloc[0], **to_record(one, version=MODALS.version)} for one in sets]
    (path / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_probe_fit_reads_the_three_targets_with_templates_held_out(tmp_path: Path) -> None:
    about = ("--penalty", "0.1", "--shuffles", "25", "--resamples", "100", "--held-out", "template")
    every = ("--train", ",".join(KINDS))
    store = modals_store(tmp_path / "s", inference)

    def fit(*words: str) -> dict[str, Any]:
        code, out, err = probe("fit", store, *about, *words, "--json")
        assert code == 0, err
        return json.loads(out)

    gold = fit("--target", "gold", *every)["curves"][0]
    # Each template has both answers: a fold is a template.
    assert gold["auroc"] > 0.98 and gold["p_max"] < 0.05
    original = fit("--target", "gold", "--train", "original", "--read", "truth_negated")
    own, negated = original["curves"]
    assert "15 of them are dealt to 4 folds and count as the instances" in " ".join(original["notes"])
    # The licensed answer is one direction: the same probe reads it off negated questions, whose gold is the other one.
    assert own["instances"] == 15 and own["auroc"] > 0.98 and negated["auroc"] > 0.98
    validity = fit("--target", "validity", *every)["curves"][0]
    assert validity["instances"] == 15 and (validity["ones"], validity["zeros"]) == (11, 4) and validity["p_max"] > 0.05
    code, _, err = probe("fit", store, *about, "--target", "polarity", "--train", "original")
    assert code == 2 and "all 80 rows of original are polarity" in err
