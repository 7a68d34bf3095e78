"""The report on what is inside: every drawn number is one of the tables', and what can't be drawn is said."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pandas as pd
import pytest

from experiments.curves import main_rows
from experiments.items import PAIR
from experiments.link import LABELS
from experiments.report.findings import findings
from experiments.report.findings_wrong import comes_back, wrong_answers
from experiments.report.page import page
from experiments.report.source import Source, read
from experiments.rundir import RunDirectory
from experiments.summary import show
from tests.experiments.made_interventions import ablation, head_grid
from tests.experiments.made_run import Made, edits_without_a_model, make_run  # noqa: F401


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    arms = {"base": Made(-1.3), "grpo": Made(0.2, 2.5)}
    return make_run(tmp_path_factory.mktemp("inside") / "run", arms, params={"n": [4, 6]}, limit=18)


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    return page(read(run))


def texts(html: str, figure: str) -> list[str]:
    """What is written inside the drawings of one figure."""
    found = re.search(rf'<figure id="figure-{figure}">.*?</figure>', html, re.S)
    assert found is not None, figure
    return [unescape(one).strip() for one in re.findall(r"<text[^>]*>(.*?)</text>", found[0], re.S)]


def cells(html: str, table: str) -> list[list[str]]:
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', html, re.S)
    assert body is not None, table
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body[1], re.S)
    return [[" ".join(unescape(re.sub(r"<[^>]+>", " ", one)).split()) for one in re.findall(r"<td.*?</td>", row, re.S)]
            for row in rows]  # fmt: skip


def test_the_probe_table_has_baselines_first_layers_and_what_could_be_seen(run: RunDirectory, html: str) -> None:
    results = run.read_json("results.json")
    found = iter(cells(html, "probes-table"))
    for arm in ("base", "grpo"):
        for kind in PAIR:
            row, one = next(found), results["arms"][arm]["probes"][kind]
            assert row[2] == f"{one['auroc']:.2f} [{one['auroc_low']:.2f}, {one['auroc_high']:.2f}]"
            best = max(one["baselines"].items(), key=lambda pair: pair[1]["auroc"])
            assert row[5].startswith(f"{best[1]['auroc']:.2f} {best[0]} [")
            first = "–" if one["first_layer"] is None else str(one["first_layer"])
            assert row[8].split()[0] == first
            assert row[9] == f"{one['detectable_auroc']:.2f}"


def test_base_and_adapter_read_each_other_at_the_layer_of_the_trained(run: RunDirectory, html: str) -> None:
    moved, curves = run.table("transfer"), run.table("probe_curves")
    for row, kind in zip(cells(html, "between-arms"), PAIR, strict=True):
        for place, (arm, other) in enumerate((("base", "grpo"), ("grpo", "base"))):
            whole = curves.query(f"arm == '{arm}' and presentation == '{kind}' and trained == 'all'")
            layer = whole[whole["features"] == "resid_post"]["layer"].iloc[0]
            one = moved.query(
                f"arm == '{arm}' and read_arm == '{other}' and presentation == '{kind}' and trained == 'all' "
                f"and layer == {layer}"
            )
            assert len(one) == 1
            assert row[2 + place].split()[0] == f"{one['auroc'].iloc[0]:.2f}"


def test_the_map_of_trained_and_read_settings_shows_the_tables(run: RunDirectory, html: str) -> None:
    drawn = texts(html, "transfer-0")
    probes, moved = run.table("probes"), run.table("transfer")
    for arm in ("base", "grpo"):
        for kind in PAIR:
            for setting, other in (("n=4", "n=6"), ("n=6", "n=4")):
                about = (
                    f"arm == '{arm}' and presentation == '{kind}' and trained == 'setting' and setting == '{setting}'"
                )
                own = probes.query(about)
                best = own.loc[own["auroc"].idxmax()]
                assert f"{best['auroc']:.2f}" in drawn
                there = moved.query(f"{about} and read_setting == '{other}' and read_arm == '{arm}'")
                value = there[there["layer"] == best["layer"]]["auroc"]
                assert f"{value.iloc[0]:.2f}" in drawn


def test_one_setting_has_no_curves_by_setting_and_no_map(tmp_path: Path) -> None:
    alone = page(read(make_run(tmp_path / "run", {"base": Made()}, params={"n": 4}, limit=12)))
    assert 'id="figure-by-setting' not in alone and 'id="figure-transfer' not in alone
    assert 'id="between-arms"' not in alone and 'id="figure-components"' in alone


def test_labels_stand_beside_their_coin(run: RunDirectory, html: str) -> None:
    drawn = texts(html, "labels")
    assert {label.replace("_", " ") for label in LABELS} <= set(drawn)
    assert "verdicts on these prompts were tossed" in html
    again = run.table("attribution_calibration")
    shown = cells(html, "calibration")
    asked = again[again["n"] > 0].groupby(["arm", "presentation", "label"]).ngroups
    assert len(shown) == asked > 0


def test_a_model_that_cannot_be_taken_apart_says_so(run: RunDirectory) -> None:
    source = read(run)
    tables = {**source.tables, "components": pd.DataFrame({"arm": [], "presentation": [], "component": []})}
    results = {**source.results, "arms": {
        arm: {**found, "components": {}} for arm, found in source.results["arms"].items()
    }}  # fmt: skip
    html = page(replace(source, tables=tables, results=results))
    assert (
        'id="figure-components"' not in html and "can&#39;t be taken apart" in html
    ) or "can't be taken apart" in html


def test_a_baseline_that_reads_as_much_as_the_probe_is_pointed_out(run: RunDirectory) -> None:
    source = read(run)
    assert not [one for one in findings(source) if one.lead == "Readable from the surface"]
    probes = source.results["arms"]["base"]["probes"]["original"]
    probes["baselines"]["tokens"].update(auroc=0.97, auroc_low=0.9, auroc_high=0.99)
    said = [one.text for one in findings(source) if one.lead == "Readable from the surface"]
    assert said == [
        "A probe that does not look into the model reads the gold answer at AUROC 0.97 [0.90, 0.99] on original prompts "
        "(bag of tokens): base's probes may read the surface."
    ]


@pytest.mark.parametrize(
    ("value", "low", "base", "found"),
    [(0.9, 0.8, 0.7, True), (0.42, 0.22, 0.44, False), (1.0, 0.76, 1.0, True), (1.0, 0.21, 0.75, False),
     (0.9, 0.7, 0.75, False), (float("nan"), float("nan"), 0.0, False)],
)  # fmt: skip
def test_a_label_comes_back_only_beyond_how_common_it_is(value: float, low: float, base: float, found: bool) -> None:
    assert comes_back({"value": value, "low": low, "base": base}) is found
    assert not comes_back(None)


def told(source: Source, *, again: float, low: float, coin: float = 0.01) -> str:
    """The sentence on the base's wrong answers where 27 of 30 on equivalent prompts are overridden, and none elsewhere."""
    shares = pd.DataFrame([
        {"arm": "base", "stratum": "presentation", "of": kind, "label": "overridden", "value": count / 30,
         "low": count / 40, "high": 1.0, "coin": coin, "count": count, "n": 30}
        for kind, count in (("original", 0), ("equivalent", 27))
    ])  # fmt: skip
    halves = pd.DataFrame([
        {"arm": "base", "presentation": "equivalent", "check": "half", "label": "overridden", "value": again, "low": low,
         "high": 0.66, "base": 0.44, "n": 16}
    ])  # fmt: skip
    tables = {**source.tables, "attribution_shares": shares, "attribution_calibration": halves}
    next(row for row in source.results["arms"]["base"]["link"] if row["kinds"])["kinds"]["overridden"]["count"] = 27
    found = wrong_answers(replace(source, tables=tables), "base")
    assert found is not None
    return found.text


