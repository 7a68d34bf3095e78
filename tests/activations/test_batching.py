"""Batches and padding."""

from __future__ import annotations

import random

import pytest

from activations.batching import batches, pad
from activations.prompts import Prompt


def test_batches_stay_within_the_budget_and_lose_nothing() -> None:
    lengths = [random.Random(7).randint(1, 90) for _ in range(200)]
    made = batches(lengths, 256)
    assert sorted(row for batch in made for row in batch) == list(range(200))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 256 for batch in made)
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in made)
    assert padded < 1.1 * sum(lengths)


def test_batches_depend_on_lengths_alone_and_start_with_the_longest() -> None:
    assert batches([3, 9, 3, 9], 18) == [[1, 3], [0, 2]]
    assert batches([3, 9, 3, 9], 18) == batches((3, 9, 3, 9), 18)


def test_a_prompt_longer_than_the_budget_is_its_own_batch() -> None:
    assert batches([500, 4, 4], 8) == [[0], [1, 2]]
    assert batches([], 8) == []


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens is 0; give a positive number"):
        batches([1], 0)


def test_pad_left() -> None:
    ids, mask, positions = pad([Prompt((5, 6), ""), Prompt((7, 8, 9), "")], "cpu", 0)
    assert ids.tolist() == [[0, 5, 6], [7, 8, 9]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert positions.tolist() == [[0, 0, 1], [0, 1, 2]]


def test_pad_right_and_bare_ids() -> None:
    ids, mask, positions = pad([(5, 6), [7, 8, 9]], "cpu", 1, side="right")
    assert ids.tolist() == [[5, 6, 1], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert positions[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("prompts", [[], [()]])
def test_pad_needs_tokens(prompts: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="each needs a token"):
        pad(prompts, "cpu", 0)


def test_pad_refuses_an_unknown_side() -> None:
    with pytest.raises(ValueError, match="'middle'; use 'left' or 'right'"):
        pad([(1,)], "cpu", 0, side="middle")  # type: ignore[arg-type]
