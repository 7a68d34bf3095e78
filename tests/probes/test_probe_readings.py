"""Readings: the probe that judges a row did not train on its instance, and the null exchanges labels alike."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from probes.errors import ProbeError
from probes.linear import Reading, fit_probes
from probes.readings import prepare

ROWS = 80


def activations(strengths, rows=ROWS, features=30, *, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 2
    direction = np.random.default_rng(99).normal(size=features)
    return np.stack(
        [rng.normal(size=(rows, features)) + s * np.outer(labels - 0.5, direction) for s in strengths]
    ), labels


def test_readings_equal_scikit_learn_fitted_on_the_same_training_rows():
    """A part of the known instances in another order, and instances that training does not know."""
    acts, labels = activations([0.3, 0.6])
    others, other_labels = activations([0.3, 0.6], seed=1)
    names = np.array([f"item-{i}" for i in range(ROWS)])
    rows = np.random.default_rng(2).permutation(ROWS)[:50]
    read_as = np.where(np.arange(50) < 35, names[rows], np.char.add("new-", names[rows]))
    reading = Reading(others[:, rows], other_labels[rows], read_as)
    result = fit_probes(acts, labels, names, readings={"other": reading}, shuffles=4, seed=3)
    read = result.readings["other"]
    place = dict(zip(names, result.folds, strict=True))
    assert all(read.folds[i] == place[name] for i, name in enumerate(read_as) if name in place)
    for layer in range(2):
        areas = []
        for fold in range(5):
            train, here = result.folds != fold, read.folds == fold
            probe = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-10, max_iter=100_000))
            decision = probe.fit(acts[layer, train], labels[train]).decision_function(others[layer, rows][here])
            np.testing.assert_allclose(read.margins[layer, here], decision, atol=1e-3)
            areas.append(roc_auc_score(other_labels[rows][here], decision))
        np.testing.assert_allclose(read.fold_auroc[layer], areas, atol=1e-3)
        assert read.auroc[layer] == pytest.approx(np.mean(areas), abs=1e-3)
    assert read.n == 50
    assert read.null.shape == (4, 2)


def test_unknown_instances_are_dealt_evenly_over_folds_and_classes():
    acts, labels = activations([0.3])
    reading = Reading(acts, labels, np.arange(ROWS) + 1000)
    folds = fit_probes(acts, labels, np.arange(ROWS), readings={"x": reading}, shuffles=0, seed=0).readings["x"].folds
    for label in (0, 1):
        assert np.bincount(folds[labels == label], minlength=5).tolist() == [8] * 5
    again = fit_probes(acts, labels, np.arange(ROWS), readings={"x": reading}, shuffles=0, seed=1).readings["x"].folds
    assert (folds != again).any()


def test_an_instance_is_never_read_by_a_probe_that_trained_on_it():
    """Every instance has a fingerprint and a random label: only a probe that saw the instance can read it."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(ROWS) % 2
    prints = rng.normal(size=(1, ROWS, 200))
    known = Reading(prints, labels, np.arange(ROWS))
    unknown = Reading(prints, labels, np.arange(ROWS) + 1000)
    read = fit_probes(
        prints, labels, np.arange(ROWS), readings={"known": known, "unknown": unknown}, shuffles=0, seed=0
    ).readings
    assert read["unknown"].auroc[0] > 0.9  # the control: told that the rows are new, it recognises them
    assert read["known"].auroc[0] < 0.7


def test_the_same_rows_read_the_same_and_the_opposite_direction_reads_below_one_half():
    acts, labels = activations([2.0])
    opposite, _ = activations([-2.0])
    result = fit_probes(
        acts,
        labels,
        np.arange(ROWS),
        readings={
            "same": Reading(acts, labels, np.arange(ROWS)),
            "opposite": Reading(opposite, labels, np.arange(ROWS)),
        },
        shuffles=10,
        seed=0,
    )
    same, flipped = result.readings["same"], result.readings["opposite"]
    np.testing.assert_array_equal(same.margins, result.margins)
    np.testing.assert_array_equal(same.null, result.null)
    np.testing.assert_array_equal(same.p_value, result.p_value)
    assert same.p_max == result.p_max
    np.testing.assert_array_equal(same.decodable(result.chosen_layer), result.decodable)
    assert flipped.auroc[0] < 0.2
    assert flipped.decodable(result.chosen_layer).mean() < 0.2
    assert flipped.p_value[0] > 0.9


def prepared(labels, groups, read_labels, read_groups, sets):
    acts = np.zeros((1, len(labels), 1))
    reading = Reading(np.zeros((1, len(read_labels), 1)), read_labels, read_groups)
    assigned = np.asarray(groups) % 2
    return prepare("x", reading, training=acts, groups=groups, assigned=assigned, sets=sets, seed=0)


def test_labels_are_exchanged_as_in_training_if_the_groups_carry_the_same_ones():
    rng = np.random.default_rng(0)
    groups, labels = np.repeat(np.arange(8), 2), np.repeat([0, 0, 1, 1, 0, 0, 1, 1], 2)
    sets = np.concatenate([labels[:, None], np.repeat(rng.integers(0, 2, size=(8, 5)), 2, axis=0)], axis=1)
    got = prepared(labels, groups, [1, 0, 0, 0], [3, 5, 5, 0], sets).sets
    np.testing.assert_array_equal(got, sets[[6, 10, 10, 0]])
    mixed = np.tile([0, 1], 8)
    sets = np.stack([mixed, 1 - mixed], axis=1)
    np.testing.assert_array_equal(prepared(mixed, groups, mixed[:6], groups[:6], sets).sets, sets[:6])


