"""Export: one file that other programs read, without this package, HDF5 or pickle.

Problem. A colleague works with safetensors, plain numpy or TransformerLens. A hand-made conversion loses which row is
which prompt, rounds bfloat16 where numpy has none, or loads a store larger than memory.

Mechanism. `export` streams array by array, some rows at a time, into a temporary file that is synced and renamed last.

    safetensors        arrays under the names they have in a shard (`acts/resid_post/L12`, `readout/logit`), in the
                       stored type, bfloat16 included; manifest content, notes and row index as JSON in the metadata
    npz                the same names; bfloat16 becomes float32, exactly. The row index is arrays `rows/key`, …;
                       `manifest` is JSON text. Loads with allow_pickle=False
    transformer_lens   safetensors under TransformerLens' names (`blocks.12.hook_resid_post`, `blocks.12.attn.hook_z`):
                       `ActivationCache(safetensors.torch.load_file(path), model)` takes it

TransformerLens keeps activations as [batch, pos, …] and cuts positions out of the last but one dimension, so a [row,
d_model] would be taken for one prompt of many tokens, without an error. So here: one position a prompt gives [row, 1,
d_model]; where every prompt has the same several positions, [prompt, position, d_model], in the store's order, and they
are not all of its tokens; otherwise each row is a batch entry of its own. `z` is [batch, pos, head, d_head], `pattern`
[batch, head, pos, key]. `activation_cache` makes the same in memory.

Constraints. `embed` holds what enters the first block, learned positions included, which is no `hook_embed`: it is
exported as `blocks.0.hook_resid_pre`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from activations import arguments
from activations.errors import StoreError
from activations.sites import Where, dataset_path, named
from activations.store_format import MANIFEST, ROW_COLUMNS, STORAGE, pack, readout_spec
from activations.store_writing import sync_folder, write_failed

if TYPE_CHECKING:
    from activations.store import ActivationStore

FORMATS = ("safetensors", "npz", "transformer_lens")
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of the file: its name, full shape and type, and its rows in pieces."""

    name: str
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    type_name: str
    parts: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.kind.itemsize


def export(
    store: ActivationStore,
    path: str | os.PathLike[str],
    format: str = "safetensors",
    *,
    sites: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Path:
    """Write the chosen sites, layers and rows (all, if none are named) to one file, wholly or not at all."""
    target, arrays, numbers = _planned(store, path, format, sites, layers, rows)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _refuse_full_disk(target, sum(array.nbytes for array in arrays))
        with open(temporary, "wb") as file:
            (_write_npz if format == "npz" else _write_safetensors)(file, store, arrays, numbers)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.absolute().parent)
    except OSError as e:
        raise write_failed(target, e) from e
    finally:
        temporary.unlink(missing_ok=True)
    return target


