"""``probe ablate`` on the built-in model: the paper's case, numbers against plain forward passes, and a killed run."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import items
from experiments.ablate_command import ablate, load_ablate
from experiments.ablate_stage import ROW
from experiments.config import config_text
from experiments.errors import UsageError
from experiments.progress import Reporter
from experiments.rundir import RunDirectory

PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]
ROOT = Path(__file__).parents[2]
BASE: Any = {"adapter": ()}  # the base model alone


def cut(directory: Path, *pairs: str, **flags: Any) -> dict[str, Any]:
    config = load_ablate(None, pairs, flags)
    return ablate(config, directory, config_text=config_text(config), reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The defaults on the base model, with every head by itself and the direct paths."""
    out = tmp_path_factory.mktemp("ablate") / "run"
    cut(out, "resamples=500", grid=True, direct=True, **BASE)
    return RunDirectory(out)


@pytest.fixture(scope="module")
def model() -> Any:
    from activations.model import load

    return load("builtin", verify=False)


def without(model: Any, heads: Sequence[tuple[int, int]]) -> Any:
    """A copy of the network in which these heads write nothing: their columns of the out-projection are 0."""
    import torch

    network = copy.deepcopy(model.hf_model)
    names = dict(network.named_modules())
    for layer, head in heads:
        projection = names[model.structure.out_projections[layer]]
        width = projection.weight.shape[1] // model.heads(layer)
        with torch.no_grad():
            projection.weight[:, head * width : (head + 1) * width] = 0
    return network


def readouts(network: Any, model: Any, rows: Sequence[items.Row]) -> np.ndarray:
    """Yes minus no after the prompt, a plain forward pass each."""
    import torch

    from activations.readout import answer_tokens

    ids = answer_tokens(model, {"yes": ("Yes", "yes"), "no": ("No", "no")}).ids
    found = []
    for prompt in model.encode([row.presentation.chat() for row in rows]):
        with torch.no_grad():
            logits = network(torch.tensor([prompt.ids])).logits[0, -1].double()
        yes, no = (torch.logsumexp(logits[list(own)], 0) for own in ids)
        found.append(float(yes - no))
    return np.array(found)


def asked(run: RunDirectory) -> dict[tuple[str, str, str], items.Row]:
    made = [item for _, of_setting in items.stored(run) for item in of_setting]
    return {row.identity: row for row in items.rows(made)}


def test_a_run_leaves_its_tables_and_every_sweep_was_checked(finished: RunDirectory) -> None:
    assert {path.stem for path in finished.tables.iterdir()} == {
        "readout", "heads", "head_effects", "ablate", "ablation", "ablation_above", "ablation_notes", "head_rows",
        "head_grid",
    }  # fmt: skip
    assert finished.report.exists() and (finished.path / "table.csv").exists()
    for name, checked in (("heads", 20), ("ablate", 20), ("head_rows", 20)):
        table = finished.table(name)
        sweeps = table.drop_duplicates(["engine", "forward_passes", "checked", "check_max_abs"])
        assert sweeps["checked"].sum() >= checked and (table["check_max_abs"] <= 1e-4).all()
    results = json.loads(finished.results.read_text())
    assert results["model"]["heads"] == [4, 4, 4, 4] and results["pairs"]["left_out"] == 0
    assert results["arms"]["base"]["ablation"]["ranked_on"] == "disagreeing pairs"


