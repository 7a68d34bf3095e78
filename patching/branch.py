"""The branch engine: all cells of an item in one forward pass, as extra tokens behind the prompt.

An edit at the last position changes nothing before it, so running the prompt again for every cell computes the same
prefix again and again. Instead the prompt is run once with ``C`` extra copies of its last token. Each copy, a *branch*,
has the last token's position id and may attend to positions ``0 .. T-2`` and to itself, so it computes exactly what the
last token computes; then cell ``c`` is applied at branch ``c`` alone::

            keys   0  1 … T-2 | T-1 | T+0  T+1  T+2
    T-1  (prompt)  x  x …  x  |  x  |                  the unpatched run, out of the same pass
    T+0  (cell 0)  x  x …  x  |     |  x
    T+1  (cell 1)  x  x …  x  |     |       x
    T+2  (cell 2)  x  x …  x  |     |            x

A sweep over C cells costs (T + C) / T forward passes instead of C. Nothing in it is approximate, under three conditions
which ``plan.py`` looks at and ``check.py`` tests on the actual prompts: positions mix through softmax attention only (a
recurrence would run through the branches one after another), no attention window is shorter than the prompt (the mask
given here replaces the model's own), and the attention implementation reads a 4-D mask (flash attention does not).

The mask is an additive bias, not booleans: torch turns a boolean mask into a bias again in every layer. Its rows are
padded in memory to a multiple of 16 entries, which spares the GPU kernels a copy in every layer, and batches without
pads share one mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from activations.batching import Padded, pad
from patching.runs import UNPATCHED, Rows, Runs

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALIGN = 16


def branch_mask(attention_mask: Tensor, branches: int, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[batch or 1, 1, T + branches, T + branches]`` for left-padded prompts.

    Args:
        attention_mask: ``[batch, T]``, 0 on pads; the last column must be a prompt token in every row.
        branches: number of extra tokens behind each prompt.
        dtype: the model's dtype.
    """
    if bool((attention_mask == 1).all()):
        attention_mask = attention_mask[:1]
    batch, length = attention_mask.shape
    size, device = length + branches, attention_mask.device
    real = attention_mask.bool()
    allow = torch.zeros(batch, size, size, dtype=torch.bool, device=device)
    allow[:, :length, :length] = torch.ones(length, length, dtype=torch.bool, device=device).tril() & real[:, None, :]
    allow[:, length:, : length - 1] = real[:, None, : length - 1]
    allow.diagonal(dim1=-2, dim2=-1).fill_(True)  # pad rows too: a row that may attend to nothing gives NaN
    stored = torch.empty(batch, 1, size, -(-size // _ALIGN) * _ALIGN, dtype=dtype, device=device)
    bias = stored[..., :size]
    bias.zero_().masked_fill_(~allow[:, None], torch.finfo(dtype).min)
    return bias


def chunks(cells: Sequence[int], cell_budget: int) -> list[Sequence[int]]:
    """Cells in as few chunks as the budget allows, nearly equal in size; without cells one empty chunk."""
    count = max(1, -(-len(cells) // cell_budget))
    size = max(1, -(-len(cells) // count))
    return [cells[start : start + size] for start in range(0, len(cells), size)] or [cells]


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, cell_budget: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    model = runs.model
    padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
    length = padded.input_ids.shape[1]
    parts: list[Tensor] = []
    mask: Tensor | None = None
    for part in chunks(cells, cell_budget):
        size = len(part)
        if mask is None or mask.shape[-1] != length + size:
            mask = branch_mask(padded.attention_mask, size, model.dtype)
        extended = Padded(_extend(padded.input_ids, size), mask, _extend(padded.position_ids, size))
        scores = runs(extended, Rows.grid(items, [UNPATCHED, *part], first_slot=length - 1))
        scores = scores.unflatten(0, (len(items), 1 + size))
        parts.append(scores if not parts else scores[:, 1:])
    return torch.cat(parts, dim=1)


def tokens(lengths: Sequence[int], n_cells: int, cell_budget: int) -> int:
    """Tokens one batch puts through the model, pads included."""
    return sum(len(lengths) * (max(lengths) + len(part)) for part in chunks(range(n_cells), cell_budget))


def mask_bytes(batches: Iterable[Sequence[int]], n_cells: int, cell_budget: int, itemsize: int) -> int:
    """Largest mask alive at one time, for these batches of prompt lengths."""
    branches = len(chunks(range(n_cells), cell_budget)[0])
    largest = 0
    for lengths in batches:
        size = max(lengths) + branches
        shared = 1 if min(lengths) == max(lengths) else len(lengths)
        largest = max(largest, shared * size * -(-size // _ALIGN) * _ALIGN * itemsize)
    return largest


def _extend(tensor: Tensor, branches: int) -> Tensor:
    return torch.cat([tensor, tensor[:, -1:].expand(-1, branches)], dim=1)
