"""One forward pass of a batch, with the wanted rows copied out of it.

Problem. A hook that returns a value silently replaces what it watched; a hook left behind watches for ever; whole
sequences of every layer are hundreds of times what a plan asks for; and a batch that does not fit in memory should cost
a retry and not the run.

Mechanism. Hooks belong to a context manager. Each copies the wanted tokens of one tensor into its row of a buffer
[place, row, width] on the model's device (from whichever device the layer lives on) and returns nothing. Prompts are
padded on the left, so token n of a prompt stands at column n + padding (see `picking`).

On a GPU one buffer on the device serves all batches, and two pinned ones on the host take turns: the copy runs while
the next batch is computed, and the other is being written to the disk. On a CPU the hooks write into the host's two.
So memory depends on the largest batch and not on the length of the run.

A batch that runs out of memory is cut in two and run again, and later batches are cut to the size that worked. The rows
are the same to rounding; what a store's shards hold does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.batching import forward_arguments, pad
from activations.errors import ModelError
from activations.patterns import check_rows, eager, probabilities
from activations.picking import Pick
from activations.positions import ANSWER, Spot
from activations.prompts import Prompt
from activations.readout import AnswerTokens
from activations.sites import Where, taps
from activations.structure import first, hidden_argument, hooks

if TYPE_CHECKING:
    from activations.model import Model

Group = tuple[Where, ...]
"""Places of one site and width, which share a buffer."""
_log = logging.getLogger(__name__)


def group(places: Mapping[Where, int]) -> dict[Group, int]:
    """The groups of these places, each with its width."""
    found: dict[tuple[str, int], list[Where]] = {}
    for where, width in places.items():
        found.setdefault((where[0], width), []).append(where)
    return {tuple(members): width for (_, width), members in found.items()}


@dataclass(slots=True)
class Budget:
    """The padded tokens that one forward pass may have; None until a batch has run out of memory."""

    tokens: int | None = None

    def cut(self, lengths: Sequence[int]) -> list[slice]:
        """Runs of rows within the budget. A single prompt over it is a run of its own."""
        pieces: list[slice] = []
        start = 0
        for stop in range(1, len(lengths) + 1):
            over = self.tokens is not None and (stop + 1 - start) * max(lengths[start : stop + 1]) > self.tokens
            if stop == len(lengths) or over:
                pieces.append(slice(start, stop))
                start = stop
        return pieces


@dataclass(frozen=True, slots=True)
class Batch:
    """One finished batch on its way to the store. On a GPU the copies may still run until `ready` has passed."""

    buffers: dict[Group, Tensor]
    readout: dict[str, Tensor] | None = None
    ready: torch.cuda.Event | None = None

    def arrays(self) -> tuple[dict[Where, np.ndarray], dict[str, np.ndarray] | None]:
        """Activations [row, width] in float32, and the readout of each prompt."""
        if self.ready is not None:
            self.ready.synchronize()
        named = ((where, buffer[i]) for group, buffer in self.buffers.items() for i, where in enumerate(group))
        activations = {where: rows.float().numpy() for where, rows in named}
        return activations, None if self.readout is None else {k: tensor.numpy() for k, tensor in self.readout.items()}


@dataclass(slots=True)
class Buffers:
    """Memory for batches of at most ``most`` rows, used again for each; what a batch was given lasts for two more."""

    model: Model
    groups: Mapping[Group, int]
    most: int
    dtype: torch.dtype
    _flat: dict[tuple[Group, str, int], Tensor] = field(default_factory=dict)
    _turn: int = 0

    def _view(self, name: Group, kind: str, rows: int) -> Tensor:
        width, on_gpu = self.groups[name], kind == "device"
        key = (name, kind, 0 if on_gpu else self._turn)
        if key not in self._flat:
            size, place = len(name) * self.most * width, self.model.device if on_gpu else torch.device("cpu")
            self._flat[key] = torch.empty(size, dtype=self.dtype, device=place, pin_memory=self.on_gpu and not on_gpu)
        shape = (len(name), rows, width)
        return self._flat[key][: prod(shape)].view(shape)

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    def host(self, rows: int) -> dict[Group, Tensor]:
        """The host's memory for the next batch."""
        self._turn = 1 - self._turn
        return {name: self._view(name, "host", rows) for name in self.groups}

    def target(self, host: Mapping[Group, Tensor], rows: slice) -> dict[Group, Tensor]:
        """What the hooks of one pass write to: memory on the device, or these rows of the host's own."""
        if self.on_gpu:
            return {name: self._view(name, "device", rows.stop - rows.start) for name in self.groups}
        return {name: buffer[:, rows] for name, buffer in host.items()}


