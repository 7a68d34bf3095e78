"""Donors: the vectors an edit may take, checked before they are used.

A donor is a set of vectors from other runs over the *same items in the same order*: entry ``i`` is what is put into
recipient ``i``. For each site it holds, by layer,

- ``[item, width]``: one vector an item. At a position of several tokens every token gets it, as with a mean or a
  direction;
- ``[item][token, width]``: a vector for each token of a span or of the whole prompt. Donor and recipient must have
  equally many, since token ``k`` of one goes to token ``k`` of the other.

A site's layers come as an array ``[item, layer, width]``, where every layer is captured and equally wide, or as a mapping
``{layer: vectors}``, where only some are, or where they differ in width (a hybrid model's linear-attention layers have
another ``z`` than its softmax layers, or none). Where a donor has other vectors at each position, the site holds
``{position: {layer: vectors}}``, with positions written as in edits: ``span:query``.

A donor of the wrong length would silently pair the wrong items, and one with a NaN would turn a cell into NaN that looks
like a failed model. Both are errors here, and the message names the donor, the site and the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from patching.edits import ZERO, Cell, PatchError

if TYPE_CHECKING:
    from activations.model import Model
    from activations.store import ActivationStore

Vectors: TypeAlias = "np.ndarray | Mapping[Any, Any]"
"""One site's vectors, in any of the forms above."""
Donor: TypeAlias = "Mapping[str, Vectors]"
Key: TypeAlias = "tuple[str, str, int, str]"
"""Source, site, layer and position of an edit."""


def donor_from_store(
    store: ActivationStore,
    rows: Sequence[int] | Mapping[str, Sequence[Sequence[int]]],
    *,
    sites: Sequence[str],
    layers: Iterable[int],
    model: Model | None = None,
) -> dict[str, Any]:
    """Read a donor out of an activation store.

    Args:
        rows: ``rows[i]`` is the store row put into recipient ``i``; or for each position of the edits, written
            ``span:query``, the store rows of each item's tokens.
        model: the recipients' model. A store captured from other weights is then refused; another adapter is not.
    """
    if model is not None:
        refuse_other_model(store, model)
    wanted = list(layers)
    if isinstance(rows, Mapping):
        return {
            site: {
                position: {
                    layer: [store[site, layer][np.asarray(own, dtype=np.int64)] for own in each] for layer in wanted
                }
                for position, each in rows.items()
            }
            for site in sites
        }
    index = np.asarray(rows, dtype=np.int64)
    return {site: {layer: store[site, layer][index] for layer in wanted} for site in sites}


def refuse_other_model(store: ActivationStore, model: Model) -> None:
    """Refuse a store captured from other weights than the recipients run on; another adapter is not refused."""
    captured = store.manifest["content"].get("model", {}).get("weights")
    if captured != model.identity.get("weights"):
        raise PatchError(
            f"{store.directory} was captured from weights {str(captured)[:12]}, the recipients run on {model.name} with "
            f"{str(model.identity.get('weights'))[:12]}; capture the donor from the same base model"
        )


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
    cells: Sequence[Cell],
    donors: Mapping[str, Donor],
    widths: Mapping[tuple[str, int], int],
    tokens: Mapping[str, Sequence[int]],
) -> dict[Key, np.ndarray | list[np.ndarray]]:
    """The vectors the cells ask for, shapes and values checked: ``[item, width]``, or ``[item][token, width]``.

    Args:
        widths: the width of each edited (site, layer).
        tokens: for each position the number of tokens it has in each recipient.
    """
    wanted = {
        (edit.source, edit.site, edit.layer, edit.position)
        for cell in cells
        for edit in cell.edits
        if edit.source != ZERO and edit.how != "function"
    }
    return {key: _taken(key, donors, widths, tokens) for key in sorted(wanted)}


def _taken(
    key: Key,
    donors: Mapping[str, Donor],
    widths: Mapping[tuple[str, int], int],
    tokens: Mapping[str, Sequence[int]],
) -> np.ndarray | list[np.ndarray]:
    source, site, layer, position = key
    held = donors[source]
    if site not in held:
        allowed = ", ".join(sorted(held)) or "nothing"
        raise PatchError(f"donor {source!r} holds no {site!r}; it holds: {allowed}; capture that site first")
    vectors: Any = held[site]
    if isinstance(vectors, Mapping) and any(isinstance(name, str) for name in vectors):
        if position not in vectors:
            have = ", ".join(str(name) for name in vectors)
            raise PatchError(f"donor {source!r} holds no {site!r} at {position}; it holds positions {have}")
        vectors = vectors[position]
    if not isinstance(vectors, Mapping):
        vectors = by_layer(vectors)
    if layer not in vectors:
        raise PatchError(f"donor {source!r} holds no {site!r} of layer {layer}; it holds layers {sorted(vectors)}")
    called = f"donor {source!r}, {site} of layer {layer}"
    counts, width = tokens[position], widths[site, layer]
    values, need = vectors[layer], [len(counts), width]
    whole = isinstance(values, np.ndarray) and values.ndim < 3
    single = position == "answer" or position.startswith("index:")
    if whole or single:
        array = np.asarray(values)
        if list(array.shape) != need:
            raise PatchError(f"{called} has shape {list(array.shape)}; {need} is needed")
        _finite([row[None] for row in array], called)
        return array
    if len(values) != len(counts):
        raise PatchError(f"{called} holds {len(values)} items; there are {len(counts)} recipients")
    rows = [np.asarray(row) for row in values]
    for item, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row.ndim != 2 or row.shape[1] != width:
            raise PatchError(f"{called} has shape {list(row.shape)} at item {item}; {[count, width]} is needed")
        if len(row) != count:
            raise PatchError(
                f"{called} has {len(row)} tokens at {position} of item {item}, the recipient has {count}; give a donor "
                "of the same token count, or one vector an item"
            )
    _finite(rows, called)
    return rows


def _finite(rows: Sequence[np.ndarray], called: str) -> None:
    for item, row in enumerate(rows):
        if not np.isfinite(row).all():
            raise PatchError(f"{called} is not finite at item {item}; capture it again")


def check_directions(key: Key, values: np.ndarray | list[np.ndarray], heads: int | None, chosen: Iterable[int]) -> None:
    """Refuse a direction of length 0, which has no component to project out.

    Args:
        heads: into how many heads the vectors are cut; ``chosen`` are those projected in, -1 for the whole vector.
    """
    source, site, layer, _ = key
    for head in chosen:
        for item, row in enumerate(values):
            part = row if head < 0 else row.reshape(*row.shape[:-1], heads or 1, -1)[..., head, :]
            if not np.abs(part).max(axis=-1).all():
                called = f"donor {source!r}, {site} of layer {layer}{'' if head < 0 else f', head {head}'}"
                raise PatchError(f"{called} has length 0 at item {item}, so it is no direction to project out")
