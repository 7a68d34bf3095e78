"""The ``probe`` command.

Each command imports what it needs when it runs, so that ``probe --help`` answers at once. One boundary turns errors into
one line and an exit code: 0 done, 1 error, 2 usage, 3 too many answers could not be read, 130 interrupted and resumable.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

import typer

from experiments.cli.app import app
from experiments.errors import DONE, FAILED, GATE, INTERRUPTED, USAGE, GateError, RunError, UsageError

# isort: off
# Importing a module of commands puts them into the application; --help lists them in this order.
from experiments.cli import study, behaviour, families  # noqa: F401
from experiments.cli import engine  # noqa: F401
from experiments.cli import store  # noqa: F401
from experiments.cli import explain  # noqa: F401
from experiments.cli import probing  # noqa: F401
from experiments.cli import interventions  # noqa: F401
from experiments.cli import ablating  # noqa: F401
# isort: on

# typer carries its own copy of click in some versions and uses the installed one in others.
CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


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
