"""Effects on numbers whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from patching import (
    Cell,
    Edit,
    PatchError,
    head_cells,
    head_set_cell,
    mean_interval,
    random_head_sets,
    rank_heads,
    restoration,
    share_flipped,
    sign_flip_p,
    signed_effect,
)

UNPATCHED = np.array([-2.0, 3.0, -1.0])
DONOR = np.array([4.0, -3.0, -1.05])
PATCHED = np.array([[4.0, -2.0], [0.0, 3.0], [-2.0, -1.0]])


def test_signed_effect_counts_toward_the_named_answer():
    made = signed_effect(PATCHED, UNPATCHED, np.array([1, -1, -1]))
    np.testing.assert_allclose(made, [[6, 0], [3, 0], [1, 0]])
    with pytest.raises(PatchError, match="allowed: \\+1 and -1"):
        signed_effect(PATCHED, UNPATCHED, np.array([1, 0, 1]))
    with pytest.raises(PatchError, match=r"shape \[3, 2\]"):
        signed_effect(PATCHED, UNPATCHED[:2], np.array([1, 1]))


def test_only_items_whose_answers_differ_can_flip():
    share, n = share_flipped(PATCHED, UNPATCHED, DONOR)
    assert n == 2
    np.testing.assert_allclose(share, [0.5, 0.0])
    share, n = share_flipped(PATCHED, UNPATCHED, UNPATCHED)
    assert n == 0 and np.isnan(share).all()


def test_restoration_leaves_out_what_does_not_pass_the_margin():
    made = restoration(PATCHED, UNPATCHED, DONOR, margin=0.5)
    assert made.n == 2 and made.kept.tolist() == [True, True, False] and made.margin == 0.5
    np.testing.assert_allclose(made.values[:2], [[1, 0], [0.5, 0]])
    assert np.isnan(made.values[2]).all()
    with pytest.raises(PatchError, match="margin is 0"):
        restoration(PATCHED, UNPATCHED, DONOR, margin=0)


def test_the_interval_is_the_bootstraps_and_counts_items():
    values = np.random.default_rng(0).normal([0.0, 2.0], 1.0, size=(200, 2))
    values[:50, 1] = np.nan
    made = mean_interval(values, seed=0, resamples=4000)
    assert made.n.tolist() == [200, 150]
    np.testing.assert_allclose(made.mean, np.nanmean(values, axis=0))
    for cell in range(2):
        sample = values[~np.isnan(values[:, cell]), cell]
        theory = stats.bootstrap((sample,), np.mean, n_resamples=4000, method="percentile", rng=0)
        np.testing.assert_allclose([made.low[cell], made.high[cell]], theory.confidence_interval, atol=0.03)
    np.testing.assert_array_equal(mean_interval(values, seed=0, resamples=4000).low, made.low)


def test_a_cell_without_values_is_nan_and_not_zero():
    made = mean_interval(np.array([[1.0, np.nan], [2.0, np.nan]]), seed=0)
    assert made.n.tolist() == [2, 0] and np.isnan([made.mean[1], made.low[1], made.high[1]]).all()
    assert np.isnan(mean_interval(np.zeros((0, 2)), seed=0).mean).all()


def test_the_max_statistic_corrects_for_the_number_of_cells():
    rng = np.random.default_rng(0)
    effects = rng.normal(size=(60, 40))
    effects[:, 7] += 1.0
    p = sign_flip_p(effects, seed=0, permutations=2000)
    assert p[7] < 0.01 and (np.delete(p, 7) > 0.05).all()
    single = sign_flip_p(effects[:, :1], seed=0, permutations=20_000)[0]
    assert single == pytest.approx(stats.ttest_1samp(effects[:, 0], 0).pvalue, abs=0.02)


def test_the_family_wise_error_is_held():
    rng = np.random.default_rng(1)
    smallest = [sign_flip_p(rng.normal(size=(20, 15)), seed=i, permutations=199).min() for i in range(200)]
    assert np.mean(np.array(smallest) <= 0.05) < 0.09


def test_p_is_nan_where_nothing_can_be_tested():
    assert np.isnan(sign_flip_p(np.ones((1, 3)), seed=0)).all()
    assert np.isnan(sign_flip_p(np.array([[1.0, np.nan], [2.0, 3.0]]), seed=0)).all()
    assert (sign_flip_p(np.zeros((5, 2)), seed=0) == 1).all()


def test_heads_are_ranked_by_mean_effect():
    cells = head_cells([2, None, 1])
    effects = np.array([[1.0, -1.0, 3.0], [2.0, -1.0, 5.0]])
    ranked = rank_heads(effects, cells, seed=0)
    assert [(one.layer, one.head, one.mean, one.n) for one in ranked] == [
        (2, 0, 4.0, 2),
        (0, 0, 1.5, 2),
        (0, 1, -1.0, 2),
    ]
    assert all(one.low <= one.mean <= one.high for one in ranked)
    with pytest.raises(PatchError, match="is not one head"):
        rank_heads(effects[:, :1], [Cell("two", (Edit("z", 0, 0), Edit("z", 0, 1)))], seed=0)
    with pytest.raises(PatchError, match="3 cells but 2 were named"):
        rank_heads(effects, cells[:2], seed=0)


def test_random_head_sets_avoid_the_chosen_and_keep_their_size():
    heads = [4, None, 4, 2]
    chosen = [(0, 1), (3, 0)]
    sets = random_head_sets(heads, size=3, count=50, exclude=chosen, seed=0)
    everyone = {(layer, head) for layer, count in enumerate(heads) for head in range(count or 0)}
    for one in sets:
        assert len(set(one)) == 3 and set(one) <= everyone - set(chosen)
    assert {head for one in sets for head in one} == everyone - set(chosen)
    assert random_head_sets(heads, size=3, count=5, exclude=chosen, seed=0) == sets[:5]
    assert random_head_sets(heads, size=3, count=5, exclude=chosen, seed=1) != sets[:5]
    assert len(sets) == len(set(sets)) == 50
    assert random_head_sets([4], size=2, count=10, exclude=[(0, 0), (0, 1)], seed=0) == [((0, 2), (0, 3))]
    with pytest.raises(PatchError, match="9 heads is asked for; 8 heads are left"):
        random_head_sets(heads, size=9, count=1, exclude=chosen, seed=0)


def test_a_head_set_is_one_cell():
    cell = head_set_cell("chosen", [(0, 1), (3, 0)])
    assert cell.edits == (Edit("z", 0, 1), Edit("z", 3, 0))
