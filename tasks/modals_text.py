"""How a question about probability operators is put: the kinds of presentation, and their text.

A prompt is a premise a line, an empty line, and the question with what the model is told to answer. Only the question
differs between the presentations of a matched set.

==================  =========  =========================================  ==================
kind                form       wording                                    gold
==================  =========  =========================================  ==================
``original``        truth      Is it true that …?                         yes if valid
``correct``         correct    Is it correct that …?                      kept
``valid``           valid      Is it valid to conclude that …?            kept
``follow``          follow     Does it follow that …?                     kept
``direct``          direct     Is it probable that Savir …?               kept
``truth_negated``   truth      Is it false that …?                        flipped
``correct_negated`` correct    Is it incorrect that …?                    flipped
``valid_negated``   valid      Is it invalid to conclude that …?          flipped
``follow_negated``  follow     Does it not follow that …?                 flipped
``direct_negated``  direct     Is it not probable that Savir …?           flipped
``not_correct``     correct    Is it not correct that …?                  flipped
``not_valid``       valid      Is it not valid to conclude that …?        flipped
``equivalent``      any        the affirmative form that is asked for     kept
``repeat``          truth      the original, character for character      kept
==================  =========  =========================================  ==================

The original is *truth*, the form that the paper shows its templates in. ``equivalent`` gives one of the other affirmative
forms the name under which a whole study looks for the second half of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.contracts import Message, Presentation, Span
from tasks.modals_catalog import Template
from tasks.prompts import instruction

Negation = Literal["none", "prefix", "not"]
FORMS = ("truth", "correct", "valid", "follow", "direct")
FLIPPED = {"yes": "no", "no": "yes"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of presentation: its wording in the catalog, its question form, and how it negates."""

    wording: str
    form: str
    negation: Negation = "none"

    @property
    def negated(self) -> bool:
        return self.negation != "none"


KINDS: Mapping[str, Kind] = {
    "original": Kind("truth", "truth"),
    "correct": Kind("correct", "correct"),
    "valid": Kind("valid", "valid"),
    "follow": Kind("follow", "follow"),
    "direct": Kind("direct", "direct"),
    "truth_negated": Kind("truth_negated", "truth", "prefix"),
    "correct_negated": Kind("correct_negated", "correct", "prefix"),
    "valid_negated": Kind("valid_negated", "valid", "prefix"),
    "follow_negated": Kind("follow_negated", "follow", "not"),
    "direct_negated": Kind("direct_negated", "direct", "not"),
    "not_correct": Kind("not_correct", "correct", "not"),
    "not_valid": Kind("not_valid", "valid", "not"),
}
# The kinds of the paper, and two more for studies of pairs.
PRESENTATIONS = (*KINDS, "equivalent", "repeat")
EQUIVALENTS = ("correct", "valid", "follow", "direct")


class Renderer:
    """Writes the presentations of matched sets of one setting."""

    def __init__(self, kinds: Sequence[str], *, equivalent: str, prompt: str) -> None:
        named = {**KINDS, "equivalent": KINDS[equivalent], "repeat": KINDS["original"]}
        self._kinds = [(name, named[name], self._meta(named[name], prompt)) for name in kinds]
        self._instruction = f" {instruction(prompt)}"

    @staticmethod
    def _meta(kind: Kind, prompt: str) -> dict[str, str]:
        polarity = "negated" if kind.negated else "affirmative"
        return {"prompt": prompt, "form": kind.form, "polarity": polarity, "negation": kind.negation}

    def presentations(self, template: Template, slots: Mapping[str, str]) -> tuple[Presentation, ...]:
        """All presentations of one template and content; a collapsed wording is left out.

        Args:
            slots: ``a``, ``b`` names and ``v``, ``w`` activities.
        """
        told = [sentence.format_map(slots) for sentence in template.said]
        spans = _premises(told, slots)
        text = "\n".join(told) + "\n\n"
        conclusion = template.conclusion.format_map(slots)
        gold = "yes" if template.valid else "no"
        written = []
        for name, kind, meta in self._kinds:
            wording = template.questions.get(kind.wording)
            if wording is None:
                continue
            question = wording.format_map(slots)
            own = [Span("query", len(text), len(text) + len(question))]
            if kind.form != "direct":
                own.append(Span("conclusion", len(text) + len(question) - len(conclusion) - 1, own[0].end - 1))
            message = Message("user", f"{text}{question}{self._instruction}")
            answer = FLIPPED[gold] if kind.negated else gold
            written.append(Presentation(name, (message,), answer, (*spans, *own), dict(meta)))
        return tuple(written)


def _premises(told: Sequence[str], slots: Mapping[str, str]) -> list[Span]:
    """Spans of the premises, and of each name where it is first told."""
    spans, start, seen = [], 0, set()
    for number, sentence in enumerate(told):
        spans.append(Span(f"premise:{number}", start, start + len(sentence)))
        words = sentence.replace(",", " ").replace(".", " ").split(" ")
        for name in (slots["a"], slots["b"]):
            if name not in seen and name in words:
                seen.add(name)
                at = start + sum(len(word) + 1 for word in words[: words.index(name)])
                spans.append(Span(f"name:{name}", at, at + len(name)))
        start += len(sentence) + 1
    return spans
