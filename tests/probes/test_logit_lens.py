"""The lens on plain arrays: equal to the formula, last layer equal to the model, answer layer by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from probes.errors import ProbeError
from probes.lens import answer_layer, lens


@dataclass
class Read:
    logit: np.ndarray
    logsumexp: np.ndarray


HEAD = np.random.default_rng(1).normal(size=(8, 20))
RESID = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)


def unembed(rows):
    """Normalise, project to 20 tokens; "yes" is tokens 4 and 7, "no" token 5."""
    vocabulary = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True)) @ HEAD
    yes = logsumexp(vocabulary[:, [4, 7]], axis=1)
    return Read(np.stack([yes, vocabulary[:, 5]], axis=1), logsumexp(vocabulary, axis=1))


def test_equals_the_whole_vocabulary_formula():
    result = lens(RESID, unembed)
    for layer in range(3):
        rows = RESID[layer] / np.sqrt(np.square(RESID[layer]).mean(axis=1, keepdims=True))
        chance = softmax(rows @ HEAD, axis=1)
        yes, no = chance[:, [4, 7]].sum(axis=1), chance[:, 5]
        np.testing.assert_allclose(result.difference[layer], np.log(yes / no), atol=1e-5)
        np.testing.assert_allclose(result.off_label_mass[layer], 1 - yes - no, atol=1e-6)
    assert result.difference.shape == result.off_label_mass.shape == (3, 6)
    assert result.logit.shape == (3, 6, 2)
    assert result.n == 6


def test_final_gap_is_relative_to_the_models_own_logits():
    result = lens(RESID, unembed)
    own = unembed(RESID[-1]).logit
    assert result.final_gap(own) < 1e-6
    assert result.final_gap(own * 1.01) == pytest.approx(0.01 / 1.01, rel=1e-3)
    with pytest.raises(ProbeError, match=r"logit has shape \(6,\) and the lens \(6, 2\)"):
        result.final_gap(own[:, 0])


def test_off_label_mass_stays_a_probability():
    result = lens(RESID, lambda rows: Read(np.zeros((6, 2)), np.full(6, np.log(2) - 1e-9)))
    np.testing.assert_array_equal(result.off_label_mass, 0.0)


def test_answer_layer_is_the_last_change_of_sign():
    difference = np.array([[1, -1, 1, 0, -2.0], [-1, -1, 1, 5, np.nan], [2, 1, 1, 3, -1], [1, -1, 1, 0, -1]])
    np.testing.assert_array_equal(answer_layer(difference), [2, 3, 0, np.nan, 2])
    np.testing.assert_array_equal(lens(RESID, unembed).answer_layer, answer_layer(lens(RESID, unembed).difference))
    assert np.isnan(answer_layer(np.array([[1.0], [np.nan]]))[0])


@pytest.mark.parametrize(
    ("resid", "read", "message"),
    [
        (RESID[0], unembed, r"resid has shape \(6, 8\)"),
        (RESID, lambda rows: Read(np.zeros((6, 1)), np.zeros(6)), "unembed gives 1 label"),
        (RESID, lambda rows: Read(np.zeros((5, 2)), np.zeros(6)), r"unembed\(...\).logit has 5 rows and resid has 6"),
        (RESID, lambda rows: Read(np.zeros((6, 2)), np.zeros((6, 1))), r"unembed\(...\).logsumexp has shape \(6, 1\)"),
    ],
)
def test_bad_input_is_one_line(resid, read, message):
    with pytest.raises(ProbeError, match=message) as caught:
        lens(resid, read)
    assert "\n" not in str(caught.value)
