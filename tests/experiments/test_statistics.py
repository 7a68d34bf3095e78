"""Paired statistics: the identities of matched pairs, scipy and statsmodels as references, honest intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chi2
from statsmodels.stats.proportion import proportion_confint

from experiments.errors import RunError
from experiments.statistics import Arm, compare_arms, holm, kappa_bar, mcnemar, pair_profile, presentation_score, share

ANSWERS = st.sampled_from(["yes", "no", None])
PAIRS = st.lists(st.tuples(ANSWERS, ANSWERS, st.sampled_from(["yes", "no"])), min_size=1, max_size=40)


def brute_kappa(original, equivalent):
    """κ from its definition, by counting."""
    pairs = [(a, b) for a, b in zip(original, equivalent, strict=True) if a and b]
    iota = sum(a == b for a, b in pairs) / len(pairs)
    q = sum((a == "yes") + (b == "yes") for a, b in pairs) / (2 * len(pairs))
    chance = sum(
        (q if a == "yes" else 1 - q) * (q if b == "yes" else 1 - q)
        for a, b in itertools.product(["yes", "no"], repeat=2)
        if a == b
    )
    return (iota - chance) / (1 - chance)


def study(n=200, *, seed=0, right=0.7, agree=0.6, missing=0.05):
    """Gold and the answers of two presentations; the second repeats the first with chance `agree`."""
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, n)
    first = np.where(rng.random(n) < right, gold, 1 - gold)
    second = np.where(rng.random(n) < agree, first, np.where(rng.random(n) < right, gold, 1 - gold))

    def words(codes):
        return [None if rng.random() < missing else ("no", "yes")[code] for code in codes]

    return words(first), words(second), [("no", "yes")[code] for code in gold]


@given(PAIRS)
def test_identities_of_paired_outcomes(rows):
    original, equivalent, gold = (list(column) for column in zip(*rows, strict=True))
    profile = pair_profile(original, equivalent, gold)
    assert profile.n == len(rows)
    assert profile.n_parsed == sum(a is not None and b is not None for a, b, _ in rows)
    if profile.n_parsed == 0:
        assert math.isnan(profile.robust.value)
        assert profile.robust.reason
        assert math.isnan(profile.kappa.value)
        return
    r, d, u = profile.robust.value, profile.shared_wrong.value, profile.unstable.value
    iota = profile.invariance.value
    a0, a1 = profile.common_original.value, profile.common_equivalent.value
    assert r + d + u == pytest.approx(1)
    assert iota == pytest.approx(r + d)
    assert (a0 + a1) / 2 == pytest.approx(r + u / 2)
    assert (a0 + a1) / 2 == pytest.approx(0.5 + (r - d) / 2)
    assert abs((a0 + a1) / 2 - 0.5) <= iota / 2 + 1e-12
    assert max(0.0, a0 + a1 - 1) - 1e-12 <= r <= min(a0, a1) + 1e-12
    # The pooled reference exceeds the one with separate yes-rates by (q0 - q1)^2 / 2.
    q0, q1 = (np.mean([pair[side] == "yes" for pair in rows if pair[0] and pair[1]]) for side in (0, 1))
    assert profile.kappa.q == pytest.approx((q0 + q1) / 2)
    assert profile.kappa.iota_e == pytest.approx(q0 * q1 + (1 - q0) * (1 - q1) + (q0 - q1) ** 2 / 2)
    assert profile.kappa.iota == pytest.approx(iota)
    if profile.kappa.q in (0, 1):
        assert math.isnan(profile.kappa.value)
        assert "parsed answers are" in profile.kappa.reason
    else:
        assert profile.kappa.value == pytest.approx(brute_kappa(original, equivalent), abs=1e-9)
    assert profile.strict_invariance.count == profile.invariance.count
    assert profile.strict_invariance.n == len(rows)


@pytest.mark.parametrize(("count", "n"), [(0, 10), (10, 10), (3, 17), (170, 200), (1, 1)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_wilson_equals_scipy_and_statsmodels(count, n, level):
    ours = share(count, n, level=level)
    low, high = proportion_confint(count, n, alpha=1 - level, method="wilson")
    assert ours.low == pytest.approx(low, abs=1e-9)
    assert ours.high == pytest.approx(high, abs=1e-9)
    assert (ours.value, ours.count, ours.n) == (count / n, count, n)
    assert ours.method == f"Wilson {level:.0%}"


def test_nothing_to_count_is_nan_with_a_reason():
    empty = share(0, 0)
    assert math.isnan(empty.value)
    assert math.isnan(empty.low)
    assert empty.reason


def test_one_presentation_counts_unparsed_as_wrong():
    score = presentation_score(["yes", None, "no", "yes", float("nan")], ["yes", "yes", "no", "no", "no"])
    assert (score.accuracy.count, score.accuracy.n) == (2, 5)
    assert (score.parsed.count, score.n) == (3, 5)
    assert (score.yes_rate.count, score.yes_rate.n) == (2, 3)
    assert score.accuracy_yes.value == pytest.approx(1 / 2)
    assert score.accuracy_no.value == pytest.approx(1 / 3)
    assert score.floor == pytest.approx(1 / 3)
    assert score.bias == pytest.approx(1 / 6)
    one_gold = presentation_score(["yes"], ["yes"])
    assert math.isnan(one_gold.floor)
    assert math.isnan(one_gold.bias)
    assert one_gold.accuracy_no.reason


@pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 9), (12, 13), (13, 13), (40, 22), (1, 300)])
def test_mcnemar_equals_scipy(b, c):
    first = [True] * b + [False] * c + [True] * 5 + [False] * 4
    second = [False] * b + [True] * c + [True] * 5 + [False] * 4
    test = mcnemar(first, second)
    if b + c <= 25:
        expected = binomtest(b, b + c).pvalue if b + c else 1.0
        assert "exact" in test.method
    else:
        expected = chi2.sf((abs(b - c) - 1) ** 2 / (b + c), 1)
        assert "continuity" in test.method
    assert test.p == pytest.approx(expected, abs=1e-9)
    assert (test.b, test.c, test.n) == (b, c, b + c + 9)


def test_mcnemar_of_a_pair_counts_format_failures_as_wrong():
    profile = pair_profile(["yes", "yes", "no"], [None, "yes", "yes"], ["yes", "yes", "yes"])
    assert (profile.mcnemar.b, profile.mcnemar.c, profile.mcnemar.n) == (1, 1, 3)


def test_holm_by_hand():
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": float("nan")})
    assert adjusted["a"] == pytest.approx(0.03, abs=1e-9)
    assert adjusted["c"] == pytest.approx(0.06, abs=1e-9)
    assert adjusted["b"] == pytest.approx(0.06, abs=1e-9)
    assert math.isnan(adjusted["d"])
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert holm({}) == {}


def test_kappa_bar_averages_sizes_and_names_those_left_out():
    original, equivalent, _ = study(60, missing=0.1)
    sizes = [4, 8] * 30 + [16, 16, 32]
    bar = kappa_bar(sizes, [*original, "yes", "yes", None], [*equivalent, "yes", "yes", None])
    by_hand = [brute_kappa(original[start::2], equivalent[start::2]) for start in (0, 1)]
    assert bar.value == pytest.approx(np.mean(by_hand), abs=1e-9)
    assert bar.undefined == (16, 32)
    assert bar.by_size[16].reason == "all 4 parsed answers are yes"
    assert bar.by_size[32].reason == "none of 1 pairs has two parsed answers"
    assert bar.n == 63
    assert bar.support == sum(bool(a and b) for a, b in zip(original, equivalent, strict=True)) + 2
    nothing = kappa_bar([4], ["no"], ["no"])
    assert math.isnan(nothing.value)
    assert nothing.reason


ALL = ("accuracy_original", "accuracy_equivalent", "invariance", "strict_invariance", "robust", "shared_wrong",
       "unstable", "kappa", "kappa_bar")  # fmt: skip


def arms(n=120, seed=0):
    original, equivalent, gold = study(n, seed=seed)
    better_original, better_equivalent, _ = study(n, seed=seed, right=0.9, agree=0.8)
    return Arm(original, equivalent), Arm(better_original, better_equivalent), gold


def test_a_contrast_is_the_difference_of_the_two_profiles():
    before, after, gold = arms()
    sizes = [4, 8, 16] * 40
    found = compare_arms(before, after, gold, statistics=ALL, sizes=sizes, seed=0)
    profiles = [pair_profile(*arm, gold) for arm in (before, after)]
    for index, (profile, arm) in enumerate(zip(profiles, (before, after), strict=True)):
        expected = {
            "accuracy_original": profile.original.accuracy.value,
            "accuracy_equivalent": profile.equivalent.accuracy.value,
            "kappa": profile.kappa.value,
            "kappa_bar": kappa_bar(sizes, *arm).value,
        }
        for name in ("invariance", "strict_invariance", "robust", "shared_wrong", "unstable"):
            expected[name] = getattr(profile, name).value
        for name, value in expected.items():
            assert (found[name].before, found[name].after)[index] == pytest.approx(value, abs=1e-9)
        assert (found["kappa"].support_before, found["kappa"].support_after)[index] == profile.n_parsed
    for name, contrast in found.items():
        assert contrast.statistic == name
        assert contrast.difference == pytest.approx(contrast.after - contrast.before)
        assert contrast.low <= contrast.difference <= contrast.high
        assert (contrast.n, contrast.reason) == (120, "")
        assert "paired percentile bootstrap" in contrast.method


def resampled(before, after, gold, strata, resamples, rng):
    """The same bootstrap by drawing instances one by one and profiling each resample."""
    strata = np.asarray(strata)
    differences = []
    for _ in range(resamples):
        drawn = np.concatenate(
            [rng.choice(rows, len(rows)) for rows in map(np.flatnonzero, (strata == s for s in (0, 1)))]
        )
        values = []
        for arm in (before, after):
            original, equivalent = ([answers[i] for i in drawn] for answers in arm)
            agree = [a == b for a, b in zip(original, equivalent, strict=True) if a and b]
            values.append((np.mean(agree), brute_kappa(original, equivalent)))
        differences.append(np.subtract(values[1], values[0]))
    return np.quantile(differences, [0.025, 0.975], axis=0)


def test_counts_of_patterns_resample_like_instances():
    before, after, gold = arms(80)
    strata = [0] * 30 + [1] * 50
    ours = compare_arms(
        before, after, gold, statistics=("invariance", "kappa"), strata=strata, resamples=20_000, seed=0
    )
    low, high = resampled(before, after, gold, strata, 4_000, np.random.default_rng(1))
    for index, name in enumerate(("invariance", "kappa")):
        width = high[index] - low[index]
        assert abs(ours[name].low - low[index]) < 0.06 * width
        assert abs(ours[name].high - high[index]) < 0.06 * width


def test_pairing_narrows_the_interval():
    before, _, gold = arms(400)
    same = compare_arms(before, before, gold, seed=0)
    assert all(contrast.low == contrast.difference == contrast.high == 0 for contrast in same.values())
    # An adapter that changes few answers: two separate intervals would hide it.
    changed = Arm([gold[i] if i % 20 == 0 else answer for i, answer in enumerate(before.original)], before.equivalent)
    paired = compare_arms(before, changed, gold, seed=0)["accuracy_original"]
    alone = [pair_profile(*arm, gold).original.accuracy for arm in (before, changed)]
    apart = math.hypot(*(one.high - one.low for one in alone))
    assert paired.low > 0
    assert paired.high - paired.low < 0.5 * apart


def test_strata_keep_their_sizes_and_narrow_what_lies_between_them():
    gold = ["yes"] * 100
    before = Arm(["yes"] * 50 + ["no"] * 50, ["yes"] * 100)
    after = Arm(["yes"] * 100, ["yes"] * 100)
    free, held = (
        compare_arms(before, after, gold, statistics=("accuracy_original",), strata=strata, seed=0)["accuracy_original"]
        for strata in (None, [0] * 50 + [1] * 50)
    )
    assert free.low < free.difference < free.high
    assert held.low == held.difference == held.high == 0.5
    assert "within strata" in held.method
    assert "within strata" not in free.method


def test_the_seed_decides():
    first, again, other = (compare_arms(*arms(), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["kappa"].low != other["kappa"].low


def test_undefined_statistics_are_nan_with_a_reason():
    constant = Arm(["yes"] * 20, ["yes"] * 20)
    mixed = Arm(["yes", "no"] * 10, ["yes", "no"] * 10)
    found = compare_arms(constant, mixed, ["yes", "no"] * 10, seed=0)
    assert math.isnan(found["kappa"].difference)
    assert math.isnan(found["kappa"].low)
    assert found["kappa"].undefined == 2000
    assert "undefined in one arm" in found["kappa"].reason
    assert found["kappa"].after == 1.0
    assert found["invariance"].difference == 0.0
    rare = Arm(["no"] + ["yes"] * 19, ["yes"] * 20)
    found = compare_arms(rare, mixed, ["yes", "no"] * 10, statistics=("kappa",), seed=0)["kappa"]
    # About (19/20)^20 of the resamples miss the only "no".
    assert 500 < found.undefined < 900
    assert math.isfinite(found.low)


def test_numpy_and_pandas_columns_are_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": ["yes", None, "no"], "b": ["yes", "no", "no"], "gold": ["yes", "no", "yes"]})
    frame.index = [7, 3, 9]
    assert pair_profile(frame["a"], frame["b"], frame["gold"]) == pair_profile(
        ["yes", None, "no"], np.array(["yes", "no", "no"]), ["yes", "no", "yes"]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pair_profile(["maybe"], ["yes"], ["yes"]), r"original\[0\] is 'maybe'; allowed: yes, no or None"),
        (lambda: pair_profile(["yes"], [True], ["yes"]), r"equivalent\[0\] is True"),
        (lambda: pair_profile(["yes"], ["yes"], [None]), r"gold\[0\] is None; allowed: yes, no$"),
        (lambda: pair_profile(["yes"], ["yes", "no"], ["yes"]), r"\(original 1, equivalent 2, gold 1\)"),
        (lambda: kappa_bar([4], ["yes", "no"], ["yes", "no"]), r"\(sizes 1, original 2\)"),
        (lambda: mcnemar([True], [True, False]), r"\(first 1, second 2\)"),
        (lambda: compare_arms(*arms(6), statistics=("iota",), seed=0), "statistic 'iota' is unknown; allowed: acc"),
        (lambda: compare_arms(*arms(6), statistics=("kappa_bar",), seed=0), "kappa_bar is a mean over sizes"),
        (lambda: compare_arms(*arms(6), resamples=0, seed=0), "0 resamples of 6 instances"),
        (lambda: compare_arms(*arms(6), strata=[1], seed=0), r"\(gold 6, strata 1\)"),
        (lambda: compare_arms(Arm([], []), Arm([], []), [], seed=0), "2000 resamples of 0 instances"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(RunError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