@dataclass(frozen=True, slots=True)
class Wiring:
    """The modules that a plan watches, looked up once: good for as long as no adapter is attached."""

    network: Any
    last: nn.Module
    carriers: dict[Where, list[tuple[nn.Module, bool]]]
    patterned: list[int]

    @classmethod
    def of(cls, model: Model, places: Mapping[Where, int]) -> Wiring:
        found = {where: [(model.module(name), inside) for name, inside in taps(model, where)] for where in places}
        patterned = [layer for site, layer in places if site == "pattern"]
        return cls(backbone(model), model.module(model.structure.blocks[-1]), found, patterned)


def run_batch(
    model: Model,
    prompts: Sequence[Prompt],
    places: Mapping[Where, int],
    positions: Sequence[Sequence[Spot]],
    answers: AnswerTokens | None,
    dtype: torch.dtype,
    *,
    buffers: Buffers | None = None,
    budget: Budget | None = None,
    wiring: Wiring | None = None,
) -> Batch:
    """Run the prompts as one batch, in as many passes as memory demands; rows stand in the order of ``positions``."""
    counts = [len(own) for own in positions]
    starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
    buffers = buffers or Buffers(model, group(places), starts[-1], dtype)
    budget, wiring = budget or Budget(), wiring or Wiring.of(model, places)
    host = buffers.host(starts[-1])
    lengths = [len(prompt.ids) for prompt in prompts]
    readouts: list[dict[str, Tensor]] = []
    todo = budget.cut(lengths)
    while todo:
        piece = todo[0]
        rows = slice(starts[piece.start], starts[piece.stop])
        target = buffers.target(host, rows)
        try:
            made = _pass(model, prompts[piece], wiring, positions[piece], answers, dtype, target)
        except torch.OutOfMemoryError as error:
            _shrink(model, budget, lengths[piece], error)
            made = None
        if made is None:  # here and not in the handler, whose traceback holds on to what the pass had made
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            rest = budget.cut(lengths[piece.start :])
            todo = [slice(piece.start + one.start, piece.start + one.stop) for one in rest]
            continue
        if buffers.on_gpu:
            for name, buffer in target.items():
                # Place by place: an asynchronous copy to memory with gaps goes by a temporary that nobody waits for.
                whole = rows.stop - rows.start == starts[-1]
                for to, values in [(host[name], buffer)] if whole else zip(host[name][:, rows], buffer, strict=True):
                    to.copy_(values, non_blocking=True)
        readouts.append(made)
        del todo[0]
    readout = None
    if answers is not None:
        readout = {name: torch.cat([one[name] for one in readouts]) for name in readouts[0]}
    ready = torch.cuda.current_stream(model.device).record_event() if buffers.on_gpu else None
    return Batch(host, readout, ready)


