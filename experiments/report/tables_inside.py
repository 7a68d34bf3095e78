"""Tables of what is inside and what moves it: probes, sweeps and their checks, ablation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.curves import curve_rows
from experiments.groups import ALL
from experiments.items import PAIR
from experiments.report.plots_causes import ablated_value
from experiments.report.plots_inside import OTHER
from experiments.report.source import Source, shown
from experiments.report.tables import Head, Row, Table
from experiments.report.text import (
    DASH,
    Cell,
    number_cell,
    p_cell,
    percent,
    percent_span,
    share_cell,
    signed,
    undefined,
)


def probes(source: Source) -> Table:
    """Best layer, first readable layer, null and baselines, by arm and presentation."""
    rows = []
    for arm in source.arms:
        for number, kind in enumerate(PAIR):
            one = source.arm(arm)["probes"][kind]
            baseline = _best_baseline(one["baselines"])
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if number == 0 else "", kind="label"),
                        Cell(kind, kind="label"),
                        number_cell(one["auroc"], one["auroc_low"], one["auroc_high"], sign=False, title=one["method"],
                                    reason=one["reason"]),
                        undefined(one["reason"]) if one["layer"] is None else
                        Cell(str(one["layer"]), note="the last" if source.is_last(one["layer"]) else ""),
                        undefined("the two presentations differ in their gold answers")
                        if one["transfer_auroc"] is None
                        else Cell(f"{one['transfer_auroc']:.2f}", title=f"read on {OTHER[kind]}"),
                        baseline,
                        number_cell(one["null_high_at_layer"], sign=False, reason="no shuffles"),
                        p_cell(one["p_max"], reason="no shuffles"),
                        _first_layer(one),
                        number_cell(one["detectable_auroc"], sign=False, reason="too few instances of one gold answer"),
                        Cell(str(one["n"])),
                    ),
                    starts=number == 0,
                )
            )  # fmt: skip
    threshold, shuffles = source.resolved["probe"]["threshold"], source.resolved["probe"]["shuffles"]
    return Table(
        "probes-table",
        "Brackets: 95% intervals. p compares the best layer with the best layer of each label shuffle; with "
        f"{shuffles} shuffles it can't be below {1 / (1 + shuffles):.3f}. Detectable: the smallest AUROC that this many "
        "instances tell from chance with 80% power.",
        (
            (
                Head("arm", label=True),
                Head("trained on", label=True),
                Head("best AUROC"),
                Head("at layer"),
                Head("on the other presentation"),
                Head("best baseline"),
                Head("shuffled labels, 97.5%"),
                Head("p, best layer"),
                Head(f"first layer ≥ {threshold}"),
                Head("detectable"),
                Head("n"),
            ),
        ),
        tuple(rows),
    )


def _best_baseline(baselines: dict[str, Any]) -> Cell:
    known = {name: one for name, one in baselines.items() if one["auroc"] is not None}
    if not known:
        return undefined("no baseline could be fitted")
    name = max(known, key=lambda one: known[one]["auroc"])
    one = known[name]
    cell = number_cell(one["auroc"], one["auroc_low"], one["auroc_high"], sign=False)
    return Cell(cell.text, note=f"{name} {cell.note}".strip(), title="what a probe reads without the model")


def _first_layer(one: dict[str, Any]) -> Cell:
    never = one["first_layer_never"]
    often = "" if never is None or never < 0.005 else f"never in {never:.0%}"
    ends = [DASH if one[f"first_layer_{end}"] is None else str(one[f"first_layer_{end}"]) for end in ("low", "high")]
    note = "" if never is None else f"[{ends[0]}, {ends[1]}]\n{often}".strip()
    if one["first_layer"] is None:
        dash = undefined(one["first_layer_reason"])
        return Cell(dash.text, note=often, title=dash.title, kind=dash.kind)
    return Cell(str(one["first_layer"]), note=note)


def between_arms(source: Source) -> Table | None:
    """The base's probes on an adapter's rows and back, and the paired change of AUROC; None without adapters."""
    rows = []
    for arm in source.arms[1:]:
        for number, kind in enumerate(PAIR):
            base, own = (source.arm(one)["probes"][kind] for one in (source.arms[0], arm))
            if base["layer"] is None or own["layer"] is None:
                continue
            change = own["change"]
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if number == 0 else "", kind="label"),
                        Cell(kind, kind="label"),
                        _read(source, source.arms[0], arm, kind, base["layer"]),
                        _read(source, arm, source.arms[0], kind, own["layer"]),
                        Cell(str(own["layer"])),
                        number_cell(change["difference"], change["low"], change["high"], reason=change["reason"]),
                        p_cell(change["p_max"], reason=change["reason"]),
                    ),
                    starts=number == 0,
                )
            )
    if not rows:
        return None
    return Table(
        "between-arms",
        "AUROC of one arm's probes on the other arm's rows of the same prompts, at the layer that is best for the arm they "
        "were trained on, with 95% intervals. The change is of AUROC from the base to the adapter, each with probes of its "
        "own on the same rows and folds, at the adapter's best layer; its p is that of "
        "the largest change over all layers, since the layer was picked.",
        (
            (
                Head("adapter", label=True),
                Head("presentation", label=True),
                Head("base’s probes read the adapter"),
                Head("adapter’s probes read the base"),
                Head("at layer"),
                Head("change of AUROC"),
                Head("p, all layers"),
            ),
        ),
        tuple(rows),
    )


def _read(source: Source, arm: str, read: str, kind: str, layer: int) -> Cell:
    table = curve_rows(source.of("transfer", arm), target="gold", trained=ALL, read_arm=read, read_presentation=kind,
                       read_setting=ALL, presentation=kind, layer=layer)  # fmt: skip
    if table.empty or table["auroc"].isna().iloc[0]:
        return undefined("no probe was fitted" if table.empty else str(table["reason"].iloc[0]))
    one = table.iloc[0]
    return number_cell(float(one["auroc"]), float(one["auroc_low"]), float(one["auroc_high"]), sign=False)


def calibration(source: Source) -> Table | None:
    """How often each label comes back from other folds and from another half of the instances."""
    table = source.tables["attribution_calibration"]
    rows: list[Row] = []
    for arm in source.arms if len(table) else ():
        for kind in PAIR:
            part = curve_rows(table, arm=arm, presentation=kind)
            for number, label in enumerate(dict.fromkeys(part["label"])):
                checks = {one["check"]: one for one in curve_rows(part, label=label).to_dict("records")}
                if all(one["n"] == 0 for one in checks.values()):
                    continue
                cells = [cell for name in ("fold split", "half") for cell in _survived(checks.get(name))]
                first = not rows or number == 0
                rows.append(
                    Row((Cell(shown(arm), kind="label"), Cell(kind, kind="label"),
                         Cell(label.replace("_", " "), kind="label"), *cells), starts=first)
                )  # fmt: skip
    if not rows:
        return None
    return Table(
        "calibration",
        "Of the wrong readouts with a label, the share that gets it again: from probes on other folds, which share most of "
        "their training rows (an upper bound), and from probes of another half of the instances, which share none (a lower "
        "one). Beside each: how often that label occurs in the second reading at all.",
        (
            (
                Head("arm", rows=2, label=True),
                Head("presentation", rows=2, label=True),
                Head("label", rows=2, label=True),
                Head("other folds", columns=3),
                Head("other half", columns=3),
            ),
            tuple(Head(name) for _ in range(2) for name in ("again", "at all", "n")),
        ),
        tuple(rows),
    )


def _survived(one: dict[str, Any] | None) -> Iterator[Cell]:
    if one is None or not math.isfinite(one["value"]):
        yield undefined("not asked" if one is None else one["reason"])
        yield Cell("")
        yield Cell("" if one is None else str(one["n"]))
        return
    known = math.isfinite(one["low"])
    yield Cell(percent(one["value"], one["n"]), note=percent_span(one["low"], one["high"], one["n"]) if known else "")
    yield Cell(percent(one["base"], one["n"]) if math.isfinite(one["base"]) else DASH)
    yield Cell(str(one["n"]))


def sweeps(source: Source) -> Table:
    """What the interventions of a whole study ran on, what they cost, and how exact they were."""
    costs = {}
    for arm in source.arms:
        found = source.arm(arm)
        costs[arm] = [
            ("residuals", found["patching"]),
            ("heads, patched", found["ablation"]["heads"]),
            ("heads, cut", found["ablation"]["ablate"]),
        ]
    return cost_table(costs)


def cost_table(costs: Mapping[str, Sequence[tuple[str, Mapping[str, Any] | None]]]) -> Table:
    """What sweeps ran on, what they cost, and how far their checked cells were from plain forwards.

    Args:
        costs: by arm, what was swept, and its cost as results.json has it; None where it was not.
    """
    rows = []
    for arm, parts in costs.items():
        for number, (label, one) in enumerate((label, one) for label, one in parts if one):
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
        "Cost is in units of one plain forward pass of the prompt, for all cells of a recipient together. Checked cells "
        "were computed again by plain forward passes; differences are in logits, 1e-4 of the largest logit is allowed.",
        (
            (
                Head("arm", label=True),
                Head("sweep", label=True),
                Head("engine", label=True),
                Head("forward passes a recipient"),
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
                Head("heads cut", rows=2, title="layer.head", label=True),
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
