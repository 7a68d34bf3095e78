"""Configuration: one vocabulary for files, --set and flags; every bad key or value is named."""

from __future__ import annotations

import pytest

from experiments.config import Config, digest, load, resolved, settings
from experiments.errors import UsageError
from experiments.eval_config import load_eval
from tasks.registry import family

ORDERING = family("ordering")


def test_defaults_study_the_built_in_pair() -> None:
    config = load(None, [], {})
    assert (config.model, config.adapter) == ("builtin", ("builtin",))
    assert [setting.label for setting in settings(config, ORDERING)] == ["n=4", "n=6", "n=8"]
    assert {setting.params["names"] for setting in settings(config, ORDERING)} == {"builtin"}


def test_another_model_gets_no_adapter_and_the_default_names() -> None:
    config = load(None, [], {"model": "some/model"})
    assert config.adapter == ()
    assert settings(config, ORDERING)[0].params["names"] == "default"


def test_a_file_a_pair_and_a_flag_are_the_same_words_and_later_ones_win(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nseed: 3\nlimit: 20\nparams: {n: 5}\nprobe: {folds: 3}\n")
    config = load(str(file), ["seed=4", "n=6,7", "probe.shuffles=29", "relation=left_right"], {"limit": 30})
    assert (config.seed, config.limit, config.probe.folds, config.probe.shuffles) == (4, 30, 3, 29)
    grid = settings(config, ORDERING)
    assert [setting.params["n"] for setting in grid] == [6, 7]
    assert all(setting.params["relation"] == "left_right" for setting in grid)


def test_a_list_that_the_family_takes_is_one_value() -> None:
    config = load(None, ["n=2,3", "names=Amy,Bob,Eve,Leo", "relation=front_behind,left_right"], {"model": "m"})
    grid = settings(config, ORDERING)
    assert [setting.label for setting in grid] == [
        f"n={n}, relation={relation}" for n in (2, 3) for relation in ("front_behind", "left_right")
    ]
    assert grid[0].params["names"] == ["Amy", "Bob", "Eve", "Leo"]


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["sed=3"], ["unknown key 'sed'", "did you mean seed?", "parameters of ordering are n"]),
        (["probe.fold=3"], ["unknown key 'probe.fold'", "did you mean folds?"]),
        (["plot.size=3"], ["unknown key 'plot.size'", "sections are params, probe, lens, table, patch, ablate"]),
        (["seed"], ["'seed' has no value"]),
        (["seed=a"], ["seed is 'a'", "integer"]),
        (["split=dev"], ["split is 'dev'", "'train', 'validation' or 'test'"]),
        (["limit=3"], ["limit is 3", "greater than or equal to 8"]),
        (["probe.folds=1"], ["probe.folds is 1", "greater than or equal to 2"]),
        (["dtype=int8"], ["dtype is 'int8'"]),
        (["n=[4,"], ["can't be read as YAML"]),
        (["n=4,4"], ["n is [4, 4]", "none twice"]),
        (["params=3"], ["name the parameter"]),
    ],
)
def test_bad_keys_and_values_are_named(pairs: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings(load(None, pairs, {}), ORDERING)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path) -> None:
    with pytest.raises(UsageError, match="can't read the configuration"):
        load(str(tmp_path / "none.yaml"), [], {})
    file = tmp_path / "list.yaml"
    file.write_text("- a\n")
    with pytest.raises(UsageError, match="holds list"):
        load(str(file), [], {})
    file.write_text("a: [\n")
    with pytest.raises(UsageError, match="no YAML"):
        load(str(file), [], {})


def test_the_digest_changes_with_everything_that_changes_numbers() -> None:
    def of(*pairs: str) -> str:
        config = load(None, list(pairs), {})
        return digest(resolved(config, ORDERING, settings(config, ORDERING)))

    variants = ["seed=2", "n=4", "limit=50", "max_tokens=3", "probe.penalty=2", "patch.pairs=3", "resamples=500"]
    assert len({of(), *(of(one) for one in variants)}) == 1 + len(variants)
    assert of() == of("seed=1")


def test_every_key_is_described() -> None:
    for name, field in Config.model_fields.items():
        assert field.description or name in ("probe", "lens", "table", "patch", "ablate"), name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table: {colums: [kappa]}", ["unknown key 'table.colums'", "did you mean columns"]),
        ("table: {rows: [arm]}", ["table.columns is missing"]),
        ("table: {columns: kappa}", ["table.columns is 'kappa'", "give a list"]),
        ("table: kappa", ["table is 'kappa'", "give keys and values"]),
        ("table: {columns: []}", ["table.columns is []", "at least one"]),
        ("temperature: yes", ["temperature is True", "not yes or no"]),
        ("limit: on", ["limit is True"]),
        ("params: &a {n: 4, names: *a}", ["refers to itself"]),
    ],
)
def test_surprises_of_yaml_are_named_in_plain_words(tmp_path, text: str, words: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        load_eval(str(file), [], {})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "tuple" not in str(error.value) and "TableSpec" not in str(error.value)
