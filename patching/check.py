"""The proof that a shortcut is exact, made anew in every sweep on the prompts and cells at hand.

A shortcut rests on facts about a model that nobody can list in full: how positions mix, what a mask is combined with,
which state a cache holds. So no engine is trusted. Before it is used, a *self-check* runs it on a few items (the
first, the shortest, the longest) without edits, as a branch that edits nothing, and with one random cell; each must
equal a plain forward pass of that prompt alone. While it runs, random (item, cell) pairs of the actual sweep are
recomputed by plain passes, in padded batches (alone, where plain passes are themselves what is checked). The largest
difference is part of the result.

How large may it be? Rounding grows with the numbers that are added up, so bounds are relative to the largest logit of
the reference runs where that is above 1: 1e-4 in float32 and float64, 1e-2 in half precision. An absolute bound would
refuse the reference itself: on a model with logits near 30, a random direction put into an early layer makes two plain
float32 passes of one prompt, alone and in a padded batch, differ by 3e-4, while in float64 they agree to 1e-14.

In half precision such cells differ by whole logits between plain passes, so equality is stated there and not enforced.
Only the self-check decides, on runs without edits, where rounding is small and a wrong mask or cache is not; its bound
is at least three times what plain passes show among themselves. Re-checked cells go into the result as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from activations.batching import batches
from activations.structure import text_config
from patching import forward
from patching.controls import keyed_generator
from patching.runs import UNPATCHED, Runs

BOUND = 1e-4
HALF_BOUND = 1e-2
NOISE_FACTOR = 3.0

Evaluate = Callable[[Sequence[int], Sequence[int]], Tensor]
"""An engine bound to its runs: items and cells to scores ``[item, 1 + cell, label]``."""

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""What a model raises when it is run in a way it was not written for; running out of memory is not among them."""


@dataclass(slots=True)
class Ledger:
    """Largest difference so far from plain forward passes, and the bound it is held to."""

    runs: Runs
    worst: float = 0.0
    noise: float = 0.0
    checked: int = 0

    @property
    def bound(self) -> float:
        if self.runs.half:
            return max(HALF_BOUND * self.runs.scale, NOISE_FACTOR * self.noise)
        return BOUND * self.runs.scale

    @property
    def ok(self) -> bool:
        return self.worst <= self.bound  # False for NaN

    def compare(self, scores: Tensor, reference: Tensor) -> None:
        difference = _difference(scores, reference)
        self.worst = difference if difference != difference else max(self.worst, difference)


def sample_pairs(n_items: int, n_cells: int, count: int, seed: int) -> dict[int, list[int]]:
    """``count`` different random pairs, or all if there are fewer, as ``{item: [cell, ...]}``."""
    total = n_items * n_cells
    rng = keyed_generator("patching.check", seed, n_items, n_cells)
    result: dict[int, list[int]] = {}
    for number in sorted(int(value) for value in rng.choice(total, size=min(count, total), replace=False)):
        result.setdefault(number // n_cells, []).append(number % n_cells)
    return result


def self_check(
    runs: Runs, evaluate: Evaluate, cells: Sequence[int], *, seed: int, batch_tokens: int
) -> tuple[Ledger, str | None]:
    """Try an engine on a few items and one of these cells. The second value says what it raised, if it did."""
    lengths = runs.lengths(range(len(runs.recipients)))
    items = list(dict.fromkeys([0, lengths.index(min(lengths)), lengths.index(max(lengths))]))
    edited = [number for number in cells if runs.cells[number].edits] or [UNPATCHED]
    cell = edited[int(keyed_generator("patching.self_check", seed, len(edited)).integers(len(edited)))]
    ledger = Ledger(runs)
    plain = changed = _alone(runs, items, UNPATCHED)
    if runs.half:
        cell = UNPATCHED
        ledger.noise = _difference(forward.evaluate(runs, items, [], batch_tokens=batch_tokens)[:, 0], plain)
    else:
        changed = _alone(runs, items, cell)
    try:
        # In batches that the sweep itself could make: where it pads nothing, padding is not held against an engine.
        parts = batches([len(runs.recipients[item].ids) for item in items], batch_tokens)
        scores = torch.cat([evaluate([items[row] for row in part], [UNPATCHED, cell]) for part in parts])
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return ledger, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    order = [row for part in parts for row in part]
    ledger.compare(scores, torch.stack([plain, plain, changed], dim=1)[order])
    return ledger, None


def recheck(
    runs: Runs,
    ledger: Ledger,
    items: Sequence[int],
    pairs: Mapping[int, Sequence[tuple[int, int]]],
    scores: Tensor,
    *,
    batch_tokens: int,
) -> None:
    """Recompute the sampled pairs among these items, whose scores ``[item, column, label]`` an engine has given.

    ``pairs`` holds for each item the sampled cells, each with its column.
    """
    wanted = [(row, item, *pair) for row, item in enumerate(items) for pair in pairs.get(item, ())]
    if wanted:
        chosen = [(item, cell) for _, item, cell, _ in wanted]
        reference = forward.run_pairs(runs, chosen, batch_tokens=batch_tokens, reference=True)
        ledger.compare(torch.stack([scores[row, column] for row, _, _, column in wanted]), reference)
        ledger.checked += len(wanted)


def padding_advice(runs: Runs) -> str:
    """Why plain forward passes may differ from plain forward passes, and what to do."""
    config = text_config(runs.model.hf_model.config)
    if runs.model.dtype == torch.float64 and getattr(config, "_attn_implementation", None) == "eager":
        return (
            "eager attention takes its softmax in float32, where the mask of a float64 model becomes minus infinity and "
            "pads become NaN, so set batch_tokens=1 or load the model in float32"
        )
    return "padding is not exact for this model, or an edit drives it out of range; set batch_tokens=1 to see which"


def _alone(runs: Runs, items: Sequence[int], cell: int) -> Tensor:
    """Reference scores ``[item, label]``, each item in a batch of its own, unpadded."""
    return forward.run_pairs(runs, [(item, cell) for item in items], batch_tokens=1, reference=True)


def _difference(one: Tensor, two: Tensor) -> float:
    return float((one.double().cpu() - two.double().cpu()).abs().max())
