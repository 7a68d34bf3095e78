"""The planted problem as a family of its own: ``--family tests/planted/family.py:Switches``.

A lamp is lit or dim and a stove is hot or cold; exactly one of the two is on. One is asked about. So neither the state
words nor the query word alone says anything about the answer: the bag of words is linearly at chance, and only a model
that looks up what is asked can answer. The equivalent presentation asks first, marks itself with another word, says the
states with other words, and has filler words of its own, one more of them, so that the prompts differ in length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tasks import Grade, Instance, MatchedSet, Message, Parameter, Parsed, Presentation, Span, TaskError
from tasks.contracts import SPLITS, Split, latent_key
from tasks.parsing import parse_label
from tasks.streams import stream

FILLERS = tuple(f"w{number}" for number in range(24))
QUERIES = {"forward": "lamp", "backward": "stove"}
MARKERS = {"original": "plainly", "equivalent": "otherwise"}
FORMS = 6
_STEMS = {
    ("original", "forward", 1): "lit",
    ("original", "forward", -1): "dim",
    ("original", "backward", 1): "hot",
    ("original", "backward", -1): "cold",
    ("equivalent", "forward", 1): "bright",
    ("equivalent", "forward", -1): "dark",
    ("equivalent", "backward", 1): "warm",
    ("equivalent", "backward", -1): "cool",
}
STATES = {where: tuple(f"{stem}{number}" for number in range(FORMS)) for where, stem in _STEMS.items()}
"""(presentation, what it is about, on or off) → words that say so."""


class Switches:
    """Which of two things is on?"""

    name = "switches"
    version = 1
    answers: Mapping[str, tuple[str, ...]] = {"yes": ("Yes", "yes"), "no": ("No", "no")}

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("n", 5, "an integer from 3 to 12", None, "filler words in the original"),)

    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        found = {"n": 5, **params}
        for key in found:
            if key != "n":
                raise TaskError(f"switches has no parameter {key!r}: choose n")
        if not isinstance(found["n"], int) or not 3 <= found["n"] <= 12:
            raise TaskError(f"n is {found['n']!r}: give an integer from 3 to 12")
        return found

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]:
        found = self.validate(params)
        given: set[str] = set()
        for index in itertools.count():
            direction, gold = (("forward", "backward")[index % 2], ("yes", "no")[index // 2 % 2])
            draws = stream(self.name, self.version, split, found, seed, index)
            while True:
                latent = {
                    "asked": direction,
                    "on": direction if gold == "yes" else _other(direction),
                    "forms": [draws.randrange(FORMS) for _ in range(4)],
                    "original": draws.sample(FILLERS, found["n"]),
                    "equivalent": draws.sample(FILLERS, found["n"] + 1),
                    "first": draws.choice(tuple(QUERIES)),
                }
                key = latent_key(self.name, latent)
                # The split follows from the latent content, so no seed can move an instance into another split.
                if SPLITS[int(key[:8], 16) % 3] == split and key not in given:
                    break
            given.add(key)
            instance = Instance(self.name, key, found, latent, gold, f"{direction}-{gold}", split)
            yield MatchedSet(instance, tuple(_render(kind, latent, gold) for kind in MARKERS))

    def parse(
        self,
        response: str,
        presentation: Presentation,
        *,
        finish_reason: str | None = None,
        prompt_opened_think: bool = False,
    ) -> Parsed:
        return parse_label(response, finish_reason=finish_reason, prompt_opened_think=prompt_opened_think)

    def grade(self, parsed: Parsed, presentation: Presentation) -> Grade:
        correct = parsed.status == "parsed" and parsed.value == presentation.gold
        return Grade(correct, float(correct), f"{parsed.status}: {parsed.value}, gold {presentation.gold}")

    def verify(self, matched: MatchedSet) -> Mapping[str, str]:
        """Solve again from the text alone."""
        return {shown.kind: _solved(shown.messages[0].content.split()) for shown in matched.presentations}


def _other(direction: str) -> str:
    return "backward" if direction == "forward" else "forward"


def _render(kind: str, latent: Mapping[str, Any], gold: str) -> Presentation:
    """Filler words around two state words; the original asks last, the equivalent first."""
    first, second = latent["first"], _other(latent["first"])
    forms = latent["forms"][:2] if kind == "original" else latent["forms"][2:]
    states = [
        STATES[kind, about, 1 if latent["on"] == about else -1][form]
        for about, form in zip((first, second), forms, strict=True)
    ]
    fillers = latent[kind]
    told = [*fillers[:1], states[0], *fillers[1:3], states[1], *fillers[3:]]
    asked = [MARKERS[kind], QUERIES[latent["asked"]]]
    words = [*told, *asked] if kind == "original" else [*asked, *told]
    spans, start = [], 0
    labels = {QUERIES[latent["asked"]]: "query", MARKERS[kind]: "marker", states[0]: "state:1", states[1]: "state:2"}
    for word in words:
        if word in labels:
            spans.append(Span(labels[word], start, start + len(word)))
        start += len(word) + 1
    return Presentation(kind, (Message("user", " ".join(words)),), gold, tuple(spans), meta={})


def _solved(words: list[str]) -> str:
    on = {"lit": "lamp", "bright": "lamp", "hot": "stove", "warm": "stove"}
    burning = {on[word.rstrip("0123456789")] for word in words if word.rstrip("0123456789") in on}
    asked = {"lamp", "stove"}.intersection(words)
    return "yes" if burning == asked else "no"
