"""Ranges over groups and common leans: worked by hand, against a plain loop, and under chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.errors import RunError
from experiments.statistics.polarity_spread import DEALS, accuracy_range, common_lean


def test_a_range_worked_by_hand() -> None:
    # Three groups with 2 of 2, 1 of 2 and 1 of 2 right, in two blocks.
    right = [True, True, True, False, False, True]
    members = ["a", "a", "b", "b", "c", "c"]
    sets = ["1", "2", "3", "4", "5", "6"]
    blocks = ["x", "y"] * 3
    found = accuracy_range(right, members, sets, blocks, strata=members, resamples=200, seed=1)
    assert found.interval.value == 0.5 and found.groups == 3
    assert found.interval.low == 0 and found.interval.high == 1


def test_p_agrees_with_every_deal() -> None:
    # Two blocks of three groups: 36 deals, of which those count whose means spread as far.
    means = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    right = means.ravel().astype(bool).tolist()
    members, blocks = ["a", "b", "c"] * 2, ["x"] * 3 + ["y"] * 3
    found = accuracy_range(right, members, range(6), blocks, resamples=100, seed=4)
    orders = list(itertools.permutations(range(3)))
    spreads = [np.ptp((means[0][list(one)] + means[1][list(two)]) / 2) for one in orders for two in orders]
    exact = np.mean([spread >= np.ptp(means.mean(axis=0)) - 1e-9 for spread in spreads])
    assert found.p == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / DEALS))


def test_chance_gives_a_range_but_no_small_p() -> None:
    rng, small = np.random.default_rng(0), 0
    for seed in range(40):
        right = (rng.random(5 * 60) < 0.5).tolist()
        members, blocks = list(range(5)) * 60, [number for number in range(60) for _ in range(5)]
        found = accuracy_range(right, members, blocks, blocks, resamples=100, seed=seed)
        assert found.interval.value > 0
        small += found.p < 0.05
    assert small <= 7  # of 40, at one in twenty; more has a probability of 0.2%


def test_blocks_without_all_groups_tell_no_p() -> None:
    found = accuracy_range([True, False], ["a", "b"], [1, 2], ["x", "y"], resamples=100, seed=1)
    assert np.isnan(found.p) and found.reason == "no block holds all groups" and found.interval.value == 1
    with pytest.raises(RunError, match="groups are a; needed at least two"):
        accuracy_range([True, False], ["a", "a"], [1, 2], ["x", "y"], resamples=100, seed=1)


def test_leans_in_common() -> None:
    found = common_lean([0.5, 0.1, -0.3, 0.0, np.nan])
    assert found.n == 4 and found.mean_size == pytest.approx(0.225) and found.agreement == pytest.approx(2 / 3)
    assert common_lean([-0.2]).agreement == 1
    nobody = common_lean([np.nan, np.nan])
    assert np.isnan(nobody.mean_size) and np.isnan(nobody.agreement) and nobody.n == 0
    assert np.isnan(common_lean([0.0]).agreement)
