"""What a probe may be trained to read of a question about probability operators."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tasks.modals import Modals
from tasks.modals_targets import TARGETS
from tasks.registry import family
from tasks.targets import target_label, targets_of

SETS = list(Modals().generate({"names": ["letters"], "activities": ["party"]}, seed=1, split="test"))


def test_the_licensed_answer_is_validity_where_the_question_is_affirmative_and_its_contrary_where_it_is_not() -> None:
    modals = family("modals")
    assert targets_of(modals) == TARGETS and set(TARGETS) == {"validity", "polarity"}
    cells: Counter[tuple[int, int]] = Counter()
    for matched in SETS:
        for shown in matched.presentations:
            valid, affirmative = (target_label(modals, name, matched, shown) for name in ("validity", "polarity"))
            assert valid is not None and affirmative is not None
            assert (shown.gold == "yes") == (valid == affirmative)
            cells[valid, affirmative] += 1
    # By hand: 30 sets, 22 of them valid (two wordings of one pattern count twice); 5 forms affirmative and 7 negated, of
    # which one template lacks one: 22 × 5, 22 × 7 - 2, 8 × 5, 8 × 7.
    assert cells == {(1, 1): 110, (1, 0): 152, (0, 1): 40, (0, 0): 56}


def test_polarity_is_what_the_words_of_the_question_say() -> None:
    negated = ("Is it false", "incorrect", "invalid", " not ")
    for matched in islice(SETS, 8):
        if matched.instance.latent["template"] == "probably_not_probably_not":
            continue  # its conclusion denies too
        for shown in matched.presentations:
            span = next(one for one in shown.spans if one.label == "query")
            conclusion = next((one for one in shown.spans if one.label == "conclusion"), None)
            text = shown.messages[0].content
            asked = text[span.start : span.end if conclusion is None else conclusion.start]
            denies = any(word in asked for word in negated) or "Is it not" in asked
            if shown.kind.startswith("direct") and "Is it not" not in asked:
                denies = False  # a direct question has no wrapper: what it says of names may deny
            assert TARGETS["polarity"].label(matched, shown) == int(not denies), asked


def test_each_template_has_one_validity_and_both_polarities() -> None:
    by_template: dict[str, set[tuple[int | None, int | None]]] = {}
    for matched in SETS:
        for shown in matched.presentations:
            labels = tuple(TARGETS[name].label(matched, shown) for name in ("validity", "polarity"))
            by_template.setdefault(matched.instance.latent["template"], set()).add(labels)  # type: ignore[arg-type]
    assert len(by_template) == 15
    assert all(len(found) == 2 and len({valid for valid, _ in found}) == 1 for found in by_template.values())
