"""The sentences at the top of an intervention's page, each with its n, its interval and what it was compared with.

An effect is stated beside its controls, and one that does not exceed them is said not to. What decides is the column
``specific``: the rule, the controls and the level were fixed beforehand. The largest of many cells is named as that. Of a
residual curve at the answer position the last layer is never counted, since it restores by construction. No sentence
claims a mechanism: an edit shows that the readout depends on an activation, not how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from experiments.report.findings_wrong import Finding
from experiments.report.intervention_findings_heads import ablated, capital, interval, lower, some
from experiments.report.intervention_source import (
    HEADS,
    WAYS,
    Interventions,
    Sweep,
    cell_name,
    exceeding,
    nearest,
    number,
    position_name,
    strongest,
    truth,
)
from experiments.report.source import shown
from experiments.report.text import listed, p_text, percent, percent_span, plural, signed

if TYPE_CHECKING:
    import pandas as pd

LESS = {"unrelated": "an unrelated instance's", "random": "a random direction of its length"}


def findings(source: Interventions) -> list[Finding]:
    """What can be said, arm by arm."""
    found: list[Finding] = []
    for arm in source.arms:
        if source.command == "patch":
            found += [*_patched(source, arm), *_carried(source, arm), *_estimated(source, arm)]
        else:
            found += ablated(source, arm)
    return found


def _patched(source: Interventions, arm: str) -> Iterator[Finding]:
    """One sentence for each direction and site; of several positions, where the matched donor exceeds its controls."""
    groups: dict[tuple[str, str], list[Sweep]] = {}
    for sweep in source.main:
        if sweep.arm == arm and sweep.measured:
            groups.setdefault((sweep.site, sweep.direction), []).append(sweep)
    if not groups:
        reason = source.results["arms"][arm].get("reason") or f"no pair of the kind “{source.kind}” was patched"
        yield Finding(arm, "Nothing to patch", f"{capital(reason)}.", "patching")
    if groups and not any(sweep.decided for group in groups.values() for sweep in group):
        yield _undecided(arm, [sweep for group in groups.values() for sweep in group])
        return
    for (site, direction), group in groups.items():
        lead = f"{direction.capitalize()}, {WAYS[direction]}: {shown(site)}"
        text = _one_place(source, group[0]) if len(group) == 1 else _several_places(source, group)
        yield Finding(arm, lead, text, _section(group))


def _section(group: Sequence[Sweep]) -> str:
    return "heads" if group[0].site == HEADS else "positions" if len(group) > 1 else "patching"


def _undecided(arm: str, group: Sequence[Sweep]) -> Finding:
    """No cell of an arm can be compared: said once."""
    rows = sorted({sweep.n for sweep in group})
    counted = f"n = {rows[0]}" if len(rows) == 1 else f"n = {rows[0]} to {rows[-1]}"
    what = sorted({shown(sweep.site) for sweep in group})
    widest = max(group, key=lambda sweep: sweep.groups)
    text = (
        f"It can't be told whether any effect exceeds its controls, for {listed(what)} in pairs of the kind "
        f"“{group[0].kind}” ({counted} recipients): {_reason(widest.matched)}."
    )
    return Finding(arm, "Not decided", text, "numbers")


def _one_place(source: Interventions, sweep: Sweep) -> str:
    counted = f"({_counted(sweep)})"
    at = position_name(sweep.position)
    if not sweep.controls:
        return f"No control was run, so no effect at {at} can be told from a disturbance {counted}."
    if not sweep.decided:
        return f"It can't be told whether any effect at {at} exceeds its controls {counted}: {_reason(sweep.matched)}."
    places = exceeding(source, sweep)
    what = "head" if sweep.site == HEADS else "layer"
    best = strongest(source, sweep, places or None)
    if not places:
        note = ""
        if best is not None:
            control = nearest(sweep, best)
            row = sweep.matched.iloc[best]
            size = f"{signed(row['effect'])} {interval(row, 'effect')} logits"
            note = f" It comes furthest at {cell_name(row)}: an effect of {size}; {_against(control)}."
        last = " before the last, where it does so by construction," if _only_last(source, sweep) else ""
        return f"At no {what}{last} does the matched donor do more than every control at {at} {counted}.{note}"
    assert best is not None
    names = _cells(sweep, places)
    return (
        f"At {at} the matched donor does more than every control in {names} of {len(sweep.matched)} {what}s {counted}. "
        f"{_strongest_said(sweep, best, several=len(places) > 1)}"
    )


def _several_places(source: Interventions, group: Sequence[Sweep]) -> str:
    decided = [sweep for sweep in group if sweep.decided]
    found = [(sweep, places) for sweep in decided if (places := exceeding(source, sweep))]
    cells = sum(len(sweep.matched) for sweep in group)
    rows = sorted({sweep.n for sweep in group})
    counted = f"n = {rows[0]}" if len(rows) == 1 else f"n = {rows[0]} to {rows[-1]}"
    head = f"{cells} cells at {len(group)} positions, {counted} recipients."
    unknown = [position_name(sweep.position) for sweep in group if not sweep.decided]
    tail = f" It can't be told at {some(unknown)}, where instances are too few." if unknown else ""
    if not found:
        done = "At none of the others does" if unknown and decided else "Nowhere does"
        return f"{head} {done} the matched donor do more than every control.{tail}"
    said = [f"{position_name(sweep.position)} ({_cells(sweep, places)})" for sweep, places in found]

    def size(one: tuple[Sweep, list[int]]) -> float:
        best = strongest(source, *one)
        control = None if best is None else nearest(one[0], best)
        return 0.0 if control is None else float(control[1]["above"])

    sweep, places = max(found, key=size)
    best = strongest(source, sweep, places)
    assert best is not None
    return (
        f"{head} The matched donor does more than every control at {some(said)}. At {position_name(sweep.position)} "
        f"{lower(_strongest_said(sweep, best, several=True))}{tail}"
    )


def _strongest_said(sweep: Sweep, best: int, *, several: bool) -> str:
    row = sweep.matched.iloc[best]
    control = nearest(sweep, best)
    first = f"It exceeds them most at {cell_name(row)}, where it" if several else f"At {cell_name(row)} it"
    text = (
        f"{first} moves the readout by {signed(row['effect'])} {interval(row, 'effect')} logits toward its answer; "
        f"{_against(control)}."
    )
    flipped = number(row["flipped"])
    if sweep.kind == "disagreement" and flipped is not None:
        n = int(row["flipped_n"])
        others = [
            f"{LESS[name]} {percent(float(rows['flipped'].iat[best]), n)}"
            for name, rows in sweep.controls.items()
            if name in LESS and number(rows["flipped"].iat[best]) is not None
        ]
        ends = percent_span(number(row["flipped_low"]), number(row["flipped_high"]), n)
        text += f" It turns {percent(flipped, n)} {ends} of {n} answers" + (
            f"; {', '.join(others)}." if others else "."
        )
    return text


def _against(control: tuple[str, dict[str, Any]] | None) -> str:
    if control is None:
        return "there is no control to compare with"
    name, row = control
    p = number(row["above_p"])
    tested = "" if p is None else f"; p {p_text(p) if p < 0.001 else f'= {p_text(p)}'} over all cells tested together"
    size = f"{signed(row['above'])} {interval(row, 'above')}{tested}"
    return f"less {LESS[name]}, the control that comes nearest, that is {size}"


def _only_last(source: Interventions, sweep: Sweep) -> bool:
    """Whether the last layer alone exceeds its controls."""
    at = sweep.matched[sweep.matched["specific"].map(truth)]
    return sweep.monotone and len(at) > 0 and all(source.is_last(int(layer)) for layer in at["layer"])


def _cells(sweep: Sweep, places: Sequence[int]) -> str:
    """``layers 1–3 and 5``, or heads by name, the first few."""
    rows = [sweep.matched.iloc[place] for place in places]
    if sweep.site == HEADS:
        order = sorted(rows, key=lambda row: -float(row["effect"]))
        named = [f"{cell_name(row)} {signed(row['effect'])}" for row in order]
        return f"{len(order)} ({some(named)})"
    layers = sorted(int(row["layer"]) for row in rows)
    return f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}"


def ranges(layers: Sequence[int]) -> str:
    """``0–3, 5``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in parts)


