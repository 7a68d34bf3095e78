"""A batch of a capture through another library, in the form in which our own hooks give one.

The library is asked for every token that a row is made of, and for the answer position; means are taken here, and the
readout is made from the library's own logits. So a store written through TransformerLens or nnsight differs from ours
by nothing but who ran the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from activations.positions import Spot
from activations.prompts import Prompt
from activations.readout import AnswerTokens, from_logits
from activations.sites import Where
from activations.taps import Batch, Group

if TYPE_CHECKING:
    from activations.backends import Session


@torch.inference_mode()
def run_through(
    session: Session,
    prompts: Sequence[Prompt],
    places: Mapping[Where, int],
    positions: Sequence[Sequence[Spot]],
    answers: AnswerTokens | None,
    dtype: torch.dtype,
) -> Batch:
    """The same rows as :func:`activations.taps.run_batch` gives, in an open session of another backend."""
    columns = [
        [*(token for spot in own for token in spot.tokens), prompt.answer]
        for own, prompt in zip(positions, prompts, strict=True)
    ]
    rows = session.run(prompts, places, logits=answers is not None, columns=columns)
    cuts: list[slice] = []
    ends: list[int] = []
    start = 0
    for own in positions:
        for spot in own:
            cuts.append(slice(start, start + len(spot.tokens)))
            start += len(spot.tokens)
        ends.append(start)
        start += 1
    wide = torch.promote_types(dtype, torch.float32)
    buffers: dict[Group, torch.Tensor] = {
        (where,): torch.stack([rows.activations[where][cut].to(wide).mean(0) for cut in cuts]).to(dtype).cpu()[None]
        for where in places
    }
    readout = None
    if answers is not None and rows.logits is not None:
        made = from_logits(rows.logits[ends], answers)
        readout = {name: getattr(made, name).cpu() for name in ("logit", "logsumexp", "top")}
    return Batch(buffers, readout)
