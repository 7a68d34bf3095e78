"""Tables of what is inside and what moves it: probes, sweeps and their checks, ablation."""

from __future__ import annotations

from typing import Any

from experiments.inside import PAIR
from experiments.report.plots_causes import ablated_value
from experiments.report.plots_inside import OTHER
from experiments.report.source import Source, shown
from experiments.report.tables import Head, Row, Table
from experiments.report.text import Cell, number_cell, p_cell, percent, percent_span, share_cell, signed, undefined


def probes(source: Source) -> Table:
    """Best layer, first readable layer and null, by arm and presentation."""
    rows = []
    for arm in source.arms:
        for number, kind in enumerate(PAIR):
            one = source.arm(arm)["probes"][kind]
            first = one["first_layer"]
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if number == 0 else "", kind="label"),
                        Cell(kind, kind="label"),
                        number_cell(one["auroc"], one["auroc_low"], one["auroc_high"], sign=False, title=one["method"]),
                        Cell(str(one["layer"]), note="the last" if source.is_last(one["layer"]) else ""),
                        undefined("the two presentations differ in their gold answers")
                        if one["transfer_auroc"] is None
                        else Cell(f"{one['transfer_auroc']:.2f}", title=f"read on {OTHER[kind]}"),
                        number_cell(one["null_high_at_layer"], sign=False, reason="no shuffles"),
                        p_cell(one["p_max"], reason="no shuffles"),
                        undefined(one["first_layer_reason"]) if first is None else Cell(str(first)),
                        Cell(str(one["n"])),
                    ),
                    starts=number == 0,
                )
            )
    threshold, shuffles = source.resolved["probe"]["threshold"], source.resolved["probe"]["shuffles"]
    return Table(
        "probes-table",
        "Brackets: lowest and highest fold. p compares the best layer with the best layer of each label shuffle; with "
        f"{shuffles} shuffles it can't be below {1 / (1 + shuffles):.3f}.",
        (
            (
                Head("arm", label=True),
                Head("trained on", label=True),
                Head("best AUROC"),
                Head("at layer"),
                Head("on the other presentation"),
                Head("shuffled labels, 97.5%"),
                Head("p, best layer"),
                Head(f"first layer ≥ {threshold}"),
                Head("n"),
            ),
        ),
        tuple(rows),
    )


def sweeps(source: Source) -> Table:
    """What the interventions ran on, what they cost, and how far their checked cells were from plain forwards."""
    rows = []
    for arm in source.arms:
        found = source.arm(arm)
        parts = (
            ("residuals", found["patching"]),
            ("heads, patched", found["ablation"]["heads"]),
            ("heads, zeroed", found["ablation"]["ablate"]),
        )
        for number, (label, one) in enumerate(parts):
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if number == 0 else "", kind="label"),
                        Cell(label, kind="label"),
                        Cell(", ".join(one["engine"]), kind="label"),
                        number_cell(one["forward_passes_per_item"], sign=False),
                        Cell(str(one["cells_checked"])),
                        undefined("no cell was checked")
                        if one["largest_difference"] is None
                        else Cell(f"{one['largest_difference']:.1e}".replace("-", "−"), title="logits"),
                        Cell(f"{one['bound']:.1e}".replace("-", "−"), title="logits"),
                    ),
                    starts=number == 0,
                )
            )
    return Table(
        "sweeps",
        "Cost is in units of one plain forward pass of the prompt, for all cells of an item together. Checked cells were "
        "computed again by plain forward passes; differences are in logits, 1e-4 of the largest logit is allowed.",
        (
            (
                Head("arm", label=True),
                Head("sweep", label=True),
                Head("engine", label=True),
                Head("forward passes an item"),
                Head("cells checked"),
                Head("largest difference"),
                Head("allowed"),
            ),
        ),
        tuple(rows),
    )


def ablation(source: Source) -> Table:
    """Nothing zeroed, the top heads, and the mean and range of the random sets."""
    rows = []
    columns = [(kind, name) for kind in PAIR for name in ("delta", "signal", "accuracy")] + [("", "invariance")]
    for arm in source.arms:
        sets = source.arm(arm)["ablation"]["sets"]
        random = [found for label, found in sets.items() if label not in ("none", "top")]
        for label, names in (("none", "nothing"), ("top", _heads(sets["top"]["heads"]))):
            cells = [_ablated(sets[label], kind, name, change=label == "top") for kind, name in columns]
            first = Cell(shown(arm) if label == "none" else "", kind="label")
            rows.append(Row((first, Cell(names, kind="label"), *cells), starts=label == "none"))
        cells = [_range(random, kind, name) for kind, name in columns]
        rows.append(
            Row(
                (
                    Cell("", kind="label"),
                    Cell(f"{len(random)} random sets", note="mean [lowest, highest]", kind="label"),
                    *cells,
                )
            )
        )
    return Table(
        "ablation-table",
        "δ and s in logits; below the top heads' values, in brackets, the paired 95% interval of their change from "
        "“nothing”. Shares carry Wilson 95% intervals.",
        (
            (
                Head("arm", rows=2, label=True),
                Head("heads zeroed", rows=2, title="layer.head", label=True),
                Head("original", columns=3),
                Head("equivalent", columns=3),
                Head("ι", rows=2),
            ),
            tuple(Head(name) for _ in PAIR for name in ("δ", "s", "accuracy")),
        ),
        tuple(rows),
    )


def _heads(text: str) -> str:
    names = text.split()
    rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"top {len(names)}: {', '.join(names[:6])}{rest}"


def _ablated(found: dict[str, Any], kind: str, name: str, *, change: bool) -> Cell:
    if name in ("accuracy", "invariance"):
        return share_cell(found[kind][name] if kind else found[name])
    one = found[kind]
    if not change:
        return number_cell(one[name], reason="a cell of the design has no prompt in this half")
    moved = one["change"]
    cell = number_cell(
        one[name], moved[f"{name}_low"], moved[f"{name}_high"], reason="a cell of the design has no prompt in this half"
    )
    if moved[name] is None or not cell.note:
        return cell
    return Cell(cell.text, note=f"{signed(moved[name])} {cell.note}", title="value; change [95% interval]")


def _range(random: list[dict[str, Any]], kind: str, name: str) -> Cell:
    values = [value for found in random if (value := ablated_value(found, kind, name)) is not None]
    if not values:
        return undefined("undefined in every random set")
    mean, ends = sum(values) / len(values), (min(values), max(values))
    if name in ("accuracy", "invariance"):
        n = (random[0][kind][name] if kind else random[0][name])["n"]
        return Cell(percent(mean, n), note=percent_span(*ends, n))
    return Cell(signed(mean), note=f"[{signed(ends[0])}, {signed(ends[1])}]")
