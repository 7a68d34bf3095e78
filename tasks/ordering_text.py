"""Ordering instances as text.

===========================  ======================================================================================
``original``                 every premise in the forward phrase ("Amy is in front of Bob.")
``equivalent``               m premises re-worded by the converse ("Bob is behind Amy."), names and premises reshuffled
``reshuffled``               the equivalent's order of names and premises, nothing re-worded
``rewritten``                the equivalent's m re-worded premises, in the original's order
``fully_rewritten``          every premise re-worded by the converse, in the equivalent's order
``negated``                  the equivalent, its m premises as the negation of the converse ("Amy is not behind Bob.")
``distracted``               the original among premises about others
``distracted_equivalent``    the equivalent among the same premises about others, as many of them re-worded
``repeat``                   the original's text once more
===========================  ======================================================================================

A prompt has three paragraphs: who there is (and a rule, where words need one), the premises, the question. Spans name
``name:X``, ``premise:i`` (comparison i of the chain), ``distractor:i``, ``rule`` and ``query``, in the order of the text.

Everything that does not change from set to set is cut up once, when the renderer is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import add
from typing import Any

from tasks.contracts import Message, Presentation, Span
from tasks.ordering_layout import Distractors, Layout
from tasks.prompts import instruction
from tasks.relations import Relation


@dataclass(frozen=True, slots=True)
class Rendering:
    """One kind of presentation. ``version``: whose order it has, 0 the original's, 1 the equivalent's."""

    version: int
    reworded: str  # none, some or all
    negated: bool = False
    distracted: bool = False


RENDERINGS = {
    "original": Rendering(0, "none"),
    "equivalent": Rendering(1, "some"),
    "reshuffled": Rendering(1, "none"),
    "rewritten": Rendering(0, "some"),
    "fully_rewritten": Rendering(1, "all"),
    "negated": Rendering(1, "some", negated=True),
    "distracted": Rendering(0, "none", distracted=True),
    "distracted_equivalent": Rendering(1, "some", distracted=True),
    "repeat": Rendering(0, "none"),
}
PRESENTATIONS = tuple(RENDERINGS)


@dataclass(frozen=True, slots=True)
class Phrase:
    """A template cut at its two slots. ``swapped``: {y} stands before {x}."""

    head: str
    middle: str
    tail: str
    swapped: bool

    def said(self, pairs: Iterable[tuple[str, str]]) -> list[str]:
        """One sentence for each (x, y)."""
        head, middle, tail = self.head, self.middle, self.tail
        if self.swapped:
            return [f"{head}{y}{middle}{x}{tail}" for x, y in pairs]
        return [f"{head}{x}{middle}{y}{tail}" for x, y in pairs]


def phrase(template: str) -> Phrase:
    """The template, ready to be filled in."""
    swapped = template.index("{y}") < template.index("{x}")
    first, second = ("{y}", "{x}") if swapped else ("{x}", "{y}")
    head, rest = template.split(first)
    middle, tail = rest.split(second)
    return Phrase(head, middle, tail, swapped)


class Renderer:
    """Writes the presentations of instances of one setting."""

    def __init__(
        self, relation: Relation, kinds: Sequence[str], *, n: int, distractors: int, names_order: str, prompt: str
    ) -> None:
        self._kinds = [(kind, RENDERINGS[kind]) for kind in kinds]
        self._forward, self._converse = phrase(relation.forward), phrase(relation.converse)
        self._negation = phrase(relation.converse_negation)
        self._questions = {"forward": phrase(relation.forward_query), "converse": phrase(relation.converse_query)}
        self._scene = f"{relation.scene}: "
        self._rule = relation.rule
        self._instruction = f" {instruction(prompt)}"
        self._prompt = prompt
        self._chain = names_order == "chain"
        self._links = n - 1
        self._labels = [f"premise:{i}" for i in range(n - 1)] + [f"distractor:{i}" for i in range(distractors)]

    def presentations(
        self, order: Sequence[str], layout: Layout, others: Distractors | None, *, question: str, gold: str
    ) -> tuple[Presentation, ...]:
        """All presentations of one instance.

        Args:
            order: the names, earliest first.
            layout: what was drawn for them.
            others: what was drawn for the distracted kinds; None if there are none.
            question: the phrase it is asked in, ``forward`` or ``converse``.
            gold: the answer.
        """
        # Forward-yes and converse-no ask from the first to the last; the other two cells ask the other way round.
        ends = (order[0], order[-1]) if (question == "forward") == (gold == "yes") else (order[-1], order[0])
        asked = self._questions[question].said((ends,))[0]
        plain = _Told(order, list(pairwise(order)), [f"name:{name}" for name in order], layout)
        distracted = None
        if others is not None:
            names = [*order, *others.order]
            pairs = [*plain.pairs, *pairwise(others.order)]
            distracted = _Told(names, pairs, [f"name:{name}" for name in names], others.layout)
        written = []
        for kind, rendering in self._kinds:
            told = distracted if rendering.distracted and distracted is not None else plain
            written.append(self._written(kind, rendering, told, asked, gold))
        return tuple(written)

    def _written(self, kind: str, rendering: Rendering, told: _Told, asked: str, gold: str) -> Presentation:
        version, links = rendering.version, self._links
        names = told.layout.names[version]
        if self._chain and not rendering.distracted:
            names = list(range(len(told.names)))
        premises = told.layout.premises[version]
        rewritten = _rewritten(rendering, told)
        said = self._said(told, rewritten, negated=rendering.negated)

        listed = [told.names[entity] for entity in names]
        text = f"{self._scene}{', '.join(listed)}."
        lengths = list(map(len, listed))
        starts = list(accumulate([length + 2 for length in lengths], initial=len(self._scene)))
        spans = _spans([told.labels[entity] for entity in names], starts, lengths)
        if self._rule is not None:
            spans.append(Span("rule", len(text) + 1, len(text) + 1 + len(self._rule)))
            text = f"{text}\n{self._rule}"

        lines = [said[link] for link in premises]
        lengths = list(map(len, lines))
        starts = list(accumulate([length + 1 for length in lengths], initial=len(text) + 2))
        labels = self._labels
        spans += _spans([labels[link] for link in premises], starts, lengths)
        at = starts[-1] + 1
        spans.append(Span("query", at, at + len(asked)))
        text = "\n".join((f"{text}\n", *lines, f"\n{asked}{self._instruction}"))

        meta: dict[str, Any] = {"prompt": self._prompt}
        if rendering.distracted:
            meta["rewritten"] = [link for link in rewritten if link < links]
            meta["premises"] = [link for link in premises if link < links]
            meta["distractors"] = len(told.pairs) - links
            meta["rewritten_distractors"] = [link - links for link in rewritten if link >= links]
        else:
            meta["rewritten"] = list(rewritten)
            meta["premises"] = list(premises)
        if self._chain:
            meta["names_order"] = "chain"
        return Presentation(kind, (Message("user", text),), gold, tuple(spans), meta)

    def _said(self, told: _Told, rewritten: Sequence[int], *, negated: bool) -> list[str]:
        """The sentence of every comparison, in chain order."""
        if not told.forward:
            told.forward.extend(self._forward.said(told.pairs))
        if not rewritten:
            return told.forward
        said = told.forward.copy()
        pairs = [told.pairs[link] for link in rewritten]
        again = (
            self._negation.said(pairs) if negated else self._converse.said([(later, early) for early, later in pairs])
        )
        for link, sentence in zip(rewritten, again, strict=True):
            said[link] = sentence
        return said


class _Told:
    """What the presentations of one instance share: its names, comparisons and forward sentences."""

    __slots__ = ("forward", "labels", "layout", "names", "pairs")

    def __init__(self, names: Sequence[str], pairs: list[tuple[str, str]], labels: list[str], layout: Layout) -> None:
        self.names, self.pairs, self.labels, self.layout = names, pairs, labels, layout
        self.forward: list[str] = []


def _rewritten(rendering: Rendering, told: _Told) -> Sequence[int]:
    if rendering.reworded == "none":
        return ()
    return told.layout.rewritten if rendering.reworded == "some" else range(len(told.pairs))


def _spans(labels: Iterable[str], starts: Iterable[int], lengths: Iterable[int]) -> list[Span]:
    """Spans of the first message. ``Span(label, start, end)``, but made by ``map`` without a call in Python each."""
    ends = map(add, starts, lengths)
    return list(map(tuple.__new__, repeat(Span), zip(labels, starts, ends, repeat(0))))
