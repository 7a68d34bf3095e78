"""One pair explained: what was asked, what was answered, what was measured, and what its label means here.

Everything comes from the tables of a finished run; no model is needed. ``sentence`` turns a row of the attribution table
into one plain sentence, for the terminal and for the report alike. It says only what the row holds: where the row has no
verdict a layer (a run made before there was one), it names the chosen layer alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.curves import main_rows
from experiments.errors import RunError, UsageError
from experiments.items import PAIR
from experiments.link import ABOVE_CHANCE, DONORS, KINDS, LABELS, NO_LAYER, current
from experiments.report.text import clean, shortened
from experiments.rundir import RunDirectory, whole_lines

if TYPE_CHECKING:
    import pandas as pd

PROMPT = (700, 400)  # characters kept at the start and at the end of a long prompt
ANSWER = 400
NEAR = 3  # keys named beside one that is not there
FEW_SPLITS = 0.8  # share of agreeing fold splits below which a sentence says so


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one presentation, in logits toward gold: the row's held-out margin, and the lens over all rows.

    ``readable``: the margin is beyond what chance gives, see ``probes.failures``. None is what the run does not hold.
    """

    layer: int
    auroc: float | None
    margin: float | None
    readable: bool | None
    lens_delta: float | None
    lens_signal: float | None


