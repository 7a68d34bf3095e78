"""The family of probability operators: counts, gold answers, order, splits, parameters, answers, records."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.contracts import SPLITS, Directional, Finite, MatchedSet, Split, TaskError
from tasks.files import from_record, to_line
from tasks.horn import Horn
from tasks.modals import Modals
from tasks.modals_text import KINDS, PRESENTATIONS
from tasks.registry import family, family_names
from tasks.validation import validate_family

FAMILY = Modals()
FIVE = ("truth", "correct", "valid", "follow", "direct")


def sets(count: int | None = None, *, seed: int = 0, split: Split = "test", **params: Any) -> list[MatchedSet]:
    return list(itertools.islice(FAMILY.generate(params, seed=seed, split=split), count))


EVERY = sets()


def texts(found: list[MatchedSet]) -> list[str]:
    return [shown.messages[0].content for one in found for shown in one.presentations]


# --- the counts of the paper -----------------------------------------------------------------------------------------


def test_the_counts_of_the_paper() -> None:
    combinations = Counter((one.instance.latent["template"], p.kind) for one in EVERY for p in one.presentations)
    assert len({template for template, _ in combinations}) == 15
    assert len({one.instance.latent["pattern"] for one in EVERY}) == 13
    assert len(combinations) == 179 and set(combinations.values()) == {80}
    assert len(EVERY) == 1_200 and len(texts(EVERY)) == len(set(texts(EVERY))) == 14_320
    lacking = {(t, k) for t in {t for t, _ in combinations} for k in KINDS} - set(combinations)
    assert lacking == {("probably_not_probably_not", "direct_negated")}
    # Where one form is negated both ways.
    styles = Counter(
        p.meta["negation"] for one in EVERY for p in one.presentations if p.meta["form"] in ("correct", "valid")
    )
    assert styles == {"none": 2_400, "prefix": 2_400, "not": 2_400}


def test_the_four_cells_of_the_five_forms() -> None:
    """55, 54, 20 and 20 combinations: the weights under which the paper's accuracies follow from its cells."""
    cells = Counter(
        (one.instance.cell, p.meta["polarity"])
        for one in EVERY
        for p in one.presentations
        if p.kind not in ("not_correct", "not_valid")
    )
    assert {cell: count / 80 for cell, count in cells.items()} == {
        ("valid", "affirmative"): 55,
        ("valid", "negated"): 54,
        ("invalid", "affirmative"): 20,
        ("invalid", "negated"): 20,
    }


def test_affirmative_forms_keep_the_gold_and_negated_forms_flip_it() -> None:
    for one in EVERY:
        gold = one.instance.gold
        assert gold == ("yes" if one.instance.cell == "valid" else "no")
        for p in one.presentations:
            assert (p.gold == gold) == (p.meta["polarity"] == "affirmative"), p.kind
            assert (p.meta["polarity"] == "negated") == (p.kind.endswith("_negated") or p.kind.startswith("not_"))


def test_contents_are_the_grid_of_names_and_activities() -> None:
    contents = Counter((one.instance.latent["group"], one.instance.latent["gender"], one.instance.latent["activity"])
                       for one in EVERY)  # fmt: skip
    assert len(contents) == 80 and set(contents.values()) == {15}
    groups = {group for group, _, _ in contents}
    assert groups == {"indian", "russian", "japanese", "african", "german", "french", "american", "letters"}
    assert {gender for group, gender, _ in contents if group != "letters"} == {"women", "men"}
    letters = {tuple(one.instance.latent["names"]) for one in EVERY if one.instance.latent["group"] == "letters"}
    assert letters == {("X", "Y"), ("Y", "X")}


def test_the_paper_shows_this_example_of_its_forms() -> None:
    """Table 2: Must to Probably about Savir at the party."""
    (one,) = [
        m for m in EVERY if m.instance.latent["template"] == "must_probably" and m.instance.latent["names"][0] == "Savir"
        and m.instance.latent["activity"] == "party"
    ]  # fmt: skip
    asked = {p.kind: p.messages[0].content for p in one.presentations}
    assert all(text.startswith("Savir must be at the party.\n\n") for text in asked.values())
    assert all(text.endswith("? Answer with Yes or No only.") for text in asked.values())
    question = {kind: text.split("\n\n")[1].split("?")[0] for kind, text in asked.items()}
    said = "it is probable that Savir will be at the party"
    assert question == {
        "original": f"Is it true that {said}",
        "correct": f"Is it correct that {said}",
        "valid": f"Is it valid to conclude that {said}",
        "follow": f"Does it follow that {said}",
        "direct": "Is it probable that Savir will be at the party",
        "truth_negated": f"Is it false that {said}",
        "correct_negated": f"Is it incorrect that {said}",
        "valid_negated": f"Is it invalid to conclude that {said}",
        "follow_negated": f"Does it not follow that {said}",
        "direct_negated": "Is it not probable that Savir will be at the party",
        "not_correct": f"Is it not correct that {said}",
        "not_valid": f"Is it not valid to conclude that {said}",
    }


