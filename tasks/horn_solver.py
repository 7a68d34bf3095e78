"""Answers a Horn-clause question from its text alone.

The generator knows the answer by chaining forward over the program it has drawn; that is no check of what was written.
This solver reads the rendered sentences and works backwards from the question: an atom holds if it is stated, or if some
rule for it has a body whose atoms all hold. It shares no code with the generator, and it assumes nothing about the shape
of the program: rules may be deeper than Python's recursion limit, share atoms, and form cycles. Text that it can't read
completely is an error, as a sentence that was skipped could be the one that matters.
"""

from __future__ import annotations

import re

from tasks.contracts import TaskError
from tasks.prompts import INSTRUCTIONS

CLOSED_WORLD = "Something holds only if it is stated below or follows from the rules."
# One atom, "a and b", or "a, b and c".
_BODY = r"(?:(?:[a-z]+, )?[a-z]+ and )?[a-z]+"
_FACT = re.compile(r"([a-z]+) holds\.")
_IF_THEN = re.compile(rf"If (?P<body>{_BODY}), then (?P<head>[a-z]+)\.")
_WHENEVER = re.compile(rf"(?P<head>[a-z]+) holds whenever (?P<body>{_BODY}) (?P<verb>holds?)\.")
_QUESTION = re.compile(r"Does ([a-z]+) hold\? (.+)", re.DOTALL)
# A word of the sentence patterns that stands where an atom should is a sentence read the wrong way.
_RESERVED = frozenset({"if", "and", "then", "holds", "hold", "whenever", "does", "yes", "no"})

Rules = dict[str, list[tuple[str, ...]]]


def solve_text(text: str) -> str:
    """``yes`` or ``no`` for a Horn-clause prompt.

    Raises:
        TaskError: the text does not say what counts, has no question, or has a sentence that can't be read.
    """
    first, *lines = [line for line in text.split("\n") if line] or [""]
    if first != CLOSED_WORLD:
        raise TaskError(f"can't read the first line {first!r}: expected {CLOSED_WORLD!r}")
    asked = _QUESTION.fullmatch(lines[-1]) if lines else None
    if asked is None or asked[2] not in INSTRUCTIONS.values():
        raise TaskError(
            f"no question in the text {text[-80:]!r}: expected 'Does a hold?' and an instruction at the end"
        )
    goal = _atom(asked[1], lines[-1])
    facts: set[str] = set()
    rules: Rules = {}
    for line in lines[:-1]:
        fact = _FACT.fullmatch(line)
        if fact:
            facts.add(_atom(fact[1], line))
            continue
        rule = _IF_THEN.fullmatch(line) or _WHENEVER.fullmatch(line)
        if rule is None:
            raise TaskError(f"can't read the sentence {line!r}: expected a fact or a rule")
        body = tuple(_atom(word, line) for word in re.split(r", | and ", rule["body"]))
        if "verb" in rule.re.groupindex and (rule["verb"] == "holds") != (len(body) == 1):
            raise TaskError(f"can't read the sentence {line!r}: its verb does not fit {len(body)} atoms")
        rules.setdefault(_atom(rule["head"], line), []).append(body)
    return "yes" if holds(goal, facts, rules) else "no"


def _atom(word: str, line: str) -> str:
    if word in _RESERVED:
        raise TaskError(f"can't read the sentence {line!r}: {word!r} stands where an atom should")
    return word


def holds(goal: str, facts: set[str], rules: Rules) -> bool:
    """Whether the goal follows, by backward chaining with a memory.

    A search that comes back to an atom it is still trying to prove takes it as failed. On such a cycle "failed" may be
    premature, so only proofs are remembered between searches, and the search is repeated as long as it proves something
    new. Once it doesn't, every rule for an atom that failed needs another atom that failed, so none of them can hold.
    """
    proved = set(facts)
    while goal not in proved:
        known = len(proved)
        _search(goal, proved, rules)
        if len(proved) == known:
            return False
    return True


def _search(goal: str, proved: set[str], rules: Rules) -> None:
    """One depth-first search for a proof of the goal; adds what it proves."""
    tried = {goal}
    # A frame is an atom, the number of the rule being tried, and the place in its body.
    stack = [(goal, 0, 0)]
    while stack:
        atom, number, place = stack.pop()
        bodies = rules.get(atom, [])
        if number == len(bodies):
            continue
        body = bodies[number]
        while place < len(body) and body[place] in proved:
            place += 1
        if place == len(body):
            proved.add(atom)
        elif body[place] in tried:
            stack.append((atom, number + 1, 0))
        else:
            stack.append((atom, number, place))
            stack.append((body[place], 0, 0))
            tried.add(body[place])
