"""The ``probe`` command.

Each command imports what it needs when it runs, so that ``probe --help`` answers at once. Flags are configuration keys;
each can also come from the environment as ``PROBE_<FLAG>``. One boundary turns errors into one line and an exit code:
0 done, 1 error, 2 usage, 3 too many answers could not be read, 130 interrupted and resumable.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.errors import DONE, FAILED, GATE, INTERRUPTED, USAGE, GateError, RunError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Ask a model the same question in matched wordings, look inside, and tie failures to measured causes.",
)


def _flag(name: str, help: str, short: str | None = None) -> Any:
    names = [f"--{name}", *([short] if short else [])]
    return typer.Option(*names, envvar=f"PROBE_{name.upper().replace('-', '_')}", help=help)


# typer carries its own copy of click in some versions and uses the installed one in others.
CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

Set = Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat for more. n=4,8 sweeps both.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
# Text, not int: the message about a bad number then names it, like every other message here.
Seed = Annotated[str | None, _flag("seed", "Seed of every random draw.")]
Split = Annotated[str | None, _flag("split", "train, validation or test.")]
Limit = Annotated[str | None, _flag("limit", "Matched sets a setting.")]
FamilyName = Annotated[str, typer.Argument(help="Family name, or path/to/file.py:Name.")]


@app.command("run")
def run_command(
    config: Annotated[str | None, typer.Argument(help="YAML file; without it, the built-in pair is studied.")] = None,
    model: Annotated[str | None, _flag("model", "Hub id, folder, .gguf file, builtin or smollm2.", "-m")] = None,
    adapter: Annotated[list[str] | None, _flag("adapter", "LoRA adapter of the model; repeat for more.", "-a")] = None,
    family: Annotated[str | None, _flag("family", "Problem family, or path/to/file.py:Name.", "-f")] = None,
    set_: Set = None,
    limit: Limit = None,
    seed: Seed = None,
    split: Split = None,
    device: Annotated[str | None, _flag("device", "auto, cpu, cuda, cuda:1 or mps.")] = None,
    dtype: Annotated[str | None, _flag("dtype", "float32, bfloat16, float16 or auto.")] = None,
    out: Annotated[Path | None, _flag("out", "Run directory; the same command resumes it.", "-o")] = None,
    json_: Json = False,
) -> None:
    """Ask, score, capture, probe, patch, ablate and report, for a model and its adapters on the same items."""
    import json
    import shlex

    import yaml

    from experiments.config import load
    from experiments.pipeline import gate, run
    from experiments.progress import Reporter

    flags = {"model": model, "adapter": tuple(adapter) if adapter else None, "family": family, "limit": limit,
             "seed": seed, "split": split, "device": device, "dtype": dtype}  # fmt: skip
    loaded = load(config, set_ or [], flags)
    directory = out or Path("runs") / default_name(loaded.model, loaded.adapter)
    results = run(
        loaded,
        directory,
        config_text=f"# {shlex.join(['probe', *sys.argv[1:]])}\n{yaml.safe_dump(loaded.model_dump(mode='json'))}",
        reporter=Reporter(quiet=json_),
    )
    if json_:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        from experiments.summary import show

        show(results, directory)
    gate(results, loaded)


@app.command()
def families(json_: Json = False) -> None:
    """List problem families with their parameters and allowed values."""
    import json
    from dataclasses import asdict

    from tasks.registry import family, family_names

    listed: list[dict[str, Any]] = []
    for name in family_names():
        found = family(name)
        parameters = [asdict(parameter) for parameter in found.parameters()]
        listed.append({"name": found.name, "version": found.version, "parameters": parameters})
    if json_:
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
        return
    for entry in listed:
        sys.stdout.write(f"{entry['name']} (version {entry['version']})\n")
        for parameter in entry["parameters"]:
            default = parameter["default"]
            shown = ",".join(default) if isinstance(default, list) else default
            sys.stdout.write(f"  {parameter['name']}={shown}  {parameter['help']}\n      {parameter['allowed']}\n")


@app.command()
def generate(
    family: FamilyName,
    out: Annotated[str, _flag("out", "File of JSON lines; - writes to standard output.", "-o")],
    set_: Set = None,
    limit: Limit = None,
    seed: Seed = None,
    split: Split = None,
) -> None:
    """Write matched sets as JSON lines."""
    from experiments.rundir import atomic
    from tasks.files import to_line
    from tasks.registry import family as family_named

    found = family_named(family)
    if not out:
        raise UsageError("out is empty: give a file, or - for standard output")
    lines = (to_line(one, version=found.version) for one in _sets(family, set_, limit, seed, split, sets=100))
    if out == "-":
        sys.stdout.writelines(lines)
        return
    with atomic(Path(out)) as file:
        for line in lines:
            file.write(line.encode())


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
    count = _integer("limit", limit, default=200, least=1)
    findings = validate_family(found, _params(found, set_), sets=count, seed=_integer("seed", seed, default=0))
    if json_:
        sys.stdout.write(json.dumps([{**asdict(one), "ok": one.ok} for one in findings], indent=1) + "\n")
    else:
        for one in findings:
            verdict = "ok  " if one.ok else "FAIL"
            sys.stdout.write(f"{verdict} {one.promise} ({one.checked} checked) {one.example}\n")
    if not all(one.ok for one in findings):
        raise RunError(f"{family} breaks {sum(not one.ok for one in findings)} promises: see the lines above")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, builtin or smollm2.")],
    adapter: Annotated[list[str] | None, _flag("adapter", "LoRA adapter to check along.", "-a")] = None,
    device: Annotated[str, _flag("device", "auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    dtype: Annotated[str, _flag("dtype", "float32, bfloat16, float16 or auto.")] = "float32",
    any_base: Annotated[bool, typer.Option("--any-base", help="Accept an adapter that names another base.")] = False,
    json_: Json = False,
) -> None:
    """Check a model's numerics: padding, lens, heads, hooks, adapters, against the bounds that every run relies on."""
    import json
    from dataclasses import asdict
    from itertools import islice

    from activations.checks import check as run_checks
    from activations.errors import ModelError
    from activations.model import load
    from tasks.registry import family as family_named

    def asked(names: str) -> Any:
        sets = islice(family_named("ordering").generate({"n": 6, "names": names}, seed=0, split="test"), 4)
        return loaded.encode([shown.chat() for matched in sets for shown in matched.presentations])

    loaded = load(model, adapters=tuple(adapter or ()), device=device, dtype=dtype, any_base=any_base, verify=False)
    try:
        prompts = asked("census")
    except ModelError:  # a word-level tokenizer, such as the built-in model's, knows few names
        prompts = asked("builtin")
    table = run_checks(loaded, prompts)
    if json_:
        sys.stdout.write(json.dumps([asdict(one) for one in table], indent=1) + "\n")
    else:
        for one in table:
            verdict = "ok  " if one.ok else "FAIL"
            sys.stdout.write(f"{verdict} {one.name:<44} {one.value:9.2e}  bound {one.bound:.0e}  {one.note}\n")
    if not all(one.ok for one in table):
        raise RunError(f"{model} fails {sum(not one.ok for one in table)} checks: see the lines above")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Write report.html of a run anew from its tables; needs no model."""
    from experiments.report import write
    from experiments.rundir import RunDirectory

    folder = RunDirectory(run)
    if not folder.results.exists():
        raise RunError(
            f"{run} has no results.json: give the folder of a finished run, or repeat the command that began it"
        )
    write(folder)
    sys.stdout.write(f"{folder.report}\n")


def default_name(model: str, adapters: tuple[str, ...]) -> str:
    """Name of the run directory where none is given: the model's and its adapters' names."""
    parts = [Path(model).name or model, *(Path(one).name for one in adapters if one != model)]
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in part).strip("-.") for part in parts)


def _params(found: Any, set_: list[str] | None) -> dict[str, Any]:
    from experiments.config import parse_pair

    given = {key.removeprefix("params."): value for key, value in map(parse_pair, set_ or [])}
    single = {parameter.name for parameter in found.parameters() if not parameter.takes_list}
    for key, value in given.items():
        if key in single and isinstance(value, list):
            raise UsageError(f"{key} is {value}: give one value here; only `probe run` sweeps over a list")
    return dict(found.validate(given))


def _sets(
    family: str, set_: list[str] | None, limit: str | None, seed: str | None, split: str | None, *, sets: int
) -> Any:
    from itertools import islice
    from typing import cast

    from tasks.registry import family as family_named

    found = family_named(family)
    params = _params(found, set_)
    count = _integer("limit", limit, default=sets, least=1)
    number = _integer("seed", seed, default=0)
    return islice(found.generate(params, seed=number, split=cast(Any, split or "test")), count)


def _integer(name: str, text: str | None, *, default: int, least: int = 0) -> int:
    if text is None:
        return default
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise UsageError(f"{name} is {text!r}: give an integer of at least {least}")
    return int(text)


def _known_errors() -> tuple[type[ValueError], ...]:
    """Error classes of the rooms that are loaded. A room that was never imported can't have raised."""
    places = (
        ("tasks.contracts", "TaskError"),
        ("activations.errors", "ModelError"),
        ("activations.errors", "StoreError"),
        ("probes.errors", "ProbeError"),
        ("patching.edits", "PatchError"),
    )
    return (RunError, *(getattr(sys.modules[name], kind) for name, kind in places if name in sys.modules))


def main() -> None:
    """Entry point of the command: run it, and exit with one line and a code where something goes wrong."""
    if not sys.stderr.isatty():
        # Bars of the libraries below would fill a log file with control characters.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        # δ and ι are not in every terminal's character set; a question mark is better than a crash after the work.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught the interrupt and turned it into this code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error.format_message()}\n")
            return USAGE
        return _fail(f"{error.format_message()} See --help.", USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted: the same command goes on from here", INTERRUPTED)
    except GateError as error:
        return _fail(str(error), GATE)
    except UsageError as error:
        return _fail(str(error), USAGE)
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again at exit.
        sys.stderr.close()
        return FAILED
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room; the same command resumes" if full else "check that it exists and may be read and written"
        return _fail(f"{error.strerror or error}{where}: {advice}", FAILED)
    except ValueError as error:
        if not isinstance(error, _known_errors()):
            raise
        # What a family refuses is a value that the user gave.
        return _fail(str(error), USAGE if type(error).__name__ == "TaskError" else FAILED)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"probe: {' '.join(message.split())}\n")
    return code