def test_a_label_is_stated_only_where_other_probes_give_it_again(run: RunDirectory) -> None:
    source = read(run)
    assert "were overridden (readable at the last layer" in told(source, again=0.9, low=0.6)
    doubted = told(source, again=0.42, low=0.22)
    assert "were overridden" not in doubted and "the default decided" not in doubted
    assert (
        "On equivalent prompts the run’s own probes call 27 of 30 overridden, but probes of another half of the problems "
        "do not confirm which: they give it again to 42% [22, 66] of 16, and to 44% of all."
    ) in doubted
    assert "tossed verdicts" in told(source, again=0.9, low=0.6, coin=0.8)


def test_few_wrong_answers_are_said_to_be_too_few(run: RunDirectory) -> None:
    source = read(run)
    for arm, text in (("base", "14 wrong answers are"), ("grpo", "1 wrong answer is")):
        kinds = [row["kinds"] for row in source.results["arms"][arm]["link"] if row["kinds"] is not None]
        assert sum(one["count"] for row in kinds for one in row.values()) == int(text.split()[0])
        found = wrong_answers(source, arm)
        assert found is not None and found.text == f"{text} too few to share out among the labels."


def test_the_link_table_says_where_repair_is_not_above_its_controls(run: RunDirectory) -> None:
    source = read(run)
    for arm in source.results["arms"].values():
        for row in arm["link"]:
            row["repaired"] = None
    assert "Repair is not above its controls" not in page(source)
    row = next(row for row in source.results["arms"]["base"]["link"] if row["answered"] == "wrong")
    share = {"n": 11, "high": 0.9, "method": "Wilson 95%", "reason": ""}
    row["repaired"] = {
        donor: {**share, "value": count / 11, "low": 0.05, "count": count}
        for donor, count in (("matched", 2), ("unrelated", 8), ("random", 7))
    }
    assert "2/11 (unrelated 8/11, random 7/11)." in page(source)


