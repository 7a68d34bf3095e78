"""Capture: the activations at chosen positions of many prompts, in one forward pass a batch, straight to disk.

Problem. Keeping whole sequences of every layer costs hundreds of times the data a probe reads, a second pass for the
readout doubles the work, and a run that dies after an hour should not start again.

Mechanism. A `Plan` names sites, layers, positions and storage type, and knows its size before anything runs. Positions
become tokens, prompt by prompt; a row of the store is one prompt at one position. Prompts are cut into length-sorted
batches that depend on the prompts and the plan alone, and a batch with all its rows is a shard. One forward pass of the
network below its unembedding serves a whole batch (see `taps`), and the readout is made from the last block's answer
rows of the same pass. While the next batch runs, a thread commits the finished one to the store. Batches that the store
holds already are skipped, so the same call resumes, with the same bytes as a run that was never interrupted.

Constraints. Mask and position ids are explicit. Hooks return nothing, so the outputs with them are the outputs without
them, bit for bit; only `pattern` needs another attention, in its own layers. Nothing is kept for a gradient, no
key-value cache is built, and logits are made only where answers are read. Buffers are at least as precise as the model,
and rounding to the storage type happens once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from activations import positions as _positions
from activations.backends import backend as named_backend
from activations.batching import batches
from activations.errors import ModelError, StoreError
from activations.peer_batches import run_through
from activations.positions import ANSWER, Conversation, Spot, resolve
from activations.prompts import Prompt, ids_hash
from activations.readout import AnswerTokens
from activations.sites import Where, canonical, choose, describe
from activations.store import STORAGE, ActivationStore, StoreWriter
from activations.taps import Batch, Budget, Buffers, Wiring, checked, group, run_batch

if TYPE_CHECKING:
    from activations.model import Model

_NAMED_IN_NOTES = ("name", "source", "known_as", "adapters")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to capture. `layers` None means every layer; negative layers count from the end.

    A site named with its layer (`blocks.3.hook_z`) is taken in that layer alone. `positions` are the answer, spans and
    token numbers, see :mod:`activations.positions`. `dtype` is the stored type. `batch_tokens` bounds the padded tokens
    of one batch, and with it memory; it is part of a store's identity, because it decides which rows lie in which
    shard.
    """

    sites: tuple[str, ...] = ("resid_post",)
    layers: tuple[int, ...] | None = None
    positions: tuple[str, ...] = (ANSWER,)
    dtype: str = "float32"
    batch_tokens: int = 8192

    def __post_init__(self) -> None:
        """Refuse what cannot be captured by any model."""
        for name, value in (("sites", self.sites), ("positions", self.positions)):
            if isinstance(value, str):
                raise StoreError(f"{name} is the text {value!r}; give a list, for example [{value!r}]")
        object.__setattr__(self, "sites", tuple(dict.fromkeys(canonical(site) for site in self.sites)))
        object.__setattr__(
            self, "positions", tuple(dict.fromkeys(_positions.canonical(position) for position in self.positions))
        )
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
        if lacking := [name for name in ("sites", "positions", "layers") if getattr(self, name) == ()]:
            otherwise = "all" if lacking[0] == "layers" else "the default"
            raise StoreError(f"the plan names no {lacking[0]}; name one, or leave it out for {otherwise}")
        if self.layers is not None and all("." in site for site in self.sites):
            raise StoreError(
                f"layers is {list(self.layers)} and each site names its layer ({', '.join(self.sites)}); leave layers out"
            )
        if self.dtype not in STORAGE:
            raise StoreError(f"unknown storage dtype {self.dtype!r}; allowed: {', '.join(STORAGE)}")
        if self.batch_tokens < 1:
            raise StoreError(f"batch_tokens is {self.batch_tokens}; give a positive number of tokens, for example 8192")

    def places(self, model: Model, prompts: Sequence[Prompt]) -> dict[Where, int]:
        """The (site, layer) pairs of this plan in this model, each with its width."""
        return choose(model, self.sites, self.layers, keys=max((len(prompt.ids) for prompt in prompts), default=0))

    def n_rows(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        spans: Sequence[Conversation] | None = None,
        index: Sequence[tuple[str, str]] | None = None,
    ) -> int:
        """Rows of the store; spans are needed where every token of one is kept, `index` names prompts in messages."""
        if not any(position.endswith("/all") for position in self.positions):
            return len(prompts) * len(self.positions)
        return sum(len(own) for own in resolve(model, prompts, self.positions, spans, _names(index)))

    def size(self, model: Model, prompts: Sequence[Prompt], spans: Sequence[Conversation] | None = None) -> int:
        """Bytes of activations that this plan stores."""
        return self.n_rows(model, prompts, spans) * self._row_bytes(self.places(model, prompts))

    def _row_bytes(self, places: Mapping[Where, int]) -> int:
        return sum(places.values()) * STORAGE[self.dtype].itemsize

    def describe(
        self,
        model: Model,
        prompts: Sequence[Prompt],
        spans: Sequence[Conversation] | None = None,
        index: Sequence[tuple[str, str]] | None = None,
    ) -> str:
        """One line about what will run and what it stores."""
        places = self.places(model, prompts)
        rows, tokens = self.n_rows(model, prompts, spans, index), sum(len(prompt.ids) for prompt in prompts)
        cuts = len(batches([len(prompt.ids) for prompt in prompts], self.batch_tokens))
        return (
            f"{model.name}{f' with {model.active}' if model.active else ''}: {len(prompts):,} prompts, {tokens:,} "
            f"tokens in {cuts:,} batch{'es' * (cuts != 1)}; {describe(places)} at "
            f"{', '.join(self.positions)}; {rows:,} rows, {rows * self._row_bytes(places) / 2**20:,.1f} MiB in "
            f"{self.dtype}"
        )


