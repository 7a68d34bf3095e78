"""The templates, forms, names and activities of family modals, read from a file and checked.

A template is data: its schema (what it says, for the oracle) and its English (what is asked). Nothing would notice if the
two drifted apart, so a file is not believed. When it is loaded, every question of every template is read back by the
solver that knows only the text, and has to say what the schema says; the oracle has to find the declared validity, and
the premises have to be possible together. A file of a user's own goes through the same checks.

All twelve wordings of a template are kept as one table, kind of presentation → question, with the slots for names and
activities still open. A kind that a template lists as ``collapsed`` has no wording there: "Is it not not probable that
…?" is no English.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.contracts import SPLITS, Split, TaskError
from tasks.modals_oracle import COMMITMENTS, decide
from tasks.modals_schema import Statement, renamed, statement
from tasks.modals_solver import read_premise, read_question

PACKAGED = "paper"
PEOPLE, LETTERS = ("women", "men"), ("first", "second")
KINDS = ("simple", "multi-step", "fallacy")
SECTIONS = ("forms", "templates", "subsets", "activities", "names")
# Wordings with a wrapper around the conclusion, which all templates share, and those that each writes itself.
WRAPPED = (
    "truth", "correct", "valid", "follow", "truth_negated", "correct_negated", "valid_negated", "follow_negated",
    "not_correct", "not_valid",
)  # fmt: skip
DIRECT = ("direct", "direct_negated")
_TEXTS = ("title", "pattern", "kind", "conclusion", "concludes", "note")
_LISTS = ("premises", "said", "commitments")
_TEMPLATE = (*_TEXTS, *_LISTS, "valid", *DIRECT, "collapsed")
# Stand-ins for the check: no catalog's own names are needed to see what a sentence says.
_SAMPLE = {"a": "Ada", "b": "Bea", "v": "ball", "w": "fair"}
_ATOMS = {"Ada at ball": "a", "Bea at ball": "b", "Ada at fair": "c"}


@dataclass(frozen=True, slots=True)
class Template:
    """One wording of an inference pattern.

    Attributes:
        schema: premises and conclusion in the notation of :mod:`tasks.modals_schema`; ``premises`` and ``goal`` are what
            it says.
        said: the premises in English, with slots {a}, {b} for names and {v}, {w} for activities.
        conclusion: the conclusion in English.
        questions: wording → question, with the same slots; collapsed ones are missing.
    """

    name: str
    title: str
    pattern: str
    kind: str
    valid: bool
    schema: str
    premises: tuple[Statement, ...]
    goal: Statement
    said: tuple[str, ...]
    conclusion: str
    questions: Mapping[str, str]
    commitments: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class NameSet:
    """Two names of one group and gender (or variant, of letters) for each split."""

    name: str
    group: str
    gender: str
    names: Mapping[Split, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that a file holds, in its order."""

    templates: Mapping[str, Template]
    subsets: Mapping[str, tuple[str, ...]]
    activities: tuple[str, ...]
    name_sets: Mapping[str, NameSet]

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.group for one in self.name_sets.values()))

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.pattern for one in self.templates.values()))


def catalog_named(name: object) -> Catalog:
    """The packaged catalog, or that of a file.

    Raises:
        TaskError: there is no such file, or it does not pass the checks.
    """
    if name == PACKAGED:
        return packaged()
    if not isinstance(name, str) or not name.endswith(".toml"):
        raise TaskError(f"catalog is {name!r}: choose {PACKAGED}, or give path/to/file.toml for your own")
    try:
        path = Path(name).expanduser()
        return _user_file(str(path), path.stat().st_mtime_ns)
    except TaskError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TaskError(f"catalog file {name!r} can't be read ({why}): give path/to/file.toml") from None


@lru_cache(maxsize=1)
def packaged() -> Catalog:
    """The catalog of the package. Read and checked once."""
    return load(files("tasks").joinpath("data", "modals.toml").read_text(encoding="utf-8"), source="modals.toml")


@lru_cache(maxsize=16)
def _user_file(path: str, _changed: int) -> Catalog:
    return load(Path(path).read_text(encoding="utf-8-sig"), source=path)


