"""Batches of prompts, and the padding that goes with them.

Padding is where interpretability numbers go silently wrong: a padded tensor without a mask attends to its pads, and a
model with learned positions (GPT-2) reads shifted positions even with one. So nothing in this package runs a forward
pass without an explicit attention mask *and* position ids derived from that mask. Left padding is the default: the
answer position is then the last column of every row.

Batches are cut by padded size, not by count: prompts are sorted by length, so that a batch holds near-equal lengths
and little of the work is spent on pads. The composition depends on the lengths and the budget alone, which makes a
resumed run form the very same batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from activations.prompts import Prompt


class Padded(NamedTuple):
    """Three ``[row, column]`` tensors: the arguments every forward pass is given."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor


def batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Split row numbers into batches of at most ``batch_tokens`` padded tokens.

    Longest prompts come first, so that memory peaks at once and not after an hour. Ties keep the order given. A single
    prompt longer than the budget is its own batch.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens is {batch_tokens}; give a positive number of tokens, for example 8192")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    result: list[list[int]] = []
    for row in order:
        if result and (len(result[-1]) + 1) * lengths[result[-1][0]] <= batch_tokens:
            result[-1].append(row)
        else:
            result.append([row])
    return result


def pad(
    prompts: Sequence[Prompt | Sequence[int]],
    device: torch.device | str,
    pad_id: int,
    side: Literal["left", "right"] = "left",
) -> Padded:
    """Stack prompts (or bare id sequences) into ids, mask and position ids, ``cumsum(mask) - 1`` and at least 0."""
    import torch

    if side not in ("left", "right"):
        raise ValueError(f"padding side is {side!r}; use 'left' or 'right'")
    rows = [tuple(prompt if isinstance(prompt, Sequence) else prompt.ids) for prompt in prompts]
    if not rows or not all(rows):
        raise ValueError(f"cannot pad {len(rows)} prompts of lengths {[len(row) for row in rows]}; each needs a token")
    width = max(len(row) for row in rows)
    # One tensor from one nested list: a tensor a row costs more than the rest of a small batch.
    fill = [(pad_id,) * (width - len(row)) for row in rows]
    left = side == "left"
    ids = torch.tensor([blank + row if left else row + blank for blank, row in zip(fill, rows, strict=True)])
    lengths, columns = torch.tensor([[len(row)] for row in rows]), torch.arange(width)[None]
    mask = (columns >= width - lengths if left else columns < lengths).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if torch.device(device).type == "cuda":  # a copy from pinned memory does not wait for the batch that runs
        ids, mask, positions = (tensor.pin_memory() for tensor in (ids, mask, positions))
    return Padded(*(tensor.to(device, non_blocking=True) for tensor in (ids, mask, positions)))


def forward_arguments(hf_model: Any, padded: Padded, *, keep: int | None = None) -> dict[str, Any]:
    """Keyword arguments for ``hf_model(...)``: ids, mask, positions, no cache, logits of the last ``keep`` columns.

    Models that derive positions from the mask by themselves (ALiBi) take no ``position_ids`` and are given none.
    """
    accepted = inspect.signature(type(hf_model).forward).parameters
    arguments: dict[str, Any] = {
        "input_ids": padded.input_ids,
        "attention_mask": padded.attention_mask,
        "use_cache": False,
    }
    if "position_ids" in accepted or "kwargs" in accepted:
        arguments["position_ids"] = padded.position_ids
    if keep is not None and "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = keep
    return arguments
