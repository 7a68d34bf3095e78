"""``probe eval``: what models say, without looking inside.

==========  =====================================  ==========================================================
stage       writes                                 cost, in forward passes of a prompt, an arm
==========  =====================================  ==========================================================
items       items.jsonl                            none
ask         responses.jsonl, tables/behaviour      1, and one token step for each answer token
table       table.csv, figure.svg, results.json    none
==========  =====================================  ==========================================================

Settings are asked one after the other, each with all arms, so that one setting's items are in memory at a time: a
catalog of 31 relations up to a thousand premises is as large as the disk allows. A kill loses the batch in flight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import behaviour, items
from experiments.answer_facts import Facts, arm_facts, facts_of
from experiments.answer_tables import AnswerTableSpec, check_answers
from experiments.config import Setting, resolved, settings
from experiments.environment import load_model, remember
from experiments.errors import RunError
from experiments.eval_config import (
    AnyFigure,
    AnyTable,
    EvalConfig,
    check,
    pairs_of,
    reasons,
    table_of,
    tables_of,
    tokens_of,
)
from experiments.progress import Reporter
from experiments.rundir import RunDirectory, opened

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.sampling import Sampling
    from tasks.contracts import Family


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is going to be asked of each arm."""

    prompts: Mapping[str, int]  # by setting
    tokens: int
    token_ids: str


def evaluate(config: EvalConfig, directory: Path, *, config_text: str, reporter: Reporter) -> dict[str, Any]:
    """Do or resume a behavioural study and return its results; ``behaviour.gate`` says whether enough could be read.

    Raises:
        UsageError, RunError: see the message.
    """
    from tasks.registry import family as family_named

    family = family_named(config.family)
    grid = settings(config, family)
    items.check_labels(family)
    check(config, grid)
    spec = table_of(config, grid)
    with opened(directory, resolved(config, family, grid), config_text) as run:
        if _complete(run, config):
            reporter.say(f"{directory} is complete: nothing to do")
            found: dict[str, Any] = run.read_json("results.json", keys=("arms", "comparison", "table"))
            return found
        reporter.log = run.log
        with reporter.stage("items", 1):
            items.make(run, config, family, grid, pairs_of(config, grid))
            check_facts(run, tables_of(config, grid), {one.label: one.params for one in grid})
        model = load_model(config, reporter)
        arms = ("base", *model.adapter_names)
        plan = _plan(run, model, config, grid)
        reporter.say(
            f"{config.model}: arms {', '.join(arms)}; {len(grid)} settings, {sum(plan.prompts.values()):,} prompts, "
            f"{plan.tokens:,} tokens an arm; one forward pass a prompt and arm, and its answer -> {run.path}"
        )
        remember(run, model, token_ids=plan.token_ids, seed=config.seed)
        table = _ask(run, config, family, grid, model, arms, plan, reporter)
        with reporter.stage("table", 1):
            return conclude(run, table, {one.label: dict(one.params) for one in grid}, config, spec)


def _complete(run: RunDirectory, config: EvalConfig) -> bool:
    """Whether every file of the last stage is there; one that was deleted is made again."""
    files = ["results.json", "table.csv", *(["figure.svg"] if config.figure is not None else [])]
    return run.has_table("behaviour") and all((run.path / name).exists() for name in files)


def conclude(
    run: RunDirectory,
    table: pd.DataFrame,
    params: Mapping[str, Mapping[str, Any]],
    config: EvalConfig,
    spec: AnyTable,
) -> dict[str, Any]:
    """Everything that follows from a behaviour table: the printed table, the figure, results.json."""
    from experiments.results import plain

    made = tabulate(run, table, params, config, spec)
    pairs = pairs_of(config, [Setting(label, one) for label, one in params.items()])
    results: dict[str, Any] = plain({**summed(table, pairs, config), "table": shown(made, spec)})
    run.write_json("results.json", results)
    return results


def tabulate(
    run: RunDirectory,
    table: pd.DataFrame,
    params: Mapping[str, Mapping[str, Any]],
    config: EvalConfig,
    spec: AnyTable,
    *,
    name: str = "",
) -> pd.DataFrame:
    """Write a table and the configuration's figure: table.csv and figure.svg, or ``name``.csv and ``name``.svg."""
    figure = config.figure
    specs = [spec, *([] if figure is None else [figure.table()])]
    facts = facts_of(run) if any(isinstance(one, AnswerTableSpec) for one in specs) else None
    known = arm_facts(run, list(dict.fromkeys(table["arm"])))
    how: Any = {"seed": config.seed, "resamples": config.resamples}
    made = made_table(table, params, spec, facts, known, **how)
    run.write_text(f"{name or 'table'}.csv", made.to_csv(index=False))
    if figure is not None:
        drawn = made_table(table, params, figure.table(), facts, known, **how)
        run.write_text(f"{name or 'figure'}.svg", drawn_figure(drawn, figure))
    return made


