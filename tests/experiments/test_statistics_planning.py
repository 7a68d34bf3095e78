"""References and checks: chance, identities, bounds, where a curve crosses, what a sample can show, fair parsing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm
from sklearn.metrics import cohen_kappa_score, confusion_matrix
from statsmodels.stats.contingency_tables import cochrans_q
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from experiments.errors import RunError
from experiments.statistics import (
    accuracy_bounds,
    cell_table,
    coverage,
    crossing,
    detectable_difference,
    frechet,
    half_width,
    holm,
    identities,
    kappa_bar,
    mcnemar,
    pair_profile,
    presentation_score,
    share,
)

ANSWERS = st.sampled_from(["yes", "no", None])
PAIRS = st.lists(st.tuples(ANSWERS, ANSWERS, st.sampled_from(["yes", "no"])), min_size=1, max_size=40)


def apart(rows):
    return [list(column) for column in zip(*rows, strict=True)]


@given(PAIRS)
def test_kappa_with_separate_marginals_is_cohens(rows):
    original, equivalent, gold = apart(rows)
    kappa = pair_profile(original, equivalent, gold).kappa
    pairs = [(a, b) for a, b, _ in rows if a and b]
    if not pairs:
        assert math.isnan(kappa.separate) and math.isnan(kappa.q_first) and kappa.reason
        return
    first, second = apart(pairs)
    assert kappa.q_first == pytest.approx(first.count("yes") / len(pairs), abs=1e-12)
    assert kappa.q_second == pytest.approx(second.count("yes") / len(pairs), abs=1e-12)
    assert kappa.reference_difference == pytest.approx((kappa.q_first - kappa.q_second) ** 2 / 2, abs=1e-12)
    assert kappa.iota_e_separate == pytest.approx(kappa.iota_e - kappa.reference_difference, abs=1e-12)
    if len(set(first + second)) == 1:
        assert math.isnan(kappa.separate) and math.isnan(kappa.value)
        return
    assert kappa.separate == pytest.approx(cohen_kappa_score(first, second), abs=1e-9)
    # The pooled reference is larger, so its kappa is not: both are 1 where answers always agree.
    assert kappa.value <= kappa.separate + 1e-12
    # Pooled kappa is Scott's pi: Cohen's kappa of the pairs and the same pairs turned round.
    assert kappa.value == pytest.approx(cohen_kappa_score(first + second, second + first), abs=1e-9)
    assert kappa_bar([1] * len(rows), original, equivalent).separate == pytest.approx(kappa.separate, abs=1e-12)


@given(PAIRS)
def test_masses_are_those_of_a_confusion_matrix(rows):
    original, equivalent, gold = apart(rows)
    profile = pair_profile(original, equivalent, gold)
    rights = [(a == g, b == g) for a, b, g in rows if a and b]
    if not rights:
        return
    (wrong, second_only), (first_only, right) = confusion_matrix(*apart(rights), labels=[False, True])
    assert (profile.robust.count, profile.shared_wrong.count) == (right, wrong)
    assert profile.unstable.count == first_only + second_only
    low, high = proportion_confint(right, len(rights), method="wilson")
    assert (profile.robust.low, profile.robust.high) == pytest.approx((low, high), abs=1e-9)


@given(PAIRS)
def test_identities_hold_on_any_data(rows):
    columns = apart(rows)
    found, bounds, profile = identities(*columns), frechet(*columns), pair_profile(*columns)
    assert (found.n, found.support) == (bounds.n, bounds.support) == (profile.n, profile.n_parsed)
    if profile.n_parsed == 0:
        assert math.isnan(found.mean_accuracy) and math.isnan(bounds.low) and found.reason and bounds.reason
        return
    a0, a1 = profile.common_original.value, profile.common_equivalent.value
    assert found.mean_accuracy == pytest.approx((a0 + a1) / 2, abs=1e-12)
    assert found.from_robust == pytest.approx(profile.robust.value + profile.unstable.value / 2, abs=1e-12)
    expected = 0.5 + (profile.robust.value - profile.shared_wrong.value) / 2
    assert found.from_difference == pytest.approx(expected, abs=1e-12)
    assert found.largest_error < 1e-12
    assert found.bound_holds
    assert bounds.low == pytest.approx(max(0, a0 + a1 - 1), abs=1e-12)
    assert bounds.high == pytest.approx(min(a0, a1), abs=1e-12)
    assert bounds.holds and bounds.low <= bounds.robust <= bounds.high


@pytest.mark.parametrize("robust", range(3, 6))
def test_every_count_in_the_frechet_interval_is_attained(robust):
    """Five of ten right in one, eight in the other: three to five can be right in both."""
    first = [True] * 5 + [False] * 5
    second = [True] * robust + [False] * (5 - robust) + [True] * (8 - robust) + [False] * (robust - 3)
    columns = [["yes" if right else "no" for right in column] for column in (first, second)]
    found = frechet(*columns, ["yes"] * 10)
    assert (found.low, found.high, found.robust) == (0.3, 0.5, robust / 10)


def test_misaligned_columns_break_no_identity_but_move_robust():
    """What the identities can't see, R does: the second column is shifted by one instance."""
    rng = np.random.default_rng(0)
    gold = np.array(["no", "yes"])[rng.integers(0, 2, 400)]
    answers = np.where(rng.random(400) < 0.8, gold, np.where(gold == "yes", "no", "yes"))
    whole, shifted = (frechet(answers, other, gold) for other in (answers, np.roll(answers, 1)))
    assert whole.robust == whole.high
    assert shifted.robust < whole.robust


