"""Base against adapter: which layers' change carries what training gained.

Problem. An adapter answers better than its base. Its weights differ in every layer, and the size of a weight change says
nothing about what it does. Patching between *presentations* asks where the answer is; here the question is which
activations have to be the adapter's for the gain to be there.

Mechanism. Both arms read the very same tokens, so position by position their activations correspond, with no question of
alignment. Each arm's run is the donor for the other:

- ``into_base``: the adapter's activation of one cell in the base's run. What it brings is *enough* for that much of the
  gain: share = (patched - base) / (adapter - base), of the readout toward the gold answer, means over instances.
- ``into_adapter``: the base's activation in the adapter's run. What it takes away was *needed*:
  share = (adapter - patched) / (adapter - base).

The ratio is of means, so an instance where the arms hardly differ does no harm; it is defined only where the mean gain
exceeds a margin fixed beforehand. Residual cells at the answer position climb to 1 by construction (the last one is the
donor's run); ``attn_out`` and ``mlp_out`` ask for the layers' own parts.

Constraints. Donor and recipient need the same token ids, row by row: another template or tokenizer is refused, with the
first place that differs. An edit at the answer position leaves the recipient's own keys and values of the prompt in place;
one at all positions replaces the layer's part everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from patching.edits import ZERO, Cell, PatchError, Spots
from patching.statistics import Estimate, check_level, drawn_counts, group_codes, group_sums, moved_out
from patching.studies_capture import donor_from_run

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.donors import Donor
    from patching.sweeping import SweepResult

OTHER = "other arm"
"""The source of edits that take from the other arm."""


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """The share of the gain that each cell carries in one direction, with intervals over instances.

    Attributes:
        share: as the module's docstring defines it; NaN with ``reason`` where the gain does not pass the margin.
        moved: the same before it is divided: logits toward the gold answer brought (into the base) or lost (out of the
            adapter).
        total: the gain itself, adapter less base toward the gold answer, a single value.
        right: ``[cell]`` share of rows with the right answer; ``right_unpatched`` that without edits.
    """

    share: Estimate
    moved: Estimate
    total: Estimate
    right: np.ndarray
    right_unpatched: float
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Transplant:
    """Both directions: effects by cell, and the sweeps they come from."""

    cells: tuple[str, ...]
    into_base: Gain
    into_adapter: Gain
    base: SweepResult
    adapter: SweepResult


def refuse_other_tokens(recipients: Sequence[Prompt], donors: Sequence[Prompt], *, names: tuple[str, str]) -> None:
    """PatchError names the first row and token where the two arms' prompts differ."""
    if len(recipients) != len(donors):
        raise PatchError(
            f"{names[0]} has {len(recipients)} prompts and {names[1]} has {len(donors)}; give the same prompts to both"
        )
    for row, (one, two) in enumerate(zip(recipients, donors, strict=True)):
        if one.ids == two.ids:
            continue
        if len(one.ids) != len(two.ids):
            what = f"{len(one.ids)} tokens against {len(two.ids)}"
        else:
            at = next(n for n, pair in enumerate(zip(one.ids, two.ids, strict=True)) if pair[0] != pair[1])
            what = f"token {at} is {one.ids[at]} against {two.ids[at]}"
        raise PatchError(
            f"{names[0]} and {names[1]} differ at prompt {row}: {what}; activations correspond only on identical tokens, "
            "so encode both with one tokenizer and template"
        )