def check_export(
    store: ActivationStore,
    path: str | os.PathLike[str],
    format: str = "safetensors",
    *,
    sites: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Refuse, without writing anything, what `export` would refuse to begin with: a choice that makes no file."""
    _planned(store, path, format, sites, layers, rows)


def _planned(
    store: ActivationStore,
    path: str | os.PathLike[str],
    format: str,
    sites: Sequence[str] | None,
    layers: Sequence[int] | None,
    rows: Sequence[int] | np.ndarray | None,
) -> tuple[Path, list[_Array], np.ndarray]:
    """The file, its arrays, and the rows in it; nothing is read yet."""
    target = arguments.path("path", path)
    if format not in FORMATS:
        raise StoreError(f"unknown export format {format!r}; allowed: {', '.join(FORMATS)}")
    if target.is_dir():
        raise StoreError(f"{target} is a directory; give the name of a file, for example {target / 'acts.safetensors'}")
    if (target.name == MANIFEST or target.match("shard-*.h5")) and (target.parent / MANIFEST).exists():
        raise StoreError(f"{target} is the name of a store's own file; give another, for example acts.safetensors")
    wanted = _chosen(store, sites, layers)
    numbers = np.arange(len(store)) if rows is None else store.row_numbers(rows)
    if not len(numbers):
        raise StoreError("no rows to export; name at least one, or leave rows out for all")
    if format == "transformer_lens":
        return target, _lens_arrays(store, wanted, numbers), numbers
    arrays = _plain_arrays(store, wanted, numbers, widen=format == "npz")
    return target, arrays + _readout_arrays(store, numbers), numbers


def activation_cache(
    store: ActivationStore,
    model: Any = None,
    *,
    sites: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Any:
    """The chosen arrays as a TransformerLens ActivationCache; `model` is the TransformerBridge its functions need."""
    import torch
    from transformer_lens import ActivationCache

    numbers = np.arange(len(store)) if rows is None else store.row_numbers(rows)
    arrays = _lens_arrays(store, _chosen(store, sites, layers), numbers, keep_type=False)
    made = {a.name: torch.from_numpy(np.concatenate(list(a.parts())).reshape(a.shape)) for a in arrays}
    return ActivationCache(made, model)


def _chosen(store: ActivationStore, sites: Sequence[str] | None, layers: Sequence[int] | None) -> list[Where]:
    """The arrays asked for; a site may be given in TransformerLens' spelling, with or without a layer."""
    sites = None if sites is None else [sites] if isinstance(sites, str) else arguments.texts("sites", sites)
    layers = None if layers is None else arguments.integers("layers", layers)
    for name, value in (("sites", sites), ("layers", layers)):
        if value is not None and not value:
            raise StoreError(f"no {name} to export; name at least one, or leave {name} out for all")
    given = [named(site) for site in (store.layers if sites is None else sites)]
    chosen: dict[Where, None] = {}
    for site, pinned in given:
        asked = layers if pinned is None else (pinned,)
        for layer in store.layers.get(site, (0,)) if asked is None else asked:
            chosen[store.find(site, layer)] = None
    return list(chosen)


def _stream(
    store: ActivationStore,
    where: Where,
    numbers: np.ndarray,
    change: Callable[[np.ndarray], np.ndarray],
    multiple_of: int = 1,
) -> Callable[[], Iterator[np.ndarray]]:
    at_once = max(1, _BYTES_AT_ONCE // (4 * store.width(*where) * multiple_of)) * multiple_of
    return lambda: (change(part) for part in store.batches(*where, numbers, at_once))


def _plain_arrays(store: ActivationStore, wanted: list[Where], numbers: np.ndarray, *, widen: bool) -> list[_Array]:
    dtype = "float32" if widen and store.dtype == "bfloat16" else store.dtype
    return [
        _Array(
            dataset_path(where),
            (len(numbers), store.width(*where)),
            STORAGE[dtype],
            _TYPES[dtype],
            _stream(store, where, numbers, _packed(dtype)),
        )
        for where in wanted
    ]


def _readout_arrays(store: ActivationStore, numbers: np.ndarray) -> list[_Array]:
    labels = store.manifest["content"]["labels"]
    if labels is None:
        return []
    return [
        _Array(
            f"readout/{name}",
            (len(numbers), *tail),
            kind,
            {"f": "F32", "i": "I64"}[kind.kind],
            _readout_stream(store, name, numbers),
        )
        for name, (tail, kind) in readout_spec(labels).items()
    ]


def _readout_stream(store: ActivationStore, name: str, numbers: np.ndarray) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: iter([store.readout[name][numbers]])


_LENS_NAMES = {"z": "attn.hook_z", "pattern": "attn.hook_pattern", "embed": "hook_resid_pre"}


def _lens_arrays(
    store: ActivationStore, wanted: list[Where], numbers: np.ndarray, *, keep_type: bool = True
) -> list[_Array]:
    n_positions = _positions(store, numbers)
    front = (len(numbers) // n_positions, n_positions)
    dtype = store.dtype if keep_type else "float32"
    arrays = []
    for site, layer in wanted:
        width, change = store.width(site, layer), _packed(dtype)
        shape: tuple[int, ...] = (*front, width)
        if site in ("z", "pattern"):
            if not (heads := store.heads(site, layer)):
                raise StoreError(
                    f"{store.directory} does not record how many heads {site} layer {layer} has, and TransformerLens "
                    "keeps heads apart; leave this layer out, or export to safetensors or npz"
                )
            shape = (*front, heads, width // heads)
            if site == "pattern":
                change = _packed(dtype, (-1, n_positions, heads, width // heads))
                shape = (front[0], heads, n_positions, width // heads)
        parts = _stream(store, (site, layer), numbers, change, n_positions)
        name = f"blocks.{layer}.{_LENS_NAMES.get(site, f'hook_{site}')}"
        arrays.append(_Array(name, shape, STORAGE[dtype], _TYPES[dtype], parts))
    return arrays


def _packed(dtype: str, shape: tuple[int, ...] | None = None) -> Callable[[np.ndarray], np.ndarray]:
    return lambda part: pack(part if shape is None else part.reshape(shape).swapaxes(1, 2), dtype)


def _positions(store: ActivationStore, numbers: np.ndarray) -> int:
    """How many positions each prompt has, if all have the same ones in the same order; otherwise 1."""
    columns = [store.manifest["rows"][name] for name in ("key", "presentation", "label")]
    groups: list[tuple[tuple[str, str], list[str]]] = []
    for key, presentation, label in zip(*([column[row] for row in numbers] for column in columns), strict=True):
        if not groups or groups[-1][0] != (key, presentation):
            groups.append(((key, presentation), []))
        groups[-1][1].append(label)
    same = len({tuple(labels) for _, labels in groups}) == 1
    count = len(groups[0][1])
    return count if same and len(set(groups[0][1])) == count else 1


def _described(store: ActivationStore) -> dict[str, str]:
    content, notes = store.manifest["content"], store.manifest["notes"]
    return {"format": "pairlens", "manifest": json.dumps({"content": content, "notes": notes}, sort_keys=True)}


def _write_safetensors(file: IO[bytes], store: ActivationStore, arrays: list[_Array], numbers: np.ndarray) -> None:
    # By hand, because the library's writer wants all of it in memory. The format: the length of a JSON head, the head,
    # the data. Types of more bytes come first, so that each array is aligned.
    arrays = sorted(arrays, key=lambda array: -array.kind.itemsize)
    index = {name: [store.manifest["rows"][name][row] for row in numbers] for name in ROW_COLUMNS}
    head: dict[str, Any] = {"__metadata__": {**_described(store), "rows": json.dumps(index)}}
    at = 0
    for array in arrays:
        spot = [at, at + array.nbytes]
        head[array.name] = {"dtype": array.type_name, "shape": list(array.shape), "data_offsets": spot}
        at += array.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for array in arrays:
        for part in array.parts():
            file.write(np.ascontiguousarray(part).data)


def _write_npz(file: IO[bytes], store: ActivationStore, arrays: list[_Array], numbers: np.ndarray) -> None:
    columns = ((name, [store.manifest["rows"][name][row] for row in numbers]) for name in ROW_COLUMNS)
    small = {f"rows/{name}": np.asarray(values) for name, values in columns}
    small["manifest"] = np.asarray(_described(store)["manifest"])
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, values in small.items():
            held = io.BytesIO()
            np.lib.format.write_array(held, values, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), held.getvalue())  # a ZipInfo's date is fixed
        for array in arrays:
            with archive.open(zipfile.ZipInfo(f"{array.name}.npy"), "w", force_zip64=True) as entry:
                described = {"descr": array.kind.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(entry, described)
                for part in array.parts():
                    entry.write(np.ascontiguousarray(part).data)


def _refuse_full_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise StoreError(
            f"the export needs {needed / 1e9:.3g} GB and {free / 1e9:.3g} GB are free at {target.parent}; "
            "free some, choose another place, or fewer sites, layers or rows"
        )