def load(text: str, *, source: str) -> Catalog:
    """The checked catalog of a file's text.

    Args:
        text: TOML as ``data/modals.toml`` explains it.
        source: what to call the file in an error.

    Raises:
        TaskError: what does not pass, naming file, place and what is allowed.
    """
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"{source}: not a TOML file ({error})") from None
    _keys(content, SECTIONS, source)
    for section in SECTIONS:
        if not isinstance(content[section], dict) or not content[section]:
            raise TaskError(
                f"{source}: section {section} is {content[section]!r}: give a table with at least one entry"
            )
    forms = content["forms"]
    _keys(forms, WRAPPED, f"{source}: forms")
    for form, wording in forms.items():
        if not isinstance(wording, str) or wording.count("{conclusion}") != 1:
            raise TaskError(f"{source}: form {form!r} is {wording!r}: give a question with {{conclusion}} in it")
    templates = {name: _template(name, block, forms, source) for name, block in content["templates"].items()}
    activities = content["activities"].get("names")
    if not _words(activities) or len(activities) < 2:
        raise TaskError(f"{source}: activities.names is {activities!r}: give two words of lower-case letters or more")
    return Catalog(
        templates=MappingProxyType(templates),
        subsets=MappingProxyType(_subsets(content["subsets"], templates, source)),
        activities=tuple(activities),
        name_sets=MappingProxyType(_name_sets(content["names"], source)),
    )


# --- templates -------------------------------------------------------------------------------------------------------


def _template(name: str, block: Any, forms: Mapping[str, str], source: str) -> Template:
    where = f"{source}: template {name!r}"
    if not isinstance(block, dict):
        raise TaskError(f"{where}: not a block of keys: write [templates.{name}] and its keys below")
    collapsed = block.get("collapsed", [])
    if not _strings(collapsed) or any(one not in (*WRAPPED[1:], *DIRECT) for one in collapsed):
        raise TaskError(f"{where}: collapsed is {collapsed!r}: list forms of {', '.join((*WRAPPED[1:], *DIRECT))}")
    for form in DIRECT:
        if form not in block and form not in collapsed:
            raise TaskError(f"{where}: form {form!r} is missing: write the question, or name the form in collapsed")
    _keys(block, _TEMPLATE, where, optional=("collapsed", *DIRECT))
    for key in (*_TEXTS, *(form for form in DIRECT if form in block)):
        if not isinstance(block[key], str) or not block[key].strip() or not block[key].isprintable():
            raise TaskError(f"{where}: key {key!r} is {block[key]!r}: give one line of text")
    for key in _LISTS:
        if not _strings(block[key]) or (key != "commitments" and not block[key]):
            raise TaskError(f"{where}: key {key!r} is {block[key]!r}: give a list of texts")
    if not isinstance(block["valid"], bool):
        raise TaskError(f"{where}: key 'valid' is {block['valid']!r}: give true or false")
    for key, value, allowed in (("kind", [block["kind"]], KINDS), ("commitments", block["commitments"], COMMITMENTS)):
        if wrong := [one for one in value if one not in allowed]:
            raise TaskError(f"{where}: {key} holds {wrong[0]!r}: choose from {', '.join(allowed)}")
    if len(block["premises"]) != len(block["said"]):
        raise TaskError(f"{where}: {len(block['premises'])} premises and {len(block['said'])} sentences: one for each")
    try:
        premises, goal = tuple(map(statement, block["premises"])), statement(block["conclusion"])
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    concludes = block["concludes"]
    questions = {form: wording.replace("{conclusion}", concludes) for form, wording in forms.items()}
    questions |= {form: block[form] for form in DIRECT if form in block}
    found = Template(
        name=name,
        title=block["title"],
        pattern=block["pattern"],
        kind=block["kind"],
        valid=block["valid"],
        schema=f"{', '.join(block['premises'])} / {block['conclusion']}",
        premises=premises,
        goal=goal,
        said=tuple(block["said"]),
        conclusion=concludes,
        questions=MappingProxyType({form: text for form, text in questions.items() if form not in collapsed}),
        commitments=tuple(block["commitments"]),
        note=block["note"],
    )
    _check(found, where)
    return found


