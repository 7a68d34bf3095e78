"""What ``validate_family`` promises: each kind of broken family is found, and found by the right promise alone."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tasks.contracts import MatchedSet, Message, Presentation, Span, TaskError
from tasks.horn import Horn
from tasks.validation import validate_family

ALL = {"presentations": ["original", "equivalent", "repeat"]}


class Changed(Horn):
    """Horn clauses with every set passed through ``change``, which knows the set's number and its split."""

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
        for number, matched in enumerate(super().generate(params, seed=seed, split=split)):
            yield self.change(matched, number, seed, split)

    def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
        return matched


def broken(found: Horn, *, sets: int = 24, **params: Any) -> dict[str, tuple[int, str]]:
    findings = validate_family(found, found.validate(params or ALL), sets=sets, seed=0)
    return {one.promise: (one.broken, one.example) for one in findings if not one.ok}


def edited(matched: MatchedSet, kind: str, **changes: Any) -> MatchedSet:
    return replace(
        matched,
        presentations=tuple(replace(p, **changes) if p.kind == kind else p for p in matched.presentations),
    )


def test_a_good_family_has_no_findings_and_every_promise_is_checked() -> None:
    findings = validate_family(Horn(), Horn().validate(ALL), sets=24, seed=0)
    checked = {one.promise: one.checked for one in findings}
    assert all(one.ok and not one.example for one in findings)
    spans = checked.pop("spans name the characters they say")
    assert spans > 24 * 3 * 3 * 10
    assert checked == {
        "sets have the form that a run expects": 72,
        "the second solver agrees with gold": 216,
        "gold passes and a mutated gold fails": 432,
        "no instance occurs twice": 72,
        "no prompt occurs twice": 144,
        "a repeat is the original again": 72,
        "two kinds are two texts": 1,
        "the same seed gives the same sets": 72,
        "cells are balanced": 72,
        "gold answers are balanced": 216,
        "splits are disjoint across seeds": 144,
    }


