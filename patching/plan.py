"""What a sweep will cost and which engine may run it, worked out before anything runs.

Three engines give the same numbers at different prices, in units of one plain forward pass of the prompt (T tokens, C
cells):

=========  ====================  ==========================================================================
engine     price                 may run when
=========  ====================  ==========================================================================
branch     (T + C) / T           every layer is softmax attention, no window shorter than the longest prompt,
                                 sdpa or eager attention, position ids accepted
prefix     (T + C) / T           every prompt has two tokens or more, and the model can continue from a cache
forward    1 + C                 always
=========  ====================  ==========================================================================

What may run is still checked by numbers on the actual prompts before it is used (``check.py``): a condition that is not
on the list, say a window the configuration does not mention, shows there. Cells beyond ``cell_budget`` go into further
passes of the branch engine, each of which pays for the prompt again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from activations.batching import batches
from activations.structure import text_config
from patching import branch, forward, prefix
from patching.edits import Cell, PatchError, check_cells_fit

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt

ENGINES = ("branch", "prefix", "forward")
DENSE_MASK = ("sdpa", "eager")
SELF_CHECK_RUNS = 10
"""Forward passes of the self-check, about: three items, each plain, edited, and once through the engine."""


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The price of a sweep, as it would be paid if its self-check holds.

    Attributes:
        engine, reason: the engine that would run, and why not a cheaper one.
        items, cells: size of the result.
        tokens: tokens put through the model, pads included, checks not.
        forward_passes: the same per item, in plain forward passes of its prompt.
        mask_bytes: largest attention mask held at one time (branch engine).
        check_tokens: at most what the self-check and the re-checked cells add.
    """

    engine: str
    reason: str
    items: int
    cells: int
    tokens: int
    forward_passes: float
    mask_bytes: int
    check_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.items} items x {self.cells} cells by the {self.engine} engine ({self.reason}): {self.tokens:,} tokens, "
            f"{self.forward_passes:.2f} forward passes an item, mask {self.mask_bytes / 2**20:.1f} MiB, "
            f"checks {self.check_tokens:,} tokens"
        )


def sweep_plan(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    cell_budget: int = 256,
    batch_tokens: int = 8192,
    check_cells: int = 20,
    engine: str = "auto",
) -> SweepPlan:
    """Price a sweep without running it; the arguments are those of ``sweep``. Donors are taken as given."""
    check_cells_fit(model, cells, {edit.source for cell in cells for edit in cell.edits} - {"zero"})
    check_options(
        recipients, cell_budget=cell_budget, batch_tokens=batch_tokens, check_cells=check_cells, engine=engine
    )
    lengths = [len(prompt.ids) for prompt in recipients]
    chosen, reason = candidates(model, lengths, engine)[0]
    groups = [
        [lengths[item] for item in group]
        for group in item_batches(chosen, lengths, len(cells), cell_budget=cell_budget, batch_tokens=batch_tokens)
    ]
    tokens = sum(batch_price(chosen, group, len(cells), cell_budget, batch_tokens) for group in groups)
    masks = branch.mask_bytes(groups, len(cells), cell_budget, model.dtype.itemsize) if chosen == "branch" else 0
    return SweepPlan(
        engine=chosen,
        reason=reason,
        items=len(lengths),
        cells=len(cells),
        tokens=tokens,
        forward_passes=tokens / sum(lengths),
        mask_bytes=masks,
        check_tokens=max(lengths)
        * (min(check_cells, len(lengths) * len(cells)) + (0 if chosen == "forward" else SELF_CHECK_RUNS)),
    )


def check_options(
    recipients: Sequence[Prompt], *, cell_budget: int, batch_tokens: int, check_cells: int, engine: str
) -> None:
    """Refuse options that cannot be meant."""
    if not recipients:
        raise PatchError("no recipients to patch; give at least one prompt")
    for name, value, least in (
        ("cell_budget", cell_budget, 1),
        ("batch_tokens", batch_tokens, 1),
        ("check_cells", check_cells, 0),
    ):
        if value < least:
            raise PatchError(f"{name} is {value}; give {least} or more")
    if engine not in ("auto", *ENGINES):
        raise PatchError(f"unknown engine {engine!r}; allowed: auto, {', '.join(ENGINES)}")


def candidates(model: Model, lengths: Sequence[int], engine: str = "auto") -> list[tuple[str, str]]:
    """Engines that may run, cheapest first, each with the reason it comes at this place."""
    found: list[tuple[str, str]] = []
    reason = "cheapest"
    for name in ENGINES:
        obstacle = obstacle_to(model, name, lengths)
        if engine == name:
            if obstacle is not None:
                raise PatchError(f"the {name} engine cannot run here: {obstacle}; use engine='auto'")
            return [(name, "asked for")]
        if obstacle is None:
            found.append((name, reason))
        reason = obstacle if obstacle is not None and not found else reason
    return found


def obstacle_to(model: Model, engine: str, lengths: Sequence[int]) -> str | None:
    """Why an engine cannot be exact on this model and these prompts, or None if nothing is known against it."""
    if engine == "branch":
        return _obstacle_to_branches(model, max(lengths))
    if engine == "prefix" and min(lengths) < 2:
        return "a prompt has one token, so there is no prefix to share"
    return None


def _obstacle_to_branches(model: Model, longest: int) -> str | None:
    other = [layer for layer, kind in enumerate(model.structure.attention) if kind != "softmax"]
    if other:
        return f"layers {other[:4]}{' …' if len(other) > 4 else ''} are not softmax attention"
    implementation = getattr(text_config(model.hf_model.config), "_attn_implementation", None)
    if implementation not in DENSE_MASK:
        return f"attention {implementation!r} takes no 4-D mask (sdpa and eager do)"
    accepted = inspect.signature(type(model.hf_model).forward).parameters
    if "position_ids" not in accepted and "kwargs" not in accepted:
        return "the model takes no position ids"
    for layer, window in enumerate(windows(model)):
        if window is not None and window < longest:
            return f"layer {layer} attends to {window} tokens, the longest prompt has {longest}"
    return None


def windows(model: Model) -> list[int | None]:
    """How many tokens back each layer attends, as the configuration says it; None is all of them."""
    config = text_config(model.hf_model.config)
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        sliding = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [sliding] * model.n_layers
    by_kind: dict[str, Any] = {
        "sliding_attention": sliding,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return [by_kind.get(kind) for kind in kinds]


def item_batches(
    engine: str, lengths: Sequence[int], n_cells: int, *, cell_budget: int, batch_tokens: int
) -> list[list[int]]:
    """Items in batches of at most ``batch_tokens`` tokens of one forward pass, branches included."""
    branches = len(branch.chunks(range(n_cells), cell_budget)[0]) if engine == "branch" else 0
    return batches([length + branches for length in lengths], batch_tokens)


def batch_price(engine: str, lengths: Sequence[int], n_cells: int, cell_budget: int, batch_tokens: int) -> int:
    """Tokens one batch of items puts through the model."""
    if engine == "branch":
        return branch.tokens(lengths, n_cells, cell_budget)
    return prefix.tokens(lengths, n_cells) if engine == "prefix" else forward.tokens(lengths, n_cells, batch_tokens)
