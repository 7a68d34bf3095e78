"""Probes over layers: equal to a plain scikit-learn loop, honest under the null, one-line errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_info, threadpool_limits

from probes.errors import ConvergenceError, ProbeError
from probes.folds import shuffled_labels
from probes.linear import Reading, fit_probes
from probes.parallel import for_each


def activations(strengths, rows=80, features=30, *, seed=0):
    """Activations [layer, row, feature] that hold the label with the given strength at each layer."""
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    direction = rng.normal(size=features)
    layers = [rng.normal(size=(rows, features)) + s * np.outer(labels - 0.5, direction) for s in strengths]
    return np.stack(layers).astype(np.float32), labels


@pytest.mark.parametrize("features", [20, 120])
@pytest.mark.parametrize("penalty", [1.0, 0.05])
def test_equal_to_a_loop_over_scikit_learn(features, penalty):
    acts, labels = activations([0.0, 0.4], features=features)
    other = acts + np.random.default_rng(1).normal(size=acts.shape).astype(np.float32)
    groups = np.arange(80)
    reading = Reading(other, labels, groups)
    result = fit_probes(acts, labels, groups, readings={"other": reading}, shuffles=6, penalty=penalty, seed=5)
    read = result.readings["other"]

    shuffled = shuffled_labels(labels, groups, result.folds, shuffles=6, seed=5)
    for layer in range(2):
        areas = np.zeros((2, 5, 7))
        for fold in range(5):
            train, test = result.folds != fold, result.folds == fold
            for one, y in enumerate([labels, *shuffled.T]):
                probe = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, tol=1e-10, max_iter=100_000))
                probe.fit(acts[layer, train].astype(np.float64), y[train])
                for index, (source, margins) in enumerate([(acts, result.margins), (other, read.margins)]):
                    decision = probe.decision_function(source[layer, test].astype(np.float64))
                    areas[index, fold, one] = roc_auc_score(y[test], decision)
                    if one == 0:
                        np.testing.assert_allclose(margins[layer, test], decision, atol=1e-3)
        np.testing.assert_allclose(result.fold_auroc[layer], areas[0, :, 0], atol=1e-3)
        np.testing.assert_allclose(result.auroc[layer], areas[0, :, 0].mean(), atol=1e-3)
        np.testing.assert_allclose(result.null[:, layer], areas[0, :, 1:].mean(axis=0), atol=1e-3)
        np.testing.assert_allclose(read.auroc[layer], areas[1, :, 0].mean(), atol=1e-3)
        np.testing.assert_allclose(read.null[:, layer], areas[1, :, 1:].mean(axis=0), atol=1e-3)
        assert result.pooled[layer] == pytest.approx(roc_auc_score(labels, result.margins[layer]), abs=1e-12)


def test_finds_the_layer_where_the_label_appears():
    acts, labels = activations([0.0, 0.2, 2.0, 2.0])
    result = fit_probes(acts, labels, np.arange(80), shuffles=40, seed=0)
    assert result.first_layer() == 2
    assert result.first_layer(threshold=1.01) is None
    assert result.p_value[2] == pytest.approx(1 / 41)
    assert result.p_value[0] > 0.05
    assert result.p_max == pytest.approx(1 / 41)
    assert result.decodable.mean() > 0.9
    assert (result.chosen_layer >= 2).all()
    assert (result.n, result.n_groups, result.penalty, result.excluded_folds) == (80, 80, 1.0, 0)
    assert "StratifiedGroupKFold" in result.method
    assert "40 label shuffles" in result.method


def test_equal_arguments_give_equal_results_and_the_seed_matters():
    acts, labels = activations([0.1, 0.3])
    first, again, other = (fit_probes(acts, labels, np.arange(80), shuffles=5, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.margins, again.margins)
    np.testing.assert_array_equal(first.null, again.null)
    assert (first.null != other.null).any()


def test_without_shuffles_the_fields_say_so():
    acts, labels = activations([0.5])
    result = fit_probes(acts, labels, np.arange(80), shuffles=0, seed=0)
    assert result.readings == {}
    assert result.null.shape == (0, 1)
    assert np.isnan(result.p_value).all()
    assert np.isnan(result.p_max)
    assert np.isnan(result.selectivity).all()
    assert not result.above_null.any()
    assert np.isnan(result.null_band()).all()


def test_above_null_is_family_wise_and_selectivity_is_above_the_mean():
    acts, labels = activations([0.0, 2.0])
    result = fit_probes(acts, labels, np.arange(80), shuffles=39, seed=0)
    assert result.above_null.tolist() == [False, True]
    best = np.sort(result.null.max(axis=1))
    # 39 shuffles: (1 + count) / 40 <= 0.05 allows one shuffle whose best layer is as high.
    for value, above in [(best[-2] + 1e-6, True), (best[-2] - 1e-6, False)]:
        changed = dataclasses.replace(result, auroc=np.array([value, value]))
        assert changed.above_null.tolist() == [above, above]
    few = fit_probes(acts, labels, np.arange(80), shuffles=10, seed=0)
    assert not few.above_null.any()
    np.testing.assert_allclose(result.selectivity, result.auroc - result.null.mean(axis=0))


def test_null_band_is_the_null_quantiles():
    acts, labels = activations([0.0, 0.5])
    result = fit_probes(acts, labels, np.arange(80), shuffles=50, seed=0)
    np.testing.assert_allclose(result.null_band(), np.quantile(result.null, (0.025, 0.5, 0.975), axis=0))
    assert result.null_band((0.1, 0.9)).shape == (2, 2)


def test_grouped_rows_do_not_leak():
    """Each instance has a fingerprint and a random label: rows of one instance in two folds would give it away."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 4)
    labels = np.repeat(rng.permutation(np.arange(40) % 2), 4)
    prints = rng.normal(size=(40, 60))[groups] + 0.01 * rng.normal(size=(160, 60))
    grouped = fit_probes(prints[None], labels, groups, shuffles=0, seed=0)
    leaking = fit_probes(prints[None], labels, np.arange(160), shuffles=0, seed=0)
    assert leaking.auroc[0] > 0.99
    assert grouped.auroc[0] < 0.75


