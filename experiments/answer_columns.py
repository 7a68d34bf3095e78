"""The columns that a table of answers can have, and how each number comes from the answers of one row.

Problem. The four cells, the floor and the bias are about questions of both polarities, not about pairs; and much of what
a study asks is how a row differs from its neighbours (an activity, a name group, a wording). Mechanism: an `AnswerGroup`
holds the answers of one row and, where the table names a key to compare `over`, those of all its values (`Peers`); a
column is a function of it, `ANSWER_COLUMNS` the list of what exists. Definitions are those of
`experiments.statistics.polarity`, `polarity_groups` and `polarity_spread`.

Three kinds of columns: measures of the row's own answers; contrasts of the row with the reference row; and what is said of
all values of `over` together (range, largest contrast, agreement of models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from experiments.statistics.contrasts import Interval
from experiments.statistics.polarity import FOUR, MEASURES, SCHEMES, PolarityProfile, Pooling, polarity_profile, pooling
from experiments.statistics.polarity_groups import GroupContrast, NegationStrategy, compare_groups, negation_strategy
from experiments.statistics.polarity_spread import CommonLean, Spread, accuracy_range, common_lean
from experiments.statistics.shares import unanimous
from experiments.table_columns import Column, Unit
from experiments.table_pairs import UNDEFINED, Estimate

if TYPE_CHECKING:
    import pandas as pd

NEGATIONS = ("prefix", "not")


@dataclass(frozen=True)
class Peers:
    """The answers of all values of `over` that share the other row keys, and how they compare.

    Args:
        rows: answers with the columns of `AnswerGroup.rows`, `member` (the value of `over`) and `block`.
        reference: the member that the others are compared with; None where it was not asked.
        pooled: the values that it stands for.
    """

    rows: pd.DataFrame
    over: str
    reference: Any
    pooled: frozenset[Any]
    chosen: Mapping[str, Any]

    @cached_property
    def contrasts(self) -> dict[Any, GroupContrast]:
        """Each value against the reference."""
        columns = (self.rows[name].tolist() for name in ("correct", "member", "block"))
        found = compare_groups(*columns, reference=self.reference, **self.chosen)
        return {one.first: one for one in found}

    @cached_property
    def spread(self) -> Spread:
        rows = self.rows
        # Sets that lie within one value (an activity) are drawn within it; those that hold several (forms) are not.
        nested = rows.groupby("key")["member"].nunique().max() == 1
        strata = rows[["stratum", "member"]].itertuples(index=False, name=None) if nested else rows["stratum"]
        columns = (rows[name].tolist() for name in ("correct", "member", "key", "block"))
        return accuracy_range(*columns, strata=list(strata), **self.chosen)

    @cached_property
    def leans(self) -> CommonLean:
        return common_lean([self._measure(part, "lean") for _, part in self.rows.groupby("member", sort=False)])

    @cached_property
    def sensitivities(self) -> list[float]:
        return [self._measure(part, "polarity_sensitivity") for _, part in self.rows.groupby("member", sort=False)]

    def _measure(self, part: pd.DataFrame, name: str) -> float:
        # The value alone is wanted, so one resample will do.
        return AnswerGroup(part, {**self.chosen, "resamples": 1}).profile.measures[name].value


@dataclass(frozen=True)
class AnswerGroup:
    """The answers of one row of a table.

    Args:
        rows: one row an answer: key (the matched set), answer, gold, correct, valid, negated, stratum, pattern, frame,
            negation, asked (what tells apart the times that a question stands here).
        chosen: resamples, level and seed.
        peers: what the row is compared with; None where the table compares nothing.
        member: the row's own value of the key compared over; None where the row pools them.
    """

    rows: pd.DataFrame
    chosen: Mapping[str, Any]
    peers: Peers | None = None
    member: Any = None

    @cached_property
    def profile(self) -> PolarityProfile:
        return polarity_profile(*self._columns("answer", "valid", "negated", "key"), **self._drawn)

    def events(self, name: str) -> tuple[int, int] | None:
        """How often what a measure counts happened, and of how many; None where it is no share of answers."""
        rows = self.rows
        read = rows["answer"].notna()
        of = {
            "accuracy": (rows["correct"], read | True),
            "uncertain": (~read, read | True),
            "yes_rate": (rows["answer"] == "yes", read),
            "accuracy_affirmative": (rows["correct"], ~rows["negated"]),
            "accuracy_negated": (rows["correct"], rows["negated"]),
            **{
                cell: (rows["correct"], (rows["valid"] == (cell[0] == "v")) & (rows["negated"] == cell.endswith("neg")))
                for cell in FOUR
            },
        }
        if name not in of:
            return None
        event, counted = of[name]
        return int((event & counted).sum()), int(counted.sum())

    @cached_property
    def pooling(self) -> Pooling:
        rows = self.rows
        return pooling(
            *self._columns("answer", "valid", "negated", "key"),
            patterns=rows["pattern"].tolist(), frames=rows["frame"].tolist(), **self._drawn,
        )  # fmt: skip

    @cached_property
    def strategy(self) -> NegationStrategy | None:
        """Prefix against *not*; None where no form is negated both ways."""
        rows = self.rows[self.rows["negation"].isin(NEGATIONS)]
        styles = rows.groupby(["key", "asked", "frame"])["negation"].nunique()
        if not (styles == len(NEGATIONS)).any():
            return None
        forms = list(zip(rows["frame"], rows["asked"], strict=True))
        answers, gold, negations, keys = (rows[name].tolist() for name in ("answer", "gold", "negation", "key"))
        return negation_strategy(answers, gold, forms, negations, keys, **self.chosen)

    @property
    def _drawn(self) -> dict[str, Any]:
        return {**self.chosen, "strata": self.rows["stratum"].tolist()}

    def _columns(self, *names: str) -> list[list[Any]]:
        return [self.rows[name].tolist() for name in names]


AnswerColumn = Column[AnswerGroup]
NOT_BOTH = "no form is negated both by a prefix and by the word not"


def _estimate(found: Interval) -> Estimate:
    reason = found.reason or ("" if found.method != "none" else "nothing to count")
    return Estimate(value=found.value, low=found.low, high=found.high, n=found.n, method=found.method, reason=reason)


def _open(found: Estimate, name: str) -> Estimate:
    """An interval without width would say that the number is known."""
    if found.low == found.high == found.value:
        return replace(
            found, low=UNDEFINED, high=UNDEFINED, reason=f"no resample changes {name}, so it has no interval"
        )
    return found


def _of_profile(group: AnswerGroup, name: str) -> Estimate:
    """A measure; where no answer differs, which no resample changes, with Wilson's interval or with none."""
    found, events = _estimate(group.profile.measures[name]), group.events(name)
    same = None if events is None else unanimous(*events, group.rows["key"].tolist(), level=group.chosen["level"])
    if same is not None:
        return replace(found, low=same.low, high=same.high, method=same.method, reason="")
    return _open(found, name)


