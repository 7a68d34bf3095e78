"""``probe explain``: one pair in the terminal, or the failing pairs by label."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli.app import Json, app, flag

if TYPE_CHECKING:
    import pandas as pd

    from experiments.explain import Explained

LISTED = 8  # pairs named below each label
KEY = 10  # characters of a key that are shown
ROWS = 12  # layers in the table; more are thinned out


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Run directory of a finished whole study.")],
    key: Annotated[
        str | None, typer.Argument(help="Begin of a pair's key; without it the failures are listed.")
    ] = None,
    arm: Annotated[str | None, flag("arm", "base or an adapter; all if not given.")] = None,
    presentation: Annotated[str | None, flag("presentation", "original or equivalent; both if not given.")] = None,
    json_: Json = False,
) -> None:
    """Explain one pair from a run's tables: answers, readout, probes by layer, and why it failed; needs no model."""
    import json
    from dataclasses import asdict

    from experiments.explain import chosen, failing, find, open_run
    from experiments.explain import explain as explained

    opened = open_run(run)
    rows = chosen(opened, arm, presentation)
    if key is None:
        if json_:
            sys.stdout.write(json.dumps({"labels": failing(rows), "shares": _shares(rows)}, indent=1) + "\n")
        else:
            _list(rows)
        return
    found = [one for name in find(opened, key) for one in explained(opened, name, rows)]
    if json_:
        sys.stdout.write(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    else:
        _show(found)


def _shares(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Shares of the labels by arm, all prompts together."""
    from experiments.link import shares_table
    from experiments.results import plain

    found = []
    for arm, part in rows.groupby("arm", sort=False):
        table = shares_table(part.reset_index(drop=True))
        columns = ["label", "value", "low", "high", "coin", "count", "n", "instances", "method", "reason"]
        found += [{"arm": arm, **one} for one in table.loc[table["stratum"] == "all", columns].to_dict("records")]
    plained: list[dict[str, Any]] = plain(found)
    return plained


def _list(rows: pd.DataFrame) -> None:
    from experiments.explain import failing
    from experiments.sentences import COIN, MEANING, line

    for number, (arm, part) in enumerate(rows.groupby("arm", sort=False)):
        of = {one["label"]: one for one in _shares(part)}
        labels = failing(part)
        n = next(iter(of.values()))["n"]
        _write("" if number == 0 else "\n", f"{line(str(arm))}: {n} of {len(part)} readouts are wrong\n")
        for label, pairs in labels.items():
            share = of.get(label)
            _write(f"\n  {label}: {len(pairs)}", "" if share is None else _interval(share), "\n")
            _write(_wrapped(f"{MEANING[label]}.", "  "))
            for one in pairs[:LISTED]:
                _write(
                    f"    {one['key'][:KEY]}  {one['setting']}, {one['presentation']}, {one['outcome']}",
                    _agree(label, one),
                )
            if len(pairs) > LISTED:
                _write(f"    … and {len(pairs) - LISTED} more (--json lists all)\n")
    _write("\n", _wrapped(
        "R both right, D both wrong, U one right, N not read. Brackets: 95% intervals. Splits: ways of dealing the folds "
        f"of the probes. {COIN} A label whose interval holds its coin, or lies below, was not shown. "
        "`probe explain RUN KEY` explains one pair.", ""))  # fmt: skip


def _agree(label: str, one: dict[str, Any]) -> str:
    """How many fold splits give the label; of mixed the most that give any one."""
    share = one["share"]
    if share is None:
        return "\n"
    if label == "mixed" and not share:
        return "  no split gives a label\n"
    return f"  {'at most ' if label == 'mixed' else ''}{share:.0%} of splits\n"


def _interval(share: dict[str, Any]) -> str:
    coin = "" if share["coin"] is None else f", coin {share['coin']:.0%}"
    return f" of {share['n']}, {share['value']:.0%} [{share['low']:.0%}, {share['high']:.0%}]{coin}"


def _show(found: list[Explained]) -> None:
    from experiments.report.text import OUTCOME_NAMES
    from experiments.sentences import agreement

    shown: set[tuple[str, str]] = set()
    for one in found:
        if (one.setting, one.presentation) not in shown:
            shown.add((one.setting, one.presentation))
            _write(f"{one.setting}  {one.key}\n{one.presentation}, gold {one.gold}\n\n{_indented(one.prompt)}\n\n")
    for one in found:
        verdict = "right" if one.correct else "wrong"
        read = f"read as {one.read}" if one.read is not None else f"not read ({one.status})"
        agree = agreement(one.label, one.share)
        _write(
            f"{one.arm}, {one.presentation} ({one.setting}; pair: {OUTCOME_NAMES[one.outcome]})\n",
            _field("said", f"{_first_line(one.text)} ({read}, {verdict}; gold {one.gold})"),
            _field("readout", f"{_split(one)}  (logits toward gold)"),
            _field("label", one.label + (f", {agree}" if agree else "")),
            _field("", one.sentence),
        )
        if one.lost_at is not None:
            _write(_field("lost at", f"layer {one.lost_at}"))
        if one.against is not None and one.against_logits is not None:
            _write(_field(
                "against",
                f"{one.against} pushes most against the gold answer, by {-one.against_logits:.2f} logits of the readout",
            ))  # fmt: skip
        repaired = {donor: value for donor, value in one.repaired.items() if value is not None}
        if repaired:
            tried = ", ".join(f"{donor} {'yes' if value else 'no'}" for donor, value in repaired.items())
            _write(_field("repaired", f"by a residual put in at layer {one.patch_layer}: {tried}"))
        _write(_by_layer(one), "\n")


def _split(one: Explained) -> str:
    if one.default is None or one.signal is None:
        return f"{one.readout:+.2f} (the default is undefined)"
    return f"{one.readout:+.2f} = default {one.default:+.2f} {'+' if one.signal >= 0 else '-'} signal {abs(one.signal):.2f}"


def _by_layer(one: Explained) -> str:
    """The margins as a line of bars and, with AUROC and lens, as a table of some layers."""
    from experiments.sentences import LEGEND

    if one.bars:
        first = _field("probes", one.bars) + _field("", f"layers 0 to {len(one.bars) - 1}; {LEGEND}")
    else:
        first = _field("probe", f"margin {_number(one.margin)} toward gold at layer {one.chosen_layer}")
    total = len(one.layers)
    step = -(-total // ROWS)
    kept = {*range(0, total, step), total - 1, one.chosen_layer} | ({one.lost_at} if one.lost_at is not None else set())
    lines = ["  layer     AUROC   margin   lens δ   lens s"]
    for layer in one.layers:
        if layer.layer in kept:
            note = " chosen" if layer.layer == one.chosen_layer else ""
            numbers = (layer.auroc, layer.margin, layer.lens_delta, layer.lens_signal)
            cells = [_number(numbers[0], ".2f"), *(_number(value) for value in numbers[1:])]
            lines.append(f"  {layer.layer:>5}  {cells[0]:>8} {cells[1]:>8} {cells[2]:>8} {cells[3]:>8}{note}")
    note = _field("", "margin of this prompt, toward gold; δ (toward yes) and s (toward gold) of all prompts of this "
                  "presentation")  # fmt: skip
    return first + "\n".join(lines) + "\n" + note


def _number(value: float | None, form: str = "+.2f") -> str:
    return "–" if value is None else format(value, form)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    return f"“{lines[0]}”" + (f" and {len(lines) - 1} more lines" if len(lines) > 1 else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _field(name: str, text: str) -> str:
    """A name, and beside it a text within the width of the terminal."""
    return _wrapped(text, " " * 12, first=f"  {name:<10}")


def _wrapped(text: str, indent: str, *, first: str | None = None) -> str:
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return (
        textwrap.fill(text, width, initial_indent=indent if first is None else first, subsequent_indent=indent) + "\n"
    )


def _write(*parts: str) -> None:
    sys.stdout.write("".join(parts))
