"""Controls: what a patching effect has to be compared with before it means anything.

At the answer position a later layer *must* restore more than an earlier one, whatever the model does: less and less of
the recipient's own computation is left. A curve that climbs with depth is therefore the null result of residual
patching. Four controls separate "this activation carries the answer" from "something was overwritten here":

- **norm-matched random**: a random direction with the donor's norm, item by item and layer by layer. It does the same
  damage in size and carries nothing.
- **unrelated donor**: the activation of another item from the same group (for example the same problem size), whatever
  its gold answer. It is on the model's own distribution and carries another item's content.
- **own activation**: the recipient's own vector, put back. It must change nothing; if it does, the sweep is wrong.

Where only some pairs are patched, say those that disagree, draw the controls from *all* instances (``pool``). Pairs that
disagree mostly have one answer in common, the one that the default is against, and an unrelated donor from among them
brings that answer too: the matched donor then seems to carry nothing of its own.

Every draw is keyed by the seed and by the item's key, so an item gets the same control in a short run, in a resumed one,
and whichever other items are asked for beside it. Where both directions of a pair are swept together, make the direction a
part of key and group: an item must not get the other presentation of its own instance as unrelated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from patching.donors import Donor, by_layer
from patching.edits import PatchError


def keyed_generator(*parts: object) -> np.random.Generator:
    """A generator that depends on the parts alone, not on how many draws came before."""
    text = "\x1f".join(str(part) for part in parts)
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def norm_matched_random(
    donor: Donor, *, keys: Sequence[str], seed: int, heads: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """A donor of random directions with the given donor's norms.

    Args:
        donor: the donor to match, site by site, in any form that ``patching.donors`` knows.
        keys: the items' keys, in the order of the donor's rows.
        seed: together with key, site, layer and position it fixes the direction.
        heads: the model's head map, needed where the donor holds ``z``: norms are then matched within each head, since
            heads are edited one by one.
    """
    result = {}
    for site, vectors in donor.items():

        def drawn(layer: int, values: Any, position: str, site: str = site) -> Any:
            if len(values) != len(keys):
                raise PatchError(
                    f"{len(keys)} keys for {len(values)} donor rows ({site}, layer {layer}); give one key a row"
                )
            parts = _parts(site, layer, np.shape(values[0])[-1] if len(values) else 0, heads)
            where = (seed, site, layer, *([position] if position else []))
            made = [_random_like(np.asarray(row), parts, *where, key) for row, key in zip(values, keys, strict=True)]
            return np.stack(made) if isinstance(values, np.ndarray) else made

        result[site] = _each(vectors, drawn)
    return result


def _each(vectors: Any, change: Callable[[int, Any, str], Any], position: str = "") -> dict[Any, Any]:
    """A site's vectors with ``change(layer, values, position)`` in place of each layer's, whatever their form."""
    if isinstance(vectors, Mapping) and any(isinstance(name, str) for name in vectors):
        return {name: _each(own, change, name) for name, own in vectors.items()}
    layers = vectors if isinstance(vectors, Mapping) else by_layer(vectors)
    return {layer: change(layer, values, position) for layer, values in layers.items()}


def _parts(site: str, layer: int, width: int, heads: Sequence[int | None] | None) -> int:
    """In how many pieces of its own norm a vector is drawn: its heads for ``z``, else one."""
    if site != "z":
        return 1
    parts = (heads[layer] if heads is not None and layer < len(heads) else None) or 0
    if not parts or width % parts:
        raise PatchError(f"z of layer {layer} has width {width} and {parts or 'no'} heads; pass heads=head_map(model)")
    return parts


def _random_like(values: np.ndarray, parts: int, *where: object) -> np.ndarray:
    """Noise with the norms of one item's ``[width]`` or ``[token, width]``."""
    noise = keyed_generator("norm-matched", *where).standard_normal(values.shape)
    noise = noise.reshape(*values.shape[:-1], parts, -1)
    noise *= np.linalg.norm(values.astype(np.float64).reshape(noise.shape), axis=-1, keepdims=True) / np.linalg.norm(
        noise, axis=-1, keepdims=True
    )
    return noise.reshape(values.shape).astype(np.result_type(values.dtype, np.float32))


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


@dataclass(frozen=True, slots=True)
class Pool:
    """Activations that controls may be drawn from: those of all instances, in any form of a donor, one row a key."""

    donor: Donor
    keys: Sequence[str]
    groups: Sequence[object]
    cells: Sequence[object] | None = None


def unrelated_donor(
    donor: Donor, *, keys: Sequence[str], groups: Sequence[object], seed: int, pool: Pool | None = None
) -> dict[str, Any]:
    """Another item's activation for every item: the donor's rows exchanged by ``derangement``, or a row of the pool.

    A pool row is of the item's group and has another key; which one depends on seed and key.
    """
    given = donor if pool is None else pool.donor
    if pool is None:
        order = derangement(keys, groups, seed=seed)
    else:
        from patching.reference_donors import resample_rows

        order = resample_rows(
            np.arange(len(pool.keys)),
            reference_keys=pool.keys,
            reference_roles=pool.groups,
            keys=keys,
            roles=groups,
            seed=seed,
            name="the pool of unrelated donors",
        )

    def exchanged(layer: int, values: Any, position: str) -> Any:
        return values[order] if isinstance(values, np.ndarray) else [values[row] for row in order]

    return {site: _each(vectors, exchanged) for site, vectors in given.items()}


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
    cells: Sequence[object] | None = None,
    pool: Pool | None = None,
) -> Mapping[str, Donor]:
    """The controls by name, ready to join ``donors=``: ``random``, ``unrelated``, ``own``, and with ``cells``, one an
    item, ``same cell``. ``pool`` holds what the last two are drawn from, without it the donor's own rows."""
    found: dict[str, Donor] = {
        "random": norm_matched_random(donor, keys=keys, seed=seed, heads=heads),
        "unrelated": unrelated_donor(donor, keys=keys, groups=groups, seed=seed, pool=pool),
        "own": own,
    }
    if cells is not None:
        if len(cells) != len(groups):
            raise PatchError(f"{len(cells)} cells but {len(groups)} groups; give one cell an item")
        narrow = pool
        if pool is not None:
            if pool.cells is None:
                raise PatchError("cells were given and the pool has none; give the cell of each row of the pool")
            narrow = replace(pool, groups=list(zip(pool.groups, pool.cells, strict=True)))
        alike = list(zip(groups, cells, strict=True))
        found["same cell"] = unrelated_donor(donor, keys=keys, groups=alike, seed=seed, pool=narrow)
    return found
