"""Plain forward passes: one for each item and cell. The reference the shortcuts are held to, and the last resort.

Nothing is shared and nothing is assumed: the whole prompt runs through the model with the model's own masks, and the
cell is applied in its own sequence. As reference, the scores are read from the logits the model itself returns. With
``batch_tokens=1`` every pair runs in a batch of its own, without any padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from activations.batching import batches, pad
from patching.runs import UNPATCHED, Rows, Runs


def evaluate(runs: Runs, items: Sequence[int], cells: Sequence[int], *, batch_tokens: int) -> Tensor:
    """Answer scores ``[item, 1 + cell, label]`` of one batch of items; column 0 is the unpatched run."""
    pairs = [(item, cell) for item in items for cell in (UNPATCHED, *cells)]
    scores = run_pairs(runs, pairs, batch_tokens=batch_tokens)
    return scores.reshape(len(items), 1 + len(cells), scores.shape[-1])


def run_pairs(runs: Runs, pairs: Sequence[tuple[int, int]], *, batch_tokens: int, reference: bool = False) -> Tensor:
    """Answer scores ``[pair, label]`` of (item, cell) pairs, in the order given; ``reference`` as in ``Runs``."""
    order: list[int] = []
    parts: list[Tensor] = []
    for part in batches(runs.lengths([item for item, _ in pairs]), batch_tokens):
        chosen = [pairs[index] for index in part]
        padded = pad([runs.recipients[item] for item, _ in chosen], runs.model.device, runs.model.pad_id)
        parts.append(runs(padded, Rows.pairs(chosen, padded.input_ids.shape[1]), reference=reference))
        order.extend(part)
    return torch.cat(parts)[torch.argsort(torch.tensor(order))]


def tokens(lengths: Sequence[int], n_cells: int, batch_tokens: int) -> int:
    """Tokens one batch of items puts through the model, pads included."""
    each = [length for length in lengths for _ in range(1 + n_cells)]
    return sum(len(part) * each[part[0]] for part in batches(each, batch_tokens))
