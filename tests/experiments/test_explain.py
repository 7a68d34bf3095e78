"""``probe explain``: sentences for every label, a pair from a run's tables, bad keys, hostile text, a real run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.cli import main
from experiments.errors import RunError, UsageError
from experiments.explain import chosen, explain, failing, find, open_run
from experiments.link import DONORS, KINDS
from experiments.report.pairs import pairs
from experiments.report.source import Source
from experiments.sentences import agreement, bars, sentence, sparkline, thresholds, unproven_repairs

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b]0;title\x07\x00\u202e &"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@dataclass(frozen=True)
class Ended:
    returncode: object
    stdout: str
    stderr: str


def probe(*words: str) -> Ended:
    """The command in this process: it starts no model, so that is a second saved each time."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["probe", *words])
        with pytest.raises(SystemExit) as end:
            main()
    return Ended(end.value.code, out.getvalue(), err.getvalue())


def row(**change) -> dict:
    """An overridden answer: gold no, default +2 toward yes, signal 0.5 toward no."""
    return {
        "arm": "base", "setting": "n=4", "n": 4, "key": "ab12" + "0" * 60, "presentation": "original",
        "cell": "forward-no", "gold": "no", "answer": "yes", "correct": False, "outcome": "D", "difference": 1.5,
        "readout_correct": False, "signal": 0.5, "default": -2.0, "kind": "overridden", "share": 1.0,
        "tossed": [0.1, 0.0, 0.0, 0.4, 0.5], "lost_at": -1, "layer": 2, "margin": 1.2, "last_margin": 2.0,
        "decodable": True, "margins": [-0.3, 0.2, 1.2, 2.0], "readable": [False, False, True, True], "against": None,
        "against_logits": np.nan, "patch_layer": 1, **dict.fromkeys((f"repaired_{donor}" for donor in DONORS), None),
        **change,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "The gold answer was readable from layer 2 on and still at the last layer; the readout leans to yes by 2.00 "
             "whatever is asked, and this instance adds only 0.50 toward no."),
        ({"readable": [True] * 4}, "The gold answer was readable from layer 0 on and still"),
        ({"readable": [True, False, False, True]}, "The gold answer was readable at the last layer; the readout"),
        ({"readable": [True, True, True, False]}, "Most fold splits find the gold answer at the last layer; the readout"),
        ({"readable": None, "margins": None, "share": np.nan}, "The gold answer was readable at layer 2; the readout"),
        ({"share": 0.6}, "toward no. Only 60% of the fold splits say so."),
        ({"correct": True}, "toward no. The text says no all the same."),
        ({"kind": "reversed", "signal": -0.7, "default": -0.8}, "but what this instance adds to the readout, 0.70, points "
         "to yes, not to no; the default leans to yes by 0.80."),
        ({"kind": "reversed", "signal": -2.5, "default": 1.0}, "not to no; the default leans to no by 1.00."),
        ({"kind": "lost", "lost_at": 3, "readable": [False, True, True, False]},
         "The gold answer, no, was readable at 2 layers from 1 to 2, no longer from layer 3 on"),
        ({"kind": "lost", "lost_at": 3, "readable": [False, False, True, False]}, "was readable at layer 2, no longer"),
        ({"kind": "mixed", "readable": [False, True, True, True], "reads": False}, "the answer is there and not read out"),
        ({"kind": "lost", "lost_at": 3, "readable": None}, "was readable at layer 2, no longer from layer 3 on"),
        ({"kind": "not_decodable", "decodable": False, "signal": -1.0},
         "The probe does not find the gold answer, no, at layer 2, chosen on other problems, nor at the last layer that "
         "can be read: as far as linear probes tell, it was not worked out."),
        ({"kind": "not_decodable", "decodable": False}, "nor at the last layer that can be read. Without its default the "
         "readout itself leans to no, by 0.50, so linear probes fitted to this many prompts may be missing what is there."),
        ({"kind": "not_decodable", "decodable": None}, "No probe of the original prompts beats shuffled labels (p at most "
         "0.05)"),
        ({"kind": "mixed", "share": 0.4}, "or refits disagree (the commonest label has 40% of the fold splits)."),
        ({"kind": "mixed", "share": 0.0}, "or refits disagree (no fold split gives a label)."),
        ({"kind": "mixed", "share": 0.0, "default": np.nan, "signal": np.nan}, "The default δ is undefined"),
        ({"kind": "text", "difference": -1.0, "answer": None}, "The readout leans to no, the gold answer, by 1.00 logits; "
         "the text could not be read (unparsed). Nothing measured inside explains it."),
        ({"kind": "text", "difference": -1.0}, "the text says yes."),
        ({"kind": "right", "difference": -1.0, "correct": True}, "by 1.00 logits, and the text says so."),
    ],
)  # fmt: skip
def test_each_label_has_a_plain_sentence(change, said) -> None:
    text = sentence(row(**change), status="unparsed")
    assert said in text
    assert "nan" not in text and "None" not in text


