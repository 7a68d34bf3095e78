"""``probe compare RUN RUN RUN…``: one table over many models, and what changes with their size.

Problem. Each run asks one model; a paper's table has a row for each of thirty. Mechanism: the behaviour tables of the
runs become the arms of one table, which is then made as any other, from the specification of a recipe or of the first
run: each model is one row more, Holm-adjusted columns are adjusted over all of them, and figures have a line or a point
a model. For every column Spearman's ρ with the number of parameters stands beside, with its interval and p.

Constraints. What is compared was asked: the same family version, settings and prompts, line by line, read by one version
of the parser; what differs is refused with the names of the runs. The number of parameters is what the run recorded; runs
of earlier versions recorded none, and a trend without all sizes is undefined, not taken over those that are known. A
trend takes models as independent draws. Those of one family are hardly that: compare one family's runs at a time where
that is the question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from experiments.answer_facts import recorded_size
from experiments.comparing import NEEDED, Side, differing, same_prompts
from experiments.config import Asking, Setting
from experiments.errors import RunError, UsageError
from experiments.rundir import RunDirectory, damaged

if TYPE_CHECKING:
    import pandas as pd

    from experiments.eval_config import AnyFigure, AnyTable, EvalConfig

SIZE = "n_parameters"
OWN_KEYS = ("arm", "model", SIZE)  # row keys that tell models apart
NO_TREND = ("count", "p", "range")  # units of columns that have none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """A table over models.

    Attributes:
        spec, table: as `probe eval` makes them, with one value of ``arm`` a model.
        trends: one row a column and combination of the other row keys: rho, low, high, p, p_holm (over all trends),
            models (how many), method, reason.
        sizes: number of parameters by model; NaN where unknown.
        figure: SVG of the specification's figure over all models, or nothing.
        notes: in what else the runs differ from the first.
    """

    spec: AnyTable
    table: pd.DataFrame
    trends: pd.DataFrame
    sizes: Mapping[str, float]
    figure: str | None
    notes: tuple[str, ...]


def compare_models(
    sides: Sequence[Side],
    recipe: tuple[str, EvalConfig] | None = None,
    *,
    sizes: Mapping[str, float] | None = None,
    seed: int | None = None,
    resamples: int | None = None,
) -> ModelTable:
    """The table of a recipe, or that of the first run, over several arms of several runs.

    Args:
        sides: at least two.
        recipe: name and configuration.
        sizes: number of parameters by name (see ``names_of``) or by model; what is given here counts.
        seed, resamples: of the recipe or first run if not given.

    Raises:
        RunError: the runs asked different things.
        UsageError: the recipe is about something else, or a name of `sizes` is no model.
    """
    if len(sides) < 2:
        raise UsageError(f"{len(sides)} run is no comparison: give two or more, or `probe score RUN --table RECIPE`")
    names = names_of(sides)
    values = [RunDirectory(side.run).read_json("resolved.json", keys=(*NEEDED, "command")) for side in sides]
    notes = _comparable(sides, values)
    params: Mapping[str, Mapping[str, Any]] = values[0]["params"]
    config = _own(values[0], sides[0].run / "resolved.json") if recipe is None else _of(recipe, values[0], sides[0])
    from experiments.eval_config import table_of

    known = _sizes(sides, names, sizes or {})
    spec = _by_model(table_of(config, [Setting(label, one) for label, one in params.items()]))
    figure = None if config.figure is None else _figure_by_model(config.figure)
    _check_sizes(spec, figure, known)
    how = {"seed": config.seed if seed is None else seed, "resamples": resamples or config.resamples}
    table, drawn = _made(sides, names, spec, figure, params, known, how)
    return ModelTable(
        spec=spec, table=table, trends=trends(table, spec, known), sizes=known, figure=drawn, notes=tuple(notes)
    )


def names_of(sides: Sequence[Side]) -> list[str]:
    """What each arm is called: by its model, by its run's folder where two have one model, else by its path."""

    def called(one: Side, base: str) -> str:
        return base if one.arm == "base" else f"{base}:{one.arm}"

    names = [called(one, _model(one)) for one in sides]
    for other in (lambda one: one.run.name, lambda one: str(one.run)):
        names = [
            called(one, other(one)) if names.count(name) > 1 else name for one, name in zip(sides, names, strict=True)
        ]
    same = [(one.run.resolve(), one.arm) for one in sides]
    for name, place in zip(names, same, strict=True):
        if same.count(place) > 1:
            raise UsageError(f"{name} is given twice: each arm of a run is compared once")
    return names


