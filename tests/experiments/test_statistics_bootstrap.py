"""Resamples: the same as drawing instances one by one, whole clusters, strata that keep their size, bounded memory."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import chi2, t

from experiments.errors import RunError
from experiments.statistics import (
    STATISTICS,
    Arm,
    compare_arms,
    kappa_bar,
    marginal_gap,
    mcnemar,
    pair_interval,
    pair_profile,
    repeat_agreement,
)
from experiments.statistics.bootstrap import outer_tail
from experiments.statistics.columns import combined
from experiments.statistics.resampling import Resampler

WORDS = np.array(["no", "yes", None], dtype=object)


def columns(n, seed=0, *, k=4, missing=0.08):
    """Gold and k correlated answer columns."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, n)
    answers = []
    for _ in range(k):
        right = np.where(rng.random(n) < 0.75, gold, 1 - gold)
        kept = right if not answers else np.where(rng.random(n) < 0.5, answers[0] % 2, right)
        answers.append(np.where(rng.random(n) < missing, 2, kept))
    return [WORDS[one].tolist() for one in (gold, *answers)]


def by_profile(original, equivalent, gold, sizes):
    """Every statistic by its name, from profiles of the rows and by counting."""
    if not gold:
        return dict.fromkeys(STATISTICS, math.nan)
    profile = pair_profile(original, equivalent, gold)
    first, second = profile.original, profile.equivalent
    bar = kappa_bar(sizes, original, equivalent)
    n = profile.n
    found = {name: getattr(profile, name).value for name in
             ("invariance", "strict_invariance", "robust", "shared_wrong", "unstable")}  # fmt: skip
    for kind, score in (("original", first), ("equivalent", second)):
        found |= {
            f"accuracy_{kind}": score.accuracy.value,
            f"accuracy_parsed_{kind}": score.accuracy_parsed.value,
            f"accuracy_yes_{kind}": score.accuracy_yes.value,
            f"accuracy_no_{kind}": score.accuracy_no.value,
            f"bias_{kind}": score.bias,
            f"yes_rate_{kind}": score.yes_rate.value,
            f"unparsed_{kind}": 1 - score.parsed.value,
        }
    answers = [*original, *equivalent]
    given = [answer for answer in answers if answer]
    found |= {
        "accuracy_mean": (first.accuracy.value + second.accuracy.value) / 2,
        "accuracy_gap": first.accuracy.value - second.accuracy.value,
        "yes_rate": given.count("yes") / len(given) if given else math.nan,
        "yes_rate_gap": first.yes_rate.value - second.yes_rate.value,
        "unparsed": answers.count(None) / (2 * n),
        "unparsed_gap": (original.count(None) - equivalent.count(None)) / n,
        "kappa": profile.kappa.value,
        "kappa_separate": profile.kappa.separate,
        "kappa_bar": bar.value,
        "kappa_bar_separate": bar.separate,
    }
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_statistic_is_that_of_the_profile(seed):
    gold, original, equivalent = columns(90, seed, k=2)
    sizes = [4, 8, 16] * 30
    found = pair_interval(original, equivalent, gold, statistics=STATISTICS, sizes=sizes, resamples=50, seed=seed)
    expected = by_profile(original, equivalent, gold, sizes)
    assert set(found) == set(expected) == set(STATISTICS)
    for name, one in found.items():
        assert one.value == pytest.approx(expected[name], abs=1e-9), name
        assert (one.statistic, one.n, one.reason) == (name, 90, "")
        assert one.low <= one.value <= one.high
    both = sum(bool(a and b) for a, b in zip(original, equivalent, strict=True))
    supports = {"invariance": both, "strict_invariance": 90, "kappa": both, "kappa_bar": both, "accuracy_mean": 180,
                "accuracy_gap": 90, "bias_original": 90, "yes_rate_original": 90 - original.count(None),
                "accuracy_yes_original": gold.count("yes")}  # fmt: skip
    assert {name: found[name].support for name in supports} == supports


