"""Definite programs whose goal has exactly one proof, of a chosen depth and size, and its near misses.

Problem. Whether an atom follows from a program should be found by following rules and by nothing cheaper. A program that
proves its goal and one that doesn't differ in something, and a model may learn to see that something instead.

Mechanism. A program is a set of *trees*. In a tree every inner atom is the head of exactly one rule, the bodies hold
inner atoms one level down and *leaves*, and leaves are given as facts. So the root has one proof, which uses every rule
of the tree, and its depth is the height of the tree. One tree belongs to the goal. The others, the decoys, have roots of
their own, and share leaves with it.

Each tree has a *pivot*: a leaf that no other rule uses, in a rule whose body has leaves only. Taking the fact of the
pivot away cuts the tree at this one point: all rules stay, also the one for the root, and no other proof comes in. Trees
and pivots are drawn before the gold answer counts; then

* gold yes: the goal's tree is whole and the first decoy is cut;
* gold no: the goal's tree is cut and the first decoy is whole;
* every further decoy is cut or whole by the toss of a coin.

Which of the trees is asked about is thus the only thing that tells the two apart: the numbers of facts, of rules, of
atoms that nothing derives, the sizes of bodies and the uses of any atom have the same distribution under both answers,
and so has what the goal's own rule and the rule with the missing fact look like.

What is left:

* With decoys, that the goal's rule and the one with the missing fact belong to one tree or to two. That is the question
  itself, but it can be answered by tracing upwards from the one atom that nothing derives.
* A first decoy that is smaller than the goal's tree (less than half of the rules are distractors) may be lower, too, or
  have its missing fact nearer to its root. The fewer its rules, the fewer have to be followed up from a missing fact to
  tell which of the two lacks it: with one rule (n = 4 with a quarter of distractors) none, with two (n = 8) one. From
  half of the rules on, the two trees are of one size and height, and nothing of this is left.
* At depth 1, the goal's own rule shows the missing fact, as it has to.
* Without decoys (no distractors), only a negative program has an atom in a body that is neither fact nor head, and a
  fact that no rule uses, which takes the place of the missing one so that the number of facts still says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LARGEST_BODY = 3
# Chance that a leaf is one that another rule uses already.
SHARED = 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """``head`` holds if every atom of ``body`` does."""

    head: int
    body: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Facts and rules in the order in which they are told. Atoms are numbered from 0; atom 0 is the goal.

    Attributes:
        proof: places of the rules that belong to the goal's proof, cut or not.
        pivot: place of the rule whose fact is missing in the goal's proof; None if the goal is derived.
    """

    atoms: int
    facts: tuple[int, ...]
    rules: tuple[Rule, ...]
    proof: tuple[int, ...]
    pivot: int | None

    goal = 0


def derived(facts: Iterable[int], rules: Sequence[Rule]) -> set[int]:
    """Every atom that follows, by forward chaining: the oracle. Linear in the size of the program."""
    known = set(facts)
    uses: dict[int, list[int]] = {}
    missing: list[int] = []
    todo = list(known)
    for place, rule in enumerate(rules):
        body = set(rule.body)
        missing.append(len(body))
        for atom in body:
            uses.setdefault(atom, []).append(place)
    while todo:
        for place in uses.get(todo.pop(), ()):
            missing[place] -= 1
            head = rules[place].head
            if missing[place] == 0 and head not in known:
                known.add(head)
                todo.append(head)
    return known


def least_depth(rules: int) -> int:
    """Height of the lowest tree with this many rules: level k has at most 3^k of them."""
    depth, room = 1, 1
    while room < rules:
        room = room * LARGEST_BODY + 1
        depth += 1
    return depth


