"""``probe patch`` on the built-in pair: real sweeps, checked against plain forward passes, resumed after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import items
from experiments.config import config_text
from experiments.patch_command import load_patch, study
from experiments.progress import Reporter
from experiments.rundir import RunDirectory

PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]
ROOT = Path(__file__).parents[2]
# Two sites, three positions, every control; chunks small enough for a kill to find a middle.
PAIRS = ["n=4,6", "limit=12", "resamples=200", "sites=resid_post,z", "layers=2",
         "positions=answer,query,premise:4", "controls=unrelated,random,same cell,own", "pairs=4"]  # fmt: skip
WORDS = ["patch", "--limit", "12", *(word for pair in PAIRS if "limit" not in pair for word in ("--set", pair))]


def patched(directory: Path, *pairs: str, **flags: Any) -> dict[str, Any]:
    config = load_patch(None, pairs, flags)
    return study(config, directory, config_text=config_text(config), reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    out = tmp_path_factory.mktemp("patch") / "run"
    patched(out, *PAIRS)
    return RunDirectory(out)


@pytest.fixture(scope="module")
def model() -> Any:
    from activations.model import load

    return load("builtin", adapters=("builtin",), verify=False)


def asked(run: RunDirectory) -> dict[tuple[str, str, str], items.Row]:
    made = [item for _, of_setting in items.stored(run) for item in of_setting]
    return {row.identity: row for row in items.rows(made)}


def test_it_leaves_its_tables_and_a_row_for_every_recipient_donor_and_cell(finished: RunDirectory) -> None:
    assert {path.stem for path in finished.tables.iterdir()} == {"readout", "patch", "patch_left_out", "patch_effects"}
    table, readout = finished.table("patch"), finished.table("readout")
    assert set(table["arm"]) == {"base", "grpo"} and len(readout) == 2 * 2 * 2 * 12
    each = table.groupby(["arm", "setting", "key", "presentation", "position"]).size()
    assert set(each) == {5 * (1 + 4)}  # donors × (the residual and four heads)
    assert table["head"].isna().equals(table["site"] == "resid_post")
    assert (table["presentation"].map({"equivalent": "repair", "original": "break"}) == table["direction"]).all()
    assert table["check_max_abs"].max() < 1e-4 and (table["check_max_abs"] <= table["check_bound"]).all()
    own = table[table["donor"] == "own"]
    assert (own["patched"] - own["unpatched"]).abs().max() < 1e-5
    unpatched = table.merge(readout, on=["arm", "setting", "key", "presentation"])
    assert np.allclose(unpatched["unpatched"], unpatched["difference"], atol=1e-5)


@pytest.mark.parametrize(("arm", "position"), [("base", "answer"), ("grpo", "query")])
def test_an_effect_is_that_of_plain_forward_passes_with_a_hook(
    finished: RunDirectory, model: Any, arm: str, position: str
) -> None:
    """One number of patch_effects again: every recipient run by itself, one layer's output overwritten by hand."""
    import torch

    layer = 2
    rows, network = asked(finished), model.hf_model
    block = model.module(model.structure.blocks[layer])
    words = [[model.tokenizer.convert_tokens_to_ids(word) for word in own] for own in (("Yes", "yes"), ("No", "no"))]
    yes, no = ([token for token in own if token != model.tokenizer.unk_token_id] for own in words)
    assert yes and no

    def tokens(row: items.Row, prompt: Any) -> list[int]:
        if position == "answer":
            return [len(prompt.ids) - 1]
        span = next(one for one in row.presentation.spans if one.label == position)
        text = row.presentation.chat()[span.message]["content"]
        start = prompt.text.index(text) + span.start
        return [n for n, (a, b) in enumerate(model.offsets(prompt)) if a < start + span.end - span.start and b > start]

    def run(prompt: Any, put: Any = None, at: list[int] | None = None) -> tuple[float, Any]:
        seen = []

        def hook(module: Any, arguments: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            seen.append(hidden.detach().clone())
            if put is None:
                return None
            changed = hidden.clone()
            changed[0, at] = put
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        handle = block.register_forward_hook(hook)
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt.ids])).logits[0, -1].double()
        handle.remove()
        return float(logits[yes].logsumexp(0) - logits[no].logsumexp(0)), seen[0][0]

    table = finished.table("patch")
    chosen = table[
        (table["arm"] == arm) & (table["position"] == position) & (table["site"] == "resid_post")
        & (table["layer"] == layer) & (table["donor"] == "matched") & (table["direction"] == "repair")
    ]  # fmt: skip
    moved = []
    with model.use(None if arm == "base" else arm):
        for one in chosen.itertuples():
            mine, other = (rows[one.setting, one.key, kind] for kind in ("equivalent", "original"))
            recipient, donor = model.encode([row.presentation.chat() for row in (mine, other)])
            given, hidden = run(donor)
            before, _ = run(recipient)
            after, _ = run(recipient, hidden[tokens(other, donor)], tokens(mine, recipient))
            moved.append((after - before) * np.sign(given))
    effects = finished.table("patch_effects")
    found = effects[
        (effects["arm"] == arm) & (effects["position"] == position) & (effects["site"] == "resid_post")
        & (effects["layer"] == layer) & (effects["donor"] == "matched") & (effects["direction"] == "repair")
        & (effects["kind"] == "all") & (effects["group"] == "all")
    ]  # fmt: skip
    assert len(found) == 1 and len(moved) == found["n"].iat[0] > 4
    assert found["effect"].iat[0] == pytest.approx(np.mean(moved), abs=1e-4)


