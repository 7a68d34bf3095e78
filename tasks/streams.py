"""Random streams keyed by what is drawn, not by when.

``Random(seed + index)`` makes neighbouring seeds share items, and one generator passed along a loop makes item *i*
depend on everything drawn before it. Here each draw has a name: the family, its version, the split, the latent
parameters, the seed, the index and a purpose. The name is hashed into the state of a fresh generator. Consequences:

* item *i* is the same whether 100 or 1,000 are asked for, and whichever presentations are rendered;
* adding a new kind of draw (a new purpose) leaves all others as they were.

Python's Mersenne Twister is used because its core output is guaranteed across versions; the golden hashes in the tests
would show a change in the derived methods.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any


def stream(*name: Any) -> random.Random:
    """A generator of its own for the draw with this name.

    Args:
        *name: JSON values (strings, integers, lists, dictionaries) that identify the draw.
    """
    return random.Random(int.from_bytes(hashlib.sha256(f"[{_canonical(name)}]".encode()).digest(), "big"))


class Streams:
    """Streams whose names begin alike: ``Streams(a, b)(c, d)`` gives what ``stream(a, b, c, d)`` gives.

    The beginning is hashed once, and one generator serves all draws, seeded anew for each: a stream ends where the next
    one is asked for. Half of the time of a short item would otherwise go into making generators.
    """

    def __init__(self, *prefix: Any) -> None:
        self._prefix = hashlib.sha256(f"[{_canonical(prefix)},".encode())
        self._draws = random.Random(0)

    def __call__(self, index: int, purpose: str) -> random.Random:
        """The stream of one item's draw. ``purpose`` is a plain word, which JSON writes as it stands."""
        state = self._prefix.copy()
        state.update(f'{index},"{purpose}"]'.encode())
        self._draws.seed(int.from_bytes(state.digest(), "big"))
        return self._draws


def shuffled(draws: random.Random, count: int) -> list[int]:
    """0 … count−1 in a uniformly random order.

    Sorting by random keys takes a third of the time of ``random.sample``, and needs nothing but ``random()``, the one
    method whose output Python promises not to change. Two keys of 53 bits are never equal in practice.
    """
    draw = draws.random
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _canonical(name: tuple[Any, ...]) -> str:
    """The values as JSON, in one spelling, without the brackets around them."""
    return json.dumps(name, sort_keys=True, separators=(",", ":"), ensure_ascii=True)[1:-1]
