"""nnsight: its TransformersModel around a copy of the network.

nnsight keeps the network's own module tree and reads `module.input` and `module.output` inside a trace, so this package's
discovered names serve as they are, adapters included. Tensors must be read in the order in which the forward pass makes
them (its OutOfOrderError otherwise), and which part of a block runs first differs between models. So the order is taken
from one watched pass of a short prompt through the same network.

The body of a trace is taken from this file's source by nnsight, and cannot run where the source is not on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations.backends.common import Base, copies, picked, unpadded
from activations.errors import ModelError, one_line
from activations.sites import Tap, taps
from activations.watch import first, hooks, plain_forward

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sites import Where


@contextmanager
def opened(model: Model) -> Iterator[Traced]:
    """A session on a traced copy, or ModelError with the reason why there is none."""
    session = Traced(model)
    try:
        yield session
    finally:
        session.close()


class Traced(Base):
    """Runs through ``TransformersModel.trace``."""

    name = "nnsight"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        from nnsight.modeling.transformers import TransformersModel

        self.network, tokenizer = copies(model)
        try:
            self.traced: Any = TransformersModel(self.network, tokenizer=tokenizer)
        except Exception as error:  # the library raises what it likes for a network it does not know
            raise ModelError(
                f"nnsight cannot take {type(model.hf_model).__name__} ({one_line(error, 120)}); use backend hf"
            ) from error

    def close(self) -> None:
        """Let the copy go."""
        self.traced = self.network = None

    def forward(
        self, prompts: Sequence[Prompt], places: Sequence[Where], columns: Sequence[Sequence[int]], logits: bool
    ) -> tuple[dict[Where, Tensor], Tensor | None]:
        """Prompts of one length, unpadded."""
        import nnsight

        ids, mask = unpadded(self.model, prompts)
        inputs = {"input_ids": ids, "attention_mask": mask}
        wanted = list(dict.fromkeys(tap for where in places for tap in taps(self.model, where)))
        order = self._ordered(wanted)
        envoys = [(_envoy(self.traced, name), is_input) for name, is_input in order]
        with torch.no_grad(), self.traced.trace(inputs, use_cache=False):
            seen = nnsight.save([_at(envoy, is_input, columns) for envoy, is_input in envoys])
            scores = nnsight.save(picked(self.traced.output.logits, columns) if logits else None)
        found = dict(zip(order, seen, strict=True))
        kept = {where: torch.stack([found[tap] for tap in taps(self.model, where)]).sum(0) for where in places}
        return kept, scores

    def _ordered(self, wanted: list[Tap]) -> list[Tap]:
        """The taps in the order in which a forward pass reaches them."""
        order: list[Tap] = []

        def reach(tap: Tap) -> Any:
            return lambda *_: order.append(tap)

        handles: list[Any] = []
        with hooks(handles), torch.inference_mode():
            for name, is_input in wanted:
                module = self.network.get_submodule(name)
                register = module.register_forward_pre_hook if is_input else module.register_forward_hook
                handles.append(register(reach((name, is_input))))
            plain_forward(self.network, torch.tensor([[0, 1]], device=self.model.device))
        return list(dict.fromkeys(order))


def _at(envoy: Any, is_input: bool, columns: Sequence[Sequence[int]]) -> Tensor:
    return picked(envoy.input if is_input else first(envoy.output), columns)


def _envoy(traced: Any, name: str) -> Any:
    place = traced
    for part in name.split("."):
        place = place[int(part)] if part.isdigit() else getattr(place, part)
    return place
