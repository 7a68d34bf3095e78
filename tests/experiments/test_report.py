"""The report: self-contained, safe against what it shows, faithful to results.json, the same when written twice.

The runs here are made by the package's own code, with numbers in place of a model: readouts, activations and the effect
of an edit are drawn; items, tables, statistics and results are real.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from experiments import inside, link
from experiments.report import write
from experiments.report.drawing import KIND_COLOURS
from experiments.report.findings import findings
from experiments.report.page import page
from experiments.report.pairs import pairs
from experiments.report.source import read
from experiments.report.tables import link as link_table
from experiments.report.text import clean, percent, percent_span, shortened, signed
from experiments.rundir import RunDirectory
from tests.experiments.made_run import Made, edits_without_a_model, make_run  # noqa: F401

LABELS = ("yes", "no")
HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b]0;title\x07\x00\u202e & \"'</pre> $x_1$"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Base and an adapter at two sizes; the adapter now and then answers with hostile text."""
    hostile = Made(0.2, 2.5, text=lambda readout: ("Yes" if readout > 0 else "No") if abs(readout) > 0.8 else HOSTILE)
    made = make_run(
        tmp_path_factory.mktemp("report") / "run", {"base": Made(-1.3), "grpo": hostile}, params={"n": [4, 6]}
    )
    write(made)
    return made


@pytest.fixture(scope="module")
def html(run: RunDirectory) -> str:
    return run.report.read_text()


