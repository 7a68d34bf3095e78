"""What an ablation is asked to do, and what is refused of it because it can't apply.

The keys are the section ``ablate`` of ``probe run``, and the same without the section's name in ``probe ablate``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from experiments.ablate_halves import test_values
from experiments.errors import UsageError
from experiments.sections import Section

if TYPE_CHECKING:
    from activations.model import Model
    from experiments.config import Config

HEADS = 3  # of one ablation


class AblateSettings(Section):
    """Ablation of attention heads, chosen on other instances than they are cut on."""

    heads: int | None = Field(
        None, ge=1, le=10_000, description=f"number of top-ranked heads to ablate together; {HEADS} if not given"
    )
    chosen: tuple[str, ...] | None = Field(
        None, min_length=1, description="heads to ablate instead of ranking them: 3.1 or L3H1 is head 1 of layer 3"
    )
    pairs: int | None = Field(
        None,
        ge=2,
        le=100_000,
        description="pairs that heads are ranked on, at most; as many as are patched if not given",
    )
    random_sets: int = Field(10, ge=1, le=1000, description="random head sets of the same number, as control")
    leave_one_out: bool = Field(True, description="ablate the top heads without each of them as well")
    held_out: str | None = Field(
        None, min_length=1, description="swept parameter whose `test` values take no part in the ranking"
    )
    test: tuple[str | int | float | bool, ...] | None = Field(
        None, min_length=1, description="values of held_out that heads are ablated on; the last if not given"
    )
    scope: Literal["answer", "all"] = Field("answer", description="tokens at which heads are cut")
    source: Literal["zero", "mean", "resample"] = Field(
        "zero", description="what takes a head's place: nothing, its mean over other instances, or another instance's"
    )
    grid: bool = Field(False, description="ablate every head by itself as well")
    direct: bool = Field(False, description="also what each patched head does to the logits by itself")
    check_cells: int | None = Field(
        None, ge=1, le=10_000, description="cells recomputed by plain forwards; as many as in patching if not given"
    )
    cell_budget: int | None = Field(None, ge=1, le=100_000, description="cells in one forward pass, at most")

    @field_validator("chosen", mode="before")
    @classmethod
    def _heads_by_name(cls, value: Any) -> Any:
        several = (value,) if isinstance(value, (str, float, int)) else value
        return tuple(_head_name(one) for one in several) if isinstance(several, (list, tuple)) else value

    @field_validator("test", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (str, int, float)) else value

    @model_validator(mode="after")
    def _fill_heads(self) -> AblateSettings:
        """The number of heads, spelled out: the digest covers what was done."""
        if self.heads is None:
            object.__setattr__(self, "heads", HEADS if self.chosen is None else len(self.chosen))
        return self


def _head_name(value: Any) -> str:
    """``3.1`` for what may be written 3.1 or L3H1; a number is refused, since YAML takes 3.10 for 3.1."""
    if not isinstance(value, str):
        raise PydanticCustomError("head", "a number can't tell head 1 from head 10, so quote it or write it as L3H1")
    if (match := re.fullmatch(r"L?(\d+)[.H](\d+)", value.strip(), re.IGNORECASE)) is None:
        raise PydanticCustomError("head", "name heads by layer and head, such as 3.1 or L3H1")
    return f"{int(match[1])}.{int(match[2])}"


def of_run(config: Config) -> AblateSettings:
    """The section of a whole study; what it leaves open is as in the section about patching."""
    own = config.ablate
    open_keys = {"pairs": own.pairs or config.patch.pairs, "check_cells": own.check_cells or config.patch.check_cells}
    return own.model_copy(update=open_keys)


def check(how: AblateSettings, params: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse options that can't apply.

    Args:
        params: family parameters by setting.

    Raises:
        UsageError: naming the key.
    """
    if how.chosen is not None:
        _check_chosen(how)
    if how.source != "zero" and how.scope == "all":
        raise UsageError(
            f"source is {how.source} but scope is all: activations are kept at the answer position, and "
            f"elsewhere there is none to take; give source=zero or scope=answer"
        )
    if how.held_out is None:
        if how.test is not None:
            raise UsageError(
                f"test is {', '.join(map(str, how.test))} but held_out is not given: say of which "
                "parameter these are values, or leave it out"
            )
        return
    _check_units(how, params)


