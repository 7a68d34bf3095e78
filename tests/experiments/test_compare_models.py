"""`probe compare` over many runs: one table, trends over model size, figures, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open
from scipy.stats import permutation_test, spearmanr

from experiments.comparing import side
from experiments.comparing_models import compare_models, names_of, sizes_given
from experiments.errors import RunError, UsageError
from experiments.eval_config import other
from experiments.statistics import holm, size_trend
from tests.experiments.made_modals import SMALL, modals_run
from tests.experiments.made_store import probe

SIZES = {
    "tiny": 10_000_000,
    "small": 100_000_000,
    "middle": 1_000_000_000,
    "large": 10_000_000_000,
    "huge": 70_000_000_000,
}
SKILLS = {"tiny": 0.0, "small": 0.15, "middle": 0.1, "large": 0.3, "huge": 0.4}
LEANS = {"tiny": 0.3, "small": 0.25, "middle": -0.2, "large": 0.1, "huge": 0.0}
PAIRS = """
family: modals
table:
  rows: [arm, pair]
  pairs: [[original, correct], [original, truth_negated]]
  columns: [accuracy_original, accuracy_equivalent, invariance, kappa, mcnemar_p, mcnemar_p_holm]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    for number, name in enumerate(SIZES):
        made = {"skill": SKILLS[name], "lean": LEANS[name], "seed": number}
        modals_run(path / name, name, parameters=SIZES[name], **made)  # type: ignore[arg-type]
    return {name: path / name for name in SIZES}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "pairs.yaml"
    path.write_text(PAIRS)
    return path


def test_pairs_of_every_model_are_those_that_pandas_counts(runs: dict[str, Path], recipe: Path) -> None:
    found = compare_models([side(str(run)) for run in runs.values()], other(str(recipe)), resamples=100)
    assert found.table["arm"].drop_duplicates().tolist() == list(SIZES)
    for name, run in runs.items():
        wide = pd.read_parquet(run / "tables/behaviour.parquet").pivot(
            index="key", columns="presentation", values="answer"
        )
        for kind, changed in (("correct", False), ("truth_negated", True)):
            read = wide[["original", kind]].dropna()
            same = ((read["original"] == read[kind]) != changed).mean()
            row = found.table[(found.table["arm"] == name) & (found.table["pair"] == f"original/{kind}")].iloc[0]
            assert row["invariance"] == pytest.approx(same) and row["invariance_n"] == len(read)
    # Holm over all models and pairs of the table.
    expected = holm({str(place): p for place, p in enumerate(found.table["mcnemar_p"])})
    assert found.table["mcnemar_p_holm"].tolist() == pytest.approx(list(expected.values()), nan_ok=True)
    assert "Holm over 10 rows" in found.table["mcnemar_p_holm_method"].iloc[0]


def test_trends_are_those_of_scipy(runs: dict[str, Path], recipe: Path) -> None:
    found = compare_models([side(str(run)) for run in runs.values()], other(str(recipe)), resamples=100)
    assert found.sizes == SIZES
    # A p-value has no trend.
    assert set(found.trends["column"]) == {"accuracy_original", "accuracy_equivalent", "invariance", "kappa"}
    for _, one in found.trends.iterrows():
        values = found.table[found.table["pair"] == one["pair"]].set_index("arm")[one["column"]]
        expected = spearmanr([SIZES[name] for name in values.index], values)
        assert one["rho"] == pytest.approx(expected.statistic, nan_ok=True)
        if np.isfinite(one["rho"]):
            exact = permutation_test(
                (values.to_numpy(),), lambda drawn: spearmanr(list(SIZES.values()), drawn).statistic,
                permutation_type="pairings", n_resamples=10_000,
            )  # fmt: skip
            assert one["p"] == pytest.approx(exact.pvalue, abs=1e-9)
    assert (found.trends["p_holm"].dropna() >= found.trends["p"].dropna() - 1e-12).all()


def test_answers_of_every_model_with_a_figure(runs: dict[str, Path], tmp_path: Path) -> None:
    """The paper's Table 3 over five models: cells by hand from the behaviour tables."""
    code, out, err = probe("compare", *runs.values(), "--recipe", "modals-table-3", "--resamples", "100",
                           "--out", tmp_path / "t", "--json")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    table = pd.read_csv(tmp_path / "t/table.csv").set_index("arm")
    assert set(table.index) == set(SIZES) and len(found["rows"]) == 5
    for name, run in runs.items():
        answers = pd.read_parquet(run / "tables/behaviour.parquet")
        answers = answers[~answers["presentation"].isin(["not_correct", "not_valid"])]
        right = answers["correct"].groupby([answers["cell"], answers["presentation"].str.endswith("_negated")]).mean()
        cells = right["valid", False], right["valid", True], right["invalid", False], right["invalid", True]
        assert table.loc[name, ["v_aff", "v_neg", "i_aff", "i_neg"]].tolist() == pytest.approx(cells)
        assert table.loc[name, "floor"] == pytest.approx(min(cells[0] + cells[3], cells[1] + cells[2]) / 2)
    trend = {one["column"]: one for one in found["trends"]}["floor"]
    floors = [table.loc[name, "floor"] for name in SIZES]
    assert trend["rho"] == pytest.approx(spearmanr(list(SIZES.values()), floors).statistic) and trend["models"] == 5
    figure = ElementTree.parse(tmp_path / "t/figure.svg")
    text = "".join(figure.getroot().itertext())
    assert all(name in text for name in SIZES)


