"""Sweeps: every cell applied to every item, exact, at the price of about one forward pass an item.

Activation patching is usually priced at one forward pass for each item and cell, which makes a layer sweep over a
28-layer model 28 times as dear as reading its answers, and a head sweep 448 times. At the answer position nothing but
the last token's own computation changes, so almost all of that is the same prefix again. ``sweep`` runs the prefix once.
Edits at other positions change every later token, but no layer below: there ``sweep`` runs the layers from the edit on.

Cells fall into groups by what can be shared (``plan.py``). For each group it picks the cheapest engine that may run,
proves it on the first items, keeps proving it on random cells while it runs (``check.py``), and falls back to the next
engine, starting over, when a difference is above the bound. An engine asked for by name is never replaced: there the
difference is an error. The result says which engines ran, why, what it cost and how far it was from plain forward passes.

The model is used as it is: with ``model.use("name")`` active, the adapter is part of every run. The same inputs give the
same result; nothing is drawn but by the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from patching import branch, copies, forward, prefix, restart
from patching.check import Evaluate, Ledger, padding_advice, recheck, sample_pairs, self_check
from patching.donors import Donor, check_donors_fit
from patching.edits import Cell, PatchError, Spots, check_cells_fit, check_spots, tokens_of
from patching.plan import Group, Options, check_options, groups, item_batches, joined
from patching.runs import Runs

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.writing import Functions


@dataclass(frozen=True, slots=True, eq=False)
class SweepResult:
    """Answer scores of every item under every cell.

    Attributes:
        cells: cell names, the columns.
        labels: answer labels, in the order of ``logit``'s last axis.
        difference: ``[item, cell]``, score of the first label minus the second.
        logit: ``[item, cell, label]``, log-sum-exp over each label's variants.
        unpatched: ``[item]``, the difference without edits, out of the same forward passes.
        unpatched_logit: ``[item, label]``.
        engine, reason: what ran (engines of several groups of cells joined by +), and why no cheaper engine did.
        engines: for each cell the engine that ran it.
        forward_passes: tokens run for one item, pads included and skipped blocks not, in plain forward passes of its
            prompt; checks excluded.
        check_passes: what the self-check and the re-checked cells added, in the same unit.
        check_max_abs: largest difference from plain forward passes, in logits; NaN if nothing was checked.
        check_bound: what it was held to: 1e-4 of the largest logit, or absolute where that is below 1. In half precision
            the re-checked cells are stated, not held to it; see ``check.py``.
        checked: pairs of the sweep that were recomputed.
    """

    cells: tuple[str, ...]
    labels: tuple[str, ...]
    difference: np.ndarray
    logit: np.ndarray
    unpatched: np.ndarray
    unpatched_logit: np.ndarray
    engine: str
    reason: str
    engines: tuple[str, ...]
    forward_passes: float
    check_passes: float
    check_max_abs: float
    check_bound: float
    checked: int


def sweep(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
    functions: Functions | None = None,
    spots: Spots | None = None,
    cell_budget: int = 256,
    batch_tokens: int = 8192,
    check_cells: int = 20,
    seed: int,
    progress: Callable[[int], None] | None = None,
    engine: str = "auto",
) -> SweepResult:
    """Apply every cell to every recipient and read the answers.

    Args:
        recipients: prompts whose runs are edited.
        cells: edits, see ``patching.edits``.
        answers: answer tokens, two labels or more; the difference is first minus second.
        donors: the vectors that edits take, by name, see ``patching.donors``: ``donors[name][site]`` is
            ``[item, layer, width]`` or ``{layer: [item, width]}``, rows as the recipients.
        functions: callables that edits name, from vectors ``[vector, width]`` to as many, each by itself.
        spots: for each recipient the token numbers of its spans, by label.
        cell_budget: most cells in one forward pass.
        batch_tokens: most tokens in one forward pass; a longer prompt is run alone.
        check_cells: random (item, cell) pairs recomputed by plain forward passes.
        seed: keys the pairs that are checked; it changes no number of the result.
        progress: called with the number of items finished since its last call.
        engine: ``auto``, or ``branch``, ``prefix``, ``copies``, ``restart`` or ``forward`` to insist on one.
    """
    check_options(
        recipients, cell_budget=cell_budget, batch_tokens=batch_tokens, check_cells=check_cells, engine=engine
    )
    if len(answers.labels) < 2:
        raise PatchError(f"a sweep needs two answer labels, got {list(answers.labels)}; give for example yes and no")
    runs = prepared(model, recipients, cells, answers=answers, donors=donors, functions=functions, spots=spots)
    options = Options(cell_budget, batch_tokens)
    lengths = runs.lengths(range(len(recipients)))
    parts = groups(model, lengths, cells, options, engine)
    attempt = _Attempt(runs, options, check_cells, seed, progress, len(parts))
    return _merged(runs, [_run_group(attempt, group, engine) for group in parts], parts)


def prepared(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
    functions: Functions | None = None,
    spots: Spots | None = None,
) -> Runs:
    """Everything an engine needs, after the cells, spots and donors were found to fit."""
    widths = check_cells_fit(model, cells, donors or {}, functions or {})
    check_spots(cells, recipients, spots)
    counts = {
        position: [
            len(tokens_of(prompt, position, spots[item] if spots is not None else {}))
            for item, prompt in enumerate(recipients)
        ]
        for position in {edit.position for cell in cells for edit in cell.edits}
    }
    values = check_donors_fit(cells, donors or {}, widths, counts)
    return Runs(model, recipients, cells, values, answers, functions=functions, spots=spots)


def full_forward(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
    functions: Functions | None = None,
    spots: Spots | None = None,
    cell_budget: int = 256,
    batch_tokens: int = 8192,
    check_cells: int = 20,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> SweepResult:
    """The same sweep by one plain forward pass for each item and cell: the reference, at the full price."""
    return sweep(
        model,
        recipients,
        cells,
        answers=answers,
        donors=donors,
        functions=functions,
        spots=spots,
        cell_budget=cell_budget,
        batch_tokens=batch_tokens,
        check_cells=check_cells,
        seed=seed,
        progress=progress,
        engine="forward",
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one engine gave for one group: scores ``[item, 1 + cell, label]``, and what they cost."""

    engine: str
    reason: str
    logit: np.ndarray
    paid: float
    check_tokens: float
    ledger: Ledger


