"""What ``probe eval`` is asked to do: ask a model about matched presentations, and print a table of its answers.

The keys are those of ``probe run`` as far as they apply, plus how answers are drawn, which table is printed and which
figure is drawn. A recipe is such a configuration that comes with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from experiments import recipes
from experiments.config import Asking, Setting, load_as
from experiments.errors import UsageError
from experiments.tables import FigureSpec, TableSpec
from experiments.tables import check as check_table

REASONING_TOKENS = 1024
COLDEST = 1e-6  # as activations.sampling, which is not imported here since it needs torch
# What each presentation is compared with where the configuration names no pairs.
PARTNERS = {"distracted_equivalent": "distracted"}


class EvalConfig(Asking):
    """A behavioural study."""

    command: ClassVar[str] = "eval"

    max_tokens_reasoning: int | None = Field(
        None, ge=1, le=1_000_000, description=f"the same for prompt=reasoning; {REASONING_TOKENS} if not given"
    )
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most probable token")
    top_p: float | None = Field(None, gt=0, le=1, description="sample from the smallest set with this probability")
    top_k: int | None = Field(None, ge=1, description="sample from this many most probable tokens")
    invariance_threshold: float = Field(0.85, ge=0, le=1, description="the size is sought at which ι falls below it")
    table: TableSpec | None = Field(None, description="rows, columns and pairs of the printed table")
    figure: FigureSpec | None = Field(None, description="what is drawn from the table")


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
    return Path(path).stem, config


def check(config: EvalConfig, grid: Sequence[Setting]) -> None:
    """Refuse keys that can't apply, and tables and figures that these settings can't give.

    Raises:
        UsageError: naming the key.
    """
    params = {setting.label: setting.params for setting in grid}
    check_table(table_of(config, grid), params)
    if config.figure is not None:
        check_table(config.figure.table(), params)
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


def reasons(setting: Setting) -> bool:
    """Whether the model is asked to think before it answers."""
    return setting.params.get("prompt") == "reasoning"


def tokens_of(config: EvalConfig, setting: Setting) -> int:
    """Tokens of an answer under this setting, at most."""
    return (config.max_tokens_reasoning or REASONING_TOKENS) if reasons(setting) else config.max_tokens


def table_of(config: EvalConfig, grid: Sequence[Setting]) -> TableSpec:
    """The table that is asked for; without one, the profile of each setting, arm and pair."""
    if config.table is not None:
        return config.table
    if config.figure is not None:
        return config.figure.table()
    from tasks.contracts import Directional
    from tasks.registry import family as family_named

    # An answer has to change where the gold answer does: no pair whose agreement counts.
    family = family_named(config.family)
    flipped = family.flipped if isinstance(family, Directional) else frozenset()
    rendered = dict.fromkeys(kind for setting in grid for kind in kinds_of(setting))
    kinds = [kind for kind in rendered if kind not in flipped]
    partner = {kind: one for kind, one in PARTNERS.items() if one in kinds}
    pairs = tuple((partner.get(kind, kinds[0]), kind) for kind in kinds[1:])
    if not pairs:
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


def kinds_of(setting: Setting) -> Sequence[str]:
    """The presentations that are rendered under a setting."""
    kinds: Sequence[str] = setting.params.get("presentations", ("original", "equivalent"))
    return kinds


def pairs_of(config: EvalConfig, grid: Sequence[Setting]) -> tuple[tuple[str, str], ...]:
    """Every pair that the table or the figure compares, each once."""
    drawn = () if config.figure is None else config.figure.pairs
    return tuple(dict.fromkeys((*table_of(config, grid).pairs, *drawn)))