def _check(template: Template, where: str) -> None:
    """The English says what the schema says, and the oracle agrees with the declared validity."""
    try:
        given, goal = template.premises, template.goal
        for number, (meant, sentence) in enumerate(zip(given, template.said, strict=True), start=1):
            if renamed(read_premise(_filled(sentence)), _ATOMS) != meant:
                raise TaskError(f"the sentence {sentence!r} does not say premise {number} of {template.schema}")
        verdict = decide(given, goal)
        if not verdict.consistent:
            raise TaskError("no probabilities make all its premises true")
        if verdict.follows != template.valid:
            raise TaskError(
                f"valid is {template.valid} and the oracle finds that {template.schema} is {verdict.follows}"
            )
        for form, question in template.questions.items():
            content, negated = read_question(_filled(question))
            said = renamed(content, _ATOMS)
            meant = (goal, is_negated(form))
            # "Is it not probable that …?" asks with a not what "it is not probable that …" says.
            if (said, negated) != meant and (_denied(said), not negated) != meant:
                raise TaskError(
                    f"form {form!r} does not ask {'whether not ' if meant[1] else ''}what {template.schema} concludes"
                )
            if (decide(given, said).follows != negated) != (template.valid != meant[1]):
                raise TaskError(f"form {form!r} can be read with another answer: word its negation apart")
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        slots = "{a}, {b} for names and {v}, {w} for activities"
        raise TaskError(f"{where}: a sentence can't be filled in or is about others ({error}): use {slots}") from None


def is_negated(form: str) -> bool:
    """Whether a wording asks whether the conclusion fails."""
    return form.endswith("_negated") or form.startswith("not_")


def _filled(sentence: str) -> str:
    return sentence.format_map(_SAMPLE)


def _denied(said: Statement) -> Statement:
    return said[1] if said[0] == "deny" else ("deny", said)


# --- subsets and names -----------------------------------------------------------------------------------------------


def _subsets(blocks: Mapping[str, Any], templates: Mapping[str, Template], source: str) -> dict[str, tuple[str, ...]]:
    """Names of templates by subset; a pattern stands for all its templates."""
    found = {}
    for subset, members in blocks.items():
        if not _strings(members) or not members:
            raise TaskError(f"{source}: subset {subset!r} is {members!r}: give a list of patterns or templates")
        chosen = {name for name, one in templates.items() if name in members or one.pattern in members}
        known = {*chosen, *(templates[name].pattern for name in chosen)}
        if unknown := [one for one in members if one not in known]:
            raise TaskError(f"{source}: subset {subset!r} holds {unknown[0]!r}, which is no template and no pattern")
        found[subset] = tuple(name for name in templates if name in chosen)
    return found


def _name_sets(blocks: Mapping[str, Any], source: str) -> dict[str, NameSet]:
    found: dict[str, NameSet] = {}
    taken: dict[tuple[str, ...], str] = {}
    for group, block in blocks.items():
        where = f"{source}: name group {group!r}"
        kinds = LETTERS if isinstance(block, dict) and any(one in block for one in LETTERS) else PEOPLE
        if not isinstance(block, dict) or set(block) != set(kinds):
            has = ", ".join(block) if isinstance(block, dict) else repr(block)
            raise TaskError(f"{where} has {has}: give both {kinds[0]} and {kinds[1]}")
        for gender in kinds:
            names = block[gender]
            if not isinstance(names, dict) or set(names) != set(SPLITS):
                raise TaskError(f"{where}: {gender} is {names!r}: give two names for each of {', '.join(SPLITS)}")
            for split, pair in names.items():
                if not _strings(pair) or len(pair) != 2 or not all(one.isalpha() for one in pair) or pair[0] == pair[1]:
                    raise TaskError(f"{where}: {gender}, {split} is {pair!r}: give two different words of letters")
                # Letters come in two orders of the same two; otherwise a name may stand in one place only.
                for key in [(pair[0], pair[1])] if kinds is LETTERS else [(one,) for one in pair]:
                    if key in taken:
                        raise TaskError(f"{where}: {' '.join(key)!r} stands in {taken[key]} too: take another")
                    taken[key] = f"{group} {gender}, {split}"
            pairs: dict[Split, tuple[str, str]] = {split: (names[split][0], names[split][1]) for split in SPLITS}
            found[f"{group}_{gender}"] = NameSet(f"{group}_{gender}", group, gender, MappingProxyType(pairs))
    return found


def _keys(block: Mapping[str, Any], allowed: tuple[str, ...], where: str, optional: tuple[str, ...] = ()) -> None:
    for key in block:
        if key not in allowed:
            raise TaskError(f"{where}: unknown key {key!r}: choose from {', '.join(allowed)}")
    for key in allowed:
        if key not in block and key not in optional:
            raise TaskError(
                f"{where}: {key!r} is missing: needed are {', '.join(k for k in allowed if k not in optional)}"
            )


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value)


def _words(value: Any) -> bool:
    return _strings(value) and all(one.isalpha() and one.islower() for one in value) and len(set(value)) == len(value)
