"""Our own hooks on the caller's own network: the backend that a capture uses unless told otherwise.

The hooks are those of :mod:`activations.taps`, which captures run too, so that a comparison with another library is about
the rows that reach a store. Prompts run in one left-padded batch with explicit mask and positions; here the unembedding
runs as well, because logits are compared. Hooks are gone after each run, also when an exception passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from activations.backends.common import Base, picked
from activations.batching import forward_arguments, pad
from activations.positions import Spot
from activations.sites import choose
from activations.taps import tapped

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sites import Where


@contextmanager
def opened(model: Model) -> Iterator[Hooked]:
    """A session on the model itself."""
    yield Hooked(model)


class Hooked(Base):
    """Native forward hooks."""

    name = "hf"

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """One batch."""
        yield list(range(len(prompts)))

    def forward(
        self, prompts: Sequence[Prompt], places: Sequence[Where], columns: Sequence[Sequence[int]], logits: bool
    ) -> tuple[dict[Where, Tensor], Tensor | None]:
        """A padded batch. Columns of logits are counted from the end, where prompts of all lengths are aligned.

        Asked for the last logits only, some networks (Gemma 4) run their last layers on the last token alone; that
        token is still -1.
        """
        model = self.model
        spots = [[Spot("", column, (column,)) for column in one] for one in columns]
        ends = [[column - len(prompt.ids) for column in one] for prompt, one in zip(prompts, columns, strict=True)]
        answer_only = all(one == [-1] for one in ends)
        arguments = forward_arguments(
            model.hf_model, pad(prompts, model.device, model.pad_id), keep=1 if answer_only else None
        )
        wanted = {where: size for site, layer in places for where, size in choose(model, [site], [layer]).items()}
        with tapped(model, wanted, len(prompts), model.dtype, spots, prompts) as buffers:
            out = model.hf_model(**arguments).logits
        kept = {where: buffer[n] for group, buffer in buffers.items() for n, where in enumerate(group)}
        return kept, picked(out, ends) if logits else None
