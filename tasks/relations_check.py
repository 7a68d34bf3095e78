"""Do a relation's six sentences say what they have to?

Three tests, since each misses what the others find:

* each sentence, filled in with two names, is read back by the text-level solver. It has to find exactly one reading, the
  right one: two forms that are equal, or that match each other's sentences, are caught here;
* with every known word replaced by its opposite, the forward phrase has to turn into the converse phrase. The solver can't
  see that "is taller than" is no converse of "is older than", since it knows no English; the list of opposites does;
* a negation has to hold one negating word and no other form may hold any, and the two slots have to come in one order in
  all six. "Is {y} older than {x}?" or "{x} is surely older than {y}." as a negation would pass the other two tests and
  make every answer wrong.

The second test works on whole words, longest phrase first, and a phrase may have several opposites ("behind": "in front
of", "ahead of"). A pair without any known word can't be judged and is refused: its file has to list the words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.contracts import TaskError
from tasks.ordering_solver import Reader

if TYPE_CHECKING:
    from tasks.relations import Relation

STATEMENTS = ("forward", "converse", "forward_negation", "converse_negation")
QUERIES = ("forward_query", "converse_query")
NEGATIONS = ("forward_negation", "converse_negation")
FORMS = ("forward", "converse", *QUERIES, "forward_negation", "converse_negation")
# A question or negation may be worded so that no known word is left in it; the two phrases themselves may not.
PAIRS = (("forward", "converse"), QUERIES, NEGATIONS)
# Read as x < y: the forms that say or ask that x comes before y.
X_FIRST = frozenset(("forward", "forward_query", "converse_negation"))

_TOKEN = re.compile(r"\{[xy]\}|\w+|[^\w\s]")
_SLOT = re.compile(r"(?<!\w)\{(?:x|y)\}(?!\w)")
_NEGATION = re.compile(r"\b(?:not|never|no|cannot)\b|n['’]t\b")

Words = tuple[str, ...]


def check(relation: Relation, opposites: Sequence[tuple[str, str]], *, where: str) -> None:
    """Refuse a relation whose sentences can't be relied on.

    Raises:
        TaskError: starts with ``where`` and names the key.
    """
    forms = relation.forms()
    for form, template in forms.items():
        _check_template(template, form, where)
    _check_slots(forms, where)
    for key in ("scene", "rule"):
        text = getattr(relation, key)
        if text is not None and _SLOT.search(text):
            raise TaskError(f"{where}: key {key!r} is {text!r}: it is told as it stands, leave out {{x}} and {{y}}")
    if ":" in relation.scene:
        raise TaskError(f"{where}: key 'scene' is {relation.scene!r}: leave out the colon, the names follow it")
    if relation.rule is not None and not relation.rule.endswith("."):
        raise TaskError(f"{where}: key 'rule' is {relation.rule!r}: end it with a full stop")
    _check_readings(relation, where)
    known = _known(opposites)
    for first, second in PAIRS:
        _check_opposites(first, second, forms, known, where)
    for form in (*QUERIES, *NEGATIONS):
        stem = form.partition("_")[0]
        said, asked = _phrases(forms[stem], known), _phrases(forms[form], known)
        if asked and said != asked:
            raise TaskError(
                f"{where}: key {form!r} is {forms[form]!r}: it does not hold the words of {stem!r}, {forms[stem]!r}"
            )


def _check_template(template: str, form: str, where: str) -> None:
    for slot in ("{x}", "{y}"):
        if template.count(slot) != 1:
            raise TaskError(f"{where}: key {form!r} is {template!r}: {slot} has to stand in it exactly once")
    if len(_SLOT.findall(template)) != 2 or re.search(r"[{}]", _SLOT.sub("", template)) or "}{" in template:
        raise TaskError(f"{where}: key {form!r} is {template!r}: {{x}} and {{y}} have to stand apart as words")
    end = "?" if form in QUERIES else "."
    if not template.endswith(end):
        raise TaskError(f"{where}: key {form!r} is {template!r}: end it with {end!r}")
    allowed = 1 if form in NEGATIONS else 0
    if len(_NEGATION.findall(template.lower())) != allowed:
        raise TaskError(
            f"{where}: key {form!r} is {template!r}: it has to hold {('no', 'one')[allowed]} word like 'not'"
        )


def _check_slots(forms: dict[str, str], where: str) -> None:
    """One order of the slots: in another one, who is said to come first would change with the form."""
    stated = forms["forward"].index("{x}") < forms["forward"].index("{y}")
    for form, template in forms.items():
        if (template.index("{x}") < template.index("{y}")) != stated:
            raise TaskError(
                f"{where}: key {form!r} is {template!r}: {{x}} and {{y}} have changed places against "
                f"'forward', {forms['forward']!r}; give them one order in all six forms"
            )


def _check_readings(relation: Relation, where: str) -> None:
    reader = Reader(relation)
    for form, template in relation.forms().items():
        sentence = template.format(x="Amy", y="Bob")
        readings = reader.question(sentence) if form in QUERIES else reader.statement(sentence)
        for reading in readings:
            if reading.form != form:
                raise TaskError(
                    f"{where}: key {form!r} is {template!r}: it can be read as {reading.form!r} too, "
                    f"{getattr(relation, reading.form)!r}; word one of them differently"
                )
        expected = ("Amy", "Bob") if form in X_FIRST else ("Bob", "Amy")
        if [(one.earlier, one.later) for one in readings] != [expected]:
            raise TaskError(f"{where}: key {form!r} is {template!r}: the solver can't read {sentence!r} back")


def _known(opposites: Sequence[tuple[str, str]]) -> dict[Words, set[Words]]:
    known: dict[Words, set[Words]] = {}
    for first, second in opposites:
        one, other = _tokens(first), _tokens(second)
        known.setdefault(one, set()).add(other)
        known.setdefault(other, set()).add(one)
    return known


def _check_opposites(
    first: str, second: str, forms: dict[str, str], known: dict[Words, set[Words]], where: str
) -> None:
    one, other = _tokens(forms[first]), _tokens(forms[second])
    if not any(piece in known for words in (one, other) for piece in _cut(words, known)):
        if first != "forward":
            return
        raise TaskError(
            f"{where}: key 'forward' is {forms[first]!r} and key 'converse' is {forms[second]!r}: neither holds a known "
            'word, so nothing says that they are converse; list the two at the top, opposites = [["older", "younger"]]'
        )
    if not (_turns_into(one, other, known) and _turns_into(other, one, known)):
        raise TaskError(
            f"{where}: key {second!r} is {forms[second]!r}: not the converse of {first!r}, {forms[first]!r}, "
            "by the list of opposites; reword it, or list the two words at the top of the file"
        )


def _tokens(text: str) -> Words:
    return tuple(_TOKEN.findall(text.lower()))


def _cut(words: Words, known: dict[Words, set[Words]]) -> list[Words]:
    """The sentence in pieces: known phrases, the longest first, and single words."""
    longest = max(map(len, known), default=1)
    pieces, at = [], 0
    while at < len(words):
        size = next((size for size in range(longest, 0, -1) if words[at : at + size] in known), 1)
        pieces.append(words[at : at + size])
        at += size
    return pieces


def _phrases(template: str, known: dict[Words, set[Words]]) -> list[Words]:
    return [piece for piece in _cut(_tokens(template), known) if piece in known]


def _turns_into(words: Words, wanted: Words, known: dict[Words, set[Words]]) -> bool:
    """Whether replacing every known phrase, each by one of its opposites, can give the wanted sentence.

    Follows how much of it is reached, since the possible sentences double with each phrase that has two opposites.
    """
    pieces = _cut(words, known)
    reached = {0}
    for piece in pieces:
        choices = known.get(piece, {piece})
        reached = {at + len(choice) for at in reached for choice in choices if wanted[at : at + len(choice)] == choice}
    return len(wanted) in reached and any(piece in known for piece in pieces)
