"""The activation store: a directory of HDF5 shards that a kill cannot spoil.

Problem. Capturing activations takes hours, gets killed, and its product outlives the process that made it. A file that
is half there and looks whole, a row that belongs to another prompt, or a run resumed under other settings would each
give plausible and wrong numbers much later.

Mechanism. One shard holds one batch. Its bytes are composed in memory, written under a temporary name in the same
folder, flushed to the disk, opened again and read back through HDF5's own checksums, and only then renamed. A rename
within a folder is atomic, so a shard is either absent or whole, and a kill costs at most the shard in flight.
`manifest.json` comes first and names everything that determines the numbers, with a digest over it; every shard carries
that digest. Opening for writing with another digest is refused and each differing key is named with both values.

    manifest.json      digest, what determines the content, the row index, versions
    shard-00000.h5     /rows                   row numbers of this batch, counted in the order of the prompts
                       /acts/<site>/L<layer>   [row, width], one chunk: reading a layer touches one chunk a shard
                       /readout/…              logit [row, label], logsumexp [row], top [row]

Constraints. Batches are sorted by length, so a shard's rows are not consecutive; the reader puts them back. bfloat16
has no numpy type: it is kept as its 16 bits (uint16) with the attribute `dtype`, and decodes exactly. float16 is
accepted only if every value fits its range. The file format is pinned to HDF5 1.10: its metadata carries checksums too,
and nothing in it depends on the clock, so the same content gives the same bytes. One writer at a time: the run
directory is locked by its owner.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from activations.errors import StoreError, one_line
from activations.sites import Where, by_site, dataset_path, describe, spans

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
MANIFEST = "manifest.json"
DType = np.dtype[Any]
STORAGE: dict[str, DType] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
ROW_COLUMNS = ("key", "presentation", "position", "n_tokens")
FLOAT16_MAX = 65504.0

Spec = dict[str, tuple[tuple[int, ...], DType]]
"""What a shard holds: name -> (shape after the rows, stored type)."""


def readout_spec(labels: Sequence[str]) -> Spec:
    """The readout arrays of a store: name -> (shape after the rows, type)."""
    number: DType = np.dtype("<f4")
    return {"logit": ((len(labels),), number), "logsumexp": ((), number), "top": ((), np.dtype("<i8"))}


def pack(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert finite float32 values to the stored representation, rounding to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(STORAGE[dtype])
    return values.astype(STORAGE[dtype])


def unpack(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the stored representation to float32, exactly."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def digest_of(content: Any) -> str:
    """Hash any JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class StoreWriter:
    """Writes the shards that a store still lacks. Whatever is already there and whole stays untouched.

    `datasets` maps (site, layer) to its width; `shards` lists the row numbers of each shard; `rows` holds the columns
    of the row index; `content` names all else that determines the numbers; `notes` is recorded and never compared.
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
        if dtype not in STORAGE:
            raise StoreError(f"unknown storage dtype {dtype!r}; allowed: {', '.join(STORAGE)}")
        self.directory, self.dtype = Path(directory), dtype
        self.shards = tuple(tuple(int(row) for row in shard) for shard in shards)
        columns = {name: list(rows[name]) for name in ROW_COLUMNS}
        if len(sizes := {len(column) for column in columns.values()}) != 1 or sizes == {0}:
            raise StoreError(f"the row index has columns of lengths {sorted(sizes)}; give each one entry a prompt")
        n_rows = sizes.pop()
        if sorted(row for shard in self.shards for row in shard) != list(range(n_rows)):
            raise StoreError(f"the shards do not hold each of the {n_rows} rows exactly once; check how they were cut")
        self._spec: Spec = {dataset_path(d): ((width,), STORAGE[dtype]) for d, width in datasets.items()}
        if labels is not None:
            self._spec |= {f"readout/{name}": spec for name, spec in readout_spec(labels).items()}
        described = {
            "format": FORMAT,
            "n_layers": n_layers,
            "dtype": dtype,
            "datasets": {site: spans(layers) for site, layers in by_site(datasets).items()},
            "labels": labels,
            "n_rows": n_rows,
            "n_shards": len(self.shards),
            "shards": digest_of(self.shards),
            "rows": digest_of(columns),
            **content,
        }
        described = json.loads(json.dumps(described))  # tuples become lists, as they are when read from the disk
        self.digest = digest_of(described)
        listed = [[site, layer, width] for (site, layer), width in datasets.items()]
        self._manifest = {"digest": self.digest, "content": described, "datasets": listed, "rows": columns}
        self._manifest["notes"] = dict(notes or {})
        self._open()
        self.missing = tuple(n for n in range(len(self.shards)) if not self._whole(n))

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.directory.parent)
            for leftover in (*self.directory.glob(".shard-*.h5.tmp"), self.directory / f".{MANIFEST}.tmp"):
                leftover.unlink(missing_ok=True)
        except OSError as e:
            raise _write_failed(self.directory, e) from e
        path = self.directory / MANIFEST
        shards = list(self.directory.glob("shard-*.h5"))
        old = _read_manifest(self.directory) if path.exists() else None
        if old and old["digest"] == self.digest:
            return
        if shards:
            diff = _differences(old["content"], self._manifest["content"]) if old else ""
            why = (
                f"was captured under other settings: {diff}" if old else f"holds {len(shards)} shards and no {MANIFEST}"
            )
            raise StoreError(
                f"{self.directory} {why}; choose another directory, or delete this one to capture it again"
            )
        # A manifest without shards guards nothing: a first attempt that stored nothing may be repeated otherwise.
        _commit(path, json.dumps(self._manifest).encode(), lambda written: json.loads(written.read_bytes()))

    def _whole(self, shard: int) -> bool:
        path = _shard_path(self.directory, shard)
        with contextlib.suppress(StoreError):  # a damaged shard is captured again and the rename replaces it
            return path.exists() and self._check(path, shard)
        return False

    def _check(self, path: Path, shard: int) -> bool:
        """Read a whole shard back: checksums, row numbers, shapes, finite values."""
        rows = self.shards[shard]
        stored = _read_shard(path, self.digest, tuple(self._spec))
        if stored["rows"].tolist() != list(rows):
            raise _damaged(path, "it holds other rows")
        for name, (tail, kind) in self._spec.items():
            values = stored[name]
            if values.shape != (len(rows), *tail) or values.dtype != kind:
                raise _damaged(path, f"{name} is {values.dtype} {values.shape}, expected {kind} {(len(rows), *tail)}")
            if not np.isfinite(unpack(values, self.dtype) if name.startswith("acts/") else values).all():
                raise _damaged(path, f"{name} is not finite")
        return True

    def write(
        self, shard: int, activations: Mapping[Where, np.ndarray], readout: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Commit one shard: float32 activations [row, width] for every dataset, rows as in `shards[shard]`."""
        rows = self.shards[shard]
        given = {dataset_path(d): values for d, values in activations.items()}
        given |= {f"readout/{name}": values for name, values in (readout or {}).items()}
        if given.keys() != self._spec.keys():
            odd = ", ".join(sorted(given.keys() ^ self._spec.keys()))
            raise StoreError(f"shard {shard} was given another set of arrays than this store holds: {odd}")
        arrays: dict[str, np.ndarray] = {"rows": np.asarray(rows, dtype="<i8")}
        for name, (tail, kind) in self._spec.items():
            acts = name.startswith("acts/")
            values = np.asarray(given[name], dtype=np.float32 if acts else kind)
            if values.shape != (len(rows), *tail):
                raise StoreError(f"{name} has shape {values.shape}, expected {(len(rows), *tail)}")
            where = name.removeprefix("acts/").replace("/L", " layer ").replace("/", " ")
            _check_range(values, rows, where, self.dtype if acts else "float32")
            arrays[name] = pack(values, self.dtype) if acts else values
        path = _shard_path(self.directory, shard)
        _commit(path, self._compose(arrays), lambda written: self._check(written, shard))

    def _compose(self, arrays: Mapping[str, np.ndarray]) -> bytes:
        # In memory, because a full disk must surface as one OSError of ours and not inside the closing of an HDF5 file.
        with h5py.File("shard", "w", driver="core", backing_store=False, libver=("v110", "v110")) as file:
            # Fixed-length text: HDF5 keeps the other kind in a heap that has no checksum.
            file.attrs["digest"] = np.bytes_(self.digest)
            for name, values in arrays.items():
                dataset = file.create_dataset(
                    name, data=values, chunks=values.shape, fletcher32=True, track_times=False
                )
                if name.startswith("acts/"):
                    dataset.attrs["dtype"], dataset.attrs["dims"] = np.bytes_(self.dtype), np.bytes_("row,width")
            file.flush()
            return bytes(file.id.get_file_image())