def test_the_paper_s_case_comes_out_plainly(finished: RunDirectory) -> None:
    """The two answers agree more often with three heads cut, and fewer of them are right."""
    row = finished.table("ablation").query("ablated == 'top'").set_index("measure")
    assert len(row["heads"].iloc[0].split()) == 3
    assert row["change"]["invariance"] > 0.03 and row["change_low"]["invariance"] > 0
    assert row["change"]["accuracy_mean"] < -0.15 and row["change_high"]["accuracy_mean"] < 0
    assert row["change"]["shared_wrong"] > 0.15 and row["change"]["share_removed_mean"] > 0.8
    notes = finished.table("ablation_notes").set_index("ablated")
    assert notes["agreement_without_competence"]["top"]
    assert notes["note"]["top"].endswith("more agreement with less competence")
    above = finished.table("ablation_above").set_index(["control", "measure"])
    assert above["low"]["random", "share_removed_mean"] > 0.5
    results = json.loads(finished.results.read_text())["arms"]["base"]["ablation"]
    assert results["notes"]["top"]["agreement_without_competence"] is True
    assert list(results["sets"]) == ["none", "top", *(f"random {number}" for number in range(1, 11))]
    assert "less competence" in finished.report.read_text() or "no repair" in finished.report.read_text()


def test_heads_are_cut_on_instances_that_did_not_rank_them(finished: RunDirectory) -> None:
    heads, table = finished.table("heads"), finished.table("ablate")
    ranked, tested = (set(heads.loc[heads["half"] == half, "key"]) for half in ("ranked", "tested"))
    assert ranked and not ranked & set(table["key"]) and tested <= set(table["key"])
    effects = finished.table("head_effects")
    chosen = effects[(effects["half"] == "ranked") & effects["chosen"]]
    assert sorted(chosen["rank"]) == [1, 2, 3]
    top = table.loc[table["ablated"] == "top", "heads"].iloc[0].split()
    assert set(top) == {f"{layer}.{head}" for layer, head in zip(chosen["layer"], chosen["head"], strict=True)}
    assert effects["direct"].notna().all() and (effects["direct_low"] <= effects["direct"]).all()


def test_measures_are_those_of_the_readouts(finished: RunDirectory) -> None:
    """ι, R, D, U, δ and s with the top heads cut, by pandas from the table of readouts."""
    row = finished.table("ablation").query("ablated == 'top'").set_index("measure")
    every = finished.table("ablate")
    for side, name in (("before", "none"), ("after", "top")):
        table = every[every["ablated"] == name]
        right = (table["difference"] > 0) == (table["gold"] == "yes")
        both = right.groupby([table["setting"], table["key"]]).sum()
        assert row[side]["invariance"] == pytest.approx((both != 1).mean())
        assert row[side]["robust"] == pytest.approx((both == 2).mean())
        assert row[side]["shared_wrong"] == pytest.approx((both == 0).mean())
        for kind, part in table.groupby("presentation"):
            cells = part.groupby("cell")["difference"].mean()
            gold = part.groupby("cell")["gold"].first()
            assert row[side][f"accuracy_{kind}"] == pytest.approx(right[part.index].mean())
            assert row[side][f"default_{kind}"] == pytest.approx(cells.mean())
            signal = (cells[gold == "yes"].mean() - cells[gold == "no"].mean()) / 2
            assert row[side][f"signal_{kind}"] == pytest.approx(signal)


def test_a_head_cut_at_the_answer_is_the_network_without_it_in_the_last_layer(
    finished: RunDirectory, model: Any
) -> None:
    """There only the last token's readout hangs on the head, so its columns of the weights may be zeroed instead."""
    rows = asked(finished)
    table = finished.table("head_rows").query("layer == 3 and head == 2").iloc[:40]
    own = [rows[identity] for identity in table[ROW].itertuples(index=False, name=None)]
    assert readouts(without(model, [(3, 2)]), model, own) == pytest.approx(table["difference"], abs=2e-4)
    assert readouts(model.hf_model, model, own) == pytest.approx(table["unablated"], abs=2e-4)
    assert np.abs(table["difference"] - table["unablated"]).max() > 0.1


