"""The relation catalog: what it holds, that its English is sound in form, and which files are refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.contracts import TaskError
from tasks.names import census, objects
from tasks.ordering import Ordering
from tasks.ordering_solver import Reader
from tasks.relations import apart, catalog, load, relation_named, relations

BLOCK = """
[relations.braver_meeker]
group = "comparative"
entities = "people"
scene = "These people all differ in courage"
forward = "{x} is braver than {y}."
converse = "{x} is meeker than {y}."
forward_query = "Is {x} braver than {y}?"
converse_query = "Is {x} meeker than {y}?"
forward_negation = "{x} is not braver than {y}."
converse_negation = "{x} is not meeker than {y}."
"""
OWN = f'opposites = [["braver", "meeker"]]\n{BLOCK}'


def test_the_catalog_holds_31_relations_in_six_families() -> None:
    sizes: dict[str, int] = {}
    for name in catalog():
        group = relations()[name].group
        sizes[group] = sizes.get(group, 0) + 1
    assert sizes == {
        "spatial line": 10, "vertical": 2, "temporal": 4, "comparative": 7, "rank and social": 6, "nonce": 2,
    }  # fmt: skip
    assert catalog()[:3] == ("front_behind", "ahead_behind", "left_right") and catalog()[-1] == "vorpward_morpward"
    assert len(relations()) == 38 and sum(map(len, apart().values())) == 7
    assert [name for name, one in relations().items() if one.entities == "objects"] == ["depth"]
    assert [name for name, one in relations().items() if one.rule] == ["vorpward_morpward"]


@pytest.mark.parametrize("name", relations())
def test_forms_agree_with_each_other_as_english_has_it(name: str) -> None:
    """Subject, verb and the rest: a question turns the first verb round or takes does/did, a negation adds not."""
    relation = relation_named(name)
    for side in ("forward", "converse"):
        statement = getattr(relation, side).removesuffix(".")
        query, negation = getattr(relation, f"{side}_query"), getattr(relation, f"{side}_negation").removesuffix(".")
        subject, verb, rest = re.fullmatch(r"((?:The )?\{x\}) (\w+) (.*)", statement).groups()  # type: ignore[union-attr]
        asked = subject.replace("The", "the")
        if verb in ("is", "was"):
            assert query == f"{verb.capitalize()} {asked} {rest}?"
            assert negation == f"{subject} {verb} not {rest}"
        else:
            stem = {"has": "have", "got": "get", "finishes": "finish"}.get(verb, verb.removesuffix("s"))
            helper = "did" if verb == "got" else "does"
            assert query == f"{helper.capitalize()} {asked} {stem} {rest}?"
            assert negation == f"{subject} {helper} not {stem} {rest}"
    assert relation.scene.startswith("These ") and relation.entities in relation.scene


def test_no_relation_reads_the_sentences_of_another_the_other_way_round() -> None:
    """Two vocabularies may share words ("right of", "left of"), but each reads its own sentences in one way."""
    for relation in relations().values():
        reader = Reader(relation)
        for form, template in relation.forms().items():
            sentence = template.format(x="Amy", y="Bob")
            found = reader.question(sentence) if form.endswith("query") else reader.statement(sentence)
            assert [one.form for one in found] == [form]


def test_no_name_of_a_pool_is_a_word_of_the_sentences() -> None:
    for relation in relations().values():
        words = set(re.findall(r"[a-z]+", " ".join(relation.forms().values()).lower()))
        pool = objects() if relation.entities == "objects" else census()
        assert not words & {name.lower() for name in pool}


def test_a_file_of_ones_own_is_read_checked_and_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    name = f"{file}:braver_meeker"
    assert relation_named(name).scene == "These people all differ in courage"
    family = Ordering()
    matched = next(family.generate({"n": 4, "relation": name}, seed=0, split="test"))
    assert "is braver than" in matched["original"].messages[0].content
    assert matched.instance.params["relation"] == name
    assert set(family.verify(matched).values()) == {matched.instance.gold}
    other = next(family.generate({"n": 4}, seed=0, split="test"))
    assert other.instance.key == matched.instance.key
    file.write_text(OWN.replace("differ in courage", "are of different courage"))
    os.utime(file, ns=(1, 1))
    assert relation_named(name).scene == "These people all are of different courage"
    with pytest.raises(TaskError, match=r"no relation 'older': it defines braver_meeker"):
        relation_named(f"{file}:older")
    file.write_bytes(b"\xff\xfe")
    os.utime(file, ns=(2, 2))
    with pytest.raises(TaskError, match="not UTF-8"):
        relation_named(name)
    with pytest.raises(TaskError, match="can't be read"):
        relation_named(f"{tmp_path / 'none.toml'}:x")


def test_words_of_the_packaged_list_need_no_declaration() -> None:
    text = BLOCK.replace("braver than", "more zibby than").replace("meeker than", "less zibby than")
    packaged = (("more", "less"),)
    assert list(load(text, source="f.toml", opposites=packaged)[0]) == ["braver_meeker"]


def test_a_phrase_may_have_several_opposites_and_y_may_stand_first() -> None:
    text = 'opposites = [["ahead of", "behind"], ["in front of", "behind"]]\n' + BLOCK.replace(
        "braver than", "ahead of"
    ).replace("meeker than", "behind")
    assert load(text, source="f.toml")[0]
    turned = re.sub(r"\{x\} is (not )?(\w+) than \{y\}", r"Than {y}, {x} is \1\2", OWN)
    turned = re.sub(r"Is \{x\} (\w+) than \{y\}", r"Than {y}, is {x} \1", turned)
    (relation,) = load(turned, source="f.toml")[0].values()
    from tasks.ordering_text import phrase

    assert phrase(relation.forward).said([("Amy", "Bob")]) == ["Than Bob, Amy is braver."]
    (reading,) = Reader(relation).statement("Than Bob, Amy is braver.")
    assert (reading.earlier, reading.later) == ("Amy", "Bob")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('converse_query = "Is {x} meeker than {y}?"\n', "", ["key 'converse_query' is missing"]),
        ('group = "comparative"\n', "", ["key 'group' is missing"]),
        ("group =", "family =", ["unknown key 'family'"]),
        ('"people"', '"animals"', ["key 'entities' is 'animals'", "people or objects"]),
        ('"people"', "3", ["key 'entities' is 3", "one line of text"]),
        ("differ in courage", "differ: in courage", ["key 'scene'", "colon"]),
        ('"comparative"', '" comparative"', ["key 'group'", "blanks"]),
        ('"{x} is braver than {y}."', '"{x} is braver."', ["key 'forward'", "{y} has to stand in it exactly once"]),
        ('"{x} is braver than {y}."', '"{x} is braver than {x}."', ["key 'forward'", "{x} has to stand"]),
        ('"{x} is braver than {y}."', '"{x} is braver than {y}s."', ["key 'forward'", "apart as words"]),
        ('"{x} is braver than {y}."', '"{x} is {z} braver than {y}."', ["key 'forward'", "apart as words"]),
        ('"{x} is braver than {y}."', '"{x} is braver than {y}"', ["key 'forward'", "end it with '.'"]),
        ('"Is {x} braver than {y}?"', '"Is {x} braver than {y}."', ["key 'forward_query'", "end it with '?'"]),
        # Not converse: the same phrase, another relation's phrase, negations for one another, changed places.
        ('"{x} is meeker than {y}."', '"{x} is braver than {y}."', ["key 'forward'", "'converse' too"]),
        ('"{x} is meeker than {y}."', '"{x} is taller than {y}."', ["key 'converse'", "not the converse of 'forward'"]),
        ('"{x} is meeker than {y}."', '"{x} is not braver than {y}."', ["key 'converse'", "no word like 'not'"]),
        ('"{x} is meeker than {y}."', '"{x} is less brave than {y}."', ["not the converse"]),
        ('"{x} is meeker than {y}."', '"{y} is meeker than {x}."', ["key 'converse'", "changed places"]),
        ('"Is {x} meeker than {y}?"', '"Is {x} taller than {y}?"', ["key 'converse_query'", "not the converse"]),
        ('"{x} is not meeker than {y}."', '"{x} is not weaker than {y}."', ["key 'converse_negation'"]),
        # A form that says the contrary of what it has to.
        (
            '"{x} is not braver than {y}."',
            '"{x} is surely braver than {y}."',
            ["key 'forward_negation'", "one word like"],
        ),
        (
            '"{x} is not braver than {y}."',
            '"{x} is not no braver than {y}."',
            ["key 'forward_negation'", "one word like"],
        ),
        ('"{x} is meeker than {y}."', '"{x} isn\'t meeker than {y}."', ["key 'converse'", "no word like 'not'"]),
        ('"Is {x} braver than {y}?"', '"Is {x} not braver than {y}?"', ["key 'forward_query'", "no word like 'not'"]),
        ("differ in courage", "differ\\rin courage", ["key 'scene'", "one line of text"]),
        ("differ in courage", "differ as {x} does", ["key 'scene'", "leave out {x}"]),
        (BLOCK, "deep = " + "[" * 20_000, ["not a TOML file"]),
        ('opposites = [["braver", "meeker"]]', "", ["neither holds a known word", "opposites ="]),
        ('[["braver", "meeker"]]', '[["braver"]]', ["opposites is not a list of pairs"]),
        ('[["braver", "meeker"]]', '"braver"', ["opposites is not a list of pairs"]),
        ("opposites =", "antonyms =", ["unknown key 'antonyms' at the top"]),
        ("[relations.braver_meeker]", "[relations]", ["not a block of keys"]),
        (BLOCK, "", ["no relation in it"]),
        ("[relations.braver_meeker]", "[relations.braver_meeker", ["not a TOML file"]),
    ],
)
def test_files_that_are_refused_name_the_file_the_relation_and_the_key(old: str, new: str, words: list[str]) -> None:
    assert old in OWN
    with pytest.raises(TaskError) as caught:
        load(OWN.replace(old, new), source="mine.toml", opposites=(("taller", "shorter"), ("less", "more")))
    message = str(caught.value)
    assert message.startswith("mine.toml: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_questions_that_changed_places_are_refused() -> None:
    swapped = OWN.replace("Is {x} braver", "Is {x} MEEKER").replace("Is {x} meeker", "Is {x} braver")
    with pytest.raises(TaskError, match=r"key 'forward_query'.*does not hold the words of 'forward'"):
        load(swapped.replace("MEEKER", "meeker"), source="mine.toml")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ((r"Is {x} (\w+) than {y}", r"Is {y} \1 than {x}"), "forward_query"),
        ((r"{x} is not (\w+) than {y}", r"{y} is not \1 than {x}"), "forward_negation"),
        ((r"{x} is (\w+) than {y}", r"{y} is \1 than {x}"), "forward_query"),
    ],
)
def test_names_that_change_places_from_form_to_form_are_refused(changed: tuple[str, str], named: str) -> None:
    """Both phrases at once, so that they remain each other's converse; every gold answer would be wrong."""
    pattern, put = changed
    text = re.sub(pattern.replace("{", r"\{"), put, OWN)
    assert text != OWN
    with pytest.raises(TaskError, match=rf"key '{named}'.*changed places against 'forward'"):
        load(text, source="mine.toml")


