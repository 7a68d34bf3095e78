"""Recipes of ``probe run``: each is a configuration of the right command, for the built-in pair and for other models."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from experiments import recipes, run_table
from experiments.config import Config, RunTable, load, settings
from experiments.errors import UsageError
from experiments.eval_config import load_eval
from experiments.groups import grouped
from experiments.pipeline import _check as check
from tasks.registry import family

NAMES = recipes.names("run")
BUILTIN = ["n=4,6,8", "relation=front_behind"]
ROOT = Path(__file__).parents[2]


ORDERING = tuple(name for name in NAMES if name != "modals-inside")


def loaded(name: str, *pairs: str, **flags: object) -> Config:
    config = load(name, list(pairs), flags)
    check(config, settings(config, family(config.family)))
    return config


def test_there_is_one_for_each_question_about_the_inside() -> None:
    assert set(NAMES) == {"table-11", "figure-5", "probe-complexity", "signal-change", "modals-inside"}
    assert not set(NAMES) & set(recipes.names("eval"))
    each = [set(recipes.names(command)) for command in ("run", "eval", "patch", "ablate")]
    assert set(recipes.names()) == set.union(*each) and len(recipes.names()) == sum(map(len, each))


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_asks_and_how_it_departs(name: str) -> None:
    text = recipes.path(name).read_text()
    assert recipes.describe(name).endswith("?")
    assert "# Departs:" in text and "smollm2" in text
    assert "The built-in pair" in text or "The built-in model does not know the words" in text
    assert text.count("command: run") == 1 and recipes.command(name) == "run"


@pytest.mark.parametrize("name", ORDERING)
def test_each_fits_the_built_in_pair_and_another_model(name: str) -> None:
    config = loaded(name, *BUILTIN)
    grid = settings(config, family("ordering"))
    assert [setting.params["names"] for setting in grid] == ["builtin"] * 3
    assert config.adapter == ("builtin",)
    other = loaded(name, "n=4,8", model="made-up")
    assert other.adapter == () and settings(other, family("ordering"))[0].params["names"] == "default"
    assert other.params["protocol"] == "P" and other.seed == 1


def test_table_11_is_about_relations_up_to_32_with_200_pairs_each() -> None:
    config = loaded("table-11", model="made-up")
    grid = settings(config, family("ordering"))
    params = {setting.label: setting.params for setting in grid}
    rows = grouped(params, config.table.rows)
    assert len(rows) == 6 and all(len(one.settings) * config.limit == 200 for one in rows)
    assert max(one["n"] for one in params.values()) == 32
    assert config.table.columns == ("accuracy", "yes_rate", "delta", "signal", "first_layer")


def test_the_paper_s_complexity_levels() -> None:
    config = loaded("probe-complexity", model="made-up")
    assert (config.params["n"], config.limit) == ([16, 64, 256], 30)


def test_the_one_about_probability_operators_is_balanced_and_holds_out_templates() -> None:
    """Of as many valid sets as invalid ones, so that the polarity of a question says nothing of its answer."""
    config = loaded("modals-inside", model="made-up")
    (setting,) = settings(config, family("modals"))
    sets = list(islice(family("modals").generate(setting.params, seed=config.seed, split="test"), config.limit))
    assert Counter(one.instance.cell for one in sets) == {"valid": 16, "invalid": 16}
    assert len({one.instance.latent["template"] for one in sets}) == 15
    polarities = Counter((shown.meta["polarity"], shown.gold) for one in sets for shown in one.presentations)
    assert set(polarities.values()) == {32}
    assert config.probe.target == ("gold", "validity", "polarity") and config.probe.held_out == "template"


def test_a_recipe_of_the_other_command_is_refused_with_the_right_one() -> None:
    with pytest.raises(UsageError, match=r"table-11 is for `probe run`, not `probe eval`: give `probe run table-11`"):
        load_eval("table-11", (), {})
    with pytest.raises(UsageError, match=r"table-12 is for `probe eval`, not `probe run`: give `probe eval table-12`"):
        load("table-12", [], {})
    with pytest.raises(UsageError, match=r"no recipe and no file is called .table-99.: .* table-11, figure-5"):
        load("table-99", [], {})


def test_a_file_may_say_its_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("command: run\nlimit: 12\n")
    assert load(str(file), [], {}).limit == 12
    with pytest.raises(UsageError, match=r"mine\.yaml is for `probe run`, not `probe eval`"):
        load_eval(str(file), (), {})


def test_the_list_names_the_command() -> None:
    words = [sys.executable, "-c", "from experiments.cli import main; main()", "recipes"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    # A line that begins with a space goes on from the one above, where the terminal is narrow.
    lines = {line.split()[1]: line.split()[0] for line in text.splitlines() if not line.startswith(" ")}
    assert lines["table-11"] == "run" and lines["table-12"] == "eval" and len(lines) == len(recipes.names())
    found = json.loads(subprocess.run([*words, "--json"], capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert found["figure-5"]["command"] == "run" and found["figure-5"]["asks"].endswith("?")


def test_the_table_is_printed_with_a_line_for_each_presentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers with their intervals; a layer that is never reached is a dash, and says how often."""
    ends = {"": 0.5, "_low": 0.4, "_high": 0.6}
    row: dict[str, object] = {"relation": "front_behind", "arm": "base", "pairs": 200}
    for kind in ("original", "equivalent"):
        for column in ("accuracy", "yes_rate", "delta", "signal", "auroc"):
            row |= {f"{column}_{kind}{end}": value for end, value in ends.items()}
    row |= {"delta_equivalent_low": None, "first_layer_original": 7.0, "first_layer_original_low": 6.0,
            "first_layer_original_high": 9.0, "first_layer_original_never": 0.0, "first_layer_equivalent": None,
            "first_layer_equivalent_low": 8.0, "first_layer_equivalent_high": None,
            "first_layer_equivalent_never": 0.25}  # fmt: skip
    spec = RunTable(title="Made up", rows=("relation",),
                    columns=("accuracy", "yes_rate", "delta", "signal", "auroc", "first_layer"))  # fmt: skip
    monkeypatch.delenv("COLUMNS", raising=False)  # as into a file, which has no width
    drawn = run_table.show(pd.DataFrame([row]), spec, arms=1)
    cells = [list(column.cells) for column in drawn.columns]
    assert [one[0] for one in cells[:4]] == ["front_behind", "base", "original", "200"]
    assert cells[4] == ["50% [40, 60]"] * 2
    assert cells[6] == ["+0.50 [+0.40, +0.60]", "+0.50"]
    assert cells[8] == ["0.50 [0.40, 0.60]"] * 2
    assert cells[9] == ["7 [6, 9]", "– [8, –]; never in 25%"]


def test_a_table_is_folded_to_the_terminal_and_loses_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, object] = {"relation": "front_behind", "arm": "base", "pairs": 200}
    columns = ("accuracy", "yes_rate", "delta", "signal", "auroc")
    for kind in ("original", "equivalent"):
        for place, column in enumerate(columns):
            ends = {"": 0.5, "_low": 0.3 + place / 100, "_high": 0.6 + place / 100}
            row |= {f"{column}_{kind}{end}": value for end, value in ends.items()}
    spec = RunTable(title="Made up", rows=("relation",), columns=columns)

    def printed(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        text = io.StringIO()
        Console(file=text, width=width).print(run_table.show(pd.DataFrame([row]), spec, arms=1))
        return text.getvalue()

    whole = printed(200)
    assert "50% [30, 60]" in whole
    for width in (80, 120):
        text = printed(width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "50% [30, 60]" not in text and "…" not in text
        assert text.count("Made up") == 1
        for number in ("[30, 60]", "[31, 61]", "[+0.32, +0.62]", "[+0.33, +0.63]", "[0.34, 0.64]", "AUROC"):
            assert number in text
