"""One pair explained: what was asked, what was answered, what was measured, and what its label means here.

Everything comes from the tables of a finished run; no model is needed. Nothing is written: a damaged file is named, and
left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.curves import main_rows
from experiments.errors import RunError, UsageError
from experiments.items import PAIR
from experiments.link import DONORS, KINDS, NO_LAYER, current, whole
from experiments.report.text import clean, shortened
from experiments.rundir import RunDirectory
from experiments.sentences import Thresholds, bars, flags, known, line, number, sentence, thresholds

if TYPE_CHECKING:
    import pandas as pd

PROMPT = (700, 400)  # characters kept at the start and at the end of a long prompt
ANSWER = 400
NEAR = 3  # keys named beside one that is not there
SHOWN = 6  # characters of such a key, at least


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one presentation: the row's held-out margin toward gold, and the lens over all rows.

    ``lens_delta`` is toward yes and ``lens_signal`` toward gold, as in the lens table. ``readable``: the margin is beyond
    what chance gives, see ``probes.failures``. None is what the run does not hold.
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
    least: Thresholds


def open_run(path: Path) -> Run:
    """Read a finished whole study.

    Raises:
        RunError: it is none, not finished, asked without looking inside, or lacks rows or items.
    """
    directory = RunDirectory(path)
    if not path.exists():
        raise RunError(f"{path} does not exist: give the folder of a finished run")
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
    items = {(str(one["setting"]), str(one["key"])): one for one in whole(directory, tables)}
    arms = tuple(dict.fromkeys(tables["attribution"]["arm"].astype(str)))
    return Run(path, items, tables, arms, thresholds(tables["attribution"]))


def chosen(run: Run, arm: str | None, presentation: str | None) -> pd.DataFrame:
    """The rows of the attribution table of one arm and presentation, or of all.

    Raises:
        UsageError: there is no such arm or presentation.
    """
    table = run.tables["attribution"]
    for column, value, allowed in (("arm", arm, run.arms), ("presentation", presentation, PAIR)):
        if value is None:
            continue
        if value not in allowed:
            raise UsageError(f"{column} is {clean(value)!r}: choose from {', '.join(clean(one) for one in allowed)}")
        table = table[table[column] == value]
    return table


def find(run: Run, prefix: str) -> list[tuple[str, str]]:
    """Setting and key of the pair whose key begins so; one under several settings is found under each.

    Raises:
        UsageError: no key begins so, or several do.
    """
    keys = list(dict.fromkeys(key for _, key in run.items))
    lists = f"`probe explain {run.path}` lists the failing pairs"
    if not prefix.strip():
        raise UsageError(f"KEY is empty: give the begin of a pair's key, such as {keys[0][:SHOWN]}, or none; {lists}")
    # Keys are lower-case digests; one copied from elsewhere may not be.
    found = [key for key in keys if key.startswith(prefix)] or [key for key in keys if key.startswith(prefix.lower())]
    if len(found) == 1:
        return [name for name in run.items if name[1] == found[0]]
    shown = clean(prefix)[:40]
    if found:
        some = ", ".join(key[: len(prefix) + 4] for key in found[:NEAR])
        raise UsageError(f"{len(found)} keys begin with {shown!r} ({some}, …): give more of it")
    width = max(len(prefix), SHOWN)
    near = get_close_matches(prefix.lower(), dict.fromkeys(key[:width] for key in keys), n=NEAR, cutoff=0.6)
    others = f"near ones are {', '.join(near)}" if near else f"some are {', '.join(key[:SHOWN] for key in keys[:NEAR])}"
    raise UsageError(f"no key begins with {shown!r}; {others}; {lists}")


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
                arm=line(arm),
                setting=line(setting),
                key=key,
                presentation=kind,
                gold=line(str(row["gold"])),
                outcome=str(row["outcome"]),
                prompt=shortened(clean("\n".join(str(one["content"]) for one in rendered[kind]["messages"])), *PROMPT),
                text=shortened(clean(str(given["text"])), ANSWER),
                read=known(row["answer"]),
                status=str(given["status"]),
                correct=bool(row["correct"]),
                readout=float(row["difference"]) * sign,
                default=number(row["default"]),
                signal=number(row["signal"]),
                label=str(row["kind"]),
                share=number(row.get("share")),
                sentence=sentence(row, status=str(given["status"])),
                chosen_layer=int(row["layer"]),
                margin=number(row["margin"]),
                lost_at=None if int(row.get("lost_at", NO_LAYER)) == NO_LAYER else int(row["lost_at"]),
                against=None if known(row.get("against")) is None else line(str(row["against"])),
                against_logits=number(row.get("against_logits")),
                patch_layer=None if int(row["patch_layer"]) == NO_LAYER else int(row["patch_layer"]),
                repaired={donor: known(row[f"repaired_{donor}"]) for donor in DONORS},
                bars=bars(row, run.least),
                layers=_layers(run, arm, kind, row),
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
                {**{name: line(str(row[name])) for name in columns}, "share": number(row.get("share")),
                 "sentence": sentence(row)}
                for row in order.to_dict("records")
            ]  # fmt: skip
    return found


def _layers(run: Run, arm: str, kind: str, row: Mapping[str, Any]) -> tuple[Layer, ...]:
    def of(name: str) -> dict[int, dict[str, Any]]:
        table = run.tables[name]
        part = table[(table["arm"] == arm) & (table["presentation"] == kind)]
        return {int(one["layer"]): one for one in part.to_dict("records")}

    probes, lens = of("probes"), of("lens")
    margins, seen = row.get("margins"), flags(row)
    return tuple(
        Layer(
            layer=layer,
            auroc=number(probes[layer]["auroc"]) if layer in probes else None,
            margin=None if seen is None or margins is None else number(margins[layer]),
            readable=None if seen is None else seen[layer],
            lens_delta=number(lens[layer]["delta"]) if layer in lens else None,
            lens_signal=number(lens[layer]["signal"]) if layer in lens else None,
        )
        for layer in sorted({*probes, *lens})
    )