def _run_group(attempt: _Attempt, group: Group, engine: str) -> _Part:
    failures: list[str] = []
    for name, reason in group.engines:
        part = attempt.run(name, "; ".join(failures) or reason, group)
        if isinstance(part, _Part):
            return part
        failures.append(f"{name}: {part}")
    if engine in ("auto", "forward"):
        raise PatchError(
            f"no engine reproduces plain forward passes ({'; '.join(failures)}); {padding_advice(attempt.runs)}"
        )
    raise PatchError(f"{'; '.join(failures)}; use engine='auto' to fall back to an exact engine")


def _merged(runs: Runs, parts: Sequence[_Part], parted: Sequence[Group]) -> SweepResult:
    """The groups' results as one, in the order of the cells; the unpatched run is the first group's."""
    logit = np.empty((len(runs.recipients), 1 + len(runs.cells), len(runs.answers.labels)), dtype=parts[0].logit.dtype)
    logit[:, 0] = parts[0].logit[:, 0]
    engines = [""] * len(runs.cells)
    for part, group in zip(parts, parted, strict=True):
        logit[:, [1 + number for number in group.numbers]] = part.logit[:, 1:]
        for number in group.numbers:
            engines[number] = part.engine
    difference = logit[..., 0] - logit[..., 1]
    lengths = sum(runs.lengths(range(len(runs.recipients))))
    measured = [part.ledger for part in parts if part.ledger.checked or part.engine != "forward"]
    return SweepResult(
        cells=tuple(cell.name for cell in runs.cells),
        labels=tuple(runs.answers.labels),
        difference=difference[:, 1:],
        logit=logit[:, 1:],
        unpatched=difference[:, 0],
        unpatched_logit=logit[:, 0],
        engine=joined([part.engine for part in parts]),
        reason="; ".join(dict.fromkeys(part.reason for part in parts)),
        engines=tuple(engines),
        forward_passes=sum(part.paid for part in parts) / lengths,
        check_passes=sum(part.check_tokens for part in parts) / lengths,
        check_max_abs=float(np.max([ledger.worst for ledger in measured])) if measured else float("nan"),
        check_bound=max(part.ledger.bound for part in parts),
        checked=sum(part.ledger.checked for part in parts),
    )


