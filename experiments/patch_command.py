"""``probe patch``: which activations carry the answer from one presentation to the other, in a model and its adapters.

===========  =========================================  =====================================================
stage        writes                                     cost, in forward passes of a prompt, an arm
===========  =========================================  =====================================================
items        items.jsonl                                none
capture      activations/<arm>, tables/readout          1
patch        tables/patch, patch_left_out               at the answer about 1 + cells/tokens a recipient, elsewhere
                                                        about half a pass for each cell and donor
transplant   tables/transplant_rows, transplant         2 + 2·cells/tokens, for each adapter, if asked for
effects      tables/patch_effects, patch_estimates,     none
             patch_quality, table.csv, results.json
report       report.html and figures                    none
===========  =========================================  =====================================================

No answer is generated: what an edit does is seen at the readout, and pairs are sorted by it. Arms read the same tokens.
A stage whose file exists is not run again, so the same command resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from experiments import items, recipes
from experiments.config import Asking, load_as, resolved, settings
from experiments.environment import remember
from experiments.errors import RunError, UsageError
from experiments.inside import PAIR, rows_of
from experiments.intervention_stage import items_of, open_arm, open_study
from experiments.patch_options import (
    ALL,
    ANSWER,
    DECIDING,
    DIRECTIONS,
    KINDS,
    PatchSettings,
    check_model,
    layers_of,
    positions_of,
)
from experiments.patch_rows import Tokens, check_controls, check_spans
from experiments.patch_stage import patch_table, price, sweeps
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, opened
from experiments.study import Study, join, once

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from activations.capturing import Plan
    from activations.model import Model

ARM_TABLES = ("readout", "patch", "patch_left_out")
SPARE_BYTES = 20 * 2**20  # tables, items and report, beside the activations


class PatchConfig(PatchSettings, Asking):
    """A patching study. Defaults study the built-in pair."""

    command: ClassVar[str] = "patch"

    limit: int = Field(100, ge=8, le=1_000_000, description="matched sets a setting")
    estimate: bool = Field(False, description="also estimate each cell by a gradient, and say how good that is")
    transplant: tuple[str, ...] = Field(
        (), description="tokens at which base and adapter activations are exchanged as well: answer, all"
    )

    @field_validator("transplant", mode="before")
    @classmethod
    def _places(cls, value: Any) -> Any:
        several = value if isinstance(value, (list, tuple)) else (value,)
        if set(several) - {ANSWER, ALL} or len(set(several)) != len(several):
            raise PydanticCustomError("places", "name answer, all or both, and none twice")
        return tuple(several)


def load_patch(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> PatchConfig:
    """Configuration of ``probe patch``: a file or the name of a recipe, then ``--set`` pairs, then flags.

    Raises:
        UsageError: no such file or recipe, unknown key, bad value.
    """
    return load_as(PatchConfig, None if path is None else recipes.found(path, PatchConfig.command), overrides, flags)


def tables_of(config: PatchConfig) -> tuple[str, ...]:
    """All tables of a finished study."""
    more = ("patch_estimates", "patch_quality") if config.estimate else ()
    return (*ARM_TABLES, "patch_effects", *more, *(("transplant_rows", "transplant") if config.transplant else ()))


def study(config: PatchConfig, directory: Path, *, config_text: str, reporter: Reporter) -> dict[str, Any]:
    """Do or resume a patching study and return its results.

    Raises:
        UsageError, RunError, PatchError: see the message.
    """
    from tasks.registry import family as family_named

    family = family_named(config.family)
    config = items.for_pairs(config, family)
    grid = settings(config, family)
    items.check_presentations(family, grid)
    _check(config)
    with opened(directory, resolved(config, family, grid), config_text) as run:
        if run.complete() and all(run.has_table(name) for name in tables_of(config)):
            found: dict[str, Any] = run.read_json("results.json", keys=("arms",))
            reporter.say(f"{directory} is complete: nothing to do (report: {run.report})")
            return found
        reporter.log = run.log
        asked = items_of(run, config, family, grid)
        positions = positions_of(config, asked, PAIR)
        check_controls(config, items.frame(asked))
        at = open_study(
            run, config, family, grid, asked, reporter, check_model=lambda model: check_model(config, model)
        )
        tokens = Tokens(at.model, at.asked, at.prompts, positions)
        check_spans(tokens, items.frame(at.asked), positions)
        _announce(at, config, positions, tokens)
        _remember(at)
        _sweep(at, config, positions, tokens)
        if config.transplant:
            _transplant(at, config)
        with reporter.stage("effects", 1):
            results = conclude(at, config)
        with reporter.stage("report", 1):
            from experiments.report.intervention_page import write

            write(run)
        return results


def _check(config: PatchConfig) -> None:
    """Options that can't apply whatever the model."""
    for name in ("max_tokens", "max_unparsed"):
        if getattr(config, name) != type(config).model_fields[name].default:
            raise UsageError(
                f"{name} is {getattr(config, name)}, but no answer is generated: what an edit does is seen at the readout; "
                "leave it out"
            )
    if config.decides != "difference" and not set(DECIDING) & set(config.controls):
        raise UsageError(
            f"decides is {config.decides} but controls is {', '.join(config.controls) or 'empty'}: a cell is specific "
            f"where it exceeds {' and '.join(DECIDING)}; add one, or leave decides out"
        )
    if not config.transplant:
        return
    if not config.adapter:
        raise UsageError(
            f"transplant is {', '.join(config.transplant)} but {config.model} has no adapter to exchange with: give "
            "--adapter, or leave it out"
        )