def made_table(
    table: pd.DataFrame,
    params: Mapping[str, Mapping[str, Any]],
    spec: AnyTable,
    facts: Facts | None,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    seed: int,
    resamples: int,
) -> pd.DataFrame:
    """The table of a specification, whatever its rows count.

    Args:
        facts: of the questions; needed for a table of answers.
        arms: facts of each arm.
    """
    from experiments.answer_tables import make_answer_table
    from experiments.tables import make_table

    if not isinstance(spec, AnswerTableSpec):
        return make_table(table, params, spec, seed=seed, resamples=resamples)
    if facts is None:
        raise RunError("a table of answers needs the facts of their questions: read them with facts_of")
    return make_answer_table(table, facts, params, spec, seed=seed, resamples=resamples, arms=arms)


def drawn_figure(frame: pd.DataFrame, figure: AnyFigure) -> str:
    """A figure as SVG, from the table of its specification."""
    from experiments.answer_figures import AnswerFigureSpec, draw_answers
    from experiments.figures import draw

    return draw_answers(frame, figure) if isinstance(figure, AnswerFigureSpec) else draw(frame, figure)


def check_facts(run: RunDirectory, specs: Sequence[AnyTable], params: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse tables of answers that the run's questions can't give.

    Raises:
        UsageError: a row key or value that no question has.
        RunError: the questions were made by another version of the family.
    """
    of_answers = [spec for spec in specs if isinstance(spec, AnswerTableSpec)]
    if of_answers:
        facts = facts_of(run)
        for spec in of_answers:
            check_answers(spec, facts, params, arm_facts(run, ["base"]))


def shown(made: pd.DataFrame, spec: AnyTable) -> dict[str, Any]:
    """A table as results.json keeps it, ready to be printed again."""
    return {"spec": spec.model_dump(), "rows": made.to_dict("records")}


def summed(table: pd.DataFrame, pairs: Sequence[tuple[str, str]], config: EvalConfig) -> dict[str, Any]:
    """Profiles of every arm and pair, contrasts of each adapter with the base, and what could be read."""
    from experiments.profiles import contrast, details, profile, reading, unread

    of = dict(list(table.groupby("arm", sort=False)))
    how: Any = {"resamples": config.resamples, "seed": config.seed}
    found: dict[str, Any] = {"arms": {arm: {"behaviour": reading(part)} for arm, part in of.items()}}
    found["pairs"], found["comparison"], found["coverage"] = {}, {}, {}
    for pair in pairs:
        name = "/".join(pair)
        found["pairs"][name] = {
            arm: {
                **profile(part, pair, **how),
                **details(part, pair, threshold=config.invariance_threshold, **how),
            }
            for arm, part in of.items()
        }
        found["comparison"][name] = {
            arm: contrast(of["base"], part, pair=pair, **how) for arm, part in of.items() if arm != "base"
        }
        found["coverage"][name] = unread(table, pair)
    return found


def _plan(run: RunDirectory, model: Model, config: EvalConfig, grid: Sequence[Setting]) -> _Plan:
    """Tokenise everything once, to refuse before the first answer what would fail at the last."""
    from activations.prompts import ids_hash

    digest, prompts, tokens = hashlib.sha256(), {}, 0
    by_label = {setting.label: setting for setting in grid}
    for label, made in items.stored(run):
        encoded = model.encode([row.presentation.chat() for row in items.rows(made)])
        longest, more = max(len(one.ids) for one in encoded), tokens_of(config, by_label[label])
        if model.context is not None and longest + more > model.context:
            key = "max_tokens_reasoning" if reasons(by_label[label]) else "max_tokens"
            raise RunError(
                f"{label}: the longest prompt has {longest} tokens and the answer may have {more}, but {model.name} reads "
                f"at most {model.context}: ask smaller instances, or lower {key}"
            )
        digest.update(ids_hash(encoded).encode())
        prompts[label] = len(encoded)
        tokens += sum(len(one.ids) for one in encoded)
    return _Plan(prompts, tokens, digest.hexdigest())


def _ask(
    run: RunDirectory,
    config: EvalConfig,
    family: Family,
    grid: Sequence[Setting],
    model: Model,
    arms: Sequence[str],
    plan: _Plan,
    reporter: Reporter,
) -> pd.DataFrame:
    """The behaviour table, a setting at a time."""
    by_label = {setting.label: setting for setting in grid}
    behaviour.mend(run)
    stored = items.stored(run)

    def ask(label: str) -> pd.DataFrame:
        # Settings come in the order of the file; those that an earlier process finished are passed over.
        found, made = next(stored)
        while found != label:
            found, made = next(stored)
        asked = items.rows(made)
        prompts = model.encode([row.presentation.chat() for row in asked])
        have = behaviour.by_identity(behaviour.responses_of(run, label))
        for arm in arms:
            with model.use(None if arm == "base" else arm):
                behaviour.ask(
                    run,
                    model,
                    arm,
                    asked,
                    prompts,
                    max_tokens=tokens_of(config, by_label[label]),
                    batch_tokens=config.batch_tokens,
                    done=done,
                    sampling=_sampling(config),
                    have=have,
                )
        return behaviour.table(behaviour.by_identity(behaviour.responses_of(run, label)), family, asked, arms)

    with reporter.stage("ask", sum(plan.prompts.values()) * len(arms)) as done:
        return run.build_table("behaviour", list(plan.prompts), ask)


def _sampling(config: EvalConfig) -> Sampling | None:
    from activations.sampling import Sampling

    if config.temperature == 0:
        return None
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, seed=config.seed)