def _names(index: Sequence[tuple[str, str]] | None) -> Callable[[int], str]:
    """How messages call a prompt: by its number, and by its key and presentation where it has them."""
    return lambda n: f"prompt {n}" if index is None else f"prompt {n} ({index[n][0][:16]} {index[n][1]})"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which prompts each batch runs, the rows of each prompt, and the row numbers of each shard."""

    batches: list[list[int]]
    spots: list[tuple[Spot, ...]]
    shards: list[list[int]]

    @classmethod
    def of(cls, prompts: Sequence[Prompt], spots: list[tuple[Spot, ...]], batch_tokens: int) -> _Layout:
        starts = [0, *accumulate(len(own) for own in spots)]
        cuts = batches([len(prompt.ids) for prompt in prompts], batch_tokens)
        shards = [[row for n in members for row in range(starts[n], starts[n + 1])] for members in cuts]
        return cls(cuts, spots, shards)

    @property
    def plain(self) -> bool:
        """One row a prompt, so that rows are numbered as prompts are."""
        return all(len(own) == 1 for own in self.spots)

    def described(self, row: int, called: Callable[[int], str]) -> str:
        """What a row is of, for messages."""
        prompt, spot = [(n, spot) for n, own in enumerate(self.spots) for spot in own][row]
        return f"{called(prompt)} at {spot.label}"

    def rows(self, prompts: Sequence[Prompt], names: Sequence[tuple[str, str]]) -> dict[str, list[Any]]:
        """The columns of the row index."""
        flat = [(n, spot) for n, own in enumerate(self.spots) for spot in own]
        return {
            "key": [names[n][0] for n, _ in flat],
            "presentation": [names[n][1] for n, _ in flat],
            "label": [spot.label for _, spot in flat],
            "position": [spot.position for _, spot in flat],
            "n_tokens": [len(prompts[n].ids) for n, _ in flat],
        }


def capture(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    directory: str | os.PathLike[str],
    *,
    answers: AnswerTokens | None = None,
    index: Sequence[tuple[str, str]] | None = None,
    spans: Sequence[Conversation] | None = None,
    backend: str = "hf",
    progress: Callable[[int], None] | None = None,
) -> ActivationStore:
    """Run the prompts through the model as it is now (base, or the adapter in use) and store what the plan names.

    `index` gives each prompt its (instance key, presentation); without it the key is the prompt's number. `spans` gives
    each prompt the conversation it was made from, where the plan names spans. With `answers` the readout is stored too,
    of a prompt beside each of its rows. `backend` names the library that runs the network. `progress` is called with
    the number of prompts stored so far, at the start of a resumed run and after each batch. The same call again
    resumes; under other settings the directory is refused.
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
    called = _names(index)
    context = model.context
    for number, prompt in enumerate(prompts):
        if context is not None and len(prompt.ids) > context:
            raise StoreError(
                f"{called(number)} has {len(prompt.ids)} tokens and {model.name} reads at most {context}; leave it "
                "out, ask a shorter one, or use another model"
            )
    places = plan.places(model, prompts)
    library = named_backend(backend)
    layout = _Layout.of(prompts, resolve(model, prompts, plan.positions, spans, called), plan.batch_tokens)
    _refuse_full_disk(
        Path(directory),
        sum(len(own) for own in layout.spots) * plan._row_bytes(places),
        len(layout.shards) * (len(places) + 8),
    )
    content, notes = _identity(model, prompts, plan, places, answers, backend)
    dtype = torch.promote_types(model.dtype, getattr(torch, plan.dtype))
    with ExitStack() as stack:
        if backend == "hf":
            most = max(map(len, layout.shards))
            buffers = Buffers(model, group(places), most, dtype)
            run = partial(run_batch, model, buffers=buffers, budget=Budget(), wiring=Wiring.of(model, places))
        else:
            session = stack.enter_context(library.open(model))
            session.refuse(places)
            run = partial(run_through, session)
        writer = StoreWriter(
            directory,
            datasets=places,
            dtype=plan.dtype,
            n_layers=model.n_layers,
            shards=layout.shards,
            rows=layout.rows(prompts, names),
            content=content,
            labels=None if answers is None else answers.labels,
            notes=notes,
        )
        stack.enter_context(closing(writer))
        done = len(prompts) - sum(len(layout.batches[shard]) for shard in writer.missing)
        if progress is not None and done:
            progress(done)
        # Closed here and not by the garbage collector: nothing may still be written once an exception has left this call.
        commits = _run(model, partial(run, answers=answers, dtype=dtype), prompts, places, layout, writer, called)
        for shard in stack.enter_context(closing(commits)):
            done += len(layout.batches[shard])
            if progress is not None:
                progress(done)
    return ActivationStore.open(directory)