def _counted(sweep: Sweep) -> str:
    return f"n = {sweep.n} recipients, {plural(sweep.groups, 'instance')}"


def _reason(rows: pd.DataFrame) -> str:
    """Why ``specific`` is undefined."""
    parts = [part for text in rows["reason"].dropna().unique() for part in str(text).split("; ") if "specific" in part]
    return parts[0].removeprefix("specific is undefined: ") if parts else "the table gives no reason"


def _carried(source: Interventions, arm: str) -> Iterator[Finding]:
    """Where base and adapter exchange activations: the layer that carries most, and what it is a share of."""
    table = source.of("transplant", arm)
    if table.empty:
        return
    for (site, position), rows in table.groupby(["site", "position"], sort=False):
        first = rows.iloc[0]
        gain = f"{signed(first['total'])} {interval(first, 'total')} logits toward the gold answer"
        lead = f"What carries the adapter's gain: {shown(str(site))} at {position_name(str(position))}"
        counted = f"n = {int(first['n'])} prompts, {plural(int(first['n_groups']), 'instance')}"
        if rows["share"].isna().all():
            yield Finding(
                arm, lead, f"{capital(str(first['reason']) or 'The share is undefined')} ({counted}).", "transplant"
            )
            continue
        parts = [part for way, part in rows.groupby("direction", sort=False) if (part["share"].notna()).any()]
        said = [one for part in parts if (one := _carries(source, part))]
        yield Finding(arm, lead, f"The gain is {gain} ({counted}). {' '.join(said)}", "transplant")