@settings(max_examples=8, deadline=None)
@given(st.integers(4, 14), st.integers(0, 10_000), st.booleans())
def test_the_same_draws_taken_row_by_row(n, seed, clustered):
    """A naive loop: write out every resample, profile it; leave out every unit for the degrees of freedom."""
    gold, *answers = columns(n, seed)
    rng = np.random.default_rng(seed)
    sizes, strata, keys = (rng.integers(0, high, n).tolist() for high in (2, 2, n))
    clusters = keys if clustered else None
    names = [name for name in STATISTICS if "kappa_bar" not in name]
    before, after = Arm(*answers[:2]), Arm(*answers[2:])
    found = compare_arms(before, after, gold, statistics=names, sizes=sizes, strata=strata, clusters=clusters,
                         resamples=40, seed=seed)  # fmt: skip

    numbers = [np.array([{"no": 1, "yes": 2, None: 0}[one] for one in column]) for column in (gold, *answers)]
    seen = [np.array([list(dict.fromkeys(labels)).index(one) for one in labels]) for labels in (sizes, strata)]
    pattern = combined(seen[0], numbers[1], numbers[2], numbers[0], numbers[3], numbers[4], numbers[0])
    resampler = Resampler(pattern, labels=[seen[1], seen[0]], clusters=clusters)
    draws = np.concatenate(list(resampler.draws(40, seed=seed, purpose="statistics.compare_arms")))
    distinct = list(dict.fromkeys(keys)) if clustered else []
    units = resampler._example  # a unit of each kind
    members = [np.flatnonzero(np.array(keys) == distinct[unit]) if clustered else np.array([unit]) for unit in units]

    def changes(times):
        rows = np.concatenate([np.tile(rows, k) for rows, k in zip(members, times.astype(int), strict=True)]).astype(
            int
        )
        ends = []
        for arm in (before, after):
            drawn = ([column[row] for row in rows] for column in (*arm, gold))
            ends.append(by_profile(*drawn, [0] * len(rows)))
        return rows, [ends[1][name] - ends[0][name] for name in names]

    resampled = []
    for times in draws:
        rows, change = changes(times)
        for labels in (sizes, strata):  # every stratum keeps its rows
            assert sorted(labels[row] for row in rows) == sorted(labels)
        resampled.append(change)
    without = np.array([changes(resampler.counts - (np.arange(len(units)) == kind))[1] for kind in range(len(units))])
    freedom = resampler.freedom(without)
    for index, name in enumerate(names):
        defined = [change[index] for change in resampled if not math.isnan(change[index])]
        assert found[name].undefined == 40 - len(defined)
        if math.isnan(found[name].low):
            assert found[name].reason
            continue
        tail = outer_tail(0.95, freedom[index])
        ends = np.quantile(defined, [tail, 1 - tail])
        assert (found[name].low, found[name].high) == pytest.approx(tuple(ends), abs=1e-9)


def test_all_resamples_of_a_few_instances():
    """Three instances have 27 equally likely resamples; the drawn ones have their distribution, by either way to draw."""
    pattern = np.array([0, 1, 1])
    expected = {}
    for drawn in itertools.product(range(3), repeat=3):
        counts = tuple(np.bincount(pattern[list(drawn)], minlength=2))
        expected[counts] = expected.get(counts, 0) + 1 / 27
    for resampler in (Resampler(pattern), Resampler(np.repeat(pattern, 40), clusters=np.tile(np.arange(3), 40))):
        draws = next(resampler.draws(20_000, seed=0, purpose="test"))
        assert draws.sum(axis=1).tolist() == [3] * 20_000
        if draws.shape[1] == 3:
            draws = np.column_stack([draws[:, 0], draws[:, 1:].sum(axis=1)])
        values, times = np.unique(draws, axis=0, return_counts=True)
        share = np.array([expected[tuple(value)] for value in values.astype(int)])
        assert share.sum() == pytest.approx(1)
        assert chi2.sf((((times - 20_000 * share) ** 2) / (20_000 * share)).sum(), len(share) - 1) > 1e-4


