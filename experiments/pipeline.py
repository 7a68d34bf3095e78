"""The stages of ``probe run``, in order.

=============  =====================================================  ============================================
stage          writes                                                 cost, in forward passes of a prompt, an arm
=============  =====================================================  ============================================
items          items.jsonl                                            none
behaviour      responses.jsonl, tables/behaviour                      1, and one token step for each answer token
capture        activations/<arm>, tables/readout                      1
inside         tables/probes, probe_rows, lens, decomposition         none
patching       tables/patch                                           about 1 + 3·layers/tokens, on the chosen pairs
heads          tables/heads, tables/ablate                            about 1 + heads/tokens; about 1
link           tables/attribution, results.json, report.html          none
=============  =====================================================  ============================================

An arm is the base model or one of its adapters, switched on in place; all arms see the same token ids. A stage whose
file exists is not run again, so the same command resumes; see ``rundir`` for what a kill can lose.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import behaviour, items
from experiments.config import Config, Setting, resolved, settings
from experiments.environment import load_model, remember
from experiments.errors import RunError, UsageError
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, opened

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from tasks.contracts import Family

ARM_TABLES = ("readout", "probes", "probe_rows", "lens", "decomposition", "patch", "heads", "ablate", "attribution")
TABLES = ("behaviour", *ARM_TABLES)
SPARE_BYTES = 50 * 2**20  # tables, items and report of a run, beside its activations


@dataclass(frozen=True, slots=True)
class _Study:
    """What the stages share."""

    run: RunDirectory
    config: Config
    family: Family
    model: Model
    arms: tuple[str, ...]
    asked: list[items.Row]
    prompts: list[Prompt]
    answers: AnswerTokens
    reporter: Reporter


def run(config: Config, directory: Path, *, config_text: str, reporter: Reporter) -> dict[str, Any]:
    """Do or resume a whole run and return its results; ``behaviour.gate`` says whether enough answers could be read.

    Raises:
        UsageError, RunError: see the message.
    """
    from tasks.registry import family as family_named

    family = family_named(config.family)
    grid = settings(config, family)
    items.check_presentations(family, grid)
    with opened(directory, resolved(config, family, grid), config_text) as folder:
        if folder.complete() and all(folder.has_table(name) for name in TABLES):
            reporter.say(f"{directory} is complete: nothing to do (report: {folder.report})")
            found: dict[str, Any] = folder.read_json("results.json", keys=("arms", "comparison"))
            return found
        reporter.log = folder.log
        return _run(folder, config, family, grid, reporter)


def _run(
    run: RunDirectory, config: Config, family: Family, grid: Sequence[Setting], reporter: Reporter
) -> dict[str, Any]:
    from experiments.results import headline

    _check_folds(config, grid)
    items.make(run, config, family, grid)
    made = [item for _, setting_items in items.stored(run) for item in setting_items]
    study = _open_study(run, config, family, items.rows(made), reporter)
    for arm in study.arms:
        with study.model.use(None if arm == "base" else arm):
            _ask(study, arm)
    if not run.has_table("behaviour"):
        given = behaviour.by_identity(behaviour.responses(run))
        run.write_table("behaviour", behaviour.table(given, family, study.asked, study.arms))
    for arm in study.arms:
        with study.model.use(None if arm == "base" else arm):
            _look_inside(study, arm)
            _find_causes(study, arm)
    for name in ARM_TABLES:
        _join(run, name, study.arms)
    _clean(run, study.arms)
    tables = {name: run.table(name) for name in TABLES}
    results = headline(tables, study.arms, study.answers.labels, config)
    run.write_json("results.json", results)
    with reporter.stage("report", 1):
        from experiments.report import write as write_report

        write_report(run)
    return results


def _open_study(
    run: RunDirectory, config: Config, family: Family, asked: list[items.Row], reporter: Reporter
) -> _Study:
    from activations.prompts import ids_hash
    from activations.readout import answer_tokens
    from experiments.causes import check_heads

    assert family.answers is not None
    model = load_model(config, reporter)
    check_heads(model, config)
    answers = answer_tokens(model, family.answers)
    prompts = model.encode([row.presentation.chat() for row in asked])
    arms = ("base", *model.adapter_names)
    study = _Study(run, config, family, model, arms, asked, prompts, answers, reporter)
    # All refusals come before the environment is written, which ties the directory to this configuration.
    _check_context(study)
    _announce(study)
    remember(run, model, token_ids=ids_hash(prompts), seed=config.seed)
    return study


def _check_folds(config: Config, grid: Sequence[Setting]) -> None:
    """Each fold needs an instance of either gold answer."""
    least = config.limit * len(grid) // 2
    if least < config.probe.folds:
        raise UsageError(
            f"probe.folds is {config.probe.folds} but there are {least} instances of either gold answer: raise limit to "
            f"{-(-2 * config.probe.folds // len(grid))}, or lower probe.folds"
        )


def _check_context(study: _Study) -> None:
    longest = max(len(prompt.ids) for prompt in study.prompts)
    context, asked = study.model.context, study.config.max_tokens
    if context is not None and longest + asked > context:
        raise RunError(
            f"the longest prompt has {longest} tokens and max_tokens is {asked}, but {study.model.name} reads at most "
            f"{context}: lower max_tokens or ask smaller instances"
        )


def _announce(study: _Study) -> None:
    """The plan, before anything is computed; a run that does not fit on the disk is refused here."""
    from experiments.inside import plan

    size = plan(study.model, study.config).size(study.model, study.prompts) * len(study.arms)
    stored = sum(file.stat().st_size for file in study.run.activations.rglob("*.h5"))
    free = shutil.disk_usage(study.run.path).free
    tokens = sum(len(prompt.ids) for prompt in study.prompts)
    study.reporter.say(
        f"{study.config.model}: arms {', '.join(study.arms)}; {len(study.prompts)} prompts, {tokens:,} tokens an arm, "
        f"two forward passes a prompt and arm before patching; activations {size / 2**20:.0f} MiB -> {study.run.path}"
    )
    needed = max(size - stored, 0) + SPARE_BYTES
    if needed > free and not study.run.begun():
        raise RunError(
            f"the run needs {needed / 2**20:.0f} MiB and {study.run.path} has {free / 2**20:.0f} MiB free: "
            "free some, lower --limit, set store_dtype=bfloat16 or give --out on another disk"
        )


def _ask(study: _Study, arm: str) -> None:
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


def _look_inside(study: _Study, arm: str) -> None:
    from experiments import inside

    run, config, model = study.run, study.config, study.model
    # Patching reads the store, so it has to be whole until the causes are found.
    if run.has_table(f"attribution-{arm}") or run.has_table("attribution"):
        return
    labels = study.answers.labels
    with study.reporter.stage(f"capture {arm}", len(study.prompts)) as done:
        store = inside.capture(run.activations / arm, model, study.asked, study.prompts, study.answers, config, done)
    table = _once(run, f"readout-{arm}", lambda: inside.readout_table(store, study.asked, model))
    with study.reporter.stage(f"probes {arm}", 1):
        if not run.has_table(f"probe_rows-{arm}"):
            by_layer, by_row = inside.probe_tables(store, table, labels, model.n_layers, config)
            run.write_table(f"probes-{arm}", by_layer)
            run.write_table(f"probe_rows-{arm}", by_row)
    with study.reporter.stage(f"lens {arm}", 1):
        _once(
            run,
            f"lens-{arm}",
            lambda: inside.lens_table(store, table, model, study.answers, model.n_layers, config),
        )
        _once(run, f"decomposition-{arm}", lambda: inside.decomposition_table(table, labels, config))


def _find_causes(study: _Study, arm: str) -> None:
    from activations.store import ActivationStore
    from experiments import causes
    from experiments.link import attribution

    run, reporter = study.run, study.reporter
    if run.has_table(f"attribution-{arm}") or run.has_table("attribution"):
        return
    data = causes.Arm(
        run=run,
        model=study.model,
        name=arm,
        store=ActivationStore.open(run.activations / arm),
        table=run.table(f"readout-{arm}"),
        prompts=study.prompts,
        answers=study.answers,
        config=study.config,
    )
    count = causes.chunk_count
    with reporter.stage(f"patch residuals {arm}", count(causes.patch_transfers(data))) as done:
        patch = causes.patch_table(data, done)
    with reporter.stage(f"patch heads {arm}", count(causes.head_transfers(data))) as done:
        heads = causes.head_table(data, done)
    with reporter.stage(f"ablate heads {arm}", count(causes.ablate_transfers(data))) as done:
        causes.ablate_table(data, heads, done)
    everything = run.table("behaviour")
    _once(
        run,
        f"attribution-{arm}",
        lambda: attribution(
            everything[everything["arm"] == arm],
            data.table,
            run.table(f"probes-{arm}"),
            run.table(f"probe_rows-{arm}"),
            run.table(f"decomposition-{arm}"),
            patch,
            study.answers.labels,
            threshold=study.config.probe.threshold,
        ),
    )


def _once(run: RunDirectory, name: str, make: Any) -> pd.DataFrame:
    """A table, computed unless it is there; always read back, so that a resumed run sees the same bytes."""
    if not run.has_table(name):
        run.write_table(name, make())
    return run.table(name)


def _join(run: RunDirectory, name: str, arms: Sequence[str]) -> None:
    """One tidy table with a column ``arm`` out of the tables of the arms."""
    import pandas as pd

    if run.has_table(name):
        return
    parts = []
    for arm in arms:
        part = run.table(f"{name}-{arm}")
        part.insert(0, "arm", arm)
        parts.append(part)
    run.write_table(name, pd.concat(parts, ignore_index=True))


def _clean(run: RunDirectory, arms: Sequence[str]) -> None:
    """Remove the tables of single arms, now that each is part of a joined one."""
    for name in ARM_TABLES:
        for arm in arms:
            (run.tables / f"{name}-{arm}.parquet").unlink(missing_ok=True)