@dataclass(slots=True)
class _Attempt:
    """One sweep, in which one engine after another may try each group."""

    runs: Runs
    options: Options
    check_cells: int
    seed: int
    progress: Callable[[int], None] | None
    n_groups: int
    finished: int = 0
    reported: int = 0

    def run(self, engine: str, reason: str, group: Group) -> _Part | str:
        """The group's scores, or why this engine may not be used."""
        runs, evaluate = self.runs, evaluator(self.runs, engine, self.options)
        runs.tokens = 0
        ledger = Ledger(runs)
        if engine != "forward":
            ledger, error = self_check(
                runs, evaluate, group.numbers, seed=self.seed, batch_tokens=self.options.batch_tokens
            )
            if error is not None:
                return error
            if not ledger.ok:
                return f"self-check differs by {ledger.worst:.1e} (bound {ledger.bound:.0e})"
        check_tokens, runs.tokens = runs.tokens, 0
        lengths = runs.lengths(range(len(runs.recipients)))
        place = {number: column for column, number in enumerate(group.numbers, start=1)}
        pairs = sample_pairs(len(lengths), len(runs.cells), self.check_cells, self.seed)
        mine = {item: [(cell, place[cell]) for cell in own if cell in place] for item, own in pairs.items()}
        number = np.float64 if runs.model.dtype.itemsize > 4 else np.float32
        logit = np.empty((len(lengths), 1 + len(place), len(runs.answers.labels)), dtype=number)
        paid, done = 0.0, 0
        alone = 1 if engine == "forward" else self.options.batch_tokens
        for items in item_batches(runs.model, engine, lengths, group, self.options):
            scores = evaluate(items, group.numbers).cpu()
            paid, runs.tokens = paid + runs.tokens, 0
            recheck(runs, ledger, items, mine, scores, batch_tokens=alone)
            check_tokens, runs.tokens = check_tokens + runs.tokens, 0
            if not runs.half and bool(scores.isnan().any()):
                return "gives scores that are NaN"  # whether or not one of these cells was among the checked
            if not ledger.ok and not runs.half:
                return f"a re-checked cell differs by {ledger.worst:.1e} (bound {ledger.bound:.0e})"
            logit[items] = scores.numpy()
            done += len(items)
            self._report(self.finished + done)
        self.finished += done
        return _Part(engine, reason, logit, paid, check_tokens, ledger)

    def _report(self, done: int) -> None:
        """Items finished in all groups, never counted twice when an engine starts over."""
        whole = done // self.n_groups
        if self.progress is not None and whole > self.reported:
            self.progress(whole - self.reported)
            self.reported = whole


def evaluator(runs: Runs, engine: str, options: Options) -> Evaluate:
    """An engine bound to its runs."""
    budget, tokens = options.cell_budget, options.batch_tokens
    if engine == "branch":
        return lambda items, cells: branch.evaluate(runs, items, cells, cell_budget=budget)
    if engine == "prefix":
        return lambda items, cells: prefix.evaluate(runs, items, cells, cell_budget=budget)
    if engine == "copies":
        return lambda items, cells: copies.evaluate(runs, items, cells, cell_budget=budget)
    if engine == "restart":
        return lambda items, cells: restart.evaluate(runs, items, cells, cell_budget=budget, batch_tokens=tokens)
    return lambda items, cells: forward.evaluate(runs, items, cells, batch_tokens=tokens)
