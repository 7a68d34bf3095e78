"""Several captures, one store: each process captures its own prompts, and the parts are put together.

Problem. A model on eight GPUs is captured by eight processes, and one directory takes one writer. Copying the parts
into one would move every byte again; gluing stores of another model, adapter, template or site together would go
unnoticed for ever.

Mechanism. `merge` compares everything that determines the numbers, except which prompts each part holds, and names what
differs. Rows keep the order of the parts. A shard's bytes do not change: the new manifest lists the parts with their
digests, and says that a shard's row numbers count from its part's first row; so shards are linked, not copied, where
the disk allows it. Each is checked byte by byte. All of it happens in a folder beside the target, which is renamed last:
a kill leaves no half-merged store, and the next try begins anew.

Constraints. Linked shards are the same file under two names: the parts may be deleted afterwards, and damage to one is
damage to both. A (key, presentation, label) may occur in one part only. What was captured in batches of other
compositions agrees to rounding, as everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from activations.errors import StoreError
from activations.store import ActivationStore
from activations.store_format import MANIFEST, ROW_COLUMNS, Piece, differences, make_manifest, pieces
from activations.store_shards import check_bytes
from activations.store_writing import commit, sync_folder, write_failed

_OF_ROWS = ("rows", "shards", "n_rows", "n_shards", "prompts", "parts")
"""Keys of a manifest's content that say which prompts a part holds; all others have to agree."""


def merge(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> ActivationStore:
    """Put complete stores together; the same call again returns the store that is there."""
    target = Path(out)
    if len(paths) < 2:
        raise StoreError(f"{len(paths)} stores to merge; give at least two")
    stores = [ActivationStore.open(path) for path in paths]
    _agree(stores)
    _disjoint(stores)
    manifest = _manifest(stores)
    if (target / MANIFEST).exists() and ActivationStore.open(target).manifest["digest"] == manifest["digest"]:
        return ActivationStore.open(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"{target} exists and holds something else; choose another directory")
    building = target.absolute().with_name(f".{target.absolute().name}.merging")
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        sources = [piece for store in stores for piece in store.pieces]
        for piece, source in zip(pieces(building, manifest), sources, strict=True):
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
    except OSError as e:
        raise write_failed(target, e) from e
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return ActivationStore.open(target)


def _agree(stores: Sequence[ActivationStore]) -> None:
    first, *others = ((store, _what(store.manifest)) for store in stores)
    for other, what in others:
        if diff := differences(first[1], what, f"in {first[0].directory}", f"in {other.directory}"):
            raise StoreError(f"these stores cannot be merged: {diff}; capture both alike")


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