def _measure(name: str, label: str, about: str, unit: Unit = "percent") -> AnswerColumn:
    return Column(label=label, unit=unit, about=about, compute=lambda group: _of_profile(group, name))


def _size(group: AnswerGroup) -> Estimate:
    """The bias without its sign; an interval that holds 0 is folded there."""
    bias = _of_profile(group, "bias")
    ends = abs(bias.low), abs(bias.high)
    low = 0.0 if bias.low < 0 < bias.high else min(ends)
    return replace(bias, value=abs(bias.value), low=low, high=max(ends))


def _pooled(scheme: str, label: str, about: str, unit: Unit = "percent") -> AnswerColumn:
    def compute(group: AnswerGroup) -> Estimate:
        found = group.pooling
        return _open(_estimate(found.spread if scheme == "spread" else found.schemes[scheme]), scheme)

    return Column(label=label, unit=unit, about=about, compute=compute)


# --- against the reference -------------------------------------------------------------------------------------------


def _contrast(
    label: str, about: str, unit: Unit, of: Callable[[GroupContrast], Estimate], *, interval: bool = False,
    holm: bool = False,
) -> AnswerColumn:  # fmt: skip
    def compute(group: AnswerGroup) -> Estimate:
        peers = group.peers
        if peers is None or peers.reference is None:
            return Estimate(value=UNDEFINED, reason="no value that the table refers to was asked here")
        if group.member in peers.pooled:
            return Estimate(
                value=UNDEFINED, n=len(group.rows), reason=f"{peers.reference} is what others are compared with"
            )
        found = peers.contrasts[group.member]
        made = of(found)
        return Estimate(value=made.value, low=made.low, high=made.high, n=found.n, method=found.method,
                        reason=found.reason)  # fmt: skip

    return Column(label=label, unit=unit, about=about, compute=compute, interval=interval, holm=holm, relative=True)


def _difference(one: GroupContrast) -> Estimate:
    return Estimate(value=one.difference, low=one.low, high=one.high)


# --- all values of the key together ----------------------------------------------------------------------------------


