"""Progress on the terminal: a bar where a person watches, a line a stage where nobody does.

Everything goes to standard error, so that ``--json`` output stays clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def steps(done: Callable[[int], None]) -> Callable[[int], None]:
    """Takes how many steps are done in all, where a stage is told how many more."""
    told = 0

    def total(count: int) -> None:
        nonlocal told
        done(count - told)
        told = count

    return total


class Reporter:
    """Says what a run is doing. ``log`` also receives each line, for log.txt."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.log: Callable[[str], None] = lambda _: None

    def say(self, line: str) -> None:
        self.log(line)
        if not self.quiet:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A stage of ``total`` steps; the function given to the block takes the number of steps just done."""
        started = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield lambda _: None
        else:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description:<34}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task(title, total=total)
                yield lambda steps: progress.advance(task, steps)
        self.say(f"  {title:<34} {time.monotonic() - started:6.1f} s")
