"""What a page says about the run that it shows: its title, its configuration, how to make it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report.source import shown
from experiments.report.text import DASH, listed


def title(environment: Mapping[str, Any], arms: Sequence[str]) -> str:
    """The model and its adapters."""
    adapters = arms[1:]
    name = shown(str(environment["model"]["name"]).rstrip("/"))
    name = name.rsplit("/", 1)[-1] if name.startswith("/") else name
    kind = "adapter" if len(adapters) == 1 else "adapters"
    return f"{name} with {kind} {listed([shown(arm) for arm in adapters])}" if adapters else name


def parameters(resolved: Mapping[str, Any]) -> str:
    """The family's parameters that all settings share."""
    grid: list[dict[str, Any]] = list(resolved["params"].values())
    fixed = {name: value for name, value in grid[0].items() if all(one[name] == value for one in grid)}
    fixed.pop("presentations", None)
    return ", ".join(f"{name}={text_of(value)}" for name, value in fixed.items()) or "none"


def reproduced(environment: Mapping[str, Any], resolved: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """What the section ``reproduce`` of a template prints."""
    model = environment["model"]
    identity = {key: value for key, value in model.items() if key not in ("versions", "adapters")}
    return {
        "command": shlex.join(["probe", *map(str, environment["command"][1:])]),
        "versions": [(name, version or "not installed") for name, version in environment["versions"].items()],
        "machine": [(key, text_of(environment[key])) for key in ("python", "platform", "processor", "threads", "git")],
        "identity": [(key, text_of(value)) for key, value in identity.items()],
        "adapters": [(name, text_of(value)) for name, value in model["adapters"].items()],
        "resolved": json.dumps(resolved, indent=1, ensure_ascii=False),
        "methods": list(methods),
    }


def text_of(value: Any) -> str:
    """A configured value as one text."""
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def methods(value: Any) -> list[str]:
    """Every method named in the results, once, in order of appearance."""
    found: dict[str, None] = {}

    def walk(one: Any) -> None:
        if isinstance(one, dict):
            if isinstance(one.get("method"), str) and one["method"]:
                found[one["method"]] = None
            for inner in one.values():
                walk(inner)
        elif isinstance(one, list):
            for inner in one:
                walk(inner)

    walk(value)
    return list(found)
