"""Writing a store: shard by shard, so that a kill, a full disk or a second writer cannot spoil what is there.

Problem. Capturing takes hours and gets killed. A file that is half there and looks whole, a run resumed under other
settings, or two runs writing into one directory would each give plausible and wrong numbers much later.

Mechanism. A shard holds one batch. Its bytes are composed in memory, written under a temporary name in the same folder,
flushed to the disk, read back, and only then renamed. A rename within a folder is atomic, so a shard is either absent
or whole, and a kill costs at most the shard in flight. Opening for writing with another digest is refused and each
differing key is named with both values; with the same digest it resumes, and what is missing or damaged is written.

The writer locks `manifest.json` through the operating system (flock), which forgets the lock when the process ends,
also after kill -9. A later writer of the same process takes the directory over, so that a notebook cell can be run
again after an error; the earlier one then refuses to write.

Constraints. One writer a directory: several processes capture into directories of their own, merged afterwards. Where
the file system knows no locks (some network mounts), a second writer cannot be seen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from activations import arguments
from activations.errors import StoreError
from activations.sites import Where, by_site, dataset_path, spans
from activations.store_format import (
    ANSWER_LABEL,
    FLOAT16_MAX,
    FORMAT,
    MANIFEST,
    ROW_COLUMNS,
    STORAGE,
    Piece,
    differences,
    heads_of,
    make_manifest,
    pack,
    pieces,
    read_manifest,
    spec_of,
)
from activations.store_shards import check_bytes, compose

TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
"""What the operating system says where another process holds a lock."""
_WRITERS: weakref.WeakValueDictionary[str, StoreWriter] = weakref.WeakValueDictionary()


class StoreWriter:
    """Writes the shards that a store still lacks. Whatever is already there and whole stays untouched.

    `datasets` maps (site, layer) to its width; `shards` lists the row numbers of each shard; `rows` holds the columns
    of the row index (`label` is "answer" throughout where it is not given); `content` names all else that determines
    the numbers; `notes` is recorded and never compared.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        datasets: Mapping[Where, int],
        dtype: str,
        n_layers: int,
        shards: Sequence[Sequence[int]],
        rows: Mapping[str, Sequence[Any]],
        content: Mapping[str, Any],
        labels: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(dtype, str) or dtype not in STORAGE:
            raise StoreError(f"unknown storage dtype {dtype!r}; allowed: {', '.join(STORAGE)}")
        self.directory, self.dtype = arguments.path("directory", directory), dtype
        self.shards = tuple(tuple(int(row) for row in shard) for shard in shards)
        rows = {"label": [ANSWER_LABEL] * len(rows["key"]), **rows}
        columns = {name: list(rows[name]) for name in ROW_COLUMNS}
        if len(sizes := {len(column) for column in columns.values()}) != 1 or sizes == {0}:
            raise StoreError(f"the row index has columns of lengths {sorted(sizes)}; give each one entry a row")
        n_rows = sizes.pop()
        if sorted(row for shard in self.shards for row in shard) != list(range(n_rows)) or not all(self.shards):
            raise StoreError(f"the shards do not hold each of the {n_rows} rows exactly once; check how they were cut")
        described = {
            "format": FORMAT,
            "n_layers": n_layers,
            "dtype": dtype,
            "datasets": {site: spans(layers) for site, layers in by_site(datasets).items()},
            "labels": labels,
            "n_rows": n_rows,
            "n_shards": len(self.shards),
            **content,
        }
        self._manifest = make_manifest(
            described, datasets=datasets, shards=self.shards, rows=columns, notes=notes or {}
        )
        self.digest: str = self._manifest["digest"]
        self._spec = spec_of(self._manifest)
        self._pieces = pieces(self.directory, self._manifest)
        self._attributes = {dataset_path(where): self._attributes_of(where, width) for where, width in datasets.items()}
        self._lock: int | None = None
        self._open()
        self.missing = tuple(n for n in range(len(self.shards)) if not self._whole(n))

    def _attributes_of(self, where: Where, width: int) -> dict[str, Any]:
        heads = heads_of(self._manifest["content"], where)
        return {"dtype": self.dtype} | ({} if heads is None else {"heads": heads, "width": width // heads})

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            sync_folder(self.directory.parent)
        except OSError as e:
            raise write_failed(self.directory, e) from e
        if (earlier := _WRITERS.get(key := str(self.directory.resolve()))) is not None:
            earlier.close()
        try:
            self._settle()
        except BaseException:
            self.close()
            raise
        _WRITERS[key] = self

    def _settle(self) -> None:
        """Lock the manifest that is there, and replace it by ours if it guards nothing."""
        path = self.directory / MANIFEST
        if not path.exists() and (shards := list(self.directory.glob("shard-*.h5"))):
            raise self._refused(f"holds {len(shards)} shards and no {MANIFEST}")
        self._take_lock(path)
        try:
            for leftover in (*self.directory.glob(".shard-*.h5.tmp"), self.directory / f".{MANIFEST}.tmp"):
                leftover.unlink(missing_ok=True)
        except OSError as e:
            raise write_failed(self.directory, e) from e
        if path.stat().st_size:
            old = read_manifest(self.directory)
            if old["digest"] == self.digest:
                return
            if list(self.directory.glob("shard-*.h5")):
                diff = differences(old["content"], self._manifest["content"])
                raise self._refused(f"was captured under other settings: {diff}")
        # A manifest without shards guards nothing: a first attempt that stored nothing may be repeated otherwise.
        commit(path, json.dumps(self._manifest).encode(), lambda written: json.loads(written.read_bytes()))
        self._take_lock(path)

    def _refused(self, why: str) -> StoreError:
        return StoreError(f"{self.directory} {why}; choose another directory, or delete this one to capture it again")

    def _take_lock(self, path: Path) -> None:
        """Lock the file at `path`, made empty if there is none, and make sure that it is still the one at `path`."""
        for _ in range(10):
            self.close()
            try:
                self._lock = _open_to_lock(path)
            except OSError as e:
                raise write_failed(path, e) from e
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in TAKEN:
                    raise StoreError(
                        f"another process is writing into {self.directory}; wait for it, "
                        "or capture into another directory and merge the two"
                    ) from None
                # The file system knows no locks; the module says so.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), os.stat(path)):
                    return
        raise StoreError(f"{path} is replaced all the time; let no other program write into {self.directory}")

    def close(self) -> None:
        """Give up the lock. A writer that is closed writes no more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()

    def _whole(self, shard: int) -> bool:
        piece = self._pieces[shard]
        with contextlib.suppress(StoreError):  # a damaged shard is captured again and the rename replaces it
            if piece.path.exists():
                check_bytes(piece, self._spec)
                return True
        return False

    def write(
        self, shard: int, activations: Mapping[Where, np.ndarray], readout: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Commit one shard: float32 activations [row, width] for every dataset, rows as in `shards[shard]`."""
        if self._lock is None:
            raise StoreError(f"this writer of {self.directory} was closed, or another one took over; make a new one")
        rows = self.shards[shard]
        given = {dataset_path(d): values for d, values in activations.items()}
        given |= {f"readout/{name}": values for name, values in (readout or {}).items()}
        given["rows"] = np.asarray(rows)
        if given.keys() != self._spec.keys():
            odd = ", ".join(sorted(given.keys() ^ self._spec.keys()))
            raise StoreError(f"shard {shard} was given another set of arrays than this store holds: {odd}")
        arrays: dict[str, np.ndarray] = {}
        for name, (tail, kind) in self._spec.items():
            acts = name.startswith("acts/")
            values = np.asarray(given[name], dtype=np.float32 if acts else kind)
            if values.shape != (len(rows), *tail):
                raise StoreError(f"{name} has shape {values.shape}, expected {(len(rows), *tail)}")
            where = name.removeprefix("acts/").replace("/L", " layer ").replace("/", " ")
            _check_range(values, rows, where, self.dtype if acts else "float32")
            arrays[name] = pack(values, self.dtype) if acts else values
        data = compose(arrays, self.digest, self._attributes)
        path = self._pieces[shard].path
        commit(path, data, lambda written: self._same(written, data, self._pieces[shard]))

    @staticmethod
    def _same(written: Path, data: bytes, piece: Piece) -> None:
        if written.read_bytes() != data:
            raise StoreError(f"the disk did not keep what was written to {piece.path}; choose another disk")


def _open_to_lock(path: Path) -> int:
    # For writing where that is allowed, because network file systems lock no file that is open for reading only.
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        if not path.exists() or e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a finished store on a disk that is read only


def _check_range(values: np.ndarray, rows: Sequence[int], where: str, dtype: str) -> None:
    if not (finite := np.isfinite(values)).all():
        row = rows[int((~finite.reshape(len(rows), -1).all(axis=1)).argmax())]
        raise StoreError(
            f"{where} of row {row} is not finite, and nothing of its batch was stored; "
            "run the model in float32 or bfloat16, or leave this prompt out"
        )
    if dtype == "float16" and (peak := np.abs(values).max()) > FLOAT16_MAX:
        row = rows[int(np.abs(values).max(axis=1).argmax())]
        over = f"{where} of row {row} reaches {peak:.6g}, over the float16 limit of {FLOAT16_MAX:.0f}"
        raise StoreError(f"{over}; capture with dtype bfloat16 or float32")


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_failed(path: Path, e: OSError) -> StoreError:
    """The error for a file that could not be written."""
    reason = e.strerror or str(e)
    if e.errno in NO_SPACE:
        return StoreError(
            f"no space left while writing {path} ({reason}); free some and run the same command again: it resumes"
        )
    return StoreError(f"cannot write {path} ({reason}); choose a directory that can be written to")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def commit(path: Path, data: bytes, check: Callable[[Path], object]) -> None:
    """Put `data` at `path` wholly or not at all, also through a power cut; `check` reads the file before it counts."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as e:
        raise write_failed(path, e) from e
    finally:
        temporary.unlink(missing_ok=True)
