"""The activation store: read what was captured, whole layers, chosen rows, or batch by batch.

Problem. The product of a capture outlives the process that made it, is often larger than memory, and is read in another
order than it was written: prompts were batched by length, and a probe wants one layer of all of them, or all layers of
some, in the order of the prompts.

Mechanism. A store is a directory: `manifest.json` says what determines the numbers and which rows lie in which shard;
each shard is an HDF5 file of one batch. Reading goes from the row numbers to the pieces of the files that hold them,
and every row read is checked against the checksum written with it. Values come back as float32, rows as asked for.

    manifest.json      digest, what determines the content, the row index, notes      (store_format.py)
    shard-00000.h5     /rows                   row numbers of this batch
                       /acts/<site>/L<layer>   [row, width], one chunk
                       /readout/…              logit [row, label], logsumexp [row], top [row]
                       /sums                   checksum of each row of each array       (store_shards.py)

A row is one prompt at one position: `key` (of the instance), `presentation`, `label` (of the position: `answer`,
`query`, `premise:17`, …), `position`, `n_tokens`. Writing, verifying, merging and exporting have modules of their own
(store_writing.py, store_checking.py, store_merging.py, store_export.py); docs/activation-store.md shows all of it.

Constraints. A store is read when it is complete. float16 was accepted only if every value fitted its range; bfloat16
decodes exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from activations import arguments
from activations.errors import StoreError
from activations.sites import Where, by_site, dataset_path, describe
from activations.store_format import (
    ROW_COLUMNS,
    STORAGE,
    Piece,
    datasets_of,
    heads_of,
    pack,
    pieces,
    read_manifest,
    readout_spec,
    spec_of,
    unpack,
)
from activations.store_shards import Scratch, ShardReader
from activations.store_writing import StoreWriter

if TYPE_CHECKING:
    import pandas as pd

    from activations.store_checking import Info

__all__ = ["STORAGE", "ActivationStore", "StoreWriter", "pack", "unpack"]

_THREADS = 2  # more of them wait for each other: what Python does between two pieces, one does at a time
_LARGE = 1 << 20  # bytes; less than this is read faster by one thread
_TOGETHER = 1 << 20  # bytes of an array read and checked at once: more would leave the processor's cache
_OPEN = 64  # shards open at once, at most, in each thread
_WINDOW = 1 << 25  # bytes that streaming reads at once, because each read opens all shards that it touches


class _Job(NamedTuple):
    """What is read of one shard."""

    piece: Piece
    places: np.ndarray | None
    """Places of the rows in the shard, increasing; None for all."""
    into: np.ndarray
    """The row of the target that each of them goes to."""


def _together(jobs: Sequence[_Job], size: int) -> list[list[_Job]]:
    """Small shards in groups, so that their rows (of `size` bytes) are checked and put in place with one call."""
    tasks: list[list[_Job]] = []
    room = 0
    for job in jobs:
        need = size * len(job.into)
        if not tasks or need > room or len(tasks[-1]) == _OPEN:
            tasks.append([])
            room = _TOGETHER
        tasks[-1].append(job)
        room -= need
    return tasks


class ActivationStore:
    """Read access to a complete store. Rows come back in the order of the prompts, always as float32.

    `store["resid_post", 12]` is [row, d_model]; a negative layer counts from the end.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = arguments.path("directory", directory)
        self.manifest = read_manifest(self.directory)
        self.dtype: str = self.manifest["content"]["dtype"]
        self.n_layers: int = self.manifest["content"]["n_layers"]
        self._widths = datasets_of(self.manifest)
        self.spec = spec_of(self.manifest)
        self.pieces = pieces(self.directory, self.manifest)
        total = len(self.pieces)
        if missing := sum(not piece.path.exists() for piece in self.pieces):
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

    def width(self, site: str, layer: int) -> int:
        """Numbers in one row of this array."""
        return self._widths[self.find(site, layer)]

    def heads(self, site: str, layer: int) -> int | None:
        """How many heads lie side by side in a row of `z` or `pattern`; None where the store does not say."""
        return heads_of(self.manifest["content"], self.find(site, layer))

    def find(self, site: str, layer: int) -> Where:
        """The array that a site and a layer mean in this store; StoreError with what it holds if there is none."""
        arguments.instance("site", site, str, f"one of {', '.join(self.layers)}")
        layer = arguments.integer("layer", layer)
        wanted = layer + self.n_layers if layer < 0 else layer
        if site == "embed" and ("embed", 0) not in self._widths:
            site = "resid_pre"  # the input of the first block is the embedding
        if (site, wanted) not in self._widths:
            have = f"no {site} layer {layer} in {self.directory}; it holds {describe(self._widths)}"
            raise StoreError(f"{have}; choose one of these, or capture this one into another directory")
        return site, wanted

    def __getitem__(self, where: Where) -> np.ndarray:
        if not isinstance(where, tuple) or len(where) != 2:
            raise StoreError(f"a store is asked for {arguments.shown(where)}; give a site and a layer: store['z', 3]")
        site, layer = where
        return self.read(site, layer)

    def read(self, site: str, layer: int, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """[row, width] of these rows in this order; every row if none are named. Other rows are not read."""
        return self.stack(site, [arguments.integer("layer", layer)], rows).squeeze(0)

    def stack(
        self, site: str, layers: Sequence[int] | None = None, rows: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Several layers of one site as [layer, row, width]; every captured layer if none are named."""
        arguments.instance("site", site, str, f"one of {', '.join(self.layers)}")
        given = self.layers.get(site, (0,)) if layers is None else arguments.integers("layers", layers)
        if not given:
            raise StoreError("layers is empty; name one, or leave it out for all")
        wanted = [self.find(site, n) for n in given]
        if len(widths := {self._widths[dataset] for dataset in wanted}) != 1:
            raise StoreError(f"cannot stack {site} layers of widths {sorted(widths)}; name layers of one width")
        chosen = None if rows is None else self.row_numbers(rows)
        out = np.empty((len(wanted), len(self) if chosen is None else len(chosen), widths.pop()), dtype=np.float32)
        self._fill([(dataset_path(dataset), out[i]) for i, dataset in enumerate(wanted)], chosen)
        return out

    def batches(
        self,
        site: str,
        layer: int,
        rows: Sequence[int] | np.ndarray | None = None,
        batch_rows: int = 1024,
    ) -> Iterator[np.ndarray]:
        """[batch, width] of at most `batch_rows` rows at a time, in the order of `rows`.

        Memory holds 32 MB or one batch, whichever is more. Of a store that is much larger, `rows=store.disk_order`
        reads each shard once, and any other order reads pieces of most shards again and again.
        """
        width = self._widths[self.find(site, layer)]
        if arguments.integer("batch_rows", batch_rows) < 1:
            raise StoreError(f"batch_rows is {batch_rows}; give a positive number of rows, for example 1024")
        chosen = np.arange(len(self)) if rows is None else self.row_numbers(rows)
        window = max(1, _WINDOW // (4 * width * batch_rows)) * batch_rows

        def stream() -> Iterator[np.ndarray]:
            for start in range(0, len(chosen), window):
                values = self.read(site, layer, chosen[start : start + window])
                yield from (values[at : at + batch_rows] for at in range(0, len(values), batch_rows))

        return stream()

    @property
    def disk_order(self) -> np.ndarray:
        """All row numbers in the order in which they lie on the disk."""
        return np.concatenate([piece.rows for piece in self.pieces])

    def select(
        self,
        *,
        key: str | Sequence[str] | None = None,
        presentation: str | Sequence[str] | None = None,
        label: str | Sequence[str] | None = None,
    ) -> np.ndarray:
        """Row numbers, in the store's order, of these instances, presentations and positions; give one or several each.

        A label that ends in `:` or `/` stands for all that begin with it: `premise:` for `premise:0`, `premise:1`, ….
        A value that no row has is refused, and so is a selection that leaves nothing.
        """
        chosen = np.ones(len(self), dtype=bool)
        given = {"key": key, "presentation": presentation, "label": label}
        for column, asked in given.items():
            if asked is None:
                continue
            values: list[str] = self.manifest["rows"][column]
            wanted = self._wanted(column, [asked] if isinstance(asked, str) else arguments.texts(column, asked), values)
            chosen &= np.fromiter((value in wanted for value in values), dtype=bool, count=len(values))
        rows = np.flatnonzero(chosen)
        if not len(rows):
            said = ", ".join(f"{name} {value!r}" for name, value in given.items() if value is not None)
            raise StoreError(f"no row of {self.directory} has {said} together; select with fewer conditions")
        return rows

    def _wanted(self, column: str, asked: list[str], values: list[str]) -> set[str]:
        there = dict.fromkeys(values)
        wanted: set[str] = set()
        for one in asked:
            prefix = column == "label" and one.endswith((":", "/"))
            if not (found := [value for value in there if value.startswith(one)] if prefix else [one] * (one in there)):
                near = get_close_matches(one, list(there)[:10_000], 1)
                meant = f" (did you mean {near[0]}?)" if near else ""
                shown = ", ".join(repr(value) for value in list(there)[:8])
                more = f" and {len(there) - 8} more" if len(there) > 8 else ""
                raise StoreError(f"no row of {self.directory} has {column} {one!r}; it has {shown}{more}{meant}")
            wanted.update(found)
        if not asked:
            raise StoreError(f"{column} is an empty list; name one, or leave it out for all")
        return wanted

    def row_numbers(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows as an array of row numbers, from numbers or from one True or False for each row."""
        try:
            given = np.asarray(rows)
        except ValueError:  # lists of different lengths in one list
            raise StoreError(
                f"rows is {arguments.shown(rows)}; give row numbers, or one True or False for each row"
            ) from None
        if given.dtype == bool and given.shape == (len(self),):
            return np.flatnonzero(given)
        if not given.size:
            given = given.astype(np.int64)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise StoreError(
                f"rows is {given.dtype} {given.shape}; give row numbers, or one True or False for each row"
            )
        if len(bad := given[(given < 0) | (given >= len(self))]):
            raise StoreError(f"no row {bad[0]} in {self.directory}; it has rows 0 to {len(self) - 1}")
        return given.astype(np.int64)

    @cached_property
    def _homes(self) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each row, and its place in there."""
        shard, place = np.empty(len(self), dtype=np.int64), np.empty(len(self), dtype=np.int64)
        for n, piece in enumerate(self.pieces):
            shard[piece.rows], place[piece.rows] = n, np.arange(len(piece.rows))
        return shard, place

    def _fill(self, targets: Sequence[tuple[str, np.ndarray]], rows: np.ndarray | None = None) -> None:
        """Read these arrays into their targets [row, …]: `rows` in their order, or all of them."""
        again = np.empty((2, 0), dtype=np.int64)
        if rows is None:
            jobs = [_Job(piece, None, piece.rows) for piece in self.pieces]
        else:
            # A row that is asked for twice is read once and copied at the end.
            single, first, back = np.unique(rows, return_index=True, return_inverse=True)
            repeated = np.setdiff1d(np.arange(len(rows)), first)
            again = np.stack([repeated, first[back[repeated]]])
            shard, place = (home[single] for home in self._homes)
            order = np.lexsort((place, shard))
            groups = np.split(order, np.flatnonzero(np.diff(shard[order])) + 1) if len(order) else []
            jobs = [_Job(self.pieces[shard[group[0]]], place[group], first[group]) for group in groups]
        size = max(
            int(np.prod(self.spec[name][0], dtype=np.int64)) * self.spec[name][1].itemsize for name, _ in targets
        )
        tasks = _together(jobs, size)

        def work(own: Sequence[Sequence[_Job]]) -> None:
            scratch = Scratch()
            for task in own:
                into = np.concatenate([job.into for job in task])
                start, stop = int(into[0]), int(into[-1]) + 1
                in_row = stop - start == len(into) and bool((np.diff(into) == 1).all())
                with ShardReader([(job.piece, job.places) for job in task], self.spec, scratch) as shards:
                    for name, target in targets:
                        if in_row and target.dtype == self.spec[name][1] and target.flags.c_contiguous:
                            shards.read(name, target[start:stop])
                        else:
                            values = shards.read(name)
                            target[into] = unpack(values, self.dtype) if name.startswith("acts/") else values

        threads = min(_THREADS, len(tasks)) if sum(target.nbytes for _, target in targets) > _LARGE else 1
        if threads < 2:
            work(tasks)
        else:
            with ThreadPoolExecutor(threads, "activation-store") as pool:
                for _ in pool.map(work, [tasks[n::threads] for n in range(threads)]):
                    pass
        for _, target in targets:
            target[again[0]] = target[again[1]]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The row index: key, presentation, label, position, n_tokens."""
        import pandas as pd

        return pd.DataFrame(self.manifest["rows"], columns=list(ROW_COLUMNS))

    @cached_property
    def readout(self) -> dict[str, np.ndarray]:
        """logit [row, label], logsumexp [row] and top [row], from the same forward passes as the activations."""
        labels = self.manifest["content"]["labels"]
        if labels is None:
            raise StoreError(f"{self.directory} holds no readout; capture with answers into another directory")
        out = {k: np.empty((len(self), *tail), dtype=kind) for k, (tail, kind) in readout_spec(labels).items()}
        self._fill([(f"readout/{name}", values) for name, values in out.items()])
        return out

    def verify(self) -> tuple[str, ...]:
        """Read everything and name each fault in a line; nothing is returned for a store that is whole."""
        from activations.store_checking import verify

        return verify(self.directory)

    def info(self) -> Info:
        """What the store holds and what made it."""
        from activations.store_checking import info

        return info(self.directory)

    def export(self, path: str | os.PathLike[str], format: str = "safetensors", **chosen: Any) -> Path:
        """Write one file for other programs; see `store_export.export` for formats and what can be chosen."""
        from activations.store_export import export

        return export(self, path, format, **chosen)

    def activation_cache(self, model: Any = None, **chosen: Any) -> Any:
        """A TransformerLens ActivationCache of the chosen arrays and rows, in memory; see `store_export`."""
        from activations.store_export import activation_cache

        return activation_cache(self, model, **chosen)
