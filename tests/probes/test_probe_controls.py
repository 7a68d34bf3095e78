"""Intervals, first layers, contrasts: equal to brute force, honest where nothing varies, one-line errors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from probes import resampling
from probes.controls import auroc_interval, contrast, first_layer_interval
from probes.errors import ProbeError
from probes.heldout import row_variance, study, variance
from probes.linear import fit_probes
from probes.resampling import draw_instances, resampled_auroc, weighted_auroc


@dataclass(frozen=True)
class Margins:
    """Held-out margins built directly: the arrays of a result that these functions read."""

    margins: np.ndarray
    labels: np.ndarray
    folds: np.ndarray
    groups: np.ndarray


def built(strengths, rows=60, *, per_group=1, correlation=0.5, mixed=False, folds=5, seed=0):
    """Margins [layer, row] that separate the labels by `strengths`; rows of a group share part of their noise."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(rows // per_group), per_group)
    labels = np.arange(rows) % 2 if mixed else groups % 2
    shape = (len(strengths), rows)
    shared = rng.normal(size=(len(strengths), rows // per_group))[:, groups]
    noise = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * rng.normal(size=shape)
    margins = np.array(strengths)[:, None] * (labels - 0.5) + (noise if per_group > 1 else rng.normal(size=shape))
    return Margins(margins=margins, labels=labels, folds=groups // 2 % folds, groups=groups)


def brute_force(result, counts):
    """The mean over folds of scikit-learn's AUROC on rows that are really repeated."""
    areas = []
    for fold in np.unique(result.folds):
        rows = np.flatnonzero(result.folds == fold)
        taken = np.repeat(rows, counts[rows])
        areas.append(roc_auc_score(result.labels[taken], result.margins[taken]))
    return np.mean(areas)


def test_weighted_auroc_equals_scikit_learn_with_ties():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(-2, 3, size=30).astype(float), rng.integers(0, 2, size=30)
    weights = rng.integers(0, 4, size=(50, 30)).astype(float)
    weights[-1, labels == 1] = 0
    areas = weighted_auroc(scores, labels, weights)
    expected = [roc_auc_score(labels, scores, sample_weight=one) for one in weights[:-1]]
    np.testing.assert_allclose(areas[:-1], expected, atol=1e-12)
    assert np.isnan(areas[-1])


@pytest.mark.parametrize(("per_group", "mixed"), [(1, False), (2, False), (2, True), (3, True)])
def test_draws_equal_rows_really_repeated(per_group, mixed, monkeypatch):
    result = built([0.5, 1.5], per_group=per_group, mixed=mixed)
    of = study(result)
    draws = draw_instances(of, 15, np.random.default_rng(1))
    areas = resampled_auroc(of, draws.counts)
    for draw in range(15):
        for layer in range(2):
            one = dataclasses.replace(result, margins=result.margins[layer])
            assert areas[draw, layer] == pytest.approx(brute_force(one, draws.counts[draw]), abs=1e-12)
    monkeypatch.setattr(resampling, "_BLOCK", 50)
    np.testing.assert_array_equal(resampled_auroc(of, draws.counts), areas)
    for group in np.unique(result.groups):
        assert (np.ptp(draws.counts[:, result.groups == group], axis=1) == 0).all()
    for fold in range(5):
        for label in (0, 1):
            rows = (result.folds == fold) & (result.labels == label)
            drawn = draws.counts[:, rows].sum(axis=1)
            # Instances that hold both labels may hold more of one than of the other.
            assert (drawn > 0).all() if per_group == 3 else (drawn == rows.sum()).all()


def test_a_draw_has_the_variance_of_delong():
    """The draws, with their shortfall put back, show the spread of fresh rows for fixed probes."""
    fresh = np.array([study(built([1.0], rows=200, per_group=2, seed=seed)).auroc[0] for seed in range(500)])
    spread = []
    for seed in range(40):
        of = study(built([1.0], rows=200, per_group=2, seed=seed))
        draws = draw_instances(of, 300, np.random.default_rng(seed))
        spread.append(resampled_auroc(of, draws.counts).var() * draws.shortfall)
    assert np.mean(spread) == pytest.approx(fresh.var(), rel=0.15)


def test_binormal_variance_equals_simulation():
    fresh = np.array([study(built([1.5], rows=60, seed=seed)).auroc[0] for seed in range(1000)])
    theta = norm.cdf(1.5 / np.sqrt(2))
    assert fresh.mean() == pytest.approx(theta, abs=0.005)
    assert fresh.var() == pytest.approx(float(row_variance(theta, np.full(5, 6), np.full(5, 6))), rel=0.12)


@pytest.mark.parametrize(("mixed", "sign"), [(False, 1), (True, -1)])
def test_the_factor_for_instances_is_measured(mixed, sign):
    found = [study(built([1.0], rows=400, per_group=2, mixed=mixed, seed=seed)).instances[0] for seed in range(40)]
    assert np.mean(found) == pytest.approx(1 + sign * 0.5, abs=0.05)
    assert (study(built([1.0, 2.0])).instances == 1).all()


def test_an_interval_holds_its_estimate_and_narrows_with_rows():
    small, large = (auroc_interval(built([0.0, 0.8, 2.0, 9.0], rows=rows)) for rows in (60, 400))
    for found in (small, large):
        assert ((found.low <= found.auroc) & (found.auroc <= found.high)).all()
        assert (found.low >= 0).all()
        assert (found.high <= 1).all()
    assert (large.high - large.low < small.high - small.low).all()
    # All rows ranked right: the estimate is 1 and the interval still has a width.
    assert small.auroc[3] == pytest.approx(1.0)
    assert 0.85 < small.low[3] < 0.97
    assert small.high[3] == pytest.approx(1.0)
    wide = auroc_interval(built([0.8]), level=0.99)
    assert wide.low[0] < small.low[1] + 0.1
    assert (small.n, small.n_groups, small.level) == (60, 60, 0.95)
    assert "5 folds" in small.method
    fewer = auroc_interval(built([2.0]), directions=2)
    assert fewer.high[0] - fewer.low[0] < auroc_interval(built([2.0])).high[0] - auroc_interval(built([2.0])).low[0]


def test_agrees_with_the_auroc_of_fitted_probes():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    acts = rng.normal(size=(3, 60, 24)) + np.array([0, 0.2, 0.6])[:, None, None] * labels[:, None]
    fitted = fit_probes(acts, labels, np.arange(60), shuffles=0, seed=0)
    np.testing.assert_allclose(auroc_interval(fitted).auroc, fitted.auroc, atol=1e-12)


def test_folds_with_one_class_do_not_count():
    result = built([1.0])
    labels = np.where(result.folds == 0, 1, result.labels)
    found = auroc_interval(dataclasses.replace(result, labels=labels))
    assert found.n == (result.folds != 0).sum()
    assert found.n_groups == found.n


def test_first_layer_and_its_interval():
    profile = [0.0, 0.3, 1.0, 2.2, 3.5, 6.0]
    found = first_layer_interval(built(profile, rows=200), threshold=0.9, seed=0)
    assert found.layer == 3
    assert (found.low, found.high) in {(3, 3), (3, 4)}
    assert found.never_share == 0
    again = first_layer_interval(built(profile, rows=200), threshold=0.9, seed=0)
    assert again == found
    assert (found.n, found.n_groups, found.reason) == (200, 200, "")
    assert "2000 draws" in found.method


def test_a_threshold_that_is_never_reached_is_none_with_a_reason():
    found = first_layer_interval(built([0.0, 0.5], rows=200), threshold=0.95, seed=0)
    assert (found.layer, found.low, found.high) == (None, None, None)
    assert found.never_share == 1.0
    assert found.reason.startswith("no layer reaches 0.95; the best is layer 1 with 0.")
    near = first_layer_interval(built([0.0, 1.9], rows=60), threshold=0.9, seed=0)
    assert 0 < near.never_share < 1
    assert near.high is None


@pytest.mark.parametrize("layers", [1, 4])
def test_all_rows_ranked_right_is_no_proof_of_a_layer(layers):
    """At an AUROC of exactly 1 no draw changes anything, and twelve rows say little all the same."""
    result = built([50.0] * layers, rows=12, folds=3)
    found = first_layer_interval(result, threshold=0.9, seed=0)
    assert auroc_interval(result).low[0] < 0.9
    assert (found.layer, found.low, found.high) == (0, 0, None)
    assert 0.025 < found.never_share < 0.5
    # As sure as the score test of that layer at the threshold.
    error = np.sqrt(variance(study(result), np.full(layers, 0.9), None))[0]
    assert found.never_share == pytest.approx(norm.cdf(-0.1 / error), abs=0.03)
    many = built([50.0] * layers, rows=400)
    assert auroc_interval(many).low[0] > 0.9
    assert first_layer_interval(many, threshold=0.9, seed=0).high == 0


@pytest.mark.parametrize("rows", [12, 24, 60])
@pytest.mark.parametrize("layers", [1, 6])
def test_no_layer_is_ruled_out_wrongly_in_few_studies(rows, layers):
    """Layers with a true AUROC of 0.87, independent ones: some of six looks good by luck. The threshold is 0.9."""
    strength = norm.ppf(0.87) * np.sqrt(2)
    wrong = [
        first_layer_interval(built([strength] * layers, rows=rows, folds=3, seed=seed), resamples=200, seed=seed).high
        is not None
        for seed in range(100)
    ]
    assert np.mean(wrong) <= 0.05


def test_some_layers_of_a_model_go_by_their_numbers():
    profile = [0.0, 0.3, 0.6, 2.5, 3.0]
    plain = first_layer_interval(built(profile, rows=200), threshold=0.9, seed=0)
    named = first_layer_interval(built(profile, rows=200), threshold=0.9, layers=[2, 4, 6, 8, 10], seed=0)
    assert (named.layer, named.low, named.high) == (8, 2 + 2 * plain.low, 2 + 2 * plain.high)
    never = first_layer_interval(built([0.0, 0.5], rows=200), threshold=0.95, layers=[3, 7], seed=0)
    assert never.layer is None and "the best is layer 7 with" in never.reason
    for wrong in ([1], [2, 1], [1, 1]):
        with pytest.raises(ProbeError, match="needed an ascending number for each of the result's 2 layers"):
            first_layer_interval(built([0.0, 0.5], rows=200), layers=wrong, seed=0)


def test_layers_move_together():
    """Two copies of a layer reach the threshold in the same draws; two layers of fresh noise give two chances."""
    one, other = built([1.8], seed=1), built([1.8], seed=4)
    never = [
        first_layer_interval(dataclasses.replace(one, margins=margins), threshold=0.92, seed=0).never_share
        for margins in (one.margins, np.vstack([one.margins] * 2), np.vstack([one.margins, other.margins]))
    ]
    assert never[0] == never[1]
    assert never[2] < never[1]


def test_contrast_is_paired():
    rng = np.random.default_rng(0)
    before = built([1.0, 1.0], rows=200)
    step = 0.5 * np.array([[0.0], [1.0]]) * (before.labels - 0.5)
    after = dataclasses.replace(before, margins=before.margins + step + 0.1 * rng.normal(size=step.shape))
    found = contrast(before, after, seed=0)
    first, second = auroc_interval(before), auroc_interval(after)
    np.testing.assert_allclose(found.difference, second.auroc - first.auroc)
    assert found.low[0] < 0 < found.high[0]
    assert found.low[1] > 0
    assert found.high[1] - found.low[1] < 0.5 * (first.high[1] - first.low[1])
    assert found.p_value[1] < 0.01 < found.p_value[0]
    assert found.p_max < 0.01
    back = contrast(after, before, seed=0)
    np.testing.assert_allclose(back.low, -found.high)
    assert back.p_max == found.p_max
    assert (found.n, found.n_groups, found.reason) == (200, 200, "")


def test_contrast_of_a_result_with_itself_has_no_interval():
    result = built([1.0, 9.0])
    found = contrast(result, result, seed=0)
    np.testing.assert_array_equal(found.difference, 0)
    assert np.isnan(found.low).all()
    assert np.isnan(found.p_value).all()
    assert np.isnan(found.p_max)
    assert found.reason == "no draw of instances changes the difference at layers 0, 1"
    # One such layer has no part in what the others show.
    after = dataclasses.replace(result, margins=result.margins + np.array([[1.0], [0.0]]) * (result.labels - 0.5))
    part = contrast(result, after, seed=0)
    assert np.isnan(part.low[1])
    assert part.p_max < 0.05
    assert part.reason.endswith("at layers 1")


RESULT = built([1.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margins": RESULT.margins[:1]}, r"margins of shape \(2, 60\) and \(1, 60\)"),
        ({"labels": 1 - RESULT.labels}, "labels of the two results differ in 60 of 60 rows"),
        ({"groups": RESULT.groups // 2}, "groups of the two results differ in 59 of 60 rows"),
        (
            {"folds": (RESULT.folds + (RESULT.groups > 50)) % 5},
            r"folds of the two results differ in 9 of 60 rows; .*seed",
        ),
    ],
)
def test_contrast_refuses_other_designs(changes, message):
    with pytest.raises(ProbeError, match=message) as caught:
        contrast(RESULT, dataclasses.replace(RESULT, **changes), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: first_layer_interval(RESULT, threshold=-0.1, seed=0),
            "threshold is -0.1; it must lie between 0 and 1",
        ),
        (lambda: first_layer_interval(RESULT, threshold=1.0, seed=0), "threshold is 1.0"),
        (lambda: first_layer_interval(RESULT, resamples=1, seed=0), "resamples is 1; at least 2"),
        (lambda: auroc_interval(RESULT, level=95), "level is 95; it must lie between 0 and 1, such as 0.95"),
        (lambda: auroc_interval(RESULT, directions=0), "directions is 0; it must be above 0"),
        (
            lambda: auroc_interval(dataclasses.replace(RESULT, labels=RESULT.folds % 2)),
            r"each of 5 folds holds rows of one class \(60 rows\)",
        ),
        (lambda: auroc_interval(dataclasses.replace(RESULT, labels=RESULT.labels[1:])), "labels has 59 rows"),
        (lambda: auroc_interval(dataclasses.replace(RESULT, groups=RESULT.groups[1:])), "groups has 59 rows"),
        (lambda: auroc_interval(dataclasses.replace(RESULT, margins=RESULT.margins[0])), r"margins has shape \(60,\)"),
        (
            lambda: auroc_interval(dataclasses.replace(RESULT, margins=RESULT.margins * np.nan)),
            "120 values .*not finite",
        ),
        (
            lambda: first_layer_interval(dataclasses.replace(RESULT, groups=RESULT.folds), seed=0),
            r"no fold holds two instances of one class \(5 instances in 5 folds\)",
        ),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ProbeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
