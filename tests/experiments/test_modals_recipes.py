"""Recipes about probability operators: each makes its table and figure, `probe score` too, and versions are kept apart."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from experiments import behaviour, items, recipes
from experiments.answer_columns import ANSWER_COLUMNS
from experiments.answer_figures import AnswerFigureSpec
from experiments.answer_tables import AnswerTableSpec
from experiments.cli import app
from experiments.config import resolved, settings
from experiments.errors import RunError, UsageError
from experiments.eval_config import EvalConfig, check, load_eval, other, pairs_of, table_of
from experiments.evaluation import check_facts, conclude, drawn_figure, made_table
from experiments.rundir import RunDirectory, append_lines, opened
from experiments.scoring import score
from experiments.tables import show_table
from tasks.registry import family as family_named
from tests.experiments.made_answers import made

NAMES = [name for name in recipes.names("eval") if name.startswith("modals-")]
DOCS = Path(__file__).parents[2] / "docs"
ARMS = ("base", "large", "small")
FIVE = {"presentation": ("not_correct", "not_valid")}
# What each table of the paper shows: row keys, columns, and what stands at the end.
SHOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "modals-table-3": (("arm",), ("accuracy", "uncertain", "v_aff", "v_neg", "i_aff", "i_neg", "bias",
                                  "polarity_sensitivity", "floor", "affirmative_floor"), ()),
    "modals-table-4": (("form",), ("accuracy_affirmative", "accuracy_negated", "accuracy_drop"), ()),
    "modals-table-5": (("arm", "form"), ("accuracy",), ("range", "range_p", "floor")),
    "modals-table-6": (("arm",), ("prefix_accuracy", "not_accuracy", "prefix_gain", "prefix_p_holm", "prefix_yes_rate",
                                  "not_yes_rate", "matched_pairs"), ()),
    "modals-table-7": (("arm", "activity"), ("accuracy",), ("range", "range_p")),
    "modals-table-8": (("arm", "group"), ("difference", "difference_p_holm"), ("largest_difference",)),
    "modals-table-9": (("arm", "gender"), ("difference", "difference_p_holm"), ("largest_difference",)),
    "modals-table-11": (("pattern", "arm", "template"), ("accuracy", "difference", "difference_p_holm"), ()),
    "modals-table-12": (("validity", "pattern"), ("accuracy", "mean_lean", "mean_polarity_sensitivity", "agreement"), ()),
    "modals-table-13": (("series", "n_parameters", "arm"),
                        ("accuracy", "abs_bias", "polarity_sensitivity", "uncertain"), ()),
    "modals-table-14": (("arm",), ("pooled_micro", "pooled_prompt", "pooled_template", "pooled_frame", "pooled_cell",
                                   "pooled_spread"), ()),
}  # fmt: skip
# Two activities and two groups of names beside the letters are asked here.
ROWS = {"modals-table-4": 5, "modals-table-5": 15, "modals-table-7": 6, "modals-table-8": 6, "modals-table-9": 6,
        "modals-table-11": 12, "modals-table-12": 13, "modals-figure-3": 15, "modals-heat-map": 45}  # fmt: skip
KNOWN = {arm: {"model": arm, "series": "s", "n_parameters": 10**8 * 4**place} for place, arm in enumerate(ARMS)}


@cache
def loaded(name: str) -> EvalConfig:
    return load_eval(name, ("resamples=100",), {"model": "made-up"})


@cache
def answered(params: str) -> Any:
    fewer = {"names": ["letters", "indian_women", "german_men"], "activities": ["party", "event"]}
    return made({**json.loads(params), **fewer}, arms=ARMS)


@cache
def tables(name: str) -> tuple[Any, Any, pd.DataFrame]:
    config = loaded(name)
    table, facts, of_setting = answered(json.dumps(config.params))
    spec = table_of(config, [])
    return spec, (table, facts, of_setting), made_table(table, of_setting, spec, facts, KNOWN, seed=1, resamples=100)


def test_there_is_one_for_each_table_and_figure() -> None:
    figures = ["modals-figure-1", "modals-figure-2", "modals-figure-3"]
    assert [*SHOWN, *figures, "modals-core", "modals-heat-map", "modals-uncontested"] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_asks_and_asks_the_whole_grid(name: str) -> None:
    text, config = recipes.path(name).read_text(), loaded(name)
    assert recipes.describe(name).endswith("?") and "# Departs: " in text
    assert max(map(len, text.splitlines())) <= 120
    assert set(yaml.safe_load(text)) <= set(EvalConfig.model_fields) - {"model", "adapter"}
    grid = settings(config, family_named("modals"))
    check(config, grid)
    assert config.limit == "all" and config.seed == 1 and config.split == "test" and len(grid) == 1
    assert f"`{name}`" in (DOCS / "recipes.md").read_text()
    if name in SHOWN:
        spec = config.table
        assert isinstance(spec, AnswerTableSpec)
        assert (spec.rows, spec.columns, spec.beside) == SHOWN[name]
    if "table-6" not in name and "table-11" not in name and "heat" not in name:
        assert config.table is not None and config.table.without == FIVE


@pytest.mark.parametrize("name", NAMES)
def test_makes_its_table_and_its_figure(name: str) -> None:
    spec, (table, facts, params), found = tables(name)
    assert len(found) == ROWS.get(name, len(ARMS))
    assert not found[list(spec.columns)].isna().all(axis=None)
    drawn = show_table(found, spec)
    assert drawn.row_count > 0
    figure = loaded(name).figure
    assert (figure is not None) == ("figure" in name or name in ("modals-table-3", "modals-heat-map"))
    if figure is not None:
        frame = made_table(table, params, figure.table(), facts, KNOWN, seed=1, resamples=100)
        svg = ElementTree.fromstring(drawn_figure(frame, figure))
        assert figure.title in "".join(svg.itertext())


def test_the_main_table_is_what_pandas_says() -> None:
    _, (table, facts, _), found = tables("modals-table-3")
    whole = table.merge(facts.table, on=["setting", "key", "presentation"])
    whole = whole[~whole["presentation"].isin(FIVE["presentation"])]
    assert len(whole) == 149 * 8 * len(ARMS)  # 15 × 10 − 1 questions, four name sets at two activities
    for arm, part in whole.groupby("arm"):
        cell = part.groupby(["validity", "polarity"])["correct"].mean()
        yes = (cell["valid", "affirmative"] + cell["invalid", "negated"]) / 2
        no = (cell["valid", "negated"] + cell["invalid", "affirmative"]) / 2
        row = found.set_index("arm").loc[arm]
        assert row["accuracy"] == pytest.approx(part["correct"].mean())
        assert row["bias"] == pytest.approx(yes - no) and row["floor"] == pytest.approx(min(yes, no))
    assert found["floor"].is_monotonic_decreasing


def test_letters_count_as_one_reference_and_wordings_are_matched() -> None:
    _, (table, facts, _), found = tables("modals-table-9")
    whole = table.merge(facts.table, on=["setting", "key", "presentation"])
    whole = whole[~whole["presentation"].isin(FIVE["presentation"])]
    who = whole["gender"].where(~whole["gender"].isin(["first", "second"]), "letters")
    means = whole.groupby(["arm", "template", "activity", who])["correct"].mean().unstack()
    for row in found.to_dict("records"):
        one = means.loc[row["arm"]]
        assert row["difference"] == pytest.approx((one[row["gender"]] - one["letters"]).mean())
    assert set(found["gender"]) == {"women", "men"}
    worded = tables("modals-table-11")[2]
    compared = worded[worded["difference"].notna()]
    assert set(compared["template"]) == {"conjunctivitis_people", "distribution_first"} and len(compared) == 6
    by = worded.pivot(index=["pattern", "arm"], columns="template", values="accuracy")
    people = compared[compared["pattern"] == "conjunctivitis"].set_index("arm")["difference"]
    one = by.loc["conjunctivitis"]
    expected = one["conjunctivitis_people"] - one["conjunctivitis_activities"]
    pd.testing.assert_series_equal(people.sort_index(), expected.sort_index(), check_names=False)


# --- through the commands, from a run made without a model -----------------------------------------------------------


def run_of(path: Path, name: str, said: str = "Yes") -> RunDirectory:
    """A finished run whose every answer is the same."""
    config = load_eval(name, ("resamples=100", "activities=party", "names=letters"), {"model": "made-up"})
    family = family_named("modals")
    grid = settings(config, family)
    with opened(path, resolved(config, family, grid), "") as run:
        items.make(run, config, family, grid, pairs_of(config, grid))
        asked = [row for _, some in items.stored(run) for row in items.rows(some)]
        append_lines(run.responses, [
            json.dumps({"arm": "base", "setting": row.setting, "key": row.matched.instance.key,
                        "presentation": row.presentation.kind, "text": said, "finish_reason": "stop",
                        "prompt_opened_think": False, "n_prompt_tokens": 9, "n_tokens": 1}) + "\n"
            for row in asked
        ])  # fmt: skip
        table = behaviour.table(behaviour.by_identity(behaviour.responses(run)), family, asked, ["base"])
        run.write_table("behaviour", table)
        conclude(run, table, {one.label: one.params for one in grid}, config, table_of(config, grid))
    return run


def test_one_run_answers_every_recipe_and_an_unknown_row_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "modals-table-3")
    found = json.loads((run.path / "results.json").read_text())
    (row,) = found["table"]["rows"]
    assert (row["v_aff"], row["v_neg"], row["i_aff"], row["i_neg"], row["bias"], row["floor"]) == (1, 0, 0, 1, 1, 0)
    assert row["bias_low"] is None and "no resample" in row["bias_reason"]
    assert len(pd.read_csv(run.path / "table.csv")) == 1
    ElementTree.fromstring((run.path / "figure.svg").read_text())
    # Sets stand in pairs too: forms that keep the gold answer always agree here.
    assert found["pairs"]["original/follow"]["base"]["profile"]["all"]["invariance"]["value"] == 1
    result = CliRunner().invoke(app, ["score", str(run.path), "--table", "modals-heat-map"])
    assert result.exit_code == 0 and "conjunctivitis_people" in result.stdout, result.output
    assert {file.name for file in run.path.glob("modals-*")} == {"modals-heat-map.csv", "modals-heat-map.svg"}
    size = score(run.path, other("modals-table-13")).other
    assert size is not None and size["rows"][0]["n_parameters"] == "unknown"
    bad = load_eval("modals-table-3", ("table.rows=[tempalte]",), {"model": "made-up"})
    with pytest.raises(UsageError, match="did you mean template"):
        check_facts(run, [table_of(bad, [])], {})


def test_answers_to_another_version_are_refused_by_name(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "modals-table-4", "No")
    config = other("modals-table-3")
    lines = run.items.read_text().splitlines()
    changed = json.loads(lines[3]) | {"version": 99}
    run.items.write_text("\n".join([*lines[:3], json.dumps(changed), *lines[4:]]) + "\n")
    with pytest.raises(RunError, match=r"items\.jsonl was made with version 99 of modals and this is version 1"):
        score(run.path, config)
    run.items.write_text("\n".join(lines) + "\n")
    values = json.loads((run.path / "resolved.json").read_text())
    (run.path / "resolved.json").write_text(json.dumps({**values, "family_version": 99}))
    with pytest.raises(RunError, match="version 99 of modals"):
        check_facts(run, [table_of(config[1], [])], {})
    result = CliRunner().invoke(app, ["score", str(run.path), "--table", "modals-table-3"])
    assert result.exit_code != 0 and result.exception is not None


def test_all_is_for_families_that_end(tmp_path: Path) -> None:
    endless = load_eval("table-12", ("limit=all",), {"model": "made-up"})
    with pytest.raises(UsageError, match="limit is all, but ordering draws sets without end"):
        check(endless, settings(endless, family_named("ordering")))


def test_the_page_lists_every_column_of_answers_and_its_example_is_a_configuration() -> None:
    page = (DOCS / "recipes.md").read_text()
    for name in ANSWER_COLUMNS:
        assert f"`{name}`" in page, name
    text = page.split("```yaml\n")[2].split("```")[0]
    config = EvalConfig(model="made-up", **yaml.safe_load(text))
    assert isinstance(config.table, AnswerTableSpec) and config.table.beside == ("range", "range_p")
    assert isinstance(config.figure, AnswerFigureSpec) and config.figure.kind == "points"
