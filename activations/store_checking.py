"""Is a store whole, and what is in it: every fault by name, and a summary that needs no number read.

Problem. Disks flip bits, copies are cut off, files are dropped into the wrong folder, manifests get edited. A reader
notices what it happens to read; before a store is published or trusted for a result, all of it should be looked at.

Mechanism. `verify` reads the manifest with its hashes, then each shard twice: as bytes against its sha256, which covers
all that HDF5's checksums leave out, and as values, through plain HDF5 and through our own offsets, which must agree and
be finite. Every fault is one line that names the file; nothing stops at the first. `info` reads the manifest and the
sizes of the files, and works on a capture in progress.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from activations.errors import StoreError
from activations.sites import by_site, spans
from activations.store_format import MANIFEST, Piece, Spec, datasets_of, heads_of, pieces, read_manifest, spec_of
from activations.store_shards import check_bytes, check_values


def verify(directory: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read a store completely; one line for each fault, none for a store that is whole."""
    folder = Path(directory)
    try:
        manifest = read_manifest(folder)
        spec, found = spec_of(manifest), pieces(folder, manifest)
    except StoreError as error:
        return (str(error),)
    faults = [fault for piece in found if (fault := _fault(piece, spec, manifest["content"]["dtype"]))]
    n_rows = manifest["content"]["n_rows"]
    covered = np.sort(np.concatenate([piece.rows for piece in found]))
    if not np.array_equal(covered, np.arange(n_rows)):
        faults.append(f"{folder / MANIFEST} does not give each of its {n_rows} rows one shard; capture it again")
    known = {piece.path.name for piece in found}
    for stranger in sorted(path for kind in ("*.h5", "*.hdf5") for path in folder.glob(kind)):
        if stranger.name not in known and not stranger.name.startswith("."):
            faults.append(f"{stranger} is no part of this store; move it elsewhere")
    return tuple(faults)


def _fault(piece: Piece, spec: Spec, dtype: str) -> str | None:
    if not piece.path.exists():
        again = "merge the parts again" if piece.merged else "run the same command again: it makes the missing ones"
        return f"{piece.path} is missing; {again}"
    try:
        check_bytes(piece, spec)
        check_values(piece, spec, dtype)
    except StoreError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class Info:
    """What a store holds and what made it."""

    path: str
    format: int
    digest: str
    model: dict[str, Any]
    """Name and source, revision, hash of the weights, dtype, attention, template."""
    adapter: dict[str, Any]
    """Name and hashes of the adapter in use; empty for the base model."""
    versions: dict[str, str]
    dtype: str
    n_layers: int
    sites: list[dict[str, Any]]
    """Site, layers, width of a row, and heads where they are known."""
    rows: list[dict[str, Any]]
    """Number of rows for each presentation and label."""
    n_rows: int
    n_keys: int
    readout: list[str] | None
    """The labels whose logits are stored."""
    shards: dict[str, int]
    """How many there are, and how many there should be."""
    bytes: int
    parts: int
    """From how many captures it was merged; 1 for a single one."""


def info(directory: str | os.PathLike[str]) -> Info:
    """Describe a store, whole or in progress."""
    folder = Path(directory)
    manifest = read_manifest(folder)
    content, notes, columns = manifest["content"], manifest["notes"], manifest["rows"]
    found = [piece.path for piece in pieces(folder, manifest) if piece.path.exists()]
    model = dict(content.get("model") or {})
    named = {"name": notes.get("model"), "source": notes.get("source")}
    versions = model.pop("versions", {})
    adapter = {key: value for key, value in (content.get("adapter") or {}).items() if value is not None}
    counts = Counter(zip(columns["presentation"], columns["label"], strict=True))
    widths = datasets_of(manifest)
    sites = []
    for site, layers in by_site(widths).items():
        heads = sorted({n for layer in layers if (n := heads_of(content, (site, layer)))})
        width = sorted({widths[site, layer] for layer in layers})
        sites.append({"site": site, "layers": spans(layers), "width": width} | ({"heads": heads} if heads else {}))
    return Info(
        path=str(folder),
        format=content["format"],
        digest=manifest["digest"],
        model={key: value for key, value in {**named, **model}.items() if value is not None},
        adapter={"name": notes.get("adapter"), **adapter} if adapter else {},
        versions=versions,
        dtype=content["dtype"],
        n_layers=content["n_layers"],
        sites=sites,
        rows=[{"presentation": kind, "label": label, "rows": n} for (kind, label), n in counts.items()],
        n_rows=content["n_rows"],
        n_keys=len(set(columns["key"])),
        readout=content["labels"],
        shards={"there": len(found), "total": content["n_shards"]},
        bytes=(folder / MANIFEST).stat().st_size + sum(path.stat().st_size for path in found),
        parts=len(content.get("parts") or [0]),
    )