def test_the_terminal_tells_labels_columns_and_the_next_command(run: RunDirectory, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    results = run.read_json("results.json")
    show(results, run.path)
    shown = capsys.readouterr().out
    assert f"probe explain {run.path}" in shown and "readable: a held-out probe" in shown
    for arm, found in results["arms"].items():
        for label, one in found["attribution"]["shares"].items():
            if one["count"]:
                beside = f"; not above its coin, {one['coin']:.0%}" if one["low"] <= one["coin"] else ""
                assert f"{label} {one['value']:.0%} [{one['low']:.0%}, {one['high']:.0%}]{beside}" in shown
                assert f"{arm}, {one['n']} wrong readouts: " in shown


def test_the_main_rows_are_one_curve_a_presentation(run: RunDirectory) -> None:
    found = main_rows(run.table("probes"))
    assert found.groupby(["arm", "presentation"])["layer"].apply(list).map(lambda one: one == [0, 1, 2, 3]).all()
    rows = main_rows(run.table("probe_rows"))
    assert len(rows) == 2 * 2 * 36 and set(rows["setting"]) == {"n=4", "n=6"}


def test_matched_less_controls_are_the_numbers_of_the_table(run: RunDirectory, html: str) -> None:
    source = read(run)
    table = source.tables["patch_effects"]
    drawn = table[(table["group"] == "all") & (table["kind"] == "disagreement") & (table["donor"] == "matched")]
    panels = drawn.drop_duplicates(["arm", "direction"])
    found = re.search(r'<figure id="figure-less-controls">.*?</figure>', html, re.S)
    assert found is not None
    titles = re.findall(r"<h4>(.*?)</h4>", found[0])
    assert len(titles) == len(panels) > 0
    assert all(f"n = {n}, " in title for n, title in zip(panels["n"], titles, strict=True))
    empty = replace(source, tables={**source.tables, "patch_effects": pd.DataFrame()})
    assert "Matched less controls" in html and "Matched less controls" not in page(empty)


def test_agreement_without_competence_and_the_head_grid_are_shown_where_they_are(run: RunDirectory, html: str) -> None:
    source = read(run)
    grid = head_grid({(0, 0): -0.4, (0, 1): 0.05, (2, 0): -1.25, (3, 1): 0.0})
    made = replace(source, tables={**source.tables, **ablation(), "head_grid": grid})
    said = [one for one in findings(made) if one.lead == "More agreement, less competence"]
    assert [one.arm for one in said] == ["base"]
    assert said[0].text.startswith("Agreement rises while accuracy and the signal s fall: this is no repair.")
    shown = page(made)
    assert "this is no repair" in shown and "−1.25" in texts(shown, "one-by-one")
    assert "Every head by itself" not in html, "not asked for"
    unsure = replace(source, tables={**source.tables, **ablation(plain=False)})
    assert not any("less competence" in one.lead for one in findings(unsure))
    assert "by the estimates; not all of the intervals leave out 0" in page(unsure)
