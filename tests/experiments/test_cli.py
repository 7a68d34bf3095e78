"""The command line: quick start, one-line errors with their exit codes, files and environment variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = [sys.executable, "-c", "from experiments.cli import main; main()"]


def probe(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROBE, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        cwd=Path(__file__).parents[2],
    )


def failed(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """One line on standard error that holds these parts, nothing on standard output, and this exit code."""
    assert result.returncode == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("probe: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nsys.argv = ['probe', '--help']\nfrom experiments.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit(', '.join({'torch', 'numpy', 'pandas', 'pydantic', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for command in ("run", "families", "generate", "show", "validate", "check", "report"):
        assert command in result.stdout


def test_usage_errors_are_one_line() -> None:
    failed(probe("run", "--bogus"), 2, "--bogus")
    failed(probe("fitt"), 2, "'fitt'")
    failed(probe("generate", "ordering"), 2, "--out")
    failed(probe("generate", "ordering", "--limit", "many", "--out", "-"), 2, "many")
    assert probe().returncode == 2


def test_bad_families_parameters_and_keys_are_named() -> None:
    failed(probe("generate", "orderin", "--out", "-"), 2, "'orderin'", "did you mean ordering")
    failed(probe("generate", "ordering", "--set", "n=1", "--out", "-"), 2, "n is 1")
    failed(probe("generate", "ordering", "--set", "relation=above", "--out", "-"), 2, "front_behind")
    failed(probe("show", "ordering", "--set", "n=4,8"), 2, "only `probe run` sweeps")
    failed(probe("run", "--set", "sed=1"), 2, "unknown key 'sed'", "seed")
    failed(probe("run", "--family", "order"), 2, "unknown family 'order'")
    failed(probe("run", "--set", "n=30"), 2, "n is 30", "24 names")
    failed(probe("run", "--set", "presentations=original"), 2, "add it")
    failed(probe("report", "nowhere"), 1, "nowhere", "results.json")


def test_generate_writes_whole_files_and_the_first_sets_do_not_change(tmp_path) -> None:
    out = tmp_path / "items.jsonl"
    words = ("generate", "ordering", "--set", "n=6", "--seed", "7", "--out")
    assert probe(*words, str(out), "--limit", "40").returncode == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 40 and [p.name for p in tmp_path.iterdir()] == ["items.jsonl"]
    assert set(records[0]) >= {"key", "family", "version", "params", "gold", "cell", "split", "presentations"}
    shorter = probe(*words, "-", "--limit", "10")
    assert shorter.stdout.splitlines() == out.read_text().splitlines()[:10]
    failed(probe(*words, str(tmp_path / "no" / "such.jsonl")), 1, "No such file")
    failed(probe(*words, ""), 2, "out is empty")


def test_families_lists_parameters_with_their_choices() -> None:
    listed = json.loads(probe("families", "--json").stdout)
    ordering = next(entry for entry in listed if entry["name"] == "ordering")
    parameters = {parameter["name"]: parameter for parameter in ordering["parameters"]}
    relation = parameters["relation"]
    assert len(relation["choices"]) == 31 and relation["choices"][0] == "front_behind"
    assert relation["other_choices"]["depth"] == ["depth"] and len(relation["other_choices"]["auxiliary"]) == 6
    assert "census" in parameters["names"]["choices"]
    assert "horn" in [entry["name"] for entry in listed]
    text = probe("families").stdout
    assert "vorpward_morpward" in text and "aux_priority" in text


def test_show_and_validate() -> None:
    shown = probe("show", "ordering", "--set", "n=4", "--set", "relation=left_right").stdout
    assert "-- original" in shown and "to the right of" in shown
    assert all(one["ok"] for one in json.loads(probe("validate", "ordering", "--limit", "20", "--json").stdout))


def test_check_finds_the_built_in_pair_sound() -> None:
    rows = json.loads(probe("check", "builtin", "--adapter", "builtin", "--json").stdout)
    assert len(rows) >= 7
    assert all(row["ok"] for row in rows)


def test_flags_come_from_the_environment(tmp_path) -> None:
    out = tmp_path / "items.jsonl"
    assert probe("generate", "ordering", PROBE_OUT=str(out), PROBE_LIMIT="3").returncode == 0
    assert len(out.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("model", "parts"),
    [("no/such-model", ["no/such-model"]), ("/no/such/folder", ["/no/such/folder"]), ("x.gguf", ["x.gguf"])],
)
def test_an_unknown_model_is_named_and_leaves_no_results(tmp_path, model: str, parts: list[str]) -> None:
    out = tmp_path / "run"
    failed(probe("run", "--model", model, "--out", str(out)), 1, *parts)
    assert not (out / "results.json").exists()
