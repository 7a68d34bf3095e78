"""What a study can find: equal to simulated studies, and the two directions of the question agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from probes.auroc import auroc
from probes.controls import minimum_detectable_auroc, rows_needed
from probes.errors import ProbeError
from probes.heldout import row_variance


@pytest.mark.parametrize("theta", [0.2, 0.5, 0.7, 0.95])
def test_row_variance_equals_the_bivariate_normal(theta):
    """P(two ones both above a zero) from scipy's bivariate normal distribution with correlation 1/2."""
    at = norm.ppf(theta)
    both = multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]]).cdf([at, at])
    expected = (theta * (1 - theta) + (7 + 5 - 2) * (both - theta**2)) / (7 * 5)
    found = row_variance(np.array([theta]), np.array([7.0]), np.array([5.0]))
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert row_variance(np.array([theta]), np.full(2, 7.0), np.full(2, 5.0))[0] == pytest.approx(expected / 2, rel=1e-4)


def test_row_variance_at_chance_is_the_variance_of_ranks():
    """At 1/2 it is the Mann-Whitney variance, (m + n + 1) / (12 m n)."""
    assert float(row_variance(np.array(0.5), np.array([8.0]), np.array([5.0]))) == pytest.approx(14 / (12 * 8 * 5))


def test_power_of_a_fixed_score_equals_simulation():
    """With hardly any directions to learn, a study is a fixed score on fresh rows in folds; its power is simulated."""
    rng = np.random.default_rng(0)
    labels, folds = np.arange(100) % 2, np.arange(100) // 2 % 5

    def areas(strength, studies=2000):
        scores = rng.normal(size=(100, studies)) + strength * labels[:, None]
        sets = np.repeat(labels[:, None], studies, axis=1)
        return np.mean([auroc(scores[folds == fold], sets[folds == fold]) for fold in range(5)], axis=0)

    theta = minimum_detectable_auroc(50, 50, directions=1e-9, power=0.8)
    # The critical value is that of shuffled labels, whose folds move together; it is asked for by a null.
    null = areas(0.0)[:, None]
    fixed = minimum_detectable_auroc(50, 50, directions=1e-9, power=0.8, null=null)
    assert 0.5 < fixed < theta
    critical = np.quantile(null, 0.95, method="higher")
    strength = np.sqrt(2) * norm.ppf(fixed)
    found = np.mean(areas(strength) > critical)
    assert found == pytest.approx(0.8, abs=0.03)


def test_more_rows_find_less_and_more_layers_find_less_well():
    sizes = [minimum_detectable_auroc(rows, rows) for rows in (20, 50, 200, 2000)]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.5 < sizes[-1] < 0.54
    layers = [minimum_detectable_auroc(50, 50, layers=layers) for layers in (1, 12, 36)]
    assert layers == sorted(layers)
    assert minimum_detectable_auroc(50, 50, power=0.95) > layers[0]
    assert minimum_detectable_auroc(50, 50, alpha=0.01) > layers[0]
    assert minimum_detectable_auroc(10, 90) > layers[0]
    # The layers' own null, where layers are alike, asks for less than Bonferroni.
    rng = np.random.default_rng(0)
    alike = 0.5 + 0.06 * rng.normal(size=(500, 1)) + 0.005 * rng.normal(size=(500, 36))
    assert minimum_detectable_auroc(50, 50, null=alike) < layers[2]


@pytest.mark.parametrize("layers", [1, 30])
@pytest.mark.parametrize("auroc", [0.6, 0.75, 0.9])
def test_rows_needed_is_the_inverse(auroc, layers):
    rows = rows_needed(auroc, layers=layers)
    assert minimum_detectable_auroc(rows // 2, rows - rows // 2, layers=layers) <= auroc + 1e-9
    fewer = rows - 2
    if fewer // 2 >= 5:
        assert minimum_detectable_auroc(fewer // 2, fewer - fewer // 2, layers=layers) > auroc


def test_too_few_rows_for_so_many_layers_is_nan():
    assert math.isnan(minimum_detectable_auroc(5, 5, layers=1000, alpha=0.01))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: minimum_detectable_auroc(3, 40), "3 rows of class 1 and 40 of class 0; 5 folds need at least 5"),
        (lambda: minimum_detectable_auroc(40, 40, alpha=0), "alpha is 0; it must lie between 0 and 1"),
        (lambda: minimum_detectable_auroc(40, 40, power=1.0), "power is 1.0"),
        (lambda: minimum_detectable_auroc(40, 40, layers=0), "layers is 0 and folds 5"),
        (lambda: minimum_detectable_auroc(40, 40, null=np.full((5, 2), 0.5)), "null holds 5 shuffles; at least 19"),
        (lambda: minimum_detectable_auroc(40, 40, null=np.full(50, 0.5)), r"null has shape \(50,\)"),
        (lambda: minimum_detectable_auroc(40, 40, directions=-1), "directions is -1"),
        (lambda: rows_needed(0.5), "auroc is 0.5; it must lie between 0.5 and 1"),
        (lambda: rows_needed(0.8, share=1.0), "share is 1.0"),
        (lambda: rows_needed(0.50001), "an AUROC of 0.50001 needs more than 10000000 rows"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ProbeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
