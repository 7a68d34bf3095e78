"""What a model can still do without some of its heads: competence and agreement, before and after.

Problem. Ablating four heads can raise the agreement of two presentations from 81 to 93 % while fewer answers are right: a
model that says "yes" to everything agrees with itself always. A report that shows agreement alone calls this a repair.

Mechanism. Both presentations of every instance are run as they are and with each set of heads ablated, and all measures
come from the same readouts (yes minus no):

=====================  ================================================================================================
signal s               half the difference of the readout between gold-yes and gold-no cells, of each presentation
default δ              mean readout over cells, of each presentation
accuracy               share of readouts with the gold answer's sign, of each presentation
invariance             R + D: both presentations right, or both wrong
robust, shared_wrong,  R, D and U: both right, both wrong, exactly one right
unstable
share_removed          1 - s after / s before, of each presentation and of their mean
=====================  ================================================================================================

An instance is drawn with its presentations, before and after, under every set, within its cell. So the interval of a change
or of the top set's change less the controls' is paired throughout. Ends are moved out by Student's t where few instances
decide the width, with the degrees of freedom of the statistic's own variance (Satterthwaite, from leaving out instances).

``agreement_without_competence`` marks a set after which invariance is higher and accuracy or signal lower, each with an
interval that excludes 0; ``note`` gives the numbers, also where only the estimates say so.

Constraints. Each key has one row of each presentation. The design needs cells of both gold answers, else δ and s are NaN
with a reason. ``share_removed`` is NaN where s before is not larger than a margin that is fixed beforehand, as the mean of
both presentations is where a model reads one of them the wrong way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patching.controls import keyed_generator
from patching.edits import PatchError
from patching.heads_measures import MEASURES, SHARES_REMOVED, SIGNALS, STATISTICS, Design, freedom
from patching.statistics import Interval, check_level

_ELEMENTS = 1 << 22
_NOTHING = Interval(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True, slots=True)
class Change:
    """A measure before and after, and its change, paired by instance."""

    before: Interval
    after: Interval
    change: Interval


@dataclass(frozen=True, slots=True)
class Ablation:
    """What one set of heads does.

    Attributes:
        measures: by name, see the module's docstring.
        share_removed: share of the signal that is gone, of the ``original``, the ``equivalent`` and the ``mean``; below 0
            if there is more.
        agreement_without_competence: invariance up while accuracy or signal is down, both beyond their intervals.
        note: the same in a sentence with numbers; empty where invariance did not rise, or nothing fell with it.
    """

    measures: Mapping[str, Change]
    share_removed: Mapping[str, Interval]
    agreement_without_competence: bool
    note: str


@dataclass(frozen=True, slots=True)
class AblationStudy:
    """Sets of ablated heads side by side.

    Attributes:
        sets: each set's own effects.
        above: for each control (``random``, ``same layers``) and measure the change by ``top`` less the mean change by
            the control's sets.
        added: for each member of the top set what it adds to the others: change by ``top`` less that without it.
        rank_p: for each control (1 + sets that remove as large a share of the mean s as ``top``) / (1 + sets).
        n, n_groups: pairs and instances; ``reason`` says why a measure is NaN.
    """

    sets: Mapping[str, Ablation]
    above: Mapping[str, Mapping[str, Interval]]
    added: Mapping[str, Mapping[str, Interval]]
    rank_p: Mapping[str, float]
    n: int
    n_groups: int
    method: str
    reason: str


def ablation_study(
    before: np.ndarray,
    after: Mapping[str, np.ndarray],
    *,
    presentations: Sequence[str],
    keys: Sequence[Any],
    cells: Sequence[str],
    gold: np.ndarray,
    groups: Sequence[Any] | None = None,
    signal_margin: float = 0.1,
    seed: int,
    resamples: int = 2000,
    level: float = 0.95,
) -> AblationStudy:
    """Compare readouts with each set of heads ablated to those without ablation.

    Args:
        before: ``[row]`` readout, yes minus no.
        after: ``[row]`` readout by set; names as ``heads.head_sets`` makes them put the controls together.
        presentations: ``original`` or ``equivalent`` for each row.
        keys: the pair of each row: one row of each presentation.
        cells: the cell of each row, the same for both presentations.
        gold: 1 (yes) or -1 (no) for each row.
        groups: the instance of each row, where one instance makes several pairs; without it a pair is an instance.
        signal_margin: logits that the size of s must exceed before ablation for ``share_removed`` to be defined.
    """
    check_level(level, resamples)
    if not after:
        raise PatchError("no ablated readouts to compare; give at least one set of heads")
    design = Design.of(before, after, presentations, keys, cells, gold, groups)
    names = list(after)

    def spread(totals: np.ndarray) -> np.ndarray:
        """Everything that gets an interval, ``[..., statistic]``, from totals ``[..., total]``."""
        values = design.values(totals)  # [..., arm, measure]
        changes = design.changes(values)  # [..., set, statistic]
        parts = [values.reshape(*totals.shape[:-1], -1), changes.reshape(*totals.shape[:-1], -1)]
        for members in contrasts.values():
            parts.append(changes[..., 0, :] - changes[..., members, :].mean(axis=-2))
        return np.concatenate(parts, axis=-1)

    contrasts: dict[str, list[int]] = {}
    if names[0] == "top":
        for number, name in enumerate(names[1:], start=1):
            family = name.rpartition(" ")[0]
            contrasts.setdefault(name if family == "top without" else family, []).append(number)
    whole = design.columns.sum(axis=0)
    estimate = spread(whole)
    without = spread(whole - design.columns)
    degrees = freedom(without, design.stratum)
    drawn = np.concatenate([spread(counts @ design.columns) for counts in _draws(design.stratum, resamples, seed)])
    low, high = _ends(drawn, degrees, _widening(design.stratum), level)
    intervals = [Interval(*map(float, one)) for one in zip(estimate, low, high, strict=True)]

    arms, width = 1 + len(names), len(STATISTICS)
    own = [intervals[arm * len(MEASURES) : (arm + 1) * len(MEASURES)] for arm in range(arms)]
    start = arms * len(MEASURES)
    changed = [intervals[start + number * width : start + (number + 1) * width] for number in range(len(names))]
    start += len(names) * width
    between = {
        name: dict(zip(STATISTICS, intervals[start + number * width : start + (number + 1) * width], strict=True))
        for number, name in enumerate(contrasts)
    }
    reasons = [design.reason] if design.reason else []
    for name, removed in zip(SIGNALS, SHARES_REMOVED, strict=True):
        signal = own[0][MEASURES.index(name)].value
        if not abs(signal) > signal_margin and not design.reason:
            reasons.append(f"{removed} is undefined: {name} is {signal:.3g}, within the margin {signal_margin:g}")
            for one in between.values():
                one[removed] = _NOTHING
            for row in changed:
                row[STATISTICS.index(removed)] = _NOTHING
    sets = {name: _described(own[0], own[1 + number], changed[number]) for number, name in enumerate(names)}
    shares = np.array([sets[name].share_removed["mean"].value for name in names])
    return AblationStudy(
        sets=sets,
        above={name: one for name, one in between.items() if not name.startswith("top without")},
        added={
            name.removeprefix("top without "): one for name, one in between.items() if name.startswith("top without")
        },
        rank_p={
            name: (1 + int((shares[members] >= shares[0]).sum())) / (1 + len(members))
            if np.isfinite(shares).all()
            else float("nan")
            for name, members in contrasts.items()
            if not name.startswith("top without")
        },
        n=design.n,
        n_groups=len(design.columns),
        method=(
            f"before and after on the same instances; {level:.0%} bootstrap over instances"
            f"{' within cells' if design.stratum.any() else ''} ({resamples} resamples), ends moved out by t"
        ),
        reason="; ".join(reasons),
    )


def _draws(stratum: np.ndarray, resamples: int, seed: int) -> list[np.ndarray]:
    """Blocks ``[resample, instance]`` of how often each instance is drawn, within its stratum."""
    sizes = np.bincount(stratum)
    members = [np.flatnonzero(stratum == number) for number in range(len(sizes))]
    streams = [keyed_generator("heads.ablation", seed, number) for number in range(len(sizes))]
    block = max(1, _ELEMENTS // max(len(stratum), 1))
    found = []
    for start in range(0, resamples, block):
        counts = np.zeros((min(block, resamples - start), len(stratum)))
        for rng, rows in zip(streams, members, strict=True):
            counts[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=len(counts))
        found.append(counts)
    return found


def _widening(stratum: np.ndarray) -> float:
    """What resamples lack in spread: drawing n of n instances gives the variance with n in place of n - 1, per stratum."""
    strata = len(np.bincount(stratum))
    return float(np.sqrt(len(stratum) / (len(stratum) - strata))) if len(stratum) > strata else float("nan")


def _ends(drawn: np.ndarray, degrees: np.ndarray, widening: float, level: float) -> tuple[np.ndarray, np.ndarray]:
    from scipy.special import ndtr, stdtrit

    tail = (1 - level) / 2
    tails = ndtr(widening * stdtrit(np.minimum(degrees, 1e6), tail))
    low, high = np.full(drawn.shape[1], np.nan), np.full(drawn.shape[1], np.nan)
    for column, outer in enumerate(tails):
        defined = drawn[np.isfinite(drawn[:, column]), column]
        if len(defined) and np.isfinite(outer):
            low[column], high[column] = np.quantile(defined, [outer, 1 - outer])
    return low, high


def _described(before: Sequence[Interval], after: Sequence[Interval], changed: Sequence[Interval]) -> Ablation:
    measures = {name: Change(before[i], after[i], changed[i]) for i, name in enumerate(MEASURES)}
    removed = {name.removeprefix("share_removed_"): changed[STATISTICS.index(name)] for name in SHARES_REMOVED}
    agreement, accuracy, signal = (measures[name] for name in ("invariance", "accuracy_mean", "signal_mean"))
    falling = [one for one in (accuracy, signal) if one.change.value < 0 and one.before.value > 0]
    if not (agreement.change.value > 0 and falling):
        return Ablation(measures, removed, False, "")
    established = agreement.change.low > 0 and any(one.change.high < 0 for one in falling)
    first, second = measures["accuracy_original"], measures["accuracy_equivalent"]
    parts = [
        f"invariance {_percent(agreement.before)} → {_percent(agreement.after)} % ({_points(agreement.change)})",
        f"accuracy {_percent(first.before)}/{_percent(second.before)} → {_percent(first.after)}/"
        f"{_percent(second.after)} % (mean {_points(accuracy.change)})",
        f"signal {signal.before.value:.2f} → {signal.after.value:.2f} logits ({signal.change.value:+.2f}, "
        f"{signal.change.low:+.2f} to {signal.change.high:+.2f})",
    ]
    verdict = "more agreement with less competence" if established else "by the estimates only: intervals hold 0"
    return Ablation(measures, removed, established, f"{'; '.join(parts)}: {verdict}")


def _percent(one: Interval) -> str:
    return f"{100 * one.value:.1f}"


def _points(one: Interval) -> str:
    return f"{100 * one.value:+.1f}, {100 * one.low:+.1f} to {100 * one.high:+.1f}"
