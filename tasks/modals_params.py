"""Parameters of family modals, and which templates and contents they choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

from tasks.contracts import Parameter, TaskError
from tasks.modals_catalog import PACKAGED, Catalog, NameSet, Template, catalog_named, packaged
from tasks.modals_text import EQUIVALENTS, KINDS, PRESENTATIONS
from tasks.prompts import INSTRUCTIONS, instruction

_LISTS = ("templates", "presentations", "names", "activities")


@dataclass(frozen=True, slots=True)
class ModalsParams:
    """Checked parameters; see ``parameters`` for what each allows."""

    templates: tuple[str, ...] = ("all",)
    names: tuple[str, ...] = ("all",)
    activities: tuple[str, ...] = ("all",)
    presentations: tuple[str, ...] = tuple(KINDS)
    equivalent: str = "follow"
    prompt: str = "direct"
    catalog: str = PACKAGED

    def chosen_templates(self) -> tuple[Template, ...]:
        """The templates asked for, in the order of the catalog."""
        found = catalog_named(self.catalog)
        wanted = {name for word in self.templates for name in template_words(found)[word]}
        return tuple(one for name, one in found.templates.items() if name in wanted)

    def chosen_names(self) -> tuple[NameSet, ...]:
        """The name sets asked for, in the order of the catalog."""
        found = catalog_named(self.catalog)
        wanted = {name for word in self.names for name in name_words(found)[word]}
        return tuple(one for name, one in found.name_sets.items() if name in wanted)

    def chosen_activities(self) -> tuple[str, ...]:
        """The activities asked for, in the order of the catalog."""
        every = catalog_named(self.catalog).activities
        return every if "all" in self.activities else tuple(one for one in every if one in self.activities)


def template_words(found: Catalog) -> dict[str, tuple[str, ...]]:
    """Everything that ``templates`` may say, with the templates it stands for."""
    words: dict[str, tuple[str, ...]] = {"all": tuple(found.templates)}
    for validity, name in ((True, "valid"), (False, "invalid")):
        words[name] = tuple(name for name, one in found.templates.items() if one.valid == validity)
    words |= found.subsets
    for pattern in found.patterns:
        words[pattern] = tuple(name for name, one in found.templates.items() if one.pattern == pattern)
    return words | {name: (name,) for name in found.templates}


def name_words(found: Catalog) -> dict[str, tuple[str, ...]]:
    """Everything that ``names`` may say, with the name sets it stands for."""
    sets = found.name_sets
    words: dict[str, tuple[str, ...]] = {
        "all": tuple(sets),
        "people": tuple(name for name, one in sets.items() if one.gender in ("women", "men")),
    }
    for word in ("women", "men"):
        words[word] = tuple(name for name, one in sets.items() if one.gender == word)
    for group in found.groups:
        words[group] = tuple(name for name, one in sets.items() if one.group == group)
    return words | {name: (name,) for name in sets}


def parameters() -> tuple[Parameter, ...]:
    """The parameters as ``probe families`` lists them, with the packaged catalog's choices."""
    found = packaged()
    templates, names = tuple(template_words(found)), tuple(name_words(found))
    return (
        Parameter("templates", ["all"], f"any of {', '.join(templates)}", templates,
                  "inference patterns: a subset, patterns or single templates", takes_list=True),
        Parameter("names", ["all"], f"any of {', '.join(names)}", names,
                  "who it is about: name groups, or one gender of a group", takes_list=True),
        Parameter("activities", ["all"], f"any of all, {', '.join(found.activities)}", ("all", *found.activities),
                  "what they may be at", takes_list=True),
        Parameter("presentations", list(KINDS), f"'original' first, then any of {', '.join(PRESENTATIONS[1:])}, each once",
                  PRESENTATIONS, "question forms asked of each template and content", takes_list=True),
        Parameter("equivalent", "follow", f"one of {', '.join(EQUIVALENTS)}", EQUIVALENTS,
                  "form that the presentation 'equivalent' has"),
        Parameter("prompt", "direct", f"one of {', '.join(INSTRUCTIONS)}", tuple(INSTRUCTIONS),
                  "answer at once, or reason first"),
        Parameter("catalog", PACKAGED, f"{PACKAGED}, or path/to/file.toml", None,
                  "file with templates, forms, names and activities"),
    )  # fmt: skip


def checked(params: Mapping[str, Any]) -> ModalsParams:
    """Parameters with the defaults filled in.

    Raises:
        TaskError: a bad one, naming it and what is allowed.
    """
    known = tuple(field.name for field in fields(ModalsParams))
    for key in params:
        if key not in known:
            hint = _hint(key, known)
            extra = " (a question about probability operators has no size)" if key == "n" else ""
            raise TaskError(f"modals has no parameter {key!r}{extra}: {hint}choose from {', '.join(known)}")
    given = {key: _listed(value) if key in _LISTS else value for key, value in params.items()}
    found = ModalsParams(**given)
    catalog = catalog_named(found.catalog)
    _check_words("templates", found.templates, tuple(template_words(catalog)))
    _check_words("names", found.names, tuple(name_words(catalog)))
    _check_words("activities", found.activities, ("all", *catalog.activities))
    _check_words("presentations", found.presentations, PRESENTATIONS)
    if found.presentations[0] != "original":
        raise TaskError(f"presentations is {', '.join(found.presentations)}: 'original' comes first")
    if not isinstance(found.equivalent, str) or found.equivalent not in EQUIVALENTS:
        raise TaskError(f"equivalent is {found.equivalent!r}: choose one of {', '.join(EQUIVALENTS)}")
    if "equivalent" in found.presentations and found.equivalent in found.presentations:
        raise TaskError(
            f"presentations holds equivalent and {found.equivalent!r}, which are one text: leave one out, or set equivalent"
        )
    instruction(found.prompt)
    return found


def as_values(params: ModalsParams) -> dict[str, Any]:
    """The parameters as JSON values."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(params).items()}


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _check_words(key: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, tuple) or not value:
        raise TaskError(f"{key} is {value!r}: give a list of {', '.join(allowed)}")
    for word in value:
        if not isinstance(word, str) or word not in allowed:
            raise TaskError(f"{key} has {word!r}: {_hint(word, allowed)}choose from {', '.join(allowed)}")
    if len(set(value)) != len(value):
        twice = next(word for word in value if value.count(word) > 1)
        raise TaskError(f"{key} has {twice!r} twice: each may stand once")


def _hint(word: object, allowed: Sequence[str]) -> str:
    close = get_close_matches(str(word), allowed, n=1)
    return f"did you mean {close[0]}? " if close else ""
