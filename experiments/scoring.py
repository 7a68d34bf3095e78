"""``probe score``: read and grade the answers of a run again, from the raw text, without a model.

A parser gets better; the answers it reads do not have to be asked again. The behaviour table is made anew from
responses.jsonl and items.jsonl, and with it everything that follows from it: for a behavioural run the table and results,
for a whole study the link table, results and report. What the model computed (activations, probes, patching) stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from experiments import behaviour, items
from experiments.config import Config, digest
from experiments.errors import RunError, UsageError
from experiments.rundir import RunDirectory, damaged, reopened
from tasks.parsing import PARSER_VERSION

if TYPE_CHECKING:
    import pandas as pd

    from experiments.eval_config import AnyTable, EvalConfig

ROW = ["arm", "setting", "key", "presentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A run read again: its results, of how many answers the reading or grade changed, and the parsers' versions.

    `other` is the other table that was asked for, as results.json would keep it.
    """

    command: str
    results: dict[str, Any]
    answers: int
    changed: int
    old_parser: int
    new_parser: int
    other: dict[str, Any] | None = None


def score(directory: Path, other: tuple[str, EvalConfig] | None = None) -> Scored:
    """Read the answers of a finished run again and renew what follows from them.

    Args:
        other: name and configuration of a further table, made beside the run's own.

    Raises:
        RunError: the run isn't finished or was made by another version of its family.
        UsageError: the other table is about another family, or about what the run did not ask.
    """
    from tasks.registry import family as family_named

    with reopened(directory) as run:
        if not run.results.exists():
            raise RunError(
                f"{directory} has no results.json: finish the run first, with the command in its config.yaml"
            )
        values = run.read_json(
            "resolved.json", keys=("command", "family", "family_version", "parser_version", "params")
        )
        family = family_named(values["family"])
        if family.version != values["family_version"]:
            raise RunError(
                f"{directory} was made with version {values['family_version']} of {values['family']}, this is version "
                f"{family.version}: score it with the version that made it"
            )
        if values["command"] not in ("run", "eval"):
            raise RunError(
                f"{directory} is a run of `probe {values['command']}`, which reads no answers: give one of `probe run` or "
                "`probe eval`"
            )
        if other is not None:
            _check_other(run, values, other)
        old = run.table("behaviour")
        arms = list(dict.fromkeys(old["arm"]))
        new = _read_again(run, family, arms)
        _same_rows(run, old, new)
        changed = _changed(old, new)
        if values["command"] == "run":
            _refuse_probes_of_answers(directory, values, changed)
        old_parser = values["parser_version"]
        values = {key: value for key, value in values.items() if key != "digest"} | {"parser_version": PARSER_VERSION}
        # Last comes the version: a kill before leaves a run that says it was read by the old parser, to be scored again.
        if values["command"] == "eval":
            results = _conclude_eval(run, new, values)
        else:
            results = _conclude_study(run, new, arms, values)
        run.write_json("resolved.json", {"digest": digest(values), **values})
        return Scored(
            command=values["command"], results=results, answers=len(new), changed=changed,
            old_parser=old_parser, new_parser=PARSER_VERSION, other=_further(run, new, values, other),
        )  # fmt: skip


def _read_again(run: RunDirectory, family: Any, arms: list[str]) -> pd.DataFrame:
    import pandas as pd

    behaviour.mend(run)
    parts = []
    for label, made in items.stored(run):
        given = behaviour.by_identity(behaviour.responses_of(run, label))
        asked = items.rows(made)
        missing = [(arm, *row.identity) for arm in arms for row in asked if (arm, *row.identity) not in given]
        if missing:
            raise RunError(
                f"{run.responses} lacks {len(missing)} answers, the first of {', '.join(missing[0])}: put the file back"
            )
        parts.append(behaviour.table(given, family, asked, arms))
    if not parts:
        raise damaged(run.items)
    return pd.concat(parts, ignore_index=True)