def test_sparkline_tells_readable_wrong_and_chance_apart() -> None:
    least = [1.0, 1.0, 0.1, 1.0, 1.0]
    assert sparkline([-1.0, 0.5, 0.1, 1.0, 2.0], [False, False, True, True, True], least) == "×·▁▅█"
    # Against gold by less than what counts as readable, and a layer at which nothing is readable.
    assert sparkline([-0.9, -5.0], [False, False], [1.0, np.inf]) == "··"


def test_a_cross_is_as_far_out_as_the_least_readable_margin_of_its_layer() -> None:
    table = pd.DataFrame([
        row(), row(margins=[-9.0, -0.2, -1.2, -1.1], readable=[False] * 4),
        row(readout_correct=True, margins=[-3.0, 0.1, 0.31, 0.4], readable=[False, True, True, True]),
    ])  # fmt: skip
    least = thresholds(table)
    # Layers 2 and 3 have readable failures; at 1 only a right readout is, at 0 nothing.
    assert least["base", "original", False].tolist() == [np.inf, 0.1, 1.2, 2.0]
    assert least["base", "original", True].tolist() == [np.inf, 0.1, 0.31, 0.4]
    assert [bars(one, least) for one in table.to_dict("records")] == ["··▅█", "·××·", "·▃▇█"]
    assert bars(row(readable=None, margins=None), {}) == ""


def test_mixed_has_no_share_of_its_own() -> None:
    assert agreement("lost", 0.8) == "80% of fold splits" and agreement("lost", None) == ""
    assert agreement("mixed", 0.4) == "no label in more than half of the fold splits (at most 40%)"
    assert agreement("mixed", 0.0) == "no label in more than half of the fold splits (in none)"