def _over(
    label: str, about: str, unit: Unit, of: Callable[[Peers], Estimate], *, interval: bool = False, holm: bool = False
) -> AnswerColumn:
    def compute(group: AnswerGroup) -> Estimate:
        if group.peers is None:
            return Estimate(value=UNDEFINED, reason="the table names no key to compare over")
        return of(group.peers)

    return Column(label=label, unit=unit, about=about, compute=compute, interval=interval, holm=holm, relative=True)


def _several(peers: Peers, compute: Callable[[], Estimate]) -> Estimate:
    """A number that needs two values to compare."""
    if peers.rows["member"].nunique() < 2:
        return Estimate(value=UNDEFINED, n=len(peers.rows), reason=f"one {peers.over} alone has nothing to differ from")
    return compute()


def _largest(peers: Peers) -> Estimate:
    def compute() -> Estimate:
        if peers.reference is None:
            return Estimate(value=UNDEFINED, reason="no value that the table refers to was asked here")
        known = [abs(one.difference) for one in peers.contrasts.values() if not one.reason]
        if not known:
            return Estimate(value=UNDEFINED, reason="no block holds both groups")
        return Estimate(
            value=max(known), n=len(known), method=f"largest of {len(known)} contrasts with {peers.reference}"
        )

    return _several(peers, compute)


def _means(values: Sequence[float], what: str) -> Estimate:
    known = [one for one in values if one == one]
    value = sum(known) / len(known) if known else UNDEFINED
    return Estimate(value=value, n=len(known), method=f"mean over values of {what}",
                    reason="" if known else f"undefined for every {what}")  # fmt: skip


# --- by a prefix, or by the word not ---------------------------------------------------------------------------------


def _negation(
    label: str, about: str, unit: Unit, of: Callable[[NegationStrategy], Estimate], *, interval: bool = False,
    holm: bool = False,
) -> AnswerColumn:  # fmt: skip
    def compute(group: AnswerGroup) -> Estimate:
        found = group.strategy
        if found is None:
            count = unit == "count"
            return Estimate(value=0 if count else UNDEFINED, reason=NOT_BOTH)
        made = of(found)
        return Estimate(value=made.value, low=made.low, high=made.high, n=made.n or 2 * found.pairs,
                        method=made.method or found.contrast.method)  # fmt: skip

    return Column(label=label, unit=unit, about=about, compute=compute, interval=interval, holm=holm)


def _rate(value: float) -> Estimate:
    return Estimate(value=value, method="share of yes among the answers read, on the matched prompts")


def _count(value: int) -> Estimate:
    return Estimate(value=int(value), n=int(value), method="count")


_MEASURES: Mapping[str, AnswerColumn] = {
    "accuracy": _measure("accuracy", "Acc.", "accuracy on all prompts; an answer that was not read is wrong"),
    "uncertain": _measure("uncertain", "Unread", "share of answers that were not read"),
    "yes_rate": _measure("yes_rate", "Yes", "share of yes among the answers that were read"),
    "v_aff": _measure("v_aff", "V.Aff", "accuracy where a valid inference is asked for: yes is right"),
    "v_neg": _measure("v_neg", "V.Neg", "accuracy where the failure of a valid inference is asked for: no is right"),
    "i_aff": _measure("i_aff", "I.Aff", "accuracy where an invalid inference is asked for: no is right"),
    "i_neg": _measure("i_neg", "I.Neg", "accuracy where the failure of an invalid inference is asked for: yes is right"),
    "accuracy_yes": _measure("accuracy_yes", "Acc(Yes)", "mean of V.Aff and I.Neg, where yes is right"),
    "accuracy_no": _measure("accuracy_no", "Acc(No)", "mean of V.Neg and I.Aff, where no is right"),
    "bias": _measure("bias", "Bias", "Acc(Yes) less Acc(No): above 0 where yes is preferred", "points"),
    "floor": _measure("floor", "Floor", "the lower of Acc(Yes) and Acc(No): a coin has one half"),
    "affirmative_floor": _measure("affirmative_floor", "Floor aff.", "the lower of V.Aff and I.Aff"),
    "polarity_sensitivity": _measure(
        "polarity_sensitivity", "PS", "what negation costs, each cell counting the same", "points"),
    "cell_average": _measure("cell_average", "Cells", "mean of the four cells, floor + |bias| / 2"),
    "accuracy_affirmative": _measure("accuracy_affirmative", "Aff", "accuracy on affirmative questions"),
    "accuracy_negated": _measure("accuracy_negated", "Neg", "accuracy on negated questions"),
    "accuracy_drop": _measure("accuracy_drop", "Aff − Neg", "what negation costs, each prompt counting the same", "points"),
    "lean": _measure("lean", "Lean", "mean over the cells of (yes − no) / prompts: the bias from answers alone", "points"),
}  # fmt: skip

