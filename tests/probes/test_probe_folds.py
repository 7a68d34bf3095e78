"""Groups stay whole, training sides hold both classes, shuffles keep each fold's classes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from probes.errors import ProbeError
from probes.folds import assign_folds, group_codes, scorable, shuffled_labels

LABELS = np.tile([0, 1], 30)


def test_a_group_lies_in_one_fold_and_classes_are_balanced():
    groups = np.repeat(np.arange(30), 2)
    labels = np.repeat(np.arange(30) % 2, 2)
    assigned = assign_folds(labels, groups, folds=5, stratified=True, seed=0)
    for group in range(30):
        assert len(set(assigned[groups == group])) == 1
    assert [labels[assigned == fold].mean() for fold in range(5)] == [0.5] * 5


def test_folds_follow_the_seed():
    first, again, other = (
        assign_folds(LABELS, np.arange(60), folds=5, stratified=True, seed=seed).tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_unstratified_folds_ignore_labels():
    shifted = np.roll(LABELS, 1)
    first, second = (
        assign_folds(labels, np.arange(60), folds=5, stratified=False, seed=0).tolist() for labels in (LABELS, shifted)
    )
    assert first == second


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        (LABELS, np.arange(60) % 4, "4 groups in 60 rows; 5 folds need at least 5 groups"),
        (np.arange(60) == 7, np.arange(60), r"label 1 occurs in 1 of 60 groups \(60 rows\)"),
    ],
)
def test_too_little_to_fold(labels, groups, message):
    with pytest.raises(ProbeError, match=message) as caught:
        assign_folds(labels.astype(np.int64), groups, folds=5, stratified=True, seed=0)
    assert "\n" not in str(caught.value)


def test_a_class_held_out_whole_is_an_error():
    labels = (np.arange(20) < 4).astype(np.int64)
    groups = np.repeat(np.arange(10), 2)
    with pytest.raises(ProbeError, match=r"all rows with label 1 fall into fold \d of 2"):
        # GroupKFold of equal groups alternates, so the two positive groups 0 and 2 land together.
        assign_folds(np.isin(groups, (0, 2)).astype(np.int64), groups, folds=2, stratified=False, seed=0)
    assert assign_folds(labels, groups, folds=2, stratified=True, seed=0).max() == 1


def test_folds_without_a_class_are_told_without_a_warning():
    labels = (np.arange(40) < 3).astype(np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assigned = assign_folds(labels, np.arange(40), folds=5, stratified=True, seed=0)
    assert scorable(labels, assigned, folds=5).sum() == 3


def test_fewer_than_two_scorable_folds_are_refused():
    with pytest.raises(ProbeError, match="1 of 3 folds hold both classes"):
        scorable(np.array([0, 1, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 2]), folds=3)


@pytest.mark.parametrize("names", [["b", "a", "b"], [7, 3, 7], np.array(["y", "x", "y"])])
def test_groups_may_be_any_names(names):
    assert group_codes(names).tolist() == [1, 0, 1]


def shuffle(labels, groups, assigned, shuffles=200):
    return shuffled_labels(np.asarray(labels), group_codes(groups), np.asarray(assigned), shuffles=shuffles, seed=3)


def test_shuffles_keep_the_classes_of_each_fold():
    assigned = np.arange(60) // 12
    sets = shuffle(LABELS, np.arange(60), assigned)
    assert (sets != LABELS[:, None]).any(axis=0).all()
    for fold in range(5):
        assert (sets[assigned == fold].sum(axis=0) == LABELS[assigned == fold].sum()).all()
    # Every row meets both labels about equally often.
    assert np.abs(sets.mean(axis=1) - 0.5).max() < 0.15


def test_rows_of_a_one_label_group_stay_together():
    groups = np.repeat(np.arange(20), [1, 3] * 10)
    labels = np.repeat(np.arange(20) // 2 % 2, [1, 3] * 10)
    sets = shuffle(labels, groups, groups // 10)
    for group in range(20):
        rows = sets[groups == group]
        assert (rows == rows[0]).all()
    assert (sets != labels[:, None]).any()


def test_a_group_with_both_labels_shuffles_within_itself():
    groups = np.repeat(np.arange(10), 3)
    labels = np.tile([1, 0, 0], 10)
    sets = shuffle(labels, groups, groups % 2)
    for group in range(10):
        assert (sets[groups == group].sum(axis=0) == 1).all()
        assert set(map(tuple, sets[groups == group].T)) == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


def test_a_shuffle_does_not_depend_on_how_many_follow():
    few, many = (shuffle(LABELS, np.arange(60), np.arange(60) % 5, shuffles=count) for count in (5, 50))
    np.testing.assert_array_equal(few, many[:, :5])
