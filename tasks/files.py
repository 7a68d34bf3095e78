"""Matched sets as JSON lines: one set a line, self-describing, diffable.

``{key, family, version, params, latent, gold, cell, split, presentations: [{kind, gold, messages, spans, meta}]}``.
A span is ``{label, start, end, message}``: characters ``start:end`` of message number ``message``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.contracts import Instance, MatchedSet, Message, Presentation, Span, TaskError


def to_record(matched: MatchedSet, *, version: int) -> dict[str, Any]:
    """The JSON object of one matched set; ``version`` is the family's."""
    instance = matched.instance
    return {
        "key": instance.key,
        "family": instance.family,
        "version": version,
        "params": dict(instance.params),
        "latent": dict(instance.latent),
        "gold": instance.gold,
        "cell": instance.cell,
        "split": instance.split,
        "presentations": [
            {
                "kind": presentation.kind,
                "gold": presentation.gold,
                "messages": presentation.chat(),
                "spans": [
                    {"label": s.label, "start": s.start, "end": s.end, "message": s.message} for s in presentation.spans
                ],
                "meta": dict(presentation.meta),
            }
            for presentation in matched.presentations
        ],
    }


def to_line(matched: MatchedSet, *, version: int) -> str:
    """One line of an items file, newline included."""
    return json.dumps(to_record(matched, version=version), ensure_ascii=False) + "\n"


def from_record(record: Mapping[str, Any]) -> MatchedSet:
    """The matched set of one JSON object.

    Raises:
        TaskError: a field is missing.
    """
    try:
        instance = Instance(
            family=record["family"],
            key=record["key"],
            params=record["params"],
            latent=record["latent"],
            gold=record["gold"],
            cell=record["cell"],
            split=record["split"],
        )
        presentations = tuple(
            Presentation(
                kind=entry["kind"],
                messages=tuple(Message(m["role"], m["content"]) for m in entry["messages"]),
                gold=entry["gold"],
                spans=tuple(Span(s["label"], s["start"], s["end"], s.get("message", 0)) for s in entry["spans"]),
                meta=entry["meta"],
            )
            for entry in record["presentations"]
        )
    except KeyError as missing:
        raise TaskError(f"an item without {missing}: was the file written by `probe generate`?") from missing
    return MatchedSet(instance, presentations)
