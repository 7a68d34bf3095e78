"""The stages of ``probe run``, in order.

=============  ===================================================  ============================================
stage          writes                                               cost, in forward passes of a prompt, an arm
=============  ===================================================  ============================================
items          items.jsonl                                          none
behaviour      responses.jsonl, tables/behaviour                    1, and one token step for each answer token
capture        activations/<arm>, tables/readout                    1
inside         tables/lens, decomposition, contributions            none
probes         tables/probes, probe_curves, probe_rows,             none; arms × curves × layers × folds × label sets
               probe_change, transfer                               fits
components     tables/components                                    none
patching       tables/patch, patch_effects                          about 1 + 3·layers/tokens, on the chosen pairs
heads          tables/heads, head_effects, ablate, ablation,        about 1 + heads/tokens, on the chosen pairs;
               ablation_above, ablation_notes                       about 1 + sets/tokens, on half of the pairs
link           tables/attribution, table.csv, results.json,         none
               report.html
=============  ===================================================  ============================================

An arm is the base model or one of its adapters, switched on in place; all arms see the same token ids. Probes come after
all arms were captured, since those of one arm are read in another. A stage whose file exists is not run again, so the
same command resumes; see ``rundir`` for what a kill can lose.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import (
    ablate_halves,
    ablate_options,
    ablating,
    behaviour,
    items,
    probe_options,
    probe_targets,
    probe_units,
)
from experiments.config import Config, Setting, resolved, settings
from experiments.environment import load_model, remember
from experiments.errors import RunError, UsageError
from experiments.patch_options import check_for_run, check_model
from experiments.probing import PROBE_TABLES, attribute, label_shares, probe, share_out
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, opened
from experiments.study import Study, arm_table, join, once

if TYPE_CHECKING:
    from experiments.intervention_stage import Arm
    from tasks.contracts import Family

ARM_TABLES = ("readout", "lens", "decomposition", "contributions", "patch", "attribution")
TABLES = ("behaviour", *PROBE_TABLES, "components", "attribution_shares")
EFFECTS = "patch_effects"  # follows from patch; nothing in results.json is made from it
TUNED = "tuned_lens"  # a table of each arm, if the run asks for it
SPARE_BYTES = 50 * 2**20  # tables, items and report of a run, beside its activations


def arm_tables(config: Config) -> tuple[str, ...]:
    """Tables that are made for each arm and joined at the end."""
    tuned = (TUNED,) if config.lens.tuned else ()
    return (*ARM_TABLES, *ablating.arm_tables(ablate_options.of_run(config)), *tuned)


def tables_of(config: Config) -> tuple[str, ...]:
    """All tables of a finished run."""
    return (*TABLES, *arm_tables(config), EFFECTS)


def run(config: Config, directory: Path, *, config_text: str, reporter: Reporter) -> dict[str, Any]:
    """Do or resume a whole run and return its results; ``behaviour.gate`` says whether enough answers could be read.

    Raises:
        UsageError, RunError: see the message.
    """
    from tasks.registry import family as family_named

    family = family_named(config.family)
    config = items.for_pairs(config, family)
    grid = settings(config, family)
    items.check_presentations(family, grid)
    probe_targets.check(config, family)
    _check(config, grid)
    _check_units(config, family, grid)
    with opened(directory, resolved(config, family, grid), config_text) as folder:
        if folder.complete() and all(folder.has_table(name) for name in tables_of(config)):
            reporter.say(f"{directory} is complete: nothing to do (report: {folder.report})")
            found: dict[str, Any] = folder.read_json("results.json", keys=("arms", "comparison"))
            return found
        reporter.log = folder.log
        return _run(folder, config, family, grid, reporter)


def _run(
    run: RunDirectory, config: Config, family: Family, grid: Sequence[Setting], reporter: Reporter
) -> dict[str, Any]:
    items.make(run, config, family, grid)
    made = [item for _, setting_items in items.stored(run) for item in setting_items]
    asked = items.rows(made)
    # What the items alone can refuse is refused before the model is loaded.
    ablate_halves.halves(items.frame(asked), ablate_options.of_run(config), {one.label: one.params for one in grid})
    study = _open_study(run, config, family, grid, asked, reporter)
    for arm in study.arms:
        with study.model.use(None if arm == "base" else arm):
            _ask(study, arm)
    if not run.has_table("behaviour"):
        given = behaviour.by_identity(behaviour.responses(run))
        run.write_table("behaviour", behaviour.table(given, family, study.asked, study.arms))
    for arm in study.arms:
        with study.model.use(None if arm == "base" else arm):
            _look_inside(study, arm)
    probe(study)
    share_out(study)
    for arm in study.arms:
        with study.model.use(None if arm == "base" else arm):
            _find_causes(study, arm)
    for name in arm_tables(config):
        join(run, name, study.arms)
    _clean(run, config, study.arms)
    if not run.has_table(EFFECTS):
        from experiments.patch_effects import effects_table

        how: dict[str, Any] = {"seed": config.seed, "resamples": config.resamples}
        run.write_table(EFFECTS, effects_table(run.table("patch"), None, study.params, config.patch, **how))
    if not run.has_table("attribution_shares"):
        run.write_table("attribution_shares", label_shares(run.table("attribution")))
    results = conclude(run, study.arms, study.answers.labels, study.params, config)
    with reporter.stage("report", 1):
        from experiments.report import write as write_report

        write_report(run)
    return results


def conclude(
    run: RunDirectory,
    arms: Sequence[str],
    labels: Sequence[str],
    params: Mapping[str, Mapping[str, Any]],
    config: Config,
) -> dict[str, Any]:
    """Write what follows from the tables: table.csv and results.json."""
    from experiments import run_table
    from experiments.results import headline, plain

    tables = {name: run.table(name) for name in tables_of(config) if name != EFFECTS}
    made = run_table.make(tables, params, config)
    run.write_text("table.csv", made.to_csv(index=False))
    results: dict[str, Any] = headline(tables, arms, labels, config)
    results["table"] = plain({"spec": config.table.model_dump(), "rows": made.to_dict("records")})
    run.write_json("results.json", results)
    return results


def _open_study(
    run: RunDirectory,
    config: Config,
    family: Family,
    grid: Sequence[Setting],
    asked: list[items.Row],
    reporter: Reporter,
) -> Study[Config]:
    from activations.prompts import ids_hash
    from activations.readout import answer_tokens

    assert family.answers is not None
    model = load_model(config, reporter)
    ablate_options.check_model(ablate_options.of_run(config), model, section="ablate.")
    check_model(config.patch, model)
    answers = answer_tokens(model, family.answers)
    prompts = model.encode([row.presentation.chat() for row in asked])
    arms = ("base", *model.adapter_names)
    params = {setting.label: setting.params for setting in grid}
    study = Study(run, config, family, params, model, arms, asked, prompts, answers, reporter)
    # All refusals come before the environment is written, which ties the directory to this configuration.
    _check_context(study)
    _announce(study)
    remember(run, model, token_ids=ids_hash(prompts), seed=config.seed)
    return study


def _check(config: Config, grid: Sequence[Setting]) -> None:
    """Options that can't apply, and folds without an instance of either gold answer."""
    from experiments.groups import grouped

    params = {setting.label: setting.params for setting in grid}
    probe_options.check(config.probe, params)
    check_for_run(config.patch)
    ablate_options.check_for_run(config.ablate)
    grouped(params, config.table.rows)
    least = config.limit * len(grid) // 2
    if config.probe.folds is not None and least < config.probe.folds:
        raise UsageError(
            f"probe.folds is {config.probe.folds} but there are {least} instances of either gold answer: raise limit to "
            f"{-(-2 * config.probe.folds // len(grid))}, or lower probe.folds"
        )