@dataclass(frozen=True, slots=True)
class Explained:
    """One presentation of a pair as one arm answered it. Logits are toward gold; text is cleaned for a terminal."""

    arm: str
    setting: str
    key: str
    presentation: str
    gold: str
    outcome: str
    prompt: str
    text: str
    read: str | None
    status: str
    correct: bool
    readout: float
    default: float | None
    signal: float | None
    label: str
    share: float | None
    sentence: str
    chosen_layer: int
    margin: float | None
    lost_at: int | None
    against: str | None
    against_logits: float | None
    patch_layer: int | None
    repaired: dict[str, bool | None]
    bars: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The files of a run that an explanation is made from."""

    path: Path
    items: dict[tuple[str, str], dict[str, Any]]
    tables: dict[str, pd.DataFrame]
    arms: tuple[str, ...]


def open_run(path: Path) -> Run:
    """Read a finished whole study.

    Raises:
        RunError: it is none, not finished, or asked without looking inside.
    """
    directory = RunDirectory(path)
    if not directory.results.exists():
        raise RunError(
            f"{path} has no results.json: give the folder of a finished run, or repeat the command that began it"
        )
    if not directory.has_table("attribution"):
        raise RunError(
            f"{path} has no table 'attribution': nothing was measured inside, make a whole study with `probe run`"
        )
    tables = {name: main_rows(directory.table(name)) for name in ("attribution", "behaviour", "probes", "lens")}
    current(tables["attribution"], path)
    items = {(str(one["setting"]), str(one["key"])): one for one in map(json.loads, whole_lines(directory.items))}
    return Run(path, items, tables, tuple(dict.fromkeys(tables["attribution"]["arm"].astype(str))))


def chosen(run: Run, arm: str | None, presentation: str | None) -> pd.DataFrame:
    """The rows of the attribution table of one arm and presentation, or of all.

    Raises:
        UsageError: there is no such arm or presentation.
    """
    table = run.tables["attribution"]
    for column, value, known in (("arm", arm, run.arms), ("presentation", presentation, PAIR)):
        if value is None:
            continue
        if value not in known:
            raise UsageError(f"{column} is {clean(value)!r}: choose from {', '.join(clean(one) for one in known)}")
        table = table[table[column] == value]
    return table


def find(run: Run, prefix: str) -> list[tuple[str, str]]:
    """Setting and key of the pair whose key begins so; one under several settings is found under each.

    Raises:
        UsageError: no key begins so, or several do.
    """
    keys = list(dict.fromkeys(key for _, key in run.items))
    found = [key for key in keys if key.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return [name for name in run.items if name[1] == found[0]]
    shown = clean(prefix)[:40]
    if found:
        some = ", ".join(key[: len(prefix) + 4] for key in found[:NEAR])
        raise UsageError(f"{len(found)} keys begin with {shown!r} ({some}, …): give more of it")
    width = max(len(prefix), 6)
    near = get_close_matches(prefix, dict.fromkeys(key[:width] for key in keys), n=NEAR, cutoff=0.0)
    raise UsageError(
        f"no key begins with {shown!r}; near ones are {', '.join(near)}: `probe explain {run.path}` lists the failing pairs"
    )


def explain(run: Run, name: tuple[str, str], rows: pd.DataFrame) -> list[Explained]:
    """Every row of `rows` that is of this pair, arms in turn."""
    setting, key = name
    table = rows[(rows["setting"].astype(str) == setting) & (rows["key"].astype(str) == key)]
    said = run.tables["behaviour"]
    said = said[(said["setting"].astype(str) == setting) & (said["key"].astype(str) == key)]
    texts = {(str(one["arm"]), str(one["presentation"])): one for one in said.to_dict("records")}
    rendered = {one["kind"]: one for one in run.items[name]["presentations"]}
    found = []
    for row in table.to_dict("records"):
        arm, kind = str(row["arm"]), str(row["presentation"])
        given = texts[arm, kind]
        sign = 1.0 if row["gold"] == "yes" else -1.0
        found.append(
            Explained(
                arm=_line(arm),
                setting=_line(setting),
                key=key,
                presentation=kind,
                gold=_line(str(row["gold"])),
                outcome=str(row["outcome"]),
                prompt=shortened(clean("\n".join(str(one["content"]) for one in rendered[kind]["messages"])), *PROMPT),
                text=shortened(clean(str(given["text"])), ANSWER),
                read=_known(row["answer"]),
                status=str(given["status"]),
                correct=bool(row["correct"]),
                readout=float(row["difference"]) * sign,
                default=_number(row["default"]),
                signal=_number(row["signal"]),
                label=str(row["kind"]),
                share=_number(row.get("share")),
                sentence=sentence(row, status=str(given["status"])),
                chosen_layer=int(row["layer"]),
                margin=_number(row["margin"]),
                lost_at=None if int(row.get("lost_at", NO_LAYER)) == NO_LAYER else int(row["lost_at"]),
                against=None if _known(row.get("against")) is None else _line(str(row["against"])),
                against_logits=_number(row.get("against_logits")),
                patch_layer=None if int(row["patch_layer"]) == NO_LAYER else int(row["patch_layer"]),
                repaired={donor: _known(row[f"repaired_{donor}"]) for donor in DONORS},
                bars=bars(row),
                layers=_layers(run, arm, kind, row, sign),
            )
        )
    return found


def failing(rows: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The failing prompts of `rows` by label, in the order of ``KINDS``, the steadiest first."""
    failed = rows[rows["kind"].isin(KINDS)]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        part = failed[failed["kind"] == kind]
        if len(part):
            order = part.sort_values("share", ascending=False, kind="stable") if "share" in part else part
            columns = ("arm", "setting", "key", "presentation", "outcome")
            found[kind] = [
                {**{name: _line(str(row[name])) for name in columns}, "share": _number(row.get("share")),
                 "sentence": sentence(row)}
                for row in order.to_dict("records")
            ]  # fmt: skip
    return found


