"""Answers a question about probability operators from its text alone.

The gold answer of a presentation comes from the template's declared validity; that is no check of what was written. This
solver reads the rendered prompt with a grammar of its own: a premise a line, an empty line, the question with its
instruction. Each sentence becomes a statement about how likely "Savir at party" is, and the oracle says whether what is
asked follows. A sentence that it can't read is an error, since it could be the one that matters.

A question asks whether the conclusion follows, or, negated, whether it fails to: "yes" is right if it follows in the first
case, if it does not in the second. So "Is it false that …?" about what the premises leave open is answered "yes", as in
the paper: the conclusion is not licensed. "Is it not probable that …?" is read as a negated question too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from tasks.contracts import TaskError
from tasks.modals_oracle import decide
from tasks.modals_schema import Proposition, Statement, atoms, renamed
from tasks.prompts import INSTRUCTIONS


def _likelihood(match: re.Match[str]) -> Statement:
    return _graded(match["graded"])


_N, _M, _V, _W = (rf"(?P<{one}>\w+)" for one in "nmvw")

_CLAUSES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Proposition]], ...] = (
    (re.compile(rf"{_N} will be at the {_V}"), lambda m: _at(m["n"], m["v"])),
    (re.compile(rf"{_N} will not be at the {_V}"), lambda m: ("not", _at(m["n"], m["v"]))),
    (
        re.compile(rf"{_N} and {_M} will both be at the {_V}"),
        lambda m: ("and", _at(m["n"], m["v"]), _at(m["m"], m["v"])),
    ),
    (re.compile(rf"{_N} or {_M} will be at the {_V}"), lambda m: ("or", _at(m["n"], m["v"]), _at(m["m"], m["v"]))),
    (
        re.compile(rf"{_N} will be at both the {_V} and the {_W}"),
        lambda m: ("and", _at(m["n"], m["v"]), _at(m["n"], m["w"])),
    ),
)
_PREMISES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Statement]], ...] = (
    (re.compile(rf"{_N} will probably be at the {_V}\."), lambda m: ("Pr", _at(m["n"], m["v"]))),
    (
        re.compile(rf"{_N} and {_M} will probably both be at the {_V}\."),
        lambda m: ("Pr", ("and", _at(m["n"], m["v"]), _at(m["m"], m["v"]))),
    ),
    (re.compile(rf"{_N} must be at the {_V}\."), lambda m: ("Must", _at(m["n"], m["v"]))),
    (re.compile(rf"{_N} might be at the {_V}\."), lambda m: ("Might", _at(m["n"], m["v"]))),
    (
        re.compile(rf"If {_N} is at the {_V}, then (?P<then>[^,]+)\."),
        lambda m: ("if", _at(m["n"], m["v"]), _clause(m["then"])),
    ),
    (
        re.compile(rf"Probably, if {_N} is at the {_V}, then (?P<then>[^,]+)\."),
        lambda m: ("Pr-if", _at(m["n"], m["v"]), _clause(m["then"])),
    ),
    (re.compile(r"It is (?P<graded>[^,]+)\."), _likelihood),
)
_COMPARED = re.compile(r"at least as likely that (?P<first>.+) as that (?P<second>.+)")
_ADJECTIVE = re.compile(r"(?P<word>probable|improbable|possible|certain) that (?P<clause>.+)")
_WORDS = {"probable": "Pr", "possible": "Might", "certain": "Must"}
# What stands ahead of the conclusion in a wrapped question, and whether it asks for its failure.
_WRAPPERS = {
    "Is it true that ": False,
    "Is it false that ": True,
    "Is it correct that ": False,
    "Is it incorrect that ": True,
    "Is it not correct that ": True,
    "Is it valid to conclude that ": False,
    "Is it invalid to conclude that ": True,
    "Is it not valid to conclude that ": True,
    "Does it follow that ": False,
    "Does it not follow that ": True,
}
_QUESTION = re.compile(rf"(?:(?P<wrapper>{'|'.join(_WRAPPERS)})it is |Is it (?P<no>not )?)(?P<graded>.+)\?")


def solve_text(text: str) -> str:
    """``yes`` or ``no`` for a prompt.

    Raises:
        TaskError: a sentence that can't be read, or premises that can't be true together.
    """
    told, gap, question = text.partition("\n\n")
    if not gap:
        raise TaskError("the text has one paragraph: expected the premises, an empty line and the question")
    for instruction in INSTRUCTIONS.values():
        question = question.removesuffix(f" {instruction}")
    premises = tuple(map(read_premise, told.split("\n")))
    content, negated = read_question(question)
    # Names don't matter, so every inference of one form is decided once.
    plain = {name: f"p{place}" for place, name in enumerate(atoms((*premises, content)))}
    verdict = decide(tuple(renamed(one, plain) for one in premises), renamed(content, plain))
    if not verdict.consistent:
        raise TaskError(f"the premises {told!r} can't be true together")
    return "yes" if verdict.follows != negated else "no"


@lru_cache(maxsize=4096)
def read_premise(sentence: str) -> Statement:
    """What a premise says. Atoms are called "NAME at ACTIVITY".

    Raises:
        TaskError: it can't be read.
    """
    for pattern, meaning in _PREMISES:
        match = pattern.fullmatch(sentence)
        if match:
            return meaning(match)
    raise TaskError(f"can't read the premise {sentence!r}: no sentence of this grammar")


def read_question(question: str) -> tuple[Statement, bool]:
    """What a question asks about, and whether it asks for its failure.

    Raises:
        TaskError: it can't be read.
    """
    match = _QUESTION.fullmatch(question)
    if match is None:
        raise TaskError(f"can't read the question {question!r}: no question of this grammar")
    negated = bool(match["no"]) if match["wrapper"] is None else _WRAPPERS[match["wrapper"]]
    return _graded(match["graded"]), negated


@lru_cache(maxsize=4096)
def _graded(said: str) -> Statement:
    """What follows "it is": a grade of likelihood, and clauses."""
    if said.startswith("not "):
        return ("deny", _graded(said.removeprefix("not ")))
    match = _COMPARED.fullmatch(said)
    if match:
        return ("geq", _clause(match["first"]), _clause(match["second"]))
    match = _ADJECTIVE.fullmatch(said)
    if match is None:
        raise TaskError(
            f"can't read 'it is {said}': expected probable, improbable, possible, certain or at least as likely"
        )
    clause = _clause(match["clause"])
    # Improbable is the denial of probable.
    return ("deny", ("Pr", clause)) if match["word"] == "improbable" else (_WORDS[match["word"]], clause)


def _clause(said: str) -> Proposition:
    for pattern, meaning in _CLAUSES:
        match = pattern.fullmatch(said)
        if match:
            return meaning(match)
    raise TaskError(f"can't read the clause {said!r}: no clause of this grammar")


def _at(name: str, activity: str) -> str:
    return f"{name} at {activity}"
