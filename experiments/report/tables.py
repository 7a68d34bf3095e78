"""What a table is, and the two that a reader meets first: the numbers at a glance, and the link table.

Each number stays beside its interval, its n and, where it is undefined, its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from experiments.inside import PAIR
from experiments.link import KINDS, OUTCOMES
from experiments.report.plots_inside import OTHER
from experiments.report.source import Source, shown
from experiments.report.text import (
    OUTCOME_NAMES,
    Cell,
    listed,
    number_cell,
    percent,
    percent_span,
    share_cell,
    signed,
    undefined,
)
from experiments.sentences import unproven_repairs


@dataclass(frozen=True, slots=True)
class Head:
    """A heading that may span columns and rows; ``title`` explains it on hovering, a ``label`` stands above words."""

    text: str
    columns: int = 1
    rows: int = 1
    title: str = ""
    label: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Cells; a row that ``starts`` a group is set off from the one above, a ``total`` is printed stronger."""

    cells: tuple[Cell, ...]
    starts: bool = False
    total: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption and rows of headings."""

    name: str
    caption: str
    heads: tuple[tuple[Head, ...], ...]
    rows: tuple[Row, ...]


def glance(source: Source) -> Table:
    """The main numbers of each arm, all settings together."""

    def over(share: str, kind: str = "") -> list[Cell]:
        found = []
        for arm in source.arms:
            one = source.profile(arm)
            found.append(share_cell(one[kind][share] if kind else one[share]))
        return found

    def split(kind: str, name: str) -> list[Cell]:
        found = []
        for arm in source.arms:
            one = source.arm(arm)["decomposition"][kind]["all"]
            cell = number_cell(one[name], one[f"{name}_low"], one[f"{name}_high"], reason=one["reason"])
            found.append(cell)
        return found

    bars = [source.arm(arm)["behaviour"]["kappa_bar"] for arm in source.arms]
    lines: list[tuple[str, list[Cell]]] = [
        ("accuracy, original", over("accuracy", "original")),
        ("accuracy, equivalent", over("accuracy", "equivalent")),
        ("R, both answers right", over("robust")),
        ("D, both answers wrong", over("shared_wrong")),
        ("U, one answer right", over("unstable")),
        ("invariance ι", over("invariance")),
        ("κ̄, chance-corrected ι", [_kappa_bar(bar) for bar in bars]),
        *((f"default δ, {kind} (logits)", split(kind, "delta")) for kind in PAIR),
        *((f"signal s, {kind} (logits)", split(kind, "signal")) for kind in PAIR),
        *((f"best probe AUROC, {kind}", [_best_probe(source, arm, kind) for arm in source.arms]) for kind in PAIR),
    ]
    return Table(
        "glance",
        f"All settings together, {source.profile('base')['n']} pairs an arm; 95% intervals in brackets.",
        ((Head("", label=True), *(Head(shown(arm)) for arm in source.arms)),),
        tuple(Row((Cell(label, kind="label"), *cells)) for label, cells in lines),
    )


def _kappa_bar(bar: dict[str, Any]) -> Cell:
    if bar["value"] is None:
        return undefined(bar["reason"])
    left_out = f"; undefined at {', '.join(map(str, bar['undefined']))}" if bar["undefined"] else ""
    return Cell(signed(bar["value"]), title=f"{bar['method']}; {bar['support']} pairs{left_out}")


def _best_probe(source: Source, arm: str, kind: str) -> Cell:
    one = source.arm(arm)["probes"][kind]
    if one["auroc"] is None:
        return undefined("no fold had both answers")
    return Cell(
        f"{one['auroc']:.2f}",
        note=f"layer {one['layer']}{', the last' if source.is_last(one['layer']) else ''}",
        title=one["method"],
    )


def link(source: Source) -> Table:
    """Each outcome and answer, and what was measured inside when it was given; arms below each other."""
    found = {arm: {(row["outcome"], row["answered"]): row for row in source.arm(arm)["link"]} for arm in source.arms}
    rows = []
    for outcome in OUTCOMES:
        for answered in ("right", "wrong"):
            arms = [arm for arm in source.arms if (outcome, answered) in found[arm]]
            for number, arm in enumerate(arms):
                row = found[arm][outcome, answered]
                first = (
                    Cell(OUTCOME_NAMES[outcome], note=outcome, kind="label keep", rows=len(arms)),
                    Cell(answered, kind=f"label keep {answered}", rows=len(arms)),
                )
                rows.append(Row((*(first if number == 0 else ()), *_link_cells(arm, row)), starts=number == 0))
    return Table(
        "link-table",
        "Prompts of all settings, both presentations. Intervals of shares are Wilson 95%, over instances. Signal and "
        "default are means in logits toward the gold answer, with the quartiles of the prompts below. Labels are counts "
        "with their share of n; an answer that was not read counts as wrong. “Repaired” is the share of tried prompts "
        "whose readout turned "
        f"right; only wrong readouts among the patched prompts are tried. {_repaired_at(source)}{_unproven(source)}",
        (
            (
                Head("the pair", rows=2, label=True),
                Head("this answer", rows=2, label=True),
                Head("arm", rows=2, label=True),
                Head("n", rows=2, title="prompts"),
                Head("readable", rows=2, title="the held-out probe gives the gold answer"),
                Head("signal s", rows=2, title="readout less default, toward gold, in logits"),
                Head("default δ", rows=2, title="default toward gold, in logits; negative speaks against the gold"),
                Head("label", columns=len(KINDS)),
                Head("repaired by patching", columns=3),
            ),
            (
                *(Head(kind.replace("_", " ")) for kind in KINDS),
                Head("other presen\u00adtation", title="the residual of the pair's other presentation"),
                Head("unrelated instance"),
                Head("random direction"),
            ),
        ),
        tuple(rows),
    )


def _repaired_at(source: Source) -> str:
    """The layers at which repair was judged, by arm and recipient, and where it was the best for want of a good one."""
    parts, fallen = [], False
    for arm in source.arms:
        layers: dict[str, int] = {}
        for row in source.arm(arm)["link"]:
            layers.update(row["patch_layer"])
        into = []
        for kind in PAIR:
            if kind in layers:
                reached = source.arm(arm)["probes"][OTHER[kind]]["first_layer"] == layers[kind]
                into.append(f"{layers[kind]}{'' if reached else '*'} into {kind}")
                fallen = fallen or not reached
        parts.append(f"{shown(arm)} {listed(into)}")
    threshold = source.resolved["probe"]["threshold"]
    why = f" (*: no layer before the last reaches AUROC {threshold}, so the best one)" if fallen else ""
    return f"Layers of the repair: {'; '.join(parts)}{why}."


def _unproven(source: Source) -> str:
    """Where repair is not above its controls; empty where it is everywhere."""
    parts = []
    for arm in source.arms:
        if found := unproven_repairs(source.arm(arm)["link"]):
            parts.append(f"{shown(arm)}: {'; '.join(found)}")
    return f" Repair is not above its controls here: {'. '.join(parts)}." if parts else ""


def _link_cells(arm: str, row: dict[str, Any]) -> Iterator[Cell]:
    yield Cell(shown(arm), kind="label")
    yield Cell(f"{row['n']:,}")
    yield share_cell(row["decodable"])
    for name in ("signal", "default"):
        one = row[name]
        yield number_cell(
            one["value"],
            one["lower_quartile"],
            one["upper_quartile"],
            reason="the default δ is undefined",
            title=f"{one['method']}; n = {one['n']}",
        )
    for kind in KINDS:
        if row["kinds"] is None:
            yield Cell("", kind="void")
            continue
        one = row["kinds"][kind]
        yield Cell(
            f"{one['count']}",
            note=percent(one["value"], one["n"]),
            title=f"{one['count']} of {one['n']}, {percent_span(one['low'], one['high'], one['n'])}",
        )
    for donor in ("matched", "unrelated", "random"):
        if row["repaired"] is None:
            yield Cell("", kind="void")
        elif row["repaired"][donor]["value"] is None:
            yield undefined("no wrong readout among the patched prompts")
        else:
            yield share_cell(row["repaired"][donor], count=True)
