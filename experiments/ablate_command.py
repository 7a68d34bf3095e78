"""``probe ablate``: cut the heads that carry the answer, and see what is left of competence and of agreement.

==========  =================================================  =====================================================
stage       writes                                             cost, in forward passes of a prompt, an arm
==========  =================================================  =====================================================
items       items.jsonl                                        none
capture     activations/<arm>, tables/readout                  1
heads       tables/heads                                       about 1 + heads/tokens, on the chosen pairs
ablate      tables/ablate                                      about 1 + sets/tokens, on the test pairs
grid        tables/head_rows, if asked for                     about 1 + heads/tokens, on the test pairs
effects     tables/head_effects, ablation, ablation_above,     none
            ablation_notes, head_grid; table.csv,
            results.json, figures, report.html
==========  =================================================  =====================================================

A cut at every position costs the layers above it instead, about half a pass for each head or set. A stage whose file
exists is not run again, so the same command resumes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from experiments import ablate_halves, items, recipes
from experiments import intervention_stage as stage
from experiments.ablate_options import AblateSettings, check, check_model
from experiments.ablating import ablate_arm, arm_tables
from experiments.config import Asking, load_as, resolved, settings
from experiments.environment import remember
from experiments.errors import RunError, UsageError
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, opened
from experiments.study import Study, arm_table, join

if TYPE_CHECKING:
    import pandas as pd

    from activations.capturing import Plan
    from activations.model import Model

SPARE_BYTES = 20 * 2**20  # tables, items and report, beside the activations


class AblateConfig(AblateSettings, Asking):
    """Heads cut, and what is left of competence and agreement."""

    command: ClassVar[str] = "ablate"

    limit: int = Field(100, ge=8, le=1_000_000, description="matched sets a setting")
    pairs: int = Field(40, ge=2, le=100_000, description="pairs that heads are ranked on, at most")
    check_cells: int = Field(20, ge=1, le=10_000, description="cells recomputed by plain forwards in every sweep")
    store_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="activations are kept as")


def load_ablate(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> AblateConfig:
    """Configuration of ``probe ablate``: a file or the name of a recipe, then ``--set`` pairs, then flags.

    Raises:
        UsageError: no such file or recipe, unknown key, bad value.
    """
    return load_as(AblateConfig, None if path is None else recipes.found(path, AblateConfig.command), overrides, flags)


def tables_of(config: AblateConfig) -> tuple[str, ...]:
    """All tables of a finished ablation, each made for every arm and joined at the end."""
    return ("readout", *arm_tables(config))


def ablate(config: AblateConfig, directory: Path, *, config_text: str, reporter: Reporter) -> dict[str, Any]:
    """Do or resume an ablation and return its results.

    Raises:
        UsageError, RunError: see the message.
    """
    from activations.prompts import ids_hash
    from patching.edits import head_map
    from tasks.registry import family as family_named

    family = family_named(config.family)
    config = items.for_pairs(config, family)
    grid = settings(config, family)
    items.check_presentations(family, grid)
    _check(config)
    check(config, {setting.label: setting.params for setting in grid})
    with opened(directory, resolved(config, family, grid), config_text) as run:
        if run.complete() and all(run.has_table(name) for name in tables_of(config)):
            found: dict[str, Any] = run.read_json("results.json", keys=("arms",))
            reporter.say(f"{directory} is complete: nothing to do (report: {run.report})")
            return found
        reporter.log = run.log

        asked = stage.items_of(run, config, family, grid)
        halves = ablate_halves.halves(items.frame(asked), config, {setting.label: setting.params for setting in grid})
        study = stage.open_study(
            run, config, family, grid, asked, reporter, check_model=lambda model: check_model(config, model)
        )
        _announce(study, config, halves)
        remember(run, study.model, token_ids=ids_hash(study.prompts), seed=config.seed)
        for arm in study.arms:
            with study.model.use(None if arm == "base" else arm):
                _arm(study, arm, config, halves)
        for name in tables_of(config):
            join(run, name, study.arms)
        for name in tables_of(config):
            for arm in study.arms:
                (run.tables / f"{name}-{arm}.parquet").unlink(missing_ok=True)
                # A kill between a table and the removal of its chunks leaves these.
                shutil.rmtree(run.tables / f"parts-{name}-{arm}", ignore_errors=True)
        results = conclude(run, study.arms, study.answers.labels, config, halves, head_map(study.model))
        with reporter.stage("report", 1):
            from experiments.report.intervention_page import write as write_report

            write_report(run)
        return results


def _check(config: AblateConfig) -> None:
    """Keys that are about answers, which are not asked for, or about a ranking that is not made."""
    without = {"max_tokens": "no answer is generated: what a cut does is seen at the readout",
               "max_unparsed": "no answer is generated: what a cut does is seen at the readout"}  # fmt: skip
    if config.chosen is not None:
        without["pairs"] = f"heads are given ({', '.join(config.chosen)}), so none are ranked"
    for name, reason in without.items():
        if getattr(config, name) != type(config).model_fields[name].default:
            raise UsageError(f"{name} is {getattr(config, name)}, but {reason}; leave it out")


def conclude(
    run: RunDirectory,
    arms: Sequence[str],
    labels: Sequence[str],
    config: AblateConfig,
    halves: ablate_halves.Halves,
    heads_of: Sequence[int | None],
) -> dict[str, Any]:
    """Write what follows from the tables: table.csv and results.json.

    Args:
        heads_of: heads of each layer, None where there is none to cut.
    """
    from experiments.ablate_results import ablation
    from experiments.results import plain

    run.write_text("table.csv", summary(run.table("ablation"), run.table("ablation_notes")).to_csv(index=False))
    found = {}
    for arm in arms:
        heads = None if config.chosen is not None else arm_table(run, "heads", arm)
        found[arm] = {
            "ablation": ablation(heads, arm_table(run, "ablate", arm), arm_table(run, "readout", arm), labels, config)
        }
    sides = {"ranked": len(halves.ranked), "tested": len(halves.tested), "left_out": halves.left_out}
    shape = {"name": config.model, "layers": len(heads_of), "heads": list(heads_of)}
    results: dict[str, Any] = plain({"model": shape, "arms": found, "pairs": sides})
    run.write_json("results.json", results)
    return results


def summary(ablation: pd.DataFrame, notes: pd.DataFrame) -> pd.DataFrame:
    """A row for each arm and set, and a column for each measure: before, after and change."""
    import pandas as pd

    shown = ablation[ablation["change"].notna()]
    wide = shown.pivot(index=["arm", "ablated"], columns="measure", values=["before", "after", "change"])
    wide = wide.dropna(axis=1, how="all")
    wide.columns = pd.Index([f"{measure}_{side}" for side, measure in wide.columns])
    about = ablation.drop_duplicates(["arm", "ablated"])[["arm", "ablated", "family", "heads", "n", "n_groups"]]
    return about.merge(wide.reset_index(), on=["arm", "ablated"], how="left").merge(notes, on=["arm", "ablated"])


def _announce(study: Study[AblateConfig], config: AblateConfig, halves: ablate_halves.Halves) -> None:
    """The plan, before the first pass; what does not fit on the disk is refused here."""
    model, run = study.model, study.run
    size = _plan(config, model).size(model, study.prompts) * len(study.arms)
    tokens = sum(len(prompt.ids) for prompt in study.prompts)
    dropped = f", {halves.left_out} left out since their instance is on the other side" if halves.left_out else ""
    ranked = "" if config.chosen is not None else f"{len(halves.ranked):,} pairs to rank heads on, "
    study.reporter.say(
        f"{config.model}: arms {', '.join(study.arms)}; {len(study.prompts):,} prompts, {tokens:,} tokens an arm; {ranked}"
        f"{len(halves.tested):,} to cut them on{dropped}; one forward pass a prompt to capture z ({size / 2**20:.1f} MiB), "
        f"then {'; '.join(_prices(study, config))} -> {run.path}"
    )
    stored = sum(file.stat().st_size for file in run.activations.rglob("*.h5"))
    free, needed = shutil.disk_usage(run.path).free, max(size - stored, 0) + SPARE_BYTES
    if needed > free and not run.begun():
        raise RunError(
            f"the run needs {needed / 2**20:.0f} MiB and {run.path} has {free / 2**20:.0f} MiB free: free some, lower "
            "--limit, set store_dtype=bfloat16 or give --out on another disk"
        )


def _prices(study: Study[AblateConfig], config: AblateConfig) -> list[str]:
    """What each sweep costs, in forward passes of a prompt, by its plan on the first prompts.

    Which heads are cut is not known before the ranking, so random ones stand for them.
    """
    from patching.edits import head_cells, head_map
    from patching.effects import random_head_sets
    from patching.heads import ablation_cells, head_sets
    from patching.plan import sweep_plan

    heads = head_map(study.model)
    assert config.heads is not None
    some = random_head_sets(heads, size=config.heads, count=1, exclude=(), seed=config.seed)[0]
    sets = head_sets(heads, some, count=config.random_sets, seed=config.seed, leave_one_out=config.leave_one_out)
    swept = {
        "to rank": [] if config.chosen is not None else head_cells(heads),
        f"to cut ({config.source} at {config.scope})": ablation_cells(sets, position=config.scope),
        "to cut each by itself": head_cells(heads, position=config.scope) if config.grid else [],
    }
    found = {}
    for name, cells in swept.items():
        if cells:
            found[name] = sweep_plan(study.model, study.prompts[: stage.CHUNK], cells, batch_tokens=config.batch_tokens,
                                     cell_budget=config.cell_budget or stage.CELL_BUDGET)  # fmt: skip
    return [
        f"about {plan.forward_passes:.1f} {name} ({plan.cells} cells by the {plan.engine} engine)"
        for name, plan in found.items()
    ]


def _plan(config: AblateConfig, model: Model) -> Plan:
    """What donors and replacements come from: ``z`` of every layer with heads; the last residual for direct paths."""
    from activations.capturing import Plan

    last = (f"blocks.{model.n_layers - 1}.hook_resid_post",) if config.direct else ()
    sites = tuple(f"blocks.{layer}.attn.hook_z" for layer in range(model.n_layers) if model.heads(layer))
    return Plan(sites=(*sites, *last), dtype=config.store_dtype, batch_tokens=config.batch_tokens)


def _arm(study: Study[AblateConfig], arm: str, config: AblateConfig, halves: ablate_halves.Halves) -> None:
    if all(study.run.has_table(name) for name in tables_of(config)):
        return
    data = stage.open_arm(study, arm, _plan(config, study.model))
    ablate_arm(data, config, halves, study.answers.labels, study.reporter, tested=True)
