"""One screen at the end of `probe patch` and `probe ablate`: the effects beside their controls, and where the report is.

The tables hold what decides; everything else is in the report and in table.csv. The same words as in the report: an effect
that does not exceed its controls is shown beside them and not called anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.report.intervention_findings_heads import competence, some
from experiments.report.intervention_source import (
    Interventions,
    Sweep,
    cell_name,
    exceeding,
    nearest,
    number,
    read,
    strongest,
)
from experiments.report.plots_interventions_heads import CONTROL_SETS, IN_LOGITS, MEASURE_NAMES
from experiments.report.source import shown
from experiments.report.text import DASH, MANY, percent, plural, signed, span
from experiments.rundir import RunDirectory
from experiments.summary import print_whole, terminal

if TYPE_CHECKING:
    from rich.table import Table

MEASURES = ("accuracy_original", "accuracy_equivalent", "invariance", "robust", "shared_wrong", "unstable",
            "signal_original", "signal_equivalent", "default_original", "default_equivalent",
            "share_removed_mean")  # fmt: skip
MOST = 24  # rows of a table


def show(run: RunDirectory) -> None:
    """Print the summary of a finished run to standard output.

    Raises:
        RunError: the run is another command's, or a file of it is missing.
    """
    source = read(run)
    console = terminal()
    for arm in source.arms:
        table = _patched(source, arm) if source.command == "patch" else _ablated(source, arm)
        if table is None:
            reason = source.results["arms"][arm].get("reason") or "nothing was measured"
            console.print(f"{shown(arm)}: {reason}", highlight=False, markup=False)
        else:
            print_whole(console, table)
        if source.command == "ablate" and (text := competence(source, arm)[0]):
            console.print(f"{shown(arm)}: {text}", highlight=False, markup=False)
    for line in LEGENDS[source.command]:
        console.print(line, highlight=False, markup=False)
    folder = run.path / "figures"
    if folder.exists():
        count = sum(1 for _ in folder.glob("*.svg"))
        console.print(f"figures: {folder} ({plural(count, 'SVG file')})", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {run.report}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, left: int, *columns: str) -> Table:
    """Empty, the first ``left`` columns words and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    # Little between the columns: intervals are wide, and a terminal has 100 columns or fewer.
    table = Table(
        title=escape(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table


def _patched(source: Interventions, arm: str) -> Table | None:
    """A row for each direction, site and position of the kind of pair that findings speak of."""
    from rich.markup import escape

    found = [sweep for sweep in source.main if sweep.arm == arm and sweep.measured]
    if not found:
        return None
    table = _table(
        f"{shown(arm)}: pairs of the kind “{source.kind}”, logits toward the donor's answer", 2,
        "", "where", "n", "beyond", "at", "effect", "less nearest control",
    )  # fmt: skip
    many = len(found) > MOST
    drawn = [sweep for sweep in found if not many or exceeding(source, sweep) or sweep.position == "answer"]
    for sweep in drawn:
        table.add_row(*map(escape, _study(source, sweep)))
    if len(drawn) < len(found):
        table.caption = f"{len(found) - len(drawn)} more rows, with nothing beyond the controls, are in the report"
    return table


def _study(source: Interventions, sweep: Sweep) -> list[str]:
    beyond = f"{len(exceeding(source, sweep))}/{len(sweep.matched)}" if sweep.decided else DASH
    about = [sweep.direction, f"{shown(sweep.site)} @ {shown(sweep.position)}", str(sweep.n), beyond]
    best = strongest(source, sweep)
    if best is None:
        return [*about, DASH, DASH, DASH]
    row, control = sweep.matched.iloc[best], nearest(sweep, best)
    less = DASH if control is None else f"{_with_ends(control[1], 'above')} {control[0]}"
    return [*about, cell_name(row), _with_ends(row, "effect"), less]


def _with_ends(row: Any, name: str) -> str:
    return f"{signed(row[name], 1)} {span(number(row[f'{name}_low']), number(row[f'{name}_high']), 1)}".strip()


def _ablated(source: Interventions, arm: str) -> Table | None:
    """A row for each measure: before, after, change, and the change beyond each control."""
    rows = {str(row["measure"]): row for row in source.of("ablation", arm, family="top").to_dict("records")}
    if not rows:
        return None
    first = next(iter(rows.values()))
    heads = shown(str(first["heads"])).split()
    controls = [name for name in CONTROL_SETS if len(source.of("ablation_above", arm, control=name))]
    named = {"random": "less random heads", "same layers": "less same layers"}
    table = _table(
        f"{shown(arm)}: without {some(heads)} ({int(first['n'])} pairs, {int(first['n_groups'])} instances)", 1,
        "", "before", "after", "change", *(named[name] for name in controls),
    )  # fmt: skip
    for measure in MEASURES:
        if measure in rows:
            table.add_row(*_measure(source, arm, measure, rows[measure], controls))
    return table


def _measure(source: Interventions, arm: str, measure: str, row: dict[str, Any], controls: list[str]) -> list[str]:
    logits, n = measure in IN_LOGITS, int(row["n"])

    def share(value: float | None) -> str:
        return DASH if value is None else signed(value) if logits else percent(value, n)

    def change(value: float | None, low: float | None, high: float | None) -> str:
        if value is None:
            return DASH
        if logits:
            return f"{signed(value)} {span(low, high)}".strip()
        digits = 0 if n < MANY else 1
        ends = "" if low is None or high is None else span(100 * low, 100 * high, digits)
        return f"{signed(100 * value, digits)} {ends}".strip()

    cells = [share(number(row["before"])), share(number(row["after"])),
             change(*(number(row[f"change{end}"]) for end in ("", "_low", "_high")))]  # fmt: skip
    for control in controls:
        above = source.of("ablation_above", arm, control=control, measure=measure).to_dict("records")
        cells.append(change(*(number(above[0][end]) for end in ("value", "low", "high"))) if above else DASH)
    return [MEASURE_NAMES[measure].removeprefix("share of ").replace(",", ""), *cells]


LEGENDS = {
    "patch": (
        "beyond: cells in which the matched donor does more than every control (not counting the last layer of a residual "
        "curve at the answer, which restores by construction). The control nearest to it is named; brackets are 95%.",
    ),
    "ablate": (
        "Shares in percent, their changes in points; s and δ in logits; brackets are 95%, paired by instance. Only what "
        "exceeds random heads counts: an interval that holds 0 in the last columns shows no difference from them.",
    ),
}
