"""Tables of an intervention's page: what stands in the drawings as numbers, what was left out, and what the sweeps cost.

Of a map with many cells a table shows the one that is furthest beyond its controls, named as that, and counts the others;
every cell is in ``table.csv`` and in the run's tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from experiments.report.intervention_source import (
    DECIDING,
    Interventions,
    Sweep,
    cell_name,
    exceeding,
    nearest,
    number,
    position_name,
    strongest,
)
from experiments.report.plots_interventions_heads import CONTROL_SETS, IN_LOGITS, MEASURE_NAMES, SET_NAMES
from experiments.report.source import shown
from experiments.report.tables import Head, Row, Table
from experiments.report.tables_inside import cost_table
from experiments.report.text import Cell, number_cell, p_cell, percent, percent_span, signed, span, undefined

if TYPE_CHECKING:
    import pandas as pd


def studies(source: Interventions) -> Table | None:
    """A row for each arm, direction, kind of pair, site and position."""
    rows = []
    before = None
    for sweep in source.sweeps:
        place = (sweep.arm, sweep.direction)
        first = (Cell(shown(sweep.arm) if before is None or before[0] != sweep.arm else "", kind="label"),
                 Cell(sweep.direction if place != before else "", kind="label"))  # fmt: skip
        rows.append(Row((*first, *_study(source, sweep)), starts=place != before))
        before = place
    if not rows:
        return None
    return Table(
        "studies",
        "One row for each set of cells that were tested together. “Beyond” counts the cells in which the matched donor "
        "does more than every control, without the last layer of a curve that climbs by construction. Then the cell "
        "that is furthest beyond the control nearest to it: effect in logits toward the donor's answer, and the same "
        "less that of the control, paired by recipient; brackets hold 95% bootstrap intervals over instances, p is "
        "over all cells tested together. As the largest of several it tends to be too large.",
        (
            (
                Head("arm", label=True),
                Head("direction", label=True),
                Head("pairs", label=True),
                Head("where", label=True),
                Head("n", title="recipients, and instances below"),
                Head("left out", title="recipients whose donor has another number of tokens there, or no such span"),
                Head("beyond", title="cells in which the matched donor does more than every control"),
                Head("cell", label=True),
                Head("effect"),
                Head("less nearest control"),
                Head("p", title="of the difference to that control"),
                Head("flipped", title="share of recipients that take the donor's answer, of those that could"),
            ),
        ),
        tuple(rows),
    )


def _study(source: Interventions, sweep: Sweep) -> tuple[Cell, ...]:
    left = number(sweep.matched["left_out"].max()) or 0
    about = (
        Cell(sweep.kind, kind="label"),
        Cell(shown(sweep.site), note=position_name(sweep.position), kind="label"),
        Cell(str(sweep.n), note=str(sweep.groups)),
        Cell(f"{left:.0f}"),
    )
    reason = str(sweep.matched["reason"].iloc[0] or "undefined")
    beyond = (
        Cell(f"{len(exceeding(source, sweep))} of {len(sweep.matched)}", title=str(sweep.matched["method"].iloc[0]))
        if sweep.decided
        else undefined(reason)
    )
    best = strongest(source, sweep)
    if best is None:
        return (*about, beyond, *(undefined(reason) for _ in range(5)))
    row = sweep.matched.iloc[best]
    control = nearest(sweep, best)
    none = f"no control among {', '.join(DECIDING)}"
    return (
        *about,
        beyond,
        Cell(cell_name(row), kind="label"),
        number_cell(number(row["effect"]), *_ends(row, "effect"), reason=reason),
        undefined(none)
        if control is None
        else Cell(
            signed(control[1]["above"]),
            note=f"{span(*_ends(control[1], 'above'))}\n{control[0]}",
        ),
        p_cell(None if control is None else number(control[1]["above_p"])),
        _flipped(row, reason),
    )


def _flipped(row: pd.Series, reason: str) -> Cell:
    value, n = number(row["flipped"]), int(row["flipped_n"])
    if value is None or not n:
        return undefined(reason)
    return Cell(percent(value, n), note=percent_span(*_ends(row, "flipped"), n), title=f"of {n}")


def quality(source: Interventions) -> Table | None:
    """How far gradient estimates agree with the exact sweep."""
    table = source.tables["patch_quality"]
    if table.empty:
        return None
    names = ("spearman", "pearson", "sign_agreement", "overlap", "slope")
    rows = []
    for arm in source.arms:
        for place, row in enumerate(source.of("patch_quality", arm).to_dict("records")):
            cells = [
                number_cell(number(row[name]), *_ends(row, name), sign=False, reason=str(row["reason"]))
                for name in names
            ]
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if place == 0 else "", kind="label"),
                        Cell(str(row["direction"]), kind="label"),
                        Cell(shown(str(row["site"])), note=position_name(str(row["position"])), kind="label"),
                        *cells,
                        Cell(str(row["cells"])),
                        Cell(str(row["n"]), note=str(row["n_groups"])),
                        Cell(str(row["verdict"]), kind="label", title=str(row["reason"])),
                    ),
                    starts=place == 0,
                )
            )
    return Table(
        "quality",
        "Agreement over cells of estimated with exact mean effects. Signs count only cells whose exact effect is told "
        "from 0; overlap is that of the largest effects (10, or all of fewer); a slope below 1 means that estimates "
        "are too large. Enough: the lower ends of Spearman's ρ and of the overlap are at least 0.9 and 0.8. Brackets "
        "hold 95% bootstrap intervals over instances.",
        (
            (
                Head("arm", label=True),
                Head("direction", label=True),
                Head("where", label=True),
                Head("Spearman"),
                Head("Pearson"),
                Head("same sign"),
                Head("overlap"),
                Head("slope"),
                Head("cells"),
                Head("n", title="recipients, and instances below"),
                Head("verdict", label=True),
            ),
        ),
        tuple(rows),
    )


def heads(source: Interventions) -> Table | None:
    """The chosen heads: effect where they were chosen and where not, direct effect, and what each adds to the others."""
    rows = []
    for arm in source.arms:
        for place, row in enumerate(_chosen(source, arm)):
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if place == 0 else "", kind="label"),
                        Cell(row["name"], kind="label"),
                        *row["cells"],
                    ),
                    starts=place == 0,
                )
            )
    if not rows:
        return None
    return Table(
        "heads-table",
        "The ablated heads. Effects are in logits toward the donor's readout, on the instances that rank the heads and "
        "on those that do not; the direct one is what the head does to the logits with later blocks left as they were. "
        "“Adds” is the change of s, the mean of both presentations, by all of them less that without this one. "
        "Brackets hold 95% bootstrap intervals over instances, each by itself.",
        (
            (
                Head("arm", label=True),
                Head("head", label=True, title="layer.head"),
                Head("rank"),
                Head("effect, ranked on"),
                Head("effect, elsewhere"),
                Head("direct"),
                Head("adds to the others", title="change of s in logits"),
            ),
        ),
        tuple(rows),
    )


def _chosen(source: Interventions, arm: str) -> Iterator[dict[str, Any]]:
    top = source.of("ablation", arm, family="top")
    halves = {half: source.of("head_effects", arm, half=half) for half in ("ranked", "tested")}
    for name in shown(str(top["heads"].iloc[0])).split() if len(top) else ():
        layer, head = map(int, name.split("."))
        found = {}
        for half, rows in halves.items():
            at = rows[(rows["layer"] == layer) & (rows["head"] == head)].to_dict("records") if len(rows) else []
            found[half] = at[0] if at else None
        ranked, tested = found["ranked"], found["tested"]
        added = source.of("ablation_above", arm, control=f"top without {name}", measure="signal_mean").to_dict(
            "records"
        )
        yield {
            "name": name,
            "cells": (
                undefined("the heads were given")
                if ranked is None
                else Cell(f"{int(ranked['rank'])} of {len(halves['ranked'])}"),
                _effect(ranked, "the heads were given"),
                _effect(tested, "not patched on the other instances"),
                undefined("not asked for")
                if ranked is None or number(ranked["direct"]) is None
                else number_cell(number(ranked["direct"]), *_ends(ranked, "direct")),
                number_cell(number(added[0]["value"]), number(added[0]["low"]), number(added[0]["high"]),
                            reason="δ and s are undefined")
                if added
                else undefined("not asked for, or the only one"),
            ),
        }  # fmt: skip


def _effect(row: dict[str, Any] | None, reason: str) -> Cell:
    if row is None:
        return undefined(reason)
    return number_cell(number(row["effect"]), number(row["low"]), number(row["high"]), title=f"n = {int(row['n'])}")


def ablation(source: Interventions) -> Table | None:
    """Each measure before and after, its change, and the change beyond the controls."""
    rows = []
    families = [name for name in CONTROL_SETS if (source.tables["ablation"]["family"] == name).any()]
    for arm in source.arms:
        top = source.of("ablation", arm, family="top")
        for place, row in enumerate(top.to_dict("records")):
            measure = str(row["measure"])
            cells = [
                _value(row, end, measure, str(row["reason"] or "not defined before or after alone"))
                for end in ("before", "after", "change")
            ]
            for control in families:
                cells += [_control(source, arm, control, measure), _above(source, arm, control, measure)]
            label = Cell(MEASURE_NAMES.get(measure, measure), kind="label")
            rows.append(Row((Cell(shown(arm) if place == 0 else "", kind="label"), label, *cells), starts=place == 0))
    if not rows:
        return None
    controls = tuple(Head(SET_NAMES[name], columns=2) for name in families)
    return Table(
        "ablation-table",
        "The top heads beside as many random ones. s and δ in logits, shares in percent, their changes in points. Of "
        "the control sets: the mean change with the lowest and the highest, and the top heads' change less the mean of "
        "theirs. Other brackets hold 95% intervals, paired by instance.",
        (
            (
                Head("arm", rows=2, label=True),
                Head("measure", rows=2, label=True),
                Head("the top heads", columns=3),
                *controls,
            ),
            (
                Head("before"),
                Head("after"),
                Head("change"),
                *(head for _ in families for head in (Head("change"), Head("top less these"))),
            ),
        ),
        tuple(rows),
    )


def _value(row: dict[str, Any], end: str, measure: str, reason: str) -> Cell:
    value, low, high = number(row[end]), *_ends(row, end)
    if value is None:
        return undefined(reason)
    if measure in IN_LOGITS:
        return number_cell(value, low, high)
    if end == "change":
        return _points(value, low, high)
    n = int(row["n"])
    low, high = (None if one is None else min(max(one, 0.0), 1.0) for one in (low, high))  # rounding of a bootstrap
    return Cell(percent(value, n), note=percent_span(low, high, n))


def _points(value: float, low: float | None, high: float | None) -> Cell:
    ends = "" if low is None or high is None else span(100 * low, 100 * high, 1)
    return Cell(signed(100 * value, 1), note=ends, title="percentage points")


def _control(source: Interventions, arm: str, control: str, measure: str) -> Cell:
    changes = source.of("ablation", arm, family=control, measure=measure)
    values = [float(one) for one in changes["change"].dropna()] if len(changes) else []
    if not values:
        return undefined("undefined in every set")
    mean, low, high = sum(values) / len(values), min(values), max(values)
    sets = f"{len(values)} sets: mean [lowest, highest]"
    if measure in IN_LOGITS:
        return number_cell(mean, low, high, title=sets)
    one = _points(mean, low, high)
    return Cell(one.text, note=one.note, title=sets)


def _above(source: Interventions, arm: str, control: str, measure: str) -> Cell:
    rows = source.of("ablation_above", arm, control=control, measure=measure).to_dict("records")
    value = number(rows[0]["value"]) if rows else None
    if value is None:
        return undefined("undefined before or after")
    low, high = number(rows[0]["low"]), number(rows[0]["high"])
    cell = number_cell(value, low, high) if measure in IN_LOGITS else _points(value, low, high)
    p = number(rows[0]["rank_p"])
    return (
        cell
        if p is None
        else Cell(cell.text, note=cell.note, title=f"(1 + sets that do as much) / (1 + sets) = {p:.3f}")
    )


def sweeps(source: Interventions) -> Table | None:
    """What the sweeps of a patching or an ablation ran on, what they cost, and how exact they were."""
    costs = {}
    for arm in source.arms:
        found = source.results["arms"][arm]
        costs[arm] = (
            [("patching", found.get("cost"))] if source.command == "patch"
            else [("heads, patched", found["ablation"].get("heads")), ("heads, ablated", found["ablation"].get("ablate"))]
        )  # fmt: skip
    return cost_table(costs) if any(one for parts in costs.values() for _, one in parts) else None


def _ends(row: Any, name: str) -> tuple[float | None, float | None]:
    return number(row[f"{name}_low"]), number(row[f"{name}_high"])
