"""How far groups of prompts lie apart: a range over groups, and what the leans of several models have in common.

`accuracy_range` is the largest accuracy of any group less the smallest (question forms, activities). It is never below 0
and above it by chance alone: groups of 100 prompts that are all right half the time spread by some 10 points. Its p says
how often groups spread as far when their names are dealt anew within blocks of prompts that are alike in all else.

`common_lean` sums up one lean a model: its mean size, and the share of models on the side that most take. Both are about
the models given, not about models at large, so they have no interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import divide, flags, groups, same_length
from experiments.statistics.contrasts import Interval
from experiments.statistics.polarity import resampled
from probes.keyed import generator

DEALS = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The range of accuracy over `groups` groups with its interval, and p against names dealt at random."""

    interval: Interval
    p: float
    groups: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonLean:
    """Of `n` models: mean of |lean|, and the share of those that lean at all on the side that most of these take."""

    mean_size: float
    agreement: float
    n: int


def accuracy_range(
    right: Sequence[bool],
    members: Sequence[Hashable],
    sets: Sequence[Hashable],
    blocks: Sequence[Hashable],
    *,
    strata: Sequence[Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> Spread:
    """Compare the groups that lie furthest apart.

    Args:
        right: whether the answer is right, one a prompt.
        members: the group of each prompt.
        sets: the matched set of each prompt, whose prompts are drawn together.
        blocks: equal for prompts that differ in the group alone; only blocks that hold all groups tell p.
        strata: a label a prompt (its template and, where sets lie within groups, its group).

    Raises:
        RunError: fewer than two groups.
    """
    (correct,) = flags(right=right)
    same_length(right=right, members=members, sets=sets, blocks=blocks)
    names, member = groups(members)
    if len(names) < 2:
        raise RunError(f"groups are {', '.join(map(str, names)) or 'none'}; needed at least two to compare")
    weights = np.zeros((len(correct), len(names), 2))
    weights[np.arange(len(correct)), member] = np.column_stack([correct, np.ones(len(correct))])
    interval = resampled(
        ("range",), weights.reshape(len(correct), -1), _range, sets=sets, strata=strata, resamples=resamples, level=level,
        seed=seed, purpose="statistics.accuracy_range",
    )["range"]  # fmt: skip
    p, used = _dealt(correct, member, groups(blocks)[1], len(names), seed=seed)
    return Spread(
        interval=interval,
        p=p,
        groups=len(names),
        method=f"{DEALS} deals of the groups' names within {used} blocks",
        reason="" if used else "no block holds all groups",
    )


def common_lean(leans: Sequence[float]) -> CommonLean:
    """Sum up one lean a model; undefined ones are left out."""
    known = np.array([one for one in leans if np.isfinite(one)])
    signs = np.sign(known)
    sides = np.array([(signs > 0).sum(), (signs < 0).sum()])
    return CommonLean(
        mean_size=float(np.abs(known).mean()) if len(known) else np.nan,
        agreement=float(divide(sides.max(), sides.sum())),
        n=len(known),
    )


def _range(totals: np.ndarray) -> np.ndarray:
    """Largest less smallest accuracy, from right and asked of each group [..., group × 2]."""
    shares = divide(totals[..., ::2], totals[..., 1::2])
    return np.ptp(shares, axis=-1)[..., None]


def _dealt(correct: np.ndarray, member: np.ndarray, block: np.ndarray, count: int, *, seed: int) -> tuple[float, int]:
    """How often the means over blocks spread as far with the groups' means dealt anew in each block."""
    shape = (int(block.max(initial=-1)) + 1, count)
    place = block * count + member
    asked = np.bincount(place, minlength=shape[0] * count).reshape(shape)
    mean = divide(np.bincount(place, weights=correct, minlength=shape[0] * count).reshape(shape), asked)
    mean = mean[(asked > 0).all(axis=1)]
    if not len(mean):
        return np.nan, 0
    rng = generator(seed, "statistics.accuracy_range.dealt")
    seen = np.ptp(mean.mean(axis=0))
    reached = sum(np.ptp(rng.permuted(mean, axis=1).mean(axis=0)) >= seen - 1e-9 for _ in range(DEALS))
    return (1 + int(reached)) / (DEALS + 1), len(mean)
