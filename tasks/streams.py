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
    canonical = json.dumps(name, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return random.Random(int.from_bytes(hashlib.sha256(canonical.encode()).digest(), "big"))
