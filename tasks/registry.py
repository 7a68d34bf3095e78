"""Families by name.

Three places to look, in this order: the families of this package; those that installed packages register under the
entry-point group ``pairlens.families``; and, for work in progress, a file: ``path/to/file.py:Name``. Nothing is imported
before it is asked for by name.
"""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from tasks.contracts import Family, TaskError

GROUP = "pairlens.families"
_METHODS = ("parameters", "validate", "generate", "parse", "grade", "verify")
_VALUES = ("name", "version", "answers")
_BUILT_IN = {"ordering": "tasks.ordering:Ordering", "horn": "tasks.horn:Horn", "modals": "tasks.modals:Modals"}


def family_names() -> list[str]:
    """Names of all families that can be asked for without a path, sorted."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def family(name: str) -> Family:
    """The family with this name or at this ``file.py:Name``.

    Raises:
        TaskError: no such family, file or class; the message lists what exists.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name].split(":")
        return cast(Family, getattr(importlib.import_module(module), attribute)())
    for point in entry_points(group=GROUP):
        if point.name == name:
            return cast(Family, point.load()())
    if ".py:" in name:
        return _from_file(name)
    known = family_names()
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise TaskError(f"unknown family {name!r}: {hint}choose {', '.join(known)}, or give path/to/file.py:Name")


def _from_file(reference: str) -> Family:
    path_text, _, attribute = reference.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise TaskError(f"family file {path_text!r} does not exist: give path/to/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"pairlens_family_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TaskError(f"family file {path_text!r} can't be loaded: it must be a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses look their own module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        mine = (key for key, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)
        classes = ", ".join(mine)
        raise TaskError(f"family file {path_text!r} has no {attribute!r}: it defines {classes or 'no class'}")
    # What a method has to be, a class has; name, version and answers may be set when one is made.
    _check_parts(found, _METHODS, attribute, path_text)
    made = found()
    _check_parts(made, _VALUES, attribute, path_text)
    return cast(Family, made)


def _check_parts(found: object, parts: tuple[str, ...], attribute: str, path: str) -> None:
    missing = [part for part in parts if not hasattr(found, part)]
    if missing:
        raise TaskError(
            f"{attribute!r} in {path!r} is no family: it has no {', '.join(missing)}; see tasks/contracts.py"
        )