def test_few_kinds_and_many_kinds_are_drawn_from_one_distribution():
    """40 kinds of 100 units are drawn one by one, 2 kinds by a multinomial: means and variances are those of n p."""
    for kinds, units in ((40, 100), (2, 100)):
        counts = np.bincount(np.arange(units) % kinds)
        draws = next(Resampler(np.arange(units) % kinds).draws(20_000, seed=1, purpose="test"))
        p = counts / units
        assert draws.mean(axis=0) == pytest.approx(units * p, rel=0.02)
        assert draws.var(axis=0) == pytest.approx(units * p * (1 - p), rel=0.06)


def test_the_percentile_interval_of_all_resamples():
    """With four pairs all 256 resamples can be listed; 40,000 drawn ones have the same quantiles."""
    original, equivalent, gold = ["yes", "no", "yes", "no"], ["yes", "no", "no", "yes"], ["yes", "yes", "yes", "no"]
    values = []
    for drawn in itertools.product(range(4), repeat=4):
        agree = [original[i] == equivalent[i] for i in drawn]
        values.append(np.mean(agree))
    found = pair_interval(original, equivalent, gold, statistics=("invariance",), resamples=40_000, level=0.9, seed=0)
    # Two of four agree: every unit has the same influence, so the tails are the plain ones.
    assert (found["invariance"].low, found["invariance"].high) == (np.quantile(values, 0.05), np.quantile(values, 0.95))


def test_ends_move_out_by_t_where_few_instances_decide():
    assert outer_tail(0.95, math.inf) == pytest.approx(0.025)
    assert outer_tail(0.95, 24) == pytest.approx(ndtr(t.ppf(0.025, 24)), abs=1e-12)
    # Twelve of 200 pairs change, each by the same amount: about 2 × 12 degrees of freedom.
    pattern = np.array([0] * 188 + [1] * 6 + [2] * 6)
    resampler = Resampler(pattern)
    change = np.array([0.0, 1.0, -1.0])
    freedom = resampler.freedom(((resampler.counts @ change - change) / 199)[:, None])
    influence = np.repeat(change, resampler.counts.astype(int)) ** 2
    assert freedom[0] == pytest.approx(2 * influence.sum() ** 2 / ((influence - influence.mean()) ** 2).sum(), rel=1e-9)
    assert 24 < freedom[0] < 27
    # Strata and cluster sizes enter as units; a stratum of one adds nothing.
    alone = Resampler(np.array([*pattern, 3]), labels=[np.array([0] * 200 + [1])])
    change = np.array([0.0, 1.0, -1.0, 50.0])
    assert alone.freedom(((alone.counts @ change - change) / 200)[:, None])[0] == pytest.approx(freedom[0])


def test_rows_of_one_instance_stay_together():
    gold, original, equivalent = columns(60, k=2)
    names = ("accuracy_original", "invariance", "kappa")
    once = pair_interval(original, equivalent, gold, statistics=names, resamples=20_000, seed=0)
    five = ([column * 5 for column in (original, equivalent, gold)], list(range(60)) * 5)
    together = pair_interval(*five[0], statistics=names, clusters=five[1], resamples=20_000, seed=0)
    apart = pair_interval(*five[0], statistics=names, resamples=2000, seed=0)
    for name in names:
        width = once[name].high - once[name].low
        assert together[name].value == pytest.approx(once[name].value, abs=1e-12)
        assert together[name].low == pytest.approx(once[name].low, abs=0.05 * width)
        assert together[name].high == pytest.approx(once[name].high, abs=0.05 * width)
        # Five copies of an instance are not five instances.
        assert apart[name].high - apart[name].low < 0.6 * width
        assert "all rows of one together" in together[name].method
        assert "all rows of one together" not in once[name].method


def test_clusters_across_strata_keep_the_rows_of_every_stratum():
    # Instances 0-9 stand under both relations, 10-14 under the first alone, 15-16 twice under the second.
    clusters = [*range(10), *range(10, 15), *range(10), 15, 15, 16, 16]
    strata = np.array([0] * 15 + [1] * 14)
    resampler = Resampler(np.arange(29), labels=[strata], clusters=clusters)
    totals = resampler.totals(np.column_stack([strata == 0, strata == 1]).astype(float))
    draws = next(resampler.draws(500, seed=0, purpose="test"))
    assert (draws @ totals == [15, 14]).all()
    assert (resampler.strata, resampler.units, resampler.fixed) == (3, 17, 0)
    assert len(np.unique(draws, axis=0)) > 490
    assert "within strata" in resampler.note


