"""Controls: what a patching effect has to be compared with before it means anything.

At the answer position a later layer *must* restore more than an earlier one, whatever the model does: less and less of
the recipient's own computation is left. A curve that climbs with depth is therefore the null result of residual
patching. Three controls separate "this activation carries the answer" from "something was overwritten here":

- **norm-matched random**: a random direction with the donor's norm, item by item and layer by layer. It does the same
  damage in size and carries nothing.
- **unrelated donor**: the activation of another item from the same group (for example the same problem size), whatever
  its gold answer. It is on the model's own distribution and carries another item's content.
- **own activation**: the recipient's own vector, put back. It must change nothing; if it does, the sweep is wrong.

Every draw is keyed by the seed and by the item's key, so an item gets the same control in a short run, in a resumed one,
and whichever other items are asked for beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from patching.donors import Donor, Vectors, by_layer
from patching.edits import PatchError


def keyed_generator(*parts: object) -> np.random.Generator:
    """A generator that depends on the parts alone, not on how many draws came before."""
    text = "\x1f".join(str(part) for part in parts)
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def norm_matched_random(
    donor: Donor, *, keys: Sequence[str], seed: int, heads: Sequence[int | None] | None = None
) -> dict[str, dict[int, np.ndarray]]:
    """A donor of random directions with the given donor's norms.

    Args:
        donor: the donor to match, site by site.
        keys: the items' keys, in the order of the donor's rows.
        seed: together with key, site and layer it fixes the direction.
        heads: the model's head map, needed where the donor holds ``z``: norms are then matched within each head, since
            heads are edited one by one.
    """
    return {site: _random_like(site, vectors, keys, seed, heads) for site, vectors in donor.items()}


def _random_like(
    site: str, vectors: Vectors, keys: Sequence[str], seed: int, heads: Sequence[int | None] | None
) -> dict[int, np.ndarray]:
    result: dict[int, np.ndarray] = {}
    for layer, values in by_layer(vectors).items():
        items, width = values.shape
        if items != len(keys):
            raise PatchError(f"{len(keys)} keys for {items} donor rows ({site}, layer {layer}); give one key a row")
        parts = 1
        if site == "z":
            parts = (heads[layer] if heads is not None and layer < len(heads) else None) or 0
            if not parts or width % parts:
                raise PatchError(
                    f"z of layer {layer} has width {width} and {parts or 'no'} heads; pass heads=head_map(model)"
                )
        noise = np.stack(
            [keyed_generator("norm-matched", seed, site, layer, key).standard_normal(width) for key in keys]
        )
        noise = noise.reshape(items, parts, width // parts)
        norms = np.linalg.norm(values.astype(np.float64).reshape(noise.shape), axis=-1, keepdims=True)
        noise *= norms / np.linalg.norm(noise, axis=-1, keepdims=True)
        result[layer] = noise.reshape(items, width).astype(np.result_type(values.dtype, np.float32))
    return result


def derangement(keys: Sequence[str], groups: Sequence[object], *, seed: int) -> np.ndarray:
    """For each item the row of another item in the same group; every row is used exactly once.

    Within a group the items stand in a keyed random order, and each takes the next one's activation (the last takes the
    first's), so no item can get its own. The group is what must be alike (size, family); the gold answer is left out of
    it on purpose, or the control would carry the answer.
    """
    if len(keys) != len(groups):
        raise PatchError(f"{len(keys)} keys but {len(groups)} groups; give one group an item")
    if len(set(keys)) != len(keys):
        raise PatchError(
            f"{len(keys) - len(set(keys))} keys occur twice; an item could then be its own unrelated donor"
        )
    members: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    result = np.empty(len(keys), dtype=np.int64)
    for group, rows in members.items():
        if len(rows) < 2:
            raise PatchError(f"group {group!r} has one item; an unrelated donor needs two, so merge groups or drop it")
        order = sorted(rows, key=lambda row: hashlib.sha256(f"unrelated\x1f{seed}\x1f{keys[row]}".encode()).digest())
        for row, giver in zip(order, order[1:] + order[:1], strict=True):
            result[row] = giver
    return result


def unrelated_donor(
    donor: Donor, *, keys: Sequence[str], groups: Sequence[object], seed: int
) -> dict[str, dict[int, np.ndarray]]:
    """The donor with its rows exchanged by ``derangement``: every item gets another item's activation."""
    order = derangement(keys, groups, seed=seed)
    return {
        site: {layer: values[order] for layer, values in by_layer(vectors).items()} for site, vectors in donor.items()
    }


def largest_change(difference: np.ndarray, unpatched: np.ndarray) -> float:
    """Largest |patched - unpatched|: what must be about 0 when the recipient's own activation is put back."""
    return float(np.max(np.abs(difference - np.asarray(unpatched)[:, None]), initial=0.0))


def control_donors(
    donor: Donor,
    own: Donor,
    *,
    keys: Sequence[str],
    groups: Sequence[object],
    seed: int,
    heads: Sequence[int | None] | None = None,
) -> Mapping[str, Donor]:
    """The three controls by name, ready to join ``donors=``: ``random``, ``unrelated`` and ``own``."""
    return {
        "random": norm_matched_random(donor, keys=keys, seed=seed, heads=heads),
        "unrelated": unrelated_donor(donor, keys=keys, groups=groups, seed=seed),
        "own": own,
    }
