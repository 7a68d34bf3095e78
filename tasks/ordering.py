"""Ordering: a total order over n people, told by its n − 1 adjacent comparisons, asked about its two ends.

The rule never changes with n, so n is a pure load parameter. What is varied is the wording (paper 000, §4.1, B.1):

===============  =========================================================================================
``original``     every premise in the forward phrase ("Amy is in front of Bob.")
``equivalent``   m premises re-worded by the converse ("Bob is behind Amy."), names and premises reshuffled
``reshuffled``   the equivalent's order of names and premises, nothing re-worded
``rewritten``    the equivalent's m re-worded premises, in the original's order
===============  =========================================================================================

m is uniform on max(1, ⌊0.2(n−1)⌋) … n−1 and the re-worded positions are uniform over the chain (Protocol P), so phrasing
says nothing about chain position. Question phrase (forward, converse) × gold (yes, no) gives four cells, each once in
every block of four instances.

Two surface clues are ruled out: names and premises are shuffled independently of the order. An instance belongs to a
split by the hash of its order alone, so the splits can't share an order, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks import names as name_pools
from tasks.contracts import (
    SPLITS,
    Grade,
    Instance,
    MatchedSet,
    Message,
    Parameter,
    Parsed,
    Presentation,
    Span,
    Split,
    TaskError,
    latent_key,
)
from tasks.ordering_solver import solve_text
from tasks.parsing import parse_label
from tasks.relations import RELATIONS, Relation, relation_named
from tasks.streams import stream

PRESENTATIONS = ("original", "equivalent", "reshuffled", "rewritten")
CELLS = (("forward", "yes"), ("forward", "no"), ("converse", "yes"), ("converse", "no"))
POOLS = ("census", "builtin", "random")
INSTRUCTION = "Answer with Yes or No only."
LARGEST = 4096
# Below this many orders the chance of drawing one twice matters, so the ones already given are remembered.
SMALL_DOMAIN = 10**9
DRAWS = 2_000


@dataclass(frozen=True, slots=True)
class OrderingParams:
    """Parameters of ordering; see ``Ordering.parameters`` for what each allows."""

    n: int = 8
    relation: str = "front_behind"
    names: str | tuple[str, ...] = "census"
    presentations: tuple[str, ...] = ("original", "equivalent")

    def pool(self) -> tuple[str, ...] | None:
        """The names to draw from; None for random strings, which have no list."""
        if self.names == "census":
            return name_pools.census()
        if self.names == "builtin":
            return name_pools.BUILTIN
        return None if isinstance(self.names, str) else self.names


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything about the renderings that is drawn: orders of names and premises, and what is re-worded."""

    names: tuple[tuple[int, ...], tuple[int, ...]]
    premises: tuple[tuple[int, ...], tuple[int, ...]]
    rewritten: frozenset[int]


