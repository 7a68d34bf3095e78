"""Answers an ordering question from its text alone.

The generator knows the answer because it chose it; that is no check of what was written. This solver reads the rendered
text with the relation's sentences, builds the graph of stated comparisons and asks whether one end of the question is
reachable from the other. It shares no code with the generator or renderer. Text it can't read completely is an error:
a sentence that was skipped could be the one that matters.

A prompt is read in three paragraphs: the names line (and the rule, where the relation has one), a premise a line, the
question with its instruction. "Amy is not behind Bob" says that Amy comes before Bob, since the order is strict and total.
Irrelevant premises need no special treatment: they are about others, so no path leads to them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tasks.contracts import TaskError
from tasks.prompts import INSTRUCTIONS

if TYPE_CHECKING:
    from tasks.relations import Relation

# Which slot of each sentence is the earlier entity.
_EARLIER = {
    "forward": "x",
    "converse": "y",
    "forward_negation": "y",
    "converse_negation": "x",
    "forward_query": "x",
    "converse_query": "y",
}


class Reading(NamedTuple):
    """One way to understand a sentence: by which form, and which entity it says (or asks whether it) comes earlier."""

    form: str
    earlier: str
    later: str


class Reader:
    """Reads sentences with one relation's templates."""

    def __init__(self, relation: Relation) -> None:
        patterns = {form: _pattern(getattr(relation, form)) for form in _EARLIER}
        self._statements = [(form, patterns[form]) for form in patterns if not form.endswith("_query")]
        self._questions = [(form, patterns[form]) for form in patterns if form.endswith("_query")]

    def statement(self, sentence: str) -> list[Reading]:
        """Every way to read a premise; an unambiguous one has one."""
        return _readings(sentence, self._statements)

    def question(self, sentence: str) -> list[Reading]:
        """Every way to read a question."""
        return _readings(sentence, self._questions)


def solve_text(text: str, relation: Relation) -> str:
    """``yes`` or ``no`` for an ordering prompt.

    Raises:
        TaskError: the text has no question, a sentence that can't be read in exactly one way, a name that is not listed,
            or premises that contradict each other or leave the question open.
    """
    reader = _reader(relation)
    paragraphs = text.split("\n\n")
    if len(paragraphs) != 3:
        raise TaskError(f"the text has {len(paragraphs)} paragraphs: expected the names, the premises and the question")
    listed = _names(paragraphs[0], relation)
    before: dict[str, list[str]] = {}
    for sentence in paragraphs[1].split("\n"):
        said = _only(reader.statement(sentence), f"premise {sentence!r}", relation.forward)
        _check_listed(said, listed, sentence)
        before.setdefault(said.earlier, []).append(said.later)
    question = paragraphs[2]
    for instruction in INSTRUCTIONS.values():
        question = question.removesuffix(f" {instruction}")
    asked = _only(reader.question(question), f"question {question!r}", relation.forward_query)
    _check_listed(asked, listed, question)
    yes, no = _reaches(before, asked.earlier, asked.later), _reaches(before, asked.later, asked.earlier)
    if yes and no:
        raise TaskError(f"the premises contradict each other about {asked.earlier} and {asked.later}")
    if not yes and not no:
        raise TaskError(f"the premises do not order {asked.earlier} and {asked.later}")
    return "yes" if yes else "no"


_READERS: dict[Relation, Reader] = {}


def _reader(relation: Relation) -> Reader:
    """A relation's patterns are compiled once."""
    if relation not in _READERS:
        _READERS[relation] = Reader(relation)
    return _READERS[relation]


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for slot in "xy":
        escaped = escaped.replace(re.escape(f"{{{slot}}}"), rf"(?P<{slot}>\w+)")
    return re.compile(escaped)


def _readings(sentence: str, patterns: list[tuple[str, re.Pattern[str]]]) -> list[Reading]:
    found = []
    for form, pattern in patterns:
        match = pattern.fullmatch(sentence)
        if match is not None:
            first = _EARLIER[form]
            found.append(Reading(form, match[first], match["y" if first == "x" else "x"]))
    return found


def _only(readings: list[Reading], what: str, expected: str) -> Reading:
    if not readings:
        raise TaskError(f"can't read the {what}: expected a sentence like {expected!r}")
    if len(readings) > 1:
        raise TaskError(f"the {what} can be read as {' and as '.join(reading.form for reading in readings)}")
    return readings[0]


def _names(paragraph: str, relation: Relation) -> set[str]:
    line, *rest = paragraph.split("\n")
    scene, colon, names = line.partition(": ")
    if scene != relation.scene or not colon or not names.endswith("."):
        raise TaskError(f"can't read the names line {line[:80]!r}: expected '{relation.scene}: A, B.'")
    if rest != ([] if relation.rule is None else [relation.rule]):
        raise TaskError(f"below the names line stands {rest!r}: expected {relation.rule or 'nothing'!r}")
    listed = names[:-1].split(", ")
    found = set(listed)
    if len(found) != len(listed):
        raise TaskError(f"the names line {line[:80]!r} lists a name twice")
    return found


def _check_listed(reading: Reading, listed: set[str], sentence: str) -> None:
    for name in (reading.earlier, reading.later):
        if name not in listed:
            raise TaskError(f"{sentence!r} is about {name!r}, whom the names line does not list")


def _reaches(before: dict[str, list[str]], start: str, goal: str) -> bool:
    todo, seen = [start], {start}
    while todo:
        for entity in before.get(todo.pop(), ()):
            if entity == goal:
                return True
            if entity not in seen:
                seen.add(entity)
                todo.append(entity)
    return False
