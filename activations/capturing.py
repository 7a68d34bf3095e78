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

import json
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

from activations import arguments
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
from activations.store_format import shard_spec
from activations.store_shards import shards_size
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
    shard. `pattern_keys` is the number of keys that rows of `pattern` are as wide as, filled up with zeros behind the
    prompt's own; None stands for the longest prompt's. Stores that are to be merged need the same.
    """

    sites: tuple[str, ...] = ("resid_post",)
    layers: tuple[int, ...] | None = None
    positions: tuple[str, ...] = (ANSWER,)
    dtype: str = "float32"
    batch_tokens: int = 8192
    pattern_keys: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be captured by any model."""
        for name, read in (("sites", canonical), ("positions", _positions.canonical)):
            given = arguments.texts(name, getattr(self, name))
            object.__setattr__(self, name, tuple(dict.fromkeys(read(one) for one in given)))
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(arguments.integers("layers", self.layers)))
        if lacking := [name for name in ("sites", "positions", "layers") if getattr(self, name) == ()]:
            otherwise = "all" if lacking[0] == "layers" else "the default"
            raise StoreError(f"the plan names no {lacking[0]}; name one, or leave it out for {otherwise}")
        if self.layers is not None and all("." in site for site in self.sites):
            raise StoreError(
                f"layers is {list(self.layers)} and each site names its layer ({', '.join(self.sites)}); leave layers out"
            )
        if self.layers not in (None, (0,)) and all("." in site or site == "embed" for site in self.sites):
            raise StoreError(
                f"layers is {list(self.layers or ())} and embed is the input of layer 0 alone; leave layers out, or "
                "name resid_pre, which is the input of any layer"
            )
        if not isinstance(self.dtype, str) or self.dtype not in STORAGE:
            raise StoreError(f"unknown storage dtype {self.dtype!r}; allowed: {', '.join(STORAGE)}")
        if arguments.integer("batch_tokens", self.batch_tokens) < 1:
            raise StoreError(f"batch_tokens is {self.batch_tokens}; give a positive number of tokens, for example 8192")
        if self.pattern_keys is not None:
            if arguments.integer("pattern_keys", self.pattern_keys) < 1:
                raise StoreError(f"pattern_keys is {self.pattern_keys}; give as many as the longest prompt has tokens")
            if not any(site.rpartition(".")[2] == "pattern" for site in self.sites):
                raise StoreError(
                    f"pattern_keys is {self.pattern_keys} and the plan has no pattern; name it among the sites, or "
                    "leave pattern_keys out"
                )

    def places(self, model: Model, prompts: Sequence[Prompt]) -> dict[Where, int]:
        """The (site, layer) pairs of this plan in this model, each with its width."""
        return choose(model, self.sites, self.layers, keys=self.keys(prompts))

    def keys(self, prompts: Sequence[Prompt]) -> int:
        """How many keys a row of `pattern` has."""
        longest = max((len(prompt.ids) for prompt in prompts), default=0)
        if self.pattern_keys is not None and self.pattern_keys < longest:
            raise StoreError(
                f"pattern_keys is {self.pattern_keys} and the longest prompt has {longest} tokens; give at least {longest}"
            )
        return self.pattern_keys or longest

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
    _refuse_kinds(model, prompts, plan, answers, index, spans)
    target = arguments.path("directory", directory)
    if not prompts:
        raise StoreError("no prompts to capture; give at least one")
    if spans is not None and len(spans) != len(prompts):
        raise StoreError(f"spans has {len(spans)} entries for {len(prompts)} prompts; give one Conversation each")
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
    index_columns = layout.rows(prompts, names)
    labels = None if answers is None else answers.labels
    spec = shard_spec(places, plan.dtype, labels)
    content, notes = _identity(model, prompts, plan, places, answers, backend)
    table = len(json.dumps([content, notes, index_columns, layout.shards])) + 1024  # the manifest
    _refuse_full_disk(target, shards_size(spec, [len(shard) for shard in layout.shards]) + table)
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
            target,
            datasets=places,
            dtype=plan.dtype,
            n_layers=model.n_layers,
            shards=layout.shards,
            rows=index_columns,
            content=content,
            labels=labels,
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
    return ActivationStore.open(target)


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
        content["pattern"] = {"width": plan.keys(prompts), "heads": heads}
    if heads := {str(layer): model.structure.heads[layer] for site, layer in places if site == "z"}:
        content["z"] = {"heads": heads}
    return content, {"model": model.name, "source": model.identity.get("source"), "adapter": model.active}


def _refuse_kinds(model: Any, prompts: Any, plan: Any, answers: Any, index: Any, spans: Any) -> None:
    """Refuse arguments of the wrong kind."""
    from activations.model import Model

    arguments.instance("model", model, Model, "what activations.load or from_modules returned")
    arguments.instance("plan", plan, Plan, "an activations.Plan")
    if answers is not None:
        arguments.instance("answers", answers, AnswerTokens, "what answer_tokens returned, or None for no readout")
    for name, given, kind, how in (
        ("prompts", prompts, Prompt, "prompts as model.encode makes them"),
        ("spans", spans, Conversation, "one activations.positions.Conversation a prompt"),
    ):
        if given is not None or name == "prompts":
            arguments.instance(name, given, Sequence, f"a list of {how}")
            for one in given:
                arguments.instance(f"an entry of {name}", one, kind, how)
    if index is not None:
        arguments.instance("index", index, Sequence, "a list of (key, presentation), one a prompt")
        for pair in index:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
                raise StoreError(f"an entry of index is {arguments.shown(pair)}; give (key, presentation), two texts")


def _refuse_full_disk(directory: Path, size: int) -> None:
    folder = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    there = sum(path.stat().st_size for path in directory.glob("shard-*.h5"))
    needed, free = size - there, shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"the plan needs {needed / 1e9:.3g} GB in {directory} and {free / 1e9:.3g} GB are free; "
            "free some, choose another directory, fewer sites or layers, or dtype bfloat16"
        )