def _run(
    model: Model,
    run: Callable[..., Batch],
    prompts: Sequence[Prompt],
    places: Mapping[Where, int],
    layout: _Layout,
    writer: StoreWriter,
    called: Callable[[int], str],
) -> Generator[int]:
    """Run the missing batches and yield each shard once it is committed; one is written while the next one runs."""

    def commit(shard: int, batch: Batch) -> int:
        activations, readout = batch.arrays()
        checked(model, activations)
        if readout is not None and not layout.plain:  # a readout belongs to a prompt, and stands beside all its rows
            counts = [len(layout.spots[prompt]) for prompt in layout.batches[shard]]
            readout = {name: values.repeat(counts, axis=0) for name, values in readout.items()}
        try:
            writer.write(shard, {where: activations[where] for where in places}, readout)
        except StoreError as error:
            if match := re.search(r" of row (\d+) (?:is|reaches) ", str(error)):
                row = int(match[1])
                raise StoreError(f"{error}; row {row} is {layout.described(row, called)}") from error
            raise
        return shard

    pending: Future[int] | None = None
    with ThreadPoolExecutor(1, "activation-store") as thread:
        for shard in writer.missing:
            members = layout.batches[shard]
            batch = run([prompts[n] for n in members], places, [layout.spots[n] for n in members])
            finished = None if pending is None else pending.result()
            pending = thread.submit(commit, shard, batch)
            if finished is not None:
                yield finished
        if pending is not None:
            yield pending.result()


def _identity(
    model: Model,
    prompts: Sequence[Prompt],
    plan: Plan,
    places: Mapping[Where, int],
    answers: AnswerTokens | None,
    backend: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What determines the numbers, and what is only worth knowing (names and paths, which may change)."""
    adapter = {} if model.active is None else model.identity["adapters"][model.active]
    content = {
        "model": {key: value for key, value in model.identity.items() if key not in _NAMED_IN_NOTES},
        "adapter": {key: adapter.get(key) for key in ("weights", "config")},
        "prompts": ids_hash(prompts),
        "positions": list(plan.positions),
        "backend": backend,
        "answers": None if answers is None else answers.ids,
        "batch_tokens": plan.batch_tokens,
    }
    if patterned := [layer for site, layer in places if site == "pattern"]:
        heads = {str(layer): model.structure.heads[layer] for layer in patterned}
        content["pattern"] = {"width": max(len(prompt.ids) for prompt in prompts), "heads": heads}
    if heads := {str(layer): model.structure.heads[layer] for site, layer in places if site == "z"}:
        content["z"] = {"heads": heads}
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