class Reader(HTMLParser):
    """Tags with their attributes, text by enclosing tag, and whether tags are balanced."""

    VOID = frozenset(("meta", "link", "img", "br", "input", "hr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def rows_of(html: str, table: str) -> list[list[str]]:
    """Texts of a table's body cells."""
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', html, re.S)
    assert body is not None
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body[1], re.S)
    return [[" ".join(unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in re.findall(r"<td.*?</td>", row, re.S)]
            for row in rows]  # fmt: skip


def test_the_page_loads_nothing_and_is_whole(html: str) -> None:
    reader = Reader(html)
    assert reader.open == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in reader.tags}
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in reader.tags:
        for name, value in attrs.items():
            if name in ("src", "href", "xlink:href", "action", "poster", "data"):
                assert value is not None, tag
                assert value.startswith("data:image/png;base64,") or (value[0] == "#" and value[1:] in ids), value
            assert not name.startswith("on"), f"{tag} has a handler"
    text = "".join(data for tag, data in reader.texts if tag in ("style", "script"))
    assert "@import" not in text and "http" not in text and "fetch" not in text
    assert not re.search(r"url\((?!#)", html)
    for where in re.findall(r"url\(#([^)]*)\)", html):
        assert where in ids
    assert sum(tag == "script" for tag, _ in reader.tags) == 1
    assert html.startswith("<!doctype html>")


def test_sections_stand_in_the_promised_order(html: str) -> None:
    found = [attrs["id"] for tag, attrs in Reader(html).tags if tag == "section" and "id" in attrs]
    assert found == [
        "summary",
        "link",
        "profile",
        "comparison",
        "probes",
        "lens",
        "components",
        "patching",
        "heads",
        "pairs",
        "reproduce",
    ]


def test_text_from_outside_is_escaped_and_stripped(html: str) -> None:
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;redtitle" not in html  # the title of a terminal is a code too
    assert "&lt;script&gt;alert(1)&lt;/script&gt;red &amp; &#34;&#39;&lt;/pre&gt; $x_1$" in html
    assert "made-up &lt;b&gt;" in html and "<b>\n" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\x1b[1;31mb\x1b[0mc", "abc"),
        ("a\x1b]8;;https://x\x1b\\b\x1b]8;;\x1b\\", "ab"),
        ("\x9b31mred", "red"),
        ("a\r\nb\rc\td", "a\nbc\td"),
        ("\ud83d", "\ufffd"),
        ("Zoë 数 😀", "Zoë 数 😀"),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    assert clean(raw) == shown
    clean(raw).encode()


def test_long_texts_lose_their_middle_and_say_how_much() -> None:
    assert shortened("x" * 100, 60, 40) == "x" * 100
    text = shortened("a" * 5000 + "end", 100, 3)
    assert text.startswith("a" * 100 + "\n[… 4,900 characters not shown") and text.endswith("end")


def test_the_link_table_holds_the_numbers_of_the_results(run: RunDirectory, html: str) -> None:
    results = run.read_json("results.json")
    found = rows_of(html, "link-table")
    expected = [
        (outcome, answered, arm, row)
        for outcome in link.OUTCOMES
        for answered in ("right", "wrong")
        for arm in results["arms"]
        for row in results["arms"][arm]["link"]
        if (row["outcome"], row["answered"]) == (outcome, answered)
    ]
    assert len(found) == len(expected) >= 6
    for cells, (_, answered, arm, row) in zip(found, expected, strict=True):
        values = cells[-5 - len(link.KINDS) - 3 :]  # the first two columns span rows
        assert values[:2] == [arm, str(row["n"])]
        share = row["decodable"]
        assert values[2].split(maxsplit=1)[0] == percent(share["value"], share["n"])
        assert percent_span(share["low"], share["high"], share["n"]) in values[2]
        assert values[3].split()[0] == signed(row["signal"]["value"])
        assert values[4].split()[0] == signed(row["default"]["value"])
        if answered == "right":
            assert values[5:] == [""] * (len(link.KINDS) + 3)
            continue
        for kind, text in zip(link.KINDS, cells[-3 - len(link.KINDS) : -3], strict=True):
            assert text.split()[0] == str(row["kinds"][kind]["count"])
        for donor, text in zip(link.DONORS, cells[-3:], strict=True):
            one = row["repaired"][donor]
            assert text == "–" if one["value"] is None else f"{one['count']} of {one['n']}" in text


def test_profile_and_difference_tables_hold_the_numbers_of_the_results(run: RunDirectory, html: str) -> None:
    results = run.read_json("results.json")
    rows = rows_of(html, "competence")
    assert [row[1] for row in rows] == ["4", "6", "all"] * 2
    for row, (arm, setting) in zip(
        rows, [(a, s) for a in ("base", "grpo") for s in ("n=4", "n=6", "all")], strict=True
    ):
        one = results["arms"][arm]["behaviour"]["profile"][setting]
        assert row[2] == str(one["n_parsed"])
        shares = [one["original"]["accuracy"], one["equivalent"]["accuracy"], one["robust"], one["shared_wrong"],
                  one["unstable"], one["invariance"], one["strict_invariance"]]  # fmt: skip
        for text, share in zip(row[3:10], shares, strict=True):
            assert text.split()[0] == percent(share["value"], share["n"])
    differences = {row[1]: row for row in rows_of(html, "differences-table")}
    one = results["comparison"]["grpo"]["invariance"]
    assert differences["invariance ι"][4].split()[0] == signed(100 * one["difference"], 1)


def test_written_twice_it_is_the_same_and_leaves_matplotlib_alone(run: RunDirectory, html: str) -> None:
    before = dict(matplotlib.rcParams)
    matplotlib.rcParams["font.size"] = 31
    try:
        write(run)
        assert matplotlib.rcParams["font.size"] == 31
    finally:
        matplotlib.rcParams.update({"font.size": before["font.size"]})
    assert run.report.read_text() == html
    assert not re.search(r"20\d\d-\d\d-\d\d", html)


def test_the_pair_browser_shows_every_outcome_of_every_arm(run: RunDirectory) -> None:
    source = read(run)
    chosen = pairs(source)
    assert len(chosen) == min(60, 48)
    few = pairs(source, 12)
    assert len(few) == 12 and {one.key for one in few} <= {one.key for one in chosen}
    for number, arm in enumerate(source.arms):
        table = source.of("attribution", arm)
        shown = {one.arms[number].outcome for one in few}
        assert shown == set(table["outcome"])
    marked = [text for text, is_marked in chosen[0].prompts[0].messages[0].pieces if is_marked]
    assert len(marked) == 1 and marked[0].startswith("Is ")


def test_one_setting_and_no_adapter(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", {"base": Made()}, params={"n": 4}, limit=12)
    write(made)
    html = made.report.read_text()
    assert 'id="comparison"' not in html and 'href="#comparison"' not in html
    assert [row[1] for row in rows_of(html, "competence")] == ["4"]
    assert set(made.table("decomposition")["setting"]) == {"all"}
    assert "one setting: nothing to adjust for" in html
    assert Reader(html).open == []


def test_a_constant_output_has_no_kappa_and_says_why(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", {"base": Made(-9.0, 1.0)}, params={"n": [4, 6]}, limit=16)
    write(made)
    html = made.report.read_text()
    kappas = [row[-1] for row in rows_of(html, "competence")]
    assert kappas == ["–", "–", "– κ̄ –"]
    assert 'title="all 32 parsed answers are no"' in html
    assert "kappa is undefined in all 2 settings" in html
    # Nothing disagrees, so there is nothing to flip, and no repair was tried that could be shown as 0.
    assert "there is nothing to flip" in html and 'id="figure-patching"' not in html
    assert 'id="figure-agreeing"' in html
    said = {one.lead: one.text for one in findings(read(made))}
    assert "base answers “no” to 100% of original and 100% of equivalent" in said["One answer to most prompts"]
    assert "Patching moves it" not in said


def test_answers_that_were_not_read(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", {"base": Made(text=lambda _: "perhaps")}, params={"n": 4}, limit=12)
    write(made)
    html = made.report.read_text()
    row = rows_of(html, "competence")[0]
    assert row[2] == "0" and row[5:] == ["–", "–", "–", "–", "0% [0, 24]", "–"]
    assert "none of 12 pairs has two parsed answers" in html
    assert "24 of 24 answers could not be read and count as wrong." in html
    assert {row[0].split()[0] for row in rows_of(html, "link-table")} == {"not"}
    # The readouts were often right, which an explanation by what was measured has to leave out.
    link_row = made.read_json("results.json")["arms"]["base"]["link"][0]
    count = link_row["kinds"]["text"]["count"]
    assert 0 < count < link_row["n"] == 24 and sum(one["count"] for one in link_row["kinds"].values()) == 24
    said = {one.lead: one.text for one in findings(read(made))}["Its wrong answers"]
    assert f"{count} were a matter of the text" in said and said.startswith("Of the 24 wrong answers of base, ")
    assert KIND_COLOURS["text"] in html and set(KIND_COLOURS) == set(link.KINDS)


def test_every_number_that_can_be_undefined_becomes_a_dash(run: RunDirectory) -> None:
    """All of them are taken away at once; the page still stands, and shows neither None nor nan."""
    source = read(run)
    results = copy.deepcopy(source.results)
    fields = ("auroc", "transfer_auroc", "p_max", "null_high_at_layer", "delta", "delta_low", "signal", "signal_low", "p",
              "p_holm", "mean", "floor", "bias", "largest_difference")  # fmt: skip
    for field in fields:
        assert _remove(results, field), field
    for one in results["comparison"]["grpo"].values():
        one.update({key: None for key in ("before", "after", "difference", "low", "high") if key in one})
    for found in results["arms"].values():
        found["behaviour"]["profile"]["all"]["kappa"]["value"] = found["behaviour"]["kappa_bar"]["value"] = None
        for curves in found["patching"]["curves"].values():
            curves["random"] = {"flipped": None, "n": 0, "reason": "no disagreeing pair"}
        for curves in found["patching"]["agreeing"].values():
            curves["unrelated"] = {"changed": None, "n": 0, "reason": "no agreeing pair"}
    html = page(replace(source, results=results))
    assert not re.search(r"\b(None|nan|NaN)\b", re.sub(r"<[^>]+>", " ", html))
    assert all(row[4].startswith("–") for row in rows_of(html, "differences-table"))


def _remove(value: Any, field: str) -> int:
    """Take every number of this name away; how many there were."""
    count = 0
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == field and isinstance(inner, (float, int)):
                value[key] = None
                count += 1
            else:
                count += _remove(inner, field)
    elif isinstance(value, list):
        count = sum(_remove(inner, field) for inner in value)
    return count


def test_sentences_appear_only_beyond_their_thresholds(run: RunDirectory) -> None:
    source = read(run)
    results = copy.deepcopy(source.results)
    said = {(one.arm, one.lead) for one in findings(source)}
    assert ("base", "Leans to “no”") in said and ("base", "Readable inside") in said
    assert ("grpo", "grpo: readout") in said
    # Intervals that include no difference silence the sentences that rest on them.
    for found in results["arms"].values():
        for kind in inside.PAIR:
            found["probes"][kind]["p_max"] = 0.2
            found["decomposition"][kind]["all"].update(delta_low=-1.0, delta_high=1.0)
            found["ablation"]["sets"]["top"][kind]["change"].update(signal_low=-1.0, signal_high=1.0)
    for one in results["comparison"]["grpo"].values():
        one.update({key: -1.0 if key.endswith("low") else 1.0 for key in one if key.endswith(("low", "high"))})
    left = {one.lead for one in findings(replace(source, results=results))}
    assert left <= {"What it answers", "Its wrong answers", "Mind the answers", "Patching moves it",
                    "Similar accuracies hide changes", "Competence falls with n", "Competence rises with n"}  # fmt: skip


def test_the_last_layer_is_never_reported_as_patching_that_works(run: RunDirectory) -> None:
    source = read(run)
    last = source.layers - 1
    for one in findings(source):
        if one.lead == "Patching moves it":
            assert f"at layer {last} " not in one.text
    assert "by construction" in page(source)


def test_the_caption_says_where_repair_was_judged(run: RunDirectory) -> None:
    source = read(run)
    results = copy.deepcopy(source.results)
    base, grpo = (results["arms"][arm] for arm in ("base", "grpo"))
    for row in base["link"] + grpo["link"]:
        row["patch_layer"] = {"original": 2, "equivalent": 1}
    # The layer comes from the donor's probes: into original prompts from the equivalent ones.
    base["probes"]["equivalent"]["first_layer"], base["probes"]["original"]["first_layer"] = 2, 3
    grpo["probes"]["equivalent"]["first_layer"], grpo["probes"]["original"]["first_layer"] = 2, 1
    caption = link_table(replace(source, results=results)).caption
    assert (
        "base 2 into original and 1* into equivalent; grpo 2 into original and 1 into equivalent (*: no la" in caption
    )
    base["probes"]["original"]["first_layer"] = 1
    assert "*" not in link_table(replace(source, results=results)).caption


def test_patching_is_drawn_and_told_by_the_layers_of_the_results(run: RunDirectory) -> None:
    """Only some layers were patched: places in the curves are not layers."""
    source = read(run)
    results = copy.deepcopy(source.results)
    for found in results["arms"].values():
        found["patching"]["layers"] = [0, 2, 3]
        for curves in found["patching"]["curves"].values():
            for donor, one in curves.items():
                flipped = [0.1, 0.9, 1.0] if donor == "matched" else [0.1, 0.2, 0.2]
                one.update(flipped=flipped, low=[x - 0.1 for x in flipped], high=[min(1, x + 0.1) for x in flipped])
                one.update(effect=flipped, effect_low=one["low"], effect_high=one["high"])
        for curves in found["patching"]["agreeing"].values():
            for one in curves.values():
                one.update({name: [0.1, 0.2, 0.3] for name in ("changed", "low", "high")})
    changed = replace(source, results=results)
    said = [one.text for one in findings(changed) if one.lead == "Patching moves it"]
    assert len(said) == 2 and all(text.count("at layer 2 (") == 2 and "at layer 1 " not in text for text in said)
    assert page(changed) != page(source)


def test_patching_shows_effects_and_the_agreeing_pairs(run: RunDirectory, html: str) -> None:
    assert "flips about half of these pairs, so a flip alone is not restoration" in html
    ids = [attrs["id"] for _, attrs in Reader(html).tags if "id" in attrs]
    for arm, kind in ((arm, kind) for arm in (0, 1) for kind in inside.PAIR):
        assert f"patching-{arm}-{kind}-axes_2" in ids and f"agreeing-{arm}-{kind}-axes_1" in ids
    source = read(run)
    found = source.arm("base")["patching"]["agreeing"]["original"]["matched"]
    assert f"base: equivalent → original (n = {found['n']})" in html


def test_a_random_direction_does_not_flatten_the_effects(run: RunDirectory) -> None:
    source = read(run)
    assert "beyond the axis" not in page(source)
    results = copy.deepcopy(source.results)
    results["arms"]["base"]["patching"]["curves"]["original"]["random"]["effect"] = [40.0, -30.0, 0.0, 1.0]
    html = page(replace(source, results=results))
    assert html.count("random direction, beyond the axis: −30.00 to +40.00") == 1


def test_the_versions_are_those_of_the_environment(html: str) -> None:
    rows = dict(re.findall(r"<tr><td>(pairlens|torch|numpy)</td><td>([^<]*)</td></tr>", html))
    assert rows == {"pairlens": "not installed", "torch": "2.13.0", "numpy": "2.4.6"}
    assert "of-model" not in html


def test_names_that_would_break_a_figure(tmp_path: Path) -> None:
    """Adapters called like markup, like mathematics and in another script; settings that are words; many layers."""
    arms = {"base": Made(), "a<b>&$\\frac$": Made(0.5), "改良_very-long-adapter-name-from-a-folder": Made(1.0)}
    made = make_run(tmp_path / "run", arms, params={"relation": ["front_behind", "left_right"], "n": [4, 5]}, limit=8,
                    heads=(2,) * 7 + (None,) * 2)  # fmt: skip
    write(made)
    html = made.report.read_text()
    reader = Reader(html)
    assert reader.open == []
    texts = [data for tag, data in reader.texts if tag == "text"]
    assert any("a<b>&$\\frac$" in text for text in texts)
    assert len(html) < 5_000_000