def _model(side: Side) -> str:
    """A hub id as it is, a folder by its last part."""
    return Path(side.model).name if Path(side.model).is_absolute() or Path(side.model).exists() else side.model


def trends(table: pd.DataFrame, spec: AnyTable, sizes: Mapping[str, float]) -> pd.DataFrame:
    """Spearman's ρ of each column with model size, for each combination of the row keys that are no models'.

    Args:
        sizes: by value of ``arm``; one that is NaN leaves every trend undefined.
    """
    import pandas as pd

    from experiments.statistics import holm, size_trend

    unknown = [name for name, size in sizes.items() if not math.isfinite(size)]
    lacking = (
        f"{SIZE} of {', '.join(unknown[:3])}{' and more' if unknown[3:] else ''} is not recorded: give it with --sizes"
    )
    if "arm" not in table:  # the rows pool models: there is nothing to relate to a size
        return pd.DataFrame(
            {name: [] for name in ("column", "rho", "low", "high", "p", "p_holm", "models", "method", "reason")}
        )
    keys = [row for row in spec.rows if row not in OWN_KEYS]
    # What stands once beside all columns is repeated in the rows of the table, and is one number a model.
    whole = [key for key in keys if key != spec.across]
    parts = [
        (dict(zip(names, values, strict=True)), part if names is keys else part.drop_duplicates("arm"), name)
        for names, columns in ((keys, spec.columns), (whole, spec.below))
        for values, part in (table.groupby(names, sort=False, dropna=False) if names else [((), table)])
        for name in columns
        if spec.known[name].unit not in NO_TREND
    ]
    records = []
    for values, part, name in parts:
        found = size_trend([sizes[arm] for arm in part["arm"]], part[name].tolist())
        reason = lacking if unknown else found.reason
        rho, low, high, p = (math.nan,) * 4 if unknown else (found.rho, found.low, found.high, found.p)
        records.append({**dict.fromkeys(keys, ""), **values, "column": name, "rho": rho, "low": low, "high": high, "p": p,
                        "models": found.n, "method": found.method, "reason": reason})  # fmt: skip
    made = pd.DataFrame(records)
    if len(made):
        adjusted = holm({str(number): p for number, p in enumerate(made["p"])})
        made.insert(made.columns.get_loc("p") + 1, "p_holm", list(adjusted.values()))
    return made


def write(found: ModelTable, directory: Path) -> list[str]:
    """Write table.csv, trends.csv and, where there is one, figure.svg; return the names of the files."""
    files = {"table.csv": found.table.to_csv(index=False), "trends.csv": found.trends.to_csv(index=False)}
    if found.figure is not None:
        files["figure.svg"] = found.figure
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "resolved.json").exists():
            raise UsageError(f"--out is {directory}, which is a run's folder with a table of its own: give another")
        for name, text in files.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise UsageError(f"can't write to {directory}: {error.strerror}; give another --out") from None
    return list(files)


def sizes_given(text: str | None) -> dict[str, float]:
    """``name=number,…`` as a mapping; a number may end in M or B.

    Raises:
        UsageError: no number above 0.
    """
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, number = part.rpartition("=")
        factor = {"M": 1e6, "B": 1e9}.get(number.strip()[-1:].upper(), 1.0)
        try:
            size = float(number.strip()[: None if factor == 1 else -1]) * factor
        except ValueError:
            size = math.nan
        if not name.strip() or not (math.isfinite(size) and size > 0):
            raise UsageError(f"--sizes has {part!r}: give name=number, for example smollm2=135M or smollm2=134515008")
        if name.strip() in found:
            raise UsageError(f"--sizes names {name.strip()} twice: give each model one size")
        found[name.strip()] = size
    return found


def _comparable(sides: Sequence[Side], values: Sequence[Mapping[str, Any]]) -> list[str]:
    """In what each run differs from the first and may; what it may not is refused."""
    notes: list[str] = []
    first = RunDirectory(sides[0].run)
    for side, asked in zip(sides[1:], values[1:], strict=True):
        if side.run == sides[0].run:
            continue
        found = differing(values[0], asked, (str(sides[0].run), str(side.run)))
        # That the models differ is the point.
        notes += [one for one in found if not one.startswith(("model is ", "adapter is "))]
        same_prompts(first, RunDirectory(side.run))
    return list(dict.fromkeys(notes))


