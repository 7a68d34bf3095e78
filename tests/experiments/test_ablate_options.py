"""What an ablation refuses, each in one line that names the key, and what its recipes ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import recipes
from experiments.ablate_command import AblateConfig, ablate, load_ablate
from experiments.ablate_halves import test_values as values_tested
from experiments.ablate_options import AblateSettings, check, check_for_run, check_model, of_run
from experiments.config import load, settings
from experiments.errors import UsageError
from experiments.progress import Reporter
from tasks.registry import family


def grid(config: AblateConfig) -> dict[str, Any]:
    return {one.label: one.params for one in settings(config, family("ordering"))}


def checked(*pairs: str, **flags: Any) -> AblateConfig:
    config = load_ablate(None, pairs, flags)
    check(config, grid(config))
    return config


def model(*heads: int | None) -> Any:
    return SimpleNamespace(name="made up", n_layers=len(heads), heads=lambda layer: heads[layer])


def test_heads_are_named_by_layer_and_head_and_counted() -> None:
    assert checked().heads == 3 and AblateSettings().heads == 3
    given = checked(chosen=("L3H1", " 2.0", "l1h10"))
    assert given.chosen == ("3.1", "2.0", "1.10") and given.heads == 3
    assert checked("chosen=L0H1").heads == 1
    with pytest.raises(UsageError, match=r"chosen is 3.1: a number can't tell head 1 from head 10, so quote it"):
        checked("chosen=3.1")
    with pytest.raises(UsageError, match=r"chosen is 'first': name heads by layer and head, such as 3\.1 or L3H1"):
        checked("chosen=first")


@pytest.mark.parametrize(
    ("pairs", "flags", "message"),
    [
        ((), {"chosen": ("3.1", "3.1")}, r"chosen is 3\.1, 3\.1: 3\.1 stands there twice"),
        ((), {"chosen": ("3.1",), "heads": 4}, r"chosen is 3\.1 and heads is 4: leave heads out"),
        (("n=4,6",), {"chosen": ("3.1",), "held_out": "n"}, r"chosen is 3\.1 and held_out is n: given heads are not"),
        ((), {"chosen": ("3.1",), "direct": True}, r"chosen is 3\.1 and direct is True: given heads are not ranked"),
        ((), {"scope": "all", "source": "mean"}, r"source is mean but scope is all: activations are kept at the answer"),
        ((), {"scope": "all", "source": "resample"}, r"source is resample but scope is all"),
        ((), {"test": ("8",)}, r"test is 8 but held_out is not given"),
        ((), {"held_out": "colour"}, r"held_out is 'colour': choose a parameter of the family \(n,"),
        (("n=6",), {"held_out": "n"}, r"held_out is n but the run has one value of it, 6: sweep it"),
        (("n=4,6",), {"held_out": "n", "test": ("8",)}, r"test is 8: the run has n 4, 6"),
        (("n=4,6",), {"held_out": "n", "test": ("4", "6")}, r"test is 4, 6, which is every value of n: leave one"),
        ((), {"scope": "span"}, r"scope is 'span': input should be 'answer' or 'all'"),
        ((), {"source": "noise"}, r"source is 'noise': input should be 'zero', 'mean' or 'resample'"),
        ((), {"heads": "0"}, r"heads is '0': input should be greater than or equal to 1"),
        (("head=3",), {}, r"unknown key 'head' \(did you mean heads\?\)"),
    ],
)  # fmt: skip
def test_what_can_not_apply_is_refused(pairs: tuple[str, ...], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        checked(*pairs, **flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_tokens": 5}, r"max_tokens is 5, but no answer is generated"),
        ({"max_unparsed": 0.1}, r"max_unparsed is 0\.1, but no answer is generated"),
        ({"chosen": ("3.1",), "pairs": 8}, r"pairs is 8, but heads are given \(3\.1\), so none are ranked"),
        ({"limit": 4}, r"limit is 4: input should be greater than or equal to 8"),
    ],
)
def test_keys_about_what_is_not_done_are_refused_before_a_model_is_loaded(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        ablate(load_ablate(None, (), flags), tmp_path / "run", config_text="", reporter=Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("how", "heads", "message"),
    [
        ({"chosen": ("9.1",)}, (4, 4), r"chosen has 9\.1: made up has layers 0 to 1"),
        ({"chosen": ("1.4",)}, (4, 4), r"chosen has 1\.4: layer 1 of made up has heads 0 to 3"),
        ({"chosen": ("1.0",)}, (4, None, 4), r"chosen has 1\.0: layer 1 of made up has no heads that can be cut"),
        ({"heads": 5}, (4, 4), r"heads is 5 but made up has 8 heads: give at most 4"),
        ({"chosen": ("0.0", "0.1")}, (3, None), r"chosen names 2 heads but made up has 3 heads: give at most 1"),
        ({}, (1, None), r"made up has 1 attention heads to cut"),
    ],
)
def test_heads_that_the_model_lacks_are_refused(
    how: dict[str, Any], heads: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_model(AblateSettings(**how), model(*heads))


def test_a_run_names_the_section() -> None:
    with pytest.raises(UsageError, match=r"ablate\.heads is 3 but made up has 4 heads"):
        check_model(AblateSettings(), model(2, 2), section="ablate.")
    config = load(None, ["patch.pairs=6", "patch.check_cells=7"], {})
    assert (of_run(config).pairs, of_run(config).check_cells, config.ablate.pairs) == (6, 7, None)
    assert of_run(load(None, ["patch.pairs=6", "ablate.pairs=9"], {})).pairs == 9


@pytest.mark.parametrize(
    "given", [{"chosen": ("3.1",)}, {"held_out": "n"}, {"test": ("4",)}, {"scope": "all"}, {"source": "mean"}]
)
def test_a_whole_study_refuses_what_its_report_does_not_show(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(UsageError, match=rf"ablate\.{name} is .*or give {name} to `probe ablate`"):
        check_for_run(AblateSettings(**given))
    check_for_run(AblateSettings(heads=2, pairs=8, random_sets=3, leave_one_out=False, grid=True, direct=True))


def test_without_values_the_last_one_is_tested() -> None:
    config = checked("n=4,8,6", held_out="n")
    assert values_tested(config, grid(config)) == ("6",)
    assert values_tested(checked("n=4,8,6", held_out="n", test=("4", "8")), grid(config)) == ("4", "8")


@pytest.mark.parametrize("name", recipes.names("ablate"))
def test_each_recipe_says_what_it_asks_and_how_it_departs(name: str) -> None:
    text = recipes.path(name).read_text()
    assert text.count("command: ablate") == 1 and "# Departs:" in text
    assert "The built-in pair" in text and "smollm2" in text
    assert recipes.describe(name).endswith("?")
    check(load_ablate(name, (), {"model": "made-up"}), grid(load_ablate(name, (), {"model": "made-up"})))
    # As the opening comment says it.
    small = {"ablate-heads": {"held_out": "n", "test": ("8",), "heads": "3"}, "head-grid": {}}[name]
    pair = load_ablate(name, ["relation=front_behind", "n=4,6,8"], small)
    check(pair, grid(pair))
    assert pair.adapter == ("builtin",) and pair.params["names"] == "builtin"


def test_the_recipe_of_the_paper_cuts_four_heads_in_vocabularies_that_did_not_rank_them() -> None:
    config = load_ablate("ablate-heads", (), {"model": "made-up"})
    assert config.heads == 4 and config.held_out == "relation"
    ranked = {one["relation"] for one in grid(config).values()} - set(map(str, config.test or ()))
    assert len(ranked) == 4 and len(grid(config)) == 4 * 6
    with pytest.raises(UsageError, match=r"ablate-heads is for `probe ablate`, not `probe run`"):
        load("ablate-heads", [], {})
