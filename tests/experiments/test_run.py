"""Whole runs on the built-in pair: every stage real, resumed after kills, refused with one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]
ROOT = Path(__file__).parents[2]
# Small, and in many batches, so that every stage has a middle.
SMALL = ["run", "--set", "n=4,6", "--limit", "24", "--set", "batch_tokens=1200", "--set", "probe.shuffles=19",
         "--set", "probe.penalty=0.03", "--set", "probe.splits=2",
         "--set", "patch.pairs=6", "--set", "ablate.random_sets=3", "--set", "resamples=200"]  # fmt: skip


def probe(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROBE, *words], capture_output=True, text=True, check=False, cwd=cwd, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    result = probe(*SMALL, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert "both right" in result.stdout
    assert str(out / "report.html") in result.stdout
    return out


def test_a_run_leaves_what_the_design_lists_and_nothing_else(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "config.yaml", "resolved.json", "environment.json", "items.jsonl", "responses.jsonl", "activations", "tables",
        "results.json", "table.csv", "report.html", "log.txt", "lock",
    }  # fmt: skip
    assert {path.stem for path in (finished / "tables").iterdir()} == {
        "behaviour", "readout", "probes", "probe_curves", "probe_rows", "probe_change", "transfer", "failures", "lens",
        "decomposition", "contributions", "components", "patch", "patch_effects", "heads", "head_effects", "ablate",
        "ablation", "ablation_above", "ablation_notes", "attribution", "attribution_shares", "attribution_calibration",
    }  # fmt: skip
    assert len((finished / "items.jsonl").read_text().splitlines()) == 48
    assert len((finished / "responses.jsonl").read_text().splitlines()) == 48 * 2 * 2


def test_base_and_adapter_answered_the_same_items(finished: Path) -> None:
    behaviour = pd.read_parquet(finished / "tables" / "behaviour.parquet")
    base, adapter = (part.drop(columns="arm") for _, part in behaviour.groupby("arm", sort=False))
    columns = ["setting", "key", "presentation", "gold", "n_prompt_tokens"]
    assert base[columns].reset_index(drop=True).equals(adapter[columns].reset_index(drop=True))
    assert not base["text"].reset_index(drop=True).equals(adapter["text"].reset_index(drop=True))


def test_headline_numbers_follow_from_the_tables(finished: Path) -> None:
    """Recomputed here from the raw responses and tables, without the code that made results.json."""
    results = json.loads((finished / "results.json").read_text())
    items = {(r["setting"], r["key"]): r for r in map(json.loads, (finished / "items.jsonl").read_text().splitlines())}
    said = {}
    for record in map(json.loads, (finished / "responses.jsonl").read_text().splitlines()):
        said[record["arm"], record["setting"], record["key"], record["presentation"]] = record["text"]
    for arm in ("base", "grpo"):
        right = {
            kind: [said[arm, *where, kind].strip().lower() == item["gold"] for where, item in items.items()]
            for kind in ("original", "equivalent")
        }
        profile = results["arms"][arm]["behaviour"]["profile"]["all"]
        pairs = list(zip(right["original"], right["equivalent"], strict=True))
        assert profile["original"]["accuracy"]["value"] == pytest.approx(sum(right["original"]) / 48)
        assert profile["robust"]["value"] == pytest.approx(sum(a and b for a, b in pairs) / 48)
        assert profile["unstable"]["value"] == pytest.approx(sum(a != b for a, b in pairs) / 48)
        counted = {}
        for row in results["arms"][arm]["link"]:
            counted[row["outcome"]] = counted.get(row["outcome"], 0) + row["n"]
        assert sum(counted.values()) == 96
        assert counted.get("R", 0) == 2 * sum(a and b for a, b in pairs)
    readout = pd.read_parquet(finished / "tables" / "readout.parquet")
    part = readout[(readout["arm"] == "base") & (readout["presentation"] == "original")]
    cells = part.groupby("cell")["difference"].mean()
    split = results["arms"]["base"]["decomposition"]["original"]["all"]
    assert split["delta"] == pytest.approx(cells.mean())
    yes, no = (cells[[cell for cell in cells.index if cell.endswith(gold)]].mean() for gold in ("yes", "no"))
    assert split["signal"] == pytest.approx((yes - no) / 2)


def test_every_sweep_was_checked_against_plain_forwards(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    for arm in results["arms"].values():
        for sweep in (arm["patching"], arm["ablation"]["heads"], arm["ablation"]["ablate"]):
            assert sweep["cells_checked"] >= 20
            assert sweep["largest_difference"] <= 1e-4
            assert sweep["engine"] == ["branch"]


def test_the_same_command_again_does_nothing(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file() and path.name != "lock"}
    result = probe(*SMALL, "--out", str(finished))
    assert result.returncode == 0
    assert "nothing to do" in result.stderr
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file() and path.name != "lock"}
    assert before == after


def test_another_configuration_is_refused(finished: Path) -> None:
    result = probe(*SMALL, "--seed", "5", "--out", str(finished))
    assert result.returncode == 1
    assert "seed was 1, is 5" in result.stderr and "Traceback" not in result.stderr


def _lines(run: Path) -> int:
    path = run / "responses.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _any(run: Path, pattern: str) -> bool:
    return any(run.glob(pattern))


MOMENTS: list[tuple[str, Callable[[Path], bool]]] = [
    ("items", lambda run: (run / "items.jsonl").exists()),
    ("asking base", lambda run: 0 < _lines(run) < 96),
    ("asking the adapter", lambda run: 96 < _lines(run) < 192),
    ("capturing", lambda run: _any(run, "activations/base/shard-*.h5")),
    ("lens", lambda run: _any(run, "tables/readout-base.parquet")),
    ("capturing the adapter", lambda run: _any(run, "tables/contributions-base.parquet")),
    ("probing", lambda run: _any(run, "tables/parts-probes/0001-probe_curves.parquet")),
    ("patching", lambda run: _any(run, "tables/components.parquet")),
    ("heads", lambda run: _any(run, "tables/patch-base.parquet")),
    ("second arm", lambda run: _any(run, "tables/attribution-base.parquet")),
    ("results", lambda run: _any(run, "tables/attribution-grpo.parquet")),
]


def test_a_run_killed_in_every_stage_gives_the_results_of_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    killed = []
    for name, reached in MOMENTS:
        process = subprocess.Popen(
            [*PROBE, *SMALL, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=_environment(),
        )
        while process.poll() is None and not reached(out):
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed.append(name)
        process.wait()
    assert len(killed) >= len(MOMENTS) - 2, killed
    result = probe(*SMALL, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert (out / "results.json").read_bytes() == (finished / "results.json").read_bytes()
    assert (out / "report.html").read_bytes().count(b"<svg") == (finished / "report.html").read_bytes().count(b"<svg")
    assert not [path for path in out.rglob("*") if path.name.startswith(".writing")]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_scheduler_leaves_a_run_that_resumes(tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "interrupted"
    process = subprocess.Popen(
        [*PROBE, *SMALL, "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=_environment(),
        # A suite started in the background of a shell inherits an ignored SIGINT, and a child would ignore it too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and _lines(out) == 0:
        time.sleep(0.002)
    process.send_signal(sent)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "the same command goes on" in said and "Traceback" not in said


@pytest.mark.parametrize("command", ["run", "eval", "patch", "ablate"])
def test_an_empty_out_is_not_the_current_directory(command: str) -> None:
    result = probe(command, "--out", "")
    assert result.returncode == 2 and "out is empty: give a path" in result.stderr


def test_an_instance_under_two_settings_is_said_to_be_counted_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = probe(
        *SMALL, "--set", "n=4", "--set", "relation=front_behind,left_right", "--limit", "12", "--out", str(out)
    )
    assert result.returncode == 0, result.stderr
    profile = json.loads((out / "results.json").read_text())["arms"]["base"]["behaviour"]["profile"]
    assert profile["all"]["note"].startswith("12 of 24 pairs are instances that stand under another setting too")
    assert profile["all"]["note"] in (out / "report.html").read_text()


def test_one_setting_and_more_presentations(tmp_path: Path) -> None:
    kinds = "original,equivalent,reshuffled,rewritten"
    out = tmp_path / "run"
    result = probe(*SMALL, "--set", "n=4", "--set", f"presentations={kinds}", "--limit", "16", "--out", str(out))
    assert result.returncode == 0, result.stderr
    base = json.loads((out / "results.json").read_text())["arms"]["base"]
    assert list(base["behaviour"]["profile"]) == ["n=4", "all"]
    assert list(base["decomposition"]) == kinds.split(",")
    assert len((out / "responses.jsonl").read_text().splitlines()) == 16 * 4 * 2


def test_changed_items_and_damaged_files_are_refused_and_a_lost_shard_is_made_again(
    finished: Path, tmp_path: Path
) -> None:
    def copy(name: str) -> Path:
        """A run that stopped before its results."""
        out = tmp_path / name
        shutil.copytree(finished, out)
        for done in ("results.json", "report.html"):
            (out / done).unlink()
        return out

    out = copy("cut")
    lines = (out / "items.jsonl").read_text().splitlines(keepends=True)
    (out / "items.jsonl").write_text("".join(lines[:24]))
    result = probe(*SMALL, "--out", str(out))
    assert result.returncode == 1
    assert "begun with other items" in result.stderr
    out = copy("no environment")
    (out / "environment.json").unlink()
    result = probe(*SMALL, "--seed", "9", "--out", str(out))
    assert result.returncode == 1
    assert "seed was 1, is 9" in result.stderr
    out = copy("damaged")
    (out / "tables" / "lens.parquet").write_bytes(b"PAR1 and no more")
    result = probe(*SMALL, "--out", str(out))
    assert result.returncode == 1
    assert "lens.parquet is damaged" in result.stderr
    assert "Traceback" not in result.stderr
    out = copy("lost")
    (out / "activations" / "base" / "shard-00000.h5").unlink()
    for name in ("attribution", "patch", "heads", "ablate"):
        (out / "tables" / f"{name}.parquet").unlink()
    result = probe(*SMALL, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert (out / "results.json").read_bytes() == (finished / "results.json").read_bytes()


def test_too_few_instances_for_the_folds_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    result = probe("run", "--set", "n=4", "--limit", "8", "--out", str(tmp_path / "run"))
    assert result.returncode == 2
    assert "probe.folds is 5" in result.stderr
    assert "raise limit to 10" in result.stderr
    assert "load builtin" not in result.stderr


def test_words_the_built_in_model_does_not_know_are_refused(tmp_path: Path) -> None:
    result = probe("run", "--set", "names=census", "--limit", "8", "--out", str(tmp_path / "run"))
    assert result.returncode == 1
    assert "cannot read" in result.stderr and "Traceback" not in result.stderr


def test_an_adapter_of_another_base_and_one_that_changes_nothing_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shipped = ROOT / "activations" / "builtin" / "grpo"
    nothing = tmp_path / "nothing"
    shutil.copytree(shipped, nothing)
    weights = {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in
               load_file(nothing / "adapter_model.safetensors").items()}  # fmt: skip
    save_file(weights, nothing / "adapter_model.safetensors")
    wide = tmp_path / "wide"
    shutil.copytree(shipped, wide)
    save_file(
        {k: torch.ones(v.shape[0] + 8, *v.shape[1:]) if "lora_B" in k else v for k, v in weights.items()},
        wide / "adapter_model.safetensors",
    )
    for path in (nothing, wide):
        result = probe("run", "--adapter", str(path), "--limit", "8", "--out", str(tmp_path / f"run-{path.name}"))
        assert result.returncode == 1
        assert path.name in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / f"run-{path.name}" / "responses.jsonl").exists()


def test_too_many_unread_answers_exit_with_3_and_keep_the_results(tmp_path: Path) -> None:
    """A model of random weights answers with anything but yes or no."""
    import torch
    from transformers import LlamaForCausalLM

    from experiments.builtin import base, tokenizer

    words, model, out = tokenizer.build(), tmp_path / "random", tmp_path / "run"
    torch.manual_seed(0)
    LlamaForCausalLM(base.config(words)).save_pretrained(model)
    words.save_pretrained(model)
    result = probe("run", "--model", str(model), "--set", "names=builtin", *SMALL[1:], "--out", str(out))
    assert result.returncode == 3, result.stderr
    assert "could not be read" in result.stderr
    assert (out / "results.json").exists() and (out / "report.html").exists()
