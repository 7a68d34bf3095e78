"""The activations of a family's prompts, as a store of their own.

``probe run`` captures what its tables need. Whoever wants other sites, layers or positions writes them here: the same
items, from the same parameters and seed, with the instance key and the presentation as row index, so that a row can be
joined with the tables of any run on these items; the items themselves are kept in the same directory. Spans are those
that the family itself marks in its text.

The plan is said before the first pass, with its size and, from one timed batch, about how long it takes. The same
command again goes on where it stopped; another plan, model, adapter or set of prompts is refused by the store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from experiments.config import Asking, settings
from experiments.errors import RunError, UsageError
from experiments.items import Item, Row, rows
from experiments.progress import steps
from experiments.store_items import ITEMS, write_items

if TYPE_CHECKING:
    from activations.capturing import Plan
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.store import ActivationStore
    from experiments.progress import Reporter

BASE = "base"
_TIMED_TOKENS = 1024


class CaptureConfig(Asking):
    """What to capture, of which prompts."""

    command: ClassVar[str] = "capture"

    limit: int = Field(100, ge=1, le=1_000_000, description="matched sets a setting")
    arm: str | None = Field(None, description="base, or the adapter to switch on; the adapter given, if it is one")
    sites: tuple[str, ...] = Field(("resid_post",), description="sites, or TransformerLens names")
    layers: tuple[int, ...] | None = Field(None, description="layers, counted from the end if negative; default all")
    positions: tuple[str, ...] = Field(("answer",), description="answer, spans (alone, /mean, /all), token numbers")
    pattern_keys: int | None = Field(
        None, ge=1, description="width of pattern rows in keys; default the longest prompt"
    )
    store_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="activations are kept as")
    backend: Literal["hf", "transformer_lens", "nnsight"] = Field("hf", description="library that runs the network")


def words(text: str | None) -> tuple[str, ...] | None:
    """``a,b`` as a tuple; None if the flag was not given."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def layer_numbers(text: str | None) -> tuple[int, ...] | None:
    """``0-3,-1`` as numbers.

    Raises:
        UsageError: something else.
    """
    if text is None or text.strip() == "all":
        return None
    found: list[int] = []
    for part in words(text) or ():
        match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high:
            raise UsageError(f"layers is {text!r}: give numbers and ranges, such as 0-3,8 or -1, or all")
        found.extend(range(low, high + 1))
    return tuple(found)


def capture_family(config: CaptureConfig, directory: Path, reporter: Reporter, *, chosen: bool) -> ActivationStore:
    """Write the store; ``chosen`` says that the adapters were named and are not the built-in model's own.

    Raises:
        RunError: too few distinct items.
        UsageError: an unknown arm, site or position.
    """
    from activations.capturing import Plan, capture
    from activations.errors import StoreError
    from activations.model import load
    from activations.positions import Conversation
    from activations.readout import answer_tokens
    from tasks.registry import family as family_named

    try:
        plan = Plan(
            sites=config.sites,
            layers=config.layers,
            positions=config.positions,
            dtype=config.store_dtype,
            batch_tokens=config.batch_tokens,
            pattern_keys=config.pattern_keys,
        )
    except StoreError as error:  # what a plan refuses is a value that the user gave
        raise UsageError(str(error)) from None
    family = family_named(config.family)
    grid = settings(config, family)
    asked: list[Row] = []
    for setting in grid:
        made = islice(family.generate(setting.params, seed=config.seed, split=config.split), config.limit)
        found = rows([Item(setting.label, matched) for matched in made])
        if len({row.matched.instance.key for row in found}) < config.limit:
            raise RunError(f"{setting.label} gives fewer than {config.limit} sets: lower --limit")
        asked += found
    with reporter.stage(f"load {config.model}", 1):
        model = load(
            config.model,
            adapters=config.adapter,
            device=config.device,
            dtype=config.dtype,
            any_base=config.any_base,
            trust_remote_code=config.trust_remote_code,
        )
    arm = _arm(config, model, chosen)
    prompts = model.encode([row.presentation.chat() for row in asked])
    conversations = [Conversation(row.presentation.chat(), row.presentation.spans) for row in asked]
    index = [(row.matched.instance.key, row.presentation.kind) for row in asked]
    reasoning = any(setting.params.get("prompt") == "reasoning" for setting in grid)
    answers = None if family.answers is None or reasoning else answer_tokens(model, family.answers)
    try:
        plan.places(model, prompts)
    except StoreError as error:  # and what this model does not have, likewise
        raise UsageError(str(error)) from None
    with model.use(None if arm == BASE else arm):
        about = "" if config.backend != "hf" else f", {_about(_seconds(model, prompts, plan))}"
        reporter.say(f"{plan.describe(model, prompts, conversations, index)} -> {directory}{about}")
        with reporter.stage(f"capture {arm}", len(prompts)) as done:
            store = capture(
                model,
                prompts,
                plan,
                directory,
                answers=answers,
                index=index,
                spans=conversations,
                backend=config.backend,
                progress=steps(done),
            )
    # After the store, which has refused by now what is not its own; `probe fit` finds labels for its rows there.
    write_items(directory / ITEMS, asked, version=family.version)
    return store


def _about(seconds: float) -> str:
    return (
        "under a second"
        if seconds < 1
        else f"about {seconds:,.0f} s"
        if seconds < 120
        else f"about {seconds / 60:,.0f} min"
    )


def _arm(config: CaptureConfig, model: Model, chosen: bool) -> str:
    arms = (BASE, *model.adapter_names)
    if config.arm is None:
        if chosen and len(arms) > 2:
            raise UsageError(f"{len(arms) - 1} adapters were given: say which one with --arm ({', '.join(arms)})")
        return arms[1] if chosen and len(arms) == 2 else BASE
    if config.arm not in arms:
        raise UsageError(f"arm is {config.arm!r}: choose from {', '.join(arms)}")
    return config.arm


def _seconds(model: Model, prompts: Sequence[Prompt], plan: Plan) -> float:
    """About how long the forward passes take, from one batch of prompts of middle length, run twice and timed once."""
    import torch

    from activations.batching import batches, forward_arguments, pad
    from activations.taps import backbone

    lengths = [len(prompt.ids) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda n: lengths[n])
    room = min(plan.batch_tokens, _TIMED_TOKENS)
    middle = order[len(order) // 2 :][: max(1, room // lengths[order[len(order) // 2]])]
    network, took = backbone(model), 0.0
    padded = pad([prompts[n] for n in middle], model.device, model.pad_id)
    arguments: dict[str, Any] = forward_arguments(network, padded)
    with torch.inference_mode():
        for _ in range(2):
            started = time.perf_counter()
            network(**arguments)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            took = time.perf_counter() - started
    whole = sum(len(members) * max(lengths[n] for n in members) for members in batches(lengths, plan.batch_tokens))
    return took * whole / padded.input_ids.numel()
