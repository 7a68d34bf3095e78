"""Sweeps: every cell applied to every item, exact, at the price of about one forward pass an item.

Activation patching is usually priced at one forward pass for each item and cell, which makes a layer sweep over a
28-layer model 28 times as dear as reading its answers, and a head sweep 448 times. At the answer position nothing but
the last token's own computation changes, so almost all of that is the same prefix again. ``sweep`` runs the prefix once.

It picks the cheapest engine that may run (``plan.py``), proves it on the first items, keeps proving it on random cells
while it runs (``check.py``), and falls back to the next engine, starting over, when a difference is above the bound. An
engine asked for by name is never replaced: there the difference is an error. The result says which engine ran, why, what
it cost and how far it was from plain forward passes.

The model is used as it is: with ``model.use("name")`` active, the adapter is part of every run. The same inputs give the
same result; nothing is drawn but by the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from patching import branch, forward, prefix
from patching.check import Evaluate, Ledger, recheck, sample_pairs, self_check
from patching.donors import Donor, check_donors_fit
from patching.edits import Cell, PatchError, check_cells_fit
from patching.plan import candidates, check_options, item_batches
from patching.runs import Runs

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens


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
        engine, reason: what ran, and why no cheaper engine did.
        forward_passes: tokens run for one item, pads included, in plain forward passes of its prompt; checks excluded.
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
    cell_budget: int = 256,
    batch_tokens: int = 8192,
    check_cells: int = 20,
    seed: int,
    progress: Callable[[int], None] | None = None,
    engine: str = "auto",
) -> SweepResult:
    """Apply every cell to every recipient at the answer position and read the answers.

    Args:
        recipients: prompts whose runs are edited.
        cells: edits, see ``patching.edits``.
        answers: answer tokens, two labels or more; the difference is first minus second.
        donors: ``donors[name][site]`` is ``[item, layer, width]`` or ``{layer: [item, width]}``, rows as the recipients.
        cell_budget: most cells in one forward pass.
        batch_tokens: most tokens in one forward pass; a longer prompt is run alone.
        check_cells: random (item, cell) pairs recomputed by plain forward passes.
        seed: keys the pairs that are checked; it changes no number of the result.
        progress: called with the number of items finished since its last call.
        engine: ``auto``, or ``branch``, ``prefix`` or ``forward`` to insist on one.
    """
    check_options(
        recipients, cell_budget=cell_budget, batch_tokens=batch_tokens, check_cells=check_cells, engine=engine
    )
    if len(answers.labels) < 2:
        raise PatchError(f"a sweep needs two answer labels, got {list(answers.labels)}; give for example yes and no")
    check_cells_fit(model, cells, donors or {})
    vectors = check_donors_fit(model, cells, donors or {}, len(recipients))
    attempt = _Attempt(
        Runs(model, recipients, cells, vectors, answers), cell_budget, batch_tokens, check_cells, seed, progress
    )
    failures: list[str] = []
    for name, reason in candidates(model, [len(prompt.ids) for prompt in recipients], engine):
        result = attempt.run(name, "; ".join([*failures]) or reason)
        if isinstance(result, SweepResult):
            return result
        failures.append(f"{name}: {result}")
    if engine in ("auto", "forward"):
        raise PatchError(
            f"no engine reproduces plain forward passes ({'; '.join(failures)}); padding is not exact for this model, "
            "so set batch_tokens=1"
        )
    raise PatchError(f"{'; '.join(failures)}; use engine='auto' to fall back to an exact engine")


def full_forward(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
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
        cell_budget=cell_budget,
        batch_tokens=batch_tokens,
        check_cells=check_cells,
        seed=seed,
        progress=progress,
        engine="forward",
    )


@dataclass(slots=True)
class _Attempt:
    """One sweep, which one engine after another may try."""

    runs: Runs
    cell_budget: int
    batch_tokens: int
    check_cells: int
    seed: int
    progress: Callable[[int], None] | None
    reported: int = 0

    def run(self, engine: str, reason: str) -> SweepResult | str:
        """The result, or why this engine may not be used."""
        runs, evaluate = self.runs, self._evaluate(engine)
        runs.tokens = 0
        ledger = Ledger(runs)
        if engine != "forward":
            ledger, error = self_check(runs, evaluate, seed=self.seed, batch_tokens=self.batch_tokens)
            if error is not None:
                return error
            if not ledger.ok:
                return f"self-check differs by {ledger.worst:.1e} (bound {ledger.bound:.0e})"
        check_tokens, runs.tokens = runs.tokens, 0
        lengths = runs.lengths(range(len(runs.recipients)))
        pairs = sample_pairs(len(lengths), len(runs.cells), self.check_cells, self.seed)
        every = list(range(len(runs.cells)))
        number = np.float64 if runs.model.dtype.itemsize > 4 else np.float32
        logit = np.empty((len(lengths), 1 + len(every), len(runs.answers.labels)), dtype=number)
        paid = done = 0
        for items in item_batches(
            engine, lengths, len(every), cell_budget=self.cell_budget, batch_tokens=self.batch_tokens
        ):
            scores = evaluate(items, every).cpu()
            paid, runs.tokens = paid + runs.tokens, 0
            recheck(runs, ledger, items, pairs, scores, batch_tokens=1 if engine == "forward" else self.batch_tokens)
            check_tokens, runs.tokens = check_tokens + runs.tokens, 0
            if not ledger.ok and not runs.half:
                return f"a re-checked cell differs by {ledger.worst:.1e} (bound {ledger.bound:.0e})"
            logit[items] = scores.numpy()
            done += len(items)
            self._report(done)
        difference = logit[..., 0] - logit[..., 1]
        return SweepResult(
            cells=tuple(cell.name for cell in runs.cells),
            labels=tuple(runs.answers.labels),
            difference=difference[:, 1:],
            logit=logit[:, 1:],
            unpatched=difference[:, 0],
            unpatched_logit=logit[:, 0],
            engine=engine,
            reason=reason,
            forward_passes=paid / sum(lengths),
            check_passes=check_tokens / sum(lengths),
            check_max_abs=ledger.worst if ledger.checked or engine != "forward" else float("nan"),
            check_bound=ledger.bound,
            checked=ledger.checked,
        )

    def _evaluate(self, engine: str) -> Evaluate:
        runs = self.runs
        if engine == "branch":
            return lambda items, cells: branch.evaluate(runs, items, cells, cell_budget=self.cell_budget)
        if engine == "prefix":
            return lambda items, cells: prefix.evaluate(runs, items, cells, cell_budget=self.cell_budget)
        return lambda items, cells: forward.evaluate(runs, items, cells, batch_tokens=self.batch_tokens)

    def _report(self, done: int) -> None:
        """Items finished, never counted twice when an engine starts over."""
        if self.progress is not None and done > self.reported:
            self.progress(done - self.reported)
            self.reported = done