def test_a_figure_over_size_takes_the_sizes_that_are_given(runs: dict[str, Path], tmp_path: Path) -> None:
    old = modals_run(tmp_path / "old", "old", skill=0.2, seed=9).path
    three = (runs["tiny"], old, runs["huge"], "--recipe", "modals-figure-2", "--resamples", "100")
    code, _, err = probe("compare", *three)
    assert code == 2 and err == (
        "probe: the table or figure has n_parameters and that of old is not recorded: give --sizes old=NUMBER\n"
    )
    code, out, err = probe("compare", *three, "--sizes", "old=1.5B", "--out", tmp_path / "t", "--json")
    assert code == 0, err
    assert json.loads(out)["sizes"] == {"tiny": 1e7, "old": 1.5e9, "huge": 7e10}
    assert (tmp_path / "t/figure.svg").exists()


def test_a_trend_without_all_sizes_is_undefined_with_a_reason(
    runs: dict[str, Path], recipe: Path, tmp_path: Path
) -> None:
    old = modals_run(tmp_path / "old", "old", skill=0.2, seed=9).path
    sides = [side(str(run)) for run in (*runs.values(), old)]
    found = compare_models(sides, other(str(recipe)), resamples=100)
    assert found.trends[["rho", "low", "high", "p", "p_holm"]].isna().all(axis=None)
    assert set(found.trends["reason"]) == {"n_parameters of old is not recorded: give it with --sizes"}
    known = compare_models(sides, other(str(recipe)), sizes={"old": 3e9}, resamples=100)
    assert known.trends["rho"].notna().all() and (known.trends["models"] == 6).all()
    code, out, err = probe("compare", *runs.values(), old, "--recipe", recipe, "--resamples", "100")
    assert code == 0 and "over model size: n_parameters of old is not recorded" in out, err