def test_a_repair_that_is_not_above_its_controls_is_named() -> None:
    def tried(*counts: tuple[int, float]) -> dict:
        return {donor: {"value": count / 11, "low": low, "count": count, "n": 11}
                for donor, (count, low) in zip(DONORS, counts, strict=True)}  # fmt: skip

    above = {"outcome": "D", "answered": "wrong", "repaired": tried((10, 0.62), (2, 0.05), (1, 0.02))}
    below = {"outcome": "U", "answered": "wrong", "repaired": tried((2, 0.05), (8, 0.43), (7, 0.35))}
    within = {"outcome": "D", "answered": "wrong", "repaired": tried((4, 0.15), (2, 0.05), (1, 0.02))}
    assert unproven_repairs([above, {"repaired": None}]) == []
    assert unproven_repairs([above, below, within]) == [
        "one right, answer wrong 2/11 (unrelated 8/11, random 7/11)", "both wrong 4/11 (unrelated 2/11, random 1/11)"
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory with three pairs, in one of which all text from outside is hostile."""
    keys = {"ab12": "n=4", "ab77": "n=4", "cd99": "n=6"}
    attribution, behaviour, items = [], [], []
    for prefix, setting in keys.items():
        key = prefix + "0" * 60
        text = HOSTILE if prefix == "cd99" else "Yes"
        for arm in ("base", f"grpo{HOSTILE}"):
            for kind in ("original", "equivalent"):
                label = "overridden" if kind == "original" else "right"
                more = {"kind": "lost", "lost_at": 3, "readable": [False, True, True, False], "share": 0.8,
                        "against": f"head 1.2{HOSTILE}", "against_logits": -1.25, "repaired_matched": True,
                        "repaired_random": False}  # fmt: skip
                if prefix != "cd99" or kind != "original":
                    more = {"kind": label}
                if more["kind"] == "right":
                    more |= {
                        "difference": -1.0,
                        "correct": True,
                        "answer": "no",
                        "readout_correct": True,
                        "share": np.nan,
                    }
                attribution.append(row(arm=arm, setting=setting, key=key, presentation=kind, **more))
                behaviour.append({"arm": arm, "setting": setting, "key": key, "presentation": kind, "text": text,
                                  "status": "parsed", "answer": "yes"})  # fmt: skip
        messages = [{"role": "user", "content": f"Is it? {text} \ud83d"}]
        shown = [{"kind": kind, "gold": "no", "spans": [], "messages": messages}
                 for kind in ("original", "equivalent")]  # fmt: skip
        items.append({"setting": setting, "key": key, "cell": "forward-no", "gold": "no", "presentations": shown})
    arms = list(dict.fromkeys(one["arm"] for one in attribution))
    layered = pd.DataFrame(
        [{"arm": arm, "presentation": kind, "layer": layer} for arm in arms for kind in ("original", "equivalent")
         for layer in range(4)]
    )  # fmt: skip
    tables = tmp_path / "run" / "tables"
    tables.mkdir(parents=True)
    write = {"attribution": pd.DataFrame(attribution), "behaviour": pd.DataFrame(behaviour),
             "probes": layered.assign(auroc=0.75), "lens": layered.assign(delta=-0.5, signal=1.5)}  # fmt: skip
    for name, table in write.items():
        table.to_parquet(tables / f"{name}.parquet")
    (tmp_path / "run" / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    (tmp_path / "run" / "results.json").write_text("{}")
    return tmp_path / "run"


def test_a_pair_is_told_from_the_tables(folder) -> None:
    run = open_run(folder)
    rows = chosen(run, "base", None)
    first, second = explain(run, find(run, "cd")[0], rows)
    assert (first.presentation, first.label, first.lost_at, first.share) == ("original", "lost", 3, 0.8)
    assert (first.readout, first.default, first.signal) == (-1.5, -2.0, 0.5)
    assert first.readout == first.default + first.signal
    assert first.repaired == {"matched": True, "unrelated": None, "random": False} and first.patch_layer == 1
    assert [one.margin for one in first.layers] == [-0.3, 0.2, 1.2, 2.0]
    # Gold is no, and the lens default is toward yes all the same, as in the lens table and on the page.
    assert (first.layers[0].lens_delta, first.layers[0].lens_signal, first.layers[0].auroc) == (-0.5, 1.5, 0.75)
    assert (second.presentation, second.label, second.share, second.correct) == ("equivalent", "right", None, True)
    assert len(explain(run, find(run, "cd")[0], chosen(run, None, None))) == 4
    assert len(explain(run, find(run, "cd")[0], chosen(run, None, "original"))) == 2


def test_nothing_hostile_reaches_the_terminal(folder) -> None:
    for words in (["cd99"], ["cd99", "--json"], [], ["--json"], ["ab12", "--arm", "base"]):
        result = probe("explain", str(folder), *words)
        assert result.returncode == 0, result.stderr
        assert not CONTROL.search(result.stdout), words
    shown = probe("explain", str(folder), "cd99").stdout
    assert "<script>alert(1)</script>red &" in shown
    shown = " ".join(shown.split())
    assert "against head 1.2<script>" in shown
    assert "pushes most against the gold answer, by 1.25 logits of the readout" in shown
    assert "layer 1: matched yes, random no" in shown and "lost at layer 3" in shown


def test_failures_are_listed_by_label_with_shares(folder) -> None:
    run = open_run(folder)
    found = failing(chosen(run, None, None))
    assert list(found) == ["overridden", "lost"] and [len(one) for one in found.values()] == [4, 2]
    shown = probe("explain", str(folder), "--arm", "base").stdout
    assert "base: 3 of 6 readouts are wrong" in shown and "overridden: 2 of 3, 67% [" in shown
    assert "ab12000000  n=4, original, D  100% of splits" in shown
    assert "the gold answer is readable at an earlier layer, no longer at the last." in shown and "Coin: the" in shown
    made = json.loads(probe("explain", str(folder), "--arm", "base", "--json").stdout)
    shares = {one["label"]: one for one in made["shares"]}
    assert shares["lost"]["value"] == pytest.approx(1 / 3) and shares["lost"]["n"] == 3
    assert shares["lost"]["low"] < 1 / 3 < shares["lost"]["high"]
    assert made["labels"]["lost"][0]["key"] == "cd99" + "0" * 60


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["zz"], 2, "no key begins with 'zz'; some are ab1200, ab7700, cd9900; `probe explain "),
        (["ab120x"], 2, "near ones are ab1200"),
        ([""], 2, "KEY is empty: give the begin of a pair's key, such as ab1200, or none"),
        (["ab"], 2, "2 keys begin with 'ab' (ab1200, ab7700, …): give more of it"),
        (["x\x1b[31m" + "y" * 500], 2, "no key begins with 'xyyyy"),
        (["ab12", "--arm", "nobody"], 2, "arm is 'nobody': choose from base, grpo"),
        (["ab12", "--presentation", "negated"], 2, "presentation is 'negated': choose from original, equivalent"),
    ],
)
def test_what_is_not_there_is_one_line(folder, words, code, said) -> None:
    result = probe("explain", str(folder), *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr and result.stderr.count("\n") == 1 and not CONTROL.search(result.stderr)


def test_a_key_in_capitals_is_found(folder) -> None:
    assert find(open_run(folder), "AB12") == [("n=4", "ab12" + "0" * 60)]


@pytest.mark.parametrize("columns", [60, 80])
def test_no_line_is_wider_than_the_terminal(folder, columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["ab12", "--arm", "base"], ["--arm", "base"]):
        shown = probe("explain", str(folder), *words).stdout.splitlines()
        # What was asked and the key stand as they are.
        assert max(len(line) for line in shown if "0" * 60 not in line) <= columns


@pytest.mark.parametrize("table", ["behaviour", "attribution"])
def test_rows_that_are_missing_are_named(folder, table) -> None:
    path = folder / "tables" / f"{table}.parquet"
    pd.read_parquet(path).iloc[1:].to_parquet(path)
    for words in (["ab12"], [], ["cd99", "--json"]):
        result = probe("explain", str(folder), *words)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.count("\n") == 1
        # The table loses the first original of the base; in attribution the arm and pair are known from other rows.
        assert f"{path} lacks 1 of 12 rows, the first base, n=4, ab12" in result.stderr
        assert "original; put it back, or repeat the command" in result.stderr


@pytest.mark.parametrize("keep", [0, 1, 40])
def test_items_that_are_cut_short_are_named_and_left_alone(folder, keep) -> None:
    path = folder / "items.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    cut = "".join(whole[:keep]) if keep < 40 else whole[0] + whole[1][:keep]
    path.write_text(cut)
    result = probe("explain", str(folder), "ab12")
    assert (result.returncode, result.stdout) == (1, "") and result.stderr.count("\n") == 1
    assert f"{path} is damaged" in result.stderr and "no key" not in result.stderr
    assert path.read_text() == cut


def test_runs_that_can_not_be_explained(folder) -> None:
    with pytest.raises(RunError, match="nowhere does not exist: give the folder of a finished run"):
        open_run(folder / "nowhere")
    with pytest.raises(RunError, match=r"has no results.json: give the folder of a finished run"):
        open_run(folder / "tables")
    path = folder / "tables" / "attribution.parquet"
    table = pd.read_parquet(path)
    table.drop(columns=["tossed"]).to_parquet(path)
    with pytest.raises(RunError, match="was made by an earlier version, with other labels: repeat the command"):
        open_run(folder)
    path.unlink()
    with pytest.raises(RunError, match="has no table 'attribution': nothing was measured inside"):
        open_run(folder)


def test_a_key_under_two_settings_is_told_under_both(folder) -> None:
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    twice = {**lines[0], "setting": "n=8"}
    (folder / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*lines, twice]))
    key = lines[0]["key"]
    assert find(open_run(folder), key[:6]) == [("n=4", key), ("n=8", key)]
    with pytest.raises(UsageError, match="2 keys begin with 'a'"):
        find(open_run(folder), "a")


def test_the_pair_browser_has_the_sentences_and_their_tags(folder) -> None:
    run = open_run(folder)
    tables = {name: table.assign(answer="yes") if name == "behaviour" else table for name, table in run.tables.items()}
    source = Source({}, {}, {}, list(run.items.values()), tables, run.arms, ("n=4", "n=6"))
    found = pairs(source)
    assert len(found) == 3
    hostile = next(one for one in found if one.setting == "n=6")
    answer = hostile.arms[0].answers[0]
    assert answer.tags == "kind:lost presentation:original" and answer.agree == "80% of fold splits"
    assert (answer.readout, answer.default, answer.signal) == ("−1.50", "−2.00", "+0.50")
    assert answer.sentence.startswith("The gold answer, no, was readable at 2 layers") and answer.bars == "·▂█·"
    assert not CONTROL.search(answer.text)
    assert len(pairs(source, 1)) == 1


def test_a_run_of_the_built_in_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from experiments.cli import main; main()"]
    small = [*command, "run", "--set", "n=4", "--limit", "24", "--set", "probe.shuffles=19", "--set", "patch.pairs=6",
             "--set", "ablate.random_sets=2", "--set", "resamples=100", "--out", str(out)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(small, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    made = json.loads(probe("explain", str(out), "--json").stdout)
    assert set(made["labels"]) <= set(KINDS) and {one["arm"] for one in made["shares"]} == {"base", "grpo"}
    table = pd.read_parquet(out / "tables" / "attribution.parquet")
    assert sum(len(part) for part in made["labels"].values()) == (table["kind"] != "right").sum()
    for key in table["key"].unique()[:3]:
        told = json.loads(probe("explain", str(out), key[:12], "--json").stdout)
        assert len(told) == 4 and len({one["sentence"] for one in told}) >= 1
        for one in told:
            assert one["readout"] == pytest.approx(one["default"] + one["signal"])
            assert [layer["layer"] for layer in one["layers"]] == [0, 1, 2, 3]
    shown = probe("explain", str(out), table["key"].iloc[0][:12]).stdout
    assert "readout " in shown and "label " in shown and "lens δ" in shown