def test_a_wrong_gold_and_an_unreadable_text_are_found_by_the_solver() -> None:
    class Wrong(Horn):
        def verify(self, matched: MatchedSet) -> Mapping[str, str]:
            return {**super().verify(matched), "equivalent": "yes"}

    class Unreadable(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            text = matched["equivalent"].messages[0].content.replace(" hold.", " holds.")
            return edited(matched, "equivalent", messages=(Message("user", text),))

    assert broken(Wrong()).keys() == {"the second solver agrees with gold"}
    assert broken(Wrong())["the second solver agrees with gold"][0] == 36
    count, example = broken(Unreadable())["the second solver agrees with gold"]
    assert count > 60 and "can't read the sentence" in example

    class Silent(Horn):
        def verify(self, matched: MatchedSet) -> Mapping[str, str]:
            return {"original": matched.instance.gold}

    assert broken(Silent()).keys() == {"the second solver agrees with gold"}
    count, example = broken(Silent())["the second solver agrees with gold"]
    assert count == 144 and "equivalent: gold" in example and "not solved" in example


def with_instance(**changes: Any) -> Horn:
    """The family, with every fifth instance changed."""

    class Other(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            return matched if number % 5 else replace(matched, instance=replace(matched.instance, **changes))

    return Other()


def with_presentations(chosen: Any) -> Horn:
    class Other(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            return replace(matched, presentations=chosen(matched.presentations))

    return Other()


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (with_instance(split="test"), "of the test split, asked for train"),
        (with_instance(gold="yes"), "gold yes, but no in the original"),
        (with_instance(cell="all"), "cell all has both gold"),
        (with_presentations(lambda shown: shown[1:2]), "presentations equivalent; 'original' comes first"),
        (with_presentations(lambda shown: (shown[0], shown[0])), "presentations original, original; 'original' comes"),
        (with_presentations(lambda shown: ()), "presentations missing"),
        (
            with_presentations(lambda shown: (shown[0], replace(shown[1], gold="maybe"))),
            "gold maybe is none of yes, no",
        ),
    ],
)
def test_records_that_a_run_could_not_use_are_found(family: Horn, said: str) -> None:
    assert said in broken(family)["sets have the form that a run expects"][1]


def test_a_parser_that_says_yes_to_everything_is_found() -> None:
    class Yes(Horn):
        def parse(self, response: str, presentation: Presentation, **how: Any) -> Any:
            return super().parse("Yes", presentation)

    assert broken(Yes()).keys() == {"gold passes and a mutated gold fails"}


@pytest.mark.parametrize(
    "span",
    [
        Span("fact:0", 5, 5),
        Span("rule:0", 0, 10**6),
        Span("name:tavu", 0, 4),
        Span("first:0", 0, 9, message=1),
        Span("one-off:0", 1, 9),  # "omething" of "Something holds"
        Span("one-off:1", 0, 8),
        Span("one-off:2", 0, 10),
    ],
)
def test_a_bad_span_is_found(span: Span) -> None:
    class Spans(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            return edited(matched, "original", spans=(span,)) if number == 3 else matched

    assert {k: v[0] for k, v in broken(Spans()).items()} == {"spans name the characters they say": 3}


def test_a_prompt_that_comes_twice_is_found_and_its_beginning_shown() -> None:
    class Twice(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            if number % 12 == 0:
                self.kept = matched["equivalent"]
            if number % 12 == 2 and matched.instance.gold == self.kept.gold:
                return edited(matched, "equivalent", messages=self.kept.messages, spans=())
            return matched

    found = broken(Twice(), presentations=["original", "equivalent"])
    assert found.keys() == {"no prompt occurs twice"}
    example = found["no prompt occurs twice"][1]
    assert example.startswith("Something holds only if") and "\n" not in example


def test_a_key_that_comes_twice_and_a_key_of_another_split_are_found() -> None:
    class Keys(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            same = number == 5 and split == "train"
            return replace(matched, instance=replace(matched.instance, key="a" * 64)) if same else matched

    assert broken(Keys()) == {}

    class Within(Keys):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            return super().change(matched, 5 if number in (5, 6) else number, seed, split)

    assert broken(Within()) == {"no instance occurs twice": (1, "a" * 64)}

    class Across(Changed):
        """One seed's training set holds another seed's test set."""

        def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
            tests = super().generate(params, seed=0, split="test")
            return tests if (seed, split) == (1, "train") else super().generate(params, seed=seed, split=split)

    assert {k: v[0] for k, v in broken(Across()).items()} == {"splits are disjoint across seeds": 24}

    class Hidden(Across):
        """The same, under keys of its own."""

        def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
            for one in super().generate(params, seed=seed, split=split):
                key = one.instance.key[::-1] if (seed, split) == (1, "train") else one.instance.key
                yield replace(one, instance=replace(one.instance, key=key))

    assert {k: v[0] for k, v in broken(Hidden()).items()} == {"splits are disjoint across seeds": 48}


def test_a_repeat_may_repeat_and_has_to() -> None:
    class Other(Changed):
        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            text = matched["repeat"].messages[0].content.replace("\n\nDoes", "\nDoes")
            return edited(matched, "repeat", messages=(Message("user", text),), spans=())

    found = broken(Other())
    assert {k: v[0] for k, v in found.items()} == {"a repeat is the original again": 72}
    assert "repeat differs from the original" in found["a repeat is the original again"][1]


def test_two_kinds_may_coincide_in_some_sets_but_not_in_all() -> None:
    class Some(Changed):
        some = range(23)

        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            same = matched["original"].messages
            return edited(matched, "equivalent", messages=same, spans=()) if number in self.some else matched

    class All(Some):
        some = range(24)

    assert broken(Some(), presentations=["original", "equivalent"]) == {}
    found = broken(All(), presentations=["original", "equivalent"])
    assert found.keys() == {"two kinds are two texts"}
    assert "original and equivalent are the same text in all 72 sets" in found["two kinds are two texts"][1]
    assert broken(All(), sets=4, presentations=["original", "equivalent"]) == {}


def test_sets_that_depend_on_the_call_are_found() -> None:
    class Counting(Changed):
        calls = 0

        def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
            self.calls += 1
            return itertools.islice(super().generate(params, seed=seed, split=split), self.calls % 2, None)

    found = broken(Counting(), n=8)
    assert "the same seed gives the same sets" in found
    assert found["the same seed gives the same sets"][1] == "train set 0 came out another way"


def test_unbalanced_cells_and_golds_are_found() -> None:
    class Skewed(Changed):
        def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
            every = super().generate(params, seed=seed, split=split)
            return (matched for i, matched in enumerate(every) if matched.instance.gold == "yes" or i % 3 == 0)

    found = broken(Skewed())
    assert found.keys() == {"cells are balanced", "gold answers are balanced"}
    assert "'derived-yes'" in found["cells are balanced"][1] and "'yes'" in found["gold answers are balanced"][1]

    class OneCell(Skewed):
        """Names of cells that hide it from the count of cells."""

        def change(self, matched: MatchedSet, number: int, seed: int, split: str) -> MatchedSet:
            return replace(matched, instance=replace(matched.instance, cell="all"))

    assert broken(OneCell()).keys() == {"gold answers are balanced", "sets have the form that a run expects"}


def test_a_family_that_runs_out_is_refused() -> None:
    class Few(Changed):
        def generate(self, params: Mapping[str, Any], *, seed: int, split: Any) -> Iterator[MatchedSet]:
            return itertools.islice(super().generate(params, seed=seed, split=split), 5)

    with pytest.raises(TaskError, match="horn gives fewer than 8 sets of the train split"):
        validate_family(Few(), Few().validate({}), sets=8, seed=0)


def test_memory_does_not_grow_with_the_number_of_sets() -> None:
    """Held as sets, three splits of 32 programs with 64 rules would be some 5 MB of text and spans."""
    params = Horn().validate({"n": 64})
    next(Horn().generate(params, seed=0, split="test"))
    peaks = []
    for sets in (4, 32):
        tracemalloc.start()
        try:
            validate_family(Horn(), params, sets=sets, seed=0)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 200_000