def test_the_chosen_layer_ignores_the_fold_it_judges():
    acts, labels = activations([1.0, 1.0])
    result = fit_probes(acts, labels, np.arange(80), shuffles=0, seed=0)
    areas = np.array([[1.0, 0.6, 0.6, 0.6, 0.6], [0.0, 0.7, 0.7, 0.7, 0.7]])
    changed = dataclasses.replace(result, fold_auroc=areas, margins=np.stack([result.labels * 2.0 - 1, np.zeros(80)]))
    # Fold 0 alone prefers layer 0, strongly: the other folds' choice follows it, its own does not.
    assert changed.chosen_layer.tolist() == [1, 0, 0, 0, 0]
    # Layer 0's margins are right everywhere, layer 1's are 0, which is no answer.
    np.testing.assert_array_equal(changed.decodable, result.folds != 0)


def test_a_fold_with_one_class_is_excluded_and_counted():
    acts, _ = activations([1.0], rows=60)
    labels = np.zeros(60, dtype=int)
    labels[:3] = 1
    result = fit_probes(acts, labels, np.arange(60), shuffles=4, seed=0)
    assert result.excluded_folds == 2
    assert np.isnan(result.fold_auroc[0]).sum() == 2
    assert result.auroc[0] == pytest.approx(np.nanmean(result.fold_auroc[0]))
    assert np.isfinite(result.null).all()
    assert np.isfinite(result.margins).all()


def test_constant_features_and_tiny_penalties_keep_their_ranking():
    acts, labels = activations([1.0], features=5)
    acts = np.concatenate([acts, np.full((1, 80, 2), 0.1, dtype=np.float32)], axis=2)
    strong = fit_probes(acts, labels, np.arange(80), shuffles=0, penalty=1e-8, seed=0)
    assert strong.auroc[0] > 0.7
    nothing = fit_probes(np.full((1, 80, 3), 0.1), labels, np.arange(80), shuffles=3, allow_constant=True, seed=0)
    assert nothing.auroc.tolist() == [0.5]
    assert nothing.p_value.tolist() == [1.0]


def test_p_values_are_honest_under_the_null():
    """Labels that say nothing: a level-0.1 test rejects about one study in ten, for one layer and for the maximum."""
    rng = np.random.default_rng(0)
    studies = 100
    results = [
        fit_probes(rng.normal(size=(3, 40, 6)), rng.permutation(40) % 2, np.arange(40), shuffles=19, seed=seed)
        for seed in range(studies)
    ]
    slack = 3 * np.sqrt(0.1 * 0.9 / studies)
    assert abs(np.mean([result.p_value[0] <= 0.1 for result in results]) - 0.1) < slack
    assert abs(np.mean([result.p_max <= 0.1 for result in results]) - 0.1) < slack
    # The best layer judged as if it had been the only one is not honest.
    assert np.mean([result.p_value.min() <= 0.1 for result in results]) > 0.15
    # Held-out labels are shuffled independently of training labels: the null is centred on 0.5.
    assert np.mean([result.null.mean() for result in results]) == pytest.approx(0.5, abs=0.01)