class Ordering:
    """The ordering family. Stateless; one object serves all calls."""

    name = "ordering"
    version = 1
    answers: Mapping[str, Sequence[str]] = {
        "yes": ("Yes", " Yes", "yes", " yes", "YES", " YES"),
        "no": ("No", " No", "no", " no", "NO", " NO"),
    }

    def parameters(self) -> tuple[Parameter, ...]:
        default = OrderingParams()
        return (
            Parameter("n", default.n, f"an integer from 2 to {LARGEST}, at most the size of the name pool", None,
                      "number of people in the order"),
            Parameter("relation", default.relation, f"one of {', '.join(RELATIONS)}", tuple(RELATIONS),
                      "vocabulary of the comparisons"),
            Parameter("names", default.names, f"{', '.join(POOLS)}, or a list of names", POOLS,
                      "pool that names are drawn from", takes_list=True),
            Parameter("presentations", list(default.presentations),
                      f"'original' first, then any of {', '.join(PRESENTATIONS[1:])}, each once", PRESENTATIONS,
                      "renderings of each instance", takes_list=True),
        )  # fmt: skip

    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        checked = _checked(params)
        values = asdict(checked)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]:
        """Matched sets without end, or until every order of a small pool has been given.

        Raises:
            TaskError: a bad parameter or split, at the call; an exhausted pool, at the item that can't be drawn.
        """
        checked = _checked(params)
        if split not in SPLITS:
            raise TaskError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise TaskError(f"bad seed {seed!r}: give an integer of at least 0")
        return self._generate(checked, seed, split)

    def _generate(self, params: OrderingParams, seed: int, split: Split) -> Iterator[MatchedSet]:
        relation = relation_named(params.relation)
        pool = params.pool()
        small = pool is not None and math.perm(len(pool), params.n) < SMALL_DOMAIN
        source = params.names if isinstance(params.names, str) else list(params.names)
        name = (self.name, self.version, split, params.n, source, seed)
        given: set[str] = set()
        cells: list[tuple[str, str]] = []
        index = 0
        while True:
            if index % len(CELLS) == 0:
                cells = list(CELLS)
                stream(*name, index // len(CELLS), "cells").shuffle(cells)
            phrase, gold = cells[index % len(CELLS)]
            order, key = _draw_order(stream(*name, index, "order"), params, pool, split, (phrase, gold), given)
            if small:
                given.add(key)
            latent = {"order": order, "phrase": phrase, "gold": gold}
            instance = Instance(
                family=self.name,
                key=key,
                params={"n": params.n, "relation": params.relation, "names": source},
                latent=latent,
                gold=gold,
                cell=f"{phrase}-{gold}",
                split=split,
            )
            layout = _draw_layout(stream(*name, index, "layout"), params.n)
            presentations = tuple(_render(kind, relation, order, phrase, gold, layout) for kind in params.presentations)
            yield MatchedSet(instance, presentations)
            index += 1

    def parse(
        self,
        response: str,
        presentation: Presentation,
        *,
        finish_reason: str | None = None,
        prompt_opened_think: bool = False,
    ) -> Parsed:
        return parse_label(response, finish_reason=finish_reason, prompt_opened_think=prompt_opened_think)

    def grade(self, parsed: Parsed, presentation: Presentation) -> Grade:
        if parsed.status != "parsed":
            return Grade(correct=False, score=0.0, detail=f"no answer: {parsed.status} ({parsed.rule})")
        correct = parsed.value == presentation.gold
        return Grade(correct, float(correct), f"answered {parsed.value}, gold {presentation.gold}")

    def verify(self, matched: MatchedSet) -> Mapping[str, str]:
        relation = relation_named(matched.instance.params["relation"])
        return {p.kind: solve_text(p.messages[-1].content, relation) for p in matched.presentations}


def _checked(params: Mapping[str, Any]) -> OrderingParams:
    known = {"n", "relation", "names", "presentations"}
    for key in params:
        if key not in known:
            raise TaskError(f"ordering has no parameter {key!r}: choose from {', '.join(sorted(known))}")
    given = dict(params)
    for key in ("names", "presentations"):
        if isinstance(given.get(key), (list, tuple)):
            given[key] = tuple(given[key])
    if isinstance(given.get("presentations"), str):
        given["presentations"] = (given["presentations"],)
    checked = OrderingParams(**given)
    if isinstance(checked.n, bool) or not isinstance(checked.n, int) or not 2 <= checked.n <= LARGEST:
        raise TaskError(f"n is {checked.n!r}: give an integer from 2 to {LARGEST}")
    relation_named(checked.relation)
    _check_names(checked)
    _check_presentations(checked.presentations)
    return checked


def _check_names(params: OrderingParams) -> None:
    if isinstance(params.names, str):
        if params.names not in POOLS:
            allowed = ", ".join(POOLS)
            raise TaskError(f"unknown name pool {params.names!r}: choose {allowed}, or give a list of names")
    elif not isinstance(params.names, tuple):
        raise TaskError(f"names is {params.names!r}: choose {', '.join(POOLS)}, or give a list of names")
    else:
        for value in params.names:
            # Letters only: the solver reads names back from the text, and a name must not look like a phrase.
            if not isinstance(value, str) or not value.isalpha() or value.lower() in {"is", "yes", "no"}:
                raise TaskError(f"bad name {value!r} in names: a name is one word of letters, not is, yes or no")
        if len(set(params.names)) != len(params.names):
            twice = next(value for value in params.names if params.names.count(value) > 1)
            raise TaskError(f"name {twice!r} stands twice in names: each name may occur once")
    pool = params.pool()
    if pool is not None and params.n > len(pool):
        raise TaskError(
            f"n is {params.n} but the name pool has {len(pool)} names: lower n, or use names=census or names=random"
        )


def _check_presentations(kinds: tuple[str, ...]) -> None:
    if not kinds or not isinstance(kinds, tuple):
        raise TaskError(f"presentations is {kinds!r}: give a list of {', '.join(PRESENTATIONS)}")
    for kind in kinds:
        if kind not in PRESENTATIONS:
            raise TaskError(f"unknown presentation {kind!r}: choose from {', '.join(PRESENTATIONS)}")
    if kinds[0] != "original" or len(set(kinds)) != len(kinds):
        raise TaskError(f"presentations is {', '.join(kinds)}: 'original' comes first and none stands twice")


def _draw_order(
    draws: random.Random,
    params: OrderingParams,
    pool: tuple[str, ...] | None,
    split: Split,
    cell: tuple[str, str],
    given: set[str],
) -> tuple[list[str], str]:
    """An order of this split that was not given before with this question, and its instance key."""
    for _ in range(DRAWS):
        order = name_pools.random_names(draws, params.n) if pool is None else draws.sample(pool, params.n)
        if _split_of(order) != split:
            continue
        key = latent_key(Ordering.name, {"order": order, "phrase": cell[0], "gold": cell[1]})
        if key not in given:
            return order, key
    raise TaskError(
        f"no new order after {DRAWS} draws at n={params.n} in the {split} split; {len(given)} were given: "
        "ask for fewer sets, a larger n or a larger name pool"
    )


def _split_of(order: Sequence[str]) -> Split:
    """Half of all orders are for training, a quarter each for validation and test."""
    digest = hashlib.sha256(json.dumps(order, separators=(",", ":")).encode()).digest()
    return ("train", "train", "validation", "test")[digest[0] % 4]


def _draw_layout(draws: random.Random, n: int) -> _Layout:
    """Drawn whole, in one fixed order, so that no presentation depends on which others are rendered."""

    def shuffled(count: int) -> tuple[int, ...]:
        return tuple(draws.sample(range(count), count))

    names = (shuffled(n), shuffled(n))
    premises = (shuffled(n - 1), shuffled(n - 1))
    count = draws.randint(max(1, (n - 1) // 5), n - 1)
    return _Layout(names, premises, frozenset(draws.sample(range(n - 1), count)))


def _render(
    kind: str, relation: Relation, order: Sequence[str], phrase: str, gold: str, layout: _Layout
) -> Presentation:
    version = 1 if kind in ("equivalent", "reshuffled") else 0
    rewritten = layout.rewritten if kind in ("equivalent", "rewritten") else frozenset()
    parts: list[str] = []
    spans: list[Span] = []
    length = 0

    def add(text: str, label: str | None = None) -> None:
        nonlocal length
        if label is not None:
            spans.append(Span(label, length, length + len(text)))
        parts.append(text)
        length += len(text)

    add(f"{relation.scene}: ")
    for place, entity in enumerate(layout.names[version]):
        if place:
            add(", ")
        add(order[entity], f"name:{order[entity]}")
    add(".\n\n")
    for link in layout.premises[version]:
        add(relation.premise(order[link], order[link + 1], rewritten=link in rewritten), f"premise:{link}")
        add("\n")
    add("\n")
    # Forward-yes and converse-no ask from the first to the last; the other two cells ask the other way round.
    ends = (order[0], order[-1]) if (phrase == "forward") == (gold == "yes") else (order[-1], order[0])
    add(relation.question(*ends, phrase=phrase), "query")
    add(f" {INSTRUCTION}")
    meta = {"rewritten": sorted(rewritten), "premises": list(layout.premises[version])}
    return Presentation(kind, (Message("user", "".join(parts)),), gold, tuple(spans), meta)