def test_two_runs_are_compared_as_ever_and_more_without_a_recipe_by_the_first_ones_table(runs: dict[str, Path]) -> None:
    """Directional presentations take part: their answers are turned."""
    two = [runs["tiny"], runs["huge"]]
    code, out, err = probe("compare", *two, "--resamples", "100", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["notes"][-1] == "2 sets have no direct_negated and no part in what is said of it"
    assert found["pairs"]["original/direct_negated"]["accuracy_original"]["n"] == 28
    assert len(found["pairs"]) == 11 and set(found["tests"]) == {
        "original",
        *(one.split("/")[1] for one in found["pairs"]),
    }
    sides = [pd.read_parquet(run / "tables/behaviour.parquet") for run in two]
    for name, index in (("before", 0), ("after", 1)):
        wide = sides[index].pivot(index="key", columns="presentation", values="answer")[["original", "truth_negated"]]
        read = wide.dropna()
        changed = (read["original"] != read["truth_negated"]).mean()
        assert found["pairs"]["original/truth_negated"]["invariance"][name] == pytest.approx(changed)
    code, out, err = probe("compare", *two, runs["middle"], "--resamples", "100", "--json")
    assert code == 0, err
    many = json.loads(out)
    assert {row["arm"] for row in many["rows"]} == {"tiny", "huge", "middle"}
    assert {row["pair"] for row in many["rows"]} == {
        f"original/{kind}" for kind in ("correct", "valid", "follow", "direct")
    }


def damaged(runs: dict[str, Path], tmp_path: Path, change: str) -> Path:
    if change == "items":
        return modals_run(tmp_path / "bad", "bad", limit=20, params=SMALL).path
    if change == "settings":
        return modals_run(tmp_path / "bad", "bad", params=("names=letters", "activities=event", "resamples=100")).path
    folder = shutil.copytree(runs["small"], tmp_path / "bad")
    values = json.loads((folder / "resolved.json").read_text())
    values[change] = 0
    (folder / "resolved.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("items", ["different items", "fewer", "bad"]),
        ("settings", ["asked different things", ".activities", "party", "event", "bad"]),
        ("family_version", ["asked different things: family_version is 1 in ", "and 0 in", "bad"]),
        ("parser_version", ["parser version 1 in", "and 0 in", "bad", "probe score"]),
    ],
)
def test_runs_that_asked_something_else_are_refused_by_name(
    runs: dict[str, Path], tmp_path: Path, change: str, words: list[str]
) -> None:
    bad = damaged(runs, tmp_path, change)
    code, out, err = probe("compare", runs["tiny"], runs["huge"], bad, "--recipe", "modals-table-3")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "Traceback" not in err
    if change == "items":
        assert "different items" in err and "bad" in err
    else:
        assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--recipe", "table-12"), "table-12 is a table about ordering, and "),
        (("--recipe", "modals-table-99"), "modals-table-99"),
        (("--strata", "names"), "--strata is 'names', which is about the differences of two runs"),
        (("--sizes", "giant=3B"), "--sizes names 'giant': the models are tiny, huge, small"),
        (("--sizes", "tiny=-1"), "--sizes has 'tiny=-1': give name=number"),
        (("--sizes", "tiny=135MM"), "--sizes has 'tiny=135MM': give name=number"),
        (("--sizes", "tiny=1B,tiny=2B"), "--sizes names tiny twice"),
        (("--out", ""), "out is empty: give a path"),
    ],
)
def test_what_cannot_apply_is_refused_in_a_line(runs: dict[str, Path], words: tuple[str, ...], said: str) -> None:
    code, out, err = probe("compare", runs["tiny"], runs["huge"], runs["small"], *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err, err


def test_what_belongs_to_many_runs_is_refused_of_two(runs: dict[str, Path], tmp_path: Path) -> None:
    two = (runs["tiny"], runs["huge"])
    code, _, err = probe("compare", *two, "--out", tmp_path / "t")
    assert code == 2 and "--out belongs to a table over models" in err
    code, _, err = probe("compare", runs["tiny"])
    assert code == 2 and "1 run is no comparison" in err
    code, _, err = probe("compare", *two, "--recipe", "modals-table-3", "--out", runs["tiny"], "--resamples", "100")
    assert code == 2 and "which is a run's folder" in err
    with pytest.raises(UsageError, match="is given twice"):
        names_of([side(str(runs["tiny"]))] * 2)
    link = tmp_path / "link"
    link.symlink_to(runs["tiny"])
    with pytest.raises(UsageError, match="is given twice"):
        names_of([side(str(runs["tiny"])), side(str(link))])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("environment.json", {"model": None}),
        ("environment.json", {"model": {"n_parameters": -5}}),
        ("resolved.json", {"table": {"of": "answers", "columns": ["foo"]}}),
    ],
)
def test_a_damaged_run_is_named(runs: dict[str, Path], tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    bad = shutil.copytree(runs["tiny"], tmp_path / "bad")
    (bad / name).write_text(json.dumps({**json.loads((bad / name).read_text()), **change}))
    code, out, err = probe("compare", bad, runs["huge"], runs["small"])
    assert (code, out) == (1, "") and err.count("\n") == 1 and f"bad/{name} is damaged" in err, err


def test_models_of_one_name_are_called_by_their_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    again = [shutil.copytree(runs["tiny"], tmp_path / name) for name in ("first", "second")]
    assert names_of([side(str(one)) for one in (*again, runs["huge"])]) == ["first", "second", "huge"]
    with pytest.raises(RunError, match="fewer answers"):
        table = pd.read_parquet(again[0] / "tables/behaviour.parquet")
        table[table["presentation"] != "direct"].to_parquet(again[0] / "tables/behaviour.parquet")
        compare_models([side(str(one)) for one in (*again, runs["huge"])], other("modals-table-3"), resamples=100)


def test_sizes_are_read_with_their_units() -> None:
    assert sizes_given("a=135M,b:x=1.5b,c=7e9") == {"a": 135e6, "b:x": 1.5e9, "c": 7e9}
    assert sizes_given(None) == {}


def test_intervals_of_a_trend_cover_as_often_as_they_say() -> None:
    """Bonett and Wright's interval for ρ of a bivariate normal, whose rank correlation is known."""
    rng, correlation, n = np.random.default_rng(0), 0.6, 25
    truth = 6 / math.pi * math.asin(correlation / 2)
    covered = []
    for _ in range(400):
        one, noise = rng.standard_normal((2, n))
        found = size_trend(one.tolist(), (correlation * one + math.sqrt(1 - correlation**2) * noise).tolist())
        covered.append(found.low <= truth <= found.high)
    assert 0.91 <= np.mean(covered) <= 0.985
    few, straight = size_trend([1, 2, 3], [1, 3, 2]), size_trend([1, 2, 3, 4, 5], [2, 3, 4, 5, 6])
    assert math.isnan(few.low) and few.reason == "no interval: 3 models" and few.rho == pytest.approx(0.5)
    assert (
        math.isnan(straight.high) and straight.reason == "no interval: ρ is +1" and straight.p == pytest.approx(2 / 120)
    )


def test_a_run_records_how_many_parameters_its_base_has(tmp_path: Path) -> None:
    """Counted in the file of weights, without the adapter that the run loads too."""
    code, _, err = probe("eval", "--set", "n=4", "--limit", "4", "--set", "resamples=100", "--out", tmp_path / "run")
    assert code == 0, err
    recorded = json.loads((tmp_path / "run/environment.json").read_text())["model"]["n_parameters"]
    with safe_open(
        Path(__file__).parents[2] / "activations/builtin/base/model.safetensors", framework="numpy"
    ) as weights:
        assert recorded == sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    again = probe("eval", "--set", "n=4", "--limit", "4", "--set", "resamples=100", "--out", tmp_path / "run")
    assert again[0] == 0, "a resumed run meets the identity it recorded"