ACTS, LABELS = activations([0.0])
GROUPS = np.arange(80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ACTS[0]}, r"features has shape \(80, 30\); needed one axis each for \[layer, row, feature\]"),
        ({"features": np.zeros((0, 80, 3))}, r"features is empty \(shape \(0, 80, 3\)\)"),
        (
            {"features": np.full((2, 80, 3), np.nan)},
            "features holds 240 values that are not finite at layer 0, first in row 0",
        ),
        ({"labels": LABELS[:-1]}, "labels has 79 rows and features has 80"),
        ({"labels": LABELS * 2 - 1}, "labels holds the values -1, 1; only 0 and 1 are allowed"),
        ({"labels": np.ones(80)}, "all 80 labels are 1; a probe needs rows of both classes"),
        ({"groups": GROUPS[:-1]}, "groups has 79 rows and features has 80"),
        ({"groups": np.zeros(80)}, r"1 groups in 80 rows; 5 folds need at least 5 groups"),
        ({"folds": 1}, "folds is 1; cross-validation needs at least 2"),
        ({"penalty": 0.0}, r"penalty \(C\) is 0; it must be above 0"),
        ({"shuffles": -1}, "shuffles is -1; it must be 0 or more"),
        ({"features": np.where(np.arange(80)[:, None] == 7, np.inf, ACTS)}, "30 values .* at layer 0, first in row 7"),
        (
            {"features": np.stack([ACTS[0], np.full((80, 30), 2.5)])},
            r"all 30 features are the same in all 80 rows at layer 1 .*one token .*allow_constant=True",
        ),
        ({"member": "forest"}, "member is 'forest'; allowed: logistic, ridge, mean_difference"),
        ({"member": "mean_difference", "penalty": 0.1}, "penalty is 0.1 .*mean_difference has no penalty"),
        ({"penalty": [0.1, -1.0]}, r"penalty \(C\) is -1; it must be above 0"),
        ({"penalty": []}, r"penalty has shape \(0,\)"),
        ({"inner_folds": 3}, r"inner_folds is 3 with one penalty \(1\)"),
        ({"penalty": [0.1, 1.0], "folds": 2}, "2 folds leave 1 for the inner folds"),
        ({"penalty": [0.1, 1.0], "inner_folds": 5}, "5 folds leave 4 .* inner_folds is 5"),
        ({"strata": np.zeros(79)}, "strata has 79 rows and features has 80"),
        ({"strata": np.arange(80)}, "no label can be exchanged"),
        ({"held_out": np.arange(80) % 2}, "held-out unit 0 has label 0 on all its 40 rows"),
        ({"held_out": np.zeros(80)}, "held_out holds 1 unit"),
        ({"held_out": np.arange(80) // 40, "folds": 3}, "held_out and folds each say what the folds are"),
        ({"assigned": np.arange(80) % 7, "folds": 5}, "assigned holds 7 folds and folds is 5"),
        ({"assigned": np.arange(80) % 5, "groups": np.arange(80) // 2}, "assigned puts 40 of 40 groups into more than"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    arguments = {"features": ACTS, "labels": LABELS, "groups": GROUPS, "seed": 0} | changes
    with pytest.raises(ProbeError, match=message) as caught:
        fit_probes(**arguments)
    assert "\n" not in str(caught.value)


def test_results_do_not_depend_on_threads_and_the_limit_is_put_back():
    acts, labels = activations([0.1, 0.3, 0.5])

    def allowed():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    results = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"):
            before = allowed()
            results.append(fit_probes(acts, labels, np.arange(80), shuffles=5, seed=0))
            with pytest.raises(ProbeError):
                fit_probes(np.full_like(acts, np.nan), labels, np.arange(80), seed=0)
            assert allowed() == before
    np.testing.assert_array_equal(results[0].margins, results[1].margins)
    np.testing.assert_array_equal(results[0].null, results[1].null)


def test_an_error_in_one_layer_reaches_the_caller():
    def work(index):
        if index == 2:
            raise ConvergenceError("layer 2")

    with pytest.raises(ConvergenceError, match="layer 2"):
        for_each(5, work)


def test_inputs_are_left_as_they_were():
    acts, labels = activations([0.5])
    before = acts.copy()
    reading = Reading(acts, labels, np.arange(80))
    fit_probes(acts, labels, np.arange(80), readings={"same": reading}, penalty=[0.1, 1.0], shuffles=2, seed=0)
    np.testing.assert_array_equal(acts, before)