def test_words_with_several_opposites_do_not_multiply() -> None:
    """There are 2^60 ways to replace the "behind"s, which must not be written out."""
    text = OWN.replace("braver than", "behind " * 60 + "braver than")
    packaged = (("ahead of", "behind"), ("in front of", "behind"))
    with pytest.raises(TaskError, match="not the converse"):
        load(text, source="mine.toml", opposites=packaged)
    mixed = text.replace("meeker than", "ahead of in front of " * 30 + "meeker than")
    assert load(mixed, source="mine.toml", opposites=packaged)[0]


def test_paths_that_can_t_be_and_a_byte_order_mark(tmp_path: Path) -> None:
    for path in ("~no-such-user-here/f.toml", "nul\0.toml", str(tmp_path)):
        with pytest.raises(TaskError, match=r"can't be read|unknown relation"):
            relation_named(f"{path}:x")
    file = tmp_path / "marked.toml"
    file.write_text(OWN, encoding="utf-8-sig")
    assert relation_named(f"{file}:braver_meeker").group == "comparative"


def test_older_and_taller_are_refused() -> None:
    text = OWN.replace("braver", "older").replace("meeker", "taller")
    packaged = (("older", "younger"), ("taller", "shorter"))
    with pytest.raises(TaskError, match=r"relation 'older_taller'.*key 'converse'.*not the converse"):
        load(text.replace('opposites = [["older", "taller"]]', ""), source="mine.toml", opposites=packaged)


def test_a_relation_can_be_compared_and_varied() -> None:
    relation = relation_named("zorbic")
    assert replace(relation, name="other") != relation and hash(relation) == hash(relation_named("zorbic"))
