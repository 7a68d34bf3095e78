"""Plain sentences about one row of the attribution table, and its margins as a line of bars.

For the terminal and for the report alike. A sentence says only what the row holds: where the row has no verdict a layer
(a run made before there was one), it names the chosen layer alone.

A bar stands where the gold answer is readable. The other answer is marked, with ×, only where the margin is as far on its
side as the smallest readable margin of that layer is on the gold one (``thresholds``). Anything between, and every layer
at which nothing is readable, is a dot: the sign of a margin there is a coin's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.link import ABOVE_CHANCE, LABELS
from experiments.report.text import OUTCOME_NAMES, clean

if TYPE_CHECKING:
    import pandas as pd

FEW_SPLITS = 0.8  # share of agreeing fold splits below which a sentence says so
LEGEND = "bars: readable; × the other answer, by as much as readable ones; · within chance"

# What each label says about a wrong answer, for a list of them.
MEANING = {
    "overridden": "the gold answer is readable at the last layer and the readout leans to it, less than the default leans "
    "away",
    "lost": "the gold answer is readable at an earlier layer, no longer at the last",
    "reversed": "the gold answer is readable at the last layer, and what the prompt adds to the readout points away from "
    "it",
    "not_decodable": "linear probes do not find the gold answer: no layer is above chance, or they say the other answer",
    "mixed": "none of these in more than half of the fold splits, or readable while the readouts carry no signal",
    "text": "the readout gives the gold answer; the text was not read or says something else",
}
COIN = "Coin: the share that a label would have if the probes' verdicts on these prompts were tossed."


def unproven_repairs(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each outcome of the link where repair was tried and is not above its controls: which, and the counts.

    Above is meant with the interval of the matched donor's share: its lower end has to exceed both controls' shares.
    """
    found = []
    for row in rows:
        tried = row["repaired"]
        if not tried or any(tried[donor]["value"] is None for donor in ("matched", "unrelated", "random")):
            continue
        matched, controls = tried["matched"], (tried["unrelated"], tried["random"])
        if matched["low"] <= max(one["value"] for one in controls):
            counts = [f"{one['count']}/{one['n']}" for one in (matched, *controls)]
            name = OUTCOME_NAMES[row["outcome"]] + (f", answer {row['answered']}" if row["outcome"] in "UN" else "")
            found.append(f"{name} {counts[0]} (unrelated {counts[1]}, random {counts[2]})")
    return found


def agreement(label: str, share: float | None) -> str:
    """How far the fold splits agree with a label; empty where none were asked."""
    if share is None:
        return ""
    if label != "mixed":
        return f"{share:.0%} of fold splits"
    largest = f"at most {share:.0%}" if share else "in none"
    return f"no label in more than half of the fold splits ({largest})"


def sentence(row: Mapping[str, Any], *, status: str = "parsed") -> str:
    """What the label of a row of the attribution table means for this prompt."""
    gold, kind = line(str(row["gold"])), str(row["kind"])
    toward = abs(float(row["difference"]))
    if kind == "right":
        return f"The readout leans to {gold}, the gold answer, by {toward:.2f} logits, and the text says so."
    if kind == "text":
        answer = known(row.get("answer"))
        said = f"could not be read ({status})" if answer is None else f"says {line(str(answer))}"
        return (
            f"The readout leans to {gold}, the gold answer, by {toward:.2f} logits; the text {said}. "
            "Nothing measured inside explains it."
        )
    text = _REASONS[kind](row, gold)
    share = number(row.get("share"))
    if kind in LABELS[:4] and share is not None and share < FEW_SPLITS:
        text += f" Only {share:.0%} of the fold splits say so."
    return text + (f" The text says {gold} all the same." if row["correct"] else "")


def _overridden(row: Mapping[str, Any], gold: str) -> str:
    return (
        f"{_seen(row)}; the readout leans to {_other(gold)} by {-float(row['default']):.2f} whatever is asked, and this "
        f"instance adds only {float(row['signal']):.2f} toward {gold}."
    )


def _reversed(row: Mapping[str, Any], gold: str) -> str:
    pull, signal = float(row["default"]), float(row["signal"])
    standing = f"the default leans to {gold if pull > 0 else _other(gold)} by {abs(pull):.2f}"
    return (
        f"{_seen(row)}; but what this instance adds to the readout, {abs(signal):.2f}, points to {_other(gold)}, not to "
        f"{gold}; {standing}."
    )


def _lost(row: Mapping[str, Any], gold: str) -> str:
    at = int(row["lost_at"])
    seen = flags(row)
    before = [layer for layer, ok in enumerate(seen or ()) if ok and layer < at]
    where = f"at layer {before[0]}" if before else f"at layer {int(row['layer'])}"
    if len(before) > 1:
        where = f"at {len(before)} layers from {before[0]} to {before[-1]}"
    return (
        f"The gold answer, {gold}, was readable {where}, no longer from layer {at} on: it does not reach the readout."
    )