def _same_rows(run: RunDirectory, old: pd.DataFrame, new: pd.DataFrame) -> None:
    """Fewer items than were asked would give other numbers without a sign."""
    before, after = (Counter(table[ROW].itertuples(index=False, name=None)) for table in (old, new))
    differing = (before - after) + (after - before)
    if differing:
        raise RunError(
            f"{run.items} and the behaviour table of {run.path} hold different rows, the first of them "
            f"{', '.join(min(differing))}: put the old file back"
        )


def _changed(old: pd.DataFrame, new: pd.DataFrame) -> int:
    """Answers whose status, label or grade differ, matched by row and not by place."""
    columns = ["status", "answer", "correct"]
    first, second = (table.set_index(ROW)[columns].astype("string").fillna("") for table in (old, new))
    return int((first.loc[second.index] != second).any(axis=1).sum())


def _check_other(run: RunDirectory, values: Mapping[str, Any], other: tuple[str, EvalConfig]) -> None:
    from experiments.evaluation import check_facts
    from experiments.tables import TableSpec, check

    directory, (name, config) = run.path, other
    if values["command"] != "eval":
        raise RunError(f"{directory} is a whole study, which has its report: another table needs a run of `probe eval`")
    if config.family != values["family"]:
        raise UsageError(
            f"{name} is a table about {config.family}, and {directory} asked {values['family']}: choose another"
        )
    specs = [_spec(config), *([] if config.figure is None else [config.figure.table()])]
    for spec in specs:
        if isinstance(spec, TableSpec):
            check(spec, values["params"])
    check_facts(run, specs, values["params"])


def _spec(config: EvalConfig) -> AnyTable:
    from experiments.eval_config import table_of

    return table_of(config, ())


def _further(
    run: RunDirectory, table: pd.DataFrame, values: Mapping[str, Any], other: tuple[str, EvalConfig] | None
) -> dict[str, Any] | None:
    from experiments.evaluation import shown, tabulate

    if other is None:
        return None
    name, config = other
    # The same resamples as the run's own table, so that a number does not depend on which table it stands in.
    config = config.model_copy(update={key: values[key] for key in ("seed", "resamples")})
    return shown(tabulate(run, table, values["params"], config, _spec(config), name=name), _spec(config))


def _conclude_eval(run: RunDirectory, table: pd.DataFrame, values: Mapping[str, Any]) -> dict[str, Any]:
    from experiments.config import Setting
    from experiments.eval_config import EvalConfig, table_of
    from experiments.evaluation import conclude

    params: Mapping[str, Mapping[str, Any]] = values["params"]
    known = {key: value for key, value in values.items() if key in EvalConfig.model_fields and key != "params"}
    try:
        config = EvalConfig(**known)
    except ValidationError:
        raise damaged(run.path / "resolved.json") from None
    spec = table_of(config, [Setting(label, one) for label, one in params.items()])
    run.write_table("behaviour", table)
    return conclude(run, table, params, config, spec)


def _conclude_study(
    run: RunDirectory, table: pd.DataFrame, arms: list[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    import pandas as pd

    from experiments.pipeline import conclude
    from experiments.probing import attribute, label_shares
    from experiments.report import write as write_report

    config, labels = _study_config(values), ("yes", "no")
    linked = []
    for arm in arms:
        part = attribute(
            run, arm, table[table["arm"] == arm].drop(columns="arm").reset_index(drop=True), labels, config
        )
        part.insert(0, "arm", arm)
        linked.append(part)
    run.write_table("behaviour", table)
    run.write_table("attribution", pd.concat(linked, ignore_index=True))
    run.write_table("attribution_shares", label_shares(run.table("attribution")))
    results = conclude(run, arms, labels, values["params"], config)
    write_report(run)
    return results


def _study_config(values: Mapping[str, Any]) -> Config:
    return Config(**{key: value for key, value in values.items() if key in Config.model_fields and key != "params"})


def _refuse_probes_of_answers(directory: Path, values: Mapping[str, Any], changed: int) -> None:
    """Probes that were trained on answers as they were read before would stand beside other answers."""
    targets = [one for one in _study_config(values).probe.target if one in ("answer", "correct")]
    if targets and changed:
        raise RunError(
            f"{changed} answers of {directory} are read differently now, and its probes for {targets[0]} were trained on "
            "the old reading: repeat the run with another --out"
        )
