"""Does a family keep its promises? Everything that can be checked without a model.

* a set is of the split that was asked for; its original comes first, no kind stands in it twice, the instance's gold is the
  original's and one of the labels, and each cell has one gold answer;
* the second solver, which reads the text, finds each presentation's gold answer;
* a response with the gold answer is read and graded correct, one with another label is graded wrong;
* every span names the characters it says, and none cuts a word in two or begins or ends with a blank;
* no instance key and no prompt occurs twice, and no instance or prompt of one split occurs in another, whatever the seed;
* two kinds of presentation are two texts, and a ``repeat`` is the original's text again;
* the same seed gives the same sets, however many are asked for;
* the cells of the design are balanced, and so are the gold answers; a cell of a finite family may run out.

Two presentations of one set may be the same text by chance: with two people, a new order of their names is often the old
one. That is no defect, so prompts count as repeated only from one set to another, and two kinds only if they are the same
text in every set.

Sets are checked as they come and then dropped. What is kept are hashes and counts, so that a thousand sets with a
thousand sentences each need no more memory than small ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from tasks.contracts import SPLITS, Family, Finite, MatchedSet, Presentation, Split, TaskError

# Sets drawn once more to see whether they come out the same.
AGAIN = 100
# Fewer sets than this may well coincide in all of them by chance.
ENOUGH = 20


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


class _Tally:
    """Counts for one promise."""

    def __init__(self, promise: str) -> None:
        self.promise = promise
        self.checked = 0
        self.broken = 0
        self.example = ""

    def add(self, *, problem: str | None, checked: int = 1) -> None:
        """Count cases; a problem is described for the first one only."""
        self.checked += checked
        if problem is not None:
            self.broken += 1
            self.example = self.example or " ".join(problem.split())

    def finding(self) -> Finding:
        return Finding(self.promise, self.checked, self.broken, self.example)


def validate_family(family: Family, params: Mapping[str, Any], *, sets: int, seed: int) -> list[Finding]:
    """Check ``sets`` matched sets of each split.

    Raises:
        TaskError: bad parameters, or fewer sets than asked for.
    """
    check = _Check(family, params)
    keys: dict[Split, set[bytes]] = {split: set() for split in SPLITS}
    prompts: dict[Split, set[bytes]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        first: list[bytes] = []
        for matched in islice(family.generate(params, seed=seed, split=split), sets):
            check.add(matched, split)
            keys[split].add(_digest(matched.instance.key))
            prompts[split].update(_texts(matched).values())
            if len(first) < AGAIN:
                first.append(_digest(repr(matched)))
        if check.sets % sets:
            raise TaskError(f"{family.name} gives fewer than {sets} sets of the {split} split: ask for fewer")
        check.again(split, first, family.generate(params, seed=seed, split=split))
        # What one seed trains on, no other may test on.
        for matched in islice(family.generate(params, seed=seed + 1, split=split), sets):
            keys[split].add(_digest(matched.instance.key))
            prompts[split].update(_texts(matched).values())
    return [*check.findings(), _splits(keys, prompts)]


class _Check:
    """All promises that can be checked a set at a time, over the sets of every split."""

    def __init__(self, family: Family, params: Mapping[str, Any]) -> None:
        self.family = family
        self.params = params
        self.form = _Tally("sets have the form that a run expects")
        self.solver = _Tally("the second solver agrees with gold")
        self.grading = _Tally("gold passes and a mutated gold fails")
        self.spans = _Tally("spans name the characters they say")
        self.keys = _Tally("no instance occurs twice")
        self.prompts = _Tally("no prompt occurs twice")
        self.repeats = _Tally("a repeat is the original again")
        self.same = _Tally("the same seed gives the same sets")
        self.seen_keys: set[bytes] = set()
        self.seen_prompts: set[bytes] = set()
        self.sets = 0
        self.coincide: Counter[tuple[str, str]] = Counter()
        self.cells: Counter[tuple[Split, str]] = Counter()
        self.cell_gold: dict[str, str] = {}
        self.golds: Counter[tuple[str, str]] = Counter()

    def add(self, matched: MatchedSet, split: Split) -> None:
        instance = matched.instance
        self.sets += 1
        self.form.add(problem=self._malformed(matched, split))
        self.cells[instance.split, instance.cell] += 1
        key = _digest(instance.key)
        self.keys.add(problem=instance.key if key in self.seen_keys else None)
        self.seen_keys.add(key)
        self._solve(matched)
        self._compare(matched)
        for shown in matched.presentations:
            self.golds[shown.kind, shown.gold] += 1
            self._grade(matched, shown)
            self._span(matched, shown)

    def _malformed(self, matched: MatchedSet, split: Split) -> str | None:
        """What is wrong with the records themselves; None if nothing is."""
        instance, key = matched.instance, matched.instance.key[:12]
        kinds = [shown.kind for shown in matched.presentations]
        if instance.split != split:
            return f"{key}: of the {instance.split} split, asked for {split}"
        if not kinds or kinds[0] != "original" or len(set(kinds)) != len(kinds):
            return f"{key}: presentations {', '.join(kinds) or 'missing'}; 'original' comes first and none stands twice"
        if instance.gold != matched.presentations[0].gold:
            return f"{key}: gold {instance.gold}, but {matched.presentations[0].gold} in the original"
        for shown in matched.presentations:
            if self.family.answers and shown.gold not in self.family.answers:
                return f"{_place(matched, shown)}: gold {shown.gold} is none of {', '.join(self.family.answers)}"
        if self.cell_gold.setdefault(instance.cell, instance.gold) != instance.gold:
            return f"{key}: cell {instance.cell} has both gold {self.cell_gold[instance.cell]} and {instance.gold}"
        return None

    def _solve(self, matched: MatchedSet) -> None:
        found: Mapping[str, str] | None = {}
        try:
            found = self.family.verify(matched)
        except TaskError as error:
            self.solver.add(problem=f"{matched.instance.key[:12]}: {error}", checked=len(matched.presentations))
            return
        for shown in matched.presentations:
            solved = (found or {}).get(shown.kind)
            wrong = f"{_place(matched, shown)}: gold {shown.gold}, {f'solved {solved}' if solved else 'not solved'}"
            self.solver.add(problem=None if solved == shown.gold else wrong)

    def _grade(self, matched: MatchedSet, shown: Presentation) -> None:
        for label, variants in (self.family.answers or {}).items():
            grade = self.family.grade(self.family.parse(variants[0], shown), shown)
            wrong = grade.correct != (label == shown.gold)
            self.grading.add(problem=f"{_place(matched, shown)}: {label!r} graded {grade.correct}" if wrong else None)

    def _span(self, matched: MatchedSet, shown: Presentation) -> None:
        for span in shown.spans:
            text = shown.messages[span.message].content if 0 <= span.message < len(shown.messages) else ""
            inside = 0 <= span.start < span.end <= len(text)
            kind, _, name = span.label.partition(":")
            said = text[span.start : span.end]
            wrong = (
                not inside
                or (kind == "name" and said != name)
                or said != said.strip()
                or _within_word(text, span.start)
                or _within_word(text, span.end)
            )
            self.spans.add(
                problem=f"{_place(matched, shown)}: span {span.label} holds {said[:60]!r}" if wrong else None
            )

    def _compare(self, matched: MatchedSet) -> None:
        """Prompts of this set with each other, and with those of all sets before it."""
        shown = {one.kind: one for one in matched.presentations}
        repeat = shown.get("repeat")
        if repeat is not None:
            original = matched.presentations[0]
            differs = repeat.messages != original.messages or repeat.gold != original.gold
            self.repeats.add(problem=f"{_place(matched, repeat)} differs from the original" if differs else None)
        texts = _texts(matched)
        for (kind, text), (other, other_text) in combinations(texts.items(), 2):
            self.coincide[kind, other] += text == other_text
        for kind, text in texts.items():
            said = shown[kind].messages[-1].content
            self.prompts.add(problem=said[:80] if text in self.seen_prompts else None)
        self.seen_prompts.update(texts.values())

    def again(self, split: Split, first: list[bytes], drawn: Iterator[MatchedSet]) -> None:
        for number, (before, matched) in enumerate(zip(first, islice(drawn, len(first)), strict=True)):
            changed = before != _digest(repr(matched))
            self.same.add(problem=f"{split} set {number} came out another way" if changed else None)

    def findings(self) -> list[Finding]:
        tallies = [self.form, self.solver, self.grading, self.spans, self.keys, self.prompts]
        if self.repeats.checked:
            tallies.append(self.repeats)
        found = [tally.finding() for tally in tallies]
        if self.coincide:
            found.append(self._kinds())
        found += [self.same.finding(), self._balance()]
        if self.family.answers:
            found.append(self._label_shift(self.family.answers))
        return found

    def _kinds(self) -> Finding:
        tally = _Tally("two kinds are two texts")
        for (kind, other), count in self.coincide.items():
            always = count == self.sets >= ENOUGH
            problem = (
                f"{kind} and {other} are the same text in all {count} sets: ask for one of them" if always else None
            )
            tally.add(problem=problem)
        return tally.finding()

    def _balance(self) -> Finding:
        tally = _Tally("cells are balanced")
        for split in SPLITS:
            cells = self._counts(split)
            ends = self._ends(split)
            behind = [
                cell for cell, count in cells.items() if count < max(cells.values()) - 1 and count != ends.get(cell)
            ]
            tally.add(problem=f"{split}: {cells}" if behind else None, checked=sum(cells.values()))
        return tally.finding()

    def _counts(self, split: Split) -> dict[str, int]:
        return {cell: count for (part, cell), count in self.cells.items() if part == split}

    def _ends(self, split: Split) -> Mapping[str, int]:
        """Sets that a finite family has of each cell; empty for one that has no end."""
        return self.family.cells(self.params, split=split) if isinstance(self.family, Finite) else {}

    def _label_shift(self, labels: Iterable[str]) -> Finding:
        """Cells may each be one set apart in each split, or as far as one that ran out lags behind.

        A set that lacks a kind is one more. A larger difference is the design's.
        """
        tally = _Tally("gold answers are balanced")
        allowed = len(self.cells)
        for split in SPLITS:
            cells, ends = self._counts(split), self._ends(split)
            allowed += sum(max(cells.values()) - count for cell, count in cells.items() if count == ends.get(cell))
        for kind in dict.fromkeys(kind for kind, _ in self.golds):
            golds = {label: self.golds[kind, label] for label in labels}
            lacking = self.sets - sum(golds.values())
            uneven = max(golds.values()) - min(golds.values()) > allowed + lacking
            tally.add(problem=f"{kind}: {golds}" if uneven else None, checked=sum(golds.values()))
        return tally.finding()


def _splits(keys: Mapping[Split, set[bytes]], prompts: Mapping[Split, set[bytes]]) -> Finding:
    """Keys and prompts of the splits, each under two seeds. A key that names more than the latent can hide a leak."""
    tally = _Tally("splits are disjoint across seeds")
    tally.add(problem=None, checked=sum(map(len, keys.values())))
    for a, b in combinations(SPLITS, 2):
        for key in keys[a] & keys[b]:
            tally.add(problem=f"{a} and {b}: {key.hex()}", checked=0)
        if not keys[a] & keys[b]:
            for prompt in prompts[a] & prompts[b]:
                tally.add(problem=f"{a} and {b}: other keys, but one prompt ({prompt.hex()})", checked=0)
    return tally.finding()


def _texts(matched: MatchedSet) -> dict[str, bytes]:
    """Hashes of the prompts by kind, but for the repeat, which repeats one."""
    return {one.kind: _digest(repr(one.messages)) for one in matched.presentations if one.kind != "repeat"}


def _within_word(text: str, place: int) -> bool:
    """Whether a letter or digit stands on both sides; in scripts that leave no blanks between words, it may."""
    around = text[max(place - 1, 0) : place + 1]
    return place > 0 and len(around) == 2 and around.isascii() and around.isalnum()


def _place(matched: MatchedSet, shown: Presentation) -> str:
    return f"{matched.instance.key[:12]} {shown.kind}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]
