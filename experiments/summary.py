"""One screen at the end of a run: what the model did, what was inside, what moved it."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from experiments.comparing import Comparison

FILE_WIDTH = 10_000  # characters; no table is as wide
OUTCOME_NAMES = {"R": "both right", "D": "both wrong", "U": "one right", "N": "not read"}


def show(results: dict[str, Any], directory: Path) -> None:
    """Print the summary to standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    arms = results["arms"]
    table = Table(title="Behaviour and inside, all settings together", title_justify="left")
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    for name, cell in _LINES:
        table.add_row(name, *(cell(found) for found in arms.values()))
    console.print(table)
    _show_table(results, console)
    for arm, found in arms.items():
        console.print(_link(arm, found))
        for line in (_labels(arm, found), _repairs(found)):
            if line:
                console.print(line, highlight=False, markup=False)
    console.print(_LEGEND, highlight=False, markup=False)
    for arm, found in results["comparison"].items():
        shown = (("accuracy_original", "accuracy, original"), ("invariance", "invariance"))
        parts = [f"{label} {_points(found[key])}" for key, label in shown]
        signal = found["readout_original"]
        parts.append(f"signal s {signal['signal']:+.2f} [{signal['signal_low']:+.2f}, {signal['signal_high']:+.2f}]")
        console.print(f"{arm} less base: {'; '.join(parts)}", highlight=False)
    console.print(f"why each answer failed: probe explain {shlex.quote(str(directory))}", highlight=False, markup=False,
                  soft_wrap=True)  # fmt: skip
    console.print(f"report: {directory / 'report.html'}", highlight=False, soft_wrap=True)


def _show_table(results: dict[str, Any], console: Console) -> None:
    """The table that the configuration asks for; a run made before there was one has none."""
    import pandas as pd

    from experiments import run_table
    from experiments.config import RunTable

    made = results.get("table")
    if made is not None:
        table = run_table.show(pd.DataFrame(made["rows"]), RunTable(**made["spec"]), len(results["arms"]))
        print_whole(console, table)


