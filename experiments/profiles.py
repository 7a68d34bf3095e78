"""Behaviour tables summed up: the competence profile of an arm, and the contrast of two arms on the same items.

Both start from pairs of presentations of one instance. A table that holds a row twice, or one half of a pair only, would
give numbers about something else, so it is refused, naming the row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError
from experiments.items import PAIR
from experiments.pairing import as_answers_to_first, flips
from experiments.statistics import (
    Arm,
    accuracy_bounds,
    cell_table,
    compare_arms,
    coverage,
    crossing,
    detectable_difference,
    frechet,
    holm,
    identities,
    kappa_bar,
    pair_interval,
    pair_profile,
    repeat_agreement,
    share,
    unanimous,
)

if TYPE_CHECKING:
    import pandas as pd

REPEATED = "an instance counts in several settings: pairs are not independent"
CONTRASTS = ("accuracy_original", "accuracy_equivalent", "invariance", "robust", "kappa")


def paired(table: pd.DataFrame, pair: Sequence[str] = PAIR) -> pd.DataFrame:
    """One row a pair: setting, key, n, cell, gold and the two answers, None where not read; in item order.

    Where the second presentation flips the gold answer, its answers are turned (see ``pairing``) and ``turned`` is true.

    Args:
        table: behaviour of one arm.
        pair: the kinds compared; their answers are the columns ``original`` and ``equivalent``, in this order.

    Raises:
        RunError: a row stands twice, a partner is missing, or the gold answer is flipped in some pairs only.
    """
    row = ["setting", "key"]
    halves = []
    for kind in pair:
        half = table[table["presentation"] == kind].set_index(row)
        if not len(half):
            present = ", ".join(dict.fromkeys(table["presentation"]))
            raise RunError(f"the table has no presentation {kind!r}: it has {present}")
        if not half.index.is_unique:
            setting, key = half.index[half.index.duplicated()][0]
            raise RunError(f"the row {setting}, {key[:16]}, {kind} stands twice: each may stand once")
        halves.append(half)
    first, second = halves
    alone = first.index.symmetric_difference(second.index)
    if len(alone):
        setting, key = alone[0]
        raise RunError(f"{setting}, {key[:16]} has one of {pair[0]} and {pair[1]} only: a pair needs both")
    second = second.loc[first.index]
    flipped = flips(first["gold"], second["gold"], told=lambda place: _told(first.index[place], pair[1]))
    joined = first[["n", "cell", "gold"]].assign(
        original=as_answers_to_first(first["answer"], flipped=False),
        equivalent=as_answers_to_first(second["answer"], flipped=flipped),
        turned=flipped,
    )
    return joined.reset_index()


def _told(row: tuple[str, str], kind: str) -> str:
    return f"{row[0]}, {row[1][:16]}, {kind}"


def profile(table: pd.DataFrame, pair: Sequence[str] = PAIR, *, resamples: int, seed: int) -> dict[str, Any]:
    """Competence profile of one arm: one entry a setting, all settings together, and the mean κ over settings.

    ``turned`` says that the second presentation flips the gold answer, so that its answers were turned.

    An instance may stand under several settings (two relations, say). Its rows are not independent, so the intervals over
    all settings are then bootstrapped over instances, and McNemar's p, which has no such form, is missing.
    """
    pairs = paired(table, pair)
    profiles: dict[str, Any] = {}
    for setting, part in [*pairs.groupby("setting", sort=False), ("all", pairs)]:
        one = pair_profile(part["original"].tolist(), part["equivalent"].tolist(), part["gold"].tolist())
        profiles[str(setting)] = dataclasses.asdict(one)
    # Over settings, which are the sizes where nothing else is swept; a table's κ̄ pools what is swept beside n.
    bar = kappa_bar(pairs["setting"].tolist(), pairs["original"].tolist(), pairs["equivalent"].tolist())
    reason = "" if np.isfinite(bar.value) else f"kappa is undefined in all {len(bar.by_size)} settings"
    adjusted = holm({name: one["mcnemar"]["p"] for name, one in profiles.items() if name != "all"})
    for name, p in adjusted.items():
        profiles[name]["mcnemar"]["p_holm"] = p
    repeated = len(pairs) - pairs["key"].nunique()
    profiles["all"]["note"] = ""
    if repeated:
        _by_instance(profiles["all"], pairs, resamples=resamples, seed=seed)
        profiles["all"]["note"] = (
            f"{repeated} of {len(pairs)} pairs are instances that stand under another setting too: intervals over all "
            "settings are bootstrapped over instances, with all rows of an instance"
        )
    return {
        "profile": profiles,
        "kappa_bar": {"value": bar.value, "n": bar.n, "support": bar.support,
                      "method": "mean over settings of kappa within the setting", "reason": reason,
                      "undefined": list(bar.undefined)},
        "turned": bool(pairs["turned"].any()),
    }  # fmt: skip


def _by_instance(whole: dict[str, Any], pairs: pd.DataFrame, *, resamples: int, seed: int) -> None:
    """Put intervals over instances in the place of those that take rows as independent."""
    right = {kind: pairs[kind] == pairs["gold"] for kind in PAIR}
    read = {kind: pairs[kind].notna() for kind in PAIR}
    both, same = read["original"] & read["equivalent"], pairs["original"] == pairs["equivalent"]
    every = read["original"] | True
    wholes = [(whole["strict_invariance"], both & same, every)]
    for kind in PAIR:
        wholes += [
            (whole[kind]["parsed"], read[kind], every),
            (whole[kind]["accuracy"], right[kind], every),
            (whole[kind]["accuracy_parsed"], right[kind], read[kind]),
            (whole[kind]["yes_rate"], pairs[kind] == "yes", read[kind]),
            *((whole[kind][f"accuracy_{gold}"], right[kind], pairs["gold"] == gold) for gold in ("yes", "no")),
            (whole[f"common_{kind}"], right[kind], both),
        ]
    wholes += [
        (whole["invariance"], same, both),
        (whole["robust"], right["original"] & right["equivalent"], both),
        (whole["shared_wrong"], ~right["original"] & ~right["equivalent"], both),
        (whole["unstable"], right["original"] ^ right["equivalent"], both),
    ]
    for one, event, of in wholes:
        _over_instances(one, event, pairs, of, resamples=resamples, seed=seed)
    whole["mcnemar"].update(p=math.nan, reason=REPEATED)


def _over_instances(
    one: dict[str, Any], event: pd.Series, pairs: pd.DataFrame, of: pd.Series, *, resamples: int, seed: int
) -> None:
    """Give a share of the rows `of` the interval of a bootstrap over instances, each with all its rows."""
    if not one["n"]:
        return
    same = unanimous(one["count"], one["n"], pairs["key"].tolist())
    if same is not None:
        one.update(low=same.low, high=same.high, method=same.method)
        return
    # The share of an event is the yes-rate of a column that says yes where it happens and is missing where none counts.
    said = event.map({True: "yes", False: "no"}).astype(object).where(of, None).tolist()
    found = pair_interval(
        said, said, pairs["gold"].tolist(), statistics=("yes_rate_original",), sizes=pairs["setting"].tolist(),
        clusters=pairs["key"].tolist(), resamples=resamples, seed=seed,
    )["yes_rate_original"]  # fmt: skip
    one.update(low=found.low, high=found.high, method=found.method, reason=found.reason)


def details(
    table: pd.DataFrame, pair: Sequence[str] = PAIR, *, threshold: float, resamples: int, seed: int
) -> dict[str, Any]:
    """What else the answers of one arm say about a pair, all settings together.

    Args:
        threshold: of the invariance whose crossing over n is looked for.

    Returns:
        Accuracy and yes-rate by cell; the interval that the accuracies alone leave for R; the identities between the
        numbers of a profile, evaluated; accuracy if every unread answer were right or wrong; repeat agreement where the
        original was sent again; the size at which ι falls below the threshold, and whether fresh data would say the same;
        the smallest paired difference that this many pairs can show.
    """
    pairs = paired(table, pair)
    first, second, gold = (pairs[name].tolist() for name in (*PAIR, "gold"))
    chosen: Any = {"resamples": resamples, "seed": seed}
    clusters = None if pairs["key"].is_unique else pairs["key"].tolist()
    found: dict[str, Any] = {
        "cells": {kind: _plain(cell_table(pairs[name].tolist(), gold, pairs["cell"].tolist()))
                  for kind, name in zip(pair, PAIR, strict=True)},
        "frechet": dataclasses.asdict(frechet(first, second, gold)),
        "identities": dataclasses.asdict(identities(first, second, gold)),
        "bounds": {kind: dataclasses.asdict(accuracy_bounds(pairs[name].tolist(), gold))
                   for kind, name in zip(pair, PAIR, strict=True)},
    }  # fmt: skip
    if clusters is not None:
        for kind, name in zip(pair, PAIR, strict=True):
            right, answered = pairs[name] == pairs["gold"], pairs[name].notna()
            for cell, scores in found["cells"][kind].items():
                here = pairs["cell"].astype(str) == cell
                _over_instances(scores["accuracy"], right, pairs, here, **chosen)
                _over_instances(scores["yes_rate"], pairs[name] == "yes", pairs, here & answered, **chosen)
                _over_instances(scores["parsed"], answered, pairs, here, **chosen)
            _over_instances(found["bounds"][kind]["all_prompts"], right, pairs, answered | True, **chosen)
            _over_instances(found["bounds"][kind]["parsed_only"], right, pairs, answered, **chosen)
    if "repeat" in set(table["presentation"]) and pair[0] == "original" and pair[1] != "repeat":
        again = paired(table, ("original", "repeat"))["equivalent"].tolist()
        found["repeat"] = dataclasses.asdict(repeat_agreement(first, again, second, clusters=clusters, **chosen))
    read = pairs.dropna(subset=list(PAIR))
    if pairs["n"].nunique() > 1:
        by_size = (read["original"] == read["equivalent"]).groupby(read["n"]).agg(["mean", "size"])
        at = crossing(
            [int(size) for size in by_size.index],
            by_size["mean"].tolist(),
            by_size["size"].tolist(),
            threshold=threshold,
            seed=seed,
        )
        found["crossing"] = {
            **dataclasses.asdict(at),
            "distribution": {"never" if size is None else str(size): one for size, one in at.distribution.items()},
        }
    if len(read):
        differing = float((read["original"] != read["equivalent"]).mean())
        found["detectable"] = dataclasses.asdict(detectable_difference(differing, len(read)))
    return found


def _plain(scores: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): dataclasses.asdict(score) for name, score in scores.items()}


def reading(table: pd.DataFrame) -> dict[str, Any]:
    """How many answers of one arm could be read: counts of each status by presentation, and the share unread."""
    kinds = dict.fromkeys(table["presentation"])
    status = table.groupby(["presentation", "status"]).size()
    unread = int(table["answer"].isna().sum())
    return {
        "status": {kind: {str(s): int(c) for s, c in status[kind].items()} for kind in kinds},
        "unparsed": share(unread, len(table)),
    }


def unread(table: pd.DataFrame, pair: Sequence[str] = PAIR) -> dict[str, Any]:
    """Unread and truncated answers of each arm to a pair, tested for asymmetry between arms and between presentations."""
    part = table[table["presentation"].isin(list(pair))]
    arms = {arm: rows["status"].tolist() for arm, rows in part.groupby("arm", sort=False)}
    one = part[part["arm"] == next(iter(arms))]
    names = (one["setting"] + " " + one["key"]).tolist()
    found = dataclasses.asdict(coverage(arms, presentations=one["presentation"].tolist(), keys=names))
    if one.duplicated(["key", "presentation"]).any():
        for test in (*found["between_arms"], *found["between_presentations"]):
            test.update(p=math.nan, p_holm=math.nan, reason=REPEATED)
    return found


def contrast(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    resamples: int,
    seed: int,
    pair: Sequence[str] = PAIR,
    statistics: Sequence[str] = CONTRASTS,
    strata: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Differences after − before of two arms' statistics, with paired intervals over instances.

    An instance that stands under several settings (two relations, say) is resampled with all its rows.

    Args:
        before, after: behaviour of one arm each, on the same items.
        strata: one a pair of ``paired(before)``; resample within them.

    Raises:
        RunError: the items differ; the row is named.
    """
    first, second = paired(before, pair), paired(after, pair)
    same_items(first, second)
    found = compare_arms(
        Arm(first["original"].tolist(), first["equivalent"].tolist()),
        Arm(second["original"].tolist(), second["equivalent"].tolist()),
        first["gold"].tolist(),
        statistics=statistics,
        sizes=first["setting"].tolist(),
        strata=strata,
        clusters=None if first["key"].is_unique else first["key"].tolist(),
        resamples=resamples,
        seed=seed,
    )
    return {name: dataclasses.asdict(one) for name, one in found.items()}


def same_items(first: pd.DataFrame, second: pd.DataFrame) -> None:
    """Two paired tables have to be about the same items, in the same order.

    Raises:
        RunError: naming the first row that differs.
    """
    columns = ["setting", "key", "gold"]
    if len(first) == len(second) and first[columns].equals(second[columns]):
        return
    ours, theirs = (set(table[columns].itertuples(index=False, name=None)) for table in (first, second))
    for setting, key, _ in sorted(ours ^ theirs):
        place = "first" if any(row[:2] == (setting, key) for row in ours) else "second"
        raise RunError(
            f"the two runs hold different items: {setting}, {key[:16]} is in the {place} only, or with another gold "
            "answer; compare runs with the same family, params, seed, split and limit"
        )
    raise RunError("the two runs hold the same items in another order: compare runs made by this version")
