"""Pools of names.

The entities of a problem need names that carry no information about the answer. Pools of people differ in how familiar
a name is to a model, and relations about things have a pool of their own:

* ``BUILTIN``: 24 very common names, each with another first letter, for examples and tests that people read;
* ``census()``: 2,500 names of the US Census of 1990 (``data/README.md`` tells how they were chosen);
* ``objects()``: everyday things (a list of this project's own);
* ``random_names``: strings of five letters that a model has no associations with.

Every name is one word of letters, and none is "yes" or "no", so that an answer can't be mistaken for a name.
"""

from __future__ import annotations

import random as random_module
import string
from collections.abc import Collection
from functools import lru_cache
from importlib.resources import files

from tasks.contracts import TaskError

BUILTIN: tuple[str, ...] = (
    "Amy", "Bob", "Carl", "Dana", "Eve", "Frank", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mary", "Nick", "Olga", "Paul", "Rosa", "Sam", "Tina", "Ursula", "Vera", "Wendy", "Yvonne", "Zelda",
)  # fmt: skip

RANDOM_LENGTH = 5
# How many strings there are to draw from, near enough.
RANDOM_SIZE = 26**RANDOM_LENGTH
# Far below 26**5 = 11,881,376, so that drawing without repeats stays one draw a name.
RANDOM_LIMIT = 1_000_000


@lru_cache(maxsize=1)
def census() -> tuple[str, ...]:
    """The 2,500 most frequent first names of the 1990 census sample, in alphabetical order. Read once."""
    text = files("tasks").joinpath("data", "first_names.txt").read_text(encoding="ascii")
    return tuple(text.split())


@lru_cache(maxsize=1)
def objects() -> tuple[str, ...]:
    """Everyday objects, one noun each, in alphabetical order. Read once."""
    text = files("tasks").joinpath("data", "objects.txt").read_text(encoding="ascii")
    return tuple(text.split())


def random_names(random: random_module.Random, count: int, *, taken: Collection[str] = ()) -> list[str]:
    """Five-letter strings with one capital, all different, none of them a census name or ``taken``.

    The first names do not depend on ``count``: a longer list starts with the shorter one.

    Args:
        random: generator to draw from; the same state gives the same names.
        count: how many, 0 to 1,000,000.
        taken: names that are in use.
    """
    if not 0 <= count <= RANDOM_LIMIT:
        raise TaskError(f"asked for {count} random names: ask for 0 to {RANDOM_LIMIT:,}")
    known = _census_set()
    used = set(taken)
    names: list[str] = []
    while len(names) < count:
        name = "".join([random.choice(string.ascii_lowercase) for _ in range(RANDOM_LENGTH)]).capitalize()
        if name not in used and name not in known:
            used.add(name)
            names.append(name)
    return names


@lru_cache(maxsize=1)
def _census_set() -> frozenset[str]:
    return frozenset(census())
