"""The sentence on an arm's wrong answers: which labels were shown, and which were not.

A label is stated for a presentation only if two things hold. Its share among the wrong readouts has an interval above
its coin, what tossed verdicts would give. And it comes back from probes of another half of the instances, which share no
training row with the first: the interval lies above how often that label occurs there at all, or, where nothing could
lie above that, it came back every time and more often than not. A label with the first and without the second is named
as not confirmed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from experiments.curves import curve_rows
from experiments.items import PAIR
from experiments.link import LABELS
from experiments.report.source import Source, shown
from experiments.report.text import listed, percent, percent_span, plural

FEWEST_WRONG = 20  # wrong answers below which they are not shared out among the labels
OFTEN = 0.5  # lower end from which a label that always came back counts as come back

MEANING = {
    "overridden": "overridden (readable at the last layer, the signal points to the gold answer: the default decided)",
    "lost": "lost (readable at an earlier layer, not at the last)",
    "reversed": "reversed (readable at the last layer, but the signal points away)",
    "not_decodable": "not decodable by the probes",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement: whose, the first words, the sentence, and the section that shows it."""

    arm: str
    lead: str
    text: str
    section: str


def wrong_answers(source: Source, arm: str) -> Finding | None:
    """What the wrong answers of `arm` were, as far as it was shown; None without any."""
    kinds = [row["kinds"] for row in source.arm(arm)["link"] if row["kinds"] is not None]
    total = sum(one["count"] for row in kinds for one in row.values())
    if total == 0:
        return None
    texts = sum(row["text"]["count"] for row in kinds)
    if total < FEWEST_WRONG:
        few = f"{plural(total, 'wrong answer')} {'is' if total == 1 else 'are'} too few to share out among the labels."
        return Finding(arm, "Its wrong answers", few, "link")
    said = [f"There are {total} wrong answers of {shown(arm)}."]
    if texts:
        said = [
            f"Of the {total} wrong answers of {shown(arm)}, {_counted(texts)} a matter of the text (the readout gave the "
            "gold answer; the text was not read or says something else)."
        ]
    stated = []
    for kind in PAIR:
        shares = {one["label"]: one for one in _shares(source, arm, kind)}
        above = [shares[label] for label in MEANING if label in shares and _above_coin(shares[label])]
        again = {one["label"]: one for one in _halves(source, arm, kind)}
        parts = [one for one in above if comes_back(again.get(one["label"]))]
        if parts:
            counts = [f"{_counted(int(one['count']))} {MEANING[one['label']]}" for one in parts]
            stated.append(f"Of its {plural(int(parts[0]['n']), 'wrong readout')} on {kind} prompts, {listed(counts)}.")
        for one in above:
            if one not in parts:
                stated.append(_doubted(one, again.get(one["label"]), kind))
    if not stated:
        stated = ["None of the labels of its wrong readouts is more common than tossed verdicts would make it."]
    return Finding(arm, "Its wrong answers", " ".join([*said, *stated]), "link")


def comes_back(one: dict[str, Any] | None) -> bool:
    """Whether a label comes back from probes of another half, by a row of the calibration table."""
    if one is None or not all(math.isfinite(one[name]) for name in ("value", "low", "base")):
        return False
    return bool(one["low"] > one["base"] or (one["value"] == 1 and one["low"] > OFTEN))


def _doubted(one: dict[str, Any], again: dict[str, Any] | None, kind: str) -> str:
    name, n = str(one["label"]).replace("_", " "), int(one["n"])
    start = f"On {kind} prompts the run’s own probes call {int(one['count'])} of {n} {name}, but"
    if again is None or not math.isfinite(again["value"]):
        return f"{start} probes of another half of the problems could not be asked."
    share = percent(again["value"], again["n"])
    ends = f" {percent_span(again['low'], again['high'], again['n'])}" if math.isfinite(again["low"]) else ""
    base = f", and to {percent(again['base'], again['n'])} of all" if math.isfinite(again["base"]) else ""
    return (
        f"{start} probes of another half of the problems do not confirm which: they give it again to {share}{ends} of "
        f"{int(again['n'])}{base}."
    )


def _above_coin(one: dict[str, Any]) -> bool:
    return bool(one["count"] and math.isfinite(one["coin"]) and one["low"] > one["coin"])


def _shares(source: Source, arm: str, kind: str) -> list[dict[str, Any]]:
    table = source.of("attribution_shares", arm)
    found: list[dict[str, Any]] = curve_rows(table, stratum="presentation", of=kind).to_dict("records")
    return [one for one in found if one["label"] in LABELS]


def _halves(source: Source, arm: str, kind: str) -> list[dict[str, Any]]:
    table = source.of("attribution_calibration", arm)
    found: list[dict[str, Any]] = curve_rows(table, presentation=kind, check="half").to_dict("records")
    return found


def _counted(count: int) -> str:
    return f"{count} {'was' if count == 1 else 'were'}"
