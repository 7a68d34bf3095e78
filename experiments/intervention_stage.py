"""What patching and ablation share: the study they open, pairs in a keyed order, donors from a store, sweeps in chunks.

A command about interventions asks nothing but what an edit does to the readout, so it captures what its donors need in
one pass of every prompt (the readouts come with it) and then sweeps. ``probe run`` has captured them already and calls the
same stages. Both presentations of a pair stand beside each other in every table; pairs are taken in an order that depends
on the seed and the instances alone, so a smaller study is the beginning of a larger one.

A table is made in chunks of recipients, each a sweep of its own: a kill loses one chunk, and each chunk pays for its own
check against plain forward passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import items
from experiments.config import AnyConfig, Asking, Setting
from experiments.environment import load_model
from experiments.errors import RunError
from experiments.inside import PAIR, capture, readout_table, rows_of
from experiments.progress import Reporter
from experiments.rundir import RunDirectory
from experiments.study import Study, once

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from activations.capturing import Plan
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore
    from patching.edits import Cell, Spots
    from patching.sweeping import SweepResult
    from tasks.contracts import Family

CHUNK = 64  # recipients in one sweep: a kill loses one chunk, and each chunk pays for its own check
IDENTITY = ["setting", "n", "key", "presentation", "cell", "gold"]
CELL_BUDGET = 256  # most cells in one forward pass, where nothing else is asked for


@dataclass(frozen=True, slots=True)
class Arm:
    """Everything that the sweeps of one arm need. ``table`` holds the readouts, rows as in ``prompts`` and the store."""

    run: RunDirectory
    model: Model
    name: str
    store: ActivationStore
    table: pd.DataFrame
    prompts: Sequence[Prompt]
    answers: AnswerTokens
    config: Asking


@dataclass(frozen=True, slots=True)
class Transfer:
    """One recipient prompt and its donors, as row numbers of the run."""

    recipient: int
    donor: int
    unrelated: int
    agree: bool


Pair = tuple[int, int, bool]
"""Row of the original, row of the equivalent, whether their readouts have one sign."""


def items_of(run: RunDirectory, config: Asking, family: Family, grid: Sequence[Setting]) -> list[items.Row]:
    """All prompts of the study, made unless they are there. What they alone can refuse comes before a model is loaded."""
    items.make(run, config, family, grid)
    return items.rows([item for _, made in items.stored(run) for item in made])


def open_study(
    run: RunDirectory,
    config: AnyConfig,
    family: Family,
    grid: Sequence[Setting],
    asked: list[items.Row],
    reporter: Reporter,
    *,
    check_model: Callable[[Model], None],
) -> Study[AnyConfig]:
    """Load the model and encode every prompt; nothing is written that ties the directory to them yet.

    Args:
        asked: of ``items_of``.
        check_model: refuses options that this model can't meet.

    Raises:
        UsageError, RunError, ModelError: see the message.
    """
    from activations.readout import answer_tokens

    assert family.answers is not None
    model = load_model(config, reporter)
    check_model(model)
    prompts = model.encode([row.presentation.chat() for row in asked])
    longest = max(len(prompt.ids) for prompt in prompts)
    if model.context is not None and longest > model.context:
        raise RunError(
            f"the longest prompt has {longest} tokens and {model.name} reads at most {model.context}: ask smaller instances"
        )
    return Study(
        run=run,
        config=config,
        family=family,
        params={setting.label: setting.params for setting in grid},
        model=model,
        arms=("base", *model.adapter_names),
        asked=asked,
        prompts=prompts,
        answers=answer_tokens(model, family.answers),
        reporter=reporter,
    )


def open_arm(study: Study[Any], arm: str, plan: Plan) -> Arm:
    """Capture an arm's activations, unless they are there, and make its table of readouts. The arm has to be in use."""
    with study.reporter.stage(f"capture {arm}", len(study.prompts)) as done:
        store = capture(study.run.activations / arm, study.model, study.asked, study.prompts, study.answers, plan, done)
    table = once(study.run, "readout", arm, lambda: readout_table(store, study.asked, study.model))
    return Arm(
        run=study.run,
        model=study.model,
        name=arm,
        store=store,
        table=table,
        prompts=study.prompts,
        answers=study.answers,
        config=study.config,
    )


