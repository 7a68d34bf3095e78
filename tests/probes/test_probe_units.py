"""Held-out units, given folds and strata: nothing of an instance leaks, and labels never cross what they may not."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from probes.errors import ProbeError
from probes.folds import group_codes, shuffled_labels, training_rows
from probes.linear import fit_probes


def instances(count=60, *, seed=0):
    """Two rows an instance, in two of four relations, with one random label and one fingerprint."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), 2)
    labels = np.repeat(rng.permutation(count) % 2, 2)
    first = np.arange(count) % 4
    # One in three instances occurs in two relations.
    second = np.where(np.arange(count) % 3 == 0, (first + 1) % 4, first)
    units = np.array(["before", "in", "left", "over"])[np.stack([first, second], axis=1).ravel()]
    prints = rng.normal(size=(count, 300))[groups] + 0.01 * rng.normal(size=(2 * count, 300))
    return prints, labels, groups, units


def test_one_fold_a_unit_and_a_feature_that_names_the_instance_does_not_help():
    prints, labels, groups, units = instances(160)
    result = fit_probes(prints[None], labels, groups, held_out=units, shuffles=0, seed=0)
    assert result.units == ("before", "in", "left", "over")
    assert [result.units[fold] for fold in result.folds] == units.tolist()
    assert result.auroc[0] < 0.65
    assert "4 folds, one a held-out unit" in result.method
    # The control: trained on the other rows of the same instances, the probe recognises them.
    spanning = np.array([len(set(units[groups == group])) == 2 for group in groups])
    right = []
    for unit in result.units:
        train, test = units != unit, (units == unit) & spanning
        probe = make_pipeline(StandardScaler(), LogisticRegression()).fit(prints[train], labels[train])
        right.append((probe.predict(prints[test]) == labels[test]).mean())
    assert np.mean(right) > 0.95


def test_training_sides_equal_scikit_learn_without_the_units_own_groups():
    prints, labels, groups, units = instances()
    result = fit_probes(prints[None], labels, groups, held_out=units, shuffles=0, seed=0)
    for unit in result.units:
        test = units == unit
        train = ~np.isin(groups, groups[test])
        assert train.sum() < (~test).sum()
        probe = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-10, max_iter=100_000))
        decision = probe.fit(prints[train], labels[train]).decision_function(prints[test])
        np.testing.assert_allclose(result.margins[0, test], decision, atol=1e-3)


def test_fully_crossed_units_leave_nothing_to_train_on():
    groups, units = np.repeat(np.arange(20), 2), np.tile(["a", "b"], 20)
    labels = np.repeat(np.arange(20) % 2, 2)
    with pytest.raises(ProbeError, match=r"held-out unit 'a' leaves 0 training rows .*through readings"):
        fit_probes(np.zeros((1, 40, 3)) + np.arange(40)[:, None], labels, groups, held_out=units, seed=0)


def test_a_unit_that_holds_a_class_whole_is_named():
    units = np.array(["a"] * 20 + ["b"] * 20)
    with pytest.raises(ProbeError, match="held-out unit 'b' has label 1 on all its 20 rows"):
        fit_probes(
            np.random.default_rng(0).normal(size=(1, 40, 3)),
            np.where(units == "b", 1, np.arange(40) % 2),
            np.arange(40),
            held_out=units,
            seed=0,
        )


def test_given_folds_are_used_as_they_are():
    acts = np.random.default_rng(0).normal(size=(1, 60, 8))
    labels, groups = np.arange(60) % 2, np.arange(60) // 2 * 2 + np.arange(60) % 2
    dealt = fit_probes(acts, labels, groups, folds=4, shuffles=3, seed=0)
    again = fit_probes(acts, labels, groups, assigned=dealt.folds, shuffles=3, seed=0)
    np.testing.assert_array_equal(again.margins, dealt.margins)
    np.testing.assert_array_equal(again.null, dealt.null)
    assert "4 folds as given" in again.method
    # Rows of some of the folds only, whose names need not begin at 0.
    rows = np.isin(dealt.folds, (1, 3))
    some = fit_probes(
        acts[:, rows], labels[rows], groups[rows], assigned=dealt.folds[rows], folds=4, shuffles=0, seed=0
    )
    np.testing.assert_array_equal(some.folds, (dealt.folds[rows] == 3).astype(int))


