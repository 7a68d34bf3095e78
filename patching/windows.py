"""How far back the layers of a model attend, as its configuration says.

An attention window is invisible from outside until a prompt is longer than it. The engines that give the model a mask of
their own have to know it beforehand; what the configuration does not say is found by the checks (``check.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from activations.structure import text_config

if TYPE_CHECKING:
    from activations.model import Model


def windows(model: Model) -> list[int | None]:
    """How many tokens back each layer attends; None is all of them."""
    config = text_config(model.hf_model.config)
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        sliding = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [sliding] * model.n_layers
    by_kind: dict[str, Any] = {"sliding_attention": sliding, "chunked_attention": chunk(model)}
    return [by_kind.get(kind) for kind in kinds]


def chunk(model: Model) -> int | None:
    """The size of attention chunks, where layers attend within chunks: a token sees back to its chunk's beginning."""
    config = text_config(model.hf_model.config)
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "attention_chunk_size", None) if "chunked_attention" in kinds else None