def test_bounds_of_accuracy():
    found = accuracy_bounds(["yes", None, "no", "yes", None], ["yes", "yes", "no", "no", "no"])
    assert (found.low, found.high) == (2 / 5, 4 / 5)
    assert (found.all_prompts.value, found.parsed_only.value) == (2 / 5, 2 / 3)
    assert (found.n, found.support) == (5, 3)
    every = [
        np.mean([a == g for a, g in zip(["yes", one, "no", "yes", two], ["yes", "yes", "no", "no", "no"], strict=True)])
        for one in ("yes", "no")
        for two in ("yes", "no")
    ]
    assert (found.low, found.high) == (min(every), max(every))
    nothing = accuracy_bounds([], [])
    assert math.isnan(nothing.low) and math.isnan(nothing.high) and nothing.reason
    assert presentation_score(["yes", None], ["yes", "no"]).accuracy_parsed.value == 1.0


def test_cells_by_hand():
    table = cell_table(["yes", "no", None, "yes"], ["yes", "yes", "no", "no"], ["fy", "fy", "bn", ("b", 1)])
    assert list(table) == ["fy", "bn", ("b", 1)]
    assert (table["fy"].accuracy.count, table["fy"].n, table["fy"].yes_rate.value) == (1, 2, 0.5)
    assert (table["bn"].accuracy.value, table["bn"].parsed.value) == (0.0, 0.0)
    assert math.isnan(table["bn"].yes_rate.value) and table["bn"].yes_rate.reason
    assert table["b", 1].accuracy.value == 0.0


@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0.5, 0.999))
def test_wilson_intervals_are_scipys(count, n, level):
    count = min(count, n)
    ours, theirs = share(count, n, level=level), binomtest(count, n).proportion_ci(level, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_discordant_counts_are_those_of_cochrans_q(rows):
    test = mcnemar(*apart(rows))
    if test.b + test.c:
        assert cochrans_q(np.array(rows).astype(int)).statistic == pytest.approx(
            (test.b - test.c) ** 2 / (test.b + test.c)
        )
    nothing = mcnemar([], [])
    assert math.isnan(nothing.p) and nothing.reason


@settings(max_examples=10, deadline=None)  # statsmodels collects garbage in every call
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(p_values):
    ours = holm({str(i): p for i, p in enumerate(p_values)})
    order, m, largest, expected = np.argsort(p_values, kind="stable"), len(p_values), 0.0, {}
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (m - rank) * p_values[index]))
        expected[str(index)] = largest
    assert ours == pytest.approx(expected, abs=1e-9)


def chance_of_each_crossing(iota, counts, threshold):
    """The exact distribution: fall below at a size, and at none before it."""
    # Counts k with k < threshold n; exact in fractions, since 0.85 × 200 is not 170 in floating point.
    below = [binom.cdf(math.ceil(round(threshold * n, 6)) - 1, n, p) for p, n in zip(iota, counts, strict=True)]
    left, found = 1.0, []
    for one in below:
        found.append(left * one)
        left *= 1 - one
    return [*found, left]