def test_otherwise_its_own_groups_exchange_labels_within_their_fold():
    labels = np.arange(40) // 2 % 2
    sets = np.repeat(labels[:, None], 31, axis=1)
    reversed_labels = 1 - labels
    ready = prepared(labels, np.arange(40), reversed_labels, np.arange(40), sets)
    np.testing.assert_array_equal(ready.sets[:, 0], reversed_labels)
    assert (ready.sets[:, 1:] != reversed_labels[:, None]).any(axis=0).all()
    for fold in (0, 1):
        assert (ready.sets[ready.folds == fold].sum(axis=0) == 10).all()


def test_the_null_of_a_reading_is_centred_on_one_half_for_every_way_to_exchange():
    acts, labels = activations([1.5])
    for shown, groups in [
        (labels, np.arange(ROWS)),
        (1 - labels, np.arange(ROWS)),
        (labels, np.arange(ROWS) + 40),
        (labels, np.arange(ROWS) + 1000),
    ]:
        reading = Reading(acts, shown, groups)
        result = fit_probes(acts, labels, np.arange(ROWS), readings={"x": reading}, shuffles=100, seed=0)
        null = result.readings["x"].null[:, 0]
        assert null.mean() == pytest.approx(0.5, abs=4 * null.std() / 10)


def test_a_reading_with_one_class_has_margins_but_no_auroc():
    acts, labels = activations([2.0])
    ones = np.flatnonzero(labels)
    reading = Reading(acts[:, ones], labels[ones], ones)
    result = fit_probes(acts, labels, np.arange(ROWS), readings={"ones": reading}, shuffles=3, seed=0)
    read = result.readings["ones"]
    assert np.isnan(read.auroc).all()
    assert np.isnan(read.p_value).all()
    assert np.isnan(read.p_max)
    assert read.reason == "no fold of 5 holds both classes (40 rows)"
    np.testing.assert_array_equal(read.margins, result.margins[:, ones])


ACTS, LABELS = activations([0.0])


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (Reading(ACTS[:, :, 1:], LABELS, LABELS), r"readings\['x'\].features has shape \(1, 80, 29\) and features"),
        (Reading(np.repeat(ACTS, 2, axis=0), LABELS, LABELS), r"shape \(2, 80, 30\) and features \(1, 80, 30\)"),
        (Reading(ACTS, LABELS[1:], LABELS), r"readings\['x'\].labels has 79 rows and readings\['x'\].features has 80"),
        (Reading(ACTS, LABELS, LABELS[1:]), r"readings\['x'\].groups has 79 rows"),
        (Reading(ACTS, LABELS + 1, LABELS), r"readings\['x'\].labels holds the values 1, 2; only 0 and 1"),
        (Reading(np.full(ACTS.shape, np.nan), LABELS, LABELS), r"readings\['x'\].features holds 2400 values"),
        (Reading(ACTS, 1 - LABELS, np.arange(80), LABELS[1:]), r"readings\['x'\].strata has 79 rows"),
    ],
)
def test_bad_readings_are_one_line(reading, message):
    with pytest.raises(ProbeError, match=message) as caught:
        fit_probes(ACTS, LABELS, np.arange(80), readings={"x": reading}, seed=0)
    assert "\n" not in str(caught.value)


def test_one_scored_fold_of_several_is_no_mean_and_folds_without_rows_are_not_excluded():
    acts, labels = activations([2.0])
    groups = np.arange(ROWS)
    assigned = groups // 2 % 4
    one = np.flatnonzero((assigned == 0) | ((assigned == 1) & (labels == 1)))
    two = np.flatnonzero((assigned <= 1) | ((assigned == 2) & (labels == 1)))
    whole = np.flatnonzero(assigned == 0)
    readings = {
        name: Reading(acts[:, rows], labels[rows], groups[rows])
        for name, rows in (("one", one), ("two", two), ("whole", whole))
    }
    read = fit_probes(acts, labels, groups, assigned=assigned, readings=readings, shuffles=19, seed=0).readings
    assert np.isnan(read["one"].auroc).all() and np.isnan(read["one"].p_max)
    assert read["one"].reason == "1 of 2 folds with rows holds both classes (30 rows); at least 2 are needed"
    assert not read["one"].above_null.any()
    assert read["two"].auroc[0] > 0.9 and (read["two"].excluded_folds, read["two"].reason) == (1, "")
    # All rows in one fold, as those of a held-out unit: nothing is left out.
    assert read["whole"].auroc[0] > 0.9 and read["whole"].excluded_folds == 0


def test_labels_that_cannot_be_exchanged_within_strata_give_p_1_and_leave_the_probes():
    acts, labels = activations([2.0])
    reading = Reading(acts, 1 - labels, np.arange(ROWS), strata=labels)
    read = fit_probes(-acts, labels, np.arange(ROWS), readings={"x": reading}, shuffles=19, seed=0).readings["x"]
    assert read.auroc[0] > 0.9
    assert read.p_max == 1.0 and not read.above_null.any()