def draw_program(draws: random.Random, *, rules: int, proof_rules: int, depth: int, positive: bool) -> Program:
    """A program of ``rules`` rules, of which ``proof_rules`` make up the goal's proof, which is ``depth`` rules deep.

    What is drawn doesn't depend on ``positive``, apart from the fact that is taken away.

    Args:
        depth: from ``least_depth(proof_rules)`` to ``proof_rules``.
    """
    # Atoms 0 … rules - 1 are the heads, in the order of the rules as they are drawn; leaves come after them.
    bodies: list[list[int]] = []
    leaves: list[int] = []
    pivots: list[int] = []
    intact: list[bool] = []
    for size in _tree_sizes(rules, proof_rules):
        height = min(max(depth, least_depth(size)), size)
        slots = _grow(draws, bodies, size, height)
        # Drawn from the rules, not from their leaves: a rule with more leaves must not be cut more often, or its size
        # would tell in how large a tree it is.
        bottom = [rule for rule in dict.fromkeys(slots) if not bodies[rule]]
        pivots.append(bottom[_below(draws, len(bottom))])
        slots.remove(pivots[-1])
        leaves += slots
        intact.append(draws.random() < 0.5)
    intact[0] = positive
    if len(intact) > 1:
        intact[1] = not positive

    # In random order, so that the atoms of early trees are not the ones that are shared most.
    _shuffle(draws, leaves)
    atoms = rules
    facts: list[int] = []
    for rule in leaves:
        body = bodies[rule]
        atom = facts[_below(draws, len(facts))] if facts and draws.random() < SHARED else atoms
        if atom == atoms or atom in body:
            atom = atoms
            facts.append(atom)
            atoms += 1
        body.append(atom)
    for rule, whole in zip(pivots, intact, strict=True):
        bodies[rule].append(atoms)
        if whole:
            facts.append(atoms)
        atoms += 1
    if len(intact) == 1 and not positive:
        # No rule uses it. Without a decoy nothing else can make up for the missing fact.
        facts.append(atoms)
        atoms += 1

    order = list(range(rules))
    _shuffle(draws, order)
    _shuffle(draws, facts)
    for body in bodies:
        _shuffle(draws, body)
    return Program(
        atoms=atoms,
        facts=tuple(facts),
        rules=tuple(Rule(rule, tuple(bodies[rule])) for rule in order),
        proof=tuple(place for place, rule in enumerate(order) if rule < proof_rules),
        pivot=None if positive else order.index(pivots[0]),
    )


def _tree_sizes(rules: int, proof_rules: int) -> list[int]:
    """The goal's tree, then decoys of the same size, and a smaller one with the rules that are left."""
    sizes = []
    left = rules
    while left:
        sizes.append(min(left, proof_rules))
        left -= sizes[-1]
    return sizes


def _grow(draws: random.Random, bodies: list[list[int]], size: int, height: int) -> list[int]:
    """Append the bodies of a tree, inner atoms only. Returns the rules with room for leaves, once for each leaf.

    A chain of ``height`` rules gives the depth. Each further rule then derives an atom for the body of a rule that is
    drawn from the places free above the bottom level, so the height stays as it is.
    """
    root = len(bodies)
    level = list(range(height))
    free: list[int] = []
    for rule in range(root, root + height):
        inner = rule - root < height - 1
        bodies.append([rule + 1] if inner else [])
        if inner:
            free += [rule] * (LARGEST_BODY - 1)
    for rule in range(root + height, root + size):
        place = _below(draws, len(free))
        parent = free[place]
        free[place] = free[-1]
        free.pop()
        bodies[parent].append(rule)
        bodies.append([])
        level.append(level[parent - root] + 1)
        if level[-1] < height - 1:
            free += [rule] * LARGEST_BODY
    slots: list[int] = []
    for rule in range(root, root + size):
        inner_atoms = len(bodies[rule])
        least = max(1, inner_atoms)
        slots += [rule] * (least + _below(draws, LARGEST_BODY - least + 1) - inner_atoms)
    return slots


def _shuffle(draws: random.Random, items: list[int]) -> None:
    for last in range(len(items) - 1, 0, -1):
        place = _below(draws, last + 1)
        items[last], items[place] = items[place], items[last]


def _below(draws: random.Random, count: int) -> int:
    """An integer below ``count``. Several times as fast as ``randrange``, and ``random()`` is the same in every Python."""
    return int(draws.random() * count)
