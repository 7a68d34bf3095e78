"""Commands about what is asked: ``families``, ``generate``, ``show``, ``validate``. None needs a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from experiments.cli.app import FamilyName, Json, Limit, Seed, Set, Split, app, flag, integer
from experiments.errors import RunError, UsageError


@app.command()
def families(json_: Json = False) -> None:
    """List problem families with their parameters, allowed values, and the targets that probes can be fitted to."""
    import json
    from dataclasses import asdict

    from tasks.registry import family, family_names
    from tasks.targets import targets_of

    listed: list[dict[str, Any]] = []
    for name in family_names():
        found = family(name)
        parameters = [asdict(parameter) for parameter in found.parameters()]
        targets = {name: target.help for name, target in targets_of(found).items()}
        listed.append({"name": found.name, "version": found.version, "parameters": parameters, "targets": targets})
    if json_:
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
        return
    for entry in listed:
        sys.stdout.write(f"{entry['name']} (version {entry['version']})\n")
        for parameter in entry["parameters"]:
            default = parameter["default"]
            shown = ",".join(default) if isinstance(default, list) else default
            sys.stdout.write(f"  {parameter['name']}={shown}  {parameter['help']}\n      {parameter['allowed']}\n")
        for name, help in entry["targets"].items():
            sys.stdout.write(f"  target {name}  {help}\n")


@app.command()
def generate(
    family: FamilyName,
    out: Annotated[str, flag("out", "File of JSON lines; - writes to standard output.", "-o")],
    set_: Set = None,
    limit: Limit = None,
    seed: Seed = None,
    split: Split = None,
) -> None:
    """Write matched sets as JSON lines: all of a finite family, 100 of one without end, or as many as limit says."""
    from tasks.files import to_line
    from tasks.registry import family as family_named

    found = family_named(family)
    if not out:
        raise UsageError("out is empty: give a file, or - for standard output")
    lines = (to_line(one, version=found.version) for one in _sets(family, set_, limit, seed, split))
    with _sink(out) as file:
        for line in lines:
            file.write(line.encode())


@contextmanager
def _sink(out: str) -> Iterator[IO[bytes]]:
    """Where lines go. UTF-8 whatever the terminal's character set is, so that names in the items stay what they are."""
    from experiments.rundir import atomic

    path = Path(out)
    if out == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif path.is_dir():
        raise UsageError(f"out is {out!r}, which is a folder: give a file in it, or - for standard output")
    elif path.exists() and not path.is_file():
        # A device or a pipe takes what is written; a new file put in its place would replace /dev/null itself.
        with path.open("wb") as file:
            yield file
    else:
        with atomic(path.resolve()) as file:  # a link keeps pointing where it does
            yield file


@app.command()
def show(
    family: FamilyName,
    set_: Set = None,
    limit: Limit = None,
    seed: Seed = None,
    split: Split = None,
) -> None:
    """Print matched sets as a model would be asked them."""
    for matched in _sets(family, set_, limit, seed, split, sets=1):
        instance = matched.instance
        sys.stdout.write(f"== {instance.key[:16]}  cell {instance.cell}  gold {instance.gold}\n")
        for shown in matched.presentations:
            text = "\n".join(message.content for message in shown.messages)
            sys.stdout.write(f"-- {shown.kind} (gold {shown.gold})\n{text}\n\n")


@app.command()
def validate(
    family: FamilyName,
    set_: Set = None,
    limit: Limit = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Check a family: second solver, grading, duplicates, splits, balance."""
    import json
    from dataclasses import asdict

    from tasks.registry import family as family_named
    from tasks.validation import validate_family

    found = family_named(family)
    count = integer("limit", limit, default=200, least=1)
    findings = validate_family(found, _params(found, set_), sets=count, seed=integer("seed", seed, default=0))
    if json_:
        sys.stdout.write(json.dumps([{**asdict(one), "ok": one.ok} for one in findings], indent=1) + "\n")
    else:
        for one in findings:
            verdict = "ok  " if one.ok else "FAIL"
            sys.stdout.write(f"{verdict} {one.promise} ({one.checked} checked) {one.example}\n")
    if not all(one.ok for one in findings):
        raise RunError(f"{family} breaks {sum(not one.ok for one in findings)} promises: see the lines above")


def _params(found: Any, set_: list[str] | None) -> dict[str, Any]:
    from experiments.config import parse_pair

    given = {key.removeprefix("params."): value for key, value in map(parse_pair, set_ or [])}
    single = {parameter.name for parameter in found.parameters() if not parameter.takes_list}
    for key, value in given.items():
        if key in single and isinstance(value, list):
            raise UsageError(f"{key} is {value}: give one value here; only `probe run` sweeps over a list")
    return dict(found.validate(given))


def _sets(
    family: str,
    set_: list[str] | None,
    limit: str | None,
    seed: str | None,
    split: str | None,
    *,
    sets: int | None = None,
) -> Any:
    from itertools import islice
    from typing import cast

    from tasks.contracts import Finite
    from tasks.registry import family as family_named

    found = family_named(family)
    params = _params(found, set_)
    number, part = integer("seed", seed, default=0), cast(Any, split or "test")
    matched = found.generate(params, seed=number, split=part)
    if sets is None:
        sets = sum(found.cells(params, split=part).values()) if isinstance(found, Finite) else 100
    return islice(matched, integer("limit", limit, default=sets, least=1))
