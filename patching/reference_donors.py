"""Donors made from a reference set: means and resampled activations.

Zeros are an input that the network never saw. Two replacements stay nearer to what it does:

- a **mean** over a named set of reference rows. The mean must not know the item: it is taken over rows of *other* folds
  than the item's own, so an item's own activations, and those of anything that shares its fold, are left out;
- a **resampled** activation: that of another instance *in the same role* (the same position label, presentation, cell or
  whatever the role names), drawn once for each item by a generator that the seed and the item's key determine.

An empty set has no mean. It is refused with the name of the set and the fold, never answered with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from patching.controls import keyed_generator
from patching.donors import donor_from_store, refuse_other_model
from patching.edits import PatchError

if TYPE_CHECKING:
    from activations.model import Model
    from activations.store import ActivationStore


def mean_donor(
    store: ActivationStore,
    reference: Sequence[int] | np.ndarray,
    *,
    reference_folds: Sequence[object],
    item_folds: Sequence[object],
    sites: Sequence[str],
    layers: Iterable[int],
    name: str,
    model: Model | None = None,
) -> dict[str, dict[int, np.ndarray]]:
    """For each item the mean over the reference rows of all folds but the item's: ``{site: {layer: [item, width]}}``.

    Args:
        reference: store rows to average over, for example ``store.select(presentation="original")``.
        reference_folds: the fold of each reference row.
        item_folds: the fold of each recipient.
        name: what messages call the set.
        model: the recipients' model. A store captured from other weights is then refused.
    """
    if model is not None:
        refuse_other_model(store, model)
    rows = np.asarray(reference, dtype=np.int64)
    if len(rows) != len(reference_folds):
        raise PatchError(f"mean over {name!r}: {len(reference_folds)} folds for {len(rows)} rows; give one fold a row")
    if not len(rows):
        raise PatchError(f"mean over {name!r}: the set is empty; name reference rows")
    if not len(item_folds):
        raise PatchError(f"mean over {name!r}: no recipients; give the fold of each")
    folds = list(dict.fromkeys(item_folds))
    kept = [np.array([other != fold for other in reference_folds]) for fold in folds]
    for fold, keep in zip(folds, kept, strict=True):
        if not keep.any():
            raise PatchError(
                f"mean over {name!r}: all {len(rows)} rows are in fold {fold!r}, which items of that fold may not see; "
                "name rows of other folds"
            )
    place = np.array([folds.index(fold) for fold in item_folds])
    wanted = list(layers)
    result: dict[str, dict[int, np.ndarray]] = {}
    for site in sites:
        result[site] = {}
        for layer in wanted:
            values = store[site, layer][rows].astype(np.float64)
            means = np.stack([values[keep].mean(axis=0) for keep in kept]).astype(np.float32)
            result[site][layer] = means[place]
    return result


def resample_rows(
    reference: Sequence[int] | np.ndarray,
    *,
    reference_keys: Sequence[str],
    reference_roles: Sequence[object],
    keys: Sequence[str],
    roles: Sequence[object],
    seed: int,
    name: str,
) -> np.ndarray:
    """For each item a reference row of the same role and another instance; int64 ``[item]``.

    The draw for an item depends on the seed, its key, its role and the candidates alone, not on other items.
    """
    rows = np.asarray(reference, dtype=np.int64)
    if not len(rows) == len(reference_keys) == len(reference_roles):
        raise PatchError(
            f"resampling from {name!r}: {len(rows)} rows, {len(reference_keys)} keys and {len(reference_roles)} roles; "
            "give one key and one role a row"
        )
    if len(keys) != len(roles):
        raise PatchError(f"resampling from {name!r}: {len(keys)} keys but {len(roles)} roles; give one role an item")
    members: dict[object, list[tuple[str, int]]] = {}
    for row, key, role in zip(rows, reference_keys, reference_roles, strict=True):
        members.setdefault(role, []).append((key, int(row)))
    chosen = np.empty(len(keys), dtype=np.int64)
    for item, (key, role) in enumerate(zip(keys, roles, strict=True)):
        others = sorted((other, row) for other, row in members.get(role, ()) if other != key)
        if not others:
            raise PatchError(
                f"resampling from {name!r}: no row of another instance has role {role!r} (item {key!r}); add reference "
                "rows of that role"
            )
        chosen[item] = others[int(keyed_generator("patching.resample", seed, key, role).integers(len(others)))][1]
    return chosen


def resample_donor(
    store: ActivationStore,
    reference: Sequence[int] | np.ndarray,
    *,
    reference_keys: Sequence[str],
    reference_roles: Sequence[object],
    keys: Sequence[str],
    roles: Sequence[object],
    sites: Sequence[str],
    layers: Iterable[int],
    seed: int,
    name: str,
    model: Model | None = None,
) -> dict[str, dict[int, np.ndarray]]:
    """The donor of :func:`resample_rows`: ``{site: {layer: [item, width]}}``; ``model`` as in :func:`mean_donor`."""
    rows = resample_rows(
        reference,
        reference_keys=reference_keys,
        reference_roles=reference_roles,
        keys=keys,
        roles=roles,
        seed=seed,
        name=name,
    )
    return donor_from_store(store, rows.tolist(), sites=sites, layers=layers, model=model)
