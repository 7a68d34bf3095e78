"""Random generators that are keyed by what they are for.

`default_rng(seed + i)` makes stream i of seed 7 equal to stream 0 of seed 7 + i, so two studies share draws without
knowing it. Here the key is hashed: every (seed, purpose, index) has its own stream, and shuffle 12 is the same labels
whether 20 shuffles are asked for or 2,000.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def generator(seed: int, *key: str | int) -> np.random.Generator:
    """Return the generator of one purpose: `generator(seed, "probes.shuffle", 12)`."""
    digest = hashlib.sha256(json.dumps([int(seed), *key]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