# --- the second solver, and the promises of a family -----------------------------------------------------------------


def test_the_second_solver_agrees_on_every_prompt_of_every_split() -> None:
    for split in SPLITS:
        for one in sets(split=split):
            found = FAMILY.verify(one)
            assert found == {p.kind: p.gold for p in one.presentations}


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 200),
        ({}, 1_200),
        ({"presentations": list(PRESENTATIONS[:2]) + ["equivalent", "repeat"], "equivalent": "follow"}, 640),
        ({"templates": ["core"], "names": ["letters"], "prompt": "reasoning"}, 90),
        ({"templates": ["valid"], "activities": ["party"]}, 176),
        ({"templates": ["probably_might"]}, 80),
    ],
)
def test_every_promise_of_a_family_is_kept(params: dict[str, Any], count: int) -> None:
    # One validity has one gold answer, which is what the last promise is about.
    one_validity = params.get("templates") in (["valid"], ["probably_might"])
    expected = {"gold answers are balanced"} if one_validity else set()
    findings = validate_family(FAMILY, FAMILY.validate(params), sets=count, seed=0)
    assert {one.promise for one in findings if not one.ok} == expected


def test_a_cell_may_run_out_and_may_not_lag_behind() -> None:
    class Lagging(Modals):
        """Every third invalid set is lost, though there are more to give."""

        def generate(self, params: Any, *, seed: int, split: Split) -> Any:
            found = enumerate(super().generate(params, seed=seed, split=split))
            return (one for place, one in found if one.instance.gold == "yes" or place % 3)

    findings = validate_family(Lagging(), Lagging().validate({}), sets=200, seed=0)
    assert {one.promise for one in findings if not one.ok} == {"cells are balanced", "gold answers are balanced"}


def test_one_set_more_than_there_are_is_refused() -> None:
    with pytest.raises(TaskError, match="fewer than 1201 sets"):
        validate_family(FAMILY, FAMILY.validate({}), sets=1_201, seed=0)


def test_all_prompts_are_made_and_validated_in_two_seconds() -> None:
    started = time.process_time()
    wrong = sum(FAMILY.verify(one) != {p.kind: p.gold for p in one.presentations} for one in sets(seed=7))
    assert wrong == 0 and time.process_time() - started < 2.0


# --- order, seeds, splits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 17])
def test_a_beginning_is_balanced(seed: int) -> None:
    first = sets(80, seed=seed)
    assert Counter(one.instance.cell for one in first) == {"valid": 40, "invalid": 40}
    by_template = Counter(one.instance.latent["template"] for one in first)
    valid = [n for t, n in by_template.items() if t in VALID]
    invalid = [n for t, n in by_template.items() if t not in VALID]
    assert sorted(valid) == [3] * 4 + [4] * 7 and invalid == [10] * 4
    groups = Counter(one.instance.latent["group"] for one in first)
    activities = Counter(one.instance.latent["activity"] for one in first)
    assert len(groups) == 8 and max(groups.values()) <= 14 and min(groups.values()) >= 6
    assert len(activities) == 5 and max(activities.values()) - min(activities.values()) <= 6


VALID = {one.instance.latent["template"] for one in EVERY if one.instance.gold == "yes"}


def test_cells_alternate_until_the_invalid_sets_run_out() -> None:
    cells = [one.instance.cell for one in EVERY]
    assert all({cells[i], cells[i + 1]} == {"valid", "invalid"} for i in range(0, 640, 2))
    assert set(cells[640:]) == {"valid"} and len(VALID) == 11


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    other = sets(seed=5)
    assert [one.instance.key for one in other] != [one.instance.key for one in EVERY]
    by_key = {one.instance.key: one for one in other}
    assert {one.instance.key: one for one in EVERY} == by_key
    assert sets(30, seed=5) == other[:30]


