"""One shard: an HDF5 file that anybody can open, with a head that lets this program read it fast and prove it whole.

Problem. A probe reads one layer, which is a small piece of each of hundreds of files: opening them through HDF5 takes
nine times as long as reading the same bytes from one plain file. And HDF5's checksums cover each chunk of data, but not
every byte, and not the question whether this is the file that was written.

Mechanism. HDF5 lets a file begin with a block of the user's own. Ours holds

    bytes 0-255     text: a line with the format, `store <digest of the manifest>`, `sha256 <of everything after byte 255>`
    from byte 256   where the data lie: one unsigned 64-bit byte offset for `/sums`, then one for each array of the store

and behind it stands an ordinary HDF5 file with the arrays, one chunk each, so that the bytes of an array are one piece
of the file. `/sums` [array, row] holds a checksum of each row of each array. So a layer is read with a few system calls
a shard, straight from its offset, and selected rows are checked without reading the others; plain HDF5 readers use
fletcher32, which is on; and `sha256` finds any flipped byte of the file by name.

A row's checksum: its bytes, filled up with zeros to a multiple of 8, are little-endian 64-bit words; b[k] is the sum of
words 128k to 128k+127 modulo 2^64; with m[k] = b[k] ^ (b[k] >> 32), the checksum is 0x9E3779B97F4A7C15 plus the sum of
m[k] * w[k] modulo 2^64, where w[k] is ((k+1) * 0x9E3779B97F4A7C15) | 1. A change within one 64-bit word is always found
(each step can be undone, the weights are odd), and so are lost or foreign sectors but for a chance of 2^-64; not so
two words of one kilobyte that changed places, which the sha256 is for. It costs a quarter of reading from memory, and
zlib's crc32 would double it.

Constraints. The file is pinned to HDF5 1.10 and holds no time stamps: the same content gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, NoReturn

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t

from activations.errors import StoreError, one_line
from activations.store_format import FORMAT, Piece, Spec, unpack

HEAD = 256
_BLOCK = 128
_GOLDEN = 0x9E3779B97F4A7C15


def row_sums(values: np.ndarray) -> np.ndarray:
    """The checksum of each row of an array, as the module says."""
    n = len(values)
    data = np.ascontiguousarray(values).reshape(n, -1).view(np.uint8)
    if data.shape[1] % 8:
        data = np.pad(data, ((0, 0), (0, -data.shape[1] % 8)))
    words = data.view("<u8")
    blocks: np.ndarray = np.add.reduceat(words, np.arange(0, words.shape[1], _BLOCK), axis=1)
    blocks ^= blocks >> np.uint64(32)
    weights = (np.arange(1, blocks.shape[1] + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
    sums: np.ndarray = blocks @ weights + np.uint64(_GOLDEN)
    return sums


_TITLE = f"pairlens activation shard {FORMAT}\n".encode()


@lru_cache(16)
def _begins(digest: str) -> bytes:
    return _TITLE + f"store {digest}\n".encode()


def _head(digest: str, sha256: str) -> bytes:
    return (_begins(digest) + f"sha256 {sha256}".encode()).ljust(HEAD - 1) + b"\n"


def _block_size(n_offsets: int) -> int:
    return 1 << max(9, (HEAD + 8 * n_offsets - 1).bit_length())  # HDF5 looks for its own head at powers of two from 512


def compose(arrays: Mapping[str, np.ndarray], digest: str, notes: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The bytes of a shard: `arrays` as a store's spec orders them, `notes` as attributes of the arrays named.

    In memory, because a full disk must surface as one OSError of ours and not inside the closing of an HDF5 file.
    """
    sums = np.stack([row_sums(values) for values in arrays.values()])
    access = h5p.create(h5p.FILE_ACCESS)
    # Not HDF5's own file in memory: the image that versions before 2.0 make of it has a wrong checksum.
    memory = io.BytesIO()
    access.set_fileobj_driver(h5fd.fileobj_driver, memory)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    clockless = h5p.create(h5p.FILE_CREATE)
    clockless.set_obj_track_times(False)
    file = h5f.create(b"shard", h5f.ACC_TRUNC, fcpl=clockless, fapl=access)
    try:
        _attribute(file, "digest", digest)
        _groups(file, arrays)
        made = [_dataset(file, "sums", sums, {})]
        made += [_dataset(file, name, values, notes.get(name, {})) for name, values in arrays.items()]
        h5f.flush(file)
        offsets = [dataset.get_chunk_info(0).byte_offset for dataset in made]
    finally:
        file.close()
    image = memory.getbuffer()
    size = _block_size(len(offsets))
    table = (np.asarray(offsets, dtype="<u8") + np.uint64(size)).tobytes().ljust(size - HEAD, b"\0")
    sha = hashlib.sha256(table)
    sha.update(image)
    return b"".join((_head(digest, sha.hexdigest()), table, image))


