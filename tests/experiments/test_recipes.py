"""Recipes: each is a configuration that the family takes, and prints the numbers that its table is known for."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

from experiments import recipes
from experiments.config import Setting, settings
from experiments.errors import UsageError
from experiments.eval_config import EvalConfig, check, load_eval
from experiments.figures import draw
from experiments.tables import COLUMNS, TableSpec, make_table, show_table
from tasks.registry import family
from tests.experiments.made_behaviour import behaviour

# Those of paper 002 are about answers, not pairs, and stand in test_modals_recipes.py.
NAMES = [name for name in recipes.names("eval") if not name.startswith("modals-")]
DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
ARMS = ("base", "grpo")
ACCURACIES = ("accuracy_original", "accuracy_equivalent")
# What the paper's table or figure shows: sizes, pairs a size, row keys beside the arm, columns in its order.
UP_TO_1024, UP_TO_2048 = [2**power for power in range(2, 11)], [2**power for power in range(2, 12)]
SHOWN: dict[str, tuple[list[int], int, set[str], Sequence[str]]] = {
    "table-1": (UP_TO_1024, 200, {"relation"}, (*ACCURACIES, "invariance", "robust", "kappa_bar")),
    "table-2": (UP_TO_1024, 200, {"prompt"},
                (*ACCURACIES, "invariance", "kappa_bar", "tokens_original", "tokens_equivalent")),
    "table-4": (UP_TO_1024[:6], 200, set(), ("common_accuracy_original", "common_accuracy_equivalent", "invariance",
                                            "kappa_bar", "robust", "shared_wrong", "unstable")),
    "table-5": (UP_TO_1024[:6], 200, {"n"}, ("robust", "shared_wrong", "unstable", "kappa")),
    "table-9": (UP_TO_1024, 200, {"pair"}, ("accuracy_equivalent", "invariance", "accuracy_original")),
    "table-10-distractors": (UP_TO_1024[:7], 200, {"rho"}, ("invariance",)),
    "table-10-negation": (UP_TO_1024[:7], 200, {"pair"}, ("invariance",)),
    "table-12": (UP_TO_1024, 200, {"n"}, (*ACCURACIES, "invariance")),
    "table-13": (UP_TO_2048, 400, set(), (*ACCURACIES, "gap", "invariance")),
    "table-14": (UP_TO_2048, 400, set(), ("b", "c", "gap", "mcnemar_p", "mcnemar_p_holm")),
    "table-15": (UP_TO_2048, 400, {"n"}, ("invariance",)),
    "table-16": (UP_TO_2048, 400, set(), (*ACCURACIES, "mean_accuracy", "gap", "invariance")),
    "table-17": (UP_TO_2048, 400, {"names_order"}, (*ACCURACIES, "invariance")),
    "table-18": (UP_TO_2048[:5], 400, set(), (*ACCURACIES, "gap", "invariance")),
    "table-21": (UP_TO_1024, 200, set(), ("invariance", "repeat", "invariance_minus_repeat")),
    "table-22": (UP_TO_1024, 200, set(), ("invariance", "repeat", "invariance_minus_repeat")),
    "figure-2": (UP_TO_1024, 200, {"n"}, ("common_mean_accuracy", "invariance", "robust")),
    "figure-3": (UP_TO_1024, 200, {"n", "prompt"}, (*ACCURACIES, "invariance")),
    "figure-4": (UP_TO_1024, 200, {"n"}, ("mean_accuracy", "invariance", "kappa")),
    "figure-6": (UP_TO_1024, 200, {"n", "prompt"}, (*ACCURACIES, "invariance", "repeat", "kappa")),
    "figure-7": (UP_TO_1024, 200, {"n", "relation"}, ("kappa",)),
    "figure-8": (UP_TO_2048, 400, {"n"}, ("invariance",)),
}  # fmt: skip


@cache
def loaded(name: str) -> EvalConfig:
    return load_eval(name, ("resamples=100",), {"model": "made-up"})


@cache
def grid(name: str) -> list[Setting]:
    return settings(loaded(name), family(loaded(name).family))


@cache
def answered(name: str) -> pd.DataFrame:
    return behaviour(params(name), arms=ARMS, limit=12, seed=len(name))


@cache
def made(name: str) -> pd.DataFrame:
    spec = loaded(name).table
    assert spec is not None
    return make_table(answered(name), params(name), spec, seed=1, resamples=100)


def params(name: str) -> dict[str, Any]:
    return {setting.label: setting.params for setting in grid(name)}


def test_there_is_one_for_each_table_and_figure() -> None:
    assert list(SHOWN) == NAMES
    assert recipes.path("table-1").name == "table-1.yaml"
    with pytest.raises(UsageError, match="did you mean table-12"):
        recipes.path("tabel-12")


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_asks_and_leaves_the_model_open(name: str) -> None:
    text = recipes.path(name).read_text()
    comment = [line for line in text.splitlines() if line.startswith("#")]
    assert text.startswith(comment[0]) and any(line.startswith("# Departs: ") for line in comment)
    assert recipes.describe(name).endswith("?") and len(recipes.describe(name)) < 200
    assert max(map(len, text.splitlines())) <= 120
    keys = yaml.safe_load(text)
    assert set(keys) <= set(EvalConfig.model_fields) - {"model", "adapter"}


@pytest.mark.parametrize("name", NAMES)
def test_asks_what_the_paper_asked(name: str) -> None:
    sizes, limit, rows, columns = SHOWN[name]
    config = loaded(name)
    table = config.table
    assert table is not None
    check(config, grid(name))
    assert config.params["n"] == sizes and config.limit == limit and config.seed == 1 and config.split == "test"
    assert config.max_tokens == 20
    assert set(table.rows) == rows | {"arm"}
    assert [column for column in table.columns if column in columns] == list(columns)
    expected = "horn" if name in ("table-4", "table-5") else "ordering"
    assert config.family == expected
    if expected == "ordering":
        late = (
            name in ("table-2", "figure-3", "figure-6")
            or "table-10" in name
            or max(sizes) == 2048
            or name == "table-18"
        )
        assert config.params["protocol"] == ("L" if late else "P")
    if "repeat" in config.params["presentations"]:
        assert config.temperature > 0, "at temperature 0 a repeat agrees by construction"
    assert config.resamples == 100 and EvalConfig(**yaml.safe_load(recipes.path(name).read_text())).resamples == (
        10_000 if name == "table-14" else 2000
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_family_renders_all_that_is_compared(name: str) -> None:
    table = loaded(name).table
    assert table is not None
    smallest = grid(name)[0]
    matched = next(iter(family(loaded(name).family).generate(smallest.params, seed=1, split="test")))
    for pair in table.pairs:
        assert matched[pair[0]].gold == matched[pair[1]].gold


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_answers(name: str) -> None:
    config, table = loaded(name), answered(name)
    spec = config.table
    assert spec is not None
    found = made(name)
    swept = [len({str(one.params[row]) for one in grid(name)}) for row in spec.rows if row in grid(name)[0].params]
    lines = len(ARMS) * (len(spec.pairs) if "pair" in spec.rows else 1)
    for count in swept:
        lines *= count
    assert len(found) == (8 if name == "table-10-distractors" else lines)
    table = table.astype({"answer": object}).assign(
        **{row: table["setting"].map({label: values[row] for label, values in params(name).items()})
           for row in spec.rows if row in grid(name)[0].params}
    )  # fmt: skip
    for row in found.to_dict("records"):
        first, second = row["pair"].split("/") if "pair" in row else spec.pairs[-1 if row.get("rho") else 0]
        here = table
        for key in spec.rows:
            if key != "pair" and not (key == "rho" and row[key] == 0):
                here = here[here[key] == row[key]]
        if row.get("rho") == 0:
            here = here[here["rho"] == 0.5]
        index = ["setting", "key"]
        one, two = (here[here["presentation"] == kind].set_index(index) for kind in (first, second))
        two = two.loc[one.index]
        both = one["answer"].notna() & two["answer"].notna()
        same, right, right_two = (one["answer"] == two["answer"])[both], one["correct"], two["correct"]
        expected = {
            "accuracy_original": right.mean(),
            "accuracy_equivalent": right_two.mean(),
            "gap": right.mean() - right_two.mean(),
            "mean_accuracy": (right.mean() + right_two.mean()) / 2,
            "common_mean_accuracy": (right[both].mean() + right_two[both].mean()) / 2,
            "invariance": same.mean(),
            "robust": (right & right_two)[both].mean(),
            "shared_wrong": (~right & ~right_two)[both].mean(),
            "unstable": (right ^ right_two)[both].mean(),
            "b": (right & ~right_two).sum(),
            "c": (~right & right_two).sum(),
            "tokens_equivalent": two["n_tokens"].mean(),
        }
        checked = set(expected) & set(spec.columns)
        assert checked or spec.columns == ("kappa",)
        for column in checked:
            assert row[column] == pytest.approx(expected[column]), column


@pytest.mark.parametrize("name", NAMES)
def test_prints_every_column_and_draws_its_figure(name: str) -> None:
    config = loaded(name)
    spec = config.table
    assert spec is not None
    console = Console(file=io.StringIO(), width=200)
    console.print(show_table(made(name), spec))
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert all(arm in text for arm in ARMS) and spec.title in text
    if spec.across is None:
        assert all(COLUMNS[column].label in text for column in spec.columns)
    assert (config.figure is not None) == name.startswith("figure")
    if config.figure is not None:
        drawn = make_table(answered(name), params(name), config.figure.table(), seed=1, resamples=100)
        svg = ElementTree.fromstring(draw(drawn, config.figure))
        assert config.figure.title in "".join(svg.itertext())


def test_a_recipe_can_be_cut_down_from_the_command_line() -> None:
    words = ("n=4,8", "limit=50", "temperature=0", "top_p=null", "top_k=null")
    config = load_eval("table-12", words, {"model": "made-up"})
    check(config, settings(config, family("ordering")))
    assert config.params["n"] == [4, 8] and config.limit == 50 and config.temperature == 0
    assert config.table == loaded("table-12").table
    one = load_eval("table-2", ("n=2048",), {"model": "made-up"})
    assert [setting.params["n"] for setting in settings(one, family("ordering"))] == [2048, 2048]


def test_the_page_lists_every_recipe_and_column() -> None:
    page = DOCS.read_text()
    for name in NAMES:
        assert f"`{name}`" in page, name
    for name in COLUMNS:
        stem = name.removesuffix("_original").removesuffix("_equivalent")
        assert f"`{name}`" in page or f"`{stem}_*`" in page, name
    example = page.split("```yaml\n")[1].split("```")[0]
    assert TableSpec(**yaml.safe_load(example)["table"]).rows == ("relation", "arm")
