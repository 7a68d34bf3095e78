"""What a sweep will cost and which engine may run it, worked out before anything runs.

Five engines give the same numbers at different prices, in units of one plain forward pass of the prompt (T tokens, C
cells, L layers; a cell that edits layer l from its beginning starts at l):

=========  ==================  ============================================================================
engine     price               may run when
=========  ==================  ============================================================================
branch     (T + C) / T         edits at the answer position; every layer is softmax attention, no window shorter than
                               the longest prompt, sdpa or eager attention, position ids accepted
prefix     (T + C) / T         edits at the answer position; every prompt has two tokens or more, sdpa or eager
                               attention, position ids accepted, the model can continue from a cache
copies     (T + C) / T         as prefix, with any attention; but keys and values are held once a cell
restart    1 + sum (L - l) / L always
forward    1 + C               always
=========  ==================  ============================================================================

Cells whose edits are all at the answer position and the others are two groups, and each gets its engine: the cheapest
that may run, in the table's order where prices are equal. Cells beyond ``cell_budget`` go into further passes of the
branch engine, each of which pays for the prompt again, so there the prefix engine is the cheaper one. It also goes first
for long prompts: under a mask of ours attention reads all pairs of tokens, where a plain causal pass leaves half of them
out. Below ``LONG`` tokens that is less than what a second pass costs.

What may run is still checked by numbers on the actual prompts before it is used (``check.py``): a condition that is not
on the list, say a window the configuration does not mention, shows there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from activations.batching import batches
from activations.structure import text_config
from activations.taps import backbone
from patching import branch, forward, prefix, restart
from patching.edits import ANSWER, ZERO, Cell, PatchError, Spots, check_cells_fit, check_spots
from patching.windows import chunk
from patching.windows import windows as windows

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt

ENGINES = ("branch", "prefix", "copies", "restart", "forward")
DENSE_MASK = ("sdpa", "eager")
LONG = 512
"""Prompts longer than this go to the prefix engine before the branch engine; the two take equally long near it."""
SELF_CHECK_RUNS = 10
"""Forward passes of the self-check, about: three items, each plain, edited, and once through the engine."""


@dataclass(frozen=True, slots=True)
class Options:
    """What bounds the passes of a sweep: most cells, and most tokens, in one of them."""

    cell_budget: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one engine runs together.

    Attributes:
        numbers: their numbers among the cells of the sweep.
        starts: for each the first block that it has to run.
        engines: engines that may run them, best first, each with the reason why no better one does.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    engines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One group of a plan: how many cells, by which engine and why, and tokens put through the model."""

    engine: str
    reason: str
    cells: int
    tokens: float


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The price of a sweep, as it would be paid if its self-checks hold.

    Attributes:
        parts: one entry a group of cells.
        items, cells: size of the result.
        tokens: tokens put through the model, pads included, skipped blocks and checks not.
        forward_passes: the same per item, in plain forward passes of its prompt.
        mask_bytes: largest attention mask held at one time (branch and prefix engines).
        check_tokens: at most what the self-checks and the re-checked cells add.
    """

    parts: tuple[Part, ...]
    items: int
    cells: int
    tokens: float
    forward_passes: float
    mask_bytes: int
    check_tokens: int

    @property
    def engine(self) -> str:
        """The engines that would run, joined by +."""
        return joined([part.engine for part in self.parts])

    @property
    def reason(self) -> str:
        """Why not cheaper ones."""
        return "; ".join(dict.fromkeys(part.reason for part in self.parts))

    def __str__(self) -> str:
        shares = ", ".join(f"{part.cells} cells by the {part.engine} engine ({part.reason})" for part in self.parts)
        return (
            f"{self.items} items x {shares}: {self.tokens:,.0f} tokens, {self.forward_passes:.2f} forward passes an item, "
            f"mask {self.mask_bytes / 2**20:.1f} MiB, checks {self.check_tokens:,} tokens"
        )


def joined(engines: Sequence[str]) -> str:
    """Engines of several groups as one word."""
    return "+".join(dict.fromkeys(engines))


def sweep_plan(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    spots: Spots | None = None,
    cell_budget: int = 256,
    batch_tokens: int = 8192,
    check_cells: int = 20,
    engine: str = "auto",
) -> SweepPlan:
    """Price a sweep without running it; the arguments are those of ``sweep``. Donors and functions are taken as given."""
    every = [edit for cell in cells for edit in cell.edits]
    check_cells_fit(
        model,
        cells,
        {edit.source for edit in every if edit.how != "function"} - {ZERO},
        {edit.source for edit in every if edit.how == "function"},
    )
    check_options(
        recipients, cell_budget=cell_budget, batch_tokens=batch_tokens, check_cells=check_cells, engine=engine
    )
    check_spots(cells, recipients, spots)
    options = Options(cell_budget, batch_tokens)
    lengths = [len(prompt.ids) for prompt in recipients]
    parts, masks, proofs = [], 0, 0
    for group in groups(model, lengths, cells, options, engine):
        chosen, reason = group.engines[0]
        passes = item_batches(model, chosen, lengths, group, options)
        each = [[lengths[item] for item in batch] for batch in passes]
        tokens = sum(batch_price(model, chosen, batch, group.starts, options) for batch in each)
        parts.append(Part(chosen, reason, len(group.numbers), tokens))
        proofs += 0 if chosen == "forward" else SELF_CHECK_RUNS
        masks = max(masks, _mask_bytes(chosen, each, len(group.numbers), options, model.dtype.itemsize))
    total = sum(part.tokens for part in parts)
    return SweepPlan(
        parts=tuple(parts),
        items=len(lengths),
        cells=len(cells),
        tokens=total,
        forward_passes=total / sum(lengths),
        mask_bytes=masks,
        check_tokens=max(lengths) * (min(check_cells, len(lengths) * len(cells)) + proofs),
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


def groups(
    model: Model, lengths: Sequence[int], cells: Sequence[Cell], options: Options, engine: str = "auto"
) -> list[Group]:
    """Cells that edit the answer position alone, and the others, each group with the engines that may run it."""
    apart: dict[bool, list[int]] = {}
    for number, cell in enumerate(cells):
        apart.setdefault(all(edit.position == ANSWER for edit in cell.edits), []).append(number)
    made = []
    for at_answer, numbers in sorted(apart.items(), reverse=True):
        starts = tuple(restart.start_of(cells[number], model.n_layers) for number in numbers)
        wide = None if at_answer else _wide_edit(cells[numbers[0]])
        made.append(Group(tuple(numbers), starts, tuple(_engines(model, lengths, starts, options, wide, engine))))
    return made


def _wide_edit(cell: Cell) -> str:
    position = next(edit.position for edit in cell.edits if edit.position != ANSWER)
    return f"cell {cell.name!r} edits position {position}, which later tokens read"


def _engines(
    model: Model, lengths: Sequence[int], starts: Sequence[int], options: Options, wide: str | None, engine: str
) -> list[tuple[str, str]]:
    found: list[tuple[str, float]] = []
    obstacles: dict[str, str] = {}
    for name in ENGINES:
        obstacle = wide if wide is not None and name in ("branch", "prefix", "copies") else None
        obstacle = obstacle or obstacle_to(model, name, lengths)
        if engine == name and obstacle is not None:
            raise PatchError(f"the {name} engine cannot run here: {obstacle}; use engine='auto'")
        if engine == name:
            return [(name, "asked for")]
        if obstacle is None:
            late = 1 if name == "branch" and max(lengths) > LONG else 0
            found.append((name, late + batch_price(model, name, [max(lengths)], starts, options)))
        else:
            obstacles[name] = obstacle
    found.sort(key=lambda one: one[1])  # stable: at one price the table's order decides
    first = ENGINES.index(found[0][0])
    reason = next((obstacles[name] for name in ENGINES[:first] if name in obstacles), "cheapest")
    return [(name, reason) for name, _ in found]


def obstacle_to(model: Model, engine: str, lengths: Sequence[int]) -> str | None:
    """Why an engine cannot be exact on this model and these prompts, or None if nothing is known against it."""
    if engine == "branch":
        return _obstacle_to_branches(model, max(lengths))
    if engine in ("prefix", "copies") and min(lengths) < 2:
        return "a prompt has one token, so there is no prefix to share"
    if engine == "prefix":
        size = chunk(model)
        if size is not None and size < max(lengths):
            return f"layers attend within chunks of {size} tokens, the longest prompt has {max(lengths)}"
        return _obstacle_to_masks(model)
    return None


def _obstacle_to_branches(model: Model, longest: int) -> str | None:
    other = [layer for layer, kind in enumerate(model.structure.attention) if kind != "softmax"]
    if other:
        return f"layers {other[:4]}{' …' if len(other) > 4 else ''} are not softmax attention"
    if (obstacle := _obstacle_to_masks(model)) is not None:
        return obstacle
    for layer, window in enumerate(windows(model)):
        if window is not None and window < longest:
            return f"layer {layer} attends to {window} tokens, the longest prompt has {longest}"
    return None


def _obstacle_to_masks(model: Model) -> str | None:
    implementation = getattr(text_config(model.hf_model.config), "_attn_implementation", None)
    if implementation not in DENSE_MASK:
        return f"attention {implementation!r} takes no 4-D mask (sdpa and eager do)"
    accepted = inspect.signature(type(backbone(model)).forward).parameters
    if "position_ids" not in accepted and "kwargs" not in accepted:
        return "the model takes no position ids"
    return None


def item_batches(model: Model, engine: str, lengths: Sequence[int], group: Group, options: Options) -> list[list[int]]:
    """Items in batches of at most ``batch_tokens`` tokens of one forward pass, branches and copies included."""
    size = len(branch.chunks(range(len(group.numbers)), options.cell_budget)[0])
    most = options.batch_tokens
    if engine == "branch":
        lengths = [length + size for length in lengths]
    elif engine in ("prefix", "copies"):
        lengths = [max(length, size + 1) for length in lengths]
    elif engine == "restart":
        most = min(most, restart.KEPT_BYTES // max(1, restart.kept_bytes(model, group.starts, 1)))
    return batches(lengths, max(1, most))


def batch_price(model: Model, engine: str, lengths: Sequence[int], starts: Sequence[int], options: Options) -> float:
    """Tokens one batch of items puts through the model, for cells that start at these blocks."""
    if engine == "branch":
        return branch.tokens(lengths, len(starts), options.cell_budget)
    if engine in ("prefix", "copies"):
        return prefix.tokens(lengths, len(starts))
    if engine == "restart":
        return restart.tokens(lengths, starts, model.n_layers)
    return forward.tokens(lengths, len(starts), options.batch_tokens)


def _mask_bytes(engine: str, each: Sequence[Sequence[int]], n_cells: int, options: Options, itemsize: int) -> int:
    if engine == "branch":
        return branch.mask_bytes(each, n_cells, options.cell_budget, itemsize)
    if engine != "prefix":
        return 0
    size = 1 + min(n_cells, options.cell_budget)
    return max(len(lengths) * size * (max(lengths) - 1 + size) * itemsize for lengths in each)
