"""Simulated studies with known truth: how often 95% intervals hold it.

Each study draws pairs from a law of (gold, first answer, second answer) with correlated answers, some of them missing; the
second arm keeps some of the first arm's pairs. The truth of every statistic follows from the law, not from a large sample.
Intervals that cover too rarely claim effects that are not there; that cover too often hide those that are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import binom

from experiments.statistics import Arm, compare_arms, pair_interval, pair_profile

WORDS = np.array(["no", "yes", None], dtype=object)
ASKED = ("accuracy_original", "accuracy_equivalent", "accuracy_gap", "invariance", "robust", "kappa", "kappa_separate")


@dataclass(frozen=True)
class Case:
    """`right` is accuracy by gold (no, yes) where an answer is given; the second answer repeats the first with chance
    `agree`. An arm `after` answers a pair as before with chance `keep`. The law is the same at all `sizes`."""

    n: int
    right: tuple[float, float]
    agree: float
    right_after: tuple[float, float]
    agree_after: float
    missing: float
    keep: float
    sizes: int = 1


CASES = {
    "200 pairs, accuracy 0.75": Case(200, (0.85, 0.65), 0.5, (0.88, 0.74), 0.7, 0.02, 0.5),
    "1,800 pairs, accuracy 0.75": Case(1800, (0.85, 0.65), 0.5, (0.88, 0.74), 0.7, 0.02, 0.5, sizes=9),
    "200 pairs, accuracy 0.95": Case(200, (0.95, 0.95), 0.4, (0.97, 0.95), 0.6, 0.01, 0.5),
    "200 pairs, leaning to yes": Case(200, (0.2, 0.95), 0.3, (0.3, 0.9), 0.4, 0.01, 0.3),
}


def law(right, agree, missing):
    """Probability of [gold, first, second], answers no, yes, missing; gold is yes or no with chance 1/2."""
    tables = []
    for gold in (0, 1):
        first = np.zeros(3)
        first[[gold, 1 - gold]] = right[gold], 1 - right[gold]
        table = agree * np.diag(first) + (1 - agree) * np.outer(first, first)
        lost = np.array([[1 - missing, 0, missing], [0, 1 - missing, missing], [0, 0, 1]])
        tables.append(lost.T @ table @ lost / 2)
    return np.array(tables)


def truths(p):
    """The statistics of a law, from their definitions."""
    both = p[:, :2, :2] / p[:, :2, :2].sum()
    first, second = (sum(p[g].sum(axis=1 - side)[g] for g in (0, 1)) for side in (0, 1))
    iota = both[:, 0, 0].sum() + both[:, 1, 1].sum()
    q0, q1 = both[:, 1, :].sum(), both[:, :, 1].sum()
    pooled, separate = ((q0 + q1) / 2) ** 2 + (1 - (q0 + q1) / 2) ** 2, q0 * q1 + (1 - q0) * (1 - q1)
    return {
        "accuracy_original": first,
        "accuracy_equivalent": second,
        "accuracy_gap": first - second,
        "invariance": iota,
        "robust": both[0, 0, 0] + both[1, 1, 1],
        "kappa": (iota - pooled) / (1 - pooled),
        "kappa_bar": (iota - pooled) / (1 - pooled),
        "kappa_separate": (iota - separate) / (1 - separate),
    }


def covered(case, studies, *, resamples, seed=0):
    """Share of studies whose interval holds the truth, by kind of interval and statistic."""
    rng = np.random.default_rng(seed)
    before, fresh = (
        law(right, agree, case.missing)
        for right, agree in ((case.right, case.agree), (case.right_after, case.agree_after))
    )
    true, true_after = truths(before), truths(case.keep * before + (1 - case.keep) * fresh)
    shape = (studies, case.n)
    gold = rng.integers(0, 2, shape)
    drawn = []
    for table in (before, fresh):
        by_gold = [rng.choice(9, size=shape, p=2 * table[g].ravel()) for g in (0, 1)]
        drawn.append(np.where(gold == 1, by_gold[1], by_gold[0]))
    drawn[1] = np.where(rng.random(shape) < case.keep, drawn[0], drawn[1])
    hits = {}
    sizes = np.arange(case.n) % case.sizes if case.sizes > 1 else None
    asked = ASKED if sizes is None else (*ASKED, "kappa_bar")
    for study in range(studies):
        answers = WORDS[gold[study]]
        arms = [Arm(WORDS[arm[study] // 3], WORDS[arm[study] % 3]) for arm in drawn]
        profile = pair_profile(*arms[0], answers)
        wilson = {"accuracy_original": profile.original.accuracy, "invariance": profile.invariance,
                  "robust": profile.robust}  # fmt: skip
        how = {"statistics": asked, "sizes": sizes, "resamples": resamples, "seed": study}
        found = {
            "Wilson": (wilson, true),
            "one arm": (pair_interval(*arms[0], answers, **how), true),
            "change": (compare_arms(*arms, answers, **how), {k: true_after[k] - true[k] for k in true}),
        }
        for kind, (intervals, expected) in found.items():
            for name, one in intervals.items():
                hit = one.low - 1e-12 <= expected[name] <= one.high + 1e-12
                hits.setdefault((kind, name), []).append(hit)
    return {key: float(np.mean(hit)) for key, hit in hits.items()}


def test_the_law_has_the_truth_that_a_large_sample_shows():
    p = law((0.85, 0.65), 0.5, 0.02)
    assert p.sum() == pytest.approx(1)
    drawn = np.random.default_rng(0).choice(18, size=400_000, p=p.ravel())
    gold, first, second = WORDS[drawn // 9], WORDS[drawn % 9 // 3], WORDS[drawn % 3]
    profile = pair_profile(first, second, gold)
    true = truths(p)
    assert profile.original.accuracy.value == pytest.approx(true["accuracy_original"], abs=0.004)
    assert profile.equivalent.accuracy.value == pytest.approx(true["accuracy_equivalent"], abs=0.004)
    assert profile.invariance.value == pytest.approx(true["invariance"], abs=0.004)
    assert profile.robust.value == pytest.approx(true["robust"], abs=0.004)
    assert profile.kappa.value == pytest.approx(true["kappa"], abs=0.008)
    assert profile.kappa.separate == pytest.approx(true["kappa_separate"], abs=0.008)


def test_intervals_cover_the_truth():
    """300 studies. The bounds are those that a coverage of 93-97% passes in 999 of 1,000 runs."""
    studies = 300
    low, high = binom.ppf(0.0005, studies, 0.93) / studies, binom.ppf(0.9995, studies, 0.97) / studies
    found = covered(CASES["200 pairs, accuracy 0.75"], studies, resamples=500)
    assert len(found) == 3 + 2 * len(ASKED)
    assert {key: share for key, share in found.items() if not low <= share <= high} == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_intervals_cover_the_truth_in_93_to_97_percent_of_2000_studies(case):
    found = covered(case, 2000, resamples=2000)
    assert {key: share for key, share in found.items() if not 0.93 <= share <= 0.97} == {}


@pytest.mark.slow
def test_rows_of_one_instance_have_to_be_drawn_together():
    """200 instances under four relations; most are answered the same in all of them."""
    rng = np.random.default_rng(0)
    studies, instances, relations = 1000, 200, 4
    p = law((0.85, 0.65), 0.5, 0.02)
    true = truths(p)
    key = np.tile(np.arange(instances), relations)
    relation = np.repeat(np.arange(relations), instances)
    hits = []
    for study in range(studies):
        own = (
            rng.choice(9, size=(2, relations, instances), p=2 * p[0].ravel()),
            rng.choice(9, size=(2, relations, instances), p=2 * p[1].ravel()),
        )
        gold = rng.integers(0, 2, instances)
        drawn = np.where(gold == 1, own[1], own[0])
        same = rng.random((relations, instances)) < 0.8
        answers = np.where(same, drawn[0, 0], drawn[1]).ravel()
        columns = WORDS[answers // 3], WORDS[answers % 3], WORDS[np.tile(gold, relations)]
        how = {"statistics": ("accuracy_original", "invariance", "kappa"), "resamples": 1000, "seed": study}
        together, stratified, apart = (
            pair_interval(*columns, **how, clusters=clusters, strata=strata)
            for clusters, strata in ((key, None), (key, relation), (None, relation))
        )
        hits.append(
            [[one.low <= true[name] <= one.high for name, one in f.items()] for f in (together, stratified, apart)]
        )
    together, stratified, apart = np.mean(hits, axis=0)
    low, high = binom.ppf(0.0005, studies, 0.93) / studies, binom.ppf(0.9995, studies, 0.97) / studies
    assert ((low <= together) & (together <= high)).all(), together
    assert ((low <= stratified) & (stratified <= high)).all(), stratified
    assert (apart < 0.87).all(), apart