@pytest.mark.parametrize("counts", [[200] * 9, [3200] * 9, [200, 198, 150, 200, 200, 200, 60, 200, 199]])
def test_crossings_have_their_exact_distribution(counts):
    sizes = [2**k for k in range(2, 11)]
    iota = [0.99, 0.97, 0.93, 0.88, 0.86, 0.845, 0.83, 0.7, 0.6]
    found = crossing(sizes, iota, counts, threshold=0.85, resamples=40_000, seed=0)
    expected = chance_of_each_crossing(iota, counts, 0.85)
    assert found.size == 128
    assert found.reproducibility == found.distribution[128]
    assert list(found.distribution) == [*sizes, None]
    assert sum(found.distribution.values()) == pytest.approx(1)
    for ours, exact in zip(found.distribution.values(), expected, strict=True):
        assert ours == pytest.approx(exact, abs=4.5 * math.sqrt(exact * (1 - exact) / 40_000) + 1e-4)
    assert found.n == sum(counts)


def test_a_curve_on_the_threshold_is_a_coin_flip_at_any_sample_size():
    """As in the paper: near tau, more pairs do not help; a steep curve is found again."""
    sizes = [4, 8, 16, 32]
    for n in (200, 3200, 100_000):
        flat = crossing(sizes, [0.99, 0.9, 0.8499999, 0.5], [n] * 4, threshold=0.85, seed=0)
        assert flat.size == 16
        assert 0.4 < flat.reproducibility < 0.6
    steep = crossing(sizes, [0.99, 0.95, 0.7, 0.5], [200] * 4, threshold=0.85, seed=0)
    assert (steep.size, steep.reproducibility) == (16, 1.0)
    assert crossing(sizes, [0.99, 0.95, 0.7, 0.5], [200] * 4, threshold=0.85, seed=0) == steep


def test_a_share_equal_to_the_threshold_is_not_below_it():
    assert crossing([4, 8], [170 / 200, 169 / 200], [200, 200], threshold=0.85, seed=0).size == 8
    assert math.isnan(crossing([4], [0.3 / 0.1 / 3], [1000], threshold=1.0, seed=0).size)


def test_crossings_that_are_not_there():
    never = crossing([8, 4], [0.99, 0.97], [200, 200], threshold=0.5, seed=0)
    assert math.isnan(never.size)
    assert never.reason == "iota is 0.5 or more at all 2 sizes"
    assert never.reproducibility == never.distribution[None] == 1.0
    assert list(never.distribution) == [4, 8, None]
    partly = crossing([4, 8, 16], [0.9, math.nan, 0.2], [10, 0, 10], threshold=0.5, seed=0)
    assert (partly.size, partly.n) == (16, 20)
    assert "1 sizes without an iota left out" in partly.method
    empty = crossing([4], [math.nan], [0], threshold=0.5, seed=0)
    assert math.isnan(empty.size) and math.isnan(empty.reproducibility) and empty.reason


def test_the_papers_sample_sizes():
    """Appendix A: half-widths, and the paired difference found with 1,800 pairs.

    The paper gives no discordance for its 3.7 points. Two arms with invariance 0.8 that are independent differ on
    2 × 0.8 × 0.2 = 0.32 of the instances, which gives that number; arms that agree more with each other show less.
    """
    points = [round(100 * half_width(p, n).value, 1) for p, n in ((0.5, 200), (0.85, 200), (0.5, 1800))]
    assert points == [6.9, 4.9, 2.3]
    assert round(100 * half_width(0.5, 50).value) == 14
    assert round(100 * detectable_difference(0.32, 1800).value, 1) == 3.7
    assert round(100 * detectable_difference(0.1, 1800).value, 1) == 2.1


@given(st.integers(0, 400), st.floats(0.5, 0.999))
def test_half_width_is_that_of_the_normal_interval(count, level):
    low, high = proportion_confint(count, 400, alpha=1 - level, method="normal")
    exact = norm.ppf((1 + level) / 2) * math.sqrt(count / 400 * (1 - count / 400) / 400)
    assert half_width(count / 400, 400, level=level).value == pytest.approx(exact, abs=1e-9)
    if 0.2 < count / 400 < 0.8 and level < 0.96:  # else statsmodels cuts at 0 and 1
        assert half_width(count / 400, 400, level=level).value == pytest.approx((high - low) / 2, abs=1e-9)