def _not_decodable(row: Mapping[str, Any], gold: str) -> str:
    if known(row.get("decodable")) is None:
        return (
            f"No probe of the {row['presentation']} prompts beats shuffled labels (p at most {ABOVE_CHANCE}), so where the "
            f"answer, {gold}, gets to can't be told."
        )
    text = (
        f"The probe does not find the gold answer, {gold}, at layer {int(row['layer'])}, chosen on other problems, nor at "
        "the last layer that can be read"
    )
    signal = number(row["signal"])
    if signal is not None and signal > 0:
        return (
            f"{text}. Without its default the readout itself leans to {gold}, by {signal:.2f}, so linear probes fitted to "
            "this many prompts may be missing what is there."
        )
    return f"{text}: as far as linear probes tell, it was not worked out."


def _mixed(row: Mapping[str, Any], gold: str) -> str:
    if number(row["signal"]) is None:
        return f"The default δ is undefined, so what this instance adds toward {gold} can't be told from it."
    seen = flags(row)
    if seen is not None and seen[-1] and not row.get("reads", True):
        return (
            f"The gold answer, {gold}, is readable at the last layer, but the readouts of {row['presentation']} prompts "
            "carry no signal beyond chance (the interval of s holds 0): the answer is there and not read out."
        )
    share = number(row.get("share")) or 0.0
    most = f"the commonest label has {share:.0%} of the fold splits" if share else "no fold split gives a label"
    return (
        f"It can't be told whether the gold answer, {gold}, was there: where it counts the probe's margin is right by no "
        f"more than it is for prompts it knows nothing about, or refits disagree ({most})."
    )


_REASONS = {
    "overridden": _overridden, "reversed": _reversed, "lost": _lost, "not_decodable": _not_decodable, "mixed": _mixed
}  # fmt: skip


def _seen(row: Mapping[str, Any]) -> str:
    """From where on the answer is readable up to the last layer, under the study's own folds."""
    seen = flags(row)
    if seen is None:
        return f"The gold answer was readable at layer {int(row['layer'])}"
    if not seen[-1]:
        return "Most fold splits find the gold answer at the last layer"
    first = len(seen) - next((n for n, ok in enumerate(reversed(seen)) if not ok), len(seen))
    if first == len(seen) - 1:
        return "The gold answer was readable at the last layer"
    return f"The gold answer was readable from layer {first} on and still at the last layer"


def flags(row: Mapping[str, Any]) -> list[bool] | None:
    """At which layers a row is readable, under the study's own folds; None where the run does not say."""
    found = row.get("readable")
    return None if found is None or isinstance(found, float) else [bool(one) for one in found]


Thresholds = dict[tuple[str, str, bool], np.ndarray]


def thresholds(table: pd.DataFrame) -> Thresholds:
    """The smallest readable margin [layer] by arm, presentation and whether the readout is right; infinite for none.

    Readable is judged among failures and among right readouts apart. Where no failure is readable at a layer, the margin
    of the others there is the measure.
    """
    found: Thresholds = {}
    for (arm, kind), part in table.groupby(["arm", "presentation"], sort=False):
        known_rows = part[[flags(row) is not None for row in part.to_dict("records")]]
        if known_rows.empty:
            continue
        margins, seen = (np.stack(list(known_rows[name])) for name in ("margins", "readable"))
        sizes = np.where(seen.astype(bool), margins.astype(float), np.inf)
        right = known_rows["readout_correct"].to_numpy(dtype=bool)
        every = sizes.min(axis=0)
        for verdict in (False, True):
            own = sizes[right == verdict]
            least = own.min(axis=0) if len(own) else every
            found[str(arm), str(kind), verdict] = np.where(np.isfinite(least), least, every)
    return found


def sparkline(margins: Sequence[float], readable: Sequence[bool], least: Sequence[float]) -> str:
    """One character a layer: a bar's height where the answer is readable, × for a margin of -`least` or below, else ·."""
    highest = max((margin for margin, ok in zip(margins, readable, strict=True) if ok), default=0.0)

    def drawn(margin: float, ok: bool, far: float) -> str:
        if not ok:
            return "×" if margin <= -far else "·"
        return "▁▂▃▄▅▆▇█"[min(7, int(8 * margin / highest))]

    return "".join(drawn(*one) for one in zip(margins, readable, least, strict=True))


def bars(row: Mapping[str, Any], least: Thresholds) -> str:
    """The sparkline of a row of the attribution table; empty where the run holds no margins by layer."""
    seen = flags(row)
    if seen is None:
        return ""
    at = least[str(row["arm"]), str(row["presentation"]), bool(row["readout_correct"])]
    return sparkline([float(one) for one in row["margins"]], seen, at.tolist())


def _other(answer: str) -> str:
    return {"yes": "no", "no": "yes"}.get(answer, "the other answer")


def line(text: str) -> str:
    """Text from outside, fit for one line."""
    return " ".join(clean(text).split())


def known(value: Any) -> Any:
    """The value, or None where a table holds none."""
    import pandas as pd

    return None if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def number(value: Any) -> float | None:
    """The value as a float, or None where it is missing or not finite."""
    found = known(value)
    return None if found is None or not math.isfinite(found) else float(found)
