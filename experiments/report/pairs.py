"""The pair browser: some pairs as the model saw them, with each arm's answers, what was measured, and why it failed.

Which pairs: for every arm in turn one pair of every outcome and then one of every label, until the page is full, so that
rare ones are there too. Within a class the order is that of a hash of the pair's name: no setting comes first, and the
choice is the same for every writing of the report.

Filters work on two levels. Outcome and setting belong to the pair; label and presentation to an answer, and a pair is
shown if one of its answers has both. Answers of a shown pair that do not match are dimmed, not hidden, since a pair is
read as a whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from experiments.items import PAIR
from experiments.link import KINDS, OUTCOMES
from experiments.report.source import Source, shown
from experiments.report.text import DASH, clean, shortened, signed
from experiments.sentences import Thresholds, agreement, bars, sentence, thresholds

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
    """What one arm said to one presentation, and what was measured when it did; logits are toward gold.

    `bars` shows the held-out margins layer by layer, `agree` the share of fold splits behind the label; both may be empty.
    """

    presentation: str
    text: str
    read: str
    status: str
    correct: bool
    readout: str
    default: str
    signal: str
    kind: str
    agree: str
    sentence: str
    bars: str
    tags: str


@dataclass(frozen=True, slots=True)
class ArmAnswers:
    arm: str
    outcome: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair; ``tags``, here and in its answers, are what the page's filter looks for."""

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
    least = thresholds(source.tables["attribution"])
    found = []
    for item in source.items:
        name = (str(item["setting"]), str(item["key"]))
        if name in chosen:
            found.append(_pair(source, item, name, attribution, behaviour, least))
    return found


def _choose(source: Source, count: int) -> list[tuple[str, str]]:
    classes = []
    for column, values in (("outcome", OUTCOMES), ("kind", KINDS)):
        for arm in source.arms:
            table = source.of("attribution", arm)
            for value in values:
                part = table.loc[table[column] == value, ["setting", "key"]].drop_duplicates()
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
    least: Thresholds,
) -> Pair:
    arms, tags = [], [f"setting:{source.settings.index(name[0])}"]
    for number, arm in enumerate(source.arms):
        measured = [attribution[arm, *name, kind] for kind in PAIR]
        given = [behaviour[arm, *name, kind] for kind in PAIR]
        answers = tuple(_answer(kind, g, m, least) for kind, g, m in zip(PAIR, given, measured, strict=True))
        outcome = str(measured[0]["outcome"])
        arms.append(ArmAnswers(shown(arm), outcome, answers))
        tags.append(f"outcome:{number}:{outcome}")
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


def _answer(kind: str, given: dict[str, Any], measured: dict[str, Any], least: Thresholds) -> Answer:
    sign = 1.0 if measured["gold"] == "yes" else -1.0
    share = measured["share"]
    return Answer(
        presentation=kind,
        text=shortened(clean(str(given["text"])), ANSWER),
        read=DASH if given["answer"] is None else str(given["answer"]),
        status=str(given["status"]),
        correct=bool(measured["correct"]),
        readout=signed(float(measured["difference"]) * sign),
        default=_logits(measured["default"]),
        signal=_logits(measured["signal"]),
        kind=str(measured["kind"]),
        agree=agreement(str(measured["kind"]), share),
        sentence=sentence(measured, status=str(given["status"])),
        bars=bars(measured, least),
        tags=f"kind:{measured['kind']} presentation:{kind}",
    )


def _logits(value: float | None) -> str:
    return DASH if value is None else signed(float(value))


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