def exact_power(d, discordant, n, level):
    """Power of McNemar's test without continuity correction, summed over all tables."""
    total = 0.0
    chance, z = (discordant + d) / (2 * discordant), norm.ppf((1 + level) / 2)
    for m in range(n + 1):
        weight = binom.pmf(m, n, discordant)
        if weight < 1e-12 or m == 0:
            continue
        b = np.arange(m + 1)
        total += weight * binom.pmf(b, m, chance)[(2 * b - m) ** 2 / m > z**2].sum()
    return total


@pytest.mark.parametrize(
    ("discordant", "n", "power", "level"),
    [
        (0.32, 1800, 0.8, 0.95),
        (0.1, 1800, 0.8, 0.95),
        (0.32, 200, 0.8, 0.95),
        (0.2, 400, 0.9, 0.99),
        (0.5, 600, 0.3, 0.9),
    ],
)
def test_the_detectable_difference_has_its_power(discordant, n, power, level):
    found = detectable_difference(discordant, n, power=power, level=level)
    assert found.reason == ""
    assert exact_power(found.value, discordant, n, level) == pytest.approx(power, abs=0.025)
    # It solves its equation.
    z, z_power = norm.ppf((1 + level) / 2), norm.ppf(power)
    right = z * math.sqrt(discordant) + z_power * math.sqrt(discordant - found.value**2)
    assert found.value * math.sqrt(n) == pytest.approx(right, abs=1e-9)


def test_power_by_simulation_with_our_own_test():
    """Studies drawn with the detectable difference; ours corrects for continuity, so it finds a little fewer."""
    n, discordant = 1800, 0.32
    d = detectable_difference(discordant, n).value
    draws = np.random.default_rng(0).multinomial(
        n, [(discordant + d) / 2, (discordant - d) / 2, 1 - discordant], size=4000
    )
    b, c = draws[:, 0], draws[:, 1]
    plain = (b - c) ** 2 / (b + c) > 3.841458820694124
    assert plain.mean() == pytest.approx(0.8, abs=0.03)
    for one, other in draws[:20, :2].tolist():
        first, second = ([True] * one + [False] * other, [False] * one + [True] * other)
        assert (mcnemar(first, second).p < 0.05) == ((abs(one - other) - 1) ** 2 / (one + other) > 3.841458820694124)


def test_what_no_sample_can_show_is_nan():
    for found in (detectable_difference(0.01, 100), detectable_difference(0.0, 1800)):
        assert math.isnan(found.value)
        assert "can't show it" in found.reason


STATUSES = ["parsed", "unparsed", "truncated", "refused"]


def test_coverage_by_hand():
    base = ["parsed"] * 30 + ["truncated"] * 8 + ["unparsed"] * 2
    one = ["parsed"] * 28 + ["unparsed"] * 2 + ["parsed"] * 8 + ["refused"] * 2
    two = ["parsed"] * 40
    found = coverage({"base": base, "one": one, "two": two})
    assert found.n == 40
    assert found.arms["base"].unparsed == share(10, 40)
    assert found.arms["base"].truncated == share(8, 40)
    assert found.arms["one"].statuses == {"parsed": 36, "unparsed": 2, "refused": 2}
    by = {(test.kind, test.second): test for test in found.between_arms}
    assert len(by) == 4
    test = by["unparsed", "one"]
    assert (test.first, test.b, test.c, test.n, test.arm) == ("base", 8, 2, 40, "")
    assert test.difference == pytest.approx(4 / 40 - 10 / 40)
    for kind in ("unparsed", "truncated"):
        p = [by[kind, arm].p for arm in ("one", "two")]
        adjusted = multipletests(p, method="holm")[1]
        assert [by[kind, arm].p_holm for arm in ("one", "two")] == pytest.approx(list(adjusted), abs=1e-9)
        for arm, (b, c) in zip(
            ("one", "two"), ((8, 2), (10, 0)) if kind == "unparsed" else ((8, 0), (8, 0)), strict=True
        ):
            assert by[kind, arm].p == pytest.approx(binomtest(b, b + c).pvalue, abs=1e-9)
    assert found.between_presentations == ()
    assert coverage({"base": base}).between_arms == ()


