"""The columns that a table of pairs can have: name, heading, unit, and how the number comes from the pairs of one row.

Problem. A number in a table is only as good as what is known about it: from how many pairs, with what interval, and
why it is missing where it is missing. Mechanism: a column is a function from the pairs of one row (`Group`) to an
`Estimate`, which carries all of that; `COLUMNS` is the list of what exists. The definitions of κ, McNemar, the bounds
and the contrasts are those of `experiments.statistics`.

The names say *original* and *equivalent* for the first and the second presentation of a pair, whatever the pair is: of
(original, reshuffled) `accuracy_equivalent` is the accuracy on the reshuffled prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import numpy as np

from experiments.statistics import (
    PresentationScore,
    Share,
    accuracy_bounds,
    frechet,
    kappa_bar,
    mcnemar,
    repeat_agreement,
    share,
)
from experiments.table_pairs import CONTROL, UNDEFINED, Estimate, Group

Unit = Literal["percent", "points", "range", "kappa", "number", "p", "count"]
Counted = TypeVar("Counted")
REPEATED = "an instance stands here more than once, and the test takes pairs as independent; add what differs to rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Counted]):
    """A column of a table whose rows count pairs, or whatever `Counted` holds.

    Attributes:
        label: heading, as in the paper's tables.
        unit: how the number is printed; percent, points and range are stored as fractions.
        about: one line for the list of columns.
        compute: the number of one row.
        interval: whether the column comes with low and high.
        needs: presentation that has to be among the params beside the pair.
        holm: whether the numbers are p-values to be adjusted over the rows of the table.
        relative: whether the number needs the rows that this one is compared with.
    """

    label: str
    unit: Unit
    about: str
    compute: Callable[[Counted], Estimate]
    interval: bool = True
    needs: str = ""
    holm: bool = False
    relative: bool = False


def counted(number: float) -> str:
    """A number that tells rows apart; millions and billions, as models have parameters, by their letter."""
    for letter, unit in (("B", 1e9), ("M", 1e6)):
        if abs(number) >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:g}"


def _kappa(group: Group, statistic: str) -> Estimate:
    kappa = group.profile.kappa
    if kappa.reason:
        return Estimate(value=UNDEFINED, n=kappa.support, method=kappa.method, reason=kappa.reason)
    return group.estimate(statistic)


def _kappa_bar(group: Group) -> Estimate:
    if group.sizes is None:
        return Estimate(value=UNDEFINED, n=len(group.pairs), reason="the settings of this row have no problem size n")
    first, second, _ = group.columns
    bar = kappa_bar(group.sizes, first, second)
    if bar.reason:
        return Estimate(value=UNDEFINED, n=bar.support, method=bar.method, reason=bar.reason)
    left_out = f"undefined at n = {', '.join(map(str, bar.undefined))}, left out" if bar.undefined else ""
    return replace(group.estimate("kappa_bar"), reason=left_out)


def _reference_difference(group: Group) -> Estimate:
    kappa = group.profile.kappa
    reason = kappa.reason if np.isnan(kappa.reference_difference) else ""
    return Estimate(value=kappa.reference_difference, n=kappa.support, method="pooled less separate", reason=reason)


def _test(group: Group, first: np.ndarray, second: np.ndarray) -> Estimate:
    if group.clusters is not None:
        return Estimate(value=UNDEFINED, n=len(first), reason=REPEATED)
    found = mcnemar(first.tolist(), second.tolist())
    return Estimate(value=found.p, n=found.n, method=found.method)


def _mcnemar(group: Group) -> Estimate:
    return _test(group, group.right("first"), group.right("second"))


def _frechet(group: Group, end: str) -> Estimate:
    found = frechet(*group.columns)
    return Estimate(value=float(getattr(found, end)), n=found.support, method=found.method, reason=found.reason)


def _beyond_repeat(group: Group) -> Estimate:
    first, second, _ = group.columns
    found = repeat_agreement(
        first, group.pairs["repeat"].tolist(), second,
        resamples=group.resamples, seed=group.seed, level=group.level, clusters=group.clusters,
    )  # fmt: skip
    return Estimate(
        value=found.difference, low=found.low, high=found.high, n=found.n, method=found.method, reason=found.reason
    )


def _bounds(group: Group, side: str) -> Estimate:
    found = accuracy_bounds(group.pairs[side].tolist(), group.pairs["gold"].tolist())
    return Estimate(value=found.all_prompts.value, low=found.low, high=found.high, n=found.n, method=found.method)


def _tokens(group: Group, side: str) -> Estimate:
    tokens = group.pairs[f"{side}_tokens"].dropna()
    reason = "" if len(tokens) else "the behaviour table has no n_tokens"
    return Estimate(value=float(tokens.mean()), n=len(tokens), method="mean over prompts", reason=reason)


def _count(number: int) -> Estimate:
    return Estimate(value=int(number), n=int(number), method="count")


def _unparsed(score: PresentationScore) -> Share:
    return share(score.n - score.parsed.count, score.n)


def _share(
    statistic: str, label: str, about: str, of: Callable[[Group], Share], unit: Unit = "percent"
) -> Column[Group]:
    """A share of pairs or prompts."""
    return Column(label=label, unit=unit, about=about, compute=lambda group: group.estimate(statistic, of(group)))


def _other(statistic: str, label: str, about: str, unit: Unit) -> Column[Group]:
    """A statistic that is no share."""
    return Column(label=label, unit=unit, about=about, compute=lambda group: group.estimate(statistic))


def _number(
    label: str, about: str, unit: Unit, compute: Callable[[Group], Estimate], *, holm: bool = False
) -> Column[Group]:
    """A number without an interval."""
    return Column(label=label, unit=unit, about=about, compute=compute, interval=False, holm=holm)


def _of_presentation(name: str, side: str, short: str) -> dict[str, Column[Group]]:
    """The columns that exist once for each presentation of the pair."""

    def score(group: Group) -> PresentationScore:
        found: PresentationScore = getattr(group.profile, name)
        return found

    def common_accuracy(group: Group) -> Estimate:
        return group.common.estimate(f"accuracy_{name}", getattr(group.profile, f"common_{name}"))

    def truncated(group: Group) -> Estimate:
        return group.event((group.pairs[f"{side}_status"] == "truncated").to_numpy(dtype=bool))

    columns = {
        "accuracy": _share(
            f"accuracy_{name}", f"Acc. {short}", "accuracy on all prompts; an answer that was not read is wrong",
            lambda group: score(group).accuracy),
        "parsed_accuracy": _share(
            f"accuracy_parsed_{name}", f"Acc. parsed {short}", "accuracy among the answers that were read",
            lambda group: score(group).accuracy_parsed),
        "common_accuracy": Column(
            label=f"Acc. common {short}", unit="percent",
            about="accuracy on the support, the pairs whose two answers were read", compute=common_accuracy),
        "accuracy_yes": _share(
            f"accuracy_yes_{name}", f"Acc. yes {short}", "accuracy on prompts with gold answer yes",
            lambda group: score(group).accuracy_yes),
        "accuracy_no": _share(
            f"accuracy_no_{name}", f"Acc. no {short}", "accuracy on prompts with gold answer no",
            lambda group: score(group).accuracy_no),
        "polarity": _other(
            f"bias_{name}", f"Polarity {short}", "accuracy on gold yes less accuracy on gold no", "points"),
        "yes_rate": _share(
            f"yes_rate_{name}", f"Yes {short}", "share of yes among the answers that were read",
            lambda group: score(group).yes_rate),
        "unparsed": _share(
            f"unparsed_{name}", f"Unparsed {short}", "share of answers that were not read, for whatever reason",
            lambda group: _unparsed(score(group))),
        "truncated": Column(
            label=f"Truncated {short}", unit="percent",
            about="share of answers that the token limit cut before they could be read", compute=truncated),
        "bounds": Column(
            label=f"Acc. bounds {short}", unit="range",
            about="accuracy if the unread answers were all wrong, and if they were all right",
            compute=lambda group: _bounds(group, side)),
        "tokens": _number(
            f"Tokens {short}", "mean number of tokens of the response", "number", lambda group: _tokens(group, side)),
    }  # fmt: skip
    return {f"{column}_{name}": found for column, found in columns.items()}


COLUMNS: Mapping[str, Column[Group]] = {
    **_of_presentation("original", "first", "Org"),
    **_of_presentation("equivalent", "second", "Eqv"),
    "mean_accuracy": _other("accuracy_mean", "Mean acc.", "mean of the two accuracies, on all prompts", "percent"),
    "common_mean_accuracy": Column(
        label="Mean acc. common", unit="percent", about="mean of the two accuracies on the support, R + U/2",
        compute=lambda group: group.common.estimate("accuracy_mean")),
    "gap": _other(
        "accuracy_gap", "Δ", "accuracy on the original less accuracy on the equivalent, on all prompts", "points"),
    "invariance": _share(
        "invariance", "Inv.", "ι: share of pairs with the same answer twice, on the support",
        lambda group: group.profile.invariance),
    "strict_invariance": _share(
        "strict_invariance", "Inv. strict", "the same on all pairs; an answer that was not read disagrees",
        lambda group: group.profile.strict_invariance),
    "robust": _share("robust", "R", "both answers right, on the support", lambda group: group.profile.robust),
    "shared_wrong": _share(
        "shared_wrong", "D", "both answers wrong, on the support", lambda group: group.profile.shared_wrong),
    "unstable": _share(
        "unstable", "U", "exactly one answer right, on the support", lambda group: group.profile.unstable),
    "kappa": Column(
        label="κ", unit="kappa", about="invariance beyond the agreement that the pooled yes-rate gives by chance",
        compute=lambda group: _kappa(group, "kappa")),
    "kappa_separate": Column(
        label="κ sep.", unit="kappa", about="the same with each presentation's own yes-rate as the reference",
        compute=lambda group: _kappa(group, "kappa_separate")),
    "reference_difference": _number(
        "ιₑ diff.", "pooled less separate chance agreement, (q₀ − q₁)²/2", "points", _reference_difference),
    "kappa_bar": Column(
        label="κ̄", unit="kappa", about="mean over the problem sizes of the row of κ within the size", compute=_kappa_bar),
    "b": _number(
        "b", "pairs with the original right and the equivalent wrong, of all pairs", "count",
        lambda group: _count(group.profile.mcnemar.b)),
    "c": _number(
        "c", "pairs with the original wrong and the equivalent right, of all pairs", "count",
        lambda group: _count(group.profile.mcnemar.c)),
    "mcnemar_p": _number("p", "McNemar's test of the gap, exact up to 25 discordant pairs", "p", _mcnemar),
    "mcnemar_p_holm": _number(
        "p Holm", "the same, adjusted by Holm over the rows of this table", "p", _mcnemar, holm=True),
    "unparsed_p": _number(
        "p unparsed", "McNemar's test of the two shares of answers that were not read", "p",
        lambda group: _test(group, group.pairs["first"].notna().to_numpy(), group.pairs["second"].notna().to_numpy())),
    "frechet_low": _number(
        "R at least", "least R that the two accuracies allow, on the support", "percent",
        lambda group: _frechet(group, "low")),
    "frechet_high": _number(
        "R at most", "greatest R that the two accuracies allow, on the support", "percent",
        lambda group: _frechet(group, "high")),
    "repeat": Column(
        label="Repeat", unit="percent", about="agreement of two answers to the same original prompt", needs=CONTROL,
        compute=lambda group: group.repeated.estimate("invariance", group.repeated.profile.invariance)),
    "invariance_minus_repeat": Column(
        label="Inv. − repeat", unit="points", about="invariance less repeat agreement, each on its own support",
        needs=CONTROL, compute=_beyond_repeat),
    "pairs": _number("Pairs", "number of pairs", "count", lambda group: _count(len(group.pairs))),
    "support": _number(
        "Support", "pairs whose two answers were read", "count", lambda group: _count(group.profile.n_parsed)),
}  # fmt: skip