def sets_of(labels, groups, assigned, strata, shuffles=100):
    return shuffled_labels(
        np.asarray(labels),
        group_codes(groups),
        np.asarray(assigned),
        shuffles=shuffles,
        strata=group_codes(strata),
        seed=0,
    )


def test_labels_never_cross_strata_or_folds():
    rng = np.random.default_rng(0)
    strata, assigned = np.repeat(["a", "b", "c"], 40), np.tile(np.arange(4), 30)
    labels = (rng.random(120) < np.repeat([0.2, 0.5, 0.8], 40)).astype(int)
    sets = sets_of(labels, np.arange(120), assigned, strata)
    free = shuffled_labels(labels, np.arange(120), assigned, shuffles=100, seed=0)
    for fold in range(4):
        for name in "abc":
            cell = (assigned == fold) & (strata == name)
            assert (sets[cell].sum(axis=0) == labels[cell].sum()).all()
    assert (sets != labels[:, None]).any(axis=0).all()
    assert len(set(free[strata == "a"].sum(axis=0))) > 1  # the control: without strata they do cross


def test_strata_that_carry_the_label_are_in_the_null():
    """A layer that reads the stratum, of which the label is mostly made: real, but no more than the stratum says."""
    rng = np.random.default_rng(0)
    strata = np.arange(200) % 2
    labels = (rng.random(200) < np.where(strata == 1, 0.85, 0.15)).astype(int)
    acts = (strata[:, None] * 3.0 + rng.normal(size=(200, 4)))[None]
    free, within = (
        fit_probes(acts, labels, np.arange(200), strata=cells, shuffles=60, seed=0) for cells in (None, strata)
    )
    assert free.p_max < 0.05
    assert within.p_max > 0.05
    assert within.null.mean() > 0.7
    assert "over groups within strata" in within.method


def test_a_group_with_both_labels_in_two_strata_exchanges_in_each_of_them():
    """An instance asked forwards and backwards, yes in one and no in the other."""
    groups, strata = np.repeat(np.arange(20), 2), np.tile(["forward", "backward"], 20)
    flipped = np.repeat(np.arange(20) % 2, 2)
    labels, assigned = np.tile([0, 1], 20) ^ flipped, groups // 10
    sets = sets_of(labels, groups, assigned, strata)
    assert (sets != labels[:, None]).any(axis=0).all()
    for name in ("forward", "backward"):
        for fold in (0, 1):
            cell = (strata == name) & (assigned == fold)
            assert (sets[cell].sum(axis=0) == labels[cell].sum()).all()


def test_a_one_label_group_in_several_units_moves_whole():
    _, labels, groups, units = instances(40)
    assigned = group_codes(units)
    sets = shuffled_labels(labels, groups, assigned, shuffles=30, seed=0)
    for group in range(40):
        rows = sets[groups == group]
        assert (rows == rows[0]).all()
    for fold in range(4):
        assert (sets[assigned == fold].sum(axis=0) == labels[assigned == fold].sum()).all()
    assert (sets != labels[:, None]).any(axis=0).all()


def test_training_rows_need_both_classes_after_groups_are_left_out():
    groups = np.array([0, 0, 1, 2, 3, 4])
    labels = np.array([1, 1, 0, 0, 1, 0])
    with pytest.raises(ProbeError, match="fold 0 of 2 leaves 2 training rows and none with label 1"):
        training_rows(np.array([0, 1, 1, 1, 0, 0]), labels, groups)