def _shrink(model: Model, budget: Budget, lengths: Sequence[int], error: Exception) -> None:
    width = max(lengths)
    if len(lengths) == 1:
        raise ModelError(
            f"one prompt of {width} tokens does not fit in memory; leave it out, capture fewer sites or layers, or use "
            "a smaller dtype or another device"
        ) from error
    tokens = len(lengths) * width
    budget.tokens = max(tokens // 2, width)
    _log.warning(
        "out of memory in a batch of %d tokens; going on with at most %d tokens a pass on %s",
        tokens, budget.tokens, model.device,
    )  # fmt: skip


def _pass(
    model: Model,
    prompts: Sequence[Prompt],
    wiring: Wiring,
    positions: Sequence[Sequence[Spot]],
    answers: AnswerTokens | None,
    dtype: torch.dtype,
    target: dict[Group, Tensor],
) -> dict[str, Tensor]:
    padded = pad(prompts, model.device, model.pad_id)
    ends: list[Tensor] = []

    def keep_end(module: Any, args: Any, output: Any) -> None:
        ends.append(first(output)[:, -1].to(model.device, dtype, copy=True))

    handles: list[Any] = []
    with (
        torch.inference_mode(),
        _watched(model, wiring, target, Pick(positions, [len(prompt.ids) for prompt in prompts])),
        hooks(handles),
    ):
        if answers is not None:
            handles.append(wiring.last.register_forward_hook(keep_end))
        wiring.network(**forward_arguments(wiring.network, padded))
    if answers is None:
        return {}
    made = model.unembed(ends[0], answers)
    return {name: _to_host(getattr(made, name)) for name in ("logit", "logsumexp", "top")}


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@contextmanager
def tapped(
    model: Model,
    places: Mapping[Where, int],
    n_prompts: int,
    dtype: torch.dtype,
    positions: Sequence[Sequence[Spot]] | None = None,
    prompts: Sequence[Prompt] | None = None,
    buffers: dict[Group, Tensor] | None = None,
) -> Iterator[dict[Group, Tensor]]:
    """Within the block, each forward pass copies the wanted rows of every place into a buffer [place, row, width].

    Places of one site and width share a buffer, which has the tuple of its places as key. Without ``positions`` the
    last column of every prompt is taken. Leaving the block without an exception checks that every place was filled, so
    a module that did not run is an error and not old memory.
    """
    if positions is None or prompts is None:
        if any(site == "pattern" for site, _ in places):
            raise ModelError("pattern rows begin with a prompt's own keys: give positions and prompts too")
        lengths = [1] * n_prompts  # with padding on the left the last column is the answer, whatever the lengths
        positions = [(Spot(ANSWER, 0, (0,)),)] * n_prompts
    else:
        lengths = [len(prompt.ids) for prompt in prompts]
    pick = Pick(positions, lengths)
    if buffers is None:
        buffers = {
            name: torch.empty((len(name), pick.n_rows, width), dtype=dtype, device=model.device)
            for name, width in group(places).items()
        }
    with _watched(model, Wiring.of(model, places), buffers, pick):
        yield buffers


@contextmanager
def _watched(model: Model, wiring: Wiring, buffers: Mapping[Group, Tensor], pick: Pick) -> Iterator[None]:
    filled: set[Where] = set()
    handles: list[Any] = []
    with eager(model, wiring.patterned), hooks(handles):
        for name, buffer in buffers.items():
            for where, target in zip(name, buffer, strict=True):
                handles += _watch(model, where, wiring.carriers[where], target, pick, filled)
        yield
    if lacking := [where for where in wiring.carriers if where not in filled]:
        raise ModelError(
            f"{lacking[0][0]} layer {lacking[0][1]} of {model.name!r} did not run in this forward pass; leave it out"
        )


def _watch(
    model: Model,
    where: Where,
    carriers: Sequence[tuple[nn.Module, bool]],
    target: Tensor,
    pick: Pick,
    filled: set[Where],
) -> list[Any]:
    if where[0] == "pattern":
        heads = int(model.structure.heads[where[1]] or 0)
        keys = target.shape[-1] // heads

        def take(module: nn.Module, args: Any, output: Any) -> None:
            pick.reduce(pick.gather_pattern(probabilities(output, heads, where), keys), target)
            filled.add(where)

        return [carriers[0][0].register_forward_hook(take)]
    held: list[Tensor] = []

    def keep(value: Tensor) -> None:
        tokens = pick.gather(value)
        if held:  # a sum of two tensors, added in the model's own precision as the model does
            earlier = held.pop()
            tokens = earlier.to(tokens.device) + tokens
        elif len(carriers) > 1:
            held.append(tokens.clone())  # before anything writes to the tensor in place
            return
        pick.reduce(tokens, target)
        filled.add(where)

    return [_hook(module, is_input, keep) for module, is_input in carriers]


def _hook(module: nn.Module, is_input: bool, keep: Callable[[Tensor], None]) -> Any:
    # A hook that returns a value replaces the tensor it watched: these return None.
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        keep(hidden_argument(args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        keep(first(output))

    return (
        module.register_forward_pre_hook(before, with_kwargs=True) if is_input else module.register_forward_hook(after)
    )


def checked(model: Model, activations: Mapping[Where, np.ndarray]) -> None:
    """Refuse patterns that are no probabilities."""
    for where, rows in activations.items():
        if where[0] == "pattern":
            check_rows(model, where, rows, int(model.structure.heads[where[1]] or 0))


def backbone(model: Model) -> Any:
    """The network below the unembedding, or the whole model where that cannot be told apart by its parts."""
    inner = getattr(model.hf_model, getattr(model.hf_model, "base_model_prefix", "") or "-", None)
    if isinstance(inner, nn.Module):
        inside = set(inner.modules())
        parts = (*model.structure.blocks, model.structure.final_norm, model.structure.embedding)
        if all(model.module(name) in inside for name in parts) and model.module(model.structure.head) not in inside:
            return inner
    return model.hf_model
