"""Donors: the activations an edit may take, one vector an item and layer, checked before they are used.

A donor is a set of vectors at the answer position of another run over the *same items in the same order*: row ``i`` is
what is put into recipient ``i``. Two forms are read, because models differ:

- an array ``[item, layer, width]``, where every layer is captured and equally wide;
- a mapping ``{layer: array[item, width]}``, where only some layers were captured, or where layers differ in width (a
  hybrid model's linear-attention layers have another ``z`` than its softmax layers, or none).

A donor of the wrong length would silently pair the wrong items, and one with a NaN would turn a cell into NaN that looks
like a failed model. Both are errors here, and the message names the donor, the site and the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from patching.edits import ZERO, Cell, PatchError

if TYPE_CHECKING:
    from activations.model import Model
    from activations.store import ActivationStore

Vectors: TypeAlias = "np.ndarray | Mapping[int, np.ndarray]"
Donor: TypeAlias = "Mapping[str, Vectors]"


def donor_from_store(
    store: ActivationStore, rows: Sequence[int], *, sites: Sequence[str], layers: Iterable[int]
) -> dict[str, dict[int, np.ndarray]]:
    """Read a donor out of an activation store: ``rows[i]`` is the store row put into recipient ``i``."""
    index = np.asarray(rows, dtype=np.int64)
    wanted = list(layers)
    return {site: {layer: store[site, layer][index] for layer in wanted} for site in sites}


def by_layer(vectors: Vectors) -> dict[int, np.ndarray]:
    """Either form of a site's vectors as ``{layer: array[item, width]}``."""
    if isinstance(vectors, Mapping):
        return {layer: np.asarray(values) for layer, values in vectors.items()}
    array = np.asarray(vectors)
    if array.ndim != 3:
        raise PatchError(
            f"donor vectors have shape {list(array.shape)}; allowed: [item, layer, width] or a dict by layer"
        )
    return {layer: array[:, layer] for layer in range(array.shape[1])}


def check_donors_fit(
    model: Model, cells: Sequence[Cell], donors: Mapping[str, Donor], n_items: int
) -> dict[tuple[str, str, int], np.ndarray]:
    """The vectors the cells ask for, as ``{(source, site, layer): array[item, width]}``; shapes and values checked."""
    wanted = {(edit.source, edit.site, edit.layer) for cell in cells for edit in cell.edits if edit.source != ZERO}
    split: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for source, site in sorted({(source, site) for source, site, _ in wanted}):
        if site not in donors[source]:
            allowed = ", ".join(sorted(donors[source])) or "nothing"
            raise PatchError(f"donor {source!r} holds no {site!r}; it holds: {allowed}; capture that site first")
        split[source, site] = by_layer(donors[source][site])
    checked: dict[tuple[str, str, int], np.ndarray] = {}
    for source, site, layer in sorted(wanted):
        layers = split[source, site]
        if layer not in layers:
            raise PatchError(f"donor {source!r} holds no {site!r} of layer {layer}; it holds layers {sorted(layers)}")
        width = model.d_model if site == "resid_post" else z_width(model, layer)
        array = layers[layer]
        if array.shape != (n_items, width):
            shape, need = list(array.shape), [n_items, width]
            raise PatchError(f"donor {source!r}, {site} of layer {layer} has shape {shape}; {need} is needed")
        if not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array).all(axis=1)))
            raise PatchError(f"donor {source!r}, {site} of layer {layer} is not finite at item {row}; capture it again")
        checked[source, site, layer] = array
    return checked


def z_width(model: Model, layer: int) -> int:
    """Width of the out-projection's input: heads times head width, which need not be d_model."""
    heads, d_head = model.heads(layer), model.structure.d_head[layer]
    if heads is None or d_head is None:
        raise PatchError(f"layer {layer} has no head map, so its z cannot be edited; use site 'resid_post'")
    return heads * d_head
