"""The prefix engine: the prompt but for its last token once, then one token a cell over copies of its cache.

Where branch tokens are not exact (linear attention, a recurrence, an attention window shorter than the prompt), the work
before the last token can still be shared: it is run once with a cache, the cache's rows are repeated, and each repeated
row runs the last token with its own cell. The model applies its own masks and states, so every cache the model itself
can generate with will do.

Constraints. The price in tokens is that of the branch engine, but the cache is held once a row: C cells of an item hold
C copies of its prefix. Cells are therefore cut into chunks whose caches stay within ``CACHE_BYTES``. A forward pass
appends to the cache it is given, so each chunk works on a copy. Rows are repeated with ``reorder_cache``, the one call
that also knows recurrent states (``batch_repeat_interleave`` does not). Every prompt needs two tokens or more, so that
there is a prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from activations.batching import Padded, forward_arguments, pad
from patching.branch import chunks
from patching.runs import UNPATCHED, Rows, Runs

CACHE_BYTES = 2 << 30
"""Most bytes of repeated cache held at one time."""


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, cell_budget: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    model = runs.model
    padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
    cache, keyword = _prefix(runs, padded)
    batch = len(items)
    fitting = max(1, CACHE_BYTES // max(1, _bytes(cache)))
    parts: list[Tensor] = []
    for part in chunks([UNPATCHED, *cells], min(cell_budget + 1, fitting)):
        size = len(part)
        repeat = torch.arange(batch, device=model.device).repeat_interleave(size)
        expanded = copy.deepcopy(cache)
        expanded.reorder_cache(repeat)
        last = Padded(padded.input_ids[repeat, -1:], padded.attention_mask[repeat], padded.position_ids[repeat, -1:])
        arguments = forward_arguments(model.hf_model, last, keep=1) | {"use_cache": True, keyword: expanded}

        def rows_of(tensor: Tensor, size: int = size) -> Tensor:
            return tensor.view(batch, size, tensor.shape[-1])

        parts.append(runs(arguments, rows_of, Rows.grid(items, part, first_slot=0)))
    return torch.cat(parts, dim=1)


def tokens(lengths: Sequence[int], n_cells: int) -> int:
    """Tokens one batch puts through the model, pads included."""
    return len(lengths) * (max(lengths) + n_cells)


@torch.no_grad()
def _prefix(runs: Runs, padded: Padded) -> tuple[Any, str]:
    """The cache of all tokens but the last, and the name of the argument that takes it (it was renamed in 5.24)."""
    before = Padded(*(tensor[:, :-1] for tensor in padded))
    arguments = forward_arguments(runs.model.hf_model, before, keep=1) | {"use_cache": True}
    runs.tokens += before.input_ids.numel()
    output = runs.model.hf_model(**arguments)
    cache = getattr(output, "cache", None)
    return (cache, "cache") if cache is not None else (output.past_key_values, "past_key_values")


def _bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache, whatever its layers call them."""
    return sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
