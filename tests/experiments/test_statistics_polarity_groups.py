"""Groups of prompts against each other within blocks, ways to negate, trends over sizes: by hand and against scipy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import permutation_test, spearmanr

from experiments.errors import RunError
from experiments.statistics.polarity_groups import compare_groups, negation_strategy, size_trend


def test_groups_are_compared_within_blocks() -> None:
    """Block 3 has no letters and is left out; its easy prompts don't help the group."""
    right = [True, False, True, True, False, False, True, True, True]
    members = ["x", "indian", "indian", "x", "indian", "x", "indian", "indian", "indian"]
    blocks = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    (found,) = compare_groups(right, members, blocks, reference="x", seed=0)
    assert (found.first, found.second, found.blocks, found.n) == ("indian", "x", 3, 7)
    assert found.difference == pytest.approx((-0.5 - 1 + 1) / 3)
    assert found.first_accuracy == pytest.approx(0.5) and found.second_accuracy == pytest.approx(2 / 3)
    assert found.p == found.p_holm


def test_sign_flips_agree_with_scipy_and_holm_adjusts() -> None:
    rng = np.random.default_rng(0)
    blocks = np.repeat(np.arange(60), 6)
    members = np.tile(["x", "x", "a", "a", "b", "b"], 60)
    right = rng.random(360) < np.where(members == "a", 0.75, 0.55)
    found = compare_groups(right.tolist(), members.tolist(), blocks.tolist(), reference="x", seed=1)
    assert [one.first for one in found] == ["a", "b"]
    for one in found:
        first, second = (right[members == name].reshape(60, 2).mean(axis=1) for name in (one.first, "x"))
        assert one.difference == pytest.approx((first - second).mean())
        peer = permutation_test(
            (first, second), lambda a, b, axis: (a - b).mean(axis=axis), permutation_type="samples", vectorized=True,
            n_resamples=9_999, rng=np.random.default_rng(0),
        )  # fmt: skip
        assert one.p == pytest.approx(peer.pvalue, abs=0.015)
        assert one.low < one.difference < one.high
    assert found[0].p_holm == pytest.approx(min(1, 2 * found[0].p)) and found[1].p_holm >= found[1].p
    every = compare_groups(right.tolist(), members.tolist(), blocks.tolist(), seed=1)
    assert [(one.first, one.second) for one in every] == [("x", "a"), ("x", "b"), ("a", "b")]


def test_groups_that_do_not_differ_and_groups_that_never_meet() -> None:
    (same,) = compare_groups([True, True], ["a", "b"], [0, 0], seed=0)
    assert same.difference == 0 and same.p == 1
    (apart,) = compare_groups([True, True], ["a", "b"], [0, 1], seed=0)
    assert np.isnan(apart.difference) and np.isnan(apart.p) and apart.reason == "no block holds both groups"
    with pytest.raises(RunError, match="groups are a; needed at least two"):
        compare_groups([True], ["a"], [0], seed=0)
    with pytest.raises(RunError, match="reference is 'z'; the groups are a, b"):
        compare_groups([True, True], ["a", "b"], [0, 0], reference="z", seed=0)


def negated_prompts(seed: int = 0) -> dict[str, list[Any]]:
    """100 sets whose correct and valid forms are negated both ways; the word not is answered worse."""
    rng = np.random.default_rng(seed)
    rows = [
        (s, form, style) for s in range(100) for form in ("correct", "valid") for style in ("none", "prefix", "not")
    ]
    rows += [(s, "follow", "not") for s in range(100)]  # no prefix: does not count
    gold = ["no" if s < 70 else "yes" for s, *_ in rows]
    right = rng.random(len(rows)) < np.array([0.4 if style == "not" else 0.7 for *_, style in rows])
    answers = [g if r else {"yes": "no", "no": "yes"}[g] for g, r in zip(gold, right, strict=True)]
    return {"answers": answers, "gold": gold, "forms": [f for _, f, _ in rows], "negations": [n for *_, n in rows],
            "sets": [s for s, *_ in rows]}  # fmt: skip


def test_prefix_against_not() -> None:
    one = negated_prompts()
    found = negation_strategy(**one, seed=0)
    assert found.pairs == 200 and found.contrast.blocks == 100 and found.contrast.n == 400
    assert (found.contrast.first, found.contrast.second) == ("prefix", "not")
    rows = list(zip(*one.values(), strict=True))
    accuracy = {
        style: np.mean([a == g for a, g, form, n, _ in rows if n == style and form != "follow"])
        for style in ("prefix", "not")
    }
    assert found.contrast.difference == pytest.approx(accuracy["prefix"] - accuracy["not"])
    assert found.contrast.p < 0.001 and found.contrast.low > 0
    paired = Counter(
        tuple(a == g for style in ("prefix", "not") for a, g, form, n, s in rows if (form, n, s) == (f, style, k))
        for k in range(100) for f in ("correct", "valid")
    )  # fmt: skip
    assert (found.mcnemar.b, found.mcnemar.c) == (paired[True, False], paired[False, True])
    assert found.not_yes_rate == pytest.approx(
        np.mean([a == "yes" for a, _, form, n, _ in rows if n == "not" and form != "follow"])
    )


def test_negations_that_cannot_be_matched_are_refused() -> None:
    one = negated_prompts()
    twice = {key: [*column, column[1]] for key, column in one.items()}
    with pytest.raises(RunError, match="stand twice with negation 'prefix'"):
        negation_strategy(**twice, seed=0)
    alone = {
        key: [v for v, n in zip(column, one["negations"], strict=True) if n != "not"] for key, column in one.items()
    }
    with pytest.raises(RunError, match="no set has a form negated both"):
        negation_strategy(**alone, seed=0)


@pytest.mark.parametrize("n", [3, 5, 8, 12])
def test_trends_against_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    sizes, measure = list(range(n)), rng.normal(size=n).tolist()
    found = size_trend(sizes, measure)
    assert found.rho == pytest.approx(spearmanr(sizes, measure).statistic)
    if n <= 8:
        peer = permutation_test(
            (measure,), lambda x: spearmanr(sizes, x).statistic, permutation_type="pairings", n_resamples=np.inf
        ) if n <= 5 else None  # fmt: skip
        assert peer is None or found.p == pytest.approx(peer.pvalue)
    else:
        assert found.p == pytest.approx(spearmanr(sizes, measure).pvalue)


def test_no_trend_is_nan_with_a_reason() -> None:
    for sizes, measure, why in (([1, 2], [0.1, 0.2], "2 models"), ([1, 2, 3], [0.5] * 3, "one value in all models")):
        found = size_trend(sizes, measure)
        assert np.isnan(found.rho) and np.isnan(found.p) and why in found.reason
    assert size_trend([1, 2, 3, 4], [3, np.nan, 2, 1]).n == 3
