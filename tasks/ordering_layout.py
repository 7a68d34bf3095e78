"""All that is drawn for an ordering instance: who stands where, in which order things are told, what is re-worded.

Nothing here knows the relation, the protocol, which presentations are asked for, ``rho`` or the prompt: streams are named
by the split, n, the pool, the seed and the index alone, and each draw is made whole, in one fixed order. So one seed
gives the same instances, orders, counts and positions in every vocabulary, and changing one parameter changes nothing
else. Distractors have a stream of their own, so asking for them leaves all other draws as they were.

How many premises are re-worded, m, and which (paper 000, B.1):

* n ≤ 1024: m is uniform on max(1, ⌊0.2(n−1)⌋) … n−1. Protocol L re-words the last m comparisons of the chain;
* n > 1024: Protocol L re-words each comparison with probability ½ (the last one, should the coin spare them all);
* Protocol P takes L's count at uniform positions, so that phrasing says nothing about chain position.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tasks import names as name_pools
from tasks.contracts import Split, TaskError
from tasks.streams import Streams, shuffled

# Below this many orders, 100,000 draws could repeat one by chance (more often than once in 10 million tries), so the
# ones already given are remembered; above it, memory stays constant.
SMALL_DOMAIN = 10**17
DRAWS = 2_000
COINS_ABOVE = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Orders of names and premises, first the original's and then the equivalent's, and what the equivalent re-words."""

    names: tuple[list[int], list[int]]
    premises: tuple[list[int], list[int]]
    rewritten: list[int]


@dataclass(frozen=True, slots=True)
class Distractors:
    """Irrelevant premises: a chain of other entities, and the layout of own and irrelevant ones together.

    In ``layout`` the entities (premises) of the distractors are counted on after those of the instance.
    """

    order: list[str]
    layout: Layout


def pool_size(pool: Sequence[str] | None) -> int:
    """Number of names to draw from; ``None`` stands for random strings."""
    return name_pools.RANDOM_SIZE if pool is None else len(pool)


def is_small(pool: Sequence[str] | None, n: int) -> bool:
    """Whether orders already given have to be remembered."""
    return math.perm(pool_size(pool), min(n, 20)) < SMALL_DOMAIN


def draw_order(
    draws: random.Random,
    *,
    n: int,
    pool: Sequence[str] | None,
    split: Split,
    question: tuple[str, str],
    given: set[int] | None,
) -> tuple[list[str], str]:
    """An order of this split and its instance key; not one of ``given`` with this question, where that is kept.

    ``question`` is the phrase it is asked in and the gold answer. The key is what ``latent_key`` gives, spelled out here
    since building JSON by the general way would take most of the time.

    Raises:
        TaskError: no such order turned up.
    """
    phrase, gold = question
    for _ in range(DRAWS):
        order = sample(draws, pool, n)
        quoted = '["' + '","'.join(order) + '"]'
        if not quoted.isascii():
            quoted = json.dumps(order, separators=(",", ":"))
        if split_of(quoted) != split:
            continue
        latent = f'["ordering",{{"gold":"{gold}","order":{quoted},"phrase":"{phrase}"}}]'
        key = hashlib.sha256(latent.encode()).hexdigest()
        if given is None:
            return order, key
        short = int(key[:15], 16)
        if short not in given:
            given.add(short)
            return order, key
    raise TaskError(
        f"no new order after {DRAWS} draws at n={n} in the {split} split; {len(given or ())} were given: "
        "ask for fewer sets, a larger n or a larger name pool"
    )


def split_of(quoted: str) -> Split:
    """Half of all orders are for training, a quarter each for validation and test; by the order's JSON alone."""
    return ("train", "train", "validation", "test")[hashlib.sha256(quoted.encode()).digest()[0] % 4]


def sample(draws: random.Random, pool: Sequence[str] | None, count: int, *, taken: Collection[str] = ()) -> list[str]:
    """Different names in random order, none of them ``taken``."""
    if pool is None:
        return name_pools.random_names(draws, count, taken=taken)
    if taken:
        pool = [name for name in pool if name not in taken]
    size, draw = len(pool), draws.random
    # A dictionary keeps the first of equal names, in order: as many as are missing are drawn until all differ.
    chosen = {pool[int(draw() * size)]: None for _ in range(count)}
    while len(chosen) < count:
        chosen.update({pool[int(draw() * size)]: None for _ in range(count - len(chosen))})
    return list(chosen)


def draw_layout(draws: random.Random, n: int, *, protocol: str) -> Layout:
    """Layout of an instance. The protocol decides only what is read off the last draw, so all else is shared."""
    links = n - 1
    names = (shuffled(draws, n), shuffled(draws, n))
    premises = (shuffled(draws, links), shuffled(draws, links))
    if n > COINS_ABOVE:
        last = [link for link in range(links) if draws.random() < 0.5] or [links - 1]
        count = len(last)
    else:
        least = max(1, links // 5)
        count = least + int(draws.random() * (links - least + 1))
        last = list(range(links - count, links))
    rewritten = last if protocol == "L" else sorted(shuffled(draws, links)[:count])
    return Layout(names, premises, rewritten)


def draw_distractors(
    draws: random.Random,
    layout: Layout,
    order: Sequence[str],
    *,
    count: int,
    pool: Sequence[str] | None,
    protocol: str,
    chain_names: bool,
) -> Distractors:
    """``count`` irrelevant premises, spread among the instance's own, which keep their relative order.

    The share that is re-worded is that of the own premises, and the positions follow the protocol on the distractors'
    chain: neither share nor position tells which premises matter. A share that is no whole number of premises is rounded
    up or down by a draw, so that it is met on average; always to the nearest, a lone distractor would be re-worded less
    often than an own premise.
    """
    n, links = len(order), len(order) - 1
    others = sample(draws, pool, count + 1, taken=set(order))
    names, premises = [], []
    for version in (0, 1):
        own, other = layout.names[version], [n + entity for entity in shuffled(draws, count + 1)]
        if chain_names:
            own, other = list(range(n)), sorted(other)
        names.append(_merged(draws, own, other))
        premises.append(_merged(draws, layout.premises[version], [links + i for i in shuffled(draws, count)]))
    positions = shuffled(draws, count)
    share, rest = divmod(len(layout.rewritten) * count, links)
    share += draws.random() * links < rest
    uniform = sorted(positions[:share])
    at_end = protocol == "L" and n <= COINS_ABOVE
    rewritten = [links + link for link in (range(count - share, count) if at_end else uniform)]
    both = Layout((names[0], names[1]), (premises[0], premises[1]), [*layout.rewritten, *rewritten])
    return Distractors(others, both)


def _merged(draws: random.Random, own: list[int], other: list[int]) -> list[int]:
    """Both lists in one, every interleaving equally likely."""
    sources = [iter(own), iter(other)]
    which = shuffled(draws, len(own) + len(other))
    return [next(sources[place >= len(own)]) for place in which]


def streams(version: int, *, split: Split, n: int, source: str | Sequence[str], seed: int) -> Streams:
    """The streams of one setting; what is not named here can't change a draw."""
    return Streams("ordering", version, split, n, source if isinstance(source, str) else list(source), seed)
