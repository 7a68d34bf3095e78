"""The penalty is chosen by inner folds: equal to GridSearchCV on the same folds, anew for every label set."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import mean_squared_error, roc_auc_score
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from probes.errors import ProbeError
from probes.folds import shuffled_labels
from probes.linear import fit_probes
from probes.selection import inner_fits

GRID = (1e-3, 1e-2, 1e-1, 1.0)


def study(strengths, rows=80, features=40, *, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    direction = rng.normal(size=features)
    return np.stack(
        [rng.normal(size=(rows, features)) + s * np.outer(labels - 0.5, direction) for s in strengths]
    ), labels


def searched(member, x, y, inner):
    """scikit-learn's choice on one outer training side; `inner` [row] is the inner fold of each row."""
    if member == "logistic":
        estimator, scoring = LogisticRegression(tol=1e-9, max_iter=100_000), "neg_log_loss"
        grid = {"logisticregression__C": GRID}
    else:

        def score(pipeline, rows, labels):
            return -mean_squared_error(2.0 * labels - 1, pipeline.decision_function(rows))

        estimator, scoring = RidgeClassifier(), score
        grid = {"ridgeclassifier__alpha": [1 / penalty for penalty in GRID]}
    search = GridSearchCV(make_pipeline(StandardScaler(), estimator), grid, scoring=scoring, cv=PredefinedSplit(inner))
    search.fit(x, y)
    return search.best_estimator_, GRID[search.best_index_]


@pytest.mark.parametrize("member", ["logistic", "ridge"])
@pytest.mark.parametrize("inner_folds", [None, 2])
def test_equal_to_grid_search_for_real_labels_and_for_every_shuffle(member, inner_folds):
    acts, labels = study([0.0, 0.5])
    groups = np.arange(80)
    result = fit_probes(
        acts, labels, groups, member=member, penalty=GRID[::-1], inner_folds=inner_folds, folds=4, shuffles=3, seed=2
    )
    shuffled = shuffled_labels(labels, groups, result.folds, shuffles=3, seed=2)
    blocks = 3 if inner_folds is None else inner_folds
    chosen = set()
    for layer in range(2):
        areas = np.zeros((4, 4))
        for fold in range(4):
            train, test = result.folds != fold, result.folds == fold
            others = np.array_split([other for other in range(4) if other != fold], blocks)
            inner = np.array([next(i for i, one in enumerate(others) if f in one) for f in result.folds[train]])
            for one, y in enumerate([labels, *shuffled.T]):
                best, penalty = searched(member, acts[layer, train], y[train], inner)
                areas[fold, one] = roc_auc_score(y[test], best.decision_function(acts[layer, test]))
                chosen.add(penalty)
                if one == 0:
                    assert result.chosen_penalty[layer, fold] == penalty
        np.testing.assert_allclose(result.fold_auroc[layer], areas[:, 0], atol=1e-3)
        np.testing.assert_allclose(result.null[:, layer], areas[:, 1:].mean(axis=0), atol=1e-3)
    assert len(chosen) > 1
    assert result.penalty == GRID
    assert f"in {blocks} inner folds, anew for every layer, fold and set" in result.method


def test_one_penalty_equals_a_sequence_of_one():
    acts, labels = study([0.3])
    one, several = (fit_probes(acts, labels, np.arange(80), penalty=p, shuffles=3, seed=0) for p in (0.1, [0.1]))
    np.testing.assert_array_equal(one.margins, several.margins)
    assert one.penalty == several.penalty == 0.1
    assert (one.chosen_penalty == 0.1).all()


def test_inner_fits_never_see_the_fold_they_choose_for_nor_the_rows_they_judge():
    rng = np.random.default_rng(0)
    assigned = rng.integers(0, 5, size=60)
    labels = rng.integers(0, 2, size=(60, 4))
    training = np.stack([assigned != fold for fold in range(5)])
    fits = inner_fits(training, assigned, labels, inner_folds=None)
    assert len(fits) == 10  # every pair of folds, left out once
    seen = set()
    for fit in fits:
        for fold, block, rows in fit.uses:
            assert not (fit.training & (assigned == fold)).any()
            assert not (fit.training & rows).any()
            assert not (rows & (assigned == fold)).any()
            seen.add((fold, block))
    assert seen == {(fold, block) for fold in range(5) for block in range(4)}


def test_groups_that_span_units_are_on_one_side_of_an_inner_fit_too():
    groups = np.repeat(np.arange(40), 2)
    labels = np.tile([0, 1], 40)
    units = np.where(np.arange(80) % 2 == 0, groups % 4, (groups + (groups < 8)) % 4)
    acts = np.random.default_rng(0).normal(size=(1, 80, 5))
    result = fit_probes(acts, labels, groups, held_out=units, penalty=GRID, shuffles=0, seed=0)
    training = np.stack([~np.isin(groups, groups[result.folds == fold]) for fold in range(4)])
    for fit in inner_fits(training, result.folds, labels[:, None], inner_folds=None):
        assert not set(groups[fit.training]) & set(groups[fit.judged])


def test_the_null_with_a_choice_is_centred_on_one_half():
    rng = np.random.default_rng(1)
    means = [
        fit_probes(
            rng.normal(size=(1, 40, 12)), rng.permutation(40) % 2, np.arange(40), penalty=GRID, shuffles=19, seed=seed
        ).null.mean()
        for seed in range(30)
    ]
    assert np.mean(means) == pytest.approx(0.5, abs=4 * np.std(means) / np.sqrt(30))
    assert np.std(means) / np.sqrt(30) < 0.01


def test_an_inner_side_with_one_class_is_one_line():
    labels = np.zeros(30, dtype=int)
    labels[[0, 1]] = 1
    assigned = np.arange(30) % 3  # the two rows of label 1 lie in folds 0 and 1
    acts = np.random.default_rng(0).normal(size=(1, 30, 4))
    labels[2] = 0
    with pytest.raises(ProbeError, match=r"inner folds are impossible: without folds \[0, 1\], 1 of 1 label sets"):
        fit_probes(acts, labels, np.arange(30), assigned=assigned, penalty=GRID, shuffles=0, seed=0)