def _link(arm: str, found: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{arm}: outcomes, and what was measured inside (logits toward gold)", title_justify="left")
    table.add_column("pair is", no_wrap=True)
    for column in ("n", "readable", "signal", "default", "repaired", "control"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["link"]:
        repaired = row["repaired"]
        table.add_row(
            OUTCOME_NAMES[row["outcome"]] + (f": {row['answered']}" if row["outcome"] in "UN" else ""),
            str(row["n"]),
            percent(row["decodable"]),
            f"{row['signal']['value']:+.2f}",
            f"{row['default']['value']:+.2f}",
            _of(repaired["matched"]) if repaired else "",
            _of(repaired["unrelated"]) if repaired else "",
        )
    return table


def _labels(arm: str, found: dict[str, Any]) -> str:
    """The labels of the wrong readouts, the commonest first, each that is not above its coin beside it."""
    shares = sorted(found["attribution"]["shares"].items(), key=lambda one: -one[1]["count"])
    n = shares[0][1]["n"] if shares else 0
    if not n:
        return ""
    parts = []
    for label, one in shares:
        if one["count"]:
            coin = one["coin"]
            shown = coin is not None and one["low"] > coin
            beside = "" if shown else "; no coin" if coin is None else f"; not above its coin, {coin:.0%}"
            parts.append(f"{label} {one['value']:.0%} [{one['low']:.0%}, {one['high']:.0%}]{beside}")
    return f"{arm}, {n} wrong readouts: {' · '.join(parts)}"


def _repairs(found: dict[str, Any]) -> str:
    from experiments.sentences import unproven_repairs

    parts = unproven_repairs(found["link"])
    return f"repair is not above its controls here: {'; '.join(parts)}" if parts else ""


def _of(value: dict[str, Any]) -> str:
    return "–" if value["value"] is None else f"{value['count']}/{value['n']}"


def percent(value: dict[str, Any]) -> str:
    """Percentage alone; a dash where there was nothing to count."""
    return "–" if value["value"] is None else f"{value['value']:.0%}"


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash where it is undefined."""
    return "–" if value is None else format(value, form)


def _percent(value: dict[str, Any]) -> str:
    if value["value"] is None:
        return "–"
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


def _points(contrast: dict[str, Any]) -> str:
    if contrast["difference"] is None:
        return f"undefined ({contrast['reason']})"
    return f"{contrast['difference']:+.1%} [{contrast['low']:+.1%}, {contrast['high']:+.1%}]"


def _all(found: dict[str, Any]) -> dict[str, Any]:
    profile: dict[str, Any] = found["behaviour"]["profile"]["all"]
    return profile


def _default_and_signal(found: dict[str, Any], kind: str) -> str:
    one = found["decomposition"][kind]["all"]
    return f"{number(one['delta'], '+.2f')} / {number(one['signal'], '+.2f')}"


def _probe(found: dict[str, Any], kind: str) -> str:
    one = found["probes"][kind]
    return f"{number(one['auroc'])} at layer {one['layer']}"


_LEGEND = (
    "readable: a held-out probe gives the gold answer. signal: what the prompt adds to the readout; default: what every "
    "prompt gets; both toward gold. repaired: the other presentation's residual turned the wrong readout right; control: "
    "an unrelated instance's did. Labels: 95% intervals; the coin is the share that tossed verdicts would give."
)
_LINES: list[tuple[str, Any]] = [
    ("pairs (both answers read)", lambda f: f"{_all(f)['n']} ({_all(f)['n_parsed']})"),
    ("accuracy, original", lambda f: _percent(_all(f)["original"]["accuracy"])),
    ("accuracy, equivalent", lambda f: _percent(_all(f)["equivalent"]["accuracy"])),
    ("invariance ι", lambda f: _percent(_all(f)["invariance"])),
    ("κ̄ over settings", lambda f: number(f["behaviour"]["kappa_bar"]["value"])),
    ("R / D / U", lambda f: " / ".join(
        f"{_all(f)[key]['value']:.1%}" if _all(f)[key]["value"] is not None else "–"
        for key in ("robust", "shared_wrong", "unstable"))),
    ("δ / s, original", lambda f: _default_and_signal(f, "original")),
    ("δ / s, equivalent", lambda f: _default_and_signal(f, "equivalent")),
    ("best probe AUROC, original", lambda f: _probe(f, "original")),
    ("best probe AUROC, equivalent", lambda f: _probe(f, "equivalent")),
]  # fmt: skip


def show_made(directory: Path, results: dict[str, Any]) -> None:
    """Print the table of a behavioural run, what each adapter changed, and where the files are."""
    console = terminal()
    show_table_of(results["table"])
    for pair, arms in results["comparison"].items():
        for arm, found in arms.items():
            shown = (("accuracy_equivalent", f"accuracy, {pair.split('/')[1]}"), ("invariance", "invariance"))
            parts = [f"{label} {_points(found[key])}" for key, label in shown]
            console.print(f"{arm} less base, {pair}: {'; '.join(parts)}", highlight=False, soft_wrap=True)
    files = [name for name in ("table.csv", "figure.svg", "results.json") if (directory / name).exists()]
    console.print(f"{directory}: {', '.join(files)}", highlight=False, soft_wrap=True)


def show_table_of(made: dict[str, Any]) -> None:
    """Print a table as results.json keeps it."""
    import pandas as pd

    from experiments.answer_tables import AnswerTableSpec
    from experiments.tables import TableSpec, show_within

    console, kind = terminal(), AnswerTableSpec if made["spec"].get("of") == "answers" else TableSpec
    for part in show_within(pd.DataFrame(made["rows"]), kind(**made["spec"]), console):
        print_whole(console, part)


def terminal() -> Console:
    """The terminal; a file is as wide as what is written to it, unless COLUMNS says otherwise."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its own width where the console is narrower: a cut number would be another one."""
    from rich.console import Console
    from rich.measure import Measurement

    needed = Measurement.get(console, console.options.update(width=FILE_WIDTH), table).maximum
    (console if needed <= console.width else Console(width=needed)).print(table)


def show_comparison(found: Comparison) -> None:
    """Print both sides of every statistic, the difference with its interval, and the tests."""
    from rich.table import Table

    console = terminal()
    console.print(f"first:  {found.first}\nsecond: {found.second}", highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    for pair, statistics in found.pairs.items():
        some = next(iter(statistics.values()))
        table = Table(title=f"{pair}, {some['n']} pairs ({some['method']})", title_justify="left")
        for column in ("", "first", "second", "second - first"):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        for name, one in statistics.items():
            fraction = not name.startswith("kappa")
            form = (lambda v: f"{v:.1%}") if fraction else (lambda v: f"{v:.2f}")
            change = (lambda v: f"{v:+.1%}") if fraction else (lambda v: f"{v:+.2f}")
            known = [_or_dash(one[key], form) for key in ("before", "after")]
            moved = _or_dash(one["difference"], change)
            if moved != "–":
                moved += f" [{_or_dash(one['low'], change)}, {_or_dash(one['high'], change)}]"
            table.add_row(name, *known, moved)
        print_whole(console, table)
    for kind, test in found.tests.items():
        tested = f"{test['method']} p = {test['p']:.4f}, Holm {test['p_holm']:.4f}"
        if math.isnan(test["p"]):
            tested = f"no p: {test['reason']}"
        console.print(
            f"accuracy, {kind}: first only right {test['b']}, second only {test['c']}; {tested}",
            highlight=False,
            soft_wrap=True,
        )


def _or_dash(value: float | None, form: Any) -> str:
    return "–" if value is None or math.isnan(value) else form(value)