def test_rows_whose_spans_differ_in_length_are_left_out_and_counted(finished: RunDirectory) -> None:
    left, table = finished.table("patch_left_out"), finished.table("patch")
    assert set(left["position"]) == {"premise:4"}
    assert (
        left["reason"].str.contains("tokens of premise|no premise|no same cell donor has|no unrelated donor has").all()
    )
    assert left.loc[left["reason"].str.startswith("no premise"), "setting"].eq("n=4").all()
    name = ["arm", "setting", "key", "presentation"]
    chosen = table[table["position"] == "answer"].drop_duplicates(name)
    for position, part in left.groupby("position"):
        there = table[table["position"] == position].drop_duplicates(name)
        assert len(part) + len(there) == len(chosen)
        assert not set(part[name].itertuples(index=False)) & set(there[name].itertuples(index=False))
    effects = finished.table("patch_effects")
    one = effects[(effects["kind"] == "all") & (effects["group"] == "all") & (effects["donor"] == "matched")]
    assert (one["n"] + one["tied"] + one["left_out"]).groupby(one["arm"]).nunique().eq(1).all()


def test_results_tell_pairs_by_kind_and_what_it_cost(finished: RunDirectory) -> None:
    results = finished.read_json("results.json")
    assert results["model"]["layers"] == 4 and results["model"]["heads"] == [4, 4, 4, 4]
    for arm in ("base", "grpo"):
        found = results["arms"][arm]
        assert sum(one["found"] for one in found["pairs"].values()) == 24
        assert found["cost"]["largest_difference"] <= found["cost"]["bound"]
        assert {one["site"] for one in found["studies"]} == {"resid_post", "z"}
        heads = next(one for one in found["studies"] if one["site"] == "z")
        assert heads["heads"] == [0, 1, 2, 3] and heads["layers"] == [2] * 4
        assert not heads["monotone"] and heads["own_change"] < 1e-5
    assert (finished.path / "table.csv").exists() and finished.report.exists()


