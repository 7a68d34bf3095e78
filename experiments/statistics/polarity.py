"""Yes/no answers crossed with validity and negation: is a model right, or does it only like to say yes?

Problem. A set of questions in which "yes" is mostly right rewards a model that says yes to everything. Paper 002 therefore
crosses two things: whether an inference is valid, and whether the question asks for it or for its failure. The right
answer is yes in two of the four cells and no in the other two:

===================  ==============  =============
..                   affirmative     negated
===================  ==============  =============
valid                ``v_aff``: yes  ``v_neg``: no
invalid              ``i_aff``: no   ``i_neg``: yes
===================  ==============  =============

With a cell's name for the accuracy in it (an answer that was not read is wrong):

* Acc(Yes) = (v_aff + i_neg) / 2 and Acc(No) = (v_neg + i_aff) / 2, so that each cell counts the same, however many
  prompts it has; bias is the first less the second, floor the lower of the two: 0 for a model that says always the same,
  one half for a coin, 1 for one that knows;
* polarity sensitivity = (v_aff + i_aff - v_neg - i_neg) / 2, what negation costs;
* the affirmative floor is min(v_aff, i_aff), the cell average the mean of the four.

Two identities tie them: floor + |bias| / 2 = cell average, and v_aff - v_neg = polarity sensitivity + bias,
i_aff - i_neg = polarity sensitivity - bias. So within one template, which has one validity, a lean towards yes and a
drop under negation are one number with one sign or the other; they come apart only over both validities.

Intervals resample matched sets (one template and content, with all its forms) within strata; the templates are what they
are, so an interval tells what other names and activities would give, not other inferences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from experiments.statistics.bootstrap import outer_tail
from experiments.statistics.columns import MISSING, coded, divide, flags, groups, inside, percent, same_length, whole
from experiments.statistics.contrasts import Interval
from experiments.statistics.resampling import Resampler

Name = TypeVar("Name", bound=Hashable)

FOUR = ("v_aff", "v_neg", "i_aff", "i_neg")
# The two cells in which yes is right, and the two of affirmative questions.
YES, AFFIRMATIVE = (0, 3), (0, 2)
MEASURES = (
    "accuracy", "uncertain", "yes_rate", *FOUR, "accuracy_yes", "accuracy_no", "bias", "floor", "affirmative_floor",
    "polarity_sensitivity", "cell_average", "accuracy_affirmative", "accuracy_negated", "accuracy_drop",
    "lean",
)  # fmt: skip
SCHEMES = ("micro", "prompt", "template", "frame", "cell")


@dataclass(frozen=True, slots=True, kw_only=True)
class FourCells:
    """Accuracies of the four cells, as fractions, and what follows from them alone."""

    v_aff: float
    v_neg: float
    i_aff: float
    i_neg: float

    @property
    def accuracy_yes(self) -> float:
        return (self.v_aff + self.i_neg) / 2

    @property
    def accuracy_no(self) -> float:
        return (self.v_neg + self.i_aff) / 2

    @property
    def bias(self) -> float:
        return self.accuracy_yes - self.accuracy_no

    @property
    def floor(self) -> float:
        return min(self.accuracy_yes, self.accuracy_no)

    @property
    def affirmative_floor(self) -> float:
        return min(self.v_aff, self.i_aff)

    @property
    def polarity_sensitivity(self) -> float:
        return (self.v_aff + self.i_aff - self.v_neg - self.i_neg) / 2

    @property
    def cell_average(self) -> float:
        return (self.v_aff + self.v_neg + self.i_aff + self.i_neg) / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PolarityProfile:
    """Each of ``MEASURES`` with its interval, on `n` prompts of `sets` matched sets.

    ``accuracy``, ``uncertain`` and ``accuracy_affirmative``, ``accuracy_negated`` are over all prompts, ``yes_rate``
    over the answers that were read. ``accuracy_drop`` is the first of the two less the second: what negation costs where
    every prompt counts the same, as polarity sensitivity is where every cell does. ``lean`` is the mean over the cells of
    (yes - no) / prompts: the bias, where as many answers are missing on either side, and defined for one validity too. Of
    one validity, polarity sensitivity is the difference of its two cells.
    """

    measures: dict[str, Interval]
    n: int
    sets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The accuracy of the same answers under five weightings, and how far these lie apart.

    ``micro`` weights every response equally, ``prompt`` every matched set, ``template`` every pattern, ``frame`` every
    question form, ``cell`` each of the four cells. ``spread`` is the largest less the smallest.
    """

    schemes: dict[str, Interval]
    spread: Interval
    n: int


