"""The run directory: one writer, one digest, nothing half-written.

A run may be killed at any moment. Three rules make the same command resume it:

* a file appears under its name only when it is whole (written beside, flushed to disk, renamed);
* a table is built in chunks, each a file of its own until all are there, so that a kill loses the chunk in flight;
* the directory carries the resolved configuration; once a model was loaded, another configuration is refused, naming
  each key that differs.

The lock is the operating system's (``flock``): it goes away with the process, also after ``kill -9``. The lock file
names pid and host for the message.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from experiments.config import digest
from experiments.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

TEMPORARY = ".writing-"


class RunDirectory:
    """Paths and files of one run. Open it through ``opened``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tables = path / "tables"
        self.activations = path / "activations"
        self.items = path / "items.jsonl"
        self.responses = path / "responses.jsonl"
        self.report = path / "report.html"
        self.results = path / "results.json"

    def complete(self) -> bool:
        """Whether the last stage has been written."""
        return self.results.exists() and self.report.exists()

    def read_json(self, name: str, *, keys: Collection[str] = ()) -> Any:
        """A JSON file of the run that holds one object.

        Args:
            keys: that it has to have.

        Raises:
            RunError: it is missing or damaged.
        """
        try:
            found = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {name}: is it a run directory? give another --out") from None
        except ValueError:
            found = None
        if not isinstance(found, dict) or not set(keys) <= set(found):
            raise damaged(self.path / name)
        return found

    def records(self, path: Path, *, keys: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """The objects of a file of JSON lines, one in memory at a time.

        Args:
            keys: that each has to have.

        Raises:
            RunError: a line is damaged.
        """
        # Bytes: text mode would also split at the other line separators that JSON leaves unescaped.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield record_of(path, number, line, keys=keys)

    def begun(self) -> bool:
        """Whether a model was loaded for this run: from then on the configuration can't change."""
        return any((self.path / n).exists() for n in ("environment.json", "responses.jsonl", "results.json"))

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        with atomic(self.path / name) as file:
            file.write(text.encode())

    def log(self, line: str) -> None:
        """Append one line with the time to log.txt."""
        with (self.path / "log.txt").open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")

    def table(self, name: str, *, columns: Collection[str] = ()) -> pd.DataFrame:
        """A finished table.

        Args:
            columns: that it has to have.

        Raises:
            RunError: the stage that writes it has not run, or it lacks a column.
        """
        path = self.tables / f"{name}.parquet"
        if not path.exists():
            raise RunError(
                f"{self.path} has no table {name!r}: repeat the command in its config.yaml, with another --out if need be"
            )
        table = _read_parquet(path)
        if lacking := [column for column in columns if column not in table]:
            raise RunError(
                f"{path} lacks the column {lacking[0]!r}: another version made it, or it was changed; delete it, and the "
                "same command makes it again"
            )
        return table

    def has_table(self, name: str) -> bool:
        return (self.tables / f"{name}.parquet").exists()

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        with atomic(self.tables / f"{name}.parquet") as file:
            table.to_parquet(file, index=False)

    def build_table(
        self,
        name: str,
        chunks: Sequence[Any],
        compute: Callable[[Any], pd.DataFrame],
        done: Callable[[int], None] = lambda _: None,
    ) -> pd.DataFrame:
        """A table computed chunk by chunk; chunks that an earlier process finished are read, not computed.

        Args:
            name: of the table.
            chunks: units of work, the same list in every process.
            compute: rows of one chunk.
            done: told 1 after each chunk.
        """
        import pandas as pd

        parts = self.tables / f"parts-{name}"
        if self.has_table(name):
            shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed between the table and this
            return self.table(name)
        parts.mkdir(parents=True, exist_ok=True)
        frames = []
        for number, chunk in enumerate(chunks):
            path = parts / f"{number:05d}.parquet"
            if not path.exists():
                with atomic(path) as file:
                    compute(chunk).to_parquet(file, index=False)
            # Read back also when just computed: a resumed run and an uninterrupted one see the same bytes.
            frames.append(_read_parquet(path))
            done(1)
        table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        self.write_table(name, table)
        shutil.rmtree(parts)
        return table


@contextmanager
def opened(path: Path, values: Mapping[str, Any], config_text: str) -> Iterator[RunDirectory]:
    """The run directory, created or resumed, locked until the block ends.

    Args:
        path: the directory.
        values: the resolved configuration.
        config_text: kept as config.yaml.

    Raises:
        RunError: another process writes here, another configuration made it, or it is no run directory.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file: give a folder with --out")
    if path.exists() and any(path.iterdir()) and not any((path / n).exists() for n in ("resolved.json", "lock")):
        raise RunError(f"{path} is not empty and holds no run: give a new folder with --out")
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        run = RunDirectory(path)
        for folder in (run.path, run.tables):
            folder.mkdir(exist_ok=True)
            for left in folder.rglob(f"{TEMPORARY}*"):
                left.unlink()
        if run.begun():
            _refuse_other(path, run.read_json("resolved.json"), values)
        else:
            # No model has been loaded yet: a command that failed on a typing error may be given again, corrected.
            run.items.unlink(missing_ok=True)
            run.write_text("config.yaml", config_text)
            run.write_json("resolved.json", {"digest": digest(values), **values})
        yield run


@contextmanager
def reopened(path: Path) -> Iterator[RunDirectory]:
    """A run that was made before, locked until the block ends, whatever its configuration.

    Raises:
        RunError: it is no run directory, or another process writes here.
    """
    if not (path / "resolved.json").exists():
        raise RunError(f"{path} has no resolved.json: give the folder of a run")
    with _locked(path):
        yield RunDirectory(path)


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its name only when it is whole and on disk."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines and flush them to disk. A line cut by a kill is left for ``whole_lines`` to drop."""
    with path.open("ab") as file:
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[str]:
    """Lines of an append-only file; a last line without its end is cut off the file first."""
    if not path.exists():
        return []
    # Not splitlines: model text may hold other line separators, which JSON leaves unescaped.
    return mended(path).decode().split("\n")[:-1]


def mended(path: Path) -> bytes:
    """The content of an append-only file; a last line without its end is cut off the file first."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return data[:end]


def record_of(
    path: Path, number: int, line: bytes, *, keys: Collection[str] = (), advice: str = "", words: Collection[str] = ()
) -> dict[str, Any]:
    """The object of one JSON line.

    Args:
        path, number: where it stands, for the message.
        keys, words: that it has to have; of `words` the value has to be text.

    Raises:
        RunError: it is damaged.
    """
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not {*keys, *words} <= set(found) or not _texts(found, words):
        raise damaged(path, advice, line=number)
    return found


def _texts(found: Mapping[str, Any], words: Collection[str]) -> bool:
    return all(isinstance(found[name], str) for name in words)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with (path / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise RunError(f"{path} is being written by {holder}: wait for it, or give another --out") from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError):
        raise damaged(path, "delete it, and the same command makes it again") from None


def damaged(path: Path, advice: str = "", *, line: int | None = None) -> RunError:
    """The error for a file of a run that can't be read."""
    place = "" if line is None else f"line {line} of "
    return RunError(
        f"{place}{path} is damaged and can't be read: {advice or 'give another --out, or put the file back'}"
    )


def _refuse_other(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if old.get("digest") == digest(new):
        return
    if old.get("command") != new.get("command"):
        raise RunError(
            f"{path} is of `probe {old.get('command')}`, not of `probe {new.get('command')}`: give another --out"
        )
    differing = [
        f"{key} was {_short(was)}, is {_short(now)}"
        for key, was, now in differences({k: v for k, v in old.items() if k != "digest"}, new)
    ]
    raise RunError(
        f"{path} was made with another configuration ({'; '.join(differing) or 'digest differs'}): "
        "give another --out, or the old values"
    )


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key at which two nested mappings differ, with both values; ``key`` names the whole."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
