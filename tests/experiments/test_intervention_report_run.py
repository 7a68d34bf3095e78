"""The report of a real patching study and a real ablation of the built-in pair: every number is one of the run's tables."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from experiments.ablate_command import AblateConfig, ablate
from experiments.patch_command import PatchConfig, study
from experiments.progress import Reporter
from experiments.report.intervention_findings import findings
from experiments.report.intervention_source import exceeding, read
from experiments.report.text import signed, span
from experiments.rundir import RunDirectory
from experiments.summary_interventions import show

SMALL = {"model": "builtin", "adapter": ("builtin",), "params": {"n": 4, "names": "builtin"}, "limit": 12, "resamples": 100,
         "check_cells": 4}  # fmt: skip


def text_of(run: RunDirectory) -> str:
    html = re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", run.report.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    path = tmp_path_factory.mktemp("patched") / "run"
    config = PatchConfig(
        **SMALL, pairs=4, sites=("resid_post", "z"), positions=("answer", "query"), transplant=("answer",)
    )
    study(config, path, config_text="", reporter=Reporter(quiet=True))
    return RunDirectory(path)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    path = tmp_path_factory.mktemp("cut") / "run"
    config = AblateConfig(**SMALL, pairs=6, heads=2, random_sets=2, grid=True)
    ablate(config, path, config_text="", reporter=Reporter(quiet=True))
    return RunDirectory(path)


def test_the_table_of_studies_is_that_of_the_effects(patched: RunDirectory) -> None:
    effects = patched.table("patch_effects")
    matched = effects[(effects["donor"] == "matched") & (effects["group"] == "all")]
    source = read(patched)
    keys = ["arm", "direction", "kind", "site", "position"]
    assert len(source.sweeps) == len(matched.drop_duplicates(keys)) >= 8
    for one in source.sweeps:
        assert len(exceeding(source, one)) <= int(one.matched["specific"].fillna(False).sum())
    html = patched.report.read_text()
    body = re.search(r'<table id="studies">.*?<tbody>(.*?)</tbody>', html, re.S)
    assert body is not None and body[1].count("<tr") == len(source.sweeps)


def test_every_figure_file_is_whole_and_says_what_it_shows(patched: RunDirectory, sweep: RunDirectory) -> None:
    names = set()
    for run in (patched, sweep):
        for path in (run.path / "figures").glob("*.svg"):
            root = ElementTree.parse(path).getroot()
            (caption,) = (one.text or "" for one in root if one.tag.endswith("desc"))
            assert len(caption) > 40
            names.add(re.sub(r"-\d+$", "", path.stem))
    assert {"layers", "spans", "transplant", "ranking", "before-after", "beyond-controls", "one-by-one"} <= names


def test_the_gain_is_the_tables(patched: RunDirectory) -> None:
    table = patched.table("transplant")
    first = table[(table["presentation"] == "all") & (table["site"] == "resid_post")].iloc[0]
    assert f"The gain is {signed(first['total'])} {span(first['total_low'], first['total_high'])}" in text_of(patched)


def test_the_signal_is_the_tables(sweep: RunDirectory) -> None:
    table = sweep.table("ablation")
    for arm, rows in table.groupby("arm"):
        (row,) = rows[(rows["family"] == "top") & (rows["measure"] == "signal_mean")].to_dict("records")
        said = {one.lead: one.text for one in findings(read(sweep)) if one.arm == arm}["The signal"]
        if pd.notna(row["change"]):
            assert f"from {signed(row['before'])} to {signed(row['after'])} logits" in said


def test_the_terminal_prints_both(
    patched: RunDirectory, sweep: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in (patched, sweep):
        show(run)
        out = capsys.readouterr().out
        assert "base: " in out and "grpo: " in out and str(Path(run.report)) in out
        assert "nan" not in out.lower()
