"""The name pools: what they hold, and that random names are fresh, distinct and repeatable."""

from __future__ import annotations

import random
import re

import pytest

from tasks.contracts import TaskError
from tasks.names import BUILTIN, RANDOM_LIMIT, census, random_names

WORD = re.compile(r"[A-Z][a-z]{1,11}")


def test_census_holds_2500_different_words_in_order() -> None:
    names = census()
    assert len(names) == len(set(names)) == 2500
    assert list(names) == sorted(names)
    assert all(WORD.fullmatch(name) for name in names)


def test_census_is_read_once() -> None:
    assert census() is census()


@pytest.mark.parametrize("name", ["Mary", "James", "Amy", "Christopher", "Bo"])
def test_census_has_frequent_names(name: str) -> None:
    assert name in census()


@pytest.mark.parametrize("word", ["Yes", "No", "Will", "May", "Man", "Wm", "Is", "Not", "In"])
def test_census_lacks_words_that_read_as_something_else(word: str) -> None:
    assert word not in census()


def test_builtin_names_are_common_and_start_with_different_letters() -> None:
    assert len(BUILTIN) == 24
    assert len({name[0] for name in BUILTIN}) == 24
    assert set(BUILTIN) <= set(census())


def test_random_names_are_distinct_new_and_of_five_letters() -> None:
    names = random_names(random.Random(7), 5000)
    assert len(names) == len(set(names)) == 5000
    assert all(re.fullmatch(r"[A-Z][a-z]{4}", name) for name in names)
    assert not set(names) & set(census())


def test_random_names_skip_census_names() -> None:
    class Scripted(random.Random):
        """Spells a census name, then the same new name twice, then another new name."""

        letters = iter("emilyqqqqqqqqqqzzzzz")

        def choice(self, seq: object) -> str:  # type: ignore[override]
            return next(self.letters)

    assert "Emily" in census()
    assert random_names(Scripted(), 2) == ["Qqqqq", "Zzzzz"]


def test_random_names_repeat_with_the_same_seed_and_a_longer_list_starts_with_the_shorter() -> None:
    assert random_names(random.Random(3), 50) == random_names(random.Random(3), 80)[:50]
    assert random_names(random.Random(3), 5) != random_names(random.Random(4), 5)


def test_random_names_are_pinned() -> None:
    assert random_names(random.Random(0), 3) == PINNED


PINNED = ["Mynbi", "Qpmzj", "Plsgq"]


def test_random_names_of_zero() -> None:
    assert random_names(random.Random(0), 0) == []


@pytest.mark.parametrize("count", [-1, RANDOM_LIMIT + 1])
def test_random_names_refuse_a_count_out_of_range(count: int) -> None:
    with pytest.raises(TaskError, match=f"asked for {count} random names"):
        random_names(random.Random(0), count)
