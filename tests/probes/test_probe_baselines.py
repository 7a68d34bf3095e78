"""Surface baselines: counts equal to a plain loop, ready for probes, and they catch a label that the surface gives away."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer

from probes.baselines import bag_of_tokens, prompt_length
from probes.errors import ProbeError
from probes.linear import fit_probes

PROMPTS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=8), min_size=1, max_size=8)


@given(PROMPTS)
def test_counts_equal_a_plain_loop(ids):
    counts = [Counter(row) for row in ids]
    varying = [token for token in range(7) if len({count[token] for count in counts}) > 1]
    expected = np.array([[count[token] for token in varying] for count in counts]).reshape(len(ids), -1)
    found = bag_of_tokens(ids)
    assert found.dtype == np.float32
    if varying:
        np.testing.assert_array_equal(found[0], expected)
    else:
        np.testing.assert_array_equal(found, np.zeros((1, len(ids), 1)))


def test_equals_scikit_learn_up_to_constant_columns():
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 150_000, size=rng.integers(5, 60)).tolist() + [7] for _ in range(40)]
    texts = [" ".join(str(token) for token in row) for row in ids]
    vectoriser = CountVectorizer(token_pattern=r"\d+")
    table = vectoriser.fit_transform(texts).toarray()
    order = np.argsort([int(name) for name in vectoriser.get_feature_names_out()])
    table = table[:, order]
    np.testing.assert_array_equal(bag_of_tokens(ids)[0], table[:, np.ptp(table, axis=0) > 0])


def test_the_order_of_tokens_says_nothing_and_lengths_are_counted():
    ids = [[5, 9, 5, 2], [2, 5, 9, 5], [9], [1_000_000_000, 2]]
    bags = bag_of_tokens(ids)
    np.testing.assert_array_equal(bags[0, 0], bags[0, 1])
    assert bags.shape == (1, 4, 4)
    np.testing.assert_array_equal(prompt_length(ids), np.array([4, 4, 1, 2])[None, :, None])
    assert prompt_length(ids).dtype == np.float32


def test_a_label_that_the_surface_gives_away_is_found_and_one_that_it_does_not_is_not():
    rng = np.random.default_rng(3)
    labels = np.arange(80) % 2
    filler = [rng.integers(100, 140, size=20).tolist() for _ in labels]
    by_word = [row + [7 + int(label)] for row, label in zip(filler, labels, strict=True)]
    by_length = [row + [3] * int(2 * label) for row, label in zip(filler, labels, strict=True)]
    by_order = [row + ([7, 8] if label else [8, 7]) for row, label in zip(filler, labels, strict=True)]

    def area(features, **options):
        return fit_probes(features, labels, np.arange(80), shuffles=39, seed=0, **options)

    assert area(bag_of_tokens(by_word)).auroc[0] > 0.99
    assert area(prompt_length(by_length)).auroc[0] == 1.0
    assert area(bag_of_tokens(by_order)).p_max > 0.05
    # Every prompt has the same length, so the one feature is constant and ties every row.
    assert area(prompt_length(by_order), allow_constant=True).auroc[0] == 0.5


@pytest.mark.parametrize("build", [bag_of_tokens, prompt_length])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "ids holds 0 prompts"),
        ([[1], []], r"ids of row 1 have shape \(0,\); needed a list of at least one token id"),
        ([[[1, 2]], [3]], r"ids of row 0 have shape \(1, 2\)"),
        ([[1.0, 2.5]], "ids of row 0 hold float64 values; token ids are whole numbers"),
        ([["yes"]], "ids of row 0 hold <U3 values"),
    ],
)
def test_bad_input_is_one_line(build, ids, message):
    with pytest.raises(ProbeError, match=message) as caught:
        build(ids)
    assert "\n" not in str(caught.value)
