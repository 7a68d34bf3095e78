"""Where accuracy moves though the logic does not: groups of prompts against each other, and trends over model sizes.

`compare_groups` compares groups of prompts (name groups with the letters, activities, two wordings of one pattern, two
ways to negate) that differ in one thing only. Prompts that are alike in all else form a block; within a block each group
has its mean, and the difference of two groups is the mean of their differences over the blocks that have both. Easy and
hard templates thus cancel. The interval resamples blocks. The test flips the sign of each block's difference at random,
which is exact if nothing but the names of the two groups were to differ; p-values are adjusted by Holm over the
comparisons made.

Constraint. Blocks are taken as independent. Where two blocks share a matched set (two forms of one), make the set the
block: its difference is then the mean over its forms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import MISSING, coded, combined, divide, flags, groups, percent, same_length, whole
from experiments.statistics.marginal import McNemar, discordance, holm
from experiments.statistics.polarity import resampled
from experiments.statistics.resampling import CELLS
from probes.keyed import generator

FLIPS = 9_999
CLUSTERED = "over instances, all rows of one together"  # what `Resampler.note` calls the blocks here
EXACT_UP_TO = 8  # models of a size trend whose permutations are all tried


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContrast:
    """Accuracy of group `first` less that of `second`, as fractions, over `blocks` that have both.

    `first_accuracy` and `second_accuracy` are over these blocks; `n` prompts counted.
    """

    first: Hashable
    second: Hashable
    first_accuracy: float
    second_accuracy: float
    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    n: int
    blocks: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NegationStrategy:
    """Negation by a prefix (incorrect, invalid) against the word not, on matched prompts with one gold answer.

    `contrast` is over matched sets, `mcnemar` over pairs of prompts (b: only the prefix is right), which takes the two
    pairs of a set as independent. The yes-rates are over the answers that were read.
    """

    contrast: GroupContrast
    mcnemar: McNemar
    prefix_yes_rate: float
    not_yes_rate: float
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTrend:
    """Spearman's ρ of a measure and model size over `n` models, with its interval and a two-sided p.

    Without ρ, or with ρ and no interval, `reason` says why.
    """

    rho: float
    p: float
    n: int
    method: str
    low: float = math.nan
    high: float = math.nan
    reason: str = ""


def compare_groups(
    right: Sequence[bool],
    members: Sequence[Hashable],
    blocks: Sequence[Hashable],
    *,
    reference: Hashable | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> tuple[GroupContrast, ...]:
    """Compare each group with the reference, or all pairs of groups where none is given.

    Args:
        right: whether the answer is right, one a prompt.
        members: the group of each prompt.
        blocks: what makes prompts comparable: equal for prompts that differ in the group alone.

    Raises:
        RunError: fewer than two groups, or no such reference.
    """
    (correct,) = flags(right=right)
    same_length(right=right, members=members, blocks=blocks)
    names, member = groups(members)
    block = groups(blocks)[1]
    if len(names) < 2:
        raise RunError(f"groups are {', '.join(map(str, names)) or 'none'}; needed at least two to compare")
    if reference is not None and reference not in names:
        raise RunError(f"reference is {reference!r}; the groups are {', '.join(map(str, names))}")
    pairs = (
        list(itertools.combinations(range(len(names)), 2))
        if reference is None
        else [(place, names.index(reference)) for place in range(len(names)) if names[place] != reference]
    )
    shape = (int(block.max(initial=-1)) + 1, len(names))
    place = block * len(names) + member
    count = np.bincount(place, minlength=math.prod(shape)).reshape(shape)
    mean = divide(np.bincount(place, weights=correct, minlength=math.prod(shape)).reshape(shape), count)
    one, other = (np.array(side) for side in zip(*pairs, strict=True))
    both = (count[:, one] > 0) & (count[:, other] > 0)
    difference = np.where(both, mean[:, one] - mean[:, other], 0.0)
    found = resampled(
        range(len(pairs)), np.hstack([difference, both]), _means, sets=range(shape[0]), strata=None, resamples=resamples,
        level=level, seed=seed, purpose="statistics.compare_groups",
    )  # fmt: skip
    p = _sign_flips(difference, seed=seed)
    p[~both.any(axis=0)] = np.nan
    adjusted = holm({str(index): float(value) for index, value in enumerate(p)})
    made = []
    for index, (first, second) in enumerate(pairs):
        shared, interval = both[:, index], found[index]
        made.append(
            GroupContrast(
                first=names[first],
                second=names[second],
                first_accuracy=float(mean[shared, first].mean()) if shared.any() else np.nan,
                second_accuracy=float(mean[shared, second].mean()) if shared.any() else np.nan,
                difference=interval.value,
                low=interval.low,
                high=interval.high,
                p=float(p[index]),
                p_holm=adjusted[str(index)],
                n=int(count[shared][:, [first, second]].sum()),
                blocks=int(shared.sum()),
                method=f"{FLIPS} sign flips of blocks; {interval.method.replace(CLUSTERED, 'over blocks')}",
                reason="" if shared.any() else "no block holds both groups",
            )
        )
    return tuple(made)


def _means(totals: np.ndarray) -> np.ndarray:
    """Mean difference of each pair, from its sum and its number of blocks."""
    sums, blocks = np.split(totals, 2, axis=-1)
    return divide(sums, blocks)


def _sign_flips(difference: np.ndarray, *, seed: int) -> np.ndarray:
    """Two-sided p of each mean difference [block, pair] under random signs of the blocks; 0 where a block lacks a group."""
    rng = generator(seed, "statistics.sign_flips")
    blocks, total = len(difference), difference.sum(axis=0)
    reached = np.zeros(difference.shape[1])
    for begin in range(0, FLIPS, step := max(1, CELLS // max(blocks, 1))):
        rows = min(step, FLIPS - begin)
        bits = np.frombuffer(rng.bytes(rows * (-(-blocks // 8))), dtype=np.uint8).reshape(rows, -1)
        kept = np.unpackbits(bits, axis=1, count=blocks).astype(float)
        reached += (np.abs(2 * (kept @ difference) - total) >= np.abs(total) - 1e-9).sum(axis=0)
    return (1 + reached) / (FLIPS + 1)


def negation_strategy(
    answers: Sequence[str | None],
    gold: Sequence[str],
    forms: Sequence[Hashable],
    negations: Sequence[str],
    sets: Sequence[Hashable],
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> NegationStrategy:
    """Compare "incorrect" with "not correct" and "invalid" with "not valid" on the same sets.

    Args:
        forms: the question form of each prompt; negations: ``none``, ``prefix`` or ``not``.

    Only forms that have both negations count.

    Raises:
        RunError: no set has both, or a prompt stands twice.
    """
    given, truth = coded(answers=answers, gold=gold)
    same_length(answers=answers, forms=forms, negations=negations, sets=sets)
    negation = np.array(list(negations), dtype=object)
    key = combined(groups(sets)[1], groups(forms)[1])
    at = {}
    for style in ("prefix", "not"):
        rows = np.flatnonzero(negation == style)
        if len(np.unique(key[rows])) != len(rows):
            raise RunError(
                f"a set and form stand twice with negation {style!r}; needed once, so score one arm at a time"
            )
        at[style] = rows[np.argsort(key[rows])]
    shared = np.intersect1d(key[at["prefix"]], key[at["not"]])
    prefix, word = (rows[np.isin(key[rows], shared)] for rows in (at["prefix"], at["not"]))
    if not len(shared):
        raise RunError(
            "no set has a form negated both by a prefix and by the word not; render not_correct and not_valid"
        )
    rows = np.concatenate([prefix, word])
    right, unit = given == truth, groups(sets)[1]
    (contrast,) = compare_groups(
        right[rows].tolist(),
        negation[rows].tolist(),
        unit[rows].tolist(),
        reference="not",
        resamples=resamples,
        level=level,
        seed=seed,
    )
    return NegationStrategy(
        contrast=contrast,
        mcnemar=discordance(right[prefix], right[word]),
        prefix_yes_rate=_yes_rate(given[prefix]),
        not_yes_rate=_yes_rate(given[word]),
        pairs=len(shared),
    )


def _yes_rate(given: np.ndarray) -> float:
    return float(divide((given == 1).sum(), (given != MISSING).sum()))


def size_trend(sizes: Sequence[float], values: Sequence[float], *, level: float = 0.95) -> SizeTrend:
    """Rank correlation of a measure with model size, over the models of one family.

    Up to eight models every order is tried for p; beyond, it is Student's approximation. The interval is Fisher's, with
    Bonett and Wright's variance (1 + ρ²/2) / (n - 3); it takes models as independent draws and needs four of them.
    """
    from scipy.stats import norm, rankdata, spearmanr

    same_length(sizes=sizes, values=values)
    size, value = np.asarray(sizes, dtype=float), np.asarray(values, dtype=float)
    known = np.isfinite(size) & np.isfinite(value)
    size, value = size[known], value[known]
    n = whole("n", len(size), 0)
    exact = n <= EXACT_UP_TO
    method = f"Spearman, {'all orders' if exact else 'Student approximation'}, two-sided"
    if n < 3 or len(set(size)) == 1 or len(set(value)) == 1:
        why = f"{n} models" if n < 3 else "one value in all models"
        return SizeTrend(rho=np.nan, p=np.nan, n=n, method=method, reason=f"no trend: {why}")
    found = spearmanr(size, value)
    rho, p = float(found.statistic), float(found.pvalue)
    if exact:
        first, second = (rank - rank.mean() for rank in (rankdata(size), rankdata(value)))
        every = np.array([second[list(order)] @ first for order in itertools.permutations(range(n))])
        p = float((np.abs(every) >= abs(second @ first) - 1e-9).mean())
    if n < 4 or math.isclose(abs(rho), 1):
        why = f"{n} models" if n < 4 else f"ρ is {rho:+.0f}"
        return SizeTrend(rho=rho, p=p, n=n, method=method, reason=f"no interval: {why}")
    half = float(norm.ppf((1 + level) / 2)) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    low, high = math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)
    return SizeTrend(
        rho=rho, p=p, n=n, low=low, high=high, method=f"{method}; {percent(level)} interval by Fisher's z, variance of "
        "Bonett and Wright",
    )  # fmt: skip