def shards_size(spec: Spec, rows: Sequence[int]) -> int:
    """Bytes of shards with these arrays and numbers of rows, to a few bytes a shard: HDF5's own part is measured."""
    one = {name: np.zeros((1, *tail), kind) for name, (tail, kind) in spec.items()}
    notes: dict[str, dict[str, Any]] = {name: {"dtype": "bfloat16"} for name in spec if name.startswith("acts/")}
    for name in notes:
        if name.startswith(("acts/z/", "acts/pattern/")):
            notes[name] |= {"heads": 1, "width": 1}
    a_row = sum(values.nbytes for values in one.values()) + 8 * len(spec)
    return (len(compose(one, "0" * 64, notes)) - a_row) * len(rows) + a_row * sum(rows)


def _groups(file: Any, names: Iterable[str]) -> None:
    clockless = h5p.create(h5p.GROUP_CREATE)
    clockless.set_obj_track_times(False)
    parents = (tuple(name.split("/")[:-1]) for name in names)
    for group in dict.fromkeys(parts[: n + 1] for parts in parents for n in range(len(parts))):
        h5g.create(file, "/".join(group).encode(), gcpl=clockless)


def _dataset(file: Any, name: str, values: np.ndarray, notes: Mapping[str, Any]) -> Any:
    """Write one array. The low-level calls take half the time of h5py's own."""
    how = h5p.create(h5p.DATASET_CREATE)
    how.set_chunk(values.shape)
    how.set_fletcher32()
    how.set_obj_track_times(False)
    how.set_fill_time(h5d.FILL_TIME_NEVER)
    values = np.ascontiguousarray(values)
    space = h5s.create_simple(values.shape)
    dataset = h5d.create(file, name.encode(), h5t.py_create(values.dtype), space, how)
    dataset.write(h5s.ALL, h5s.ALL, values)
    for key, value in notes.items():
        _attribute(dataset, key, value)
    return dataset


def _attribute(place: Any, name: str, value: Any) -> None:
    # Fixed-length text: HDF5 keeps the other kind in a heap that has no checksum.
    data = np.asarray(np.bytes_(value) if isinstance(value, str) else np.int64(value))
    attribute = h5a.create(place, name.encode(), h5t.py_create(data.dtype), h5s.create(h5s.SCALAR))
    attribute.write(data)


def damaged(piece: Piece, why: str) -> StoreError:
    """The error for a shard that is not what it was."""
    again = "run the same command again: it makes this shard anew, the rest stays"
    return StoreError(f"{piece.path} is damaged ({why}); {'merge the parts again' if piece.merged else again}")


