"""What a patching study is asked to do: the section ``patch`` of a whole study, and the flat keys of ``probe patch``.

Each option is checked where what it needs is first known: words when the configuration is read, spans when the items are
there, sites and layers when the model is loaded, instances a cell when the answers were read. Nothing that cannot apply
is passed over: it is refused in one line that names the key, the value, what is allowed and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from experiments.errors import UsageError
from experiments.sections import Section

if TYPE_CHECKING:
    from activations.model import Model
    from experiments.items import Row

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")
DIRECTIONS = {"repair": "equivalent", "break": "original"}  # the recipient's presentation
KINDS = ("disagreement", "agreement", "shared error")
CONTROLS = ("unrelated", "random", "same cell", "own")
DECIDING = ("unrelated", "random")  # what the matched donor has to exceed to be specific
DONORS = ("matched", *DECIDING)  # of a whole study
ANSWER, ALL = "answer", "all"
HEADS = "z"  # the site that is patched head by head
MOST_LAYERS = 1000  # in one range: more is a slip of the key
SHOWN = 8  # names of a list in a message


class PatchSettings(Section):
    """Patching between the presentations of a pair."""

    pairs: int = Field(
        40,
        ge=2,
        le=100_000,
        description="disagreeing pairs, and as many that agree, at most; without disagreeing ones, of each kind",
    )
    check_cells: int = Field(20, ge=1, le=10_000, description="cells recomputed by plain forwards in every sweep")
    sites: tuple[str, ...] = Field(("resid_post",), description=f"{', '.join(SITES)}; z is patched head by head")
    layers: tuple[int, ...] | None = Field(
        None, description="layers, such as 0-3,8 or -1; all that have the site if not given"
    )
    positions: tuple[str, ...] = Field(
        (ANSWER,), description="answer, all, or spans of the family: query, premise:1, premise:* for every one"
    )
    directions: tuple[str, ...] = Field(
        tuple(DIRECTIONS), description="repair: the original's activations into the equivalent's run; break: back"
    )
    kinds: tuple[str, ...] = Field(
        KINDS, description="pairs by their readouts: disagreement, agreement (both right), shared error"
    )
    controls: tuple[str, ...] = Field(
        ("unrelated", "random"), description="donors to compare with: unrelated, random, same cell, own"
    )
    decides: Literal["flipped", "difference"] = Field(
        "difference", description="where the matched donor has to exceed the controls for a cell to be specific"
    )
    margin: float = Field(
        0.5, gt=0, le=1000, description="logits by which donor and recipient must differ to count in restoration"
    )
    cell_budget: int | None = Field(None, ge=1, le=100_000, description="cells in one forward pass, at most")

    @field_validator("sites", "positions", "directions", "kinds", "controls", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        several = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(one, str) for one in several):
            raise PydanticCustomError("words", "give words, and quote what YAML takes for something else")
        return tuple(one.strip() for one in several)

    @field_validator("sites", "directions", "kinds", "controls")
    @classmethod
    def _known(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        known = {"sites": SITES, "directions": tuple(DIRECTIONS), "kinds": KINDS, "controls": CONTROLS}[info.field_name]
        for one in value:
            if one not in known:
                raise PydanticCustomError(
                    "unknown", "{said}", {"said": f"choose from {', '.join(known)}{near(one, known)}"}
                )
        return _different(value, least=0 if info.field_name == "controls" else 1)

    @field_validator("positions")
    @classmethod
    def _spans_whole(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(one.removeprefix("span:") for one in value)
        for one in found:
            if "/" in one or not one or one.removeprefix("index:").removeprefix("-").isdecimal():
                raise PydanticCustomError(
                    "position", "give answer, all, or the name of a whole span, such as query, premise:1 or premise:*"
                )
        return _different(found)

    @field_validator("layers", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if value is None or value == "all":
            return None
        if value in ((), []):
            raise PydanticCustomError("few", "give at least one, such as 0-3,8 or -1, or leave it out for all")
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        found: list[int] = []
        for part in [two.strip() for one in parts for two in str(one).split(",")]:
            match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", part)
            low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if low > high or high - low >= MOST_LAYERS:
                raise PydanticCustomError("layers", "give numbers and ranges, such as 0-3,8 or -1, or all")
            found.extend(range(low, high + 1))
        return tuple(dict.fromkeys(found))


def near(word: str, known: Iterable[str]) -> str:
    """A guess at what was meant, for the end of a message."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _different(value: tuple[str, ...], least: int = 1) -> tuple[str, ...]:
    if len(value) < least:
        raise PydanticCustomError("few", "give at least one")
    if len(set(value)) != len(value):
        raise PydanticCustomError("twice", "give none twice")
    return value


