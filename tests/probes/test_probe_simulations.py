"""Simulated studies: probes find nothing in random labels, and intervals hold the truth as often as they say.

The truth is known exactly. Activations are normal with the same spread in both classes, so a probe with weights w on a
difference of means δ has the AUROC Φ(w·δ / sqrt(2 w·w)) on fresh rows. The weights of each fold's probe are what it says
when it reads the unit vectors, less what it says of zero; scikit-learn's weights are the independent check.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, norm
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from probes.controls import auroc_interval, contrast, first_layer_interval, minimum_detectable_auroc
from probes.linear import Reading, fit_probes

FEATURES = 24


def noise(rng, studies, groups, per_group, features=FEATURES):
    """Unit noise [study, row, feature]; rows of one instance share half of their variance."""
    shared = np.repeat(rng.normal(size=(studies, groups, features)), per_group, axis=1)
    own = rng.normal(size=shared.shape)
    return shared if per_group == 1 else np.sqrt(0.5) * (shared + own)


def fitted(strengths, rows, *, per_group=1, features=FEATURES, seed=0, shared=0.0, shuffles=0):
    """Return probes of one study a layer, the AUROC on fresh rows of each [layer], weights and activations.

    `shared` is the part of the noise variance that all layers have in common.
    """
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(rows // per_group), per_group)
    labels = groups % 2
    assigned = groups // 2 % 5
    strengths = np.asarray(strengths, dtype=float)
    acts = np.sqrt(1 - shared) * noise(rng, len(strengths), rows // per_group, per_group, features)
    acts += np.sqrt(shared) * noise(rng, 1, rows // per_group, per_group, features)
    direction = rng.normal(size=features)
    direction /= np.linalg.norm(direction)
    acts += strengths[:, None, None] * np.outer(labels - 0.5, direction)
    # Each fold's probe reads zero and the unit vectors, as rows of an instance that it held out.
    units = np.vstack([np.zeros(features), np.eye(features)])
    reading = Reading(
        features=np.repeat(np.tile(units, (5, 1))[None], len(strengths), axis=0),
        labels=np.arange(5 * len(units)) % 2,
        groups=np.repeat(2 * np.arange(5), len(units)),
    )
    result = fit_probes(
        acts, labels, groups, assigned=assigned, readings={"units": reading}, shuffles=shuffles, seed=seed
    )
    said = result.readings["units"].margins.reshape(len(strengths), 5, len(units))
    weights = said[:, :, 1:] - said[:, :, :1]
    size = np.linalg.norm(weights, axis=2)
    truth = norm.cdf(strengths[:, None] * (weights @ direction) / (np.sqrt(2) * size))
    return result, truth.mean(axis=1), weights, acts


def coverage(strength, rows, *, studies, directions=None, **options):
    """Return the share of simulated studies whose 95 % interval holds the truth, and the mean truth."""
    held, truths = [], []
    for seed in range(0, studies, 50):
        result, truth, *_ = fitted([strength] * 50, rows, seed=seed, **options)
        found = auroc_interval(result, directions=directions)
        held.append((found.low <= truth) & (truth <= found.high))
        truths.append(truth)
    return np.mean(held), np.mean(truths)


def random_studies(studies, *, per_group=1, stratified=None, seed=0):
    """Return p_max of studies of 4 layers whose labels say nothing about an instance."""
    found = []
    for study in range(studies):
        rng = np.random.default_rng([seed, study])
        groups = np.repeat(np.arange(60 // per_group), per_group)
        acts = noise(rng, 4, len(np.unique(groups)), per_group)
        options = {}
        if stratified is None:
            labels = rng.permutation(np.arange(len(np.unique(groups))) % 2)[groups]
        else:
            # Two sizes of problem, plainly visible in the activations, with more of one answer in each.
            size = groups % 2
            labels = (rng.random(60) < np.where(size == 1, 0.85, 0.15)).astype(int)
            acts[:, :, 0] += 3 * size
            options = {"strata": size} if stratified else {}
        result = fit_probes(acts, labels, groups, shuffles=39, seed=study, **options)
        found.append(result.p_max)
    return np.array(found)


def most(studies, chance=0.05):
    """The most false positives that a test of size `chance` shows in 99 of 100 simulations of this many studies."""
    return binom.ppf(0.99, studies, chance)


def test_the_truth_is_that_of_the_studys_own_probes():
    result, _, weights, acts = fitted([1.0, 2.0], 60, per_group=2)
    for layer in range(2):
        for fold in range(5):
            training = result.folds != fold
            scaler = StandardScaler().fit(acts[layer, training])
            probe = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000)
            probe.fit(scaler.transform(acts[layer, training]), result.labels[training])
            np.testing.assert_allclose(weights[layer, fold], probe.coef_[0] / scaler.scale_, atol=1e-3)


@pytest.mark.parametrize("per_group", [1, 2])
def test_random_labels_are_not_decodable_in_a_few_studies(per_group):
    assert (random_studies(40, per_group=per_group) <= 0.05).sum() <= most(40)


def test_intervals_hold_the_truth_in_a_few_studies():
    share, truth = coverage(2.0, 60, studies=100, directions=FEATURES)
    assert 0.8 < truth < 0.86
    assert binom.ppf(0.005, 100, 0.95) <= 100 * share


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"per_group": 2}, {"stratified": True}], ids=["one row", "two rows", "strata"])
def test_random_labels_are_decodable_in_one_study_of_twenty(options):
    """p_max takes steps of 1/40, so p_max <= 0.05 has chance 0.05 exactly; at most 37 of 500 in 99 of 100 runs."""
    assert most(500) == 37
    p_values = random_studies(500, seed=1, **options)
    assert (p_values <= 0.05).sum() <= most(500)
    # Not by being blind: p-values are about uniform, so half lie below one half.
    assert 0.4 < (p_values <= 0.5).mean() < 0.6


@pytest.mark.slow
def test_shuffles_that_ignore_strata_find_what_is_not_there():
    assert (random_studies(60, stratified=False) <= 0.05).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strength", "rows", "around", "options"),
    [
        (0.6, 60, 0.55, {}),
        (1.4, 60, 0.72, {}),
        (2.9, 60, 0.94, {}),
        (3.3, 60, 0.97, {}),
        (2.0, 60, 0.83, {"per_group": 2}),
        (3.2, 60, 0.95, {"per_group": 2}),
        (2.4, 60, 0.78, {"features": 150}),
        (0.6, 200, 0.58, {}),
        (2.0, 200, 0.89, {}),
        (2.6, 200, 0.94, {"per_group": 2}),
        (0.8, 400, 0.67, {}),
        (2.9, 400, 0.97, {}),
    ],
)
def test_intervals_cover_between_93_and_97_percent(strength, rows, around, options):
    share, truth = coverage(strength, rows, studies=1000, directions=options.get("features", FEATURES), **options)
    assert truth == pytest.approx(around, abs=0.03)
    assert 0.93 <= share <= 0.97, f"{share:.3f} at a mean truth of {truth:.3f}"


@pytest.mark.slow
def test_first_layers_and_contrasts_cover():
    """Over layers that share most of their noise. First layers are whole numbers, so their intervals cover more."""
    profile, first_held, differences_held = [0.0, 0.3, 1.0, 2.0, 2.8, 3.3], [], []
    for seed in range(200):
        result, truth, *_ = fitted(profile, 60, seed=seed, shared=0.6)
        found = first_layer_interval(result, threshold=0.85, resamples=400, directions=FEATURES, seed=seed)
        reached = np.flatnonzero(truth >= 0.85)
        first = reached[0] if len(reached) else np.inf
        ends = [np.inf if end is None else end for end in (found.low, found.high)]
        first_held.append(ends[0] <= first <= ends[1])
        before, after = (select(result, layers) for layers in ([0, 2, 3], [1, 3, 4]))
        change = contrast(before, after, resamples=400, directions=FEATURES, seed=seed)
        actual = truth[[1, 3, 4]] - truth[[0, 2, 3]]
        differences_held.append((change.low <= actual) & (actual <= change.high))
    assert np.mean(first_held) >= 0.93
    assert ((np.mean(differences_held, axis=0) >= 0.91) & (np.mean(differences_held, axis=0) <= 0.99)).all()


@pytest.mark.slow
def test_a_study_finds_the_auroc_that_it_was_said_to_find():
    theta = minimum_detectable_auroc(30, 30, directions=FEATURES, power=0.8)
    found, truths = [], []
    for seed in range(10):
        result, truth, *_ = fitted([1.6] * 30, 60, shuffles=99, seed=seed)
        found.append(result.p_value <= 0.05)
        truths.append(truth)
    assert np.mean(truths) == pytest.approx(theta, abs=0.02)
    # Power is measured on 300 studies, about 2 points either way.
    assert 0.73 <= np.mean(found) <= 0.87, f"{np.mean(found):.3f}"


class _Selected:
    """Some layers of a result, under the names that `probes.controls` reads."""

    def __init__(self, result, layers):
        self.margins = result.margins[layers]
        self.labels, self.folds, self.groups = result.labels, result.folds, result.groups


def select(result, layers):
    """Return the margins of `layers` of one result, as a result of their own."""
    return _Selected(result, layers)
