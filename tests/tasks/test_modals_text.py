"""The English of probability operators: every wording of every template, and the solver that reads it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tasks.contracts import SPLITS, TaskError
from tasks.modals import Modals
from tasks.modals_catalog import packaged
from tasks.modals_solver import read_premise, read_question, solve_text

FAMILY = Modals()
PROMPTS = [
    (one.instance, p.kind, p.messages[0].content)
    for split in SPLITS
    for one in FAMILY.generate({}, seed=0, split=split)
    for p in one.presentations
]
ANSWER = " Answer with Yes or No only."
NAMES = {name for one in packaged().name_sets.values() for pair in one.names.values() for name in pair}
WORDS = {
    "it", "is", "true", "false", "correct", "incorrect", "valid", "invalid", "to", "conclude", "that", "does", "not",
    "follow", "probable", "improbable", "possible", "certain", "at", "least", "as", "likely", "will", "be", "probably",
    "must", "might", "if", "then", "and", "or", "both", "the", "answer", "with", "yes", "no", "only",
    *packaged().activities,
}  # fmt: skip


def test_every_word_is_known() -> None:
    """A typing error would be a word of its own."""
    found: Counter[str] = Counter()
    for _, _, text in PROMPTS:
        found.update(re.findall(r"\w+", text))
    assert {word for word in found if word not in NAMES and word.lower() not in WORDS} == set()


def test_sentences_are_whole() -> None:
    for _, kind, text in PROMPTS:
        told, question = text.split("\n\n")
        lines = [*told.split("\n"), question.removesuffix(ANSWER)]
        assert question.endswith(f"?{ANSWER}")
        for line in lines:
            assert line[0].isupper() and line == line.strip() and "  " not in line, (kind, line)
        assert all(line.endswith(".") and "?" not in line and line.count(".") == 1 for line in lines[:-1])
        assert lines[-1].endswith("?") and lines[-1].count("?") == 1 and "." not in lines[-1]
        assert not re.search(r"[{}]|\bNone\b|,(?! )| [,.?]", text)


def test_words_that_agree() -> None:
    """Rules of English that a slip in a template or a slot would break."""
    doubled = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)
    article = re.compile(r"\ba [aeiou]|\ban [^aeiou]", re.IGNORECASE)
    for _, _, text in PROMPTS:
        assert not doubled.search(text), text  # "not not", "that that", "the the"
        assert not article.search(text), text
        # "and" joins two people who both do something, or two activities under "both"; "is" has one subject.
        for first, second in re.findall(r"(\w+) and (\w+) will", text):
            assert first in NAMES and second in NAMES and first != second
            assert re.search(r"will (probably )?both be", text)
        assert not re.search(r"(?:and|or) \w+ is\b", text)
        for verb in re.findall(r"\b(?:will|might|must)(?: probably)?(?: not)?(?: both)? (\w+)", text):
            assert verb == "be", text
        # A future in the if-clause is no English.
        assert not re.search(r"[Ii]f \w+ will", text)
        # Each person's clause says where.
        placed = re.findall(r"\bbe at (?:both )?the \w+|\bis at the \w+", text)
        assert len(placed) == len(re.findall(r"\bbe\b|\bis at\b(?! least)", text)), text


def test_names_are_names_and_activities_are_activities() -> None:
    for instance, _, text in PROMPTS:
        used = set(re.findall(r"\w+", text)) & NAMES
        assert used <= set(instance.latent["names"]) and instance.latent["names"] and used
        places = set(re.findall(r"\bthe (\w+)", text))
        assert instance.latent["activity"] in places and len(places) <= 2


def test_people_of_the_text_are_those_of_the_template() -> None:
    """One-person templates name the first; a second activity stands in one template only."""
    people = {}
    for instance, _, text in PROMPTS:
        people.setdefault(instance.latent["template"], set()).add(len(set(re.findall(r"\w+", text)) & NAMES))
    assert {name for name, counts in people.items() if counts == {1}} == {
        "probably_might", "must_probably", "probably_not_probably_not", "conjunctivitis_activities", "might_probably",
        "probably_certain",
    }  # fmt: skip
    assert {name for name, counts in people.items() if counts == {2}} == set(people) - {
        name for name, counts in people.items() if counts == {1}
    }


# --- the solver ------------------------------------------------------------------------------------------------------


def test_premises_are_read() -> None:
    ada, bea, far = "Ada at party", "Bea at party", "Ada at event"
    assert read_premise("Ada will probably be at the party.") == ("Pr", ada)
    assert read_premise("Ada and Bea will probably both be at the party.") == ("Pr", ("and", ada, bea))
    assert read_premise("If Ada is at the party, then Bea will be at the party.") == ("if", ada, bea)
    assert read_premise("Probably, if Ada is at the party, then Bea will be at the party.") == ("Pr-if", ada, bea)
    assert read_premise("It is improbable that Ada will be at the event.") == ("deny", ("Pr", far))
    assert read_premise("It is at least as likely that Ada will be at the party as that Ada will not be at the party.") == (
        "geq", ada, ("not", ada),
    )  # fmt: skip


def test_questions_are_read() -> None:
    ada = "Ada at party"
    said = "probable that Ada will be at the party"
    assert read_question(f"Is it true that it is {said}?") == (("Pr", ada), False)
    assert read_question(f"Is it not valid to conclude that it is {said}?") == (("Pr", ada), True)
    assert read_question(f"Is it {said}?") == (("Pr", ada), False)
    assert read_question(f"Is it not {said}?") == (("Pr", ada), True)
    assert read_question("Does it not follow that it is not probable that Ada will not be at the party?") == (
        ("deny", ("Pr", ("not", ada))), True,
    )  # fmt: skip
    assert read_question("Is it certain that Ada will be at both the party and the event?") == (
        ("Must", ("and", ada, "Ada at event")), False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Ada must be at the party.\n\nIs it possible that Ada will be at the party?", "yes"),
        ("Ada must be at the party.\n\nIs it possible that Bea will be at the party?", "no"),
        ("Ada might be at the party.\n\nIs it not certain that Ada will be at the party?", "yes"),
        ("Ada will probably be at the party.\n\nIs it improbable that Ada will be at the party?", "no"),
        ("Ada will probably be at the party.\nBea must be at the party.\n\n"
         "Does it follow that it is probable that Ada and Bea will both be at the party?", "yes"),
    ],
)  # fmt: skip
def test_inferences_that_are_no_template_are_solved(text: str, answer: str) -> None:
    assert solve_text(f"{text}{ANSWER}") == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ada must be at the party. Is it true?", "one paragraph"),
        ("Ada ought to be at the party.\n\nIs it probable that Ada will be at the party?", "can't read the premise"),
        ("Ada must be at the party.\n\nIs it nice that Ada will be at the party?", "can't read 'it is nice"),
        ("Ada must be at the party.\n\nIs it true that Ada will be at the party?", "can't read 'it is true"),
        ("Ada must be at the party.\n\nIs it probable that Ada goes to the party?", "can't read the clause"),
        ("Ada must be at the party.\n\nWill Ada be there?", "can't read the question"),
        ("Ada must be at the party.\nIt is improbable that Ada will be at the party.\n\n"
         "Is it probable that Bea will be at the party?", "can't be true together"),
        ("A and B will probably both be at the V.\nC and D will probably both be at the V.\n\n"
         "Is it probable that A will be at the V?", "4 atoms"),
    ],
)  # fmt: skip
def test_what_the_solver_cannot_read_is_an_error(text: str, said: str) -> None:
    with pytest.raises(TaskError, match=re.escape(said)):
        solve_text(text)