def check_for_run(patch: PatchSettings) -> None:
    """Refuse what takes away the sweep that a whole study's link and report are made from, or needs another capture.

    Raises:
        UsageError: naming the key.
    """
    needed = {
        "sites": ("resid_post",),
        "directions": tuple(DIRECTIONS),
        "kinds": ("disagreement",),
        "controls": DECIDING,
    }
    for name, words in needed.items():
        given = getattr(patch, name)
        if missing := [word for word in words if word not in given]:
            raise UsageError(
                f"patch.{name} is {', '.join(given) or 'empty'}: a run needs {missing[0]}, add it, or give the rest to "
                "`probe patch`"
            )
    if patch.layers is not None:
        raise UsageError(
            f"patch.layers is {', '.join(map(str, patch.layers))}: a run patches every layer, leave it out, or use "
            "`probe patch`"
        )
    if patch.positions != (ANSWER,):
        raise UsageError(
            f"patch.positions is {', '.join(patch.positions)}: a run patches at the answer, where it has captured; "
            "leave it out, or use `probe patch`"
        )


def positions_of(patch: PatchSettings, asked: Sequence[Row], kinds: Sequence[str]) -> list[str]:
    """The positions asked for, with ``premise:*`` written out, in their order.

    Args:
        kinds: the presentations whose spans count; both of a pair have to have one.

    Raises:
        UsageError: no instance has this span in every presentation.
    """
    names = [one for one in patch.positions if one not in (ANSWER, ALL)]
    if not names:
        return list(patch.positions)
    of_pair: dict[tuple[str, str], list[set[str]]] = {}
    for row in asked:
        if row.presentation.kind in kinds:
            labels = {span.label for span in row.presentation.spans}
            of_pair.setdefault((row.setting, row.matched.instance.key), []).append(labels)
    common: set[str] = set()
    for labels_of_pair in of_pair.values():
        common |= set.intersection(*labels_of_pair)
    known = sorted(common, key=_natural)
    found: list[str] = []
    for one in patch.positions:
        if one in (ANSWER, ALL) or one in common:
            found.append(one)
            continue
        members = [label for label in known if one.endswith(":*") and label.startswith(one[:-1])]
        if not members:
            more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
            raise UsageError(
                f"positions is {', '.join(patch.positions)}: no prompt has a span called {one!r}; choose answer, all or "
                f"one of {', '.join(known[:SHOWN]) or 'no span'}{more}{near(one, known)}"
            )
        found += members
    return list(dict.fromkeys(found))


def _natural(label: str) -> tuple[bool, bool, str, int, str]:
    """Spans without a number or name first, then numbered ones in their order, then named ones."""
    name, colon, number = label.partition(":")
    counted = number.isdecimal()
    return bool(colon), not counted, name, int(number) if counted else -1, number


def layers_of(patch: PatchSettings, model: Model, site: str) -> list[int]:
    """The layers in which a site is patched: those named, or all that have it.

    Raises:
        UsageError: the model has no such layer, or the layer has no such site or no heads.
    """
    from activations.errors import StoreError
    from activations.sites import choose, spans

    count = model.n_layers
    named = patch.layers
    if named is not None and (bad := [layer for layer in named if not -count <= layer < count]):
        raise UsageError(
            f"layers is {', '.join(map(str, named))}: {model.name} has layers 0 to {count - 1} and no layer {bad[0]} "
            "(negative ones count from the end); leave it out"
        )
    try:
        found = [layer for _, layer in choose(model, [site], named)]
    except StoreError as error:
        raise UsageError(f"sites is {', '.join(patch.sites)}: {error}; leave {site} out or name other layers") from None
    if site != HEADS:
        return found
    with_heads = [layer for layer in range(count) if model.heads(layer)]
    lacking = sorted({layer % count for layer in named or ()} - set(with_heads))
    if not with_heads or lacking:
        where = f"layers {spans(with_heads)} have heads to cut" if with_heads else "no layer has heads to cut"
        at = f"layers is {', '.join(map(str, named))}" if named else f"sites is {', '.join(patch.sites)}"
        raise UsageError(f"{at}: of {model.name} {where}; name these, or leave {HEADS} out of sites")
    return [layer for layer in found if layer in with_heads]


def check_model(patch: PatchSettings, model: Model) -> None:
    """Refuse sites and layers that this model lacks."""
    for site in patch.sites:
        layers_of(patch, model, site)
