"""Figures: every number of the table is in the picture, at its place, and nothing else depends on anything."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest

from experiments.errors import RunError
from experiments.figures import draw
from experiments.tables import FigureSpec, make_table
from tests.experiments.made_behaviour import behaviour

SIZES = (4, 8, 16, 32)
PARAMS: dict[str, dict[str, Any]] = {
    f"n={n}, relation={relation}": {"n": n, "relation": relation}
    for n in SIZES
    for relation in ("front_behind", "left_right")
}
SVG = "{http://www.w3.org/2000/svg}"


def frame_of(spec: FigureSpec, *, arms: tuple[str, ...] = ("base", "grpo"), params: Any = PARAMS) -> pd.DataFrame:
    return make_table(behaviour(params, arms=arms, limit=30), params, spec.table(), seed=1, resamples=100)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def _paths(svg: str) -> list[tuple[str, str]]:
    """Shape and style of the lines between numbers, in the order in which they were drawn."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    found = [(path.get("d", ""), path.get("style", "")) for path in paths if "clip-path" in path.attrib]
    return [(shape, style) for shape, style in found if "stroke-width: 1.8" in style]


def curves(svg: str) -> list[list[tuple[float, float]]]:
    """Points of each line."""
    numbers = [[float(number) for number in re.findall(r"-?\d+\.?\d*", shape)] for shape, _ in _paths(svg)]
    return [list(zip(line[::2], line[1::2], strict=True)) for line in numbers]


def looks(svg: str) -> list[tuple[str, ...]]:
    """Colour of each line, and its dashes."""
    return [
        (re.findall(r"stroke: (#\w+)", style)[0], *re.findall(r"dasharray: ([^;]+)", style)) for _, style in _paths(svg)
    ]


def test_each_number_stands_at_its_place() -> None:
    spec = FigureSpec(x="n", y=("invariance",), lines=("arm",), title="A title")
    frame = frame_of(spec)
    svg = draw(frame, spec)
    for word in ("A title", "Invariance", "base", "grpo", "n (problem size)", *map(str, SIZES), "40%", "100%"):
        assert any(word in text for text in texts(svg)), word
    drawn = curves(svg)
    assert [len(line) for line in drawn] == [4, 4]
    # Sizes double, so on this axis they are evenly spaced.
    steps = np.diff([x for x, _ in drawn[0]])
    assert steps == pytest.approx([steps[0]] * 3, abs=0.05)
    # Heights are linear in the numbers: two points give the scale, the others have to follow it.
    numbers = np.concatenate([frame.loc[frame["arm"] == arm, "invariance"] for arm in ("base", "grpo")])
    heights = np.array([y for line in drawn for _, y in line])
    slope, start = np.polyfit(numbers, heights, 1)
    assert slope < 0 and heights == pytest.approx(slope * numbers + start, abs=0.05)


def test_the_file_is_the_same_again_and_leaves_settings_alone() -> None:
    spec = FigureSpec(x="n", y=("kappa", "robust"), lines=("arm",), panels=("relation",), title="T")
    frame = frame_of(spec)
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 31, "lines.linewidth": 9}):
        first = draw(frame, spec)
    assert first == draw(frame.copy(), spec)
    assert dict(matplotlib.rcParams) == before
    assert not re.search(r"20\d\d-\d\d-\d\d", first) and "<script" not in first
    ids = re.findall(r'\bid="([^"]*)"', first)
    assert len(set(ids)) == len(ids) and set(re.findall(r'href="#([^"]*)"', first)) <= set(ids)


def test_a_panel_for_each_column_and_panel_key() -> None:
    spec = FigureSpec(x="n", y=("kappa", "robust"), lines=("arm",), panels=("relation",))
    svg = draw(frame_of(spec), spec)
    assert len(curves(svg)) == 2 * 2 * 2
    for relation in ("front_behind", "left_right"):
        assert sum(relation in text for text in texts(svg)) == 2


def test_undefined_numbers_break_the_line_and_are_marked() -> None:
    spec = FigureSpec(x="n", y=("kappa",))
    params = {f"n={n}": {"n": n} for n in SIZES}
    table = behaviour(params, limit=30, missing=0)
    table.loc[table["n"] == 32, "answer"] = "no"
    whole = draw(make_table(behaviour(params, limit=30), params, spec.table(), seed=1, resamples=100), spec)
    frame = make_table(table, params, spec.table(), seed=1, resamples=100)
    svg = draw(frame, spec)
    assert "undefined" in texts(svg) and "undefined" not in texts(whole)
    assert len(curves(whole)[0]) == 4 and len(curves(svg)[0]) == 3
    back = pd.DataFrame([{k: None if v != v else v for k, v in row.items()} for row in frame.to_dict("records")])
    assert draw(back, spec) == svg


def test_a_second_line_key_sets_the_style_of_the_line() -> None:
    params = {
        f"n={n}, prompt={prompt}": {"n": n, "prompt": prompt} for n in SIZES for prompt in ("direct", "reasoning")
    }
    spec = FigureSpec(x="n", y=("invariance",), lines=("arm", "prompt"))
    svg = draw(frame_of(spec, params=params), spec)
    direct, reasoning = looks(svg)[::2], looks(svg)[1::2]
    assert [len(look) for look in direct] == [1, 1] and [len(look) for look in reasoning] == [2, 2]
    assert len(set(direct)) == 2 and [look[0] for look in direct] == [look[0] for look in reasoning]
    assert {"base, direct", "base, reasoning", "grpo, direct", "grpo, reasoning"} <= set(texts(svg))


@pytest.mark.parametrize("count", [1, 8])
def test_any_number_of_arms_can_be_told_apart(count: int) -> None:
    spec = FigureSpec(x="n", y=("invariance",))
    arms = tuple(f"arm {number}" for number in range(count))
    svg = draw(frame_of(spec, arms=arms), spec)
    assert len(set(looks(svg))) == len(curves(svg)) == count
    assert sum(text in arms for text in texts(svg)) == (count if count > 1 else 0)


def test_words_and_single_values_on_the_axis() -> None:
    by_word = FigureSpec(x="relation", y=("gap",))
    assert {"front_behind", "left_right"} <= set(texts(draw(frame_of(by_word), by_word)))
    once = FigureSpec(x="n", y=("accuracy_original",))
    params: dict[str, dict[str, Any]] = {"n=4": {"n": 4}}
    assert "4" in texts(draw(frame_of(once, params=params), once))


def test_names_with_markup_stay_text() -> None:
    spec = FigureSpec(x="n", y=("invariance",), title="<b>$x$</b> & co")
    svg = draw(frame_of(spec, arms=("<script>alert(1)</script>", "$\\alpha$")), spec)
    assert "<script" not in svg and "<script>alert(1)</script>" in texts(svg) and "$\\alpha$" in texts(svg)
    assert "<b>$x$</b> & co" in texts(svg)


def test_a_frame_of_another_table_is_refused() -> None:
    spec = FigureSpec(x="n", y=("invariance",))
    with pytest.raises(RunError, match="'kappa'"):
        draw(frame_of(spec), FigureSpec(x="n", y=("kappa",)))
    with pytest.raises(RunError, match="no rows"):
        draw(frame_of(spec).iloc[:0], spec)
