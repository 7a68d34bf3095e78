"""The file of templates, forms and names: what is refused about one, by name, and a file of one's own."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tasks.contracts import TaskError
from tasks.modals import Modals
from tasks.modals_catalog import DIRECT, WRAPPED, load, packaged
from tasks.modals_text import KINDS
from tasks.validation import validate_family

PACKAGED = files("tasks").joinpath("data", "modals.toml").read_text(encoding="utf-8")


def refused(text: str) -> str:
    with pytest.raises(TaskError) as error:
        load(text, source="mine.toml")
    said = str(error.value)
    assert said.startswith("mine.toml: ") and "\n" not in said
    return said


def without(pattern: str, *, times: int = 1) -> str:
    found, count = re.subn(pattern, "", PACKAGED, count=times, flags=re.MULTILINE)
    assert count == times
    return found


def changed(old: str, new: str) -> str:
    assert old in PACKAGED
    return PACKAGED.replace(old, new, 1)


def test_the_packaged_file() -> None:
    found = packaged()
    assert len(found.templates) == 15 and len(found.patterns) == 13 and len(found.name_sets) == 16
    assert sum(len(one.questions) for one in found.templates.values()) == 179
    assert {kind.wording for kind in KINDS.values()} == {*WRAPPED, *DIRECT}
    kinds = [one.kind for one in {one.pattern: one for one in found.templates.values()}.values()]
    assert [kinds.count(kind) for kind in ("simple", "multi-step", "fallacy")] == [5, 5, 3]
    assert all(one.note.endswith(".") and one.title for one in found.templates.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (without(r'^direct_negated = "Is it not possible.*\n'),
         "template 'probably_might': form 'direct_negated' is missing: write the question, or name the form in collapsed"),
        (without(r'^follow = .*\n'), "forms: 'follow' is missing"),
        (changed('follow = "Does it follow that {conclusion}?"', 'follow = "Does it?"'), "form 'follow' is 'Does it"),
        (without(r'^men = \{ test = \["Ivan.*\n'), "name group 'russian' has women: give both women and men"),
        (without(r'^second = .*\n'), "name group 'letters' has first: give both first and second"),
        (changed('train = ["Rohan", "Vikram"], ', ""), "name group 'indian': men is {"),
        (changed('["Ivan", "Dmitri"]', '["Ivan", "Ivan"]'), "men, test is ['Ivan', 'Ivan']: give two different words"),
        (changed('["Ivan", "Dmitri"]', '["Ivan", "Anna Maria"]'), "give two different words of letters"),
        (changed('["Ivan", "Dmitri"]', '["Ivan", "Savir"]'), "'Savir' stands in indian men, test too"),
        (changed('["P", "Q"]', '["X", "Y"]'), "'X Y' stands in letters first, test too"),
        (changed('"party", "event"', '"Party", "event"'), "activities.names is ['Party'"),
        (changed('contested = ["probably', 'contested = ["perhaps", "probably'), "subset 'contested' holds 'perhaps'"),
        (changed("[subsets]\n", "[subset]\n"), "unknown key 'subset'"),
        (changed('collapsed = ["direct_negated"]', 'collapsed = ["shout"]'), "collapsed is ['shout']"),
        (changed('kind = "fallacy"', 'kind = "folly"'), "kind holds 'folly': choose from simple"),
        (changed('commitments = ["strict"]', 'commitments = ["faith"]'), "commitments holds 'faith': choose from strict"),
        (changed('valid = false', 'valid = "no"'), "key 'valid' is 'no': give true or false"),
        (without(r'^title = "Must to Probably"\n'), "template 'must_probably': 'title' is missing"),
        (changed('title = "Must', 'colour = "red"\ntitle = "Must'), "unknown key 'colour'"),
        (changed('premises = ["Pr(a)"]', 'premises = ["Pr(a)", "Pr(b)"]'), "2 premises and 1 sentences"),
        ("[templates", "not a TOML file"),
        ("", "'forms' is missing"),
    ],
)  # fmt: skip
def test_a_file_with_something_missing_or_misspelt_is_refused(text: str, said: str) -> None:
    assert said in refused(text)


MUST, MIGHT = 'said = ["{a} must be', 'said = ["{a} might be'
POSSIBLE = 'direct = "Is it possible that {a}'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # The English does not say what the schema says.
        (
            MUST,
            MIGHT,
            "'must_probably': the sentence '{a} might be at the {v}.' does not say premise 1 of Must(a) / Pr(a)",
        ),
        ('concludes = "it is possible', 'concludes = "it is certain', "does not ask what Pr(a) / Might(a) concludes"),
        (POSSIBLE, POSSIBLE.replace("{a}", "{b}"), "form 'direct' does not ask what"),
        (
            'truth_negated = "Is it false',
            'truth_negated = "Is it true',
            "form 'truth_negated' does not ask whether not",
        ),
        (
            'direct_negated = "Is it not possible',
            'direct_negated = "Is it possible',
            "form 'direct_negated' does not ask",
        ),
        ("Is it improbable that {a} will be", "Is it not probable that {b} will be", "form 'direct' does not ask what"),
        # The schema is not what is declared.
        ('conclusion = "Might(a)"', 'conclusion = "Might(~a)"', "'probably_might': valid is True and the oracle finds"),
        ('false\npremises = ["Might(a)"]', 'true\npremises = ["Might(a)"]', "'might_probably': valid is True and the"),
        ('conclusion = "Might(a)"', 'conclusion = "Mite(a)"', "can't read the schema 'Mite(a)'"),
        # The grammar does not know it.
        (MUST, MUST.replace("must", "ought to"), "can't read the premise 'Ada ought to be at the ball.'"),
        (MUST, MUST.replace("{a}", "{x}"), "a sentence can't be filled in or is about others ('x')"),
        (MUST, MUST.replace("{a}", "{a.b}"), "a sentence can't be filled in or is about others ('str' object has no"),
        (MUST, MUST.replace("{a}", "Zoe"), "is about others ('Zoe at ball')"),
    ],
)
def test_a_template_that_says_something_else_is_refused(old: str, new: str, said: str) -> None:
    assert said in refused(changed(old, new))


def test_impossible_premises_are_refused() -> None:
    text = changed('premises = ["Must(a)"]', 'premises = ["Must(a)", "~Pr(a)"]')
    text = text.replace('said = ["{a} must be at the {v}."]', 'said = ["{a} must be at the {v}.", '
                        '"It is improbable that {a} will be at the {v}."]', 1)  # fmt: skip
    assert "template 'must_probably': no probabilities make all its premises true" in refused(text)


def test_a_negation_with_two_answers_is_refused() -> None:
    """ "Is it not probable …?" about an invalid "not probably" may be answered yes (it is left open) or no."""
    block = re.search(r"\[templates\.might_probably\](.|\n)*?\n\n", PACKAGED)
    assert block is not None
    other = block[0].replace('"Pr(a)"', '"~Pr(a)"').replace("it is probable", "it is not probable")
    other = re.sub(r"direct_negated = .*", 'collapsed = ["direct_negated"]', other).replace(
        "Is it probable", "Is it not probable"
    )
    text = PACKAGED.replace(block[0], other)
    assert "form 'direct' can be read with another answer" in refused(text)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Other words, another template, one group: everything else works as with the packaged file."""
    path = tmp_path / "mine.toml"
    text = changed('["party", "event", "gathering", "meeting", "celebration"]', '["picnic", "concert"]')
    text = re.sub(r"\[names\.russian\](.|\n)*(?=\[names\.letters\])", "", text)
    path.write_text(text, encoding="utf-8")
    params = {"catalog": str(path)}
    family = Modals()
    assert family.cells(params, split="test") == {"valid": 11 * 8, "invalid": 4 * 8}
    found = list(family.generate(params, seed=0, split="test"))
    assert len(found) == 120 and {one.instance.latent["activity"] for one in found} == {"picnic", "concert"}
    assert all(one.ok for one in validate_family(family, family.validate(params), sets=64, seed=0))
    with pytest.raises(TaskError, match="names has 'russian'"):
        family.validate({**params, "names": ["russian"]})
    # A change of the file is seen.
    path.write_text(PACKAGED.replace("valid = false", "valid = true", 1), encoding="utf-8")
    with pytest.raises(TaskError, match=r"mine\.toml: template 'conjunctivitis_people': valid is True"):
        next(itertools.islice(family.generate(params, seed=0, split="test"), 1))
