"""Words for an order: how a relation and its converse are said, as premise, as question and as negation.

A relation is two phrases for one and the same fact: "Amy is in front of Bob" and "Bob is behind Amy". The forward phrase
puts the earlier entity first. English does not form questions and negations in one way ("Was Amy born before Bob?"), so
each relation spells out six sentences. All of them stand in one file, ``data/relations.toml``, whose comments explain the
format; the generator and the text-level solver read nothing else about a relation.

A wrong word there would make wrong gold answers that nothing downstream can see. So a file is checked whole when it is
loaded (``relations_check``), and one that doesn't pass is refused with the file, relation and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.contracts import TaskError
from tasks.relations_check import FORMS, check

ENTITIES = ("people", "objects")
# The relations of these families are the catalog; those of any other group are listed apart.
CATALOG_GROUPS = ("spatial line", "vertical", "temporal", "comparative", "rank and social", "nonce")
REQUIRED = ("group", "entities", "scene", *FORMS)

Opposites = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Vocabulary of one ordering relation; sentences are templates with ``{x}`` and ``{y}``.

    Attributes:
        name: how users ask for it.
        group: the family of relations that it is reported under.
        entities: ``people`` or ``objects``.
        scene: opening of the line that lists the names; it states a strict total order.
        rule: sentence that explains the words, or None.
        forward: "x comes before y".
        converse: "x comes after y".
        forward_query: "does x come before y?".
        converse_query: "does x come after y?".
        forward_negation: "x does not come before y".
        converse_negation: "x does not come after y".
    """

    name: str
    group: str
    entities: str
    scene: str
    rule: str | None = None
    forward: str
    converse: str
    forward_query: str
    converse_query: str
    forward_negation: str
    converse_negation: str

    def forms(self) -> dict[str, str]:
        """The six templates by key, in the order of the file."""
        return {form: getattr(self, form) for form in FORMS}


def relations() -> Mapping[str, Relation]:
    """All relations of the package by name, in the order of the file. Read and checked once."""
    return MappingProxyType(_packaged()[0])


def catalog() -> tuple[str, ...]:
    """Names of the relations that a study of vocabularies goes through."""
    return tuple(name for name, relation in relations().items() if relation.group in CATALOG_GROUPS)


def apart() -> dict[str, tuple[str, ...]]:
    """Names of the relations for a special use, by group."""
    groups: dict[str, tuple[str, ...]] = {}
    for name, relation in relations().items():
        if relation.group not in CATALOG_GROUPS:
            groups[relation.group] = (*groups.get(relation.group, ()), name)
    return groups


def relation_named(name: str) -> Relation:
    """The relation with this name, or ``path/to/file.toml:name`` for one of a user's own file.

    Raises:
        TaskError: there is none; or the file can't be read or does not pass the checks.
    """
    if isinstance(name, str) and ".toml:" in name:
        path, _, own = name.rpartition(":")
        return _from_file(path, own)
    known = relations()
    if not isinstance(name, str) or name not in known:
        close = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TaskError(
            f"unknown relation {name!r}: {hint}choose one of {', '.join(known)}, or path/to/file.toml:name for your own"
        )
    return known[name]


def load(text: str, *, source: str, opposites: Opposites = ()) -> tuple[dict[str, Relation], Opposites]:
    """The checked relations of a file's text, and the opposites known in it.

    Args:
        text: TOML as ``data/relations.toml`` explains it.
        source: what to call the file in an error.
        opposites: pairs known besides those of the file.

    Raises:
        TaskError: anything in the file that does not pass, naming the file, relation and key.
    """
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"{source}: not a TOML file ({error})") from None
    for key in content:
        if key not in ("opposites", "relations"):
            raise TaskError(f"{source}: unknown key {key!r} at the top: choose from opposites, relations")
    opposites = (*opposites, *_opposites(content.get("opposites", []), source))
    blocks = content.get("relations")
    if not isinstance(blocks, dict) or not blocks:
        raise TaskError(f"{source}: no relation in it: write a block [relations.NAME]")
    found = {name: _relation(name, block, source) for name, block in blocks.items()}
    for name, relation in found.items():
        check(relation, opposites, where=f"{source}: relation {name!r}")
    return found, opposites


@lru_cache(maxsize=1)
def _packaged() -> tuple[dict[str, Relation], Opposites]:
    text = files("tasks").joinpath("data", "relations.toml").read_text(encoding="utf-8")
    return load(text, source="relations.toml")


def _from_file(path: str, name: str) -> Relation:
    try:
        # An unknown "~user" is a RuntimeError, a NUL in the path a ValueError.
        file = Path(path).expanduser()
        found = _user_file(str(file), file.stat().st_mtime_ns)
    except TaskError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TaskError(f"relation file {path!r} can't be read ({why}): give path/to/file.toml:name") from None
    if name not in found:
        raise TaskError(f"relation file {path!r} has no relation {name!r}: it defines {', '.join(found)}")
    return found[name]


@lru_cache(maxsize=64)
def _user_file(path: str, _changed: int) -> dict[str, Relation]:
    """A user's file, read again only after it has changed."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors open a file with a byte order mark
    except UnicodeDecodeError:
        raise TaskError(f"{path}: not UTF-8 text") from None
    return load(text, source=path, opposites=_packaged()[1])[0]


def _opposites(value: Any, source: str) -> Opposites:
    good = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) and side.strip() for side in pair)
        for pair in value
    )
    if not good:
        raise TaskError(f'{source}: opposites is not a list of pairs: write opposites = [["older", "younger"]]')
    return tuple((first, second) for first, second in value)


def _relation(name: str, block: Any, source: str) -> Relation:
    where = f"{source}: relation {name!r}"
    if not isinstance(block, dict):
        raise TaskError(f"{where}: not a block of keys: write [relations.{name}] and its keys below")
    for key in block:
        if key not in (*REQUIRED, "rule"):
            raise TaskError(f"{where}: unknown key {key!r}: choose from {', '.join((*REQUIRED, 'rule'))}")
    for key in REQUIRED:
        if key not in block:
            raise TaskError(f"{where}: key {key!r} is missing: a relation has {', '.join(REQUIRED)}")
    for key, value in block.items():
        if not isinstance(value, str) or not value.strip() or value != value.strip() or not value.isprintable():
            raise TaskError(f"{where}: key {key!r} is {value!r}: give one line of text without blanks around it")
    if block["entities"] not in ENTITIES:
        raise TaskError(f"{where}: key 'entities' is {block['entities']!r}: choose {' or '.join(ENTITIES)}")
    return Relation(name=name, **block)
