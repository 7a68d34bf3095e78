"""``probe store``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from activations.errors import StoreError
from activations.store import ActivationStore, StoreWriter
from experiments.cli.app import app
from experiments.errors import RunError, UsageError

ROOT = Path(__file__).parents[2]


def made(folder: Path, first: int = 0, n: int = 6) -> Path:
    rows = {
        "key": [f"k{first + row // 2}" for row in range(n)],
        "presentation": ["original"] * n,
        "label": ["answer", "premise:3"] * (n // 2),
        "position": [1] * n,
        "n_tokens": [9] * n,
    }
    content = {
        "model": {"weights": "abcdef", "dtype": "float32", "attention": "sdpa", "versions": {"torch": "2.13"}},
        "adapter": {"weights": "123", "config": None},
        "z": {"heads": {"0": 2}},
    }
    with StoreWriter(
        folder,
        datasets={("resid_post", 0): 4, ("resid_post", 1): 4, ("z", 0): 8},
        dtype="bfloat16",
        n_layers=2,
        shards=[[1, 0], list(range(2, n))],
        rows=rows,
        content=content,
        notes={"model": "tiny", "adapter": "grpo"},
    ) as writer:
        for shard in writer.missing:
            numbers = np.array(writer.shards[shard])[:, None] + first
            wide = {("resid_post", layer): np.repeat(numbers, 4, axis=1) for layer in (0, 1)}
            writer.write(shard, {**wide, ("z", 0): np.repeat(numbers, 8, axis=1)})
    return folder


def run(*arguments: Any) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    return result.exit_code, result.output, result.exception


def test_info(tmp_path: Path) -> None:
    code, text, _ = run("info", made(tmp_path / "s"))
    assert code == 0
    for words in ("tiny", "abcdef", "grpo 123", "bfloat16", "6 of 3 instances", "2 of 2", "torch 2.13", "premise:3"):
        assert words in text, words
    code, text, _ = run("info", tmp_path / "s", "--json")
    found = json.loads(text)
    assert found["sites"][1] == {"site": "z", "layers": "0", "width": [8], "heads": [2]}
    assert found["rows"] == [
        {"presentation": "original", "label": label, "rows": 3} for label in ("answer", "premise:3")
    ]
    assert isinstance(run("info", tmp_path)[2], StoreError)


def test_verify(tmp_path: Path) -> None:
    folder = made(tmp_path / "s")
    assert run("verify", folder)[:2] == (0, f"{folder} is whole\n")
    for name in ("shard-00000.h5", "shard-00001.h5"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    code, text, error = run("verify", folder)
    assert code == 1
    assert [line.split(" is damaged")[0] for line in text.splitlines()] == [
        str(folder / name) for name in ("shard-00000.h5", "shard-00001.h5")
    ]
    assert isinstance(error, RunError) and "has 2 faults" in str(error)
    code, text, _ = run("verify", folder, "--json")
    assert code == 1
    assert len(json.loads(text)["faults"]) == 2


def test_exit_code_and_one_line_in_a_process(tmp_path: Path) -> None:
    folder = made(tmp_path / "s")
    (folder / "shard-00001.h5").unlink()
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "store", "verify", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{folder / 'shard-00001.h5'} is missing; run the same command again")
    assert result.stderr == f"probe: {folder} has 1 fault: see the lines above\n"


def test_merge(tmp_path: Path) -> None:
    parts = [made(tmp_path / "a"), made(tmp_path / "b", first=3)]
    code, text, _ = run("merge", *parts, "--out", tmp_path / "ab")
    assert (code, text) == (0, f"{tmp_path / 'ab'}: 12 rows of 2 stores\n")
    assert ActivationStore.open(tmp_path / "ab")["z", 0][:, 0].tolist() == [*range(6), *range(3, 9)]
    assert "merged from 2 stores" in run("info", tmp_path / "ab")[1]
    assert json.loads(run("merge", *parts, "--out", tmp_path / "ab", "--json")[1])["rows"] == 12
    assert isinstance(run("merge", parts[0], parts[0], "--out", tmp_path / "aa")[2], StoreError)


@pytest.mark.parametrize("format", ["safetensors", "npz", "transformer_lens"])
def test_export(tmp_path: Path, format: str) -> None:
    folder, out = made(tmp_path / "s"), tmp_path / "file"
    code, text, _ = run(
        "export", folder, "--format", format, "--out", out, "--sites", "resid_post", "--layers", "-1", "--label",
        "premise:", "--key", "k0,k2",
    )  # fmt: skip
    assert code == 0
    assert text.startswith(f"{out}: 2 rows, ")
    name = "blocks.1.hook_resid_post" if format == "transformer_lens" else "acts/resid_post/L1"
    if format == "npz":
        with np.load(out) as file:
            values, names = file[name], [one for one in file.files if one.startswith("acts/")]
    else:
        from safetensors.torch import load_file

        loaded = load_file(out)
        values, names = loaded[name].float().numpy(), list(loaded)
    assert names == [name]
    assert values.reshape(2, 4)[:, 0].tolist() == [1.0, 5.0]


def test_export_refusals(tmp_path: Path) -> None:
    folder = made(tmp_path / "s")
    for arguments, kind, words in (
        (("--label", "query"), UsageError, "has label 'query'; it has 'answer', 'premise:3'"),
        (("--label", ","), UsageError, "label is empty: name one, or leave the flag out for all"),
        (("--sites", ""), UsageError, "sites is empty"),
        (("--layers", ","), UsageError, "layers is empty"),
        (("--format", "pt"), UsageError, "unknown export format 'pt'; allowed: safetensors, npz, transformer_lens"),
        (("--sites", "mlp_out"), UsageError, "no mlp_out layer 0 in"),
    ):
        _, _, error = run("export", folder, "--out", tmp_path / "file", *arguments)
        assert isinstance(error, kind)
        assert words in str(error)
    assert not (tmp_path / "file").exists()
    assert isinstance(run("export", folder, "--out", tmp_path)[2], UsageError)
    # A fault of the store is no fault of the command.
    shard = folder / "shard-00001.h5"
    shard.write_bytes(shard.read_bytes()[:-40])
    assert isinstance(run("export", folder, "--out", tmp_path / "file")[2], StoreError)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str
) -> None:
    folder = made(tmp_path / "s")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in (
        ("export", folder, "--out", empty),
        ("merge", folder, folder, "--out", empty),
        ("merge", folder, empty, "--out", "x"),
        ("info", empty),
        ("verify", empty),
        ("export", empty, "--out", "x"),
    ):
        error = run(*words)[2]
        assert isinstance(error, UsageError), words
        assert "is empty: give a path" in str(error)
    assert not list((tmp_path / "here").iterdir())


def test_usage_has_its_own_exit_code(tmp_path: Path) -> None:
    """In a process, where the errors become codes: 2 for what the user gave, 1 for what the store is."""
    folder = made(tmp_path / "s")
    for words, code in (
        (["store", "export", folder, "--format", "pt", "--out", "x"], 2),
        (["store", "merge", folder, "--out", "x"], 2),
        (["capture", "--out", ""], 2),
        (["store", "info", tmp_path], 1),
    ):
        command = [sys.executable, "-c", "from experiments.cli import main; main()", *map(str, words)]
        result = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path
        )
        assert result.returncode == code, (words, result.stderr)
        assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