def polarity_profile(
    answers: Sequence[str | None],
    valid: Sequence[bool],
    negated: Sequence[bool],
    sets: Sequence[Hashable],
    *,
    strata: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> PolarityProfile:
    """Score answers by the four cells.

    Args:
        answers: "yes", "no" or None, one a prompt.
        valid: whether the inference follows; negated: whether the question asks for its failure.
        sets: the matched set of each prompt, whose prompts are drawn together.
        strata: a label a prompt (its template); resamples keep the number of sets of each.
    """
    given, cell, right = _judged(answers, valid, negated)
    events = np.column_stack([np.ones(len(given)), right, given == 1, given == 0])
    weights = np.zeros((len(given), 4, 4))
    weights[np.arange(len(given)), cell] = events
    found = resampled(
        MEASURES, weights.reshape(len(given), 16), _measures, sets=sets, strata=strata, resamples=resamples, level=level,
        seed=seed, purpose="statistics.polarity_profile",
    )  # fmt: skip
    return PolarityProfile(measures=found, n=len(given), sets=len(groups(sets)[0]))


def pooling(
    answers: Sequence[str | None],
    valid: Sequence[bool],
    negated: Sequence[bool],
    sets: Sequence[Hashable],
    *,
    patterns: Sequence[Hashable],
    frames: Sequence[Hashable],
    strata: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> Pooling:
    """Weigh the same answers in five ways.

    Args:
        patterns: the inference pattern of each prompt, in which its wordings are folded.
        frames: the question form of each prompt.
    """
    given, cell, right = _judged(answers, valid, negated)
    same_length(answers=answers, sets=sets, patterns=patterns, frames=frames)
    unit = groups(sets)[1]
    share = 1 / np.bincount(unit)[unit]
    parts = [np.column_stack([right, np.ones(len(given))]), np.column_stack([right * share, share])]
    sizes = [1, 1]
    for member in (groups(patterns)[1], groups(frames)[1], cell):
        count = int(member.max(initial=-1)) + 1
        table = np.zeros((len(given), count, 2))
        table[np.arange(len(given)), member, 0], table[np.arange(len(given)), member, 1] = right, 1
        parts.append(table.reshape(len(given), -1))
        sizes.append(count)

    def values(totals: np.ndarray) -> np.ndarray:
        shares = divide(totals[..., ::2], totals[..., 1::2])
        ends = np.cumsum(sizes)
        means = [shares[..., end - size : end].mean(axis=-1) for size, end in zip(sizes, ends, strict=True)]
        schemes = np.stack(means, axis=-1)
        return np.concatenate([schemes, np.ptp(schemes, axis=-1)[..., None]], axis=-1)

    found = resampled(
        (*SCHEMES, "spread"), np.hstack(parts), values, sets=sets, strata=strata, resamples=resamples, level=level,
        seed=seed, purpose="statistics.pooling",
    )  # fmt: skip
    return Pooling(schemes={name: found[name] for name in SCHEMES}, spread=found["spread"], n=len(given))


def breakdown(
    answers: Sequence[str | None],
    valid: Sequence[bool],
    negated: Sequence[bool],
    sets: Sequence[Hashable],
    members: Sequence[Hashable],
    *,
    strata: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> dict[Hashable, PolarityProfile]:
    """The profile of each group of prompts (question form, template, activity, …), in order of first appearance.

    Args:
        members: the group of each prompt. Other arguments are those of `polarity_profile`.
    """
    same_length(answers=answers, valid=valid, negated=negated, sets=sets, members=members)
    names, member = groups(members)
    found = {}
    for code, name in enumerate(names):
        at = np.flatnonzero(member == code).tolist()
        found[name] = polarity_profile(
            [answers[i] for i in at],
            [valid[i] for i in at],
            [negated[i] for i in at],
            [sets[i] for i in at],
            strata=None if strata is None else [strata[i] for i in at],
            resamples=resamples,
            level=level,
            seed=seed,
        )
    return found


def turned(answers: Sequence[str | None]) -> list[str | None]:
    """Answers to questions that flip the gold answer, as answers to the original: yes for no, no for yes.

    A model that follows the inference changes its answer from the original to a negated question. Turned, that is
    agreement, so what is known about pairs applies: ι is the share of pairs whose answer changed, R of those right in
    both, and κ corrects for a model that changes at random.
    """
    (given,) = coded(answers=answers)
    words: dict[int, str | None] = {1: "no", 0: "yes", MISSING: None}
    return [words[code] for code in given.tolist()]


# --- from answers to totals, and back --------------------------------------------------------------------------------


def _judged(
    answers: Sequence[str | None], valid: Sequence[bool], negated: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbered answers, the cell of each prompt, and whether the answer is right."""
    same_length(answers=answers, valid=valid, negated=negated)
    (given,) = coded(answers=answers)
    follows, failing = flags(valid=valid, negated=negated)
    right = (given != MISSING) & (given == (follows != failing))
    return given, 2 * ~follows + failing, right


def _measures(totals: np.ndarray) -> np.ndarray:
    """Measures [..., measure] from totals [..., 4 cells × (prompts, right, yes, no)]."""
    n, right, yes, no = np.moveaxis(totals.reshape(*totals.shape[:-1], 4, 4), -1, 0)
    cells = divide(right, n)
    asked, said_yes, said_no = (one.sum(axis=-1) for one in (n, yes, no))
    by_answer = [cells[..., list(YES)].mean(axis=-1), cells[..., [1, 2]].mean(axis=-1)]
    affirmative, negated = list(AFFIRMATIVE), [1, 3]
    drop = cells[..., affirmative] - cells[..., negated]
    lean = divide(yes - no, n)
    by_polarity = [divide(right[..., one].sum(axis=-1), n[..., one].sum(axis=-1)) for one in (affirmative, negated)]
    return np.stack(
        [
            divide(right.sum(axis=-1), asked),
            1 - divide(said_yes + said_no, asked),
            divide(said_yes, said_yes + said_no),
            *np.moveaxis(cells, -1, 0),
            *by_answer,
            by_answer[0] - by_answer[1],
            np.minimum(*by_answer),
            cells[..., affirmative].min(axis=-1),
            _mean_of_defined(drop),
            cells.mean(axis=-1),
            *by_polarity,
            by_polarity[0] - by_polarity[1],
            _mean_of_defined(lean),
        ],
        axis=-1,
    )


def _mean_of_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without what is undefined."""
    known = np.isfinite(values)
    return divide(np.where(known, values, 0.0).sum(axis=-1), known.sum(axis=-1))


# --- intervals of anything that is made of totals --------------------------------------------------------------------


def resampled(
    names: Sequence[Name],
    weights: np.ndarray,
    values: Callable[[np.ndarray], np.ndarray],
    *,
    sets: Sequence[Hashable],
    strata: Sequence[Hashable] | None,
    resamples: int,
    level: float,
    seed: int,
    purpose: str,
) -> dict[Name, Interval]:
    """Statistics with bootstrap intervals over sets.

    Args:
        names: of the statistics.
        weights: what each row adds to each total [row, total].
        values: statistics [..., statistic] from totals [..., total].
        sets: the set of each row; rows of one are drawn together.
        strata: a label a row; resamples keep the number of sets of each.
    """
    rows = len(weights)
    same_length(rows=weights, sets=sets, **({} if strata is None else {"strata": strata}))
    inside("level", level)
    whole("resamples", resamples, 1)
    if rows == 0:
        return {
            name: Interval(
                statistic=str(name), value=np.nan, low=np.nan, high=np.nan, n=0, support=0, undefined=0, method="none",
                reason="nothing to count",
            )
            for name in names
        }  # fmt: skip
    labels = [] if strata is None else [groups(strata)[1]]
    resampler = Resampler(np.arange(rows), labels=labels, clusters=sets)
    added = resampler.totals(weights)
    total = resampler.counts @ added
    data = values(total)
    freedom = resampler.freedom(values(total - added))
    drawn = resampler.draws(resamples, seed=seed, purpose=purpose)
    again = np.concatenate([values(counts @ added) for counts in drawn])
    method = f"percentile bootstrap {resampler.note}, {resamples} resamples, {percent(level)}, ends moved out by t"
    fixed = resampler.fixed == resampler.strata
    found = {}
    for place, name in enumerate(names):
        value, defined = float(data[place]), again[np.isfinite(again[:, place]), place]
        low = high = np.nan
        reason = "" if np.isfinite(value) else f"{name} is undefined: a cell that it needs has no prompt"
        if np.isfinite(value) and fixed:
            reason = "every stratum holds one set: nothing to draw anew"
        elif np.isfinite(value):
            tail = outer_tail(level, freedom[place])
            low, high = (float(end) for end in np.quantile(defined, [tail, 1 - tail]))
        found[name] = Interval(
            statistic=str(name), value=value, low=low, high=high, n=rows, support=rows, undefined=resamples - len(defined),
            method=method, reason=reason,
        )  # fmt: skip
    return found