def capture_plan(config: PatchConfig, model: Model) -> Plan:
    """What is captured at the answer: the sites that are patched, in every layer in which they are."""
    from activations.capturing import Plan

    where = [f"blocks.{layer}.{site}" for site in config.sites for layer in layers_of(config, model, site)]
    return Plan(sites=tuple(where), batch_tokens=config.batch_tokens)


def _announce(at: Study[PatchConfig], config: PatchConfig, positions: Sequence[str], tokens: Tokens) -> None:
    """The plan, before the first pass; a study that does not fit on the disk is refused here."""
    table = items.frame(at.asked)
    couples = list(zip(*(rows_of(table, kind) for kind in PAIR), strict=True))
    ways = [PAIR.index(DIRECTIONS[direction]) for direction in config.directions]
    most = config.pairs * (2 if "disagreement" in config.kinds else len(config.kinds))
    rows: dict[str, list[int]] = {}
    for position in positions:
        fits = [one for one in couples if len({len(tokens.at(int(row), position)) for row in one}) == 1
                and tokens.at(int(one[0]), position)]  # fmt: skip
        rows[position] = [int(one[way]) for one in fits[:most] for way in ways]
    plans = price(config, at.model, at.prompts, rows, tokens, batch_tokens=config.batch_tokens)
    size = capture_plan(config, at.model).size(at.model, at.prompts) * len(at.arms)
    said = "; ".join(
        f"{plan.forward_passes:.1f} passes each at {position} ({plan.cells} cells by the {plan.engine} engine)"
        for position, plan in plans.items()
    )
    passes = len(at.prompts) + sum(plan.items * plan.forward_passes for plan in plans.values())
    more = " and a backward pass for each recipient" if config.estimate else ""
    moved = f"; {2 * len(couples)} prompts exchanged between base and adapter" if config.transplant else ""
    at.reporter.say(
        f"{config.model}: arms {', '.join(at.arms)}; {len(at.prompts):,} prompts, "
        f"{sum(len(prompt.ids) for prompt in at.prompts):,} tokens an arm; one forward pass a prompt to capture "
        f"{', '.join(config.sites)} ({size / 2**20:.1f} MiB), then at most "
        f"{max(len(one) for one in rows.values())} recipients: {said}; at most "
        f"{passes:,.0f} forward passes an arm{more}{moved} -> {at.run.path}"
    )
    stored = sum(file.stat().st_size for file in at.run.activations.rglob("*.h5"))
    free, needed = shutil.disk_usage(at.run.path).free, max(size - stored, 0) + SPARE_BYTES
    if needed > free and not at.run.begun():
        raise RunError(
            f"the study needs {needed / 2**20:.0f} MiB and {at.run.path} has {free / 2**20:.0f} MiB free: free some, lower "
            "--limit, name fewer sites or layers, or give --out on another disk"
        )


def _remember(at: Study[PatchConfig]) -> None:
    from activations.prompts import ids_hash

    remember(at.run, at.model, token_ids=ids_hash(at.prompts), seed=at.config.seed)