ANSWER_COLUMNS: Mapping[str, AnswerColumn] = {
    **_MEASURES,
    "abs_bias": Column(label="|Bias|", unit="percent", about="the bias without its sign", compute=_size),
    "answers": Column(
        label="Answers", unit="count", about="number of answers", interval=False,
        compute=lambda group: _count(len(group.rows))),
    "sets": Column(
        label="Sets", unit="count", about="number of matched sets", interval=False,
        compute=lambda group: _count(group.rows["key"].nunique())),
    "pooled_micro": _pooled("micro", "micro", "accuracy, every answer counting the same"),
    "pooled_prompt": _pooled("prompt", "prompt-bal.", "accuracy, every matched set counting the same"),
    "pooled_template": _pooled("template", "tmpl-bal.", "accuracy, every inference pattern counting the same"),
    "pooled_frame": _pooled("frame", "frame-bal.", "accuracy, every question form counting the same"),
    "pooled_cell": _pooled("cell", "cat-avg", "accuracy, each of the four cells counting the same"),
    "pooled_spread": _pooled("spread", "Spread", "largest less smallest of the five"),
    "difference": _contrast(
        "Δ", "accuracy less the reference's, over blocks alike in all else", "points", _difference, interval=True),
    "difference_p": _contrast(
        "p", "sign flips of blocks", "p", lambda one: Estimate(value=one.p)),
    "difference_p_holm": _contrast(
        "p Holm", "the same, adjusted by Holm over the rows of this table", "p", lambda one: Estimate(value=one.p),
        holm=True),
    "largest_difference": _over("max|Δ|", "largest difference from the reference, whatever its sign", "percent", _largest),
    "range": _over(
        "Range", "largest less smallest accuracy; above 0 by chance alone, see range_p", "percent",
        lambda peers: _several(peers, lambda: _open(_estimate(peers.spread.interval), "the range")), interval=True),
    "range_p": _over(
        "p range", "share of deals of the groups' names within blocks that spread as far", "p",
        lambda peers: _several(peers, lambda: Estimate(
            value=peers.spread.p, n=len(peers.rows), method=peers.spread.method, reason=peers.spread.reason))),
    "mean_lean": _over(
        "|Lean|", "mean size of the lean over the values compared", "percent",
        lambda peers: Estimate(value=peers.leans.mean_size, n=peers.leans.n, method=f"mean over values of {peers.over}")),
    "mean_polarity_sensitivity": _over(
        "PS mean", "mean polarity sensitivity over the values compared", "points",
        lambda peers: _means(peers.sensitivities, peers.over)),
    "agreement": _over(
        "Agree.", "share of the values compared that lean to the side that most take", "percent",
        lambda peers: Estimate(value=peers.leans.agreement, n=peers.leans.n, method=f"share of values of {peers.over}",
                               reason="" if peers.leans.agreement == peers.leans.agreement else "none leans")),
    "prefix_accuracy": _negation(
        "Prefix", "accuracy where the negation is a prefix (incorrect)", "percent",
        lambda one: Estimate(value=one.contrast.first_accuracy)),
    "not_accuracy": _negation(
        "not", "accuracy on the same where it is the word not (not correct)", "percent",
        lambda one: Estimate(value=one.contrast.second_accuracy)),
    "prefix_gain": _negation(
        "Δ prefix", "accuracy with the prefix less with the word not", "points",
        lambda one: _difference(one.contrast), interval=True),
    "prefix_p": _negation(
        "p prefix", "sign flips of matched sets", "p", lambda one: Estimate(value=one.contrast.p)),
    "prefix_p_holm": _negation(
        "p Holm prefix", "the same, adjusted by Holm over the rows of this table", "p",
        lambda one: Estimate(value=one.contrast.p), holm=True),
    "prefix_yes_rate": _negation("Yes prefix", "yes-rate with the prefix", "percent",
                                 lambda one: _rate(one.prefix_yes_rate)),
    "not_yes_rate": _negation("Yes not", "yes-rate with the word not", "percent", lambda one: _rate(one.not_yes_rate)),
    "matched_pairs": _negation(
        "Pairs", "prompts negated both ways", "count", lambda one: _count(one.pairs)),
}  # fmt: skip
RELATIVE = tuple(name for name, column in ANSWER_COLUMNS.items() if column.relative)
REFERRING = ("difference", "difference_p", "difference_p_holm", "largest_difference")
assert set(_MEASURES) == set(MEASURES) and len(SCHEMES) == 5, "every measure is a column"
