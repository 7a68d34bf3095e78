"""The command-line application, and the options that several commands share.

Flags are configuration keys; each can also come from the environment as ``PROBE_<FLAG>``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.errors import UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Ask a model the same question in matched wordings, look inside, and tie failures to measured causes.",
)


FILE_WIDTH = 10_000  # characters; no line is as long
NARROWEST = 40  # columns below which folding would help nobody


def flag(name: str, help: str, short: str | None = None) -> Any:
    """An option with its environment variable."""
    names = [f"--{name}", *([short] if short else [])]
    return typer.Option(*names, envvar=f"PROBE_{name.upper().replace('-', '_')}", help=help)


Set = Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat for more. n=4,8 sweeps both.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]
# Text, not int: the message about a bad number then names it, like every other message here.
Seed = Annotated[str | None, flag("seed", "Seed of every random draw.")]
Split = Annotated[str | None, flag("split", "train, validation or test.")]
Limit = Annotated[str | None, flag("limit", "Matched sets a setting.")]
FamilyName = Annotated[str, typer.Argument(help="Family name, or path/to/file.py:Name.")]
Model = Annotated[str | None, flag("model", "Hub id, folder, .gguf file, builtin or smollm2.", "-m")]
Adapter = Annotated[list[str] | None, flag("adapter", "LoRA adapter of the model; repeat for more.", "-a")]
Family = Annotated[str | None, flag("family", "Problem family, or path/to/file.py:Name.", "-f")]
Device = Annotated[str | None, flag("device", "auto, cpu, cuda, cuda:1 or mps.")]
Dtype = Annotated[str | None, flag("dtype", "float32, bfloat16, float16 or auto.")]
Resamples = Annotated[str | None, flag("resamples", "Bootstrap resamples.")]


def integer(name: str, text: str | None, *, default: int, least: int = 0) -> int:
    """The integer that a flag gives.

    Raises:
        UsageError: it is none, or smaller than ``least``.
    """
    if text is None:
        return default
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise UsageError(f"--{name} is {text!r}: give an integer of at least {least}")
    return int(text)


def place(name: str, text: str) -> Path:
    """The path that a flag or argument gives. Text until here, because an empty path would be the current directory.

    Raises:
        UsageError: it is empty.
    """
    if not text.strip():
        raise UsageError(f"{name} is empty: give a path, or . for the current directory")
    return Path(text)


def joined(given: list[str] | None) -> str | None:
    """What a flag that takes ``a,b`` gives in all, so that giving it twice drops nothing."""
    return None if given is None else ",".join(given)


def columns() -> int:
    """Characters a line: the terminal's; a file is as wide as what is written to it, unless COLUMNS says otherwise."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return max(shutil.get_terminal_size().columns, NARROWEST)
    return FILE_WIDTH


def wrapped(text: str, *, first: str = "", rest: str = "  ") -> str:
    """A line of prose, folded at the width of the terminal; words and paths stay whole.

    Args:
        first, rest: what the first line and the others begin with.
    """
    return textwrap.fill(
        text, columns(), initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def libraries(text: str | None) -> tuple[str, ...]:
    """The libraries that ``--backends`` names.

    Raises:
        UsageError: there is no such library.
    """
    from activations.backends import named
    from activations.errors import ModelError

    try:
        return () if text is None else named(text)
    except ModelError as error:
        raise UsageError(str(error)) from None


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM, which schedulers send, ends like Ctrl-C: what is stored stays whole and is said to.

    A second one ends the process at once.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def default_name(model: str, adapters: tuple[str, ...]) -> str:
    """Name of the run directory where none is given: the model's and its adapters' names."""
    parts = [Path(model).name or model, *(Path(one).name for one in adapters if one != model)]
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in part).strip("-.") for part in parts)
