"""The pair browser: some pairs as the model saw them, with each arm's answers and what was measured.

Which pairs: for every arm and every outcome in turn one pair, until the page is full, so that rare outcomes are there
too. Within a class the order is that of a hash of the pair's name: no setting comes first, and the choice is the same
for every writing of the report.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from experiments.inside import PAIR
from experiments.link import OUTCOMES
from experiments.report.source import Source, shown
from experiments.report.text import DASH, clean, shortened, signed

PAIRS = 60
PROMPT = (2400, 1200)  # characters kept at the start and at the end of a long prompt
ANSWER = 400


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message in pieces; the marked ones are what is asked."""

    role: str
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    gold: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one arm said to one presentation, and what was measured when it did."""

    presentation: str
    text: str
    read: str
    status: str
    correct: bool
    readout: str
    readable: str
    kind: str


@dataclass(frozen=True, slots=True)
class ArmAnswers:
    arm: str
    outcome: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair; ``tags`` is what the page's filter looks for."""

    setting: str
    key: str
    cell: str
    gold: str
    prompts: tuple[Prompt, ...]
    arms: tuple[ArmAnswers, ...]
    tags: str


def pairs(source: Source, count: int = PAIRS) -> list[Pair]:
    """The chosen pairs, in the order of the items file."""
    chosen = set(_choose(source, count))
    attribution = _records(source, "attribution")
    behaviour = _records(source, "behaviour")
    found = []
    for item in source.items:
        name = (str(item["setting"]), str(item["key"]))
        if name in chosen:
            found.append(_pair(source, item, name, attribution, behaviour))
    return found


def _choose(source: Source, count: int) -> list[tuple[str, str]]:
    classes = []
    for arm in source.arms:
        table = source.of("attribution", arm)
        for outcome in OUTCOMES:
            part = table.loc[table["outcome"] == outcome, ["setting", "key"]].drop_duplicates()
            names = [(str(setting), str(key)) for setting, key in part.itertuples(index=False)]
            classes.append(sorted(names, key=lambda name: hashlib.sha256(" ".join(name).encode()).digest()))
    order = dict.fromkeys(name for turn in zip_longest(*classes) for name in turn if name is not None)
    return list(order)[:count]


def _records(source: Source, table: str) -> dict[tuple[str, ...], dict[str, Any]]:
    rows = source.tables[table].astype(object)
    rows = rows[rows["presentation"].isin(PAIR)].where(rows.notna(), None)
    return {
        tuple(str(row[column]) for column in ("arm", "setting", "key", "presentation")): row
        for row in rows.to_dict("records")
    }


def _pair(
    source: Source,
    item: dict[str, Any],
    name: tuple[str, str],
    attribution: dict[tuple[str, ...], dict[str, Any]],
    behaviour: dict[tuple[str, ...], dict[str, Any]],
) -> Pair:
    arms, tags = [], [f"setting:{source.settings.index(name[0])}"]
    for number, arm in enumerate(source.arms):
        measured = [attribution[arm, *name, kind] for kind in PAIR]
        given = [behaviour[arm, *name, kind] for kind in PAIR]
        answers = tuple(_answer(kind, g, m) for kind, g, m in zip(PAIR, given, measured, strict=True))
        outcome = str(measured[0]["outcome"])
        arms.append(ArmAnswers(shown(arm), outcome, answers))
        tags.append(f"outcome:{number}:{outcome}")
        tags += [f"kind:{answer.kind}" for answer in answers if not answer.correct]
    rendered = {presentation["kind"]: presentation for presentation in item["presentations"]}
    return Pair(
        setting=shown(name[0]),
        key=name[1][:12],
        cell=shown(str(item["cell"])),
        gold=shown(str(item["gold"])),
        prompts=tuple(_prompt(rendered[kind]) for kind in PAIR),
        arms=tuple(arms),
        tags=" ".join(dict.fromkeys(tags)),
    )


def _answer(kind: str, given: dict[str, Any], measured: dict[str, Any]) -> Answer:
    return Answer(
        presentation=kind,
        text=shortened(clean(str(given["text"])), ANSWER),
        read=DASH if given["answer"] is None else str(given["answer"]),
        status=str(given["status"]),
        correct=bool(measured["correct"]),
        readout=signed(float(measured["difference"])),
        # Three-valued: missing where no probe of the presentation beats shuffled labels.
        readable={True: "yes", False: "no"}.get(measured["decodable"], DASH),
        kind=str(measured["kind"]),
    )


def _prompt(presentation: dict[str, Any]) -> Prompt:
    messages = []
    for number, message in enumerate(presentation["messages"]):
        spans = [
            (span["start"], span["end"])
            for span in presentation["spans"]
            if span["label"] == "query" and span["message"] == number
        ]
        messages.append(Message(str(message["role"]), _pieces(str(message["content"]), spans)))
    return Prompt(presentation["kind"], str(presentation["gold"]), tuple(messages))


def _pieces(text: str, spans: list[tuple[int, int]]) -> tuple[tuple[str, bool], ...]:
    """The text cut at its marked spans; a long piece without its middle."""
    pieces, at = [], 0
    for start, end in sorted(spans):
        if start >= at:
            pieces += [(text[at:start], False), (text[start:end], True)]
            at = end
    pieces.append((text[at:], False))
    return tuple((shortened(clean(part), *PROMPT), marked) for part, marked in pieces if part)