def _own(values: Mapping[str, Any], path: Path) -> EvalConfig:
    """What the first run was asked to show; a whole study shows the profile of each setting."""
    from experiments.eval_config import EvalConfig

    keys = EvalConfig.model_fields if values["command"] == "eval" else Asking.model_fields
    try:
        return EvalConfig(**{key: value for key, value in values.items() if key in keys and key != "params"})
    except ValidationError:
        raise damaged(path) from None


def _of(recipe: tuple[str, EvalConfig], values: Mapping[str, Any], side: Side) -> EvalConfig:
    name, config = recipe
    if config.family != values["family"]:
        raise UsageError(
            f"{name} is a table about {config.family}, and {side.run} asked {values['family']}: choose another"
        )
    return config


def _by_model(spec: AnyTable) -> AnyTable:
    """The table with a row for each model; a table of answers says itself whether it pools models."""
    return (
        spec
        if getattr(spec, "of", "pairs") == "answers" or set(OWN_KEYS) & set(spec.rows)
        else spec.model_copy(update={"rows": ("arm", *spec.rows)})
    )


def _figure_by_model(figure: AnyFigure) -> AnyFigure:
    """The figure of pairs with a line for each model; one of answers says itself what it shows."""
    if getattr(figure, "of", "pairs") == "answers" or set(OWN_KEYS) & set(figure.table().rows):
        return figure
    return figure.model_copy(update={"lines": ("arm", *figure.lines)})


def _check_sizes(spec: AnyTable, figure: AnyFigure | None, sizes: Mapping[str, float]) -> None:
    rows = {*spec.rows, *(() if figure is None else figure.table().rows)}
    unknown = [name for name, size in sizes.items() if not math.isfinite(size)]
    if SIZE in rows and unknown:
        raise UsageError(
            f"the table or figure has {SIZE} and that of {unknown[0]} is not recorded: give --sizes {unknown[0]}=NUMBER"
        )


def _sizes(sides: Sequence[Side], names: Sequence[str], given: Mapping[str, float]) -> dict[str, float]:
    """The number of parameters of each model: what is given, else what its run recorded, else NaN."""
    allowed = {*names, *(side.model for side in sides)}
    for name in given:
        if name not in allowed:
            raise UsageError(f"--sizes names {name!r}: the models are {', '.join(names)}")
    found = {}
    for side, name in zip(sides, names, strict=True):
        recorded = recorded_size(RunDirectory(side.run))
        found[name] = float(given.get(name, given.get(side.model, recorded)))
    return found


def _made(
    sides: Sequence[Side],
    names: Sequence[str],
    spec: AnyTable,
    figure: AnyFigure | None,
    params: Mapping[str, Mapping[str, Any]],
    sizes: Mapping[str, float],
    how: Mapping[str, Any],
) -> tuple[pd.DataFrame, str | None]:
    """The table, and the figure as SVG."""
    import pandas as pd

    from experiments.answer_facts import facts_of, series
    from experiments.answer_tables import AnswerTableSpec
    from experiments.evaluation import drawn_figure, made_table

    specs = [spec, *([] if figure is None else [figure.table()])]
    first = RunDirectory(sides[0].run)
    facts = facts_of(first) if any(isinstance(one, AnswerTableSpec) for one in specs) else None
    answers = pd.concat(
        [side.table.assign(arm=name) for side, name in zip(sides, names, strict=True)], ignore_index=True
    )
    if answers.groupby("arm", sort=False).size().nunique() > 1:
        fewest = answers["arm"].value_counts().idxmin()
        raise RunError(
            f"{fewest} has fewer answers than the others: finish its run, with the command in its config.yaml"
        )
    arms: dict[str, dict[str, Any]] = {
        name: {"model": side.model, "series": series(side.model)} for side, name in zip(sides, names, strict=True)
    }
    if all(math.isfinite(size) for size in sizes.values()):
        for name, size in sizes.items():
            arms[name][SIZE] = int(size) if size == int(size) else size
    table = made_table(answers, params, spec, facts, arms, **how)
    if figure is None:
        return table, None
    return table, drawn_figure(made_table(answers, params, figure.table(), facts, arms, **how), figure)
