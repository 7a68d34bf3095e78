"""Edited forward passes written by hand: the network's own modules by name, one unpadded prompt, one pass a cell.

Nothing here is taken from the library: neither the discovered structure nor its hooks, masks or scores. The names are
written down model by model, and ``resid_mid`` is reached by another way than the library's, through what attention adds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Names(NamedTuple):
    """Where a model keeps things, below a block: out-projection, what attention and MLP add (None: not as they are)."""

    blocks: str = "model.layers"
    out: str = "self_attn.o_proj"
    attn: str | None = "self_attn"
    mlp: str | None = "mlp"
    middle: str | None = "self_attn"
    """The module whose output, times ``factor``, is added to make resid_mid; None in parallel blocks."""
    factor: float = 1.0


_SANDWICH = Names(attn="post_attention_layernorm", mlp="post_feedforward_layernorm", middle="post_attention_layernorm")
NAMES = {
    "llama": Names(),
    "qwen3": Names(),
    "gpt2": Names("transformer.h", "attn.c_proj", "attn", "mlp", "attn"),
    "gemma2": _SANDWICH,
    "neox": Names("gpt_neox.layers", "attention.dense", "attention", "mlp", None),
    "moe": Names(),
    "hybrid": Names(),
    "granite": Names(attn=None, mlp=None, factor=0.5),
    "cohere": Names(middle=None),
    "mistral": Names(),
    "qwen2": Names(),
    "qwen3_next": Names(),
    "gemma3": _SANDWICH,
    "gemma4": _SANDWICH,
    "gpt_oss": Names(),
    "olmo2": _SANDWICH,
    "phi3": Names(),
    "falcon": Names("transformer.h", "self_attention.dense", "self_attention", "mlp", None),
}


def site_names(name: str) -> tuple[str, ...]:
    """The sites this model has."""
    names = NAMES[name]
    present = {"resid_mid": names.middle, "attn_out": names.attn, "mlp_out": names.mlp}
    return tuple(
        site
        for site in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")
        if present.get(site, "there") is not None
    )


class HandEdit(NamedTuple):
    """``change`` maps the old vectors ``[token, width]`` at these tokens (of one head, if given) to the new ones."""

    site: str
    layer: int
    tokens: list[int]
    change: object
    head: tuple[int, int] | None = None
    """First and last feature of the head."""


def run(hf_model, name: str, ids, edits: list[HandEdit]) -> torch.Tensor:
    """Logits ``[vocabulary]`` of the last token."""
    names, handles = NAMES[name], []
    for edit in edits:
        block = hf_model.get_submodule(f"{names.blocks}.{edit.layer}")
        handles += _hook(block, names, edit)
    try:
        with torch.no_grad():
            return hf_model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()


def _hook(block, names: Names, edit: HandEdit):
    first, last = edit.head or (0, None)

    def changed(hidden):
        hidden = hidden.clone()
        hidden[0, edit.tokens, first:last] = edit.change(hidden[0, edit.tokens, first:last])
        return hidden

    def output(module, args, result):
        if isinstance(result, tuple):
            return (changed(result[0]), *result[1:])
        return changed(result)

    def argument(module, args, kwargs):
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"])}

    def below(path):
        # hybrid blocks call their mixer one thing or the other
        if not hasattr(block, path.partition(".")[0]):
            path = path.replace("self_attn", "linear_attn").replace("o_proj", "out_proj")
        return block.get_submodule(path)

    if edit.site == "resid_pre":
        return [block.register_forward_pre_hook(argument, with_kwargs=True)]
    if edit.site == "resid_post":
        return [block.register_forward_hook(output)]
    if edit.site == "z":
        return [below(names.out).register_forward_pre_hook(argument, with_kwargs=True)]
    if edit.site in ("attn_out", "mlp_out"):
        return [below(names.attn if edit.site == "attn_out" else names.mlp).register_forward_hook(output)]
    stream = []

    def enter(module, args, kwargs):
        stream[:] = [(args[0] if args else kwargs["hidden_states"]).clone()]

    def middle(module, args, result):
        part = result[0] if isinstance(result, tuple) else result
        wanted = changed(stream[0] + names.factor * part)
        part = (wanted - stream[0]) / names.factor
        return (part, *result[1:]) if isinstance(result, tuple) else part

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True),
        below(names.middle).register_forward_hook(middle),
    ]
