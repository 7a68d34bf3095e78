"""Intervals, tests and sizes on numbers whose answer is known, and against scipy and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from patching import PatchError, detectable_effect, items_needed, mean_interval, share_interval, sign_flip_p


def test_rows_of_one_instance_are_drawn_together():
    """Two identical rows an instance say no more than one: same mean, same interval."""
    values = np.random.default_rng(0).normal(1, 2, size=(40, 3))
    once = mean_interval(values, seed=0)
    twice = mean_interval(np.repeat(values, 2, axis=0), groups=np.repeat(np.arange(40), 2), seed=0)
    np.testing.assert_allclose([twice.mean, twice.low, twice.high], [once.mean, once.low, once.high])
    assert twice.n.tolist() == [80] * 3 and twice.n_groups.tolist() == [40] * 3
    naive = mean_interval(np.repeat(values, 2, axis=0), seed=0)
    assert ((naive.high - naive.low) < 0.8 * (once.high - once.low)).all()


def test_small_studies_get_students_t():
    values = np.random.default_rng(1).normal(size=(8, 1))
    made = mean_interval(values, seed=0, resamples=20_000)
    theory = stats.t.interval(0.95, 7, loc=values.mean(), scale=stats.sem(values[:, 0]))
    plain = stats.bootstrap((values[:, 0],), np.mean, method="percentile", n_resamples=9999, rng=0).confidence_interval
    width = made.high[0] - made.low[0]
    assert plain.high - plain.low < 0.85 * width
    assert width == pytest.approx(theory[1] - theory[0], rel=0.15)


def test_the_mean_is_over_rows_and_not_over_instances():
    values = np.array([[1.0], [1.0], [1.0], [5.0], [np.nan]])
    made = mean_interval(values, groups=["a", "a", "a", "b", "c"], seed=0)
    assert made.mean[0] == 2 and made.n[0] == 4 and made.n_groups[0] == 2
    single = mean_interval(values[:3], groups=["a", "a", "a"], seed=0)
    assert single.mean[0] == 1 and np.isnan([single.low[0], single.high[0]]).all(), "one instance has no spread"


def test_shares_are_wilson_and_instances_with_many_rows_widen_them():
    hits = np.array([[True, False, True]] * 7 + [[True, False, False]] * 5)
    made = share_interval(hits)
    for cell, count in enumerate((12, 0, 7)):
        low, high = proportion_confint(count, 12, method="wilson")
        np.testing.assert_allclose([made.low[cell], made.high[cell]], [low, high], atol=1e-12)
    assert made.count.tolist() == [12, 0, 7] and (made.n, made.n_groups) == (12, 12)
    assert made.low[1] == 0 and made.high[0] == 1
    copied = share_interval(np.repeat(hits, 4, axis=0), groups=np.repeat(np.arange(12), 4))
    assert ((copied.high - copied.low) >= (made.high - made.low)).all(), "copies of a row are no new rows"
    assert share_interval(np.repeat(hits, 4, axis=0)).high[1] < made.high[1]
    one = share_interval(np.ones((5, 1), bool), groups=[0] * 5)
    assert one.low[0] == pytest.approx(proportion_confint(1, 1, method="wilson")[0])
    nothing = share_interval(np.zeros((0, 2), bool))
    assert np.isnan(nothing.share).all() and nothing.n == 0


def test_opposite_rows_of_an_instance_never_narrow_a_share():
    """Both directions of a pair, of which exactly one flips: the interval is that of independent rows at least."""
    hits = np.tile([[True], [False]], (20, 1))
    made = share_interval(hits, groups=np.repeat(np.arange(20), 2))
    low, high = proportion_confint(20, 40, method="wilson")
    assert made.low[0] <= low and made.high[0] >= high


def test_signs_flip_by_instance():
    rng = np.random.default_rng(0)
    own = rng.normal(0.5, 1, size=(15, 4))
    once = sign_flip_p(own, seed=0)
    np.testing.assert_allclose(sign_flip_p(np.repeat(own, 6, axis=0), groups=np.repeat(np.arange(15), 6), seed=0), once)
    assert sign_flip_p(np.repeat(own, 6, axis=0), seed=0).min() < once.min()
    exact = stats.permutation_test(
        (own[:, 0], np.zeros(15)), lambda a, b, axis: np.abs((a - b).mean(axis)), permutation_type="samples",
        n_resamples=np.inf, alternative="greater", vectorized=True,
    )  # fmt: skip
    assert sign_flip_p(own[:, :1], seed=0, permutations=20_000)[0] == pytest.approx(exact.pvalue, abs=0.01)


def test_an_effect_without_any_spread_is_no_null_result():
    """Twelve instances that all move by the same amount: as significant as twelve equal signs can be."""
    p = sign_flip_p(np.tile([[0.3, 0.0]], (12, 1)), seed=0, permutations=4000)
    assert p[0] == pytest.approx(2 / 2**12, abs=1e-3) and p[1] == 1


def test_sizes_are_those_of_the_t_test():
    n = items_needed(0.5, 1.0)
    assert n == 34  # statsmodels, G*Power: 34 pairs at d = 0.5, two-sided 5 %, power 80 %
    assert detectable_effect(34, 1.0) == pytest.approx(0.5, abs=0.01)
    assert items_needed(1.0, 2.0) == n and items_needed(-0.5, 1.0) == n
    assert items_needed(0.5, 1.0, cells=28) > n
    assert items_needed(0.5, 1.0, cells=28) == items_needed(0.5, 1.0, alpha=0.05 / 28)
    assert items_needed(50.0, 1.0) == 6, "below six instances no pattern of signs reaches 5 %"
    assert np.isnan(detectable_effect(5, 1.0)) and detectable_effect(6, 1.0) > 0
    with pytest.raises(PatchError, match="effect is 0"):
        items_needed(0.0, 1.0)
    with pytest.raises(PatchError, match="spread is 0"):
        items_needed(1.0, 0.0)
    with pytest.raises(PatchError, match=r"alpha is 0\.5 and power 0\.4"):
        items_needed(1.0, 1.0, alpha=0.5, power=0.4)
    with pytest.raises(PatchError, match="more than 10000000 instances"):
        items_needed(1e-5, 1.0)


def test_bad_arguments_are_refused():
    with pytest.raises(PatchError, match="3 groups for 4 rows"):
        mean_interval(np.zeros((4, 1)), groups=[0, 1, 2], seed=0)
    with pytest.raises(PatchError, match="level is 2"):
        share_interval(np.zeros((4, 1), bool), level=2)
    with pytest.raises(PatchError, match="resamples 0"):
        mean_interval(np.zeros((4, 1)), seed=0, resamples=0)
