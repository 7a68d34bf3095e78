"""Words for an order: how a relation and its converse are said, as premise and as question.

A relation is a pair of phrases for one and the same fact: "Amy is in front of Bob" and "Bob is behind Amy". The forward
phrase puts the earlier entity first. The text-level solver reads premises with these phrases and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts import TaskError


@dataclass(frozen=True, slots=True)
class Relation:
    """Vocabulary of one ordering relation.

    Attributes:
        name: how users ask for it.
        scene: opening of the line that lists the names.
        forward: predicate for "earlier … later".
        converse: predicate for "later … earlier", the same fact seen from the other side.
    """

    name: str
    scene: str
    forward: str
    converse: str

    def premise(self, earlier: str, later: str, *, rewritten: bool) -> str:
        """Sentence that says ``earlier`` comes before ``later``, by the converse phrase if ``rewritten``."""
        if rewritten:
            return f"{later} is {self.converse} {earlier}."
        return f"{earlier} is {self.forward} {later}."

    def question(self, subject: str, other: str, *, phrase: str) -> str:
        """Question whether ``subject`` stands in the relation (``forward`` or ``converse``) to ``other``."""
        return f"Is {subject} {self.forward if phrase == 'forward' else self.converse} {other}?"


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        Relation("front_behind", "These people stand in one line", "in front of", "behind"),
        Relation("left_right", "These people stand in one row", "to the left of", "to the right of"),
    )
}


def relation_named(name: str) -> Relation:
    """The relation with this name; an unknown one is refused with the list of those that exist."""
    try:
        return RELATIONS[name]
    except (KeyError, TypeError):
        raise TaskError(f"unknown relation {name!r}: choose one of {', '.join(RELATIONS)}") from None
