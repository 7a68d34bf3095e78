"""The prefix engine: the prompt but for its last token once, then all cells as extra tokens over that one cache.

Where branch tokens behind the prompt are not exact (a window shorter than the prompt, a recurrence), or where they would
pay for the prompt again and again (more cells than the budget), the work before the last token is run once with a cache.
Then every cell is one more copy of the last token, all of them in one sequence. Under a 4-D mask each sees the cached
tokens that the last token would see, and itself::

            keys   cached tokens      copies
    copy 0         x  x  x …  x  |  x
    copy 1         x  x  x …  x  |     x
    copy 2         x  x  x …  x  |        x

Keys and values are held once for all cells of an item, whatever their number. Two kinds of layers need care:

- *windows*: the mask is made for each kind of layer from the window and from how many tokens its cache kept, and given to
  the model by the layers' own names for their kinds;
- *linear attention and recurrences*: copies must not run through the state one after another. Around such a mixer the
  sequence of copies becomes a batch of single tokens, each with its own copy of the state. States do not grow with the
  prompt, so this is the small part; cells are cut into chunks whose states stay within ``CACHE_BYTES``.

A forward pass appends to the cache it is given. Each chunk works on shallow copies of the cache's layers, whose tensors
are replaced and not written to; states, which are written to, are copied. Every prompt needs two tokens or more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from activations.batching import Padded, forward_arguments, pad
from activations.structure import first, hidden_argument, hooks, replace_hidden, text_config
from patching.branch import chunks
from patching.runs import UNPATCHED, Rows, Runs
from patching.windows import windows
from patching.writing import with_hidden

CACHE_BYTES = 2 << 30
"""Most bytes of repeated states or caches held at one time."""


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, cell_budget: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    model = runs.model
    padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
    cache, keyword = prefix_cache(runs, padded)
    states = sum(nbytes(layer) for layer in cache.layers if _is_recurrent(layer))
    fitting = max(1, CACHE_BYTES // max(1, states))
    parts: list[Tensor] = []
    for part in chunks([UNPATCHED, *cells], min(cell_budget + 1, fitting)):
        size = len(part)
        last = Padded(
            padded.input_ids[:, -1:].expand(-1, size),
            copies_mask(runs, padded, cache, size),  # type: ignore[arg-type]
            padded.position_ids[:, -1:].expand(-1, size),
        )
        mine = _forked(cache, len(items), size)
        handles: list[Any] = []
        with hooks(handles):
            _unroll(handles, runs, (len(items), size))
            scores = runs(last, Rows.grid(items, part, first_slot=0), extra={"use_cache": True, keyword: mine})
        parts.append(scores.unflatten(0, (len(items), size)))
    return torch.cat(parts, dim=1)


def tokens(lengths: Sequence[int], n_cells: int) -> int:
    """Tokens one batch puts through the model, pads included."""
    return len(lengths) * (max(lengths) + n_cells)


@torch.no_grad()
def prefix_cache(runs: Runs, padded: Padded) -> tuple[Any, str]:
    """The cache of all tokens but the last, and the name of the argument that takes it (it was renamed in 5.24)."""
    before = Padded(*(tensor[:, :-1] for tensor in padded))
    arguments = forward_arguments(runs.network, before, keep=1) | {"use_cache": True}
    runs.tokens += before.input_ids.numel()
    output = runs.network(**arguments)
    cache = getattr(output, "cache", None)
    return (cache, "cache") if cache is not None else (output.past_key_values, "past_key_values")


def copies_mask(runs: Runs, padded: Padded, cache: Any, size: int) -> Tensor | dict[str, Tensor | None]:
    """Additive masks ``[item, 1, copy, cached + copy]``: one where all layers see the same, else one a kind of layer."""
    model = runs.model
    kinds = getattr(text_config(model.hf_model.config), "layer_types", None) or ["full_attention"] * model.n_layers
    made: dict[str, tuple[int, int | None]] = {}
    held = [getattr(layer, "keys", None) for layer in cache.layers]
    for layer, (kind, window) in enumerate(zip(kinds, windows(model), strict=True)):
        keys = held[layer] if layer < len(held) else None
        if model.structure.attention[layer] == "softmax" and keys is not None and kind not in made:
            made[kind] = keys.shape[-2], window
    masks = {kind: _mask(padded.attention_mask, *sizes, size, model.dtype) for kind, sizes in made.items()}
    values = list(masks.values())
    if all(torch.equal(mask, values[0]) for mask in values[1:]):
        return values[0] if values else padded.attention_mask
    return {kind: masks.get(kind) for kind in kinds}


def _mask(attention_mask: Tensor, held: int, window: int | None, size: int, dtype: torch.dtype) -> Tensor:
    """The mask of a layer whose cache kept the last ``held`` tokens of the prefix and that sees ``window`` tokens."""
    prefix = attention_mask[:, :-1]
    seen = prefix[:, prefix.shape[1] - held :].bool()
    if window is not None and held > window - 1:
        seen = seen.clone()
        seen[:, : held - window + 1] = False
    batch, device = len(seen), attention_mask.device
    own = torch.eye(size, dtype=torch.bool, device=device).expand(batch, -1, -1)
    allow = torch.cat([seen[:, None].expand(-1, size, -1), own], dim=-1)
    bias = torch.zeros(batch, 1, size, held + size, dtype=dtype, device=device)
    return bias.masked_fill_(~allow[:, None], torch.finfo(dtype).min)


def _forked(cache: Any, batch: int, size: int) -> Any:
    """A cache that a pass may append to: keys and values shared with the given one, states repeated for each copy."""
    mine = copy.copy(cache)
    mine.layers = []
    for layer in cache.layers:
        if _is_recurrent(layer):
            fork = copy.deepcopy(layer)
            fork.reorder_cache(torch.arange(batch, device=fork.device).repeat_interleave(size))
        else:
            fork = copy.copy(layer)
        mine.layers.append(fork)
    return mine


def _is_recurrent(layer: Any) -> bool:
    return getattr(layer, "recurrent_states", None) is not None or getattr(layer, "conv_states", None) is not None


def _unroll(handles: list[Any], runs: Runs, shape: tuple[int, int]) -> None:
    """Around mixers with a state, turn ``[item, copy, width]`` into ``[item * copy, 1, width]`` and back."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = hidden_argument(args, kwargs)
        return replace_hidden(args, kwargs, hidden.reshape(shape[0] * shape[1], 1, -1))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return with_hidden(output, first(output).reshape(*shape, -1))

    structure = runs.model.structure
    for kind, out in zip(structure.attention, structure.out_projections, strict=True):
        if kind != "softmax" and out is not None:
            mixer = runs.model.module(out.rpartition(".")[0])
            handles.append(mixer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(mixer.register_forward_hook(leave))


def nbytes(layer: Any) -> int:
    """Bytes of all tensors in a cache layer, whatever it calls them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
