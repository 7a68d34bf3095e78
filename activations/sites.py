"""Sites: the points of a transformer where activations are read, under TransformerLens names.

Problem. Every model family names its modules differently, and the same tensor goes by several names. A table that says
"layer 12" or "attention output" must mean one tensor.

Mechanism. A site and a layer name one tensor; this module says which module of the model carries it, and whether it is
that module's input or its output. The names of the modules come from the model's discovered structure.

    embed        [d_model]      input of the first block; layer 0 only
    resid_pre    [d_model]      input of a block
    resid_post   [d_model]      output of a block, before any final norm
    attn_out     [d_model]      what the attention (or other mixer) adds to the residual stream
    mlp_out      [d_model]      what the MLP adds to it; resid_pre + attn_out + mlp_out = resid_post
    z            [heads*d_head] input of the mixer's out-projection: the heads side by side

Constraints. `attn_out` and `mlp_out` exist only in layers where two modules were found whose outputs are exactly these
two sums; elsewhere (scaled residuals, for one) asking for them is an error. `z` may have another width in each layer of
a hybrid model. A layer whose heads cannot be told apart still has a `z`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from activations.errors import StoreError

if TYPE_CHECKING:
    from activations.model import Model
    from activations.structure import Structure

SITES = ("embed", "resid_pre", "resid_post", "attn_out", "mlp_out", "z")

Where = tuple[str, int]
"""A site and a layer."""


def carrier(structure: Structure, where: Where) -> tuple[str | None, bool]:
    """The module that carries this tensor, or None if the layer has none; True if it is the module's input."""
    site, layer = where
    if site in ("embed", "resid_pre"):
        return structure.blocks[layer], True
    if site == "z":
        return structure.out_projections[layer], True
    return {"resid_post": structure.blocks, "attn_out": structure.attn_out, "mlp_out": structure.mlp_out}[site][
        layer
    ], False


def choose(model: Model, sites: Sequence[str], layers: Sequence[int] | None) -> dict[Where, int]:
    """The (site, layer) pairs that a plan asks this model for, each with its width.

    Negative layers count from the end. With `layers` None each site is taken in every layer that has it; a layer that
    was named and lacks the site is an error.
    """
    n_layers = len(model.structure.blocks)
    wanted = range(n_layers) if layers is None else [n + n_layers if n < 0 else n for n in layers]
    if bad := ", ".join(str(n) for n in layers or () if not -n_layers <= n < n_layers):
        raise StoreError(
            f"no layer {bad} in {model.name}; it has layers 0 to {n_layers - 1} (negative ones count from the end)"
        )
    chosen: dict[Where, int] = {}
    for site in sites:
        places = [(site, n) for n in ([0] if site == "embed" else sorted(set(wanted)))]
        found = [where for where in places if carrier(model.structure, where)[0] is not None]
        if not found or (layers is not None and len(found) < len(places)):
            has = [n for n in range(n_layers) if carrier(model.structure, (site, n))[0] is not None]
            rest = [name for name in SITES if all(carrier(model.structure, (name, n))[0] is not None for n in wanted)]
            raise StoreError(
                f"{model.name} has no {site} in layers {spans([n for _, n in places if n not in has])}; "
                f"it has {site} in {'layers ' + spans(has) if has else 'no layer'}, and there {', '.join(rest)}"
            )
        chosen.update((where, _width(model, where)) for where in found)
    return chosen


def _width(model: Model, where: Where) -> int:
    if where[0] != "z":
        return model.structure.d_model
    heads, d_head = model.structure.heads[where[1]], model.structure.d_head[where[1]]
    if heads is not None and d_head is not None:
        return heads * d_head
    module: Any = model.module(str(carrier(model.structure, where)[0]))
    base = getattr(module, "base_layer", module)  # under a LoRA wrapper
    return int(base.in_features if hasattr(base, "in_features") else base.weight.shape[0])  # Conv1D keeps [in, out]


def spans(numbers: Iterable[int]) -> str:
    """Write sorted whole numbers briefly: 0-3,7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def by_site(places: Iterable[Where]) -> dict[str, list[int]]:
    """The layers of each site, sorted."""
    sites: dict[str, list[int]] = {}
    for site, layer in sorted(places):
        sites.setdefault(site, []).append(layer)
    return sites


def describe(places: Iterable[Where]) -> str:
    """For messages: resid_post layers 0-27, z layers 3,7."""
    return ", ".join(f"{site} layers {spans(layers)}" for site, layers in by_site(places).items())


def dataset_path(where: Where) -> str:
    """Where a tensor lies inside a shard: acts/resid_post/L12."""
    site, layer = where
    return f"acts/{site}/L{layer}"