def _sweep(at: Study[PatchConfig], config: PatchConfig, positions: Sequence[str], tokens: Tokens) -> None:
    """Capture and patch every arm, then join their tables."""
    run, plan = at.run, capture_plan(config, at.model)
    if not all(run.has_table(name) for name in ARM_TABLES):
        for arm in at.arms:
            with at.model.use(None if arm == "base" else arm):
                data = open_arm(at, arm, plan)
                planned = sweeps(data, config, positions, tokens)
                once(run, "patch_left_out", arm, planned.left_out.copy)
                with at.reporter.stage(f"patch {arm}", len(planned.chunks)) as done:
                    if not run.has_table("patch"):
                        patch_table(data, config, planned, tokens, done, estimate=config.estimate)
        for name in ARM_TABLES:
            join(run, name, at.arms)
    for name in ARM_TABLES:
        for arm in at.arms:
            (run.tables / f"{name}-{arm}.parquet").unlink(missing_ok=True)


def _transplant(at: Study[PatchConfig], config: PatchConfig) -> None:
    from experiments.patch_extra import transplant_chunks, transplant_rows, transplant_table

    run, adapters = at.run, at.model.adapter_names
    if not run.has_table("transplant_rows"):
        for adapter in adapters:
            with at.reporter.stage(f"transplant {adapter}", transplant_chunks(at, config, config.transplant)) as done:
                transplant_rows(at, config, config.transplant, adapter, done)
        join(run, "transplant_rows", adapters)
    for adapter in adapters:
        (run.tables / f"transplant_rows-{adapter}.parquet").unlink(missing_ok=True)
    if not run.has_table("transplant"):
        made = transplant_table(
            run.table("transplant_rows"), at.answers.labels[0], margin=config.margin, seed=config.seed,
            resamples=config.resamples,
        )  # fmt: skip
        run.write_table("transplant", made)


def conclude(at: Study[PatchConfig], config: PatchConfig) -> dict[str, Any]:
    """Everything that follows from the tables: effects, estimates, table.csv, results.json."""
    from experiments.patch_effects import effects_table
    from experiments.patch_extra import estimates
    from experiments.results import plain

    run = at.run
    how: dict[str, Any] = {"seed": config.seed, "resamples": config.resamples}
    if not run.has_table("patch_effects"):
        made = effects_table(run.table("patch"), run.table("patch_left_out"), at.params, config, **how)
        run.write_table("patch_effects", made)
    if config.estimate and not run.has_table("patch_quality"):
        cells, quality = estimates(run.table("patch"), **how)
        run.write_table("patch_estimates", cells)
        run.write_table("patch_quality", quality)
    effects = run.table("patch_effects")
    run.write_text("table.csv", effects.to_csv(index=False))
    results: dict[str, Any] = plain(
        {
            "model": {
                "name": config.model,
                "layers": at.model.n_layers,
                "heads": [at.model.heads(layer) for layer in range(at.model.n_layers)],
            },
            "arms": {arm: _arm_results(run, arm, at.answers.labels[0], effects) for arm in at.arms},
            "estimates": run.table("patch_quality").to_dict("records") if config.estimate else None,
            "transplant": run.table("transplant").to_dict("records") if config.transplant else None,
        }
    )
    run.write_json("results.json", results)
    return results


def _arm_results(run: RunDirectory, arm: str, first: str, effects: pd.DataFrame) -> dict[str, Any]:
    from experiments.patch_effects import curves
    from experiments.results import cost
    from patching.studies import pair_kind

    readout, patch, left = (one[one["arm"] == arm] for one in (run.table(name) for name in ARM_TABLES))
    one, two = (readout[readout["presentation"] == kind] for kind in PAIR)
    gold = np.where(one["gold"] == first, 1, -1)
    found = pair_kind(two["difference"].to_numpy(), one["difference"].to_numpy(), gold)
    used = patch.drop_duplicates(["setting", "key"])["kind"].tolist()
    lost = left.groupby(["direction", "position", "kind", "reason"], sort=False).size()
    return {
        "pairs": {kind: {"found": found.count(kind), "patched": used.count(kind)} for kind in KINDS},
        "left_out": [
            {**dict(zip(("direction", "position", "kind", "reason"), key, strict=True)), "n": int(count)}
            for key, count in lost.items()
        ],
        "studies": curves(effects[effects["arm"] == arm] if len(effects) else effects),
        "cost": cost(patch) if len(patch) else None,
        "reason": "" if len(patch) else "no pair is of a kind that was asked for, or none fits at a position",
    }
