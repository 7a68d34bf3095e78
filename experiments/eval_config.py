"""What ``probe eval`` is asked to do: ask a model about matched presentations, and print a table of its answers.

The keys are those of ``probe run`` as far as they apply, plus how answers are drawn, which table is printed and which
figure is drawn. A recipe is such a configuration that comes with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from experiments import recipes
from experiments.answer_figures import AnswerFigureSpec
from experiments.answer_tables import AnswerTableSpec
from experiments.config import TAGGED, Asking, Setting, load_as
from experiments.errors import UsageError
from experiments.table_specs import FigureSpec, TableSpec
from experiments.tables import check as check_table

REASONING_TOKENS = 1024
COLDEST = 1e-6  # as activations.sampling, which is not imported here since it needs torch
# What each presentation is compared with where the configuration names no pairs.
PARTNERS = {"distracted_equivalent": "distracted"}


def _counted(value: Any) -> str:
    """Which kind of table or figure is meant: of pairs, unless it says otherwise."""
    of = value.get("of", "pairs") if isinstance(value, Mapping) else getattr(value, "of", "pairs")
    return f"{TAGGED}{of}"


def _number(value: Any) -> str:
    return f"{TAGGED}word" if value == "all" else f"{TAGGED}number"


PAIRS, ANSWERS = Tag(f"{TAGGED}pairs"), Tag(f"{TAGGED}answers")
AnyTable = Annotated[Annotated[TableSpec, PAIRS] | Annotated[AnswerTableSpec, ANSWERS], Discriminator(_counted)]
AnyFigure = Annotated[Annotated[FigureSpec, PAIRS] | Annotated[AnswerFigureSpec, ANSWERS], Discriminator(_counted)]
AnyLimit = Annotated[
    Annotated[int, Field(ge=1, le=1_000_000), Tag(f"{TAGGED}number")] | Annotated[Literal["all"], Tag(f"{TAGGED}word")],
    Discriminator(_number),
]


class EvalConfig(Asking):
    """A behavioural study."""

    command: ClassVar[str] = "eval"

    limit: AnyLimit = Field(100, description="matched sets a setting, or all where a family has a last one")
    max_tokens_reasoning: int | None = Field(
        None, ge=1, le=1_000_000, description=f"the same for prompt=reasoning; {REASONING_TOKENS} if not given"
    )
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most probable token")
    top_p: float | None = Field(None, gt=0, le=1, description="sample from the smallest set with this probability")
    top_k: int | None = Field(None, ge=1, description="sample from this many most probable tokens")
    invariance_threshold: float = Field(0.85, ge=0, le=1, description="the size is sought at which ι falls below it")
    table: AnyTable | None = Field(None, description="rows and columns of the printed table")
    figure: AnyFigure | None = Field(None, description="what is drawn from the table")


def load_eval(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> EvalConfig:
    """Configuration of ``probe eval``: a file or the name of a recipe, then ``--set`` pairs, then flags.

    Raises:
        UsageError: no such file or recipe, unknown key, bad value.
    """
    return load_as(EvalConfig, None if path is None else recipes.found(path, EvalConfig.command), overrides, flags)


def other(path: str) -> tuple[str, EvalConfig]:
    """Name and configuration of a recipe or file whose table is made from the answers of another run.

    Raises:
        UsageError: no such file or recipe, or it asks for no table and no figure.
    """
    config = load_eval(path, (), {})
    if config.table is None and config.figure is None:
        raise UsageError(f"{path!r} has neither table nor figure: give a recipe or a file with one")
    name = Path(path).stem
    if name in ("table", "figure"):
        raise UsageError(f"{path!r} would be written over the run's own {name}: rename the file")
    return name, config


def check(config: EvalConfig, grid: Sequence[Setting]) -> None:
    """Refuse keys that can't apply, and tables and figures that these settings can't give.

    Raises:
        UsageError: naming the key.
    """
    params = {setting.label: setting.params for setting in grid}
    for spec in tables_of(config, grid):
        # What a table of answers can show is known when the questions are.
        if isinstance(spec, TableSpec):
            check_table(spec, params)
    if config.limit == "all" and not _ends(config):
        raise UsageError(f"limit is all, but {config.family} draws sets without end: give a number")
    if 0 < config.temperature < COLDEST:
        raise UsageError(
            f"temperature is {config.temperature}: give {COLDEST} or more, or 0 for the most probable token"
        )
    for name in ("top_p", "top_k"):
        if getattr(config, name) is not None and config.temperature == 0:
            raise UsageError(
                f"{name} is {getattr(config, name)} but temperature is 0, which draws nothing: "
                f"raise temperature, or give {name}=null"
            )
    if config.max_tokens_reasoning is not None and not any(reasons(setting) for setting in grid):
        raise UsageError(
            "max_tokens_reasoning is given but no setting has prompt=reasoning: leave it out, or set prompt"
        )


def _ends(config: EvalConfig) -> bool:
    from tasks.contracts import Finite
    from tasks.registry import family as family_named

    return isinstance(family_named(config.family), Finite)


def reasons(setting: Setting) -> bool:
    """Whether the model is asked to think before it answers."""
    return setting.params.get("prompt") == "reasoning"


def tokens_of(config: EvalConfig, setting: Setting) -> int:
    """Tokens of an answer under this setting, at most."""
    return (config.max_tokens_reasoning or REASONING_TOKENS) if reasons(setting) else config.max_tokens


def tables_of(config: EvalConfig, grid: Sequence[Setting]) -> list[AnyTable]:
    """The printed table, and the one that the figure is drawn from."""
    return [table_of(config, grid), *([] if config.figure is None else [config.figure.table()])]


def table_of(config: EvalConfig, grid: Sequence[Setting]) -> TableSpec | AnswerTableSpec:
    """The table that is asked for; without one, the profile of each setting, arm and pair."""
    if config.table is not None:
        return config.table
    if config.figure is not None:
        return config.figure.table()
    pairs = _kept_pairs(config, grid)
    if not pairs:
        kinds = dict.fromkeys(kind for setting in grid for kind in kinds_of(setting))
        from tasks.registry import family as family_named

        flipped: frozenset[str] = getattr(family_named(config.family), "flipped", frozenset())
        if turned := [kind for kind in kinds if kind in flipped]:
            raise UsageError(
                f"presentations is {', '.join(kinds)}, and {turned[0]} flips the answer: a table of pairs "
                "compares two that keep it; add one, or give a recipe or a table of answers"
            )
        raise UsageError(f"presentations is {', '.join(kinds)}: a table compares two, add one")
    swept = [name for name in grid[0].params if len({str(setting.params.get(name)) for setting in grid}) > 1]
    columns = (
        "pairs",
        "accuracy_original",
        "accuracy_equivalent",
        "invariance",
        "robust",
        "shared_wrong",
        "unstable",
        "kappa",
    )
    return TableSpec(rows=(*swept, "arm", *(("pair",) if len(pairs) > 1 else ())), columns=columns, pairs=pairs)


def _kept_pairs(config: EvalConfig, grid: Sequence[Setting]) -> tuple[tuple[str, str], ...]:
    """Each presentation that keeps the gold answer, with what it is compared with."""
    from tasks.contracts import Directional
    from tasks.registry import family as family_named

    # An answer has to change where the gold answer does: no pair whose agreement counts.
    family = family_named(config.family)
    flipped = family.flipped if isinstance(family, Directional) else frozenset()
    rendered = dict.fromkeys(kind for setting in grid for kind in kinds_of(setting))
    kinds = [kind for kind in rendered if kind not in flipped]
    partner = {kind: one for kind, one in PARTNERS.items() if one in kinds}
    return tuple((partner.get(kind, kinds[0]), kind) for kind in kinds[1:])


def kinds_of(setting: Setting) -> Sequence[str]:
    """The presentations that are rendered under a setting."""
    kinds: Sequence[str] = setting.params.get("presentations", ("original", "equivalent"))
    return kinds


def pairs_of(config: EvalConfig, grid: Sequence[Setting]) -> tuple[tuple[str, str], ...]:
    """Every pair that the table or the figure compares, each once; beside a table of answers, those that there are."""
    found: dict[tuple[str, str], None] = {}
    for spec in tables_of(config, grid):
        found |= dict.fromkeys(spec.pairs if isinstance(spec, TableSpec) else _kept_pairs(config, grid))
    return tuple(found)
