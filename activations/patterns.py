"""Attention probabilities, for the layers that are asked for.

Problem. Fused attention (sdpa, flash) never makes the probabilities. Switching a whole model to eager attention for a
few layers' patterns costs memory and time everywhere and changes rounding in every layer, and code that sets the
implementation on the caller's configuration leaves the model changed.

Mechanism. Within ``eager(model, layers)`` the mixers of these layers, and no others, read a copy of the configuration
that says `eager`. They then return the probabilities as their second output, softcap and sinks included, by the model's
own code. Masks are made once for the whole model, in the form that its own attention takes; on the way into an eager
mixer the mask is put into the form that eager attention adds to the scores. On the way out, also by an exception, each
mixer gets its own configuration object back; the model's configuration is never written to.

Constraints. Rounding differs between fused and eager attention, so a layer asked for its pattern, and those behind it,
agree with a plain run to rounding and not bit for bit. Rows sum to 1, except where the model keeps a share aside
(attention sinks). A mixer whose code has no eager form is refused with the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.errors import ModelError
from activations.sites import Where, taps
from activations.structure import FULL, hooks

if TYPE_CHECKING:
    from activations.model import Model


@contextmanager
def eager(model: Model, layers: Sequence[int]) -> Iterator[None]:
    """Within the block the softmax mixers of these layers compute eager attention; all else stays as it is."""
    handles: list[Any] = []
    changed: list[tuple[Any, Any]] = []
    try:
        with hooks(handles):
            for layer in layers:
                mixer: Any = model.module(taps(model, ("pattern", layer))[0][0])
                own = getattr(mixer, "config", None)
                if own is None:
                    raise ModelError(
                        f"the attention of layer {layer} of {model.name!r} ({type(mixer).__name__}) keeps no "
                        "configuration to switch to eager attention by; leave pattern out"
                    )
                if own._attn_implementation != "eager":
                    other = copy.deepcopy(own)
                    other._attn_implementation = "eager"
                    changed.append((mixer, own))
                    mixer.config = other
                    handles.append(mixer.register_forward_pre_hook(_additive_mask, with_kwargs=True))
            yield
    finally:
        for mixer, own in changed:
            mixer.config = own


def _additive_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    hidden = args[0] if args else kwargs["hidden_states"]
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    place = parameters.index("attention_mask") if "attention_mask" in parameters else len(args)
    given = args[place] if place < len(args) else kwargs.get("attention_mask")
    mask = _additive(given, hidden, getattr(module, "sliding_window", None))
    if place < len(args):
        return (*args[:place], mask, *args[place + 1 :]), kwargs
    return args, {**kwargs, "attention_mask": mask}


def _additive(mask: Any, hidden: Tensor, window: int | None) -> Tensor:
    """The mask as what eager attention adds to its scores: 0 where a key is read, the smallest number elsewhere."""
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype != torch.bool:
        return mask
    if isinstance(mask, Tensor) and mask.ndim == 4:
        seen = mask
    elif mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        size = hidden.shape[1]
        ages = torch.arange(size, device=hidden.device)[:, None] - torch.arange(size, device=hidden.device)[None]
        seen = (ages >= 0)[None, None]
        if window:
            seen = seen & (ages < window)
        if mask is not None:
            seen = seen & mask.bool()[:, None, None]
    else:
        raise ModelError(
            f"attention masks of kind {type(mask).__name__} have no eager form here; load the model with "
            "attn_implementation='sdpa', or leave pattern out"
        )
    smallest = torch.finfo(hidden.dtype).min
    return torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device).masked_fill_(~seen, smallest)


def probabilities(output: Any, heads: int, where: Where) -> Tensor:
    """The probabilities [row, head, query, key] in what a mixer returned."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    for part in parts[1:]:
        if isinstance(part, Tensor) and part.ndim == 4 and part.shape[1] == heads and part.shape[2] == part.shape[3]:
            return part
    raise ModelError(
        f"the attention of layer {where[1]} returns no probabilities for its {heads} heads, also when it is eager; "
        "leave pattern out for this model"
    )


def check_rows(model: Model, where: Where, rows: np.ndarray, heads: int) -> None:
    """Refuse rows that are no probabilities: each head's sum to 1, or to less where the model has attention sinks."""
    mixer: nn.Module = model.module(taps(model, where)[0][0])
    sums = rows.reshape(len(rows), heads, -1).sum(axis=-1, dtype=np.float64)
    slack = 1e-4 if model.dtype in FULL else 2e-2
    low = 0.0 if hasattr(mixer, "sinks") else 1.0
    worst = float(max(sums.max() - 1.0, low - sums.min()))
    if not worst <= slack and np.isfinite(worst):  # what is not finite is named by the store
        raise ModelError(
            f"pattern layer {where[1]} of {model.name!r} is not made of probabilities: a head's row sums to "
            f"{float(sums.flat[np.abs(sums - 1).argmax()]):.4g}; leave pattern out for this model"
        )
