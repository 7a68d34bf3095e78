"""Paired statistics of answers: how often they are right, how often two presentations agree, and what changed.

Problem. Two presentations of one instance can have the same accuracy and still answer different instances. The marginal
scores leave open whether a model is right in both, wrong in both, or right in one only; matched pairs decide it.

On the pairs whose two answers parsed (the support), with gold the same in both presentations:

* R, D, U are the shares with both right, both wrong, exactly one right, so R + D + U = 1;
* invariance ι = R + D, and mean accuracy (A0 + A1) / 2 = R + U / 2 = 1/2 + (R - D) / 2;
* q is the yes-rate over both presentations, ι_e = q² + (1 - q)² the agreement of independent answers with that rate,
  and κ = (ι - ι_e) / (1 - ι_e). A constant output has no κ: it is NaN, with the reason.

Accuracy counts an answer that did not parse as wrong, on all prompts. Strict invariance counts it as a disagreement, on
all pairs. Shares carry Wilson intervals; comparisons of two arms resample instances, carrying all of an instance's
answers along (`compare_arms`), since arms that answered the same instances are not independent samples.

Answers are "yes", "no", or missing (None or NaN) where nothing was parsed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import RunError
from probes.keyed import generator

_CODES, _MISSING = {"yes": 1, "no": 0}, -1
_EXACT_UP_TO = 25  # discordant pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`count` of `n`, with a Wilson interval; NaN with a `reason` if n is 0."""

    value: float
    low: float
    high: float
    count: int
    n: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentationScore:
    """One presentation of `n` prompts, `parsed.count` of them answered.

    Accuracies are over all prompts, `accuracy_yes` and `accuracy_no` over those with that gold answer; `yes_rate` is
    over the parsed ones. `floor` is the lower of the two accuracies by gold, `bias` is yes less no.
    """

    n: int
    parsed: Share
    accuracy: Share
    accuracy_yes: Share
    accuracy_no: Share
    yes_rate: Share
    floor: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemar:
    """Test of two marginal accuracies on the same `n` items; `b` first right only, `c` second right only."""

    b: int
    c: int
    p: float
    n: int
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kappa:
    """Chance-corrected invariance on `support` pairs: `iota`, its reference `iota_e` at pooled yes-rate `q`, and κ."""

    value: float
    iota: float
    iota_e: float
    q: float
    support: int
    method: str = "(iota - iota_e) / (1 - iota_e), iota_e = q^2 + (1 - q)^2 with pooled yes-rate q"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairProfile:
    """A pair of presentations on `n` instances, of which `n_parsed` have both answers (the support).

    `original` and `equivalent` are over all prompts; `common_original`, `common_equivalent`, `robust` (R),
    `shared_wrong` (D), `unstable` (U), `invariance` and `kappa` over the support; `strict_invariance` over all pairs.
    """

    n: int
    n_parsed: int
    original: PresentationScore
    equivalent: PresentationScore
    common_original: Share
    common_equivalent: Share
    robust: Share
    shared_wrong: Share
    unstable: Share
    invariance: Share
    strict_invariance: Share
    kappa: Kappa
    mcnemar: McNemar


@dataclass(frozen=True, slots=True, kw_only=True)
class KappaBar:
    """Mean of κ over the sizes where it is defined; `undefined` names the sizes left out."""

    value: float
    by_size: Mapping[Hashable, Kappa]
    undefined: tuple[Hashable, ...]
    n: int
    support: int
    method: str = "mean over sizes of kappa within the size"
    reason: str = ""


