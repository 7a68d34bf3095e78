"""Does a conclusion follow, whatever the probabilities are?

A premise or conclusion limits how likely propositions are. An inference is valid if no probability measure over the
assignments of its atoms makes the premises true and the conclusion false. Each statement is one linear inequality over
the measure (two atoms: four probabilities that add up to 1):

=======================  ============================================================================================
``Pr(p)``                P(p) > 1/2, or P(p) ≥ 1/2 (``threshold``)
``Might(p)``             P(p) > 0
``Must(p)``              P(p) = 1
``p >= q``               P(p) ≥ P(q)
``if(p, q)``             P(p and not q) = 0: asserted without a hedge, it holds for certain. The material conditional and
                         the conditional probability agree about this one
``Pr(if(p, q))``         see ``embedded`` below
=======================  ============================================================================================

So validity is a question of linear programming, and a small one: it is answered exactly, in fractions. The inequalities,
with ≥ in place of >, cut a polytope out of the simplex. Its corners are found by trying all choices of tight inequalities.
A measure that meets every strict inequality too exists if and only if each of them is strict at some corner: the mean of
such corners meets all at once, and is returned as the counter-model.

What probably means and what a conditional means is open, so a :class:`Reading` says it:

==============  =====================================================================================================
``threshold``   ``above`` (P > 1/2) or ``at_least`` (P ≥ 1/2)
``embedded``    "probably, if p then q": ``held`` (the conditional is held, probably hedges the saying of it:
                P(p and not q) = 0), ``material`` (p → q is probable) or ``ratio`` (P(q | p) is above the threshold)
``disjunction`` ``inclusive``, or ``exclusive`` (one and not both)
``conditional`` ``certain``, or ``probable``: an unhedged conditional is only probable, as a material one
==============  =====================================================================================================

``RECORDED`` is the reading that the declared validities of family modals rest on. ``COMMITMENTS`` names what it decides
that a reader could decide otherwise, each with the readings that go without it.

Constraints. Three atoms at most, since the corners of a larger simplex are many. P(q | p) with P(p) = 0 is taken to
be above no threshold and at least every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from typing import Literal, NamedTuple

from tasks.contracts import TaskError
from tasks.modals_schema import Proposition, Statement, atoms

LARGEST = 3
HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Reading:
    """What is open about the meaning of the words; see the module's table."""

    threshold: Literal["above", "at_least"] = "above"
    embedded: Literal["held", "material", "ratio"] = "held"
    disjunction: Literal["inclusive", "exclusive"] = "inclusive"
    conditional: Literal["certain", "probable"] = "certain"


