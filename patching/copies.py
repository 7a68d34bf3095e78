"""The copies engine: the prompt but for its last token once, then one token a cell over copies of its cache.

The last way to share the work before the last token, for models that take no mask of ours (flash attention, positions
made from the mask) or whose cache the prefix engine cannot hold. The cache's rows are repeated, and each repeated row runs
the last token with its own cell. The model applies its own masks and states, so every cache the model itself can generate
with will do.

Constraints. The price in tokens is that of the prefix engine, but C cells of an item hold C copies of its prefix. Cells
are therefore cut into chunks whose caches stay within ``CACHE_BYTES``. A forward pass appends to the cache it is given, so
each chunk works on a copy. Rows are repeated with ``reorder_cache``, the one call that also knows recurrent states
(``batch_repeat_interleave`` does not). Every prompt needs two tokens or more, so that there is a prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from activations.batching import Padded, pad
from patching.branch import chunks
from patching.prefix import CACHE_BYTES, nbytes, prefix_cache
from patching.runs import UNPATCHED, Rows, Runs


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, cell_budget: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    model = runs.model
    padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
    cache, keyword = prefix_cache(runs, padded)
    batch = len(items)
    fitting = max(1, CACHE_BYTES // max(1, sum(nbytes(layer) for layer in cache.layers)))
    parts: list[Tensor] = []
    for part in chunks([UNPATCHED, *cells], min(cell_budget + 1, fitting)):
        size = len(part)
        repeat = torch.arange(batch, device=model.device).repeat_interleave(size)
        expanded = copy.deepcopy(cache)
        expanded.reorder_cache(repeat)
        last = Padded(padded.input_ids[repeat, -1:], padded.attention_mask[repeat], padded.position_ids[repeat, -1:])
        rows = Rows(
            batch=np.arange(batch * size),
            slot=np.zeros(batch * size, dtype=np.int64),
            item=np.repeat(np.asarray(items, dtype=np.int64), size),
            cell=np.tile(np.asarray(part, dtype=np.int64), batch),
            shape=(batch * size, 1),
        )
        scores = runs(last, rows, extra={"use_cache": True, keyword: expanded})
        parts.append(scores.unflatten(0, (batch, size)))
    return torch.cat(parts, dim=1)