class Arm(NamedTuple):
    """The answers of one arm (a base model, an adapter) to both presentations of the same instances."""

    original: Sequence[str | None]
    equivalent: Sequence[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A statistic of two arms on the same `n` instances: `difference` = after - before, with its paired interval.

    The supports are the pairs that counted in each arm. `undefined` resamples gave no number (a constant output has no
    κ) and are left out of the interval.
    """

    statistic: str
    before: float
    after: float
    difference: float
    low: float
    high: float
    n: int
    support_before: int
    support_after: int
    undefined: int
    method: str
    reason: str = ""


def share(count: int, n: int, *, level: float = 0.95) -> Share:
    """Return count / n with its Wilson interval, which stays inside [0, 1] and has width even at 0 and n."""
    from scipy.stats import binomtest

    count, n, method = int(count), int(n), f"Wilson {level:.0%}"
    if n == 0:
        return Share(value=np.nan, low=np.nan, high=np.nan, count=0, n=0, method=method, reason="nothing to count")
    low, high = binomtest(count, n).proportion_ci(confidence_level=level, method="wilson")
    return Share(value=count / n, low=float(low), high=float(high), count=count, n=n, method=method)


def presentation_score(answers: Sequence[str | None], gold: Sequence[str], *, level: float = 0.95) -> PresentationScore:
    """Score one presentation; an answer that did not parse is wrong."""
    given, truth = _coded(answers=answers, gold=gold)
    right, parsed = given == truth, given != _MISSING
    yes, no = (share(right[truth == code].sum(), (truth == code).sum(), level=level) for code in (1, 0))
    return PresentationScore(
        n=len(truth),
        parsed=share(parsed.sum(), len(truth), level=level),
        accuracy=share(right.sum(), len(truth), level=level),
        accuracy_yes=yes,
        accuracy_no=no,
        yes_rate=share((given == 1).sum(), parsed.sum(), level=level),
        floor=float(np.minimum(yes.value, no.value)),  # NaN if a gold answer does not occur
        bias=yes.value - no.value,
    )


def mcnemar(first_right: Sequence[bool], second_right: Sequence[bool]) -> McNemar:
    """Test whether two answer columns for the same items are right equally often.

    Only discordant items count: exact binomial up to 25 of them, continuity-corrected chi-squared above.
    """
    from statsmodels.stats.contingency_tables import mcnemar as test

    _same_length(first=first_right, second=second_right)
    first, second = np.asarray(first_right, dtype=bool), np.asarray(second_right, dtype=bool)
    b, c = int((first & ~second).sum()), int((~first & second).sum())
    exact = b + c <= _EXACT_UP_TO
    table = [[int((first & second).sum()), b], [c, int((~first & ~second).sum())]]
    p, kind = test(table, exact=exact).pvalue, "exact binomial" if exact else "chi-squared, continuity-corrected"
    return McNemar(b=b, c=c, p=float(p), n=len(first), method=f"McNemar, {kind}")


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm-adjusted p-values for a declared family of comparisons; NaN stays NaN and is not in the family."""
    from statsmodels.stats.multitest import multipletests

    tested = {name: p for name, p in p_values.items() if not np.isnan(p)}
    if not tested:
        return dict(p_values)
    adjusted = multipletests(list(tested.values()), method="holm")[1]
    return {**p_values, **dict(zip(tested, map(float, adjusted), strict=True))}


def _kappa(first: np.ndarray, second: np.ndarray) -> Kappa:
    """Return κ of two code columns, on the pairs where both parsed."""
    both = (first != _MISSING) & (second != _MISSING)
    support = int(both.sum())
    if support == 0:
        reason = f"none of {len(first)} pairs has two parsed answers"
        return Kappa(value=np.nan, iota=np.nan, iota_e=np.nan, q=np.nan, support=0, reason=reason)
    first, second = first[both], second[both]
    iota, q = float((first == second).mean()), float((first.sum() + second.sum()) / (2 * support))
    iota_e = q**2 + (1 - q) ** 2
    constant = q in (0.0, 1.0)
    reason = f"all {2 * support} parsed answers are {'yes' if q else 'no'}" if constant else ""
    value = np.nan if constant else (iota - iota_e) / (1 - iota_e)
    return Kappa(value=value, iota=iota, iota_e=iota_e, q=q, support=support, reason=reason)


def pair_profile(
    original: Sequence[str | None], equivalent: Sequence[str | None], gold: Sequence[str], *, level: float = 0.95
) -> PairProfile:
    """Profile two presentations of the same instances, whose `gold` answer both share."""
    first, second, truth = _coded(original=original, equivalent=equivalent, gold=gold)
    n, both = len(truth), (first != _MISSING) & (second != _MISSING)
    support = int(both.sum())
    right_first, right_second = first == truth, second == truth

    def on_support(event: np.ndarray) -> Share:
        return share((event & both).sum(), support, level=level)

    return PairProfile(
        n=n,
        n_parsed=support,
        original=presentation_score(original, gold, level=level),
        equivalent=presentation_score(equivalent, gold, level=level),
        common_original=on_support(right_first),
        common_equivalent=on_support(right_second),
        robust=on_support(right_first & right_second),
        shared_wrong=on_support(~right_first & ~right_second),
        unstable=on_support(right_first ^ right_second),
        invariance=on_support(first == second),
        strict_invariance=share(((first == second) & both).sum(), n, level=level),
        kappa=_kappa(first, second),
        mcnemar=mcnemar(right_first, right_second),
    )


def kappa_bar(sizes: Sequence[Hashable], original: Sequence[str | None], equivalent: Sequence[str | None]) -> KappaBar:
    """Return κ̄, the mean over `sizes` (one a pair) of κ within each size; sizes without a κ are named and left out."""
    first, second = _coded(original=original, equivalent=equivalent)
    _same_length(sizes=sizes, original=first)
    names, members = _groups(sizes)
    by_size = {name: _kappa(first[members == i], second[members == i]) for i, name in enumerate(names)}
    undefined = tuple(name for name, one in by_size.items() if np.isnan(one.value))
    values = [one.value for name, one in by_size.items() if name not in undefined]
    return KappaBar(
        value=float(np.mean(values)) if values else np.nan,
        by_size=by_size,
        undefined=undefined,
        n=len(first),
        support=sum(one.support for one in by_size.values()),
        reason="" if values else f"kappa is undefined at all {len(names)} sizes",
    )


def compare_arms(
    before: Arm,
    after: Arm,
    gold: Sequence[str],
    *,
    statistics: Sequence[str] = ("accuracy_original", "accuracy_equivalent", "invariance", "robust", "kappa"),
    strata: Sequence[Hashable] | None = None,
    sizes: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> dict[str, Contrast]:
    """Compare two arms on the same instances: a paired percentile bootstrap of each statistic's difference.

    An instance is drawn with its answers in both presentations and both arms, within its stratum and size where
    `strata` or `sizes` (one entry an instance) are given. Every statistic depends only on how many instances show each
    joint pattern of answers. Those counts are multinomial under resampling, so a resample costs one draw per pattern,
    not one per instance. "kappa_bar" needs `sizes`; each arm averages the sizes at which its κ is defined.
    """
    n = len(gold)
    codes = _coded(**{"gold": gold, "before.original": before.original, "before.equivalent": before.equivalent,
                      "after.original": after.original, "after.equivalent": after.equivalent})  # fmt: skip
    by_size, by_stratum = ([0] * n if labels is None else labels for labels in (sizes, strata))
    _same_length(gold=codes[0], sizes=by_size, strata=by_stratum)
    size = _groups(by_size)[1]
    stratum = _groups(list(zip(by_stratum, by_size, strict=True)))[1]
    if "kappa_bar" in statistics and sizes is None:
        raise RunError("kappa_bar is a mean over sizes and no sizes were given; pass sizes, one an instance")
    if resamples < 1 or n == 0:
        raise RunError(f"{resamples} resamples of {n} instances; needed at least 1 of each")

    patterns, pattern = np.unique(np.column_stack([*codes, size]), axis=0, return_inverse=True)
    rng = generator(seed, "statistics.compare_arms")
    counts = np.zeros((1 + resamples, len(patterns)))
    counts[0] = np.bincount(pattern, minlength=len(patterns))  # row 0 is the data, the others are resamples
    for one in range(stratum.max() + 1):
        within = np.bincount(pattern[stratum == one], minlength=len(patterns))
        counts[1:] += rng.multinomial(within.sum(), within / within.sum(), size=resamples)

    gold_of, first_a, first_b, second_a, second_b, size_of = patterns.T
    old, support_before = _from_counts(counts, first_a, first_b, gold_of, size_of)
    new, support_after = _from_counts(counts, second_a, second_b, gold_of, size_of)
    if unknown := sorted(set(statistics) - set(old)):
        raise RunError(f"statistic {unknown[0]!r} is unknown; allowed: {', '.join(old)}")
    method = f"paired percentile bootstrap over instances{' within strata' if stratum.any() else ''}"
    contrasts = {}
    for name in statistics:
        change = new[name] - old[name]
        defined = change[1:][np.isfinite(change[1:])]
        known = bool(np.isfinite(change[0])) and len(defined) > 0
        low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2]) if known else (np.nan, np.nan)
        contrasts[name] = Contrast(
            statistic=name, before=float(old[name][0]), after=float(new[name][0]), difference=float(change[0]),
            low=float(low), high=float(high), n=n, support_before=support_before, support_after=support_after,
            undefined=resamples - len(defined), method=f"{method}, {resamples} resamples, {level:.0%}",
            reason="" if known else f"{name} is undefined in one arm (constant output or no parsed pair)",
        )  # fmt: skip
    return contrasts


