"""Capture: the activations at the answer position of many prompts, in one forward pass a batch, straight to disk.

Problem. Keeping whole sequences of every layer costs hundreds of times the data a probe reads, a hook that returns a
value silently replaces what it watched, a second pass for the readout doubles the work, and a run that dies after an
hour should not start again.

Mechanism. A `Plan` names sites, layers and storage type, and knows its size before anything runs. Prompts are cut into
length-sorted batches that depend on the prompts and the plan alone. One forward pass of the network below its
unembedding serves a whole batch: hooks copy the last column of each watched tensor into one buffer [layer, row, width]
a site on the device, the readout is made from the last block's rows of the same pass, and each buffer goes to the host
in one copy. While the next batch runs, a thread commits the finished one to the store. Batches that the store holds
already are skipped, so the same call resumes, with the same bytes as a run that was never interrupted.

Constraints. Prompts are padded on the left, so the answer position is the last column of every row; mask and position
ids are explicit. Hooks belong to a context manager and are gone after it, also when an exception passes; they return
nothing, so the outputs with them are the outputs without them, bit for bit. Nothing is kept for a gradient and no
key-value cache is built. Buffers are at least as precise as the model, and rounding to the storage type happens once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.batching import batches, forward_arguments, pad
from activations.errors import ModelError, StoreError
from activations.prompts import Prompt, ids_hash
from activations.readout import AnswerTokens
from activations.sites import SITES, Where, carrier, choose
from activations.store import STORAGE, ActivationStore, StoreWriter
from activations.structure import first, hidden_argument, hooks

if TYPE_CHECKING:
    from activations.model import Model

_NAMED_IN_NOTES = ("name", "source", "known_as", "adapters")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to capture. `layers` None means every layer; negative layers count from the end.

    `dtype` is the stored type. `batch_tokens` bounds the padded tokens of one batch, and with it memory; it is part of
    a store's identity, because it decides which rows lie in which shard.
    """

    sites: tuple[str, ...] = ("resid_post",)
    layers: tuple[int, ...] | None = None
    dtype: str = "float32"
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        """Refuse what cannot be captured by any model."""
        if isinstance(self.sites, str):
            raise StoreError(f"sites is the text {self.sites!r}; give a list, for example [{self.sites!r}]")
        object.__setattr__(self, "sites", tuple(dict.fromkeys(self.sites)))
        for site in self.sites:
            if site not in SITES:
                meant = "".join(f" (did you mean {name}?)" for name in get_close_matches(site, SITES, 1))
                raise StoreError(f"unknown site {site!r}; allowed: {', '.join(SITES)}{meant}")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        if not self.sites or self.layers == ():
            raise StoreError(
                f"the plan names no {'layers' if self.sites else 'sites'}; name one, or leave it out for all"
            )
        if self.dtype not in STORAGE:
            raise StoreError(f"unknown storage dtype {self.dtype!r}; allowed: {', '.join(STORAGE)}")
        if self.batch_tokens < 1:
            raise StoreError(f"batch_tokens is {self.batch_tokens}; give a positive number of tokens, for example 8192")

    def size(self, model: Model, prompts: Sequence[Prompt]) -> int:
        """Bytes of activations that this plan stores."""
        widths = choose(model, self.sites, self.layers).values()
        return len(prompts) * sum(widths) * STORAGE[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class _Batch:
    """One finished batch on its way to the store. On a GPU the copies may still run until `ready` has passed."""

    buffers: dict[tuple[Where, ...], Tensor]
    readout: dict[str, Tensor] | None
    ready: torch.cuda.Event | None

    def arrays(self) -> tuple[dict[Where, np.ndarray], dict[str, np.ndarray] | None]:
        if self.ready is not None:
            self.ready.synchronize()
        named = ((where, buffer[i]) for group, buffer in self.buffers.items() for i, where in enumerate(group))
        activations = {where: rows.float().numpy() for where, rows in named}
        return activations, None if self.readout is None else {k: tensor.numpy() for k, tensor in self.readout.items()}


def capture(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    directory: str | os.PathLike[str],
    *,
    answers: AnswerTokens | None = None,
    index: Sequence[tuple[str, str]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> ActivationStore:
    """Run the prompts through the model as it is now (base, or the adapter in use) and store what the plan names.

    `index` gives each prompt its (instance key, presentation); without it the key is the prompt's number. With
    `answers` the readout is stored too. `progress` is called with the number of prompts stored so far, at the start of
    a resumed run and after each batch. The same call again resumes; under other settings the directory is refused.
    """
    if not prompts:
        raise StoreError("no prompts to capture; give at least one")
    if index is not None and len(index) != len(prompts):
        raise StoreError(
            f"index has {len(index)} entries for {len(prompts)} prompts; give one (key, presentation) each"
        )
    if model.hf_model.training:
        raise ModelError(f"model {model.name!r} is in training mode, where dropout is random; call .eval() on it first")
    names = [(str(n), "") for n in range(len(prompts))] if index is None else index
    places = choose(model, plan.sites, plan.layers)
    shards = batches([len(prompt.ids) for prompt in prompts], plan.batch_tokens)
    _refuse_full_disk(Path(directory), plan.size(model, prompts), len(shards) * (len(places) + 8))
    content, notes = _identity(model, prompts, plan, answers)
    writer = StoreWriter(
        directory,
        datasets=places,
        dtype=plan.dtype,
        n_layers=model.n_layers,
        shards=shards,
        rows={
            "key": [key for key, _ in names],
            "presentation": [presentation for _, presentation in names],
            "position": [prompt.answer for prompt in prompts],
            "n_tokens": [len(prompt.ids) for prompt in prompts],
        },
        content=content,
        labels=None if answers is None else answers.labels,
        notes=notes,
    )
    done = len(prompts) - sum(len(shards[shard]) for shard in writer.missing)
    if progress is not None and done:
        progress(done)
    # Closed here and not by the garbage collector: nothing may still be written once an exception has left this call.
    with closing(_run(model, prompts, places, answers, plan, writer)) as committed:
        for shard in committed:
            done += len(shards[shard])
            if progress is not None:
                progress(done)
    return ActivationStore.open(directory)


def _run(
    model: Model,
    prompts: Sequence[Prompt],
    places: Mapping[Where, int],
    answers: AnswerTokens | None,
    plan: Plan,
    writer: StoreWriter,
) -> Generator[int]:
    """Run the missing batches and yield each shard once it is committed; one is written while the next one runs."""

    def commit(shard: int, batch: _Batch) -> int:
        activations, readout = batch.arrays()
        writer.write(shard, {where: activations[where] for where in places}, readout)
        return shard

    dtype = torch.promote_types(model.dtype, getattr(torch, plan.dtype))
    pending: Future[int] | None = None
    with ThreadPoolExecutor(1, "activation-store") as thread:
        for shard in writer.missing:
            batch = _forward(model, [prompts[row] for row in writer.shards[shard]], places, answers, dtype)
            finished = None if pending is None else pending.result()
            pending = thread.submit(commit, shard, batch)
            if finished is not None:
                yield finished
        if pending is not None:
            yield pending.result()


def _forward(
    model: Model,
    prompts: Sequence[Prompt],
    places: Mapping[Where, int],
    answers: AnswerTokens | None,
    dtype: torch.dtype,
) -> _Batch:
    network = backbone(model)
    last = ("resid_post", model.n_layers - 1)
    padded = pad(prompts, model.device, model.pad_id)
    wanted = dict(places) if answers is None else {last: model.d_model, **places}
    try:
        with torch.inference_mode(), tapped(model, wanted, len(prompts), dtype) as buffers:
            network(**forward_arguments(network, padded))
    except torch.OutOfMemoryError as e:
        raise ModelError(
            f"a batch of {len(prompts)} prompts of {padded.input_ids.shape[1]} tokens does not fit in memory; "
            "capture again with a smaller batch_tokens"
        ) from e
    readout = None
    if answers is not None:
        rows = next(buffer[where.index(last)] for where, buffer in buffers.items() if last in where)
        made = model.unembed(rows, answers)
        readout = {name: _to_host(getattr(made, name)) for name in ("logit", "logsumexp", "top")}
    on_host = {where: _to_host(buffer) for where, buffer in buffers.items() if set(where) & set(places)}
    ready = torch.cuda.current_stream(model.device).record_event() if model.device.type == "cuda" else None
    return _Batch(on_host, readout, ready)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@contextmanager
def tapped(
    model: Model, places: Mapping[Where, int], n_rows: int, dtype: torch.dtype
) -> Iterator[dict[tuple[Where, ...], Tensor]]:
    """Within the block, each forward pass copies the last column of every place into a buffer [place, row, width].

    Places of one site and width share a buffer, which has the tuple of its places as key. Leaving the block without an
    exception checks that every place was filled, so a module that did not run is an error and not old memory.
    """
    groups: dict[tuple[str, int], list[Where]] = {}
    for where, width in places.items():
        groups.setdefault((where[0], width), []).append(where)
    buffers = {
        tuple(group): torch.empty((len(group), n_rows, width), dtype=dtype, device=model.device)
        for (_, width), group in groups.items()
    }
    filled: set[Where] = set()

    def keep(where: Where, target: Tensor, value: Tensor) -> None:
        target.copy_(value[:, -1])
        filled.add(where)

    handles: list[Any] = []
    with hooks(handles):
        for group, buffer in buffers.items():
            for where, target in zip(group, buffer, strict=True):
                handles.append(_watch(model, where, target, keep))
        yield buffers
    if lacking := [where for where in places if where not in filled]:
        raise ModelError(
            f"{lacking[0][0]} layer {lacking[0][1]} of {model.name!r} did not run in this forward pass; leave it out"
        )


def _watch(model: Model, where: Where, target: Tensor, keep: Callable[[Where, Tensor, Tensor], None]) -> Any:
    name, is_input = carrier(model.structure, where)
    module = model.module(str(name))

    # A hook that returns a value replaces the tensor it watched: these return None.
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        keep(where, target, hidden_argument(args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        keep(where, target, first(output))

    return (
        module.register_forward_pre_hook(before, with_kwargs=True) if is_input else module.register_forward_hook(after)
    )


def backbone(model: Model) -> Any:
    """The network below the unembedding, or the whole model where that cannot be told apart by its parts."""
    inner = getattr(model.hf_model, getattr(model.hf_model, "base_model_prefix", "") or "-", None)
    if isinstance(inner, nn.Module):
        inside = set(inner.modules())
        parts = (*model.structure.blocks, model.structure.final_norm, model.structure.embedding)
        if all(model.module(name) in inside for name in parts) and model.module(model.structure.head) not in inside:
            return inner
    return model.hf_model


def _identity(
    model: Model, prompts: Sequence[Prompt], plan: Plan, answers: AnswerTokens | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What determines the numbers, and what is only worth knowing (names and paths, which may change)."""
    adapter = {} if model.active is None else model.identity["adapters"][model.active]
    content = {
        "model": {key: value for key, value in model.identity.items() if key not in _NAMED_IN_NOTES},
        "adapter": {key: adapter.get(key) for key in ("weights", "config")},
        "prompts": ids_hash(prompts),
        "answers": None if answers is None else answers.ids,
        "batch_tokens": plan.batch_tokens,
    }
    return content, {"model": model.name, "source": model.identity.get("source"), "adapter": model.active}


def _refuse_full_disk(directory: Path, data: int, n_datasets: int) -> None:
    folder = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    there = sum(path.stat().st_size for path in directory.glob("shard-*.h5"))
    needed, free = data + 1024 * n_datasets - there, shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"the plan needs {needed / 1e9:.3g} GB in {directory} and {free / 1e9:.3g} GB are free; "
            "free some, choose another directory, fewer sites or layers, or dtype bfloat16"
        )
