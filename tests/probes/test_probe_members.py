"""The members with a closed form: equal to scikit-learn and to their formula, in folds and alone."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge as Exact
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from probes.errors import ProbeError
from probes.linear import MEMBERS, fit_probes
from probes.ridge import MeanDifference, Ridge


def study(rows: int, features: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = (rng.random((rows, 3)) < 0.4).astype(np.int64)
    return rng.normal(size=(rows, features)) + np.outer(labels[:, 0], rng.normal(size=features)) + 2.0, labels


@pytest.mark.parametrize(("rows", "features"), [(50, 120), (120, 50)])
@pytest.mark.parametrize("penalty", [1e-4, 1.0, 100.0])
def test_ridge_equals_scikit_learn(rows, features, penalty):
    x, labels = study(rows, features)
    fit = Ridge(x).fit(labels, penalty=penalty)
    for one in range(3):
        classifier = RidgeClassifier(alpha=1 / penalty).fit(x, labels[:, one])
        regression = Exact(alpha=1 / penalty).fit(x, 2.0 * labels[:, one] - 1)
        np.testing.assert_allclose(fit.weights[:, one], classifier.coef_.ravel(), atol=1e-8)
        np.testing.assert_allclose(fit.weights[:, one], regression.coef_, atol=1e-8)
        np.testing.assert_allclose(fit.decision(x)[:, one], classifier.decision_function(x), atol=1e-8)


def test_mean_difference_is_zero_at_the_midpoint_and_points_from_class_0_to_class_1():
    x, labels = study(40, 7)
    fit = MeanDifference(x).fit(labels, penalty=1.0)
    for one in range(3):
        low, high = x[labels[:, one] == 0].mean(axis=0), x[labels[:, one] == 1].mean(axis=0)
        np.testing.assert_allclose(fit.weights[:, one], high - low, atol=1e-12)
        at_middle, at_high = fit.decision(np.stack([(low + high) / 2, high]))[:, one]
        assert at_middle == pytest.approx(0.0, abs=1e-10)
        assert at_high == pytest.approx(np.square(high - low).sum() / 2)


@pytest.mark.parametrize("solver", [Ridge, MeanDifference])
def test_one_class_is_an_error(solver):
    with pytest.raises(ProbeError, match="1 of 2 label sets have one class in 4 training rows"):
        solver(np.eye(4)).fit(np.array([[0, 1], [0, 1], [0, 0], [0, 1]]), penalty=1.0)


def test_ridge_in_folds_equals_a_scikit_learn_pipeline():
    x, labels = study(60, 90)
    result = fit_probes(x[None], labels[:, 0], np.arange(60), member="ridge", penalty=0.1, shuffles=3, seed=0)
    for fold in range(5):
        train, test = result.folds != fold, result.folds == fold
        pipeline = make_pipeline(StandardScaler(), RidgeClassifier(alpha=10.0)).fit(x[train], labels[train, 0])
        decision = pipeline.decision_function(x[test])
        np.testing.assert_allclose(result.margins[0, test], decision, atol=1e-8)
        assert result.fold_auroc[0, fold] == pytest.approx(roc_auc_score(labels[test, 0], decision), abs=1e-12)
    assert "alpha = 1 / C (C=0.1)" in result.method
    assert (result.chosen_penalty == 0.1).all()


def test_members_agree_where_features_are_independent_and_differ_where_they_are_not():
    """Two features share a nuisance that hides the label: a combination reads it, the class means do not."""
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    nuisance = 20 * rng.normal(size=200)
    hidden = np.stack([nuisance + labels, nuisance], axis=1) + 0.1 * rng.normal(size=(200, 2))
    plain = rng.normal(size=(200, 2)) + 2.0 * labels[:, None]
    found = {}
    for member in MEMBERS:
        options = {} if member == "mean_difference" else {"penalty": 1e4}
        found[member] = fit_probes(
            np.stack([plain, hidden]), labels, np.arange(200), member=member, shuffles=0, seed=0, **options
        )
    assert all(result.auroc[0] > 0.95 for result in found.values())
    assert found["logistic"].auroc[1] > 0.95
    assert found["ridge"].auroc[1] > 0.95
    assert found["mean_difference"].auroc[1] < 0.7
    assert np.isnan(found["mean_difference"].penalty)
    assert np.isnan(found["mean_difference"].chosen_penalty).all()
    assert [result.member for result in found.values()] == list(MEMBERS)
