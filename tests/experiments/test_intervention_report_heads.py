"""The report of an ablation: agreement without competence, changes beside those by random heads, grids with blanks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.report import write
from experiments.report.intervention_findings import findings
from experiments.report.intervention_source import read
from experiments.report.plots_interventions_heads import SHARES
from experiments.rundir import RunDirectory
from experiments.summary_interventions import show
from tests.experiments.made_interventions import BEFORE_AFTER, ablation, head_grid, heads, made

HEADS = {(layer, head): 0.1 * layer + head for layer in (0, 1, 3) for head in (0, 1)}
TOP = [(3, 1), (1, 1)]


def said(run: RunDirectory, arm: str = "base") -> dict[str, str]:
    return {one.lead: one.text for one in findings(read(run)) if one.arm == arm}


def of_arms(**arms: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The tables of an ablation, with these arguments by arm."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for arm, options in arms.items():
        for name, table in ablation(arm=arm, **options).items():
            parts.setdefault(name, []).append(table)
        parts.setdefault("head_effects", []).append(heads(HEADS, TOP, arm=arm))
    return {name: pd.concat(tables, ignore_index=True) for name, tables in parts.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A base that agrees more and knows less, an adapter whose intervals carry nothing."""
    tables = of_arms(base={}, grpo={"half": 0.2, "beyond": 0.2, "plain": False})
    grid = head_grid({place: -value for place, value in HEADS.items()})
    found = made(tmp_path_factory.mktemp("ablate") / "run", {**tables, "head_grid": grid}, command="ablate",
                 arms=("base", "grpo"))  # fmt: skip
    write(found)
    return found


def test_more_agreement_with_less_competence_is_said_plainly(run: RunDirectory) -> None:
    text = said(run)["More agreement, less competence"]
    assert text.startswith("Agreement rises while accuracy and the signal s fall: this is no repair.")
    assert "goes from 81% to 93% (+12.0 points [+7.0, +17.0])" in text
    assert "from 85% to 62% (−23.0 points [−28.0, −18.0]) on original" in text
    assert "pairs with both answers wrong go from 8% to 36%" in text
    assert "For ι: the change less that by as many random heads is +10.8 [+5.8, +15.8] points" in text
    html = run.report.read_text()
    assert (
        '<p class="note"><b>base.</b> Agreement rises while accuracy and the signal s fall: this is no repair.' in html
    )


def test_what_the_intervals_do_not_carry_is_not_called_shown(run: RunDirectory) -> None:
    found = said(run, "grpo")
    assert "More agreement, less competence" not in found
    text = found["Agreement rises, by the estimates only"]
    assert "by the estimates; not all of the intervals leave out 0" in text and "no repair" not in text
    assert "so it was not shown to differ from theirs" in text
    assert "None of these was shown to differ from what as many random heads do" in found["What else changes"]


def test_nothing_is_said_of_agreement_that_does_not_rise(tmp_path: Path) -> None:
    moves = {**BEFORE_AFTER, "invariance": (0.9, 0.8)}
    run = made(tmp_path / "run", ablation(moves), command="ablate", chosen=["3.1", "1.1"])
    found = said(run)
    assert not any("greement" in lead for lead in found)
    assert "Which heads" not in found  # they were given
    write(run)
    assert "the heads were given" in run.report.read_text()


def test_the_signal_stands_beside_random_heads(run: RunDirectory) -> None:
    text = said(run)["The signal"]
    assert "Without heads 3.1 and 1.1" in text and "from +1.90 to +0.45 logits (change −1.45 [−1.50, −1.40]" in text
    assert "as many random heads is −1.30 [−1.35, −1.25] logits" in text


def test_an_undefined_signal_says_why(tmp_path: Path) -> None:
    tables = ablation()
    rows = tables["ablation"]["measure"].str.startswith(("signal", "default"))
    ends = [f"{name}{end}" for name in ("before", "after", "change") for end in ("", "_low", "_high")]
    tables["ablation_notes"]["note"] = ""
    tables["ablation"].loc[rows, ends] = np.nan
    tables["ablation"].loc[rows, "reason"] = "δ and s are undefined: no cell has gold no"
    above = tables["ablation_above"]["measure"].str.startswith(("signal", "default"))
    tables["ablation_above"].loc[above, ["value", "low", "high"]] = np.nan
    run = made(tmp_path / "run", tables, command="ablate")
    write(run)
    assert (
        said(run)["The signal"] == "Δ and s are undefined: no cell has gold no."
        or "no cell has gold no" in said(run)["The signal"]
    )
    html = run.report.read_text()
    assert 'title="δ and s are undefined: no cell has gold no"' in html and ">nan<" not in html.lower()


def test_heads_keep_their_effect_where_they_did_not_rank(run: RunDirectory) -> None:
    text = said(run)["Which heads"]
    assert "these are the first: 3.1 +1.30 [+1.20, +1.40] and 1.1 +1.10 [+1.00, +1.20]" in text
    assert "On other instances the same effects are 3.1 +0.65" in text


@pytest.mark.parametrize("name", ["ranking", "one-by-one", "before-after", "beyond-controls"])
def test_figures_are_whole(run: RunDirectory, name: str) -> None:
    path = run.path / "figures" / f"{name}.svg"
    ElementTree.parse(path)
    text = path.read_text()
    assert "nan" not in re.sub(r'd="[^"]*"', "", text).lower()
    if name in ("ranking", "one-by-one"):
        assert "no such head" in text and "<pattern" in text


def test_bars_stand_for_the_numbers_of_the_table(run: RunDirectory) -> None:
    """Heights of the drawn bars, top and before, are those of the table."""
    from matplotlib.figure import Figure

    from experiments.report.plots_interventions_heads import _before_after

    axes = Figure().subplots(2, 1)
    _before_after(axes, read(run).of("ablation", "base"), "#000000")
    heights = [bar.get_height() for bar in axes[0].patches]
    expected = [value for name, _ in SHARES for value in BEFORE_AFTER[name]]
    drawn = [height for place, height in enumerate(heights) if place % 4 < 2]  # before, top, random, same layers
    assert drawn == pytest.approx(expected)


def test_the_same_when_written_twice(run: RunDirectory) -> None:
    files = [run.report, *sorted((run.path / "figures").glob("*.svg"))]
    first = [path.read_bytes() for path in files]
    write(run)
    assert [path.read_bytes() for path in files] == first


def test_probe_report_writes_both_kinds_of_directory(run: RunDirectory) -> None:
    before = run.report.read_bytes()
    run.report.unlink()
    result = CliRunner().invoke(app, ["report", str(run.path)])
    assert result.exit_code == 0, result.output
    assert run.report.read_bytes() == before


def test_the_terminal_has_both_and_fits(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    show(run)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line for line in lines if line.startswith("invariance ι") and "+12 [+7, +17]" in line]
    assert row.split()[:4] == ["invariance", "ι", "81%", "93%"]
    assert max(len(line) for line in lines if line.startswith(("accuracy", "invariance", "s ", "δ "))) <= 100
    assert any(line.startswith("base: Agreement rises while accuracy and the signal s fall") for line in lines)