def transplant(
    model: Model,
    prompts: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    adapter: str,
    answers: AnswerTokens,
    gold: np.ndarray,
    adapter_prompts: Sequence[Prompt] | None = None,
    groups: Sequence[Any] | None = None,
    spots: Spots | None = None,
    margin: float,
    batch_tokens: int = 8192,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
    **options: Any,
) -> Transplant:
    """Put each arm's activations into the other's run, cell by cell.

    Args:
        cells: edits at any position; every source but ``zero`` means the other arm.
        adapter: the adapter's name; the base is the same model with it off.
        gold: 1 (first label) or -1 (second) for each prompt.
        adapter_prompts: the adapter's prompts, where they were encoded apart; they must hold the same token ids.
        groups: the instance of each prompt.
        spots: for each prompt the token numbers of its spans, by label, where cells are at spans.
        margin: logits that the mean gain must exceed for shares of it to be defined; fix it beforehand.
        options: what else ``sweep`` takes.
    """
    from patching.sweeping import sweep

    refuse_other_tokens(
        prompts, prompts if adapter_prompts is None else adapter_prompts, names=("the base", f"adapter {adapter!r}")
    )
    signs = np.asarray(gold)
    if signs.shape != (len(prompts),) or not np.isin(signs, (-1, 1)).all():
        raise PatchError(f"gold has shape {list(signs.shape)} for {len(prompts)} prompts; give +1 or -1 for each")
    taken = [
        Cell(cell.name, tuple(edit if edit.source == ZERO else replace(edit, source=OTHER) for edit in cell.edits))
        for cell in cells
    ]
    arms: dict[str | None, Donor] = {}
    for arm in (None, adapter):
        with model.use(arm):
            arms[arm] = donor_from_run(model, prompts, taken, spots=spots, batch_tokens=batch_tokens)
    results: dict[str | None, SweepResult] = {}
    for arm, other in ((None, adapter), (adapter, None)):
        with model.use(arm):
            results[arm] = sweep(
                model,
                prompts,
                taken,
                answers=answers,
                donors={OTHER: arms[other]},
                spots=spots,
                batch_tokens=batch_tokens,
                seed=seed,
                **options,
            )
    base, trained = results[None], results[adapter]
    how: dict[str, Any] = {
        "groups": groups, "margin": margin, "seed": seed, "resamples": resamples, "level": level,
    }  # fmt: skip
    return Transplant(
        tuple(cell.name for cell in cells),
        gain_carried(base.difference, base.unpatched, trained.unpatched, signs, **how),
        gain_carried(trained.difference, base.unpatched, trained.unpatched, signs, into_adapter=True, **how),
        base,
        trained,
    )


def gain_carried(
    patched: np.ndarray,
    base: np.ndarray,
    adapter: np.ndarray,
    gold: np.ndarray,
    *,
    into_adapter: bool = False,
    groups: Sequence[Any] | None = None,
    margin: float,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> Gain:
    """The share of the mean gain that each cell carries, from readouts.

    Args:
        patched: ``[row, cell]`` readout of the base's run with the adapter's activation, or with ``into_adapter`` of the
            adapter's run with the base's.
        base, adapter: ``[row]`` readout of each arm's own run.
        gold: 1 (first label) or -1 for each row.
    """
    check_level(level, resamples)
    if not margin > 0:
        raise PatchError(
            f"margin is {margin}; give a positive number of logits, or shares explode where nothing is gained"
        )
    if not len(patched) == len(base) == len(adapter) == len(gold):
        raise PatchError(
            f"{len(patched)}, {len(base)}, {len(adapter)} and {len(gold)} rows; give the same rows in one order"
        )
    sign = np.asarray(gold, dtype=np.float64)[:, None]
    first, second = (np.asarray(one, dtype=np.float64)[:, None] * sign for one in (base, adapter))
    edited = np.asarray(patched, dtype=np.float64) * sign
    moved = second - edited if into_adapter else edited - first
    codes = group_codes(groups, len(moved))
    sums = group_sums(np.hstack([second - first, moved]), codes)
    sizes = np.bincount(codes).astype(float)
    mean = sums.sum(axis=0) / sizes.sum()
    low, high = np.full((2, len(mean)), np.nan), np.full((2, len(mean)), np.nan)  # [share or logits, gain and cells]
    instances = len(sizes)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = mean[1:] / mean[0]
        if instances > 1:
            means = np.concatenate(
                [
                    (counts @ sums) / (counts @ sizes)[:, None]
                    for counts in drawn_counts(instances, resamples=resamples, seed=seed, purpose="transplant.gain")
                ]
            )
            tail = moved_out(level, sizes.sum() ** 2 / (sizes**2).sum())
            low[0], high[0] = np.nanquantile(means / means[:, :1], [tail, 1 - tail], axis=0)
            low[1], high[1] = np.quantile(means, [tail, 1 - tail], axis=0)
    reason = ""
    if not abs(mean[0]) > margin:
        reason = f"the adapter gains {mean[0]:.3g} logits toward the gold answer, not more than the margin {margin:g}"
        share, low[0], high[0] = (np.full(n, np.nan) for n in (len(share), len(mean), len(mean)))

    def estimate(values: np.ndarray, ends: tuple[np.ndarray, np.ndarray]) -> Estimate:
        return Estimate(values, *ends, np.full(len(values), len(moved)), np.full(len(values), instances))

    return Gain(
        share=estimate(share, (low[0, 1:], high[0, 1:])),
        moved=estimate(mean[1:], (low[1, 1:], high[1, 1:])),
        total=estimate(mean[:1], (low[1, :1], high[1, :1])),
        right=(edited > 0).mean(axis=0),
        right_unpatched=float(((second if into_adapter else first) > 0).mean()),
        reason=reason,
    )