def test_a_stratum_of_one_is_said():
    gold, original, equivalent = columns(21, k=2)
    strata = [0] * 10 + [1] * 10 + [2]
    found = pair_interval(original, equivalent, gold, strata=strata, seed=0)["accuracy_original"]
    assert "(1 of 3 with one instance, which can't vary)" in found.method
    alone = pair_interval(original, equivalent, gold, strata=list(range(21)), seed=0)["accuracy_original"]
    assert math.isfinite(alone.value)
    assert math.isnan(alone.low)
    assert alone.reason == "every stratum holds one instance: nothing to draw anew"


def test_memory_does_not_grow_with_the_resamples():
    gold, *answers = columns(2000, missing=0.01)
    peaks = []
    for resamples in (2_000, 40_000):
        tracemalloc.start()
        compare_arms(
            Arm(*answers[:2]), Arm(*answers[2:]), gold, clusters=list(range(2000)), resamples=resamples, seed=0
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The statistics of each resample are kept: 5 numbers each, and their copies.
    assert peaks[1] - peaks[0] < 40_000 * 5 * 8 * 6
    assert peaks[1] < 150e6


def test_draws_do_not_depend_on_the_chunks(monkeypatch):
    pattern, labels = np.arange(30) % 7, [np.arange(30) % 2]
    whole = np.concatenate(list(Resampler(pattern, labels=labels).draws(100, seed=0, purpose="test")))
    monkeypatch.setattr("experiments.statistics.resampling.CELLS", 200)
    chunks = list(Resampler(pattern, labels=labels).draws(100, seed=0, purpose="test"))
    assert len(chunks) > 5
    assert (np.concatenate(chunks) == whole).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_relabelling_and_order_leave_statistics_alone(seed):
    gold, original, equivalent = columns(24, seed, k=2)
    sizes = [4, 8] * 12
    names = list(STATISTICS)
    plain = pair_interval(original, equivalent, gold, statistics=names, sizes=sizes, resamples=5, seed=0)
    order = np.random.default_rng(seed).permutation(24)
    mixed = [[column[i] for i in order] for column in (original, equivalent, gold, sizes)]
    moved = pair_interval(*mixed[:3], statistics=names, sizes=mixed[3], resamples=5, seed=0)
    swap = {"yes": "no", "no": "yes", None: None}
    other = [[swap[one] for one in column] for column in (original, equivalent, gold)]
    swapped = pair_interval(*other, statistics=names, sizes=sizes, resamples=5, seed=0)
    for name in names:
        value = plain[name].value
        assert moved[name].value == pytest.approx(value, abs=1e-9, nan_ok=True)
        mirror = name.replace("_yes_", "_no_") if "_yes_" in name else name.replace("_no_", "_yes_")
        expected = plain[mirror].value
        if name.startswith("yes_rate"):
            expected = -expected if name == "yes_rate_gap" else 1 - expected
        elif name.startswith("bias"):
            expected = -expected
        assert swapped[name].value == pytest.approx(expected, abs=1e-9, nan_ok=True), name


def test_marginal_gap_is_the_difference_with_its_test():
    gold, first, second = columns(300, k=2)
    found = marginal_gap(first, second, gold, resamples=4000, seed=0)
    right = [[a == g for a, g in zip(column, gold, strict=True)] for column in (first, second)]
    test = mcnemar(*right)
    assert (found.b, found.c, found.p, found.n) == (test.b, test.c, test.p, 300)
    assert found.gap == pytest.approx((test.b - test.c) / 300, abs=1e-12)
    assert found.gap == pytest.approx(found.first.value - found.second.value, abs=1e-12)
    # The bootstrap has the standard error of a paired difference.
    error = math.sqrt((test.b + test.c) - (test.b - test.c) ** 2 / 300) / 300
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.06)
    assert "McNemar" in found.method and "percentile bootstrap" in found.method
    back = marginal_gap(second, first, gold, resamples=4000, seed=0)
    assert (back.b, back.c, back.gap) == (found.c, found.b, -found.gap)