class Scratch:
    """Memory that is used again for each piece read: to get it fresh from the system costs as much as the reading."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def take(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
        """An array of this shape, which the next call overwrites."""
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        if len(self._memory) < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size].view(kind).reshape(shape)


class _Open:
    """A shard that is open for reading: where its arrays lie, and which of its rows are wanted (None: all)."""

    __slots__ = ("file", "n", "offsets", "piece", "places")

    def __init__(self, piece: Piece, places: np.ndarray | None, n_arrays: int) -> None:
        self.piece, self.places, self.n = piece, places, len(piece.rows if places is None else places)
        try:
            self.file = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise damaged(piece, "it is missing" if isinstance(e, FileNotFoundError) else one_line(e)) from e
        try:
            head = self.bytes(0, HEAD + 8 * (1 + n_arrays))
            if not head.startswith(_begins(piece.digest)):
                other = f"it does not belong to the manifest's digest {piece.digest[:12]}"
                raise damaged(piece, other if head.startswith(_TITLE) else "it is no shard of this program's")
            self.offsets: tuple[int, ...] = struct.unpack_from(f"<{1 + n_arrays}Q", head, HEAD)
            rows = piece.rows - piece.first_row if piece.first_row else piece.rows
            if self.bytes(self.offsets[1], 8 * len(rows)) != rows.astype("<i8", copy=False).tobytes():
                raise damaged(piece, "it holds other rows")
        except BaseException:
            os.close(self.file)
            raise

    def bytes(self, start: int, size: int) -> bytes:
        try:
            data = os.pread(self.file, size, start)
        except (OSError, OverflowError) as e:
            raise damaged(self.piece, one_line(e)) from e
        if len(data) == size:
            return data
        rest = bytearray(size - len(data))  # rare: a signal, or a shard that is cut off
        self.into(memoryview(rest), start + len(data))
        return data + rest

    def into(self, target: memoryview, start: int) -> None:
        done = 0
        try:
            while done < len(target):
                got = os.preadv(self.file, [target[done:]], start + done)
                if not got:
                    raise damaged(self.piece, "it is cut off")
                done += got
        except (OSError, OverflowError) as e:
            raise damaged(self.piece, one_line(e)) from e

    def fill(self, target: memoryview, start: int, size: int) -> None:
        """Read the rows wanted of an array that starts at `start` and has rows of `size` bytes."""
        if self.places is None:
            self.into(target, start)
        elif len(self.places):
            cuts = np.flatnonzero(np.diff(self.places) != 1) + 1
            for run in np.split(np.arange(len(self.places)), cuts):
                self.into(target[run[0] * size : (run[-1] + 1) * size], start + int(self.places[run[0]]) * size)

    def sums(self, array: int) -> np.ndarray:
        """The checksums of the rows wanted of an array, which is given by its place in the spec."""
        size = 8 * len(self.piece.rows)
        stored = np.frombuffer(self.bytes(self.offsets[0] + array * size, size), "<u8")
        return stored if self.places is None else stored[self.places]


class ShardReader:
    """Reads rows of one shard or of several at once. A context manager; every fault is a StoreError that names the file.

    Small shards are read fastest some at a time: what Python does for an array is then done once for all of them. With
    `scratch`, what was read lasts until the next reading into it.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[Piece, np.ndarray | None]],
        spec: Spec,
        scratch: Scratch | None = None,
    ) -> None:
        """`wanted` holds each shard with the places (increasing) of the rows to read in it, None for all."""
        self._wanted, self._spec = wanted, spec
        self._new: Callable[..., np.ndarray] = np.empty if scratch is None else scratch.take
        self._number = {name: n for n, name in enumerate(spec)}
        self._open: list[_Open] = []

    def __enter__(self) -> ShardReader:
        try:
            for piece, places in self._wanted:
                self._open.append(_Open(piece, places, len(self._spec)))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        while self._open:
            os.close(self._open.pop().file)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """The rows wanted of an array, as stored, shard after shard, each with its checksum checked.

        `out` is contiguous memory of this shape and type to read them into.
        """
        (tail, kind), number = self._spec[name], self._number[name]
        values = self._new((sum(shard.n for shard in self._open), *tail), kind) if out is None else out
        size = kind.itemsize * int(np.prod(tail, dtype=np.int64))
        flat = values.reshape(-1).view(np.uint8).data
        at = 0
        for shard in self._open:
            shard.fill(flat[at : at + shard.n * size], shard.offsets[1 + number], size)
            at += shard.n * size
        if len(values):
            wrong = row_sums(values) != np.concatenate([shard.sums(number) for shard in self._open])
            if wrong.any():
                self._name_damage(name, int(np.argmax(wrong)))
        return values

    def _name_damage(self, name: str, row: int) -> NoReturn:
        for shard in self._open:
            if row < shard.n:
                place = row if shard.places is None else int(shard.places[row])
                raise damaged(shard.piece, f"{name} of its row {place} does not fit the checksum")
            row -= shard.n
        raise IndexError(row)


def check_bytes(piece: Piece, spec: Spec) -> None:
    """Read every byte of a shard: it is the file that was written, byte for byte, and holds the rows it should."""
    with ShardReader([(piece, None)], spec):
        pass
    try:
        with open(piece.path, "rb") as file:
            head = file.read(HEAD)
            sha = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise damaged(piece, one_line(e)) from e
    if head != _head(piece.digest, sha):
        raise damaged(piece, "its bytes do not fit its sha256")


def check_values(piece: Piece, spec: Spec, dtype: str) -> None:
    """Read a shard through plain HDF5 and through our offsets: shapes, types, checksums, equal and finite values."""
    try:
        with h5py.File(piece.path, "r", locking=False) as file, ShardReader([(piece, None)], spec) as reader:
            if file.attrs.get("digest") != piece.digest.encode():
                raise damaged(piece, f"it does not belong to the manifest's digest {piece.digest[:12]}")
            for name, (tail, kind) in spec.items():
                values, expected = file[name][()], (len(piece.rows), *tail)
                if values.shape != expected or values.dtype != kind:
                    raise damaged(piece, f"{name} is {values.dtype} {values.shape}, expected {kind} {expected}")
                if values.tobytes() != reader.read(name).tobytes():
                    raise damaged(piece, f"{name} is not where its head says")
                numbers = unpack(values, dtype) if name.startswith("acts/") else values
                if not (finite := np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)).all():
                    raise damaged(piece, f"{name} of row {piece.rows[int(np.argmin(finite))]} is not finite")
    except (OSError, KeyError, RuntimeError, TypeError, UnicodeDecodeError) as e:
        raise damaged(piece, one_line(e)) from e
