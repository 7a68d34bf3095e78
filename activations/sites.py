"""Sites: the points of a transformer where activations are read, under TransformerLens names.

Problem. Every model family names its modules differently, and the same tensor goes by several names. A table that says
"layer 12" or "attention output" must mean one tensor.

Mechanism. A site and a layer name one tensor; this module says which module of the model carries it, and whether it is
that module's input or its output. The names of the modules come from the model's discovered structure.

    embed        [d_model]      input of the first block; layer 0 only
    resid_pre    [d_model]      input of a block
    resid_mid    [d_model]      resid_pre + attn_out, which the MLP's output is added to; not in parallel blocks
    resid_post   [d_model]      output of a block, before any final norm
    attn_out     [d_model]      what the attention (or other mixer) adds to the residual stream
    mlp_out      [d_model]      what the MLP adds to it; resid_pre + attn_out + mlp_out = resid_post
    z            [heads*d_head] input of the mixer's out-projection: the heads side by side
    pattern      [heads*keys]   attention probabilities of a softmax layer, heads side by side, from eager attention

TransformerLens spellings are read too: ``hook_resid_post`` is the site, ``blocks.3.hook_resid_post`` the site in one
layer, ``blocks.3.attn.hook_z`` likewise.

Constraints. `attn_out` and `mlp_out` exist only in layers where two modules were found whose outputs are exactly these
two sums; elsewhere (scaled residuals, for one) asking for them is an error. `z` may have another width in each layer of
a hybrid model. A layer whose heads cannot be told apart still has a `z` but no `pattern`. TransformerLens' `hook_embed`
leaves learned positions out, so it is no name for `embed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from activations.errors import StoreError

if TYPE_CHECKING:
    from activations.model import Model

SITES = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "pattern")

Where = tuple[str, int]
"""A site and a layer."""
Tap = tuple[str, bool]
"""A module, and whether its input (True) or its output is meant."""

_ALIASES = {f"hook_{site}": site for site in SITES[1:]} | {
    "attn.hook_z": "z",
    "attn.hook_pattern": "pattern",
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
}


def named(text: str) -> tuple[str, int | None]:
    """The site that a name means, and the layer where the name holds one; StoreError for an unknown name."""
    match = re.fullmatch(r"blocks\.(-?\d+)\.(.+)", text)
    layer, rest = (int(match[1]), match[2]) if match else (None, text)
    if rest in SITES and (match is None or rest != "embed"):
        return rest, layer
    if rest in _ALIASES:
        return _ALIASES[rest], layer
    if rest == "hook_embed":
        raise StoreError("hook_embed leaves learned positions out; use embed, the input of the first block")
    near = get_close_matches(rest, (*SITES, *_ALIASES), 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise StoreError(
        f"unknown site {text!r}; allowed: {', '.join(SITES)}, and TransformerLens names like "
        f"blocks.3.hook_resid_post{meant}"
    )


def canonical(text: str) -> str:
    """The one way to write a site in a plan: ``z``, or ``blocks.3.z`` where the name holds a layer."""
    site, layer = named(text)
    return site if layer is None else f"blocks.{layer}.{site}"


def taps(model: Model, where: Where) -> tuple[Tap, ...]:
    """The module that carries this tensor, as a tuple of one; of two where it is their sum; () if the layer has none.

    For `pattern` it is the mixer whose second output the probabilities are.
    """
    site, layer = where
    structure = model.structure
    if site in ("embed", "resid_pre"):
        return ((structure.blocks[layer], True),)
    if site == "resid_mid":
        from activations.middle import middles

        return middles(model)[layer]
    if site == "pattern":
        out = structure.out_projections[layer]
        softmax = structure.attention[layer] == "softmax" and structure.heads[layer]
        return ((out.rpartition(".")[0], False),) if out and softmax else ()
    parts = {
        "resid_post": structure.blocks,
        "attn_out": structure.attn_out,
        "mlp_out": structure.mlp_out,
        "z": structure.out_projections,
    }
    name = parts[site][layer]
    return () if name is None else ((name, site == "z"),)


_WHY_ABSENT = {
    "resid_mid": "attention and MLP of its blocks read the same residual stream (parallel blocks), or were not found",
    "attn_out": "no pair of its modules adds up to what a block adds to the residual stream",
    "mlp_out": "no pair of its modules adds up to what a block adds to the residual stream",
    "z": "no projection from a mixer back to the residual stream was found",
    "pattern": "its mixer is no softmax attention, or its heads cannot be told apart",
}


def choose(
    model: Model, sites: Sequence[str], layers: Sequence[int] | None, *, keys: int | None = None
) -> dict[Where, int]:
    """The (site, layer) pairs that a plan asks this model for, each with its width.

    Negative layers count from the end. With `layers` None each site is taken in every layer that has it; a layer that
    was named and lacks the site is an error. `keys` is the number of key positions of a `pattern` row.
    """
    n_layers = len(model.structure.blocks)
    chosen: dict[Where, int] = {}
    for text in sites:
        site, pinned = named(text)
        given = layers if pinned is None else (pinned,)
        if bad := sorted({n for n in given or () if not -n_layers <= n < n_layers}):
            raise StoreError(
                f"no layer {spans(bad)} in {model.name}; it has layers 0 to {n_layers - 1} "
                "(negative ones count from the end)"
            )
        wanted = range(n_layers) if given is None else [n + n_layers if n < 0 else n for n in given]
        places = [(site, n) for n in ([0] if site == "embed" else sorted(set(wanted)))]
        found = [where for where in places if taps(model, where)]
        if not found or (given is not None and len(found) < len(places)):
            has = [n for n in range(n_layers) if taps(model, (site, n))]
            rest = [name for name in SITES if all(taps(model, (name, n)) for n in wanted)]
            raise StoreError(
                f"{model.name} has no {site} in layers {spans([n for _, n in places if n not in has])}; "
                f"it has {site} in {'layers ' + spans(has) if has else 'no layer'}, and there {', '.join(rest)}: "
                f"{_WHY_ABSENT.get(site, 'the block was not found')}"
            )
        chosen.update((where, _width(model, where, keys)) for where in found)
    return chosen


def _width(model: Model, where: Where, keys: int | None) -> int:
    site, layer = where
    if site not in ("z", "pattern"):
        return model.structure.d_model
    heads, d_head = model.structure.heads[layer], model.structure.d_head[layer]
    if site == "pattern":
        if keys is None:
            raise StoreError("the width of pattern depends on the prompts; give their longest length as keys")
        return int(heads or 0) * keys
    if heads is not None and d_head is not None:
        return heads * d_head
    module: Any = model.module(taps(model, where)[0][0])
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
