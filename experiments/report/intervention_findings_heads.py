"""The sentences on an ablation: which heads, what happens to agreement and competence, to the signal, and to the rest.

Agreement that rises while competence falls is called what it is. A change is stated beside that of as many random heads,
by the interval of their difference, which is paired by instance: cutting any heads does something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.report.findings_wrong import Finding
from experiments.report.intervention_source import Interventions, number
from experiments.report.plots_interventions_heads import CONTROL_SETS, IN_LOGITS, SET_NAMES
from experiments.report.source import shown
from experiments.report.text import listed, percent, plural, signed, span

SAID = {
    "accuracy_original": "accuracy on original prompts",
    "accuracy_equivalent": "accuracy on equivalent prompts",
    "invariance": "ι",
    "robust": "R",
    "shared_wrong": "D",
    "unstable": "U",
    "default_original": "δ on original prompts",
    "default_equivalent": "δ on equivalent prompts",
}
NAMED = 6  # cells, heads or positions that a sentence lists


def ablated(source: Interventions, arm: str) -> list[Finding]:
    """Everything that is said of one arm."""
    rules = (_competence, _ranked, _signal, _moved)
    return [one for rule in rules for one in rule(source, arm)]


def _ranked(source: Interventions, arm: str) -> Iterator[Finding]:
    """Which heads were chosen, and what the same heads do on the instances that did not choose them."""
    rows = source.of("head_effects", arm, half="ranked")
    if rows.empty:
        return
    counted = f"n = {int(rows['n'].max())} recipients, {plural(int(rows['n_groups'].max()), 'instance')}"
    names = _effects(rows)
    are = "this is" if len(names) == 1 else "these are"
    text = (
        f"Of {len(rows)} heads, ranked by their patch effect ({counted}), {are} the first: {some(names)}, in logits "
        "toward the donor's readout. That they are the largest of many is partly luck."
    )
    tested = source.of("head_effects", arm, half="tested")
    order = {place: number for number, place in enumerate(zip(rows["layer"], rows["head"], strict=True))}
    if len(tested):
        tested = tested.assign(rank=[order[place] for place in zip(tested["layer"], tested["head"], strict=True)])
    if len(tested) and (again := _effects(tested)):
        text += f" On other instances the same effects are {some(again)} (n = {int(tested['n'].max())})."
    yield Finding(arm, "Which heads", text, "ranking")


def _effects(rows: Any) -> list[str]:
    chosen = rows[rows["chosen"].astype(bool)].sort_values("rank").to_dict("records")
    return [
        f"{int(row['layer'])}.{int(row['head'])} {signed(row['effect'])} {span(number(row['low']), number(row['high']))}"
        for row in chosen
        if number(row["effect"]) is not None
    ]


def _signal(source: Interventions, arm: str) -> Iterator[Finding]:
    top = source.of("ablation", arm, family="top", measure="signal_mean")
    if top.empty:
        return
    row = top.iloc[0]
    if number(row["change"]) is None:
        yield Finding(arm, "The signal", f"{capital(str(row['reason']) or 'The signal is undefined')}.", "ablation")
        return
    text = (
        f"Without {_heads(row)} the signal s, the mean of both presentations, goes from {signed(row['before'])} to "
        f"{signed(row['after'])} logits (change {signed(row['change'])} {interval(row, 'change')}; n = {int(row['n'])} "
        f"pairs, {plural(int(row['n_groups']), 'instance')})."
    )
    yield Finding(arm, "The signal", f"{text} {_beyond(source, arm, 'signal_mean')}", "ablation")


def _beyond(source: Interventions, arm: str, measure: str) -> str:
    """The top heads' change less each control's, and whether its interval leaves out 0."""
    said: list[str] = []
    for control in CONTROL_SETS:
        rows = source.of("ablation_above", arm, control=control, measure=measure)
        if rows.empty or number(rows["value"].iloc[0]) is None:
            continue
        row = rows.iloc[0]
        low, high = number(row["low"]), number(row["high"])
        scale, unit, digits = (1.0, "logits", 2) if measure in IN_LOGITS else (100.0, "points", 1)
        ends = "" if low is None or high is None else f" {span(scale * low, scale * high, digits)}"
        size = f"{signed(scale * float(row['value']), digits)}{ends} {unit}"
        told = "" if _apart(low, high) else ", so it was not shown to differ from theirs"
        change = "the change less that" if not said else "less that"
        said.append(f"{change} by as many {SET_NAMES[control]} is {size}{told}")
    return f"{capital('; '.join(said))}." if said else "No random heads were ablated to compare with."


def _competence(source: Interventions, arm: str) -> Iterator[Finding]:
    text, plain = competence(source, arm)
    if text:
        lead = "More agreement, less competence" if plain else "Agreement rises, by the estimates only"
        yield Finding(arm, lead, text, "ablation")


def competence(source: Interventions, arm: str) -> tuple[str, bool]:
    """What is said where invariance rises while accuracy or signal falls, and whether the intervals carry it."""
    notes = source.of("ablation_notes", arm, ablated="top")
    if notes.empty or not str(notes["note"].iloc[0] or ""):
        return "", False
    plain = bool(notes["agreement_without_competence"].iloc[0])
    rows = {str(row["measure"]): row for row in source.of("ablation", arm, family="top").to_dict("records")}
    return f"{competence_sentence(rows, plain=plain)} For ι: {lower(_beyond(source, arm, 'invariance'))}", plain


def competence_sentence(rows: Mapping[str, Mapping[str, Any]], *, plain: bool) -> str:
    """That agreement rises while competence falls, with ι, both accuracies, D and s before and after.

    Args:
        rows: the rows of the top heads in the table ``ablation``, by measure.
        plain: whether the intervals carry it.
    """
    n = int(rows["invariance"]["n"])

    def moved(name: str) -> str:
        row = rows[name]
        before, after = (percent(min(max(float(row[end]), 0.0), 1.0), n) for end in ("before", "after"))
        low, high = (number(row[f"change_{end}"]) for end in ("low", "high"))
        inside = "" if low is None or high is None else f" {span(100 * low, 100 * high, 1)}"
        return f"from {before} to {after} ({signed(100 * float(row['change']), 1)} points{inside})"

    falling = []
    for name, word in (("accuracy_mean", "accuracy"), ("signal_mean", "the signal s")):
        change, high = (number(rows[name][end]) for end in ("change", "change_high"))
        if (high is not None and high < 0) if plain else (change is not None and change < 0):
            falling.append(word)
    verb = "fall" if len(falling) > 1 else "falls"
    start = f"Agreement rises while {listed(falling) if falling else 'competence'} {verb}"
    start += ": this is no repair." if plain else ", by the estimates; not all of the intervals leave out 0."
    signal, told = rows["signal_mean"], ""
    if number(signal["change"]) is not None:
        told = (
            f"; s goes from {signed(signal['before'])} to {signed(signal['after'])} logits ({signed(signal['change'])} "
            f"{interval(signal, 'change')})"
        )
    return (
        f"{start} ι, the share of pairs that get the same answer twice, goes {moved('invariance')}; accuracy "
        f"goes {moved('accuracy_original')} on original and {moved('accuracy_equivalent')} on equivalent prompts; pairs "
        f"with both answers wrong go {moved('shared_wrong')}{told} (n = {n} pairs)."
    )


def _moved(source: Interventions, arm: str) -> Iterator[Finding]:
    """Which measures changed, which of these beyond random heads, and which not."""
    rows = source.of("ablation", arm, family="top")
    changed, told = [], []
    for name in SAID:
        at = rows[rows["measure"] == name]
        if len(at) and _apart(number(at["change_low"].iloc[0]), number(at["change_high"].iloc[0])):
            changed.append(SAID[name])
            if _exceeds(source, arm, name):
                told.append(SAID[name])
    n = int(rows["n"].max()) if len(rows) else 0
    if not changed:
        text = f"Of accuracy, ι, R, D, U and δ none has a change whose interval leaves out 0 (n = {n} pairs)."
    else:
        text = f"The interval of the change leaves out 0 (n = {n} pairs) for {listed(changed)}."
        if not told:
            text += " None of these was shown to differ from what as many random heads do."
        elif len(told) < len(changed):
            text += f" Of these, apart from what as many random heads do: {listed(told)}."
        else:
            text += " All of these are apart from what as many random heads do."
    yield Finding(arm, "What else changes", text, "ablation")


def _exceeds(source: Interventions, arm: str, measure: str) -> bool:
    """Whether the top heads' change is apart from every control's."""
    verdicts = []
    for control in CONTROL_SETS:
        rows = source.of("ablation_above", arm, control=control, measure=measure)
        if len(rows):
            verdicts.append(_apart(number(rows["low"].iloc[0]), number(rows["high"].iloc[0])))
    return bool(verdicts) and all(verdicts)


def _apart(low: float | None, high: float | None) -> bool:
    """Whether an interval exists and leaves out zero."""
    return low is not None and high is not None and not low <= 0 <= high


def _heads(row: Any) -> str:
    names = shown(str(row["heads"])).split()
    return f"head {names[0]}" if len(names) == 1 else f"heads {some(names)}"


def some(words: Sequence[str]) -> str:
    """A list, and how many more there are."""
    more = len(words) - NAMED
    return listed([*words[:NAMED], f"{more} more"] if more > 0 else list(words))


def interval(row: Any, name: str) -> str:
    """The interval of a number of a table row, in brackets."""
    return span(number(row[f"{name}_low"]), number(row[f"{name}_high"]))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]