def test_presentations_prompt_and_equivalent_leave_the_instances_alone() -> None:
    plain = [one.instance.key for one in sets(60)]
    for params in ({"presentations": ["original"]}, {"prompt": "reasoning"}, {"equivalent": "direct"}):
        assert [one.instance.key for one in sets(60, **params)] == plain


def test_each_split_is_the_whole_grid_about_other_people() -> None:
    keys, prompts, names = {}, {}, {}
    for split in SPLITS:
        found = sets(split=split)
        keys[split], prompts[split] = {one.instance.key for one in found}, set(texts(found))
        names[split] = {name for one in found for name in one.instance.latent["names"]}
        assert len(keys[split]) == 1_200 and len(prompts[split]) == 14_320
    for a, b in itertools.combinations(SPLITS, 2):
        assert not keys[a] & keys[b] and not prompts[a] & prompts[b] and not names[a] & names[b]


@pytest.mark.parametrize(
    ("split", "digest"),
    [("test", "8f69e176de4d129d"), ("train", "4e9c47dce55ea26f")],
)
def test_golden_hashes(split: Split, digest: str) -> None:
    """A change of any prompt, key, gold or of the order has to raise the version."""
    assert FAMILY.version == 1
    lines = "".join(to_line(one, version=FAMILY.version) for one in sets(seed=1, split=split))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == digest


# --- parameters ------------------------------------------------------------------------------------------------------


def test_subsets() -> None:
    def chosen(*words: str) -> set[str]:
        return {one.instance.latent["pattern"] for one in sets(templates=list(words), names=["letters_first"],
                                                               activities=["party"])}  # fmt: skip

    invalid = {"conjunctivitis", "might_probably", "probably_certain"}
    basic = {"probably_might", "must_probably", "distribution", "chancy_disjunction_introduction"}
    assert chosen("core") == invalid | basic
    assert chosen("contested") == {"probably_not_probably_not", "conditional_comparative"}
    assert chosen("uncontested") == chosen("all") - chosen("contested") and len(chosen("all")) == 13
    assert chosen("invalid") == invalid and chosen("valid", "invalid") == chosen("all")
    assert chosen("distribution_first", "might_probably") == {"distribution", "might_probably"}
    assert FAMILY.cells({"templates": ["core"]}, split="test") == {"valid": 400, "invalid": 320}
    assert FAMILY.cells({"templates": "contested", "names": "women", "activities": "event"}, split="train") == {
        "valid": 14
    }
    assert len(sets(names=["indian", "letters"])) == 300 and len(sets(names=["people"])) == 1_050


def test_a_content_does_not_depend_on_the_activities_that_are_asked_for() -> None:
    """The second activity of a template with two is the next of the catalog, not of the choice."""
    alone = texts(sets(templates=["conjunctivitis_activities"], activities=["party"]))
    assert set(alone) <= set(texts(EVERY)) and all("both the party and the event" in text for text in alone)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"n": 4},
            "modals has no parameter 'n' (a question about probability operators has no size): choose from templates",
        ),
        ({"template": ["core"]}, "modals has no parameter 'template': did you mean templates?"),
        ({"templates": ["cor"]}, "templates has 'cor': did you mean core? choose from all, valid, invalid, core"),
        ({"templates": []}, "templates is (): give a list of all, valid"),
        ({"templates": ["core", "core"]}, "templates has 'core' twice"),
        ({"names": ["martian"]}, "names has 'martian': "),
        ({"names": 3}, "names is 3: give a list"),
        ({"activities": ["brunch"]}, "activities has 'brunch': "),
        ({"presentations": ["correct"]}, "presentations is correct: 'original' comes first"),
        ({"presentations": ["original", "negated"]}, "presentations has 'negated': "),
        ({"presentations": ["original", "follow", "equivalent"]}, "holds equivalent and 'follow', which are one text"),
        ({"equivalent": "truth"}, "equivalent is 'truth': choose one of correct"),
        ({"prompt": "loud"}, "prompt is 'loud': choose direct or reasoning"),
        ({"catalog": "nowhere"}, "catalog is 'nowhere': choose paper, or give path/to/file.toml"),
        ({"catalog": "nowhere.toml"}, "catalog file 'nowhere.toml' can't be read (No such file or directory)"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as error:
        FAMILY.validate(params)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("seed", "split"), [(-1, "test"), (True, "test"), (0, "dev")])
def test_bad_seeds_and_splits_are_refused_at_the_call(seed: Any, split: Any) -> None:
    with pytest.raises(TaskError, match=r"bad seed|unknown split"):
        FAMILY.generate({}, seed=seed, split=split)