def _check_chosen(how: AblateSettings) -> None:
    given = how.chosen or ()
    named = f"chosen is {', '.join(given)}"
    if twice := [head for head in given if given.count(head) > 1]:
        raise UsageError(f"{named}: {twice[0]} stands there twice, name it once")
    if how.heads != len(given):
        raise UsageError(f"{named} and heads is {how.heads}: leave heads out")
    for key in ("held_out", "direct"):
        if getattr(how, key):
            raise UsageError(
                f"{named} and {key} is {getattr(how, key)}: given heads are not ranked by patching, so leave "
                f"{key} out, or chosen"
            )


def _check_units(how: AblateSettings, params: Mapping[str, Mapping[str, Any]]) -> None:
    name = str(how.held_out)
    known = tuple(next(iter(params.values())))
    if name not in known:
        raise UsageError(f"held_out is {name!r}: choose a parameter of the family ({', '.join(known)})")
    values = list(dict.fromkeys(str(one[name]) for one in params.values()))
    if len(values) < 2:
        raise UsageError(
            f"held_out is {name} but the run has one value of it, {values[0]}: sweep it, for example "
            f"--set {name}=A,B, or leave held_out out"
        )
    tested = test_values(how, params)
    if unknown := [one for one in tested if one not in values]:
        raise UsageError(f"test is {unknown[0]}: the run has {name} {', '.join(values)}")
    if set(tested) == set(values):
        raise UsageError(f"test is {', '.join(tested)}, which is every value of {name}: leave one for the ranking")


def check_for_run(how: AblateSettings) -> None:
    """Refuse what a whole study does not do: it ranks heads on one half and zeroes them on the other, at the answer.

    Raises:
        UsageError: naming the key.
    """
    for name in ("chosen", "held_out", "test", "scope", "source"):
        value, usual = getattr(how, name), AblateSettings.model_fields[name].default
        if value != usual:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(
                f"ablate.{name} is {shown}: a run zeroes top-ranked heads at the answer, on the half of the instances that "
                f"did not rank them; leave it out, or give {name} to `probe ablate`"
            )


def check_model(how: AblateSettings, model: Model, *, section: str = "") -> None:
    """Refuse heads that this model does not have; the chosen ones and a disjoint random set have to fit into it.

    Raises:
        UsageError: naming the key.
    """
    counts = [model.heads(layer) for layer in range(model.n_layers)]
    total = sum(count or 0 for count in counts)
    if total < 2:
        raise UsageError(
            f"{model.name} has {total} attention heads to cut: a run ablates one and needs another as control"
        )
    for one in how.chosen or ():
        layer, head = map(int, one.split("."))
        if layer >= len(counts):
            raise UsageError(f"{section}chosen has {one}: {model.name} has layers 0 to {len(counts) - 1}")
        count = counts[layer] or 0
        if head >= count:
            have = f"heads 0 to {count - 1}" if count else "no heads that can be cut"
            raise UsageError(f"{section}chosen has {one}: layer {layer} of {model.name} has {have}")
    if how.heads is not None and 2 * how.heads > total:
        asked = f"{section}heads is {how.heads}" if how.chosen is None else f"{section}chosen names {how.heads} heads"
        raise UsageError(
            f"{asked} but {model.name} has {total} heads: give at most {total // 2}, so that a random set of the same "
            "size remains as control"
        )
    if how.direct:
        _check_direct(model, [layer for layer, count in enumerate(counts) if count], section)


def _check_direct(model: Model, layers: Sequence[int], section: str) -> None:
    from activations.additions import additions
    from activations.errors import ModelError

    try:
        found = additions(model)
    except ModelError as error:
        raise UsageError(f"{section}direct: {error}; leave it out") from None
    if closed := [layer for layer in layers if found[layer].heads is None]:
        raise UsageError(
            f"{section}direct: layer {closed[0]} of {model.name} adds its heads' output in a way that can't be taken "
            "apart; leave it out"
        )
