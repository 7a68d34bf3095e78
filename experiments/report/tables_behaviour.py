"""Tables of what was answered: competence by setting, answer bias, and adapter against base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.inside import PAIR
from experiments.report.plots_behaviour import READOUTS, SHARES
from experiments.report.source import Source, shown
from experiments.report.tables import Head, Row, Table
from experiments.report.text import Cell, number_cell, p_cell, percent, share_cell, signed, undefined


def competence(source: Source) -> Table:
    """Accuracy, agreement and outcomes by arm and setting."""
    rows = []
    for arm in source.arms:
        for number, (label, one, total) in enumerate(_settings(source, arm)):
            kappa = one["kappa"]
            cells = (
                Cell(f"{one['n_parsed']}", title=f"{one['n_parsed']} of {one['n']} pairs had both answers read"),
                share_cell(one["original"]["accuracy"]),
                share_cell(one["equivalent"]["accuracy"]),
                share_cell(one["robust"]),
                share_cell(one["shared_wrong"]),
                share_cell(one["unstable"]),
                share_cell(one["invariance"]),
                share_cell(one["strict_invariance"]),
                undefined(kappa["reason"])
                if kappa["value"] is None
                else Cell(signed(kappa["value"]), title=f"ιₑ {kappa['iota_e']:.2f}, pooled yes-rate {kappa['q']:.2f}"),
            )
            rows.append(_setting_row(arm, number, label, cells, total))
        bar = source.arm(arm)["behaviour"]["kappa_bar"]
        if len(source.settings) > 1:
            last = rows.pop()
            note = f"κ̄ {signed(bar['value'])}" if bar["value"] is not None else "κ̄ –"
            kappa_cell = last.cells[-1]
            marked = Cell(kappa_cell.text, note=note, title=kappa_cell.title, kind=kappa_cell.kind)
            rows.append(Row((*last.cells[:-1], marked), starts=last.starts, total=last.total))
    return Table(
        "competence",
        "Accuracy counts unread answers as wrong, over all pairs. R, D, U, ι and κ are over the pairs whose two answers "
        "were read; strict ι is over all pairs and counts an unread answer as a disagreement. κ̄ is the mean of κ over the "
        "settings. Wilson 95% in brackets.",
        (
            (
                Head("arm", label=True),
                Head(source.axis, label=True),
                Head("pairs read"),
                Head("accuracy, original"),
                Head("accuracy, equivalent"),
                Head("R", title="both right"),
                Head("D", title="both wrong"),
                Head("U", title="exactly one right"),
                Head("ι", title="invariance: R + D"),
                Head("strict ι"),
                Head("κ", title="(ι − ιₑ) / (1 − ιₑ)"),
            ),
        ),
        tuple(rows),
    )


def bias(source: Source) -> Table:
    """Answer bias and the test of the two accuracies, by arm and setting."""
    rows = []
    for arm in source.arms:
        for number, (label, one, total) in enumerate(_settings(source, arm)):
            cells: list[Cell] = []
            for name in ("yes_rate", "floor", "bias"):
                for kind in PAIR:
                    value = one[kind][name]
                    if name == "yes_rate":
                        cells.append(share_cell(value))
                    elif value is None:
                        cells.append(undefined("a gold answer does not occur"))
                    else:
                        n = one[kind]["n"]
                        cells.append(Cell(percent(value, n) if name == "floor" else _points(value)))
            test = one["mcnemar"]
            cells += [
                Cell(f"{test['b']} / {test['c']}", title="original right only / equivalent right only"),
                p_cell(test["p"], test["method"], test["reason"]),
                p_cell(
                    test.get("p_holm"),
                    "Holm over the settings of this arm",
                    "the settings together are not tested again" if total else "one setting: nothing to adjust for",
                ),
            ]
            rows.append(_setting_row(arm, number, label, tuple(cells), total))
    return Table(
        "bias",
        "Yes-rate: “yes” among the answers read. Floor: the lower of the accuracies on gold yes and gold no. Bias: the "
        "accuracy on gold yes less that on gold no, in points. b / c: pairs in which only the original / only the "
        "equivalent was answered right.",
        (
            (
                Head("arm", rows=2, label=True),
                Head(source.axis, rows=2, label=True),
                Head("yes-rate", columns=2),
                Head("floor", columns=2),
                Head("bias", columns=2),
                Head("McNemar test of the two accuracies", columns=3),
            ),
            (*(Head(kind) for _ in range(3) for kind in PAIR), Head("b / c"), Head("p"), Head("p, Holm")),
        ),
        tuple(rows),
    )


def _settings(source: Source, arm: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    if len(source.settings) == 1:
        # "all" holds the same numbers, and no adjustment over settings.
        yield source.tick(source.settings[0]), source.profile(arm), False
        return
    for setting in source.settings:
        yield source.tick(setting), source.profile(arm, setting), False
    yield "all", source.profile(arm), True


def _setting_row(arm: str, number: int, label: str, cells: tuple[Cell, ...], total: bool) -> Row:
    names = (Cell(shown(arm) if number == 0 else "", kind="label"), Cell(shown(label), kind="label"))
    return Row((*names, *cells), starts=number == 0, total=total)


def _points(value: float) -> str:
    return signed(100 * value, 0)


def differences(source: Source) -> Table | None:
    """Base, adapter and their paired difference; None where the run has no adapter."""
    rows = []
    for arm, found in source.results["comparison"].items():
        first = True
        for key, label in (*SHARES, ("kappa", "κ")):
            rows.append(
                Row(
                    (
                        Cell(shown(arm) if first else "", kind="label"),
                        Cell(label, kind="label"),
                        *_contrast(found[key]),
                    ),
                    starts=first,
                )
            )
            first = False
        for key, name, label in READOUTS:
            one, kind = found[key], key.removeprefix("readout_")
            ends = [source.arm(each)["decomposition"][kind]["all"] for each in ("base", arm)]
            cells = [number_cell(end[name], reason=end["reason"]) for end in ends]
            change = number_cell(
                one[name],
                one[f"{name}_low"],
                one[f"{name}_high"],
                reason=one["reason"],
                title=f"{one['method']}; n = {one['n']}",
            )
            rows.append(
                Row(
                    (
                        Cell("", kind="label"),
                        Cell(f"{label} (logits)", kind="label"),
                        *cells,
                        change,
                        Cell(f"{one['n']}"),
                    )
                )
            )
    if not rows:
        return None
    return Table(
        "differences-table",
        "Difference: adapter less base on the same items; shares in percentage points. Paired 95% bootstrap in brackets.",
        (
            (
                Head("adapter", label=True),
                Head("", label=True),
                Head("base"),
                Head("adapter"),
                Head("difference"),
                Head("pairs"),
            ),
        ),
        tuple(rows),
    )


def _contrast(one: dict[str, Any]) -> tuple[Cell, ...]:
    n = one["n"]
    is_kappa = one["statistic"] == "kappa"
    ends = [
        undefined(one["reason"]) if value is None else Cell(signed(value) if is_kappa else percent(value, n))
        for value in (one["before"], one["after"])
    ]
    scale, digits = (1, 2) if is_kappa else (100, 1)
    low, high = (None if end is None else scale * end for end in (one["low"], one["high"]))
    change = None if one["difference"] is None else scale * one["difference"]
    title = f"{one['method']}; pairs that counted: base {one['support_before']}, adapter {one['support_after']}"
    return (*ends, number_cell(change, low, high, reason=one["reason"], digits=digits, title=title), Cell(f"{n}"))