def _check_units(config: Config, family: Family, grid: Sequence[Setting]) -> None:
    """Units that can't be held out. Only the items show them; they are made for it, and nothing is written."""
    if config.probe.held_out is None:
        return
    made = [
        items.Item(setting.label, matched)
        for setting in grid
        for matched in islice(family.generate(setting.params, seed=config.seed, split=config.split), config.limit)
    ]
    params = {setting.label: setting.params for setting in grid}
    asked = [row for row in items.rows(made) if row.presentation.kind == items.PAIR[0]]
    probe_options.check_units(config.probe, params, probe_units.with_template(items.frame(asked), asked))


def _check_context(study: Study[Config]) -> None:
    longest = max(len(prompt.ids) for prompt in study.prompts)
    context, asked = study.model.context, study.config.max_tokens
    if context is not None and longest + asked > context:
        raise RunError(
            f"the longest prompt has {longest} tokens and max_tokens is {asked}, but {study.model.name} reads at most "
            f"{context}: lower max_tokens or ask smaller instances"
        )


def _announce(study: Study[Config]) -> None:
    """The plan, before anything is computed; a run that does not fit on the disk is refused here."""
    from experiments import fitting
    from experiments.inside import component_sites, plan

    size = plan(study.model, study.config).size(study.model, study.prompts) * len(study.arms)
    stored = sum(file.stat().st_size for file in study.run.activations.rglob("*.h5"))
    free = shutil.disk_usage(study.run.path).free
    tokens = sum(len(prompt.ids) for prompt in study.prompts)
    study.reporter.say(
        f"{study.config.model}: arms {', '.join(study.arms)}; {len(study.prompts)} prompts, {tokens:,} tokens an arm, "
        f"two forward passes a prompt and arm before patching; activations {size / 2**20:.0f} MiB; "
        f"{len(fitting.curves(study.params, study.config))} probe curves of {study.model.n_layers} layers an arm, "
        f"{fitting.fits(study.params, study.model.n_layers, len(study.arms), study.config):,} fits -> {study.run.path}"
    )
    if reason := component_sites(study.model)[1]:
        study.reporter.say(f"readouts are not shared out over components: {reason}")
    needed = max(size - stored, 0) + SPARE_BYTES
    if needed > free and not study.run.begun():
        raise RunError(
            f"the run needs {needed / 2**20:.0f} MiB and {study.run.path} has {free / 2**20:.0f} MiB free: "
            "free some, lower --limit, set store_dtype=bfloat16 or give --out on another disk"
        )


