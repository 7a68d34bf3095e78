"""Statements of probability operators, as values and as a short notation.

A statement says something about how likely propositions are: ``Pr(a)`` (probably), ``Might(a)``, ``Must(a)``, ``a >= b``
(at least as likely as), ``if(a, b)``, ``Pr(if(a, b))``; a ``~`` ahead of one denies it. A proposition is an atom, or
``~p``, ``p & q``, ``p | q`` (no parentheses: ``~`` binds tightest, then ``&``, then ``|``).

Both are nested tuples, so that they can be compared, cached and built by hand: a proposition is ``"a"``,
``("not", p)``, ``("and", p, q)`` or ``("or", p, q)``; a statement is ``("Pr", p)``, ``("Might", p)``, ``("Must", p)``,
``("geq", p, q)``, ``("if", p, q)``, ``("Pr-if", p, q)`` or ``("deny", statement)``. What a statement means is for
:mod:`tasks.modals_oracle` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.contracts import TaskError

Proposition = Any  # str or a nested tuple, as above
Statement = tuple[Any, ...]

EXPECTED = "expected Pr(p), Might(p), Must(p), p >= q, if(p, q) or Pr(if(p, q)), with ~ ahead to deny it"

_UNARY = re.compile(r"(Pr|Might|Must)\((.+)\)")
_IF = re.compile(r"if\(([^,]+),([^,]+)\)")
_ATOM = re.compile(r"[a-z]\w*")


def statement(text: str) -> Statement:
    """The statement that a schema writes.

    Raises:
        TaskError: not the notation.
    """
    said = text.strip()
    if ">=" in said:
        first, second = (part.strip() for part in said.split(">=", 1))
        return ("geq", proposition(first), proposition(second))
    if said.startswith("~"):
        return ("deny", statement(said[1:]))
    conditional = _IF.fullmatch(said)
    if conditional:
        return ("if", *map(proposition, conditional.groups()))
    unary = _UNARY.fullmatch(said)
    if unary is None:
        raise TaskError(f"can't read the schema {text!r}: {EXPECTED}")
    inner = _IF.fullmatch(unary[2].strip())
    if inner and unary[1] == "Pr":
        return ("Pr-if", *map(proposition, inner.groups()))
    return (unary[1], proposition(unary[2]))


def proposition(text: str) -> Proposition:
    """The proposition that a schema writes.

    Raises:
        TaskError: not the notation.
    """
    said = text.strip()
    for sign, word in (("|", "or"), ("&", "and")):
        first, found, rest = said.partition(sign)
        if found:
            return (word, proposition(first), proposition(rest))
    if said.startswith("~"):
        return ("not", proposition(said[1:]))
    if not _ATOM.fullmatch(said):
        raise TaskError(f"can't read {text!r} in a schema: a proposition is an atom, ~p, p & q or p | q")
    return said


def atoms(statements: Sequence[Statement]) -> tuple[str, ...]:
    """The atoms, in order of first appearance."""
    found: dict[str, None] = {}
    for one in statements:
        _collect(one[1:], found)
    return tuple(found)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The statement or proposition with other atoms."""
    if isinstance(value, str):
        return names[value]
    return (value[0], *(renamed(part, names) for part in value[1:]))


def _collect(parts: Sequence[Any], found: dict[str, None]) -> None:
    for part in parts:
        if isinstance(part, str):
            found.setdefault(part)
        else:
            _collect(part[1:], found)
