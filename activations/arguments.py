"""Arguments of the wrong kind, refused in one line.

Problem. `Plan(layers=12)`, `merge("acts")` or an empty directory name are slips that Python answers with `'int' object is
not iterable` from deep inside, or by doing something else: a text is a sequence of its letters, and "" is the current
directory.

Mechanism. The public calls of the engine pass what they were given through these functions, which return it in the form
that is used inside, or raise a StoreError that names the argument, the value, and what to give.

Constraints. Only the kind is looked at here. Whether a layer or a site exists is for the model or the store to say.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from activations.errors import StoreError


def shown(value: Any) -> str:
    """A value as messages show it: its text, shortened, and its kind."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:59] + '…'} ({type(value).__name__})"


def path(name: str, value: Any) -> Path:
    """A path that is not empty: "" would mean the current directory."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise StoreError(f"{name} is {shown(value)}; give a path")
    if not os.fspath(value).strip():
        raise StoreError(f"{name} is empty; give a path, or . for the current directory")
    return Path(value)


def items(name: str, value: Any, example: str) -> list[Any]:
    """Any collection but a text."""
    if isinstance(value, str):
        raise StoreError(f"{name} is the text {value!r}; give a list, for example {example.format(repr(value))}")
    if not isinstance(value, Iterable):
        raise StoreError(f"{name} is {shown(value)}; give a list, for example {example.format(repr(str(value)))}")
    return list(value)


def texts(name: str, value: Any) -> list[str]:
    """A list of texts."""
    found = items(name, value, "[{}]")
    for one in found:
        if not isinstance(one, str):
            raise StoreError(f"{name} holds {shown(one)}; give texts")
    return found


def integer(name: str, value: Any) -> int:
    """A whole number; True and False are none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise StoreError(f"{name} is {shown(value)}; give a whole number")
    return number


def integers(name: str, value: Any) -> list[int]:
    """A list of whole numbers."""
    return [integer(f"a number in {name}", one) for one in items(name, value, "[0, 1]")]


def instance(name: str, value: Any, kind: type, how: str) -> None:
    """Refuse what is not of this kind; `how` says where such a thing comes from."""
    if not isinstance(value, kind):
        raise StoreError(f"{name} is {shown(value)}; give {how}")