def _from_counts(
    counts: np.ndarray, first: np.ndarray, second: np.ndarray, truth: np.ndarray, size: np.ndarray
) -> tuple[dict[str, np.ndarray], int]:
    """Return each statistic for every row of `counts` [resample, pattern], and the support of row 0.

    `first`, `second`, `truth` and `size` [pattern] say what a pattern's instances answered.
    """
    both = (first != _MISSING) & (second != _MISSING)
    agree, yes = both & (first == second), both * (first + second)
    right_first, right_second = first == truth, second == truth
    n, support = counts.sum(axis=1), counts @ both

    def kappas(within: np.ndarray) -> np.ndarray:
        parsed = counts[:, within] @ both[within]
        iota = _divide(counts[:, within] @ agree[within], parsed)
        q = _divide(counts[:, within] @ yes[within], 2 * parsed)
        iota_e = q**2 + (1 - q) ** 2
        return _divide(iota - iota_e, 1 - iota_e)

    by_size = np.stack([kappas(size == one) for one in range(size.max() + 1)])
    defined = np.isfinite(by_size)
    values = {
        "accuracy_original": counts @ right_first / n,
        "accuracy_equivalent": counts @ right_second / n,
        "invariance": _divide(counts @ agree, support),
        "strict_invariance": counts @ agree / n,
        "robust": _divide(counts @ (both & right_first & right_second), support),
        "shared_wrong": _divide(counts @ (both & ~right_first & ~right_second), support),
        "unstable": _divide(counts @ (both & (right_first ^ right_second)), support),
        "kappa": kappas(np.ones(len(size), dtype=bool)),
        "kappa_bar": _divide(np.where(defined, by_size, 0.0).sum(axis=0), defined.sum(axis=0)),
    }
    return values, int(support[0])


def _divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Divide, with NaN where the whole is 0."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def _coded(**columns: Sequence[Any]) -> list[np.ndarray]:
    """Return each column as 1 for "yes", 0 for "no", -1 for missing (never in gold); anything else is named."""
    _same_length(**columns)
    coded = []
    for name, answers in columns.items():
        for index, answer in enumerate(answers):
            # A missing string comes back from a table as NaN.
            absent = answer is None or (isinstance(answer, float) and np.isnan(answer))
            if answer not in _CODES and (name == "gold" or not absent):
                raise RunError(f"{name}[{index}] is {answer!r}; allowed: yes, no{'' if name == 'gold' else ' or None'}")
        coded.append(np.array([_CODES.get(answer, _MISSING) for answer in answers], dtype=np.int64))
    return coded


def _groups(values: Sequence[Hashable]) -> tuple[list[Hashable], np.ndarray]:
    """Return the distinct values in order of first appearance, and the number of each item's value."""
    numbers: dict[Hashable, int] = {}
    members = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    return list(numbers), members


def _same_length(**columns: Sequence[Any] | np.ndarray) -> None:
    """Refuse columns of different lengths, showing each."""
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise RunError(f"columns differ in length ({lengths}); all need one entry an instance, in one order")
