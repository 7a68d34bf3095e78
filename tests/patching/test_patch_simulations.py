"""Coverage, level and power by simulated studies; minutes, so marked slow."""

from __future__ import annotations

import numpy as np
import pytest

from patching import ablation_study, items_needed, mean_interval, share_interval, sign_flip_p
from patching.heads_measures import STATISTICS, Design

STUDIES = 1000
pytestmark = pytest.mark.slow


def covered(low, high, truth):
    return ((np.asarray(low) <= truth) & (truth <= np.asarray(high))).mean()


@pytest.mark.parametrize("instances", [12, 30, 100])
@pytest.mark.parametrize("rows", [1, 2, "1 to 6"])
def test_means_over_instances_are_covered(instances, rows):
    rng = np.random.default_rng(21)
    inside = []
    for study in range(3 * STUDIES if instances <= 30 else STUDIES):
        sizes = rng.integers(1, 7, size=instances) if rows == "1 to 6" else np.full(instances, rows)
        groups = np.repeat(np.arange(instances), sizes)
        values = (rng.normal(1, 2, instances)[groups] + rng.normal(0, 1, len(groups)))[:, None]
        made = mean_interval(values, groups=groups, seed=study, resamples=1000)
        inside.append(covered(made.low, made.high, 1))
    assert 0.93 <= np.mean(inside) <= 0.97


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("together", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("instances", [40, 100])
def test_shares_are_covered(instances, together, share):
    """Two rows an instance, which agree because they are one draw in a share ``together`` of cases."""
    rng = np.random.default_rng(7)
    inside = []
    groups = np.repeat(np.arange(instances), 2)
    for _ in range(2 * STUDIES):
        whole = rng.random(instances) < share
        hits = np.where(rng.random(2 * instances) < together, whole[groups], rng.random(2 * instances) < share)
        made = share_interval(hits[:, None], groups=groups)
        inside.append(covered(made.low, made.high, share))
    assert 0.925 <= np.mean(inside) <= 0.98  # counts are discrete: a few instances more or less move the coverage


@pytest.mark.parametrize(("instances", "rows"), [(10, 1), (25, 2)])
def test_one_false_finding_in_twenty_studies(instances, rows):
    """500 studies without effect, 60 cells that move together, heavy tails: the smallest p is below 5 % in 5 %."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(instances), rows)
    found = []
    for study in range(500):
        shared = rng.standard_t(4, size=(instances, 1))
        own = shared + rng.standard_t(4, size=(instances, 60))
        effects = own[groups] + rng.normal(size=(len(groups), 60)) * (rows > 1)
        found.append(sign_flip_p(effects, groups=groups, seed=study, permutations=500).min() <= 0.05)
    assert 0.03 <= np.mean(found) <= 0.07


@pytest.mark.parametrize(("effect", "cells"), [(0.5, 1), (0.8, 1), (0.6, 28)])
def test_the_size_asked_for_has_the_power_promised(effect, cells):
    """An effect in one cell of many, found by the test that a study uses."""
    n = items_needed(effect, 1.0, cells=cells)
    rng = np.random.default_rng(5)
    found = []
    for study in range(500):
        values = rng.normal(size=(n, cells))
        values[:, 0] += effect
        found.append(sign_flip_p(values, seed=study, permutations=1000)[0] <= 0.05)
    assert 0.76 <= np.mean(found) <= 0.86


def simulated(rng, n):
    """A study in which ablation takes 40 % of the signal and adds to the default, row by row."""
    cells = np.array(["f-yes", "f-no", "b-yes", "b-no"])[np.arange(n) % 4]
    gold = np.where(np.char.endswith(cells, "yes"), 1, -1)
    own = rng.normal(0, 1.5, n)
    before = np.concatenate([0.5 + 1.2 * gold + own, 0.9 + 0.9 * gold + own + rng.normal(0, 1, n)])
    moved = np.concatenate([0.8 - 0.48 * gold, 0.8 - 0.36 * gold]) + rng.normal(0, 0.4, 2 * n)
    shape = {
        "presentations": ["original"] * n + ["equivalent"] * n,
        "keys": np.tile(np.arange(n), 2).tolist(),
        "cells": np.tile(cells, 2).tolist(),
        "gold": np.tile(gold, 2),
    }
    return before, {"top": before + moved}, shape


@pytest.mark.parametrize("instances", [40, 120])
def test_changes_by_ablation_are_covered(instances):
    rng = np.random.default_rng(11)
    before, after, shape = simulated(rng, 400_000)
    large = Design.of(before, after, shape["presentations"], shape["keys"], shape["cells"], shape["gold"], None)
    truth = large.changes(large.values(large.columns.sum(axis=0)))[0]
    inside = []
    for study in range(STUDIES):
        before, after, shape = simulated(rng, instances)
        one = ablation_study(before, after, seed=study, resamples=800, **shape).sets["top"]
        changes = [*(change.change for change in one.measures.values()), *one.share_removed.values()]
        inside.append([interval.low <= value <= interval.high for interval, value in zip(changes, truth, strict=True)])
    for name, share in zip(STATISTICS, np.mean(inside, axis=0), strict=True):
        assert 0.925 <= share <= 0.975, name