def test_a_study_killed_in_a_sweep_gives_the_tables_of_an_uninterrupted_one(
    finished: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*PROBE, *WORDS, "--out", str(out)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    parts = out / "tables" / "parts-patch-grpo"
    while process.poll() is None and not (parts.is_dir() and list(parts.glob("0*.parquet"))):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not (out / "results.json").exists()
    patched(out, *PAIRS)
    for name in ("readout", "patch", "patch_left_out", "patch_effects"):
        pd.testing.assert_frame_equal(RunDirectory(out).table(name), finished.table(name))
    assert (out / "results.json").read_text() == finished.results.read_text()


def test_the_same_command_again_does_nothing_and_another_one_is_refused(finished: RunDirectory) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*.parquet")}
    again = subprocess.run(
        [*PROBE, *WORDS, "--json", "--out", str(finished.path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert json.loads(again.stdout) == json.loads(finished.results.read_text())
    assert {path: path.stat().st_mtime_ns for path in finished.path.rglob("*.parquet")} == before
    with pytest.raises(ValueError, match=r"another configuration \(margin was 0\.5, is 0\.7\)"):
        patched(finished.path, *PAIRS, margin="0.7")
    cut = subprocess.run(
        [*PROBE, "ablate", "--limit", "12", "--out", str(finished.path)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert cut.returncode == 1 and "is of `probe patch`, not of `probe ablate`: give another --out" in cut.stderr


def test_estimates_and_transplants_stand_beside_the_sweep(tmp_path: Path) -> None:
    patched(tmp_path / "run", "n=6", "limit=12", "resamples=100", "sites=attn_out,mlp_out", "estimate=true",
            "transplant=answer,all", "pairs=4")  # fmt: skip
    run = RunDirectory(tmp_path / "run")
    table, cells, quality = (run.table(name) for name in ("patch", "patch_estimates", "patch_quality"))
    one = cells[(cells["arm"] == "grpo") & (cells["direction"] == "break") & (cells["site"] == "mlp_out")]
    rows = table[(table["arm"] == "grpo") & (table["direction"] == "break") & (table["site"] == "mlp_out")
                 & (table["donor"] == "matched")]  # fmt: skip
    toward = np.sign(rows["donor_difference"])
    exact = ((rows["patched"] - rows["unpatched"]) * toward).groupby(rows["layer"]).mean()
    estimated = (rows["estimate"] * toward).groupby(rows["layer"]).mean()
    assert np.allclose(one["exact"], exact) and np.allclose(one["estimate"], estimated)
    said = quality[(quality["arm"] == "grpo") & (quality["direction"] == "break") & (quality["site"] == "mlp_out")]
    assert said["pearson"].iat[0] == pytest.approx(np.corrcoef(exact, estimated)[0, 1])
    assert set(quality["verdict"]) <= {"enough", "not enough", "undefined"}

    moved, rows = run.table("transplant"), run.table("transplant_rows")
    assert set(moved["direction"]) == {"adapter→base", "base→adapter"} and set(moved["position"]) == {"answer", "all"}
    one = moved[(moved["direction"] == "adapter→base") & (moved["presentation"] == "all") & (moved["site"] == "mlp_out")
                & (moved["position"] == "all") & (moved["layer"] == 3)].iloc[0]  # fmt: skip
    rows = rows[(rows["direction"] == "adapter→base") & (rows["site"] == "mlp_out") & (rows["position"] == "all")
                & (rows["layer"] == 3)]  # fmt: skip
    sign = np.where(rows["gold"] == "yes", 1, -1)
    brought, total = ((rows[name] - rows["base"]) * sign for name in ("patched", "adapter"))
    assert len(rows) == one["n"] == 24 and one["n_groups"] == 12
    assert one["effect"] == pytest.approx(brought.mean()) and one["total"] == pytest.approx(total.mean())
    assert one["share"] == pytest.approx(brought.mean() / total.mean())
    assert one["right"] == np.mean(rows["patched"] * sign > 0)
    readout = run.table("readout").merge(rows, on=["setting", "key", "presentation"])
    assert np.allclose(readout.loc[readout["arm_x"] == "grpo", "difference"],
                       readout.loc[readout["arm_x"] == "grpo", "adapter"], atol=1e-5)  # fmt: skip