def test_coverage_pairs_presentations_by_key():
    presentations = ["original", "equivalent"] * 3
    keys = [(4, "x"), (4, "y"), (4, "y"), (8, "x"), (8, "x"), (4, "x")]
    statuses = ["parsed", "parsed", "truncated", "truncated", "parsed", "unparsed"]
    found = coverage({"base": statuses, "adapter": ["parsed"] * 6}, presentations=presentations, keys=keys)
    tests = {(test.kind, test.arm): test for test in found.between_presentations}
    assert len(tests) == 4
    # Of the keys (4, x), (4, y), (8, x): original parsed, cut, parsed; equivalent unparsed, parsed, cut.
    test = tests["unparsed", "base"]
    assert (test.first, test.second, test.b, test.c, test.n) == ("original", "equivalent", 1, 2, 3)
    assert (tests["truncated", "base"].b, tests["truncated", "base"].c) == (1, 1)
    assert (tests["unparsed", "adapter"].b, tests["unparsed", "adapter"].p) == (0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: share(3, 2), "count is 3 of n = 2; allowed: 0 to n"),
        (lambda: share(-1, 2), "count is -1; allowed: a whole number of at least 0"),
        (lambda: share(1.5, 2), "count is 1.5"),
        (lambda: share(1, 2, level=95), "level is 95; allowed: above 0 and below 1"),
        (lambda: share(1, 2, level=float("nan")), "level is nan"),
        (lambda: pair_profile(["yes"], ["no"], ["no"], level=0), "level is 0"),
        (lambda: mcnemar(["no"], [True]), r"first\[0\] is 'no'; allowed: True, False"),
        (lambda: mcnemar([True], [None]), r"second\[0\] is None"),
        (lambda: holm({"a": 1.2}), "p of a is 1.2; allowed: from 0 to 1"),
        (lambda: cell_table(["yes"], ["yes"], []), r"\(answers 1, cells 0\)"),
        (lambda: frechet(["yes"], ["Yes"], ["yes"]), r"second\[0\] is 'Yes'; allowed: yes, no or None"),
        (lambda: identities(["yes"], ["yes"], ["yes", "no"]), r"\(first 1, second 1, gold 2\)"),
        (lambda: accuracy_bounds([1], ["yes"]), r"answers\[0\] is 1"),
        (lambda: accuracy_bounds([["yes"]], ["yes"]), r"answers\[0\] is \['yes'\]; allowed: yes, no or None"),
        (lambda: crossing([4], [0.5], [10], threshold=1.1, seed=0), "threshold is 1.1; allowed: from 0 to 1"),
        (lambda: crossing([4], [1.5], [10], threshold=0.5, seed=0), "iota is 1.5; allowed: from 0 to 1"),
        (lambda: crossing([4], [0.5], [-1], threshold=0.5, seed=0), "a count is -1; allowed: a whole number of at"),
        (lambda: crossing([4, 4], [0.5, 0.6], [9, 9], threshold=0.5, seed=0), r"sizes \[4, 4\] hold one twice"),
        (lambda: crossing(["n=4"], [0.5], [9], threshold=0.5, seed=0), "size 'n=4' is no number"),
        (lambda: crossing([4], [0.5], [9], threshold=0.5, resamples=0, seed=0), "resamples is 0; allowed: a whole"),
        (lambda: crossing([4, 8], [0.5], [9], threshold=0.5, seed=0), r"\(sizes 2, iota 1, counts 1\)"),
        (lambda: half_width(1.2, 100), "share is 1.2; allowed: from 0 to 1"),
        (lambda: half_width(0.5, 0), "n is 0; allowed: a whole number of at least 1"),
        (lambda: detectable_difference(-0.1, 100), "discordant is -0.1"),
        (lambda: detectable_difference(0.1, 100, power=1), "power is 1; allowed: above 0 and below 1"),
        (lambda: coverage({}), "no arm given"),
        (lambda: coverage({"base": ["parsed"], "one": []}), r"\(base 1, one 0\)"),
        (lambda: coverage({"base": ["ok"]}), r"status base\[0\] is 'ok'; allowed: parsed, unparsed"),
        (lambda: coverage({"base": ["parsed"]}, keys=["x"]), "given together or not at all"),
        (
            lambda: coverage({"base": ["parsed"] * 3}, presentations=["a", "b", "c"], keys=["x"] * 3),
            "presentations are a, b, c; needed two",
        ),
        (
            lambda: coverage({"base": ["parsed"] * 3}, presentations=["a", "b", "a"], keys=["x", "x", "y"]),
            "key 'y' stands 0 times in b; needed once in each",
        ),
        (
            lambda: coverage({"base": ["parsed"] * 3}, presentations=["a", "b", "a"], keys=["x", "x", "x"]),
            "key 'x' stands 2 times in a",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(RunError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