def test_parameters_are_listed_as_they_are_allowed() -> None:
    listed = {one.name: one for one in FAMILY.parameters()}
    assert FAMILY.validate({}) == {name: one.default for name, one in listed.items()}
    for name in ("templates", "names", "activities"):
        assert listed[name].takes_list
        for choice in listed[name].choices or ():
            assert FAMILY.validate({name: [choice]})[name] == [choice]
    assert "modals" in family_names() and family("modals").name == "modals"


# --- presentations for pairs, answers, records -----------------------------------------------------------------------


def test_equivalent_is_one_of_the_affirmative_forms_and_repeat_the_original() -> None:
    for form in ("correct", "valid", "follow", "direct"):
        kinds = ["original", "equivalent", "repeat"]
        for one in sets(20, presentations=kinds, equivalent=form):
            original, equivalent, repeat = one.presentations
            assert equivalent.meta["form"] == form and equivalent.gold == original.gold == repeat.gold
            assert repeat.messages == original.messages
            assert FAMILY.verify(one)["equivalent"] == original.gold


@pytest.mark.parametrize(
    ("said", "status", "value"),
    [
        ("Yes", "parsed", "yes"),
        ("**No.**", "parsed", "no"),
        ("The answer is yes.", "parsed", "yes"),
        # Means yes under "Is it invalid …?" and no under "Is it valid …?".
        ("Invalid", "unparsed", None),
        ("Incorrect.", "unparsed", None),
        ("Not necessarily.", "abstained", None),
        ("It cannot be determined.", "abstained", None),
        ("I can't help with that.", "refused", None),
    ],
)
def test_reading_an_answer(said: str, status: str, value: str | None) -> None:
    shown = EVERY[0].presentations[0]
    for text in (said, said + " " * 80):
        found = FAMILY.parse(text, shown)
        assert (found.status, found.value) == (status, value)
        assert FAMILY.grade(found, shown).correct == (value == shown.gold)


def test_short_answers_are_not_mixed_up_between_prompts() -> None:
    """What a text means depends on how the prompt asked and why the response ended."""
    direct = EVERY[0].presentations[0]
    reasoning = sets(1, prompt="reasoning")[0].presentations[0]
    text = "Yes, so it seems"
    assert FAMILY.parse(text, direct, finish_reason="length").status == "parsed"
    assert FAMILY.parse(text, reasoning, finish_reason="length").status == "truncated"
    assert FAMILY.parse(text, direct, prompt_opened_think=True).status == "unparsed"


def test_spans_name_premises_question_and_conclusion() -> None:
    for one in EVERY[:60]:
        for p in one.presentations:
            text = p.messages[0].content
            spans = {span.label: text[span.start : span.end] for span in p.spans}
            assert len(spans) == len(p.spans)
            premises = [said for label, said in spans.items() if label.startswith("premise:")]
            assert "\n".join(premises) == text.split("\n\n")[0]
            assert spans["query"] == text.split("\n\n")[1].removesuffix(" Answer with Yes or No only.")
            assert ("conclusion" in spans) == (p.meta["form"] != "direct")
            assert spans.get("conclusion", "it is").startswith("it is") and spans["query"].endswith("?")
            assert one.instance.latent["names"][0] in {s for label, s in spans.items() if label.startswith("name:")}


def test_records_survive_a_file() -> None:
    for one in EVERY[:20]:
        assert from_record(json.loads(to_line(one, version=1))) == one


def test_only_a_grid_has_an_end_and_only_negated_questions_flip() -> None:
    assert isinstance(FAMILY, Finite) and not isinstance(Horn(), Finite)
    assert isinstance(FAMILY, Directional) and not isinstance(Horn(), Directional)
    for one in EVERY[:40]:
        flipped = {p.kind for p in one.presentations if p.gold != one.instance.gold}
        assert flipped == FAMILY.flipped & {p.kind for p in one.presentations}


def test_generate_writes_one_set_a_template_and_content(tmp_path: Path) -> None:
    probe = (sys.executable, "-c", "from experiments.cli import main; main()", "generate", "modals")
    out = tmp_path / "modals.jsonl"
    subprocess.run([*probe, "--out", str(out), "--set", "names=letters"], check=True, capture_output=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 150 == len({line["key"] for line in lines})
    assert Counter(len(line["presentations"]) for line in lines) == {12: 140, 11: 10}