RECORDED = Reading()
COMMITMENTS: Mapping[str, tuple[Reading, ...]] = {
    "strict": (replace(RECORDED, threshold="at_least"),),
    "certain_conditional": (replace(RECORDED, conditional="probable"),),
    "held_conditional": (replace(RECORDED, embedded="material"), replace(RECORDED, embedded="ratio")),
    "inclusive_or": (replace(RECORDED, disjunction="exclusive"),),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the conclusion follows; if not, a measure under which it is false and the premises true.

    ``counter`` gives the probability of each assignment, named by the atoms that are true in it ("a b", "" for none).
    ``consistent``: some measure makes the premises true.
    """

    follows: bool
    consistent: bool
    counter: Mapping[str, Fraction] | None


class Bound(NamedTuple):
    """``weights · P ≥ least``, or ``>`` if strict; a weight for each assignment."""

    weights: tuple[Fraction, ...]
    least: Fraction
    strict: bool


@lru_cache(maxsize=4096)
def decide(premises: tuple[Statement, ...], conclusion: Statement, reading: Reading = RECORDED) -> Verdict:
    """Judge one inference under one reading.

    Raises:
        TaskError: more than three atoms.
    """
    names = atoms((*premises, conclusion))
    if len(names) > LARGEST:
        raise TaskError(f"the inference has {len(names)} atoms: the oracle judges up to {LARGEST}")
    worlds = tuple(product((True, False), repeat=len(names)))
    given = [_bound(one, names, worlds, reading) for one in premises]
    counter = _measure([*given, _denied(_bound(conclusion, names, worlds, reading))])
    if counter is None:
        return Verdict(True, _measure(given) is not None, None)
    called = [" ".join(name for name, true in zip(names, world, strict=True) if true) for world in worlds]
    return Verdict(False, True, dict(zip(called, counter, strict=True)))


# --- what statements say ---------------------------------------------------------------------------------------------


def _bound(one: Statement, names: Sequence[str], worlds: Sequence[tuple[bool, ...]], reading: Reading) -> Bound:
    word = one[0]
    if word == "deny":
        return _denied(_bound(one[1], names, worlds, reading))

    def chance(said: Proposition) -> tuple[Fraction, ...]:
        return tuple(Fraction(_holds(said, dict(zip(names, world, strict=True)), reading)) for world in worlds)

    first = chance(one[1])
    above = reading.threshold == "above"
    if word == "Pr":
        return Bound(first, HALF, above)
    if word == "Might":
        return Bound(first, Fraction(0), True)
    if word == "Must":
        return Bound(first, Fraction(1), False)
    second = chance(one[2])
    if word == "geq":
        return Bound(tuple(p - q for p, q in zip(first, second, strict=True)), Fraction(0), False)
    # A conditional: P(p and not q) is 0, or the conditional is probable as a whole, or q is within p.
    broken = tuple(p * (1 - q) for p, q in zip(first, second, strict=True))
    certain = reading.conditional == "certain" if word == "if" else reading.embedded == "held"
    if certain:
        return Bound(tuple(-one for one in broken), Fraction(0), False)
    if word == "if" or reading.embedded == "material":
        return Bound(tuple(1 - one for one in broken), HALF, above)
    kept = tuple(p * q for p, q in zip(first, second, strict=True))
    return Bound(tuple(k - b for k, b in zip(kept, broken, strict=True)), Fraction(0), above)


def _holds(said: Proposition, world: Mapping[str, bool], reading: Reading) -> bool:
    if isinstance(said, str):
        return world[said]
    if said[0] == "not":
        return not _holds(said[1], world, reading)
    first, second = (_holds(part, world, reading) for part in said[1:])
    if said[0] == "and":
        return first and second
    return first != second if reading.disjunction == "exclusive" else first or second


def _denied(bound: Bound) -> Bound:
    return Bound(tuple(-weight for weight in bound.weights), -bound.least, not bound.strict)


# --- whether a measure meets them ------------------------------------------------------------------------------------


def _measure(bounds: Sequence[Bound]) -> tuple[Fraction, ...] | None:
    """A probability for each assignment that meets all bounds, or None if there is none."""
    count = len(bounds[0].weights)
    nonnegative = [
        Bound(tuple(Fraction(i == place) for i in range(count)), Fraction(0), False) for place in range(count)
    ]
    every = [*nonnegative, *bounds]
    corners = [corner for tight in combinations(every, count - 1) if (corner := _corner(tight, every)) is not None]
    if not corners:
        return None
    chosen = []
    for bound in bounds:
        if bound.strict:
            inside = next((corner for corner in corners if _value(bound, corner) > bound.least), None)
            if inside is None:
                return None
            chosen.append(inside)
    used = chosen or corners[:1]
    return tuple(sum(one, Fraction(0)) / len(used) for one in zip(*used, strict=True))


def _corner(tight: Sequence[Bound], every: Sequence[Bound]) -> tuple[Fraction, ...] | None:
    """The one point where these bounds are equalities and the probabilities add up to 1, if it meets all bounds."""
    count = len(tight) + 1
    rows = [[Fraction(1)] * (count + 1), *([*bound.weights, bound.least] for bound in tight)]
    for place in range(count):
        pivot = next((row for row in range(place, count) if rows[row][place]), None)
        if pivot is None:
            return None
        rows[place], rows[pivot] = rows[pivot], rows[place]
        lead = rows[place][place]
        rows[place] = [value / lead for value in rows[place]]
        for row in range(count):
            factor = rows[row][place]
            if row != place and factor:
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    point = tuple(row[-1] for row in rows)
    return point if all(_value(bound, point) >= bound.least for bound in every) else None


def _value(bound: Bound, point: Sequence[Fraction]) -> Fraction:
    return sum((weight * one for weight, one in zip(bound.weights, point, strict=True)), Fraction(0))
