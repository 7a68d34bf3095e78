"""Four cells, floor, bias and what follows: worked by hand, against a plain loop, and against a published table."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.errors import RunError
from experiments.statistics.pairs import pair_profile
from experiments.statistics.polarity import (
    FOUR,
    MEASURES,
    FourCells,
    PolarityProfile,
    breakdown,
    polarity_profile,
    pooling,
    turned,
)
from experiments.statistics.polarity_groups import size_trend

TABLE = Path(__file__).parent / "data" / "probability_operators_table_3.csv"


def published() -> list[dict[str, Any]]:
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [{key: value if key == "model" else float(value) for key, value in row.items()} for row in rows]


def cells_of(row: dict[str, Any]) -> FourCells:
    return FourCells(**{name: row[name] for name in FOUR})


# --- the published table ---------------------------------------------------------------------------------------------

PRINTED = published()
# Half of the last printed digit; a value that lies between two digits may have been printed as either.
THREE, TWO = 0.0005 + 1e-9, 0.005 + 1e-9


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: row["model"])
def test_bias_sensitivity_and_floor_of_every_published_row(row: dict[str, Any]) -> None:
    found = cells_of(row)
    assert abs(found.bias - row["bias"]) <= TWO
    assert abs(found.polarity_sensitivity - row["polarity_sensitivity"]) <= TWO
    assert abs(found.floor - row["floor"]) <= THREE
    # 55, 54, 20 and 20 combinations of template and form. Cells are printed to three digits too.
    accuracy = np.average([row[name] for name in FOUR], weights=(55, 54, 20, 20))
    assert abs(accuracy - row["accuracy"]) <= 2 * THREE


def test_what_the_paper_says_about_the_table() -> None:
    found = [cells_of(row) for row in PRINTED]
    floors, biases = np.array([one.floor for one in found]), np.array([abs(one.bias) for one in found])
    affirmative = np.array([one.affirmative_floor for one in found])
    assert len(found) == 29 and (floors > 0.5).sum() == 9 and (floors < 0.3).sum() == 11
    assert (affirmative > 0.5).sum() == 10
    assert round(float(np.corrcoef(floors, biases)[0, 1]), 2) == -0.82
    assert round(float(np.corrcoef(floors, affirmative)[0, 1]), 2) == 0.90


@pytest.mark.parametrize(
    ("family", "sizes", "rho"),
    [
        ("qwen3", {"0.6b": 0.6, "1.7b": 1.7, "4b": 4, "8b": 8, "14b": 14, "32b": 32}, -0.89),
        ("gemma3", {"270m": 0.27, "1b": 1, "4b": 4, "12b": 12, "27b": 27}, -0.60),
        ("gemma4", {"e2b": 2, "e4b": 4, "12b": 12, "31b": 31}, -0.40),
        ("deepseek-r1", {"7b": 7, "14b": 14, "32b": 32}, 0.50),
    ],
)
def test_size_trends_of_the_paper(family: str, sizes: dict[str, float], rho: float) -> None:
    by_model = {row["model"]: abs(row["bias"]) for row in PRINTED}
    found = size_trend(list(sizes.values()), [by_model[f"{family}:{size}"] for size in sizes])
    assert round(found.rho, 2) == rho and found.n == len(sizes)
    # Few models say little: even the clearest trend is barely there.
    assert (found.p < 0.05) == (family == "qwen3")


# --- by hand ---------------------------------------------------------------------------------------------------------


def column(*counts: tuple[bool, bool, str | None, int]) -> tuple[list[Any], list[bool], list[bool]]:
    """answers, valid, negated from (valid, negated, answer, how often)."""
    rows = [(answer, valid, negated) for valid, negated, answer, times in counts for _ in range(times)]
    answers, valid, negated = zip(*rows, strict=True)
    return list(answers), list(valid), list(negated)


def scored(answers: list[Any], valid: list[bool], negated: list[bool], **how: Any) -> PolarityProfile:
    how = {"sets": list(range(len(answers))), "resamples": 50, "seed": 0, **how}
    return polarity_profile(answers, valid, negated, how.pop("sets"), **how)


def values(profile: PolarityProfile) -> dict[str, float]:
    return {name: one.value for name, one in profile.measures.items()}


def test_worked_by_hand() -> None:
    """Ten prompts a cell but four invalid negated: 8, 5, 6 and 1 right; two answers missing."""
    found = scored(
        *column(
            (True, False, "yes", 8), (True, False, "no", 1), (True, False, None, 1),
            (True, True, "no", 5), (True, True, "yes", 5),
            (False, False, "no", 6), (False, False, "yes", 3), (False, False, None, 1),
            (False, True, "yes", 1), (False, True, "no", 3),
        )
    )  # fmt: skip
    assert values(found) == pytest.approx(
        {
            "accuracy": 20 / 34, "uncertain": 2 / 34, "yes_rate": 17 / 32,
            "v_aff": 0.8, "v_neg": 0.5, "i_aff": 0.6, "i_neg": 0.25,
            "accuracy_yes": 0.525, "accuracy_no": 0.55, "bias": -0.025, "floor": 0.525, "affirmative_floor": 0.6,
            "polarity_sensitivity": 0.325, "cell_average": 0.5375,
            "accuracy_affirmative": 14 / 20, "accuracy_negated": 6 / 14,
            "accuracy_drop": 14 / 20 - 6 / 14,
            "lean": (0.7 + 0.0 - 0.3 - 0.5) / 4,
        }
    )  # fmt: skip
    assert found.n == 34 and found.sets == 34 and set(found.measures) == set(MEASURES)


def test_responders_that_know_nothing_and_everything() -> None:
    grid = [(v, n) for v, n in itertools.product((True, False), repeat=2) for _ in range(11 if v else 4)]
    valid, negated = [v for v, _ in grid], [n for _, n in grid]
    gold = ["yes" if v != n else "no" for v, n in grid]
    flipped = ["no" if one == "yes" else "yes" for one in gold]
    for said, floor, bias, drop, average in (
        (["yes"] * 30, 0, 1, 0, 0.5),
        (["no"] * 30, 0, -1, 0, 0.5),
        (gold, 1, 0, 0, 1),
        (flipped, 0, 0, 0, 0),
        # Reads the inference and not the negation.
        (["yes" if v else "no" for v in valid], 0.5, 0, 1, 0.5),
        ([None] * 30, 0, 0, 0, 0),
    ):
        found = values(scored(said, valid, negated))
        assert (found["floor"], found["bias"], found["polarity_sensitivity"], found["cell_average"]) == pytest.approx(
            (floor, bias, drop, average)
        )
        assert found["lean"] == pytest.approx(found["bias"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from(["yes", "no", None])), max_size=60))
def test_identities_and_a_plain_loop(drawn: list[tuple[bool, bool, str | None]]) -> None:
    rows = [*itertools.product((True, False), (True, False), ("yes", "no", None)), *drawn]
    found = values(scored([a for *_, a in rows], [v for v, *_ in rows], [n for _, n, _ in rows], resamples=2))
    cells = {}
    for name, (v, n) in zip(FOUR, itertools.product((True, False), repeat=2), strict=True):
        # product gives True before False for negated; the cells have affirmative first.
        inside = [answer for valid, negated, answer in rows if (valid, negated) == (v, not n)]
        right = "yes" if v != (not n) else "no"
        cells[name] = sum(answer == right for answer in inside) / len(inside)
    assert {name: found[name] for name in FOUR} == pytest.approx(cells)
    four = FourCells(**cells)
    for name in (
        "accuracy_yes",
        "accuracy_no",
        "bias",
        "floor",
        "affirmative_floor",
        "polarity_sensitivity",
        "cell_average",
    ):
        assert found[name] == pytest.approx(getattr(four, name))
    assert found["floor"] + abs(found["bias"]) / 2 == pytest.approx(found["cell_average"])
    assert cells["v_aff"] - cells["v_neg"] == pytest.approx(found["polarity_sensitivity"] + found["bias"])
    assert cells["i_aff"] - cells["i_neg"] == pytest.approx(found["polarity_sensitivity"] - found["bias"])


def test_within_one_validity_lean_and_sensitivity_are_one_number() -> None:
    for valid, sign in ((True, 1), (False, -1)):
        rows = column(
            (valid, False, "yes", 7), (valid, False, "no", 3), (valid, True, "yes", 4), (valid, True, "no", 6)
        )
        profile = scored(*rows)
        found = values(profile)
        assert found["lean"] == pytest.approx(sign * found["polarity_sensitivity"])
        for name in ("bias", "floor", "cell_average", "affirmative_floor"):
            assert np.isnan(found[name]) and "a cell that it needs has no prompt" in profile.measures[name].reason


# --- intervals -------------------------------------------------------------------------------------------------------


def study(seed: int, *, accuracies: tuple[float, ...] = (0.9, 0.5, 0.6, 0.3), contents: int = 40) -> dict[str, Any]:
    """Eleven valid and four invalid templates, each content with five forms affirmative and negated."""
    rng = np.random.default_rng(seed)
    rows = [(t, c, f, n) for t in range(15) for c in range(contents) for f in range(5) for n in (False, True)]
    valid, negated = [t < 11 for t, *_ in rows], [n for *_, n in rows]
    chance = np.array([accuracies[2 * (not v) + n] for v, n in zip(valid, negated, strict=True)])
    # What a set has in common moves all its prompts.
    shift = {key: rng.normal(0, 0.15) for key in {(t, c) for t, c, *_ in rows}}
    right = rng.random(len(rows)) < np.clip(chance + [shift[t, c] for t, c, *_ in rows], 0, 1)
    answers = ["yes" if (v != n) == r else "no" for v, n, r in zip(valid, negated, right, strict=True)]
    return {"answers": answers, "valid": valid, "negated": negated, "sets": [f"{t}-{c}" for t, c, *_ in rows],
            "strata": [t for t, *_ in rows], "forms": [f for _, _, f, _ in rows]}  # fmt: skip


def test_intervals_hold_sets_together() -> None:
    one = study(0)
    how = {"resamples": 1000, "seed": 3}
    found = polarity_profile(one["answers"], one["valid"], one["negated"], one["sets"], strata=one["strata"], **how)
    loose = polarity_profile(one["answers"], one["valid"], one["negated"], list(range(len(one["answers"]))), **how)
    for name in ("accuracy", "floor", "bias", "v_aff"):
        inner = found.measures[name]
        assert inner.low < inner.value < inner.high and inner.support == 15 * 40 * 10
        assert "all rows of one together within strata" in inner.method
    wide, narrow = (
        p.measures["v_aff"].high - p.measures["v_aff"].low for p in (found, loose)
    )  # fmt: skip
    assert wide > 1.2 * narrow
    again = polarity_profile(one["answers"], one["valid"], one["negated"], one["sets"], strata=one["strata"], **how)
    assert again == found


def test_intervals_cover() -> None:
    """Of 60 studies about the same truth, few have an interval of the floor that misses it."""
    every = [study(seed, contents=12) for seed in range(60)]
    found = [
        polarity_profile(
            s["answers"], s["valid"], s["negated"], s["sets"], strata=s["strata"], resamples=300, seed=0
        ).measures
        for s in every
    ]
    truth = np.mean([one["accuracy_no"].value for one in found])
    missed = sum(not one["accuracy_no"].low <= truth <= one["accuracy_no"].high for one in found)
    assert missed <= 8


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RunError, match=r"columns differ in length \(answers 2, valid 1, negated 2\)"):
        scored(["yes", "no"], [True], [False, True])
    with pytest.raises(RunError, match=r"answers\[1\] is 'uncertain'; allowed: yes, no or None"):
        scored(["yes", "uncertain"], [True, True], [False, True])
    with pytest.raises(RunError, match=r"valid\[0\] is 'valid'"):
        scored(["yes"], ["valid"], [False])  # type: ignore[list-item]
    nothing = scored([], [], [])
    assert nothing.n == 0 and all(np.isnan(one.value) and one.reason for one in nothing.measures.values())


# --- weightings ------------------------------------------------------------------------------------------------------


def test_five_weightings_of_the_same_answers() -> None:
    """One pattern in two sets of unequal size, one in one set; two forms."""
    rows = [  # set, pattern, form, valid, negated, right
        ("A", "p", "truth", True, False, True), ("A", "p", "truth", True, True, True),
        ("A", "p", "direct", True, False, True),
        ("B", "p", "truth", True, False, False), ("B", "p", "truth", True, True, True),
        ("C", "q", "truth", False, False, False), ("C", "q", "direct", False, True, False),
    ]  # fmt: skip
    sets, patterns, forms, valid, negated, right = (list(one) for one in zip(*rows, strict=True))
    answers = ["yes" if (v != n) == r else "no" for v, n, r in zip(valid, negated, right, strict=True)]
    found = pooling(answers, valid, negated, sets, patterns=patterns, frames=forms, resamples=20, seed=0)
    assert {name: one.value for name, one in found.schemes.items()} == pytest.approx(
        {"micro": 4 / 7, "prompt": (1 + 1 / 2 + 0) / 3, "template": (4 / 5 + 0) / 2, "frame": (3 / 5 + 1 / 2) / 2,
         "cell": (2 / 3 + 1 + 0 + 0) / 4}
    )  # fmt: skip
    assert found.spread.value == pytest.approx(4 / 7 - 0.4)


def test_a_grid_has_one_accuracy_per_set_and_form() -> None:
    """Without the collapsed form, frame- and prompt-balancing are the flat mean by construction."""
    one = study(1)
    found = pooling(one["answers"], one["valid"], one["negated"], one["sets"], patterns=one["strata"], frames=one["forms"],
                    strata=one["strata"], resamples=20, seed=0)  # fmt: skip
    flat = found.schemes["micro"].value
    assert [found.schemes[name].value for name in ("prompt", "template", "frame")] == pytest.approx([flat] * 3)
    four = polarity_profile(one["answers"], one["valid"], one["negated"], one["sets"], resamples=2, seed=0)
    assert found.schemes["cell"].value == pytest.approx(four.measures["cell_average"].value)
    assert found.spread.value == pytest.approx(abs(flat - found.schemes["cell"].value))


# --- by group, and as pairs ------------------------------------------------------------------------------------------


def test_a_breakdown_is_the_profile_of_each_group() -> None:
    one = study(2, contents=6)
    found = breakdown(one["answers"], one["valid"], one["negated"], one["sets"], one["forms"], strata=one["strata"],
                      resamples=30, seed=0)  # fmt: skip
    assert list(found) == [0, 1, 2, 3, 4] and all(profile.n == 15 * 6 * 2 for profile in found.values())
    inside = [i for i, form in enumerate(one["forms"]) if form == 3]
    own = {key: [column[i] for i in inside] for key, column in one.items()}
    assert found[3] == polarity_profile(own["answers"], own["valid"], own["negated"], own["sets"], strata=own["strata"],
                                        resamples=30, seed=0)  # fmt: skip
    assert np.mean([profile.measures["accuracy"].value for profile in found.values()]) == pytest.approx(
        scored(one["answers"], one["valid"], one["negated"]).measures["accuracy"].value
    )


def test_a_negated_question_turned_is_a_pair_with_its_original() -> None:
    gold = ["yes", "yes", "no", "no", "yes"]
    affirmative, negated = ["yes", "yes", "no", "yes", None], ["no", "yes", "yes", "no", "no"]
    found = pair_profile(affirmative, turned(negated), gold)
    assert turned(["yes", "no", None]) == ["no", "yes", None]
    # Both right twice, both wrong once (it changed its answer, to the wrong one), one right once; one not read.
    assert (found.n_parsed, found.robust.count, found.shared_wrong.count, found.unstable.count) == (4, 2, 1, 1)
    constant = pair_profile(["yes"] * 4, turned(["yes"] * 4), gold[:4])
    assert constant.invariance.value == 0 and constant.robust.value == 0
