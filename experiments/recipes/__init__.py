"""Recipes: configurations of ``probe eval`` that come with the package, one for each table or figure of the paper.

A recipe says everything about a study but the model. Its opening comment says what it asks, what is printed and how it
departs from the paper; `docs/recipes.md` lists them all.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from experiments.errors import UsageError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Names of all recipes: tables first, each in order of number."""
    return sorted((file.stem for file in _FOLDER.glob("*.yaml")), key=_order)


def path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        UsageError: no such recipe.
    """
    if name not in names():
        close = get_close_matches(name, names(), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"no recipe is called {name!r}{hint}: choose from {', '.join(names())}")
    return _FOLDER / f"{name}.yaml"


def describe(name: str) -> str:
    """What a recipe asks: the first paragraph of its opening comment, as one line."""
    lines = []
    for line in path(name).read_text().splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return " ".join(lines)


def _order(name: str) -> tuple[str, int, str]:
    kind, number, *part = name.split("-", 2)
    return {"table": "0", "figure": "1"}.get(kind, kind), int(number) if number.isdigit() else 0, "".join(part)
