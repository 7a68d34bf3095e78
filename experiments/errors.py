"""Errors and exit codes of the command line.

A user meets one line: what happened, the value, what is allowed, the next step. ``RunError`` carries such a line;
the rooms below raise their own kind. The command line prints the line and exits with the code below.
"""

from __future__ import annotations

DONE, FAILED, USAGE, GATE, INTERRUPTED = 0, 1, 2, 3, 130


class RunError(ValueError):
    """A run that can't start or go on. The message is one line for the user."""


class UsageError(RunError):
    """A bad option, key or value: exit code 2."""


class GateError(RunError):
    """The run finished but too many answers could not be read: exit code 3."""
