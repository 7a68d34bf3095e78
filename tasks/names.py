"""Pools of first names.

The entities of a problem need names that carry no information about the answer. Three pools differ in how familiar a
name is to a model:

* ``BUILTIN``: 24 very common names, each with another first letter, for examples and tests that people read;
* ``census()``: 2,500 names of the US Census of 1990 (``data/README.md`` tells how they were chosen);
* ``random_names``: strings of five letters that a model has no associations with.

Every name is one word of letters, and none is "yes" or "no", so that an answer can't be mistaken for a name.
"""

from __future__ import annotations

import random as random_module
import string
from functools import lru_cache
from importlib.resources import files

from tasks.contracts import TaskError

BUILTIN: tuple[str, ...] = (
    "Amy", "Bob", "Carl", "Dana", "Eve", "Frank", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo",
    "Mary", "Nick", "Olga", "Paul", "Rosa", "Sam", "Tina", "Ursula", "Vera", "Wendy", "Yvonne", "Zelda",
)  # fmt: skip

RANDOM_LENGTH = 5
# Far below 26**5 = 11,881,376, so that drawing without repeats stays one draw a name.
RANDOM_LIMIT = 1_000_000


@lru_cache(maxsize=1)
def census() -> tuple[str, ...]:
    """The 2,500 most frequent first names of the 1990 census sample, in alphabetical order. Read once."""
    text = files("tasks").joinpath("data", "first_names.txt").read_text(encoding="ascii")
    return tuple(text.split())


def random_names(random: random_module.Random, count: int) -> list[str]:
    """Five-letter strings with one capital, all different, none of them a census name.

    The first names do not depend on ``count``: a longer list starts with the shorter one.

    Args:
        random: generator to draw from; the same state gives the same names.
        count: how many, 0 to 1,000,000.
    """
    if not 0 <= count <= RANDOM_LIMIT:
        raise TaskError(f"asked for {count} random names: ask for 0 to {RANDOM_LIMIT:,}")
    taken = set(census())
    names: list[str] = []
    while len(names) < count:
        name = "".join(random.choice(string.ascii_lowercase) for _ in range(RANDOM_LENGTH)).capitalize()
        if name not in taken:
            taken.add(name)
            names.append(name)
    return names
