"""Shares against statsmodels, their coin, and how often labels come back on simulated data."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from probes.errors import ProbeError
from probes.failure_shares import calibration, deal_halves, half_verdicts, shares
from probes.failures import LABELS, label_failures
from probes.linear import fit_probes


def test_shares_are_statsmodels_intervals_in_every_stratum() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice([*LABELS, "right", "text"], 200, p=[0.3, 0.1, 0.1, 0.1, 0.05, 0.3, 0.05])
    n = rng.choice([4, 6], 200)
    found = shares(labels, {"n": n.tolist()})
    assert len(found) == 3 * 5
    for one in found:
        rows = np.isin(labels, LABELS) & ((n == one.value_of) if one.stratum == "n" else True)
        count = (labels[rows] == one.label).sum()
        low, high = proportion_confint(count, rows.sum(), method="wilson")
        assert (one.count, one.n, one.instances) == (count, rows.sum(), rows.sum())
        assert (one.value, one.low, one.high) == pytest.approx((count / rows.sum(), low, high))
        assert np.isnan(one.coin) and one.reason == ""
    assert [one.support for one in found if one.label == "lost"] == [200, (n == n[0]).sum(), (n != n[0]).sum()]


def test_two_rows_of_an_instance_are_no_two_observations() -> None:
    labels = np.array(["lost"] * 20 + ["mixed"] * 20)
    alone, paired = (shares(labels, {}, groups=groups)[1] for groups in (None, np.arange(40) // 2))
    assert (alone.label, alone.instances, paired.instances) == ("lost", 40, 20)
    assert (paired.low, paired.high) == pytest.approx(proportion_confint(10, 20, method="wilson"))
    assert paired.high - paired.low > alone.high - alone.low


def test_no_failure_is_undefined_and_all_of_one_label_ends_at_1() -> None:
    none = shares(["right", "text"], {})
    assert all(np.isnan(one.value) and np.isnan(one.low) and one.reason == "no readout is wrong here" for one in none)
    tossed = np.array([[0, 0.5, 0, 0, 0.5], [0, 0.1, 0, 0, 0.9], [np.nan] * 5])
    full = {one.label: one for one in shares(["lost", "lost", "right"], {}, tossed=tossed)}
    assert (full["lost"].high, full["mixed"].low) == (1.0, 0.0)
    assert (full["lost"].coin, full["mixed"].coin) == pytest.approx((0.3, 0.7))


def test_strata_may_cross_and_have_to_fit() -> None:
    crossed = [("a", 1), ("a", 2), ("a", 1)]
    found = {one.value_of: one.n for one in shares(["lost"] * 3, {"both": crossed}) if one.stratum == "both"}
    assert found == {("a", 1): 2, ("a", 2): 1}
    with pytest.raises(ProbeError, match="stratum 'both' has 2 rows and labels has 3"):
        shares(["lost"] * 3, {"both": crossed[:2]})


def test_halves_are_even_and_keep_instances_whole() -> None:
    groups = np.repeat(np.arange(41), 2)
    labels = np.repeat(np.arange(41) % 2, 2)
    sides = [deal_halves(labels, groups, seed=1, deal=deal) for deal in range(3)]
    for side in sides:
        assert all(len(set(side[groups == group])) == 1 for group in range(41))
        for label in (0, 1):
            counts = np.bincount(side[labels == label], minlength=2)
            assert abs(counts[0] - counts[1]) <= 2
    assert not np.array_equal(sides[0], sides[1])
    assert np.array_equal(sides[0], deal_halves(labels, groups, seed=1, deal=0))


def study(strength, *, rows, seed, known=1.0, features=30):
    """Two layers; the second carries the gold answer with this strength in a part of the rows."""
    rng = np.random.default_rng(seed)
    gold = rng.permutation(np.arange(rows) % 2)
    acts = rng.standard_normal((2, rows, features))
    carrying = rng.permutation(rows) < known * rows
    acts[1, carrying, 0] += strength * (2 * gold[carrying] - 1)
    return acts, gold, np.arange(rows), carrying


def calibrated(acts, gold, groups, readout, default, **more):
    result = fit_probes(acts, gold, groups, shuffles=39, seed=1)
    failures = label_failures(acts, gold, groups, readout, default, gold == gold, result=result, seed=1, **more)
    found = calibration(acts, gold, groups, result=result, failures=failures, seed=1)
    return {(one.check, one.label): one for one in found}, failures


def test_a_planted_answer_comes_back_from_other_folds_and_from_the_other_half() -> None:
    acts, gold, groups, _ = study(4.0, rows=160, seed=0)
    found, failures = calibrated(acts, gold, groups, 2.0 + 0.5 * (2 * gold - 1), 2.0)
    for check in ("fold split", "half"):
        one = found[check, "overridden"]
        assert one.value > 0.95 and one.low > 0.85 and one.n >= 70 and one.instances == one.n
    assert found["half", "lost"].n == 0 and "no failed row has this label" in found["half", "lost"].reason
    assert failures.failed.sum() == 80


def test_what_the_probe_does_not_know_comes_back_from_folds_and_not_from_the_other_half() -> None:
    """Failures are the rows without the answer; a layer is decodable thanks to the others."""
    acts, gold, groups, carrying = study(6.0, rows=600, seed=0, known=0.25, features=200)
    assert carrying.sum() == 150
    sign = 2 * gold - 1
    found, failures = calibrated(acts, gold, groups, np.where(carrying, 1.0, -0.5) * sign,
                                 np.where(carrying, 0.0, -1.0) * sign)  # fmt: skip
    assert failures.failed.sum() == 450
    folds, half = found["fold split", "not_decodable"], found["half", "not_decodable"]
    assert folds.value > folds.base + 0.15
    assert half.low < half.base < half.high
    assert abs(half.value - half.base) < 0.1
    # What is said to be known is next to nothing, and does not come back.
    assert found["half", "overridden"].n + found["half", "lost"].n < 0.1 * 450


def test_no_training_row_of_one_verdict_is_one_of_the_other() -> None:
    """A row's second margin does not change if everything in its own half does."""
    acts, gold, groups, _ = study(1.0, rows=120, seed=3)
    half = deal_halves(gold, groups, seed=5, deal=0)
    before = half_verdicts(acts, gold, groups, folds=3, seed=5)
    noisy = acts.copy()
    row = int(np.flatnonzero(half == 0)[0])
    others = (half == 0) & (np.arange(120) != row)
    noisy[:, others] = np.random.default_rng(1).standard_normal(noisy[:, others].shape)
    after = half_verdicts(noisy, gold, groups, folds=3, seed=5)
    assert np.array_equal(before[1][0][:, row], after[1][0][:, row])
    assert not np.allclose(before[0][0][:, row], after[0][0][:, row])


def test_too_few_instances_and_one_split_say_so() -> None:
    acts, gold, groups, _ = study(4.0, rows=30, seed=0)
    found, _ = calibrated(acts, gold, groups, 2.0 + 0.5 * (2 * gold - 1), 2.0, splits=1)
    assert found["half", "overridden"].reason == "15 instances of one gold answer; halves in 5 folds need 20"
    assert found["fold split", "overridden"].reason == "one fold split was asked for"
    assert all(np.isnan(one.value) for one in found.values())


def test_no_failure_leaves_nothing_to_come_back() -> None:
    acts, gold, groups, _ = study(4.0, rows=60, seed=0)
    found, failures = calibrated(acts, gold, groups, 1.0 * (2 * gold - 1), 0.0)
    assert not failures.failed.any()
    assert all(np.isnan(one.value) and one.n == 0 and one.reason for one in found.values())
