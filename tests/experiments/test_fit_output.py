"""What `probe fit` says: layers by their numbers, labels in words, lines that fit, and stores that are not a run's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from activations.store import ActivationStore
from tests.experiments.made_store import FAST, captured, fitted, made, probe, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(tmp_path_factory.mktemp("fit"))


def test_layers_are_named_by_their_numbers_and_all_that_are_given_count(folder: Path, tmp_path: Path) -> None:
    found = fitted(folder / "base", "--layers", "1", "--layers", "2", "--out", tmp_path / "t.csv")
    assert [one["layer"] for one in found["layers"]] == [1, 2]
    (curve,) = found["curves"]
    best = max(found["layers"], key=lambda one: one["auroc"])
    assert curve["layer"] == best["layer"]
    assert f"the best is layer {best['layer']} with {best['auroc']:.3f}" in curve["first_layer_reason"]
    assert set(pd.read_csv(tmp_path / "t.csv")["first_layer_reason"]) == {curve["first_layer_reason"]}
    path = made(tmp_path / "s", count=60)  # layer 1 holds gold
    (curve,) = fitted(path, "--layers", "1", "--folds", "5")["curves"]
    assert (curve["first_layer"], curve["first_layer_low"]) == (1, 1)


def test_what_is_printed_fits_the_terminal_and_says_what_a_label_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = made(tmp_path / "s", count=60)
    star = "* above the 95% quantile"
    for layer, target, meaning, starred in (
        ("0", "gold", "1 is gold yes, 0 is gold no", False),
        ("1", "gold", "1 is gold yes, 0 is gold no", True),
        ("1", "front_half", "1: ", False),
    ):
        code, out, err = probe("fit", path, "--layers", layer, "--target", target, *FAST[:-1])
        assert code == 0, err
        assert f"\n{meaning}" in out
        assert (star in out) == ("  *" in out) and (star in out or not starred)
        assert all(len(line) <= 80 or str(path) in line for line in out.splitlines())


def test_an_auroc_far_below_chance_is_remarked(tmp_path: Path) -> None:
    """Equivalents whose direction is turned: probes of originals read them the other way round."""
    turned = made(tmp_path / "s", count=60, turned="equivalent")
    own, other = fitted(turned, "--layers", "1", "--read", "equivalent")["curves"]
    assert own["remark"] == ""
    assert other["auroc"] < 0.1
    assert "at layer 1: in these rows the probes' direction reads the other way round" in other["remark"]


def test_a_store_that_took_the_place_of_a_runs_own_is_refused(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    resolved, environment = (json.loads((run / name).read_text()) for name in ("resolved.json", "environment.json"))
    manifest = ActivationStore.open(run / "activations/base").manifest
    # What `probe run` would have written.
    environment["asked"]["token_ids"] = manifest["content"]["prompts"]
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "resolved.json").write_text(json.dumps({**resolved, "command": "run"}))
    assert len(fitted(run)["layers"]) == 4
    shutil.rmtree(run / "activations/base")
    shutil.copytree(run / "activations/grpo", run / "activations/base")
    refused("holds activations of grpo, not of base: put back what the run captured", run, code=1)
    shutil.rmtree(run / "activations/base")
    assert probe("capture", "--set", "n=4", "--limit", "10", "--seed", "4", "--out", run / "activations/base")[0] == 0
    for place in (run, run / "activations/base"):
        refused("holds 20 rows of other prompts", place, code=1)
