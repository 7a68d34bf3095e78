"""``probe compare RUN RUN``: two arms on the same items, whichever runs they come from; ``comparing_models`` takes more.

Two runs can be compared only where they asked the same things: the same family version, settings and instances, in the
same words. The prompts themselves are compared, since equal parameters of two versions may render differently. How
answers were drawn may differ (that can be the question); every such difference is named in the result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import RunError, UsageError
from experiments.profiles import REPEATED, contrast, paired
from experiments.rundir import RunDirectory, differences

if TYPE_CHECKING:
    import pandas as pd

STATISTICS = (
    "accuracy_original", "accuracy_equivalent", "invariance", "strict_invariance", "robust", "shared_wrong", "unstable",
    "kappa", "kappa_bar",
)  # fmt: skip
# A run may differ in these without asking something else. All but the first two are named where they differ.
FREE = ("digest", "command", "model", "adapter", "device", "dtype", "batch_tokens", "max_tokens", "max_tokens_reasoning",
        "temperature", "top_p", "top_k", "parser_version")  # fmt: skip

NEEDED = ("model", "family", "family_version", "parser_version", "seed", "split", "params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One arm of one run."""

    run: Path
    arm: str
    model: str
    table: pd.DataFrame

    @property
    def name(self) -> str:
        return f"{self.run}:{self.arm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences second − first.

    Attributes:
        pairs: by pair of presentations, each statistic with values, difference, interval, n and support.
        tests: McNemar on the accuracy of each presentation, Holm-adjusted over all presentations; without a p where an
            instance stands under several settings, since the test takes pairs as independent.
        notes: in what else the runs differ.
    """

    first: str
    second: str
    pairs: Mapping[str, Mapping[str, Any]]
    tests: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]


def side(reference: str) -> Side:
    """The arm that ``RUN`` or ``RUN:ARM`` names; without ARM it is the base.

    Raises:
        RunError, UsageError: no such run or arm.
    """
    path, _, arm = reference.rpartition(":") if not Path(reference).exists() else (reference, "", "base")
    folder = RunDirectory(Path(path or arm))
    if not (folder.path / "resolved.json").exists():
        raise RunError(f"{folder.path} has no resolved.json: give the folder of a run, or RUN:ARM")
    table = folder.table("behaviour")
    arms = list(dict.fromkeys(table["arm"]))
    if arm not in arms:
        raise UsageError(f"{folder.path} has no arm {arm!r}: it has {', '.join(arms)}")
    values = folder.read_json("resolved.json", keys=NEEDED)
    return Side(run=folder.path, arm=arm, model=values["model"], table=table[table["arm"] == arm])


def compare(first: Side, second: Side, *, resamples: int, seed: int, strata: str | None = None) -> Comparison:
    """Every statistic of both sides on every pair that both asked, with paired intervals of the difference.

    Args:
        strata: a family parameter; instances are then resampled within its values.

    Raises:
        RunError: the runs asked different things; what and where is named.
    """
    from experiments.statistics import holm, mcnemar

    one, two = (RunDirectory(each.run) for each in (first, second))
    values = [run.read_json("resolved.json", keys=NEEDED) for run in (one, two)]
    notes = differing(*values)
    if first.run != second.run:
        same_prompts(one, two)
    kinds = list(dict.fromkeys(first.table["presentation"]))
    rows = ["setting", "key"]
    found: dict[str, Any] = {}
    tests: dict[str, dict[str, Any]] = {}
    repeated = bool(first.table.duplicated(["key", "presentation"]).any())
    without = _without(one, kinds)
    for kind in kinds[1:]:
        pair = (kinds[0], kind)
        before, after = (_having(side.table, without.get(kind, set())) for side in (first, second))
        if kind in without:
            notes.append(f"{len(without[kind])} sets have no {kind} and no part in what is said of it")
        layers = _strata(paired(before, pair), values[0]["params"], strata)
        found["/".join(pair)] = contrast(
            before, after, pair=pair, statistics=STATISTICS, strata=layers, resamples=resamples, seed=seed
        )
    for kind in kinds:
        right = [side.table[side.table["presentation"] == kind].set_index(rows)["correct"] for side in (first, second)]
        test = mcnemar(right[0].tolist(), right[1].loc[right[0].index].tolist())
        p, reason = (math.nan, REPEATED) if repeated else (test.p, test.reason)
        tests[kind] = {"b": test.b, "c": test.c, "p": p, "n": test.n, "method": test.method, "reason": reason}
    for kind, p in holm({kind: test["p"] for kind, test in tests.items()}).items():
        tests[kind]["p_holm"] = p
    return Comparison(first=first.name, second=second.name, pairs=found, tests=tests, notes=tuple(notes))


def _without(run: RunDirectory, kinds: Sequence[str]) -> dict[str, set[tuple[str, str]]]:
    """Sets that lack a kind of presentation, by kind: a wording that would not be English is not rendered."""
    found: dict[str, set[tuple[str, str]]] = {}
    for record in run.records(run.items, keys=("setting", "key", "presentations")):
        rendered = {shown["kind"] for shown in record["presentations"]}
        for kind in kinds:
            if kind not in rendered:
                found.setdefault(kind, set()).add((record["setting"], record["key"]))
    return found


def _having(table: pd.DataFrame, without: set[tuple[str, str]]) -> pd.DataFrame:
    """The rows of the other sets."""
    if not without:
        return table
    return table[[row not in without for row in zip(table["setting"], table["key"], strict=True)]]


def differing(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str] = ("the first", "the second")
) -> list[str]:
    """What may differ between two runs and does; what may not is refused.

    Args:
        first, second: what the runs were asked, as in resolved.json.
        names: what the runs are called.

    Raises:
        RunError: naming what differs.
    """
    for key in ("family", "family_version", "seed", "split", "params"):
        # The first key that differs, however deep: two whole grids would look alike in one line.
        for place, one, other in differences(first.get(key), second.get(key), key):
            raise RunError(
                f"the two runs asked different things: {place} is {_short(one)} in {names[0]} and {_short(other)} in "
                f"{names[1]}; compare runs with the same items"
            )
    if first["parser_version"] != second["parser_version"]:
        raise RunError(
            f"the answers were read by parser version {first['parser_version']} in {names[0]} and "
            f"{second['parser_version']} in {names[1]}: bring both up to date with `probe score RUN`"
        )
    return [
        f"{key} is {_short(first.get(key))} in {names[0]} and {_short(second.get(key))} in {names[1]}"
        for key in FREE[2:]
        if first.get(key) != second.get(key)
    ]


def same_prompts(first: RunDirectory, second: RunDirectory) -> None:
    """Compare the items line by line, one set in memory at a time.

    Raises:
        RunError: naming the first line that differs.
    """
    keys = ("setting", "key", "presentations")
    ours, theirs = (run.records(run.items, keys=keys) for run in (first, second))
    for number, ahead in enumerate(ours, 1):
        other = next(theirs, None)
        if other is None:
            raise RunError(
                f"the two runs hold different items: {second.path} ends before line {number} of {first.path}"
            )
        if _asked(ahead) != _asked(other):
            raise RunError(
                f"the two runs hold different items: line {number} of items.jsonl is {ahead['setting']}, "
                f"{ahead['key'][:16]} in {first.path} and {other['setting']}, {other['key'][:16]} in {second.path}, or "
                "rendered differently"
            )
    if next(theirs, None) is not None:
        raise RunError(
            f"the two runs hold different items: {first.path} has fewer than {second.path}; use the same limit"
        )


def _asked(record: Mapping[str, Any]) -> str:
    shown = [[one["kind"], one["gold"], one["messages"]] for one in record["presentations"]]
    return hashlib.sha256(json.dumps([record["setting"], record["key"], shown]).encode()).hexdigest()


def _strata(pairs: pd.DataFrame, params: Mapping[str, Mapping[str, Any]], strata: str | None) -> Sequence[str] | None:
    if strata is None:
        return None
    known = {label: one.get(strata) for label, one in params.items()}
    if any(value is None for value in known.values()):
        allowed = ", ".join(next(iter(params.values())))
        raise UsageError(f"strata is {strata!r}: choose a parameter of the runs' settings: {allowed}")
    return [str(known[setting]) for setting in pairs["setting"]]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