class ActivationStore:
    """Read access to a complete store. Rows come back in the order of the prompts, always as float32.

    `store["resid_post", 12]` is [row, d_model]; a negative layer counts from the end.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).exists():
            raise StoreError(f"{self.directory} holds no activation store (no {MANIFEST}); capture into it first")
        self.manifest = _read_manifest(self.directory)
        self.dtype: str = self.manifest["content"]["dtype"]
        self.n_layers: int = self.manifest["content"]["n_layers"]
        self._widths: dict[Where, int] = {(site, layer): width for site, layer, width in self.manifest["datasets"]}
        total = self.manifest["content"]["n_shards"]
        self._paths = tuple(_shard_path(self.directory, n) for n in range(total))
        if missing := sum(not path.exists() for path in self._paths):
            have = f"{self.directory} holds {total - missing} of {total} shards"
            raise StoreError(f"{have}; run the same command again: it resumes with the missing ones")

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> ActivationStore:
        """Open a complete store; an incomplete one is refused with what it lacks."""
        return cls(directory)

    def __len__(self) -> int:
        return int(self.manifest["content"]["n_rows"])

    def __repr__(self) -> str:
        return f"ActivationStore({str(self.directory)!r}: {len(self)} rows, {describe(self._widths)}, {self.dtype})"

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The captured layers of each site."""
        return {site: tuple(layers) for site, layers in by_site(self._widths).items()}

    def _find(self, site: str, layer: int) -> Where:
        wanted = layer + self.n_layers if layer < 0 else layer
        if site == "embed" and ("embed", 0) not in self._widths:
            site = "resid_pre"  # the input of the first block is the embedding
        if (site, wanted) not in self._widths:
            have = f"no {site} layer {layer} in {self.directory}; it holds {describe(self._widths)}"
            raise StoreError(f"{have}; choose one of these, or capture this one into another directory")
        return site, wanted

    def __getitem__(self, where: Where) -> np.ndarray:
        site, layer = where
        return self.stack(site, [layer]).squeeze(0)

    def stack(self, site: str, layers: Sequence[int] | None = None) -> np.ndarray:
        """Several layers of one site as [layer, row, width]; every captured layer if none are named."""
        wanted = [self._find(site, n) for n in (self.layers.get(site, (0,)) if layers is None else layers)]
        if len(widths := {self._widths[dataset] for dataset in wanted}) != 1:
            raise StoreError(f"cannot stack {site} layers of widths {sorted(widths)}; name layers of one width")
        out = np.empty((len(wanted), len(self), widths.pop()), dtype=np.float32)
        self._fill({dataset_path(dataset): out[i] for i, dataset in enumerate(wanted)})
        return out

    def _fill(self, targets: Mapping[str, np.ndarray]) -> None:
        for path in self._paths:
            stored = _read_shard(path, self.manifest["digest"], tuple(targets))
            for name, target in targets.items():
                values = stored[name]
                target[stored["rows"]] = unpack(values, self.dtype) if name.startswith("acts/") else values

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The row index: key, presentation, position, n_tokens."""
        import pandas as pd

        return pd.DataFrame(self.manifest["rows"], columns=list(ROW_COLUMNS))

    @cached_property
    def readout(self) -> dict[str, np.ndarray]:
        """logit [row, label], logsumexp [row] and top [row], from the same forward passes as the activations."""
        labels = self.manifest["content"]["labels"]
        if labels is None:
            raise StoreError(f"{self.directory} holds no readout; capture with answers into another directory")
        out = {k: np.empty((len(self), *tail), dtype=kind) for k, (tail, kind) in readout_spec(labels).items()}
        self._fill({f"readout/{name}": values for name, values in out.items()})
        return out


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard:05d}.h5"


def _read_shard(path: Path, digest: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the row numbers and the named datasets; any fault of the file is a StoreError that names it."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("digest") != digest.encode():
                raise _damaged(path, f"it does not belong to the manifest's digest {digest[:12]}")
            return {name: file[name][()] for name in ("rows", *names)}
    except (OSError, KeyError, RuntimeError, TypeError, UnicodeDecodeError) as e:
        raise _damaged(path, one_line(e)) from e


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        content = manifest["content"]
        intact = (digest_of(content), digest_of(manifest["rows"])) == (manifest["digest"], content["rows"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{path} cannot be read ({one_line(e)}); capture into a new directory") from e
    if not intact:
        raise StoreError(f"{path} was edited: its digest does not fit its content; capture into a new directory")
    if (version := content["format"]) != FORMAT:
        raise StoreError(f"{path} has format {version}, this program reads {FORMAT}; capture into a new directory")
    return manifest


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


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{prefix}.{name}").items()}
    return {prefix.removeprefix("."): value}


def _differences(old: Any, new: Any) -> str:
    before, now = _flat(old), _flat(new)

    def show(side: dict[str, Any], name: str) -> str:
        text = repr(side[name]) if name in side else "absent"
        return text if len(text) <= 60 else f"{text[:57]}…"

    keys = [k for k in {**before, **now} if before.get(k, ...) != now.get(k, ...)]
    return "; ".join(f"{k} is {show(before, k)} in the store and {show(now, k)} now" for k in keys)


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path} is damaged ({why}); run the same command again: it makes this shard anew, the rest stays"
    )


def _write_failed(path: Path, e: OSError) -> StoreError:
    reason = e.strerror or str(e)
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"no space left while writing {path} ({reason}); free some and run the same command again: it resumes"
        )
    return StoreError(f"cannot write {path} ({reason}); choose a directory that can be written to")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(path: Path, data: bytes, check: Callable[[Path], object]) -> None:
    """Put `data` at `path` wholly or not at all, also through a power cut; `check` reads the file before it counts."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as e:
        raise _write_failed(path, e) from e
    finally:
        temporary.unlink(missing_ok=True)