def pairs(arm: Arm) -> list[Pair]:
    """All pairs, in an order keyed by the instances and the seed."""
    original, equivalent = (rows_of(arm.table, kind) for kind in PAIR)
    signs = np.sign(arm.table["difference"].to_numpy())
    found = [(int(o), int(e), bool(signs[o] == signs[e])) for o, e in zip(original, equivalent, strict=True)]

    def order(pair: Pair) -> bytes:
        return hashlib.sha256(f"{arm.config.seed} {row_name(arm.table, pair[0])}".encode()).digest()

    return sorted(found, key=order)


def both_ways(arm: Arm, chosen: Sequence[Pair]) -> list[Transfer]:
    """Each pair as two recipients, the equivalent first; the unrelated donor is another instance of the same setting."""
    from patching.controls import derangement

    place = dict(zip(PAIR, (rows_of(arm.table, kind) for kind in PAIR), strict=True))
    names = [row_name(arm.table, int(row)) for row in place["original"]]
    settings = arm.table["setting"].iloc[place["original"]].tolist()
    other = dict(zip(names, derangement(names, settings, seed=arm.config.seed), strict=True))
    transfers = []
    for original, equivalent, agree in chosen:
        stranger = other[row_name(arm.table, original)]
        transfers.append(Transfer(equivalent, original, int(place["original"][stranger]), agree))
        transfers.append(Transfer(original, equivalent, int(place["equivalent"][stranger]), agree))
    return transfers


def chunks(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Recipients in the pieces that are swept, and stored, together."""
    return [transfers[start : start + CHUNK] for start in range(0, len(transfers), CHUNK)]


def swept(
    arm: Arm,
    chunk: Sequence[Transfer],
    cells: Sequence[Cell],
    donors: Mapping[str, Any],
    *,
    check_cells: int,
    cell_budget: int | None = None,
    spots: Spots | None = None,
) -> SweepResult:
    """Every cell applied to the recipients of a chunk."""
    from patching.sweeping import sweep

    return sweep(
        arm.model,
        [arm.prompts[one.recipient] for one in chunk],
        cells,
        answers=arm.answers,
        donors=donors,
        spots=spots,
        cell_budget=cell_budget or CELL_BUDGET,
        batch_tokens=arm.config.batch_tokens,
        check_cells=check_cells,
        seed=arm.config.seed,
    )


def recipients(arm: Arm, chunk: Sequence[Transfer], result: SweepResult) -> pd.DataFrame:
    """The recipients' identity, their and their donors' readouts; ``presentation`` is the recipient's."""
    difference = arm.table["difference"].to_numpy()
    base = arm.table.iloc[[one.recipient for one in chunk]][IDENTITY].reset_index(drop=True)
    return base.assign(
        pair=["agreeing" if one.agree else "disagreeing" for one in chunk],
        unpatched=result.unpatched.astype(np.float64),
        donor_difference=difference[[one.donor for one in chunk]],
        **cost(result),
    )


def cost(result: SweepResult) -> dict[str, Any]:
    """What a sweep ran on, what it cost and how far its checked cells were from plain forwards, as columns."""
    return {
        "engine": result.engine,
        "forward_passes": result.forward_passes,
        "checked": result.checked,
        "check_max_abs": result.check_max_abs,
        "check_bound": result.check_bound,
    }


def cost_of(table: pd.DataFrame) -> dict[str, Any]:
    """What a sweep ran on, what it cost, and how far its checked cells were from plain forwards."""
    sweeps = table.drop_duplicates(["engine", "forward_passes", "checked", "check_max_abs"])
    return {
        "engine": sorted(set(sweeps["engine"])),
        "forward_passes_per_item": float(sweeps["forward_passes"].mean()),
        "cells_checked": int(sweeps["checked"].sum()),
        "largest_difference": float(sweeps["check_max_abs"].max()),
        "bound": float(sweeps["check_bound"].min()),
    }


def donor(arm: Arm, rows: Sequence[int], site: str) -> dict[str, Any]:
    """The stored activations of these rows, every layer that has them: ``{site: {layer: [item, width]}}``."""
    from patching.donors import donor_from_store

    layers = [layer for layer in range(arm.model.n_layers) if site != "z" or arm.model.heads(layer)]
    return donor_from_store(arm.store, rows, sites=(site,), layers=layers)


def row_name(table: pd.DataFrame, row: int) -> str:
    """Setting and instance of a row: what a pair is called in keyed draws."""
    return f"{table['setting'].iat[row]} {table['key'].iat[row]}"
