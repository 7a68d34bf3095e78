"""Recipes: configurations of ``probe eval``, ``run``, ``patch`` and ``ablate`` that come with the package.

A recipe says everything about a study but the model. Its opening comment says what it asks, what is printed and how it
departs from the paper; `docs/recipes.md` lists them all. A recipe of another command than ``probe eval`` says so, as in
``command: run``; the others are about behaviour alone.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml

from experiments.errors import UsageError

_FOLDER = Path(__file__).parent


def names(of: str | None = None) -> list[str]:
    """Names of all recipes, or of one command's: tables first, each in order of number."""
    found = sorted((file.stem for file in _FOLDER.glob("*.yaml")), key=_place)
    return [name for name in found if of in (None, command(name))]


def command(name: str) -> str:
    """Which command a recipe is for: ``eval``, ``run``, ``patch`` or ``ablate``."""
    return str(yaml.safe_load(path(name).read_text()).get("command", "eval"))


def path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        UsageError: no such recipe.
    """
    file = _FOLDER / f"{name}.yaml"
    if name != Path(name).name or not file.exists():
        close = get_close_matches(name, names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"no recipe is called {name!r}{hint}: choose from {', '.join(names())}")
    return file


def found(given: str, asked: str) -> str:
    """A file as it is; a single word that is no file is the name of a recipe of the command ``asked``.

    Raises:
        UsageError: no such file or recipe, or a recipe of another command.
    """
    if Path(given).exists() or "/" in given or given.endswith((".yaml", ".yml")):
        return given
    if given not in names():
        known = ", ".join(names(asked))
        raise UsageError(f"no recipe and no file is called {given!r}: give a YAML file or one of {known}")
    return str(path(given))


def same_command(given: str, said: object, asked: str) -> None:
    """Refuse a configuration that says it is for another command; a file that says nothing fits each.

    Raises:
        UsageError: naming the command that it is for.
    """
    ours = Path(given).parent == _FOLDER
    meant = command(Path(given).stem) if ours else said or asked
    if meant != asked:
        name = Path(given).stem if ours else given
        raise UsageError(f"{name} is for `probe {meant}`, not `probe {asked}`: give `probe {meant} {name}`")


def describe(name: str) -> str:
    """What a recipe asks: the first paragraph of its opening comment, as one line."""
    lines = []
    for line in path(name).read_text().splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines)


def _place(name: str) -> tuple[str, str, int, str]:
    """Recipes of a paper together (a word before `table` names it), tables first, each in order of number."""
    words = name.split("-")
    at = next((place for place, word in enumerate(words) if word in ("table", "figure")), None)
    if at is None or len(words) == at + 1:
        return (words[0] if words[0] == "modals" else "", "2", 0, name)
    number = words[at + 1]
    return "-".join(words[:at]), f"{words[at] != 'table':d}", int(number) if number.isdigit() else 0, name