def test_heads_cut_at_every_token_are_the_network_without_them(tmp_path: Path, model: Any) -> None:
    """Given heads of two inner layers: readouts, accuracy, agreement and s from plain passes of the changed network."""
    results = cut(tmp_path / "run", "n=6", "resamples=200", limit=12, chosen=("1.0", "L2H1"), scope="all", **BASE)
    run = RunDirectory(tmp_path / "run")
    assert not run.has_table("heads") and results["arms"]["base"]["ablation"]["ranking"] == []
    table = run.table("ablate").query("ablated == 'top'").reset_index(drop=True)
    assert set(table["scope"]) == {"all"} and set(table["heads"]) == {"1.0 2.1"} and table["key"].nunique() == 12
    rows = asked(run)
    own = [rows[identity] for identity in table[ROW].itertuples(index=False, name=None)]
    after = readouts(without(model, [(1, 0), (2, 1)]), model, own)
    assert after == pytest.approx(table["difference"], abs=2e-4)
    right = (after > 0) == (table["gold"] == "yes")
    measured = run.table("ablation").query("ablated == 'top'").set_index("measure")["after"]
    assert measured["accuracy_mean"] == pytest.approx(right.mean())
    assert measured["invariance"] == pytest.approx((right.groupby(table["key"]).sum() != 1).mean())
    original = table["presentation"] == "original"
    cells = pd.Series(after)[original].groupby(table["cell"]).mean()
    gold = table.groupby("cell")["gold"].first()
    signal = (cells[gold == "yes"].mean() - cells[gold == "no"].mean()) / 2
    assert measured["signal_original"] == pytest.approx(signal, abs=1e-4)


def test_a_size_that_did_not_rank_is_tested_with_means_of_the_others(tmp_path: Path) -> None:
    cut(tmp_path / "run", "n=4,6", "resamples=200", limit=16, held_out="n", test=("4",), source="mean", **BASE)
    run = RunDirectory(tmp_path / "run")
    table, heads = run.table("ablate"), run.table("heads")
    assert set(table["unit"]) == {"4"} and set(table["source"]) == {"mean"}
    assert set(heads.loc[heads["half"] == "ranked", "unit"]) == {"6"}
    assert set(heads.loc[heads["half"] == "tested", "unit"]) == {"4"}
    results = json.loads(run.results.read_text())
    assert results["pairs"] == {"ranked": 16, "tested": 16, "left_out": 0}
    said = results["arms"]["base"]["ablation"]["sets"]["top"]["readout"]
    assert said.endswith("replaced by their mean at the answer position")


def test_a_head_that_the_model_lacks_is_refused_before_anything_is_captured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"chosen has 9\.1: builtin has layers 0 to 3"):
        cut(tmp_path / "run", "n=6", limit=8, chosen=("9.1",), **BASE)
    assert not (tmp_path / "run" / "activations").exists() and not (tmp_path / "run" / "environment.json").exists()


SMALL = ["ablate", "--limit", "24", "--set", "n=4,6", "--resamples", "200", "--random-sets", "3"]
MOMENTS: list[tuple[str, Callable[[Path], bool]]] = [
    ("capturing", lambda run: any(run.glob("activations/base/shard-*.h5"))),
    ("second arm", lambda run: any(run.glob("tables/heads-grpo.parquet"))),
]


def test_a_run_killed_in_its_stages_gives_the_results_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*PROBE, *SMALL, "--out", str(tmp_path / "killed")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    cut(tmp_path / "whole", "n=4,6", limit=24, resamples=200, random_sets=3)
    killed = []
    for name, reached in MOMENTS:
        process = started()
        while process.poll() is None and not reached(tmp_path / "killed"):
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed.append(name)
        process.communicate()
    assert killed
    process = started()
    out, said = process.communicate()
    assert process.returncode == 0, said
    assert "invariance" in out and str(tmp_path / "killed" / "report.html") in out
    whole, again = (tmp_path / name for name in ("whole", "killed"))
    assert (whole / "results.json").read_bytes() == (again / "results.json").read_bytes()
    assert not list(again.rglob("parts-*")) and not list(again.rglob(".writing*"))
    # The same command again does nothing, and another one is refused.
    before = (again / "results.json").stat().st_mtime_ns
    cut(again, "n=4,6", limit="24", resamples="200", random_sets="3")
    assert (again / "results.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match='scope was "answer", is "all"'):
        cut(again, "n=4,6", limit=24, resamples=200, random_sets=3, scope="all")
