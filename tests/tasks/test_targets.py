"""Derived targets: read from the text by other means, balanced, and refused where a family gives something else."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from tasks.contracts import DerivedTarget, MatchedSet, Presentation, TaskError
from tasks.ordering import PRESENTATIONS, Ordering
from tasks.ordering_targets import TARGETS
from tasks.registry import family
from tasks.relations import relations
from tasks.targets import target_label, target_named, targets_of

ORDERING = Ordering()


def sets(count: int, **params: Any) -> list[MatchedSet]:
    found = ORDERING.validate({"n": 6, "presentations": PRESENTATIONS, **params})
    return list(islice(ORDERING.generate(found, seed=5, split="test"), count))


def labels(matched: MatchedSet, shown: Presentation) -> dict[str, int | None]:
    return {name: target_label(ORDERING, name, matched, shown) for name in TARGETS}


def from_text(matched: MatchedSet, shown: Presentation) -> dict[str, int | None]:
    """The same, by reading the prompt of relation front_behind."""
    names, premises, question = shown.messages[0].content.split("\n\n")
    first, phrase, second = re.match(r"Is (\w+) (in front of|behind) (\w+)\?", question).groups()
    listed = names.partition(": ")[2].rstrip(".").split(", ")
    lines = premises.split("\n")
    (own,) = (line for line in lines if first in line.rstrip(".").split())
    (other,) = (line for line in lines if second in line.rstrip(".").split())
    about = [line for line in lines if set(re.findall(r"\w+", line)) & set(matched.instance.latent["order"])]
    changed = {line for line in about if "behind" in line}
    return {
        "front_half": int(matched.instance.latent["order"][:3].count(first) == 1),
        "forward_question": int(phrase == "in front of"),
        "listed_first": int(listed.index(first) < listed.index(second)),
        "told_first": int(lines.index(own) < lines.index(other)),
        "reworded": None if len(changed) in (0, len(about)) else int(own in changed),
    }


def test_labels_are_what_the_text_says() -> None:
    seen: Counter[tuple[str, str, int | None]] = Counter()
    for matched in sets(60):
        for shown in matched.presentations:
            found = labels(matched, shown)
            assert found == from_text(matched, shown), shown
            seen.update((shown.kind, name, label) for name, label in found.items())
    assert not any(label is None for _, name, label in seen if name != "reworded")
    for kind in ("original", "fully_rewritten"):
        assert {label for one, name, label in seen if (one, name) == (kind, "reworded")} == {None}


def test_the_two_steps_make_the_gold_answer_and_are_balanced() -> None:
    made = sets(200, presentations=("original", "equivalent"))
    cells: Counter[tuple[Any, ...]] = Counter()
    for matched in made:
        for shown in matched.presentations:
            found = labels(matched, shown)
            assert (shown.gold == "yes") == (found["front_half"] == found["forward_question"])
            cells[shown.kind, shown.gold, found["front_half"]] += 1
            cells[shown.kind, "listed", found["listed_first"]] += 1
            cells[shown.kind, "told", found["told_first"]] += 1
    for kind in ("original", "equivalent"):
        # Balanced with gold exactly, since every cell of the design stands once in each block of four.
        assert {cells[kind, gold, label] for gold in ("yes", "no") for label in (0, 1)} == {50}
        for name in ("listed", "told"):
            assert 75 <= cells[kind, name, 1] <= 125  # 200 tosses: more than three standard deviations on either side


@pytest.mark.parametrize("relation", list(relations()))
def test_every_relation_has_them(relation: str) -> None:
    for matched in sets(8, n=3, relation=relation):
        for shown in matched.presentations:
            found = labels(matched, shown)
            assert (shown.gold == "yes") == (found["front_half"] == found["forward_question"])


def test_two_entities_share_their_premise() -> None:
    (matched,) = sets(1, n=2, presentations=("original", "equivalent"))
    assert [labels(matched, shown)["told_first"] for shown in matched.presentations] == [None, None]
    assert [labels(matched, shown)["reworded"] for shown in matched.presentations] == [None, None]


def test_a_family_without_targets_offers_none() -> None:
    horn = family("horn")
    assert dict(targets_of(horn)) == {}
    with pytest.raises(TaskError, match="choose gold, answer, correct, presentation, since horn derives none"):
        target_named(horn, "front_half")
    with pytest.raises(TaskError, match="unknown target 'front_haf': did you mean front_half"):
        target_named(ORDERING, "front_haf")


class Odd(Ordering):
    offered = "strange"
    value: Any = 2

    def targets(self):
        return {self.offered: DerivedTarget("whatever", lambda matched, shown: self.value)}


def test_what_a_family_gives_is_checked() -> None:
    (matched,) = sets(1)
    odd = Odd()
    with pytest.raises(TaskError, match=r"target 'strange' of 'ordering' is 2 for \w{12} original"):
        target_label(odd, "strange", matched, matched.presentations[0])
    odd.value = True
    assert target_label(odd, "strange", matched, matched.presentations[0]) == 1
    odd.offered = "gold"
    with pytest.raises(TaskError, match="offers a target 'gold', which every study has"):
        targets_of(odd)
