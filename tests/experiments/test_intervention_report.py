"""The report of a patching study: what is said about effects that exceed their controls and about those that do not.

The tables are made by hand, so every number on the page is known.
"""

from __future__ import annotations

import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from experiments.errors import RunError
from experiments.report import intervention_page, write
from experiments.report.intervention_findings import findings, ranges
from experiments.report.intervention_source import read
from experiments.report.plots_interventions_heads import grid_of
from experiments.rundir import RunDirectory
from experiments.summary_interventions import show
from tests.experiments.made_interventions import HOSTILE, effects, made, transplant

CURVE = {(0, None): 0.2, (1, None): 1.6, (2, None): 2.4, (3, None): 3.5}
FLAT = {(0, None): 0.1, (1, None): 0.2, (2, None): 0.3, (3, None): 3.5}


class Balanced(HTMLParser):
    """Fails where tags are not balanced."""

    VOID = frozenset(("meta", "link", "img", "br", "input", "hr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text_of(html: str) -> str:
    """The page without its drawings and tags."""
    html = re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", html, flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def said(run: RunDirectory, arm: str = "base") -> list[str]:
    return [f"{one.lead}: {one.text}" for one in findings(read(run)) if one.arm == arm]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A residual curve beyond its controls in one direction, heads of a model with a layer without any, an adapter."""
    heads = {(layer, head): 0.1 * layer + head for layer in (0, 1, 3) for head in (0, 1)}
    table = pd.concat(
        [
            effects(CURVE, specific=[(1, None), (2, None), (3, None)]),
            effects(FLAT, direction="break", specific=[(3, None)]),
            effects(FLAT, kind="agreement"),
            effects(heads, site="z", specific=[(3, 1)]),
            effects(CURVE, arm="grpo", specific=None),
        ],
        ignore_index=True,
    )
    found = made(
        tmp_path_factory.mktemp("patch") / "run",
        {"patch_effects": table, "transplant": transplant([0.1, 0.4, 0.7, 1.0])},
        command="patch",
        arms=("base", "grpo"),
    )
    write(found)
    return found


def test_what_exceeds_the_controls_is_said_with_what_it_was_compared_with(run: RunDirectory) -> None:
    text = next(one for one in said(run) if one.startswith("Repair") and "resid_post" in one)
    assert "more than every control in layers 1–2 of 4 layers (n = 24 recipients, 22 instances)" in text
    assert "most at layer 2, where it moves the readout by +2.40 [+2.15, +2.65] logits" in text
    assert (
        "less an unrelated instance's, the control that comes nearest, that is +2.30 [+2.05, +2.55]; p < 0.001" in text
    )
    assert "turns 60% [35, 85] of 24 answers; an unrelated instance's 2%, a random direction of its length 0%" in text


def test_the_last_layer_of_a_residual_curve_is_not_counted(run: RunDirectory) -> None:
    text = next(one for one in said(run) if one.startswith("Break"))
    assert "At no layer before the last, where it does so by construction, does the matched donor do more" in text
    assert "It comes furthest at layer 2: an effect of +0.30" in text


def test_too_few_instances_are_not_taken_for_no_effect(run: RunDirectory) -> None:
    (text, *_) = said(run, "grpo")
    assert text.startswith("Not decided: It can't be told")
    assert "with 3 instances no p can be 0.05 or less" in text


def test_heads_are_named_and_the_layer_without_heads_is_left_blank(run: RunDirectory) -> None:
    text = next(one for one in said(run) if ": z:" in one)
    assert "in 1 (3.1 +1.30) of 6 heads" in text
    source = read(run)
    (sweep,) = (one for one in source.sweeps if one.site == "z")
    values = grid_of(sweep.matched, source.layers, "effect").values
    assert values.shape == (4, 2) and np.isnan(values[2]).all() and np.isfinite(values[[0, 1, 3]]).all()
    svg = (run.path / "figures" / "patched-heads-0.svg").read_text()
    assert "no such head" in svg
    assert "+1.30" in svg and "nan" not in svg.lower()


def test_the_gain_is_a_share_with_an_interval(run: RunDirectory) -> None:
    text = next(one for one in said(run, "grpo") if one.startswith("What carries"))
    assert "The gain is +3.00 [+2.75, +3.25] logits toward the gold answer (n = 40 prompts, 20 instances)" in text
    assert "half of it or more first at layer 2: 70% [45, 95]" in text


def test_a_curve_that_climbs_by_construction_says_so_where_it_can_be_seen(run: RunDirectory) -> None:
    page = run.report.read_text()
    assert page.count("climbs by construction</text>") + page.count(">climbs by construction<") >= 3
    shared = read(run)
    names = [figure.name for _, figure in intervention_page.layer_curves(shared)]
    assert names == ["layers-0", "layers-1"]  # disagreement, agreement
    agreement = (run.path / "figures" / "layers-1.svg").read_text()
    assert "climbs by construction" not in re.sub(r"<desc>.*?</desc>", "", agreement, flags=re.S)


def test_page_and_figures_are_whole_and_the_same_when_written_twice(run: RunDirectory) -> None:
    first = {path.name: path.read_bytes() for path in [run.report, *sorted((run.path / "figures").glob("*.svg"))]}
    write(run)
    again = {path.name: path.read_bytes() for path in [run.report, *sorted((run.path / "figures").glob("*.svg"))]}
    assert first == again
    html = run.report.read_text()
    assert Balanced(html).open == []
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", html), "nothing is loaded from elsewhere"
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for name, data in first.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(data)


def test_an_older_figure_does_not_stay(run: RunDirectory) -> None:
    (run.path / "figures" / "left-over.svg").write_text("<svg/>")
    write(run)
    assert not (run.path / "figures" / "left-over.svg").exists()


def test_a_map_of_positions(tmp_path: Path) -> None:
    """Positions in the order of a prompt, those without rows blank, the cells beyond the controls counted."""
    parts = [
        effects(FLAT, position="answer"),
        effects({(0, None): 1.5, (1, None): 0.2}, position="query", specific=[(0, None)], n=20),
        effects({(0, None): 0.1}, position="premise:10", n=18),
        effects({(0, None): 0.1}, position="premise:2", specific=None, n=3),
    ]
    run = made(tmp_path / "run", {"patch_effects": pd.concat(parts, ignore_index=True)}, command="patch")
    write(run)
    (text,) = said(run)
    assert text.startswith("Repair, original → equivalent: resid_post: 8 cells at 4 positions, n = 3 to 24 recipients.")
    assert "does more than every control at query (layer 0)" in text
    assert "It can't be told at premise:2, where instances are too few." in text
    svg = (run.path / "figures" / "spans-0.svg").read_text()
    order = [svg.index(f">{name} (") for name in ("premise:2", "premise:10", "query", "answer")]
    assert order == sorted(order)


def test_nothing_to_patch_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = effects(CURVE).iloc[:0]
    run = made(
        tmp_path / "run", {"patch_effects": empty}, command="patch", reason="no pair is of a kind that was asked for"
    )
    write(run)
    assert said(run) == ["Nothing to patch: No pair is of a kind that was asked for."]
    assert "No pair is of a kind that was asked for." in text_of(run.report.read_text())
    show(run)
    assert "no pair is of a kind that was asked for" in capsys.readouterr().out


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    """Markup, terminal codes and mathematics in an arm's name and in a span."""
    table = pd.concat(
        [effects(CURVE, arm=HOSTILE), effects(CURVE, arm=HOSTILE, position=HOSTILE), effects(CURVE, position="query")],
        ignore_index=True,
    )
    run = made(tmp_path / "run", {"patch_effects": table}, command="patch", arms=("base", HOSTILE), positions=[HOSTILE])
    write(run)
    show(run)
    html = run.report.read_text()
    assert Balanced(html).open == []
    for text in (html, *(path.read_text() for path in (run.path / "figures").glob("*.svg"))):
        assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    assert "<script>alert(1)</script>red $x_1$" in text_of(html)
    for path in (run.path / "figures").glob("*.svg"):
        ElementTree.parse(path)


def test_the_terminal_says_what_the_report_says(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    show(run)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("repair")]
    assert rows[0][:7] == ["repair", "resid_post", "@", "answer", "24", "2/4", "layer"]
    assert "+2.4 [+2.2, +2.7]" in out or "+2.4 [+2.1, +2.6]" in out
    assert "unrelated" in out and str(run.report) in out
    tables = [line for line in out.splitlines() if line.startswith(("repair", "break"))]
    assert max(len(line.rstrip()) for line in tables) <= 100


@pytest.mark.parametrize("column", ["effect", "specific", "kind"])
def test_a_table_without_a_column_is_named(run: RunDirectory, tmp_path: Path, column: str) -> None:
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other"))
    other.write_table("patch_effects", other.table("patch_effects").drop(columns=column))
    with pytest.raises(RunError, match=rf"patch_effects\.parquet lacks the column '{column}'.*delete it"):
        read(other)


def test_layers_are_named_in_runs() -> None:
    assert [ranges([0]), ranges([0, 1, 2, 5]), ranges([1, 3])] == ["0", "0–2, 5", "1, 3"]
