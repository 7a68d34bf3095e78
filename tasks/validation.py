"""Does a family keep its promises? Everything that can be checked without a model.

* the second solver, which reads the text, finds each presentation's gold answer;
* a response with the gold answer is read and graded correct, one with another label is graded wrong;
* every span names the characters it says;
* no instance key and no prompt occurs twice, and no instance of one split occurs in another, whatever the seed;
* the cells of the design are balanced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tasks.contracts import SPLITS, Family, MatchedSet, TaskError


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise: how many cases were checked, how many broke it, and the first that did."""

    promise: str
    checked: int
    broken: int
    example: str

    @property
    def ok(self) -> bool:
        return self.broken == 0


def validate_family(family: Family, params: Mapping[str, Any], *, sets: int, seed: int) -> list[Finding]:
    """Check ``sets`` matched sets of each split.

    Raises:
        TaskError: bad parameters, or fewer sets than asked for.
    """
    drawn = {split: list(islice(family.generate(params, seed=seed, split=split), sets)) for split in SPLITS}
    every = [matched for part in drawn.values() for matched in part]
    return [
        _solver(family, every),
        _grading(family, every),
        _spans(every),
        _unique("no instance occurs twice", [matched.instance.key for matched in every]),
        _unique("no prompt occurs twice", [str(shown.messages) for m in every for shown in m.presentations]),
        _splits(family, params, sets=sets, seed=seed),
        _balance(drawn["test"]),
    ]


def _solver(family: Family, every: list[MatchedSet]) -> Finding:
    checked, broken = 0, []
    for matched in every:
        try:
            found = family.verify(matched)
        except TaskError as error:
            found = {}
            broken.append(f"{matched.instance.key[:12]}: {error}")
        for shown in matched.presentations:
            checked += 1
            if shown.kind in found and found[shown.kind] != shown.gold:
                broken.append(
                    f"{matched.instance.key[:12]} {shown.kind}: gold {shown.gold}, solved {found[shown.kind]}"
                )
    return _finding("the second solver agrees with gold", checked, broken)


def _grading(family: Family, every: list[MatchedSet]) -> Finding:
    checked, broken = 0, []
    labels = family.answers or {}
    for matched in every:
        for shown in matched.presentations:
            for label, variants in labels.items():
                checked += 1
                grade = family.grade(family.parse(variants[0], shown), shown)
                if grade.correct != (label == shown.gold):
                    broken.append(f"{matched.instance.key[:12]} {shown.kind}: {label!r} graded {grade.correct}")
    return _finding("gold passes and a mutated gold fails", checked, broken)


def _spans(every: list[MatchedSet]) -> Finding:
    checked, broken = 0, []
    for matched in every:
        for shown in matched.presentations:
            for span in shown.spans:
                checked += 1
                text = shown.messages[span.message].content
                inside = 0 <= span.start < span.end <= len(text)
                kind, _, name = span.label.partition(":")
                if not inside or (kind == "name" and text[span.start : span.end] != name):
                    broken.append(f"{matched.instance.key[:12]} {shown.kind}: span {span.label}")
    return _finding("spans name the characters they say", checked, broken)


def _unique(promise: str, values: list[str]) -> Finding:
    twice = [value for value, count in Counter(values).items() if count > 1]
    return _finding(promise, len(values), [value[:80] for value in twice])


def _splits(family: Family, params: Mapping[str, Any], *, sets: int, seed: int) -> Finding:
    """Keys of the splits, each under two seeds: what one seed trains on, no other may test on."""
    keys: dict[str, set[str]] = {}
    for split in SPLITS:
        keys[split] = {
            matched.instance.key
            for one in (seed, seed + 1)
            for matched in islice(family.generate(params, seed=one, split=split), sets)
        }
    pairs = [(a, b) for i, a in enumerate(SPLITS) for b in SPLITS[i + 1 :]]
    broken = [f"{a} and {b}: {key[:12]}" for a, b in pairs for key in keys[a] & keys[b]]
    return _finding("splits are disjoint across seeds", sum(map(len, keys.values())), broken)


def _balance(test: list[MatchedSet]) -> Finding:
    cells = Counter(matched.instance.cell for matched in test)
    uneven = max(cells.values()) - min(cells.values()) > 1
    return _finding("cells are balanced", len(test), [str(dict(cells))] if uneven else [])


def _finding(promise: str, checked: int, broken: list[str]) -> Finding:
    return Finding(promise, checked, len(broken), broken[0] if broken else "")
