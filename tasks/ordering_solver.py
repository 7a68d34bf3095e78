"""Answers an ordering question from its text alone.

The generator knows the answer because it chose it; that is no check of what was written. This solver reads the rendered
text with the relation's phrases, builds the graph of stated comparisons and asks whether one end of the question is
reachable from the other. It shares no code with the generator or renderer. Text it can't read completely is an error:
a sentence that was skipped could be the one that matters.
"""

from __future__ import annotations

import re

from tasks.contracts import TaskError
from tasks.relations import Relation


def solve_text(text: str, relation: Relation) -> str:
    """``yes`` or ``no`` for an ordering prompt.

    Raises:
        TaskError: the text has no question, a sentence that can't be read, or premises that leave the question open.
    """
    forward, converse = re.escape(relation.forward), re.escape(relation.converse)
    found = re.search(rf"Is (\w+) ({forward}|{converse}) (\w+)\?", text)
    if found is None:
        raise TaskError(f"no question in the text {text[-80:]!r}: expected 'Is A {relation.forward} B?'")
    before: dict[str, set[str]] = {}
    body = text[: found.start()].split("\n", 1)[1]
    for sentence in filter(None, (line.strip() for line in body.split("\n"))):
        said = re.fullmatch(rf"(\w+) is ({forward}|{converse}) (\w+)\.", sentence)
        if said is None:
            raise TaskError(f"can't read the premise {sentence!r}: expected 'A is {relation.forward} B.'")
        earlier, later = (said[1], said[3]) if said[2] == relation.forward else (said[3], said[1])
        before.setdefault(earlier, set()).add(later)
    earlier, later = (found[1], found[3]) if found[2] == relation.forward else (found[3], found[1])
    if _reaches(before, earlier, later):
        return "yes"
    if _reaches(before, later, earlier):
        return "no"
    raise TaskError(f"the premises do not order {earlier} and {later}")


def _reaches(before: dict[str, set[str]], start: str, goal: str) -> bool:
    todo, seen = [start], {start}
    while todo:
        for entity in before.get(todo.pop(), ()):
            if entity == goal:
                return True
            if entity not in seen:
                seen.add(entity)
                todo.append(entity)
    return False
