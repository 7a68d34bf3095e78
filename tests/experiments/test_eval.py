"""`probe eval`, `probe score` and `probe compare` on the built-in pair, as one would call them."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from sklearn.metrics import accuracy_score, cohen_kappa_score

from experiments.cli import _guarded
from experiments.config import Setting
from experiments.errors import RunError, UsageError
from experiments.eval_config import load_eval, table_of
from experiments.summary import show_made
from tasks.ordering import Ordering

WORDS = (
    "--set",
    "n=4,6",
    "--set",
    "presentations=original,equivalent,repeat",
    "--limit",
    "24",
    "--set",
    "resamples=100",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def probe(*words: str) -> Ended:
    """The command in this process, behind its error boundary: a process of its own would spend its time on imports."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["probe", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = _guarded()
    finally:
        sys.argv = before
    return Ended(code, out.getvalue(), err.getvalue())


def failed(result: Ended, code: int, *parts: str) -> None:
    assert result.returncode == code, (result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.startswith("probe: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled run of base and adapter."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    result = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    assert result.returncode == 0, result.stderr
    return folder


def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_the_table_is_what_the_answers_say(run: Path) -> None:
    behaviour = pd.read_parquet(run / "tables" / "behaviour.parquet")
    assert len(behaviour) == 2 * 2 * 24 * 3
    table = pd.read_csv(run / "table.csv")
    assert list(table[["n", "arm", "pair"]].itertuples(index=False, name=None)) == [
        (n, arm, pair)
        for n in (4, 6)
        for arm in ("base", "grpo")
        for pair in ("original/equivalent", "original/repeat")
    ]
    for row in table.to_dict("records"):
        part = behaviour[(behaviour["n"] == row["n"]) & (behaviour["arm"] == row["arm"])]
        first, second = (
            part[part["presentation"] == kind].set_index("key")["answer"] for kind in row["pair"].split("/")
        )
        gold = part[part["presentation"] == "original"].set_index("key")["gold"]
        both = first.notna() & second.notna()
        assert row["pairs"] == 24
        assert row["accuracy_original"] == pytest.approx(accuracy_score(gold, first.fillna("-")))
        assert row["invariance"] == pytest.approx((first[both] == second[both]).mean())
        pooled = pd.concat([first[both], second[both]])
        chance = (pooled == "yes").mean() ** 2 + (pooled == "no").mean() ** 2
        assert row["kappa"] == pytest.approx((row["invariance"] - chance) / (1 - chance))
        # Cohen's κ has the separate marginals for its reference, which is never above the pooled one.
        assert cohen_kappa_score(first[both], second[both]) >= row["kappa"] - 1e-12


def test_sampled_repeats_differ_and_greedy_ones_do_not(run: Path, tmp_path: Path) -> None:
    sampled = pd.read_csv(run / "table.csv")
    assert sampled[sampled["pair"] == "original/repeat"]["invariance"].min() < 1
    result = probe("eval", *WORDS, "--out", str(tmp_path / "greedy"))
    assert result.returncode == 0, result.stderr
    greedy = pd.read_csv(tmp_path / "greedy" / "table.csv")
    assert (greedy[greedy["pair"] == "original/repeat"]["invariance"] == 1).all()


def test_an_interrupted_run_ends_like_an_uninterrupted_one(run: Path, tmp_path: Path) -> None:
    """Cut the answers in the middle of a line, drop what follows from them, and give the same command."""
    folder = copied(run, tmp_path)
    for name in ("results.json", "table.csv", "tables/behaviour.parquet"):
        (folder / name).unlink()
    text = (folder / "responses.jsonl").read_bytes()
    (folder / "responses.jsonl").write_bytes(text[: len(text) * 2 // 3 - 7])
    result = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    assert result.returncode == 0, result.stderr
    for name in ("results.json", "table.csv"):
        assert (folder / name).read_bytes() == (run / name).read_bytes()
    again = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    assert again.returncode == 0 and "nothing to do" in again.stderr
    failed(probe("eval", *WORDS, "--out", str(folder)), 1, "temperature was 1.0, is 0.0")


def test_scoring_again_changes_nothing_unless_the_text_says_so(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    result = probe("score", str(folder))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("288 answers read again") and "0 changed" in result.stdout
    assert (folder / "results.json").read_bytes() == (run / "results.json").read_bytes()
    lines = (folder / "responses.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["text"] = "I can't tell."
    (folder / "responses.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    assert "1 changed" in probe("score", str(folder)).stdout
    behaviour = pd.read_parquet(folder / "tables" / "behaviour.parquet")
    assert behaviour["answer"].isna().sum() == 1
    (folder / "responses.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    failed(probe("score", str(folder)), 1, "lacks 1 answers")


def test_a_run_read_by_an_older_parser_is_brought_up_to_date(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    values = json.loads((folder / "resolved.json").read_text())
    values["parser_version"] = 0
    (folder / "resolved.json").write_text(json.dumps(values))
    failed(probe("compare", str(run), str(folder)), 1, "parser version", "probe score")
    assert "(parser version 0 -> " in probe("score", str(folder)).stdout
    assert probe("compare", str(run), str(folder)).returncode == 0
    again = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    assert again.returncode == 0, again.stderr


def test_arms_of_one_run_compare_as_in_its_results(run: Path) -> None:
    result = probe("compare", str(run), f"{run}:grpo", "--resamples", "100", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    inside = json.loads((run / "results.json").read_text())["comparison"]["original/equivalent"]["grpo"]
    for name in ("accuracy_original", "invariance", "kappa"):
        ours = found["pairs"]["original/equivalent"][name]
        assert (ours["difference"], ours["low"], ours["high"]) == (
            inside[name]["difference"], inside[name]["low"], inside[name]["high"]
        )  # fmt: skip
    assert set(found["tests"]) == {"original", "equivalent", "repeat"}
    shown = probe("compare", str(run), f"{run}:grpo", "--resamples", "100")
    assert "second - first" in shown.stdout and "McNemar" in shown.stdout


def test_runs_on_other_items_are_not_compared(run: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    words = ("--set", "n=4,6", "--set", "presentations=original,equivalent,repeat", "--set", "resamples=100")
    assert probe("eval", *words, "--limit", "8", "--out", str(short)).returncode == 0
    failed(probe("compare", str(run), str(short)), 1, "different items")
    other = tmp_path / "other"
    assert probe("eval", "--set", "n=4", "--limit", "8", "--out", str(other)).returncode == 0
    failed(probe("compare", str(short), str(other)), 1, "params.n=4.presentations", '"repeat"')
    folder = copied(run, tmp_path)
    lines = (folder / "items.jsonl").read_text().replace("Yes or No only", "No or Yes only", 1)
    (folder / "items.jsonl").write_text(lines)
    failed(probe("compare", str(run), str(folder)), 1, "line 1", "rendered differently")
    failed(probe("compare", str(run), f"{run}:sft"), 2, "'sft'", "base, grpo")
    failed(probe("compare", str(run), str(tmp_path / "none")), 1, "none")


def test_what_can_not_apply_is_refused(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "x"))
    failed(probe("eval", "--set", "top_k=5", *out), 2, "top_k is 5", "temperature")
    failed(probe("eval", "--set", "max_tokens_reasoning=50", *out), 2, "prompt=reasoning")
    failed(probe("eval", "--set", "probe.folds=3", *out), 2, "probe")
    failed(probe("eval", "--set", "presentations=original", *out), 2, "add one")
    failed(probe("eval", "tabel-1", *out), 2, "'tabel-1'", "table-1")
    failed(probe("eval", "--set", "n=4,4", *out), 2, "none twice")
    failed(probe("run", "--set", "prompt=reasoning", *out), 2, "probe eval")
    failed(probe("score", str(tmp_path)), 1, "resolved.json")


def test_a_configuration_file_with_a_table_and_a_figure(tmp_path: Path) -> None:
    config = {
        "params": {"n": [4, 6], "names": "builtin"},
        "limit": 8,
        "resamples": 100,
        "table": {"rows": ["arm"], "columns": ["accuracy_original", "kappa_bar"]},
        "figure": {"x": "n", "y": ["invariance"], "lines": ["arm"]},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    result = probe("eval", str(tmp_path / "mine.yaml"), "--out", str(folder))
    assert result.returncode == 0, result.stderr
    table = pd.read_csv(folder / "table.csv")
    assert table["arm"].tolist() == ["base", "grpo"] and "kappa_bar" in table
    assert (folder / "figure.svg").read_text().lstrip().startswith(("<?xml", "<svg"))
    result = probe("score", str(folder), "--table", "table-12")
    assert result.returncode == 0, result.stderr
    assert pd.read_csv(folder / "table-12.csv")["n"].tolist() == [4, 6, 4, 6]
    assert pd.read_csv(folder / "table.csv").equals(table)
    assert probe("score", str(folder), "--table", "figure-2").returncode == 0
    assert (folder / "figure-2.svg").exists() and (folder / "figure-2.csv").exists()
    failed(probe("score", str(folder), "--table", "table-5"), 2, "horn", "ordering")
    failed(probe("score", str(folder), "--table", "table-22"), 2, "repeat")


def test_the_default_table_pairs_each_presentation_with_its_counterpart() -> None:
    config = load_eval(None, [], {})
    kinds = ["original", "equivalent", "distracted", "distracted_equivalent"]
    grid = [Setting("n=4", Ordering().validate({"n": 4, "presentations": kinds}))]
    assert table_of(config, grid).pairs == (
        ("original", "equivalent"), ("original", "distracted"), ("distracted", "distracted_equivalent")
    )  # fmt: skip
    with pytest.raises(UsageError, match="no recipe"):
        load_eval("nothing", [], {})
    assert issubclass(UsageError, RunError)


def cut(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Damage done to the lines of a file."""

    def do(folder: Path) -> None:
        lines = (folder / name).read_text().split("\n")
        (folder / name).write_text("\n".join(change(lines)))

    return do


def without(key: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [json.dumps({k: v for k, v in json.loads(lines[0]).items() if k != key}), *lines[1:]]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut("responses.jsonl", lambda lines: [*lines[:3], lines[3][:400] + "\x00", *lines[4:]]), "line 4 of"),
        (cut("responses.jsonl", without("text")), "line 1 of"),
        (cut("responses.jsonl", lambda lines: [lines[0].replace('"text": "', '"text": 3, "x": "'), *lines[1:]]), "line 1"),
        (cut("responses.jsonl", lambda lines: [lines[0].replace('"key"', '"kye"'), *lines[1:]]), "line 1 of"),
        (lambda folder: (folder / "responses.jsonl").open("ab").write(b'\xff "setting": "n=4"\n'), "responses.jsonl"),
        (lambda folder: (folder / "items.jsonl").write_text(""), "items.jsonl is damaged"),
        (cut("items.jsonl", lambda lines: ["{}", *lines[1:]]), "line 1 of"),
        (cut("items.jsonl", lambda lines: lines[:30]), "hold different rows"),
        (lambda folder: (folder / "resolved.json").write_text("[1]"), "resolved.json is damaged"),
        (lambda folder: (folder / "resolved.json").write_text("{}"), "resolved.json is damaged"),
    ],
)  # fmt: skip
def test_damaged_files_are_named_in_one_line(run: Path, tmp_path: Path, damage: Any, said: str) -> None:
    folder = copied(run, tmp_path)
    damage(folder)
    failed(probe("score", str(folder)), 1, said)


def test_rows_lost_from_the_table_are_not_scored_away(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    path = folder / "tables" / "behaviour.parquet"
    pd.read_parquet(path).iloc[5:].to_parquet(path, index=False)
    failed(probe("score", str(folder)), 1, "hold different rows")


@pytest.mark.parametrize("text", ["{}", "[]", "{"])
def test_results_that_can_not_be_read_are_named(run: Path, tmp_path: Path, text: str) -> None:
    folder = copied(run, tmp_path)
    (folder / "results.json").write_text(text)
    again = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    failed(again, 1, "results.json is damaged")


def test_deleted_files_are_made_again_by_the_same_command(run: Path, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    for name in ("table.csv", "tables/behaviour.parquet"):
        (folder / name).unlink()
    again = probe("eval", *WORDS, "--set", "temperature=1", "--out", str(folder))
    assert again.returncode == 0, again.stderr
    for name in ("table.csv", "tables/behaviour.parquet", "results.json", "responses.jsonl"):
        assert (folder / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.parametrize("columns", [40, 60, 80, 150, None])
def test_no_number_is_folded_or_cut_at_any_width(
    run: Path, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    results = json.loads((run / "results.json").read_text())
    with redirect_stdout(out):
        show_made(run, results)
    shown = out.getvalue()
    assert "…" not in shown
    expected = [f"{100 * row[name]:.1f}" for row in results["table"]["rows"] for name in ("invariance", "unstable")]
    for number in expected:
        assert shown.count(f" {number} ") >= expected.count(number), number
    tables = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert columns in (40, None) or max(map(len, tables)) <= columns