def sentence(row: Mapping[str, Any], *, status: str = "parsed") -> str:
    """What the label of a row of the attribution table means for this prompt."""
    gold, kind = _line(str(row["gold"])), str(row["kind"])
    toward = abs(float(row["difference"]))
    if kind == "right":
        return f"The readout leans to {gold}, the gold answer, by {toward:.2f} logits, and the text says so."
    if kind == "text":
        answer = _known(row.get("answer"))
        said = f"could not be read ({status})" if answer is None else f"says {_line(str(answer))}"
        return (
            f"The readout leans to {gold}, the gold answer, by {toward:.2f} logits; the text {said}. "
            "Nothing measured inside explains it."
        )
    text = _REASONS[kind](row, gold)
    share = _number(row.get("share"))
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
    if _known(row.get("decodable")) is None:
        return (
            f"No probe of the {row['presentation']} prompts beats shuffled labels (p at most {ABOVE_CHANCE}), so where the "
            f"answer, {gold}, gets to can't be told."
        )
    text = (
        f"The probe does not find the gold answer, {gold}, at layer {int(row['layer'])}, chosen on other problems, nor at "
        "the last layer that can be read: as far as linear probes tell, it was not worked out."
    )
    signal = _number(row["signal"])
    if signal is not None and signal > 0:
        text += f" Without its default the readout would lean to {gold} all the same, by {signal:.2f}."
    return text


def _mixed(row: Mapping[str, Any], gold: str) -> str:
    if _number(row["signal"]) is None:
        return f"The default δ is undefined, so what this instance adds toward {gold} can't be told from it."
    seen = flags(row)
    if seen is not None and seen[-1] and not row.get("reads", True):
        return (
            f"The gold answer, {gold}, is readable at the last layer, but the readouts of {row['presentation']} prompts "
            "carry no signal beyond chance (the interval of s holds 0): the answer is there and not read out."
        )
    share = _number(row.get("share")) or 0.0
    known = f"the commonest label has {share:.0%} of the fold splits" if share else "no fold split gives a label"
    return (
        f"It can't be told whether the gold answer, {gold}, was there: where it counts the probe's margin is right by no "
        f"more than it is for prompts it knows nothing about, or refits disagree ({known})."
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


def _layers(run: Run, arm: str, kind: str, row: Mapping[str, Any], sign: float) -> tuple[Layer, ...]:
    def of(name: str) -> dict[int, dict[str, Any]]:
        table = run.tables[name]
        part = table[(table["arm"] == arm) & (table["presentation"] == kind)]
        return {int(one["layer"]): one for one in part.to_dict("records")}

    probes, lens = of("probes"), of("lens")
    margins, seen = row.get("margins"), flags(row)
    return tuple(
        Layer(
            layer=layer,
            auroc=_number(probes[layer]["auroc"]) if layer in probes else None,
            margin=None if seen is None or margins is None else _number(margins[layer]),
            readable=None if seen is None else seen[layer],
            lens_delta=_number(lens[layer]["delta"] * sign) if layer in lens else None,
            lens_signal=_number(lens[layer]["signal"]) if layer in lens else None,
        )
        for layer in sorted({*probes, *lens})
    )


def sparkline(margins: Sequence[float], readable: Sequence[bool]) -> str:
    """One character a layer: bar heights where the answer is readable, × where the probe says the other answer, · where
    the margin is right by no more than chance gives."""
    highest = max((margin for margin, ok in zip(margins, readable, strict=True) if ok), default=0.0)

    def drawn(margin: float, ok: bool) -> str:
        if not ok:
            return "·" if margin > 0 else "×"
        return "▁▂▃▄▅▆▇█"[min(7, int(8 * margin / highest))]

    return "".join(drawn(margin, ok) for margin, ok in zip(margins, readable, strict=True))


def bars(row: Mapping[str, Any]) -> str:
    """The sparkline of a row of the attribution table; empty where the run holds no margins by layer."""
    seen = flags(row)
    return "" if seen is None else sparkline([float(one) for one in row["margins"]], seen)


def _other(answer: str) -> str:
    return {"yes": "no", "no": "yes"}.get(answer, "the other answer")


def _line(text: str) -> str:
    """Text from outside, fit for one line."""
    return " ".join(clean(text).split())


def _known(value: Any) -> Any:
    """The value, or None where a table holds none."""
    import pandas as pd

    return None if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)) else value


def _number(value: Any) -> float | None:
    known = _known(value)
    return None if known is None or not math.isfinite(known) else float(known)