def _ask(study: Study[Config], arm: str) -> None:
    if study.run.has_table("behaviour"):
        return
    with study.reporter.stage(f"ask {arm}", len(study.prompts)) as done:
        behaviour.ask(
            study.run,
            study.model,
            arm,
            study.asked,
            study.prompts,
            max_tokens=study.config.max_tokens,
            batch_tokens=study.config.batch_tokens,
            done=done,
        )


def _look_inside(study: Study[Config], arm: str) -> None:
    from experiments import inside

    run, config, model, labels = study.run, study.config, study.model, study.answers.labels
    # What comes later reads the store, so it has to be whole until the last table is there.
    if all(run.has_table(name) for name in (*arm_tables(config), *PROBE_TABLES)):
        return
    with study.reporter.stage(f"capture {arm}", len(study.prompts)) as done:
        store = inside.capture(
            run.activations / arm, model, study.asked, study.prompts, study.answers, inside.plan(model, config), done
        )
    table = once(run, "readout", arm, lambda: inside.readout_table(store, study.asked, model))
    with study.reporter.stage(f"lens {arm}", 1):
        once(
            run,
            "lens",
            arm,
            lambda: inside.lens_table(store, table, model, study.answers, model.n_layers, config),
        )
        once(run, "decomposition", arm, lambda: inside.decomposition_table(table, labels, study.params, config))
    if config.lens.tuned:
        with study.reporter.stage(f"tuned lens {arm}", 1):
            once(run, TUNED, arm, lambda: inside.tuned_lens_table(store, table, model, study.answers, config))
    with study.reporter.stage(f"contributions {arm}", 1):
        once(run, "contributions", arm, lambda: inside.contribution_table(store, table, model, study.answers))


def _find_causes(study: Study[Config], arm: str) -> None:
    from activations.store import ActivationStore
    from experiments.intervention_stage import Arm

    run, how = study.run, ablate_options.of_run(study.config)
    if all(run.has_table(name) for name in arm_tables(study.config)):
        return
    data = Arm(
        run=run,
        model=study.model,
        name=arm,
        store=ActivationStore.open(run.activations / arm),
        table=arm_table(run, "readout", arm),
        prompts=study.prompts,
        answers=study.answers,
        config=study.config,
    )
    _patch(study, data)
    halves = ablate_halves.halves(items.frame(study.asked), how, study.params)
    ablating.ablate_arm(data, how, halves, study.answers.labels, study.reporter, tested=False)
    once(
        run,
        "attribution",
        arm,
        lambda: attribute(run, arm, arm_table(run, "behaviour", arm), study.answers.labels, study.config),
    )


def _patch(study: Study[Config], data: Arm) -> None:
    """Residual patching of one arm, by the stage that `probe patch` runs."""
    from experiments.patch_rows import Tokens
    from experiments.patch_stage import patch_table, sweeps

    run, patch = study.run, study.config.patch
    tokens = Tokens(study.model, study.asked, study.prompts, patch.positions)
    planned = sweeps(data, patch, patch.positions, tokens)
    with study.reporter.stage(f"patch residuals {data.name}", len(planned.chunks)) as done:
        if not run.has_table("patch"):
            patch_table(data, patch, planned, tokens, done)


def _clean(run: RunDirectory, config: Config, arms: Sequence[str]) -> None:
    """Remove the tables of single arms, now that each is part of a joined one."""
    for name in arm_tables(config):
        for arm in arms:
            (run.tables / f"{name}-{arm}.parquet").unlink(missing_ok=True)
