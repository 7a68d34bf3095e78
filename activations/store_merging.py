"""Several captures, one store: each process captures its own prompts, and the parts are put together.

Problem. A model on eight GPUs is captured by eight processes, and one directory takes one writer. Copying the parts
into one would move every byte again; gluing stores of another model, adapter, template or site together would go
unnoticed for ever.

Mechanism. `merge` compares everything that determines the numbers, except which prompts each part holds, and names what
differs. Rows keep the order of the parts. A shard's bytes do not change: the new manifest lists the parts with their
digests, and says that a shard's row numbers count from its part's first row; so shards are linked, not copied, where
the disk allows it. Each is checked byte by byte. All of it happens in a folder beside the target, which is renamed last,
so there is never a half-merged store. The folder is locked through the operating system (flock): a second merge into
the same target is refused while the first lives. What a killed merge or a full disk left in it is used by the next one,
after the same check; a merge that is refused leaves nothing.

Constraints. Linked shards are the same file under two names: the parts may be deleted afterwards, and damage to one is
damage to both. A (key, presentation, label) may occur in one part only. What was captured in batches of other
compositions agrees to rounding, as everywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from activations import arguments
from activations.errors import StoreError
from activations.store import ActivationStore
from activations.store_format import MANIFEST, ROW_COLUMNS, Piece, differences, make_manifest, pieces
from activations.store_shards import check_bytes
from activations.store_writing import NO_SPACE, TAKEN, commit, sync_folder, write_failed

_OF_ROWS = ("rows", "shards", "n_rows", "n_shards", "prompts", "parts")
"""Keys of a manifest's content that say which prompts a part holds; all others have to agree."""


def merge(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> ActivationStore:
    """Put complete stores together; the same call again goes on where it stopped, or returns the store that is there."""
    target = arguments.path("out", out)
    given = arguments.items("paths", paths, "[{}, 'acts-1']")
    if len(given) < 2:
        raise StoreError(f"{len(given)} stores to merge; give at least two")
    stores = [ActivationStore.open(path) for path in given]
    _agree(stores)
    _disjoint(stores)
    manifest = _manifest(stores)
    if not _done(target, manifest):
        building = target.absolute().with_name(f".{target.absolute().name}.merging")
        try:
            with _locked(building, target):
                if _done(target, manifest):  # by the merge that we waited for
                    shutil.rmtree(building)
                else:
                    _build(building, target, manifest, stores)
        except OSError as e:
            raise write_failed(target, e) from e
    return ActivationStore.open(target)


def _done(target: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether this very store is there already; refused if anything else is."""
    if (target / MANIFEST).exists() and ActivationStore.open(target).manifest["digest"] == manifest["digest"]:
        return True
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target} exists and holds something else; choose another directory")
    return False


@contextlib.contextmanager
def _locked(building: Path, target: Path) -> Iterator[None]:
    """Make the folder, and hold its lock until it is renamed or removed or the process ends."""
    for _ in range(10):
        building.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(building, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another merge has just finished
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if e.errno in TAKEN:
                    raise StoreError(
                        f"another process is merging into {target}; wait for it, or choose another directory"
                    ) from None
                # The file system knows no locks.
            same = False
            with contextlib.suppress(FileNotFoundError):
                same = os.path.samestat(os.fstat(lock), os.stat(building))
            if same:
                yield
                return
        finally:
            os.close(lock)
    raise StoreError(f"{building} is replaced all the time; let no other program write there")


def _build(building: Path, target: Path, manifest: dict[str, Any], stores: Sequence[ActivationStore]) -> None:
    sources = [piece for store in stores for piece in store.pieces]
    wanted = pieces(building, manifest)
    try:
        for stranger in {*building.iterdir()} - {piece.path for piece in wanted}:
            stranger.unlink()  # of an earlier merge of other parts, or cut off
        for piece, source in zip(wanted, sources, strict=True):
            if not _whole(piece, stores[0]):
                _place(source, piece)
                try:
                    check_bytes(piece, stores[0].spec)
                except StoreError as error:
                    raise StoreError(str(error).replace(str(piece.path), str(source.path), 1)) from None
        commit(building / MANIFEST, json.dumps(manifest).encode(), lambda written: json.loads(written.read_bytes()))
        with contextlib.suppress(FileNotFoundError):
            target.rmdir()  # it is empty
        os.replace(building, target)
        sync_folder(target.absolute().parent)
    except (StoreError, OSError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not (isinstance(reason, OSError) and reason.errno in NO_SPACE):  # of which the message says that it resumes
            shutil.rmtree(building, ignore_errors=True)
        raise


def _whole(piece: Piece, store: ActivationStore) -> bool:
    """Whether an interrupted merge has put this shard in place already."""
    if piece.path.exists():
        with contextlib.suppress(StoreError):
            check_bytes(piece, store.spec)
            return True
        piece.path.unlink()
    return False


def _agree(stores: Sequence[ActivationStore]) -> None:
    first, *others = ((store, _what(store.manifest)) for store in stores)
    for other, what in others:
        if diff := differences(first[1], what, f"in {first[0].directory}", f"in {other.directory}"):
            keys = [(one.manifest["content"].get("pattern") or {}).get("width", 0) for one in stores]
            alike = f", with pattern_keys={max(keys)} (--pattern-keys)" if len({*keys} - {0}) > 1 else ""
            raise StoreError(f"these stores cannot be merged: {diff}; capture both alike{alike}")


def _what(manifest: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in manifest["content"].items() if key not in _OF_ROWS}
    return {**kept, "widths": {f"{site} layer {layer}": width for site, layer, width in manifest["datasets"]}}


def _disjoint(stores: Sequence[ActivationStore]) -> None:
    owner: dict[tuple[Any, ...], ActivationStore] = {}
    for store in stores:
        columns = [store.manifest["rows"][name] for name in ("key", "presentation", "label")]
        for row in zip(*columns, strict=True):
            if (earlier := owner.setdefault(row, store)) is not store:
                said = f"key {row[0]!r}, presentation {row[1]!r}, label {row[2]!r}"
                raise StoreError(
                    f"{earlier.directory} and {store.directory} both hold {said}; "
                    "give each prompt its own (key, presentation) when capturing (`index`), and each part other prompts"
                )


def _manifest(stores: Sequence[ActivationStore]) -> dict[str, Any]:
    starts = [0, *accumulate(len(store) for store in stores)]
    shards = [
        [row + start for row in shard]
        for store, start in zip(stores, starts, strict=False)
        for shard in store.manifest["shards"]
    ]
    parts: list[dict[str, Any]] = []
    prompts: list[Any] = []
    for store in stores:
        content = store.manifest["content"]
        own = {"digest": store.manifest["digest"], "n_rows": len(store), "n_shards": content["n_shards"]}
        parts += content.get("parts") or [own]
        hashed = content.get("prompts")
        prompts += hashed if isinstance(hashed, list) else [hashed]
    first = stores[0].manifest
    content = {key: value for key, value in first["content"].items() if key not in _OF_ROWS}
    content |= {"prompts": prompts, "n_rows": starts[-1], "n_shards": len(shards), "parts": parts}
    rows = {name: [value for store in stores for value in store.manifest["rows"][name]] for name in ROW_COLUMNS}
    datasets = {(site, layer): width for site, layer, width in first["datasets"]}
    return make_manifest(content, datasets=datasets, shards=shards, rows=rows, notes=first["notes"])


def _place(source: Piece, piece: Piece) -> None:
    try:
        os.link(source.path, piece.path)
    except OSError:  # another disk, or one without hard links
        commit(piece.path, source.path.read_bytes(), lambda written: None)
