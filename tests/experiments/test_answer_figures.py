"""Figures of answers: every number stands at its place, and what is undefined is seen."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from experiments.answer_figures import AnswerFigureSpec, draw_answers
from experiments.answer_tables import make_answer_table
from experiments.errors import RunError
from experiments.table_columns import counted
from tests.experiments.made_answers import made

SVG = "{http://www.w3.org/2000/svg}"
ARMS = ("one", "two", "three", "four")
SIZES = {"one": 135_000_000, "two": 360_000_000, "three": 1_700_000_000, "four": 8_000_000_000}
KNOWN = {arm: {"series": "a" if arm != "four" else "b", "n_parameters": size} for arm, size in SIZES.items()}
POINTS = AnswerFigureSpec(of="answers", kind="points", x="abs_bias", y=("floor",), title="Floor against bias")
HEAT = AnswerFigureSpec(of="answers", kind="heat", x="presentation", y=("template",), value="accuracy", panels=("arm",))


def frame_of(spec: AnswerFigureSpec, arms: tuple[str, ...] = ARMS) -> pd.DataFrame:
    table, facts, of_setting = made(arms=arms, limit=60)
    return make_answer_table(table, facts, of_setting, spec.table(), seed=1, resamples=100, arms=KNOWN)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_points_stand_at_floor_and_bias_with_their_correlation() -> None:
    frame = frame_of(POINTS)
    svg = draw_answers(frame, POINTS)
    said = texts(svg)
    r = np.corrcoef(frame["abs_bias"], frame["floor"])[0, 1]
    assert f"4 points, r = {r:+.2f}".replace("-", "−") in said
    assert {*ARMS, "Floor", "|Bias|", "Floor against bias", "no higher is possible"} <= set(said)
    # Markers are drawn by reference: place them on the two axes by the ticks' own places.
    places = [
        (float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: #0072b2"', svg)
    ]
    assert len(places) == len(frame)
    (a, b), (c, d) = (
        np.polyfit(frame["abs_bias"], [x for x, _ in places], 1),
        np.polyfit(frame["floor"], [y for _, y in places], 1),
    )
    for (x, y), row in zip(places, frame.to_dict("records"), strict=True):
        assert x == pytest.approx(a * row["abs_bias"] + b, abs=0.1) and y == pytest.approx(
            c * row["floor"] + d, abs=0.1
        )
    assert a > 0 > c
    assert (frame["floor"] <= 1 - frame["abs_bias"] + 1e-12).all()
    assert draw_answers(frame, POINTS) == svg


def test_an_undefined_point_is_counted() -> None:
    table, facts, of_setting = made({"templates": ["valid"]}, arms=("one",), limit=20)
    frame = make_answer_table(table, facts, of_setting, POINTS.table(), seed=1, resamples=50)
    assert "0 points, 1 undefined" in texts(draw_answers(frame, POINTS))


def test_every_cell_of_a_heat_map_is_printed() -> None:
    arms = ARMS[:2]
    frame = frame_of(HEAT, arms)
    said = texts(draw_answers(frame, HEAT))
    expected = sorted(f"{100 * value:.0f}" for value in frame["accuracy"])
    numbers = sorted(word for word in said if re.fullmatch(r"\d+", word))
    assert numbers == expected and len(frame) == len(arms) * (15 * 12 - 1)
    # The one question that is no English, once a panel.
    assert said.count("–") == len(arms)
    assert all(said.count(name) == 1 for name in frame["template"].unique())
    assert all(said.count(name) == len(arms) for name in frame["presentation"].unique())
    assert [f"arm {arm}" for arm in arms] == [word for word in said if word.startswith("arm ")]


def test_curves_over_size_have_a_line_a_series() -> None:
    spec = AnswerFigureSpec(of="answers", x="n_parameters", y=("v_aff", "i_neg"), lines=("series",), title="Size")
    said = texts(draw_answers(frame_of(spec), spec))
    assert {"135M", "360M", "1.7B", "8B", "number of parameters", "V aff", "I neg", "a", "b"} <= set(said)
    assert counted(12) == "12" and counted(0.5) == "0.5" and counted(134_515_008) == "135M"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"x": "form", "y": ("template",), "kind": "heat"}, "value is None and kind heat"),
        ({"x": "form", "y": ("floor",), "value": "floor"}, "heat maps, and only they"),
        ({"x": "bias", "y": ("floor", "bias"), "kind": "points"}, "points have one column there"),
        ({"x": "arm", "y": ("flor",)}, "did you mean floor"),
        ({"x": "arm", "y": ("floor",)}, "name 'arm' twice"),
        ({"x": "form", "y": ("range",)}, "say over which row key"),
    ],
)
def test_figures_that_show_nothing_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        AnswerFigureSpec(**{"of": "answers", **keys})


def test_a_table_of_another_figure_is_refused() -> None:
    with pytest.raises(RunError, match="needs 'arm'"):
        draw_answers(frame_of(POINTS).drop(columns="arm"), POINTS)
    with pytest.raises(RunError, match="has no rows"):
        draw_answers(frame_of(POINTS).head(0), POINTS)
