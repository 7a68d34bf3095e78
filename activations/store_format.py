"""What a store's directory holds: the manifest, the stored types, and how arrays are named.

Problem. A number read from a file means nothing without what made it: which model, adapter, prompts, site, layer and
rounding. If the description can drift from the data, or be edited, it is worse than none.

Mechanism. `manifest.json` is written before the first number. `content` names everything that determines the numbers,
and `digest` is the hash of it, which every shard carries. `rows` (the row index) and `shards` (which rows lie in which
shard) are long, so `content` holds hashes of them instead. `seal` is a hash of the rest, notes included: an edit
anywhere is found when the manifest is read.

    digest     of `content`
    seal       of digest, content, datasets and notes
    content    format, dtype, n_layers, sites, labels, n_rows, n_shards, hashes of rows and shards; model, adapter, …
    datasets   [site, layer, width] of each array of activations, in the order of a shard
    notes      names and paths, worth knowing and never compared
    shards     the row numbers of each shard
    rows       the row index, column by column

Constraints. The order of `datasets` is the order of the arrays in a shard, so it may not change. bfloat16 has no numpy
type: it is kept as its 16 bits (uint16) and named. A merged store lists its parts under `content.parts`: their shards
keep the digest and the row numbers they were written with, counted from the part's first row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activations.errors import StoreError, one_line
from activations.sites import Where, dataset_path

FORMAT = 2
MANIFEST = "manifest.json"
DType = np.dtype[Any]
STORAGE: dict[str, DType] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
ROW_COLUMNS = ("key", "presentation", "label", "position", "n_tokens")
ANSWER_LABEL = "answer"
FLOAT16_MAX = 65504.0

Spec = dict[str, tuple[tuple[int, ...], DType]]
"""The arrays of a shard in their order: name -> (shape after the rows, stored type)."""


def readout_spec(labels: Sequence[str]) -> Spec:
    """The readout arrays of a store."""
    number: DType = np.dtype("<f4")
    return {"logit": ((len(labels),), number), "logsumexp": ((), number), "top": ((), np.dtype("<i8"))}


def shard_spec(datasets: Mapping[Where, int], dtype: str, labels: Sequence[str] | None) -> Spec:
    """Every array of a shard, its row numbers first."""
    spec: Spec = {"rows": ((), np.dtype("<i8"))}
    spec |= {dataset_path(where): ((width,), STORAGE[dtype]) for where, width in datasets.items()}
    if labels is not None:
        spec |= {f"readout/{name}": entry for name, entry in readout_spec(labels).items()}
    return spec


def pack(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert finite float32 values to the stored representation, rounding to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(STORAGE[dtype])
    return values.astype(STORAGE[dtype], copy=False)


def unpack(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the stored representation to float32, exactly."""
    if dtype == "bfloat16":
        wide = stored.astype(np.uint32)
        wide <<= 16  # in place: this is most of the time of reading bfloat16
        return wide.view(np.float32)
    return stored.astype(np.float32, copy=False)


def digest_of(content: Any) -> str:
    """Hash any JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shard_path(directory: Path, shard: int) -> Path:
    """Where a shard lies."""
    return directory / f"shard-{shard:05d}.h5"


def make_manifest(
    content: Mapping[str, Any],
    *,
    datasets: Mapping[Where, int],
    shards: Sequence[Sequence[int]],
    rows: Mapping[str, Sequence[Any]],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest of a store; `content` lacks only the hashes of rows and shards."""
    full = {**content, "shards": digest_of(shards), "rows": digest_of(rows)}
    listed = [[site, layer, width] for (site, layer), width in datasets.items()]
    # Through JSON once: tuples become lists, as they are when read from the disk.
    made = json.loads(json.dumps({"content": full, "datasets": listed, "notes": dict(notes)}))
    made["digest"] = digest_of(made["content"])
    made["seal"] = _seal(made)
    return {**made, "shards": [list(shard) for shard in shards], "rows": {name: list(rows[name]) for name in rows}}


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a store; StoreError if it cannot be read, was edited or has another format."""
    path = directory / MANIFEST
    if not path.exists() or not path.stat().st_size:  # empty: a writer was killed before it wrote anything
        raise StoreError(f"{directory} holds no activation store (no {MANIFEST}); capture into it first")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        content = manifest["content"]
        if (version := content["format"]) != FORMAT:
            raise StoreError(f"{path} has format {version}, this program reads {FORMAT}; capture into a new directory")
        intact = (
            manifest["digest"] == digest_of(content)
            and manifest["seal"] == _seal(manifest)
            and content["rows"] == digest_of(manifest["rows"])
            and content["shards"] == digest_of(manifest["shards"])
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, StoreError):
            raise
        raise StoreError(f"{path} cannot be read ({one_line(e)}); capture into a new directory") from e
    if not intact:
        raise StoreError(f"{path} was edited: its digest does not fit its content; capture into a new directory")
    return manifest


def _seal(manifest: Mapping[str, Any]) -> str:
    return digest_of([manifest[name] for name in ("digest", "content", "datasets", "notes")])


def datasets_of(manifest: Mapping[str, Any]) -> dict[Where, int]:
    """(site, layer) -> width, in the order of a shard."""
    return {(site, layer): width for site, layer, width in manifest["datasets"]}


def spec_of(manifest: Mapping[str, Any]) -> Spec:
    """The arrays of this store's shards."""
    content = manifest["content"]
    return shard_spec(datasets_of(manifest), content["dtype"], content["labels"])


def heads_of(content: Mapping[str, Any], where: Where) -> int | None:
    """How many heads lie side by side in a row of this array, where the store records it."""
    site, layer = where
    heads = (content.get(site) or {}).get("heads") or {}
    return heads.get(str(layer))


class Piece(NamedTuple):
    """One shard as the manifest sees it."""

    path: Path
    digest: str
    first_row: int
    """Added to the row numbers in the file."""
    rows: np.ndarray
    """Row numbers of the store."""
    merged: bool = False


def pieces(directory: Path, manifest: Mapping[str, Any]) -> tuple[Piece, ...]:
    """The shards of a store in order, whether or not they are there."""
    content = manifest["content"]
    own = {"digest": manifest["digest"], "n_rows": content["n_rows"], "n_shards": content["n_shards"]}
    parts = content.get("parts") or [own]
    starts = [0, *accumulate(part["n_rows"] for part in parts)]
    owners = [
        (part["digest"], start) for part, start in zip(parts, starts, strict=False) for _ in range(part["n_shards"])
    ]
    return tuple(
        Piece(shard_path(directory, n), digest, start, np.asarray(rows, dtype=np.int64), "parts" in content)
        for n, ((digest, start), rows) in enumerate(zip(owners, manifest["shards"], strict=True))
    )


def differences(old: Any, new: Any, here: str = "in the store", there: str = "now") -> str:
    """Each key of two JSON objects that differs, with both values, in one line."""
    before, now = _flat(old), _flat(new)

    def show(side: dict[str, Any], name: str) -> str:
        text = repr(side[name]) if name in side else "absent"
        return text if len(text) <= 60 else f"{text[:57]}…"

    keys = [k for k in {**before, **now} if before.get(k, ...) != now.get(k, ...)]
    return "; ".join(f"{k} is {show(before, k)} {here} and {show(now, k)} {there}" for k in keys)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{prefix}.{name}").items()}
    return {prefix.removeprefix("."): value}
