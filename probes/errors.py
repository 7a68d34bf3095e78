"""What can go wrong in a probe study. Each message is one line: what happened, the value, what is needed."""

from __future__ import annotations


class ProbeError(ValueError):
    """The arrays cannot support the number that was asked for (too few groups, one class, mismatched shapes)."""


class ConvergenceError(ProbeError):
    """A solver stopped before its optimum. A half-fitted probe looks like a weak one, so no result is returned."""
