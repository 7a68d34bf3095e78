"""How often each label of `probes.failures` occurs, and how often it comes back.

Problem. "Two thirds of the failures are overridden" is worth something only beside its interval, beside what verdicts
without any content would give, and beside how often the same rows get the same label from another fit.

Mechanism. `shares` counts labels among the failed rows of a stratum, with Wilson's interval. Rows of one instance are not
independent, so the interval is that of as many observations as there are instances. The *coin* is the share to expect if
each failed instance's verdicts, all layers together, were right or wrong by the toss of a coin (`Failures.tossed`). A share
near its coin says nothing about these rows.

`calibration` asks two questions of every label, as one fold split gives it (`mixed` is then a row with an open layer):

* *fold split*: of the rows with this label under the study's folds, how often does another fold split give it? Refits
  share most of their training rows, so this is an upper bound;
* *half*: the instances are dealt at random into two halves, each label as evenly as it goes. Probes are fitted within each
  half, in folds. A row is judged by the probe of its own half that held it out, and by a probe of the other half, to which
  its instance is unknown. The two have no training row in common. Of the rows that the first gives this label, how often
  does the second give it too? Layers count as decodable by the whole data, the layer is chosen within each half. Each
  probe trains on half of the rows, so this errs on the low side for the labels of the whole data.

Beside each stands `base`, the share of that label among all second verdicts: what would come back if the second knew
nothing of the first. Labels depend on the other failed rows through t, so the second verdict is the whole list anew. The
sign of the signal is no part of either check, since it does not depend on the probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, IntArray, binary, checked, same_rows
from probes.failures import LABELS, Failures, decodable_layers, one_split
from probes.folds import group_codes
from probes.keyed import generator
from probes.linear import ProbeResult, fit_probes
from probes.readings import Reading

CHECKS = ("fold split", "half")
FEWEST = 2  # instances of either gold answer that a fold of a half needs on average


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelShare:
    """`count` of the `n` failed rows of a stratum have this label; `support` rows lie in it altogether.

    `coin` is the share to expect from tossed verdicts, NaN if none were given. Without a failed row all shares are NaN,
    with a `reason`.
    """

    stratum: str
    value_of: Any
    label: str
    value: float
    low: float
    high: float
    coin: float
    count: int
    n: int
    instances: int
    support: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Of `n` rows with this label, the share `value` that gets it again under `check`, one of `CHECKS`.

    `base` is the label's share among all second verdicts. NaN with a `reason` where no row has the label.
    """

    check: str
    label: str
    value: float
    low: float
    high: float
    base: float
    n: int
    instances: int
    method: str
    reason: str = ""


def shares(
    labels: npt.ArrayLike,
    strata: Mapping[str, Sequence[Any]],
    *,
    groups: npt.ArrayLike | None = None,
    tossed: npt.ArrayLike | None = None,
    level: float = 0.95,
) -> tuple[LabelShare, ...]:
    """Count each of `LABELS` among the failed rows, over all rows (stratum "all") and in each value of each stratum.

    Args:
        labels: [row] as `Failures.label`.
        strata: [row] values by name; a tuple as value crosses several.
        groups: [row] instances; without it each row is one.
        tossed: [row, label] as `Failures.tossed`.
    """
    words = checked("labels", labels, ("row",)).astype(str)
    chance = None if tossed is None else checked("tossed", tossed, ("row", "label")).astype(np.float64)
    codes = np.arange(len(words)) if groups is None else group_codes(groups)
    for name, count in (("groups", len(codes)), ("tossed", len(words) if chance is None else len(chance))):
        same_rows(name, count, "labels", len(words))
    failed = np.isin(words, LABELS)
    found: list[LabelShare] = []
    for name, values in {"all": ["all"] * len(words), **strata}.items():
        same_rows(f"stratum {name!r}", len(values), "labels", len(words))
        for value in dict.fromkeys(values):
            inside = np.array([one == value for one in values])
            rows = inside & failed
            n, instances = int(rows.sum()), len(np.unique(codes[rows]))
            for code, label in enumerate(LABELS):
                count = int((words[rows] == label).sum())
                low, high = wilson(count, n, instances, level)
                coin = float(chance[rows, code].mean()) if chance is not None and n else np.nan
                found.append(
                    LabelShare(
                        stratum=name, value_of=value, label=label, value=count / n if n else np.nan, low=low, high=high,
                        coin=coin, count=count, n=n, instances=instances, support=int(inside.sum()),
                        method=_wilson_method(level), reason="" if n else "no readout is wrong here",
                    )
                )  # fmt: skip
    return tuple(found)


def calibration(
    features: npt.NDArray[np.floating[Any]],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    result: ProbeResult,
    failures: Failures,
    halves: int = 2,
    level: float = 0.95,
    seed: int,
    **fit: Any,
) -> tuple[Survival, ...]:
    """How often each label of the failed rows comes back from other fold splits and from another half of the data.

    Args:
        features, labels, groups, result, fit: as for `label_failures`, whose answer is `failures`. The fold splits are
            those that voted there.
        halves: how often the instances are dealt into halves; values are means over the deals, intervals those of one.
            Each deal costs 2 x folds fits a layer on half of the rows.
    """
    target, codes = binary("labels", labels), group_codes(groups)
    rows = np.flatnonzero(failures.failed)
    count = result.fold_auroc.shape[1]
    usable = decodable_layers(result.auroc, result.null)
    signal = np.where(failures.reads, failures.signal, np.nan)

    def verdict(margins: npt.NDArray[Any], chosen: IntArray, layer_ok: BoolArray) -> IntArray:
        return one_split(margins[:, rows], layer_ok, chosen[rows], target[rows], signal[rows], codes[rows])

    splits = failures.causes[:, rows]
    pairs = [(splits[0], other) for other in splits[1:]]
    found = _survival("fold split", pairs, codes[rows], level, "" if pairs else "one fold split was asked for")
    reason, deals = _too_few(target, codes, count), []
    if fit.get("held_out") is not None:
        reason = "folds hold out whole units, of which a half has too few"
    for deal in range(0 if reason else halves):
        first, second = half_verdicts(features, target, codes, folds=count, seed=seed, deal=deal, **fit)
        deals.append((verdict(*first, usable), verdict(*second, usable)))
    return (*found, *_survival("half", deals, codes[rows], level, reason))


