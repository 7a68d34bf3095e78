"""The batched solver against scikit-learn, which fits one label set at a time."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from probes.directions import Standardiser
from probes.errors import ConvergenceError, ProbeError
from probes.logistic import Logistic, fit_logistic


def study(rows: int, features: int, sets: int, *, spectrum: float = 0.5, seed: int = 0):
    """Rows with a decaying spectrum, as residual streams have, and label sets of which the first is readable."""
    rng = np.random.default_rng(seed)
    scale = np.arange(1, features + 1.0) ** -spectrum
    labels = (rng.random((rows, sets)) < 0.4).astype(np.int64)
    x = rng.normal(size=(rows, features)) * scale + np.outer(labels[:, 0] - 0.5, rng.normal(size=features)) * scale
    return x @ np.linalg.qr(rng.normal(size=(features, features)))[0] + 3.0, labels


def reference(x, y, penalty):
    return LogisticRegression(C=penalty, tol=1e-10, max_iter=100_000).fit(x, y)


@pytest.mark.parametrize(("rows", "features"), [(60, 150), (150, 60), (80, 80), (40, 1)])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 30.0])
def test_coefficients_equal_scikit_learn(rows, features, penalty):
    x, labels = study(rows, features, 4)
    x = Standardiser.of(x)(x)
    fit = fit_logistic(x, labels, penalty=penalty)
    for one in range(labels.shape[1]):
        expected = reference(x, labels[:, one], penalty)
        np.testing.assert_allclose(fit.weights[:, one], expected.coef_[0], atol=1e-4)
        assert fit.intercept[one] == pytest.approx(expected.intercept_[0], abs=1e-4)
        np.testing.assert_allclose(fit.decision(x)[:, one], expected.decision_function(x), atol=1e-3)


def test_rows_need_not_be_centred_and_the_intercept_is_not_penalised():
    x, labels = study(50, 80, 2)
    fit = fit_logistic(x + 5.0, labels)
    expected = reference(x + 5.0, labels[:, 0], 1.0)
    np.testing.assert_allclose(fit.weights[:, 0], expected.coef_[0], atol=1e-4)
    assert fit.intercept[0] == pytest.approx(expected.intercept_[0], abs=1e-3)


def test_duplicated_rows_and_dependent_features_are_exact():
    x, labels = study(30, 20, 1)
    x = np.vstack([np.hstack([x, x[:, :5]])] * 2)
    labels = np.vstack([labels, 1 - labels])[:, :1]
    labels[:30] = labels[30:]
    fit = fit_logistic(x, labels)
    np.testing.assert_allclose(fit.weights[:, 0], reference(x, labels[:, 0], 1.0).coef_[0], atol=1e-4)


@pytest.mark.parametrize("penalty", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize(("rows", "features"), [(60, 200), (200, 60)])
def test_default_tolerance_is_near_the_exact_optimum(penalty, rows, features):
    x, labels = study(rows, features, 8, spectrum=1.5)
    x = Standardiser.of(x)(x)
    fit, exact = fit_logistic(x, labels, penalty=penalty), fit_logistic(x, labels, penalty=penalty, tolerance=1e-7)
    np.testing.assert_allclose(fit.weights, exact.weights, atol=1e-4)
    # The exact one is at the optimum: its gradient, small against the one at zero weights.
    chance = 1 / (1 + np.exp(-exact.decision(x)))
    start = np.linalg.norm(penalty * x.T @ (labels.mean(axis=0) - labels), axis=0)
    gradient = np.linalg.norm(exact.weights + penalty * x.T @ (chance - labels), axis=0)
    assert (gradient <= 1e-6 * start).all()


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("penalty", [1.0, 100.0])
def test_equal_rows_do_not_upset_the_row_coordinates(copies, penalty):
    """Fewer different rows than rows: the kernel is singular, and one label set is separable by far."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size=(200 // copies, 6))
    x = rng.normal(size=(len(labels), 300)) + 3 * np.outer(2 * labels[:, 0] - 1, rng.normal(size=300))
    x, labels = np.concatenate([x] * copies), np.concatenate([labels] * copies)
    x = Standardiser.of(x)(x)
    fit = fit_logistic(x, labels, penalty=penalty)
    for one in (0, 1):
        np.testing.assert_allclose(fit.weights[:, one], reference(x, labels[:, one], penalty).coef_[0], atol=1e-4)


def test_one_solver_serves_any_penalty_in_any_order():
    x, labels = study(60, 100, 5)
    solver = Logistic(x)
    first = solver.fit(labels, penalty=1.0)
    solver.fit(labels[:, :2], penalty=1e-3)
    np.testing.assert_array_equal(solver.fit(labels, penalty=1.0).weights, first.weights)


def test_label_sets_do_not_influence_each_other():
    x, labels = study(60, 100, 12)
    together, alone = fit_logistic(x, labels), fit_logistic(x, labels[:, 3:4])
    np.testing.assert_allclose(together.weights[:, 3], alone.weights[:, 0], atol=1e-4)


def test_features_that_say_nothing_give_the_base_rate():
    labels = np.array([[1], [1], [1], [0]])
    fit = fit_logistic(np.zeros((4, 3)), labels)
    assert not fit.weights.any()
    assert fit.intercept[0] == pytest.approx(np.log(3))


def test_not_converging_is_an_error():
    x, labels = study(60, 100, 3)
    with pytest.raises(
        ConvergenceError, match=r"3 of 3 label sets did not converge in 2 Newton steps .*smaller penalty"
    ):
        fit_logistic(x, labels, max_steps=2)


def test_one_class_is_an_error():
    with pytest.raises(ProbeError, match="1 of 2 label sets have one class in 4 training rows"):
        fit_logistic(np.eye(4), np.array([[0, 1], [0, 1], [0, 0], [0, 1]]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardiser_equals_scikit_learn(dtype):
    rows = np.random.default_rng(0).normal(2.0, [1, 10, 1e-3], size=(50, 3)).astype(dtype)
    scaler = StandardScaler().fit(rows.astype(np.float64))
    standardise = Standardiser.of(rows)
    np.testing.assert_allclose(standardise(rows), scaler.transform(rows.astype(np.float64)), atol=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3, -7.3])
def test_constant_features_get_scale_one(value):
    rows = np.column_stack([np.full(37, value), np.arange(37.0)])
    standardise = Standardiser.of(rows)
    assert standardise.scale[0] == 1.0
    np.testing.assert_allclose(standardise(rows)[:, 0], 0.0, atol=1e-9)


@pytest.mark.parametrize("penalty", [1e-4, 0.03, 1.0, 100.0])
def test_constant_features_leave_the_intercept_alone(penalty):
    """The start is then the optimum, and what is left of the gradient is rounding, which no step brings down."""
    labels = np.tile([[1, 0], [0, 1], [0, 0]], (13, 1))
    fit = fit_logistic(np.zeros((39, 60)), labels, penalty=penalty)
    np.testing.assert_allclose(fit.weights, 0.0, atol=1e-12)
    share = labels.mean(axis=0)
    np.testing.assert_allclose(fit.intercept, np.log(share / (1 - share)), atol=1e-9)


def test_a_penalty_beyond_float32_is_refused_and_nothing_else_is_said():
    x, labels = study(40, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConvergenceError, match="use a smaller penalty"):
            fit_logistic(x, labels, penalty=1e300)