def _carries(source: Interventions, rows: pd.DataFrame) -> str:
    """The first layer with half of the gain where the curve climbs by construction, else the one with the largest share."""
    direction = str(rows["direction"].iloc[0])
    begin = (
        "Put into the base, the adapter's activation brings" if direction == "adapter→base"
        else "Put into the adapter, the base's activation takes out"
    )  # fmt: skip
    if bool(rows["monotone"].iloc[0]):
        half = rows[rows["share"] >= 0.5].sort_values("layer")
        if half.empty:
            return f"{begin} less than half of it at every layer."
        row = half.iloc[0]
        last = ", the last, where all of it is there by construction" if source.is_last(int(row["layer"])) else ""
        return f"{begin} half of it or more first at layer {int(row['layer'])}{last}: {_share(row)}."
    row = rows.loc[rows["share"].idxmax()]
    return f"{begin} most at layer {int(row['layer'])}, the largest of {len(rows)}: {_share(row)}."


def _share(row: pd.Series) -> str:
    low, high = number(row["share_low"]), number(row["share_high"])
    ends = "" if low is None or high is None else f" [{100 * low:.0f}, {100 * high:.0f}]".replace("-", "−")
    return f"{100 * float(row['share']):.0f}%".replace("-", "−") + ends


def _estimated(source: Interventions, arm: str) -> Iterator[Finding]:
    table = source.of("patch_quality", arm)
    if table.empty:
        return
    counts = table["verdict"].value_counts()
    parts = [f"{int(counts[word])} {word}" for word in ("enough", "not enough", "undefined") if word in counts]
    rows = table.dropna(subset=["spearman"])
    ends = (
        f" Spearman's ρ is {signed(rows['spearman'].min())} to {signed(rows['spearman'].max())}." if len(rows) else ""
    )
    yield Finding(
        arm, "Would gradient estimates have been enough?",
        f"Of {plural(len(table), 'comparison')} with the exact sweep: {', '.join(parts)} (enough: the lower ends of ρ "
        f"and of the overlap of the largest effects are at least 0.9 and 0.8).{ends}", "estimates",
    )  # fmt: skip