def half_verdicts(
    features: npt.NDArray[np.floating[Any]],
    labels: IntArray,
    groups: IntArray,
    *,
    folds: int,
    seed: int,
    deal: int = 0,
    **fit: Any,
) -> tuple[tuple[npt.NDArray[Any], IntArray], tuple[npt.NDArray[Any], IntArray]]:
    """Margins [layer, row] and chosen layers [row] by the own half's held-out probes, and by the other half's."""
    half = deal_halves(labels, groups, seed=seed, deal=deal)
    shape = np.shape(features)[:2]
    margins = np.zeros((2, *shape))
    chosen = np.zeros((2, shape[1]), dtype=np.int64)
    for side in (0, 1):
        inside, outside = np.flatnonzero(half == side), np.flatnonzero(half != side)
        rest = Reading(features=features[:, outside], labels=labels[outside], groups=groups[outside])
        probes = fit_probes(
            features[:, inside], labels[inside], groups[inside], readings={"rest": rest},
            seed=int(generator(seed, "probes.failures.half", deal, side).integers(2**62)),
            **{"folds": folds, **_by_row(fit, inside), "shuffles": 0},
        )  # fmt: skip
        read = probes.readings["rest"]
        margins[0][:, inside], margins[1][:, outside] = probes.margins, read.margins
        chosen[0][inside], chosen[1][outside] = probes.chosen_layer[probes.folds], probes.chosen_layer[read.folds]
    return (margins[0], chosen[0]), (margins[1], chosen[1])


def deal_halves(labels: IntArray, groups: IntArray, *, seed: int, deal: int) -> IntArray:
    """Return 0 or 1 for each row: instances dealt in turn, in a random order within those of one gold answer."""
    order = generator(seed, "probes.failures.deal", deal).permutation(int(groups.max()) + 1)
    mean = np.bincount(groups, weights=labels) / np.bincount(groups)
    side = np.empty(len(order), dtype=np.int64)
    turn = 0
    for kind in np.unique(mean):
        for group in order[mean[order] == kind]:
            side[group] = turn % 2
            turn += 1
    return side[groups]


def wilson(count: float, n: int, instances: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of count / n, as wide as for `instances` observations; NaN if there are none."""
    from statsmodels.stats.proportion import proportion_confint

    if n == 0:
        return np.nan, np.nan
    low, high = proportion_confint(count / n * instances, instances, alpha=1 - level, method="wilson")
    # At 0 and n an end is 0 or 1 exactly; rounding puts it a little beside.
    return (0.0 if count == 0 else float(low)), (1.0 if count == n else float(high))


def _wilson_method(level: float) -> str:
    return f"share of failed rows, Wilson {level:.0%} over instances"


def _survival(
    check: str, pairs: Sequence[tuple[IntArray, IntArray]], groups: IntArray, level: float, reason: str
) -> list[Survival]:
    """Pool pairs of verdicts: each pair is about the same rows, so more pairs steady the value and add no rows."""
    if not reason and len(groups) == 0:
        reason = "no readout is wrong here"
    found = []
    for code in range(len(LABELS)):
        having = sum(int((first == code).sum()) for first, _ in pairs)
        again = sum(int(((first == code) & (second == code)).sum()) for first, second in pairs)
        n = round(having / len(pairs)) if pairs else 0
        instances = round(np.mean([len(np.unique(groups[first == code])) for first, _ in pairs])) if pairs else 0
        value = again / having if having else np.nan
        low, high = wilson(value * n, n, max(instances, 1), level) if having and n else (np.nan, np.nan)
        base = float(np.mean([(second == code).mean() for _, second in pairs])) if pairs and len(groups) else np.nan
        found.append(
            Survival(
                check=check, label=LABELS[code], value=value, low=low, high=high, base=base, n=n, instances=instances,
                method=f"{check}: mean of {len(pairs)}, Wilson {level:.0%} over instances",
                reason=reason if reason or having else "no failed row has this label",
            )
        )  # fmt: skip
    return found


def _too_few(labels: IntArray, groups: IntArray, folds: int) -> str:
    """Why halves can't be fitted, or nothing."""
    fewest = min(len(np.unique(groups[labels == answer])) for answer in (0, 1))
    if fewest >= 2 * FEWEST * folds:
        return ""
    return f"{fewest} instances of one gold answer; halves in {folds} folds need {2 * FEWEST * folds}"


def _by_row(fit: Mapping[str, Any], rows: IntArray) -> dict[str, Any]:
    """Arguments of a fit, the one that has a value a row cut to some rows."""
    return {name: np.asarray(value)[rows] if name == "strata" and value is not None else value
            for name, value in fit.items()}  # fmt: skip