def test_repeat_agreement_by_hand():
    original = ["yes", "no", "yes", None, "no", "yes"]
    repeat = ["yes", "no", "no", "yes", "no", None]
    equivalent = ["yes", "yes", None, "yes", "yes", "yes"]
    found = repeat_agreement(original, repeat, equivalent, seed=0)
    assert (found.agreement.count, found.support_agreement) == (3, 4)
    assert (found.invariance.count, found.support_invariance) == (2, 4)
    assert (found.n, found.support_both) == (6, 3)
    assert found.difference == pytest.approx(2 / 4 - 3 / 4)
    assert found.low <= found.difference <= found.high
    assert found.reason == ""
    nothing = repeat_agreement(["yes"] * 3, [None] * 3, ["yes"] * 3, seed=0)
    assert math.isnan(nothing.difference)
    assert nothing.reason == "no instance has parsed answers to original and repeat"


def test_repeat_agreement_is_paired_over_instances():
    _, original, repeat, equivalent = columns(400, k=3, missing=0.02)
    found = repeat_agreement(original, repeat, equivalent, resamples=4000, seed=0)
    rng = np.random.default_rng(1)
    rows = list(zip(original, repeat, equivalent, strict=True))
    differences = []
    for _ in range(1500):
        drawn = [rows[i] for i in rng.integers(0, 400, 400)]
        same, other = ([one[0] == one[k] for one in drawn if one[0] and one[k]] for k in (1, 2))
        differences.append(np.mean(other) - np.mean(same))
    low, high = np.quantile(differences, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.08 * (high - low))
    assert found.high == pytest.approx(high, abs=0.08 * (high - low))
    # The same second answer both times: apart, two intervals would leave a difference open.
    same = repeat_agreement(original, repeat, repeat, seed=0)
    assert same.low == same.difference == same.high == 0
    twice = repeat_agreement(original * 2, repeat * 2, equivalent * 2, clusters=list(range(400)) * 2, seed=0)
    assert twice.high - twice.low == pytest.approx(found.high - found.low, rel=0.1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: pair_interval(*c, level=1.0, seed=0), "level is 1.0; allowed: above 0 and below 1"),
        (lambda c: pair_interval(*c, level="95%", seed=0), "level is '95%'"),
        (lambda c: pair_interval(*c, resamples=0, seed=0), "0 resamples of 6 instances"),
        (lambda c: pair_interval(*c, resamples=10.5, seed=0), "10.5 resamples of 6 instances"),
        (lambda c: pair_interval(*c, statistics=("iota",), seed=0), "statistic 'iota' is unknown; allowed: accuracy_"),
        (lambda c: pair_interval(*c, statistics=("kappa_bar_separate",), seed=0), "kappa_bar_separate is a mean over"),
        (lambda c: pair_interval(*c, clusters=[1, 2], seed=0), r"\(gold 6, clusters 2\)"),
        (lambda c: pair_interval(*c, sizes=[1], seed=0), r"\(gold 6, sizes 1\)"),
        (lambda c: pair_interval(*c, strata=[[1]] * 6, seed=0), r"labels\[0\] is \[1\]; allowed: hashable values"),
        (lambda c: pair_interval(c[0], c[1], ["maybe"] * 6, seed=0), r"gold\[0\] is 'maybe'; allowed: yes, no$"),
        (lambda c: repeat_agreement(c[0], c[1][:3], c[2], seed=0), r"\(original 6, repeat 3, equivalent 6\)"),
        (lambda c: repeat_agreement(*c, level=0, seed=0), "level is 0;"),
        (lambda c: repeat_agreement(*c, resamples=0, seed=0), "0 resamples of 6"),
        (lambda c: marginal_gap(c[0], ["y"] * 6, c[2], seed=0), r"second\[0\] is 'y'; allowed: yes, no or None"),
        (lambda c: marginal_gap(*c, strata=[0], seed=0), r"\(gold 6, strata 1\)"),
    ],
)
def test_bad_input_is_one_line(call, message):
    gold, original, equivalent = columns(6, k=2, missing=0)
    with pytest.raises(RunError, match=message) as caught:
        call([original, equivalent, gold])
    assert "\n" not in str(caught.value)
