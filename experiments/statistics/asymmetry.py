"""Whether missing answers are spread evenly: over arms, and over the presentations of one arm.

A parser that reads one arm or one presentation worse, or a token limit that cuts one of them more often, fakes a
difference in accuracy and in invariance. The shares of prompts without an answer are therefore compared on the same
prompts, by McNemar's test with Holm's correction over the comparisons made. Unparsed means every status but "parsed";
truncated is the part of it that the token limit cut off.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import combined, groups, same_length
from experiments.statistics.marginal import discordance, holm
from experiments.statistics.shares import Share, share

PARSED, TRUNCATED = "parsed", "truncated"
STATUSES = (PARSED, "unparsed", "ambiguous", "abstained", "refused", TRUNCATED, "overflow", "error")
KINDS = ("unparsed", "truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCoverage:
    """The prompts of one arm without an answer, those cut off by the token limit, and the prompts of each status."""

    unparsed: Share
    truncated: Share
    statuses: Mapping[str, int]
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asymmetry:
    """Test of one kind of missing answer on the same `n` prompts (or pairs): `difference` = second - first share.

    `b` are missing in `first` only, `c` in `second` only. `p_holm` is adjusted over the comparisons of this kind. `arm`
    is set if two presentations of one arm are compared.
    """

    kind: str
    first: Hashable
    second: Hashable
    arm: str
    difference: float
    b: int
    c: int
    p: float
    p_holm: float
    n: int
    method: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Missing answers by arm, tests of each arm against the first, and of the two presentations within each arm."""

    arms: Mapping[str, ArmCoverage]
    between_arms: tuple[Asymmetry, ...]
    between_presentations: tuple[Asymmetry, ...]
    n: int
    method: str = "McNemar on the same prompts, Holm over the comparisons of one kind"
    reason: str = ""


def coverage(
    arms: Mapping[str, Sequence[str]],
    *,
    presentations: Sequence[Hashable] | None = None,
    keys: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Coverage:
    """Compare which prompts have no answer.

    Args:
        arms: the statuses of each arm, all for the same prompts in one order. Each arm is compared with the first.
        presentations: the presentation of each prompt, of two kinds; with `keys` they are compared within each arm.
        keys: what pairs the prompts, each key once in either presentation. An instance that stands under several
            settings needs the setting in its key.
        level: of the shares' intervals.
    """
    if not arms:
        raise RunError("no arm given; coverage needs the statuses of at least one")
    same_length(**arms)
    missing = {arm: _missing(arm, statuses) for arm, statuses in arms.items()}
    n = len(next(iter(arms.values())))
    first, *others = arms
    between = [
        _test(kind, missing[first][kind], missing[other][kind], first=first, second=other)
        for kind in KINDS
        for other in others
    ]
    if (presentations is None) != (keys is None):
        raise RunError(
            "presentations and keys are given together or not at all: keys pair the prompts of two presentations"
        )
    within = []
    if presentations is not None and keys is not None:
        same_length(**{first: arms[first]}, presentations=presentations, keys=keys)
        (one, left), (two, right) = _matched(presentations, keys)
        within = [
            _test(kind, missing[arm][kind][left], missing[arm][kind][right], first=one, second=two, arm=arm)
            for kind in KINDS
            for arm in arms
        ]
    return Coverage(
        arms={arm: _coverage(arms[arm], missing[arm], level) for arm in arms},
        between_arms=_adjusted(between),
        between_presentations=_adjusted(within),
        n=n,
        reason="" if n else "nothing to count",
    )


def _missing(arm: str, statuses: Sequence[str]) -> dict[str, np.ndarray]:
    names, members = groups(statuses)
    for number, name in enumerate(names):
        if name not in STATUSES:
            index = int(np.argmax(members == number))
            raise RunError(f"status {arm}[{index}] is {name!r}; allowed: {', '.join(STATUSES)}")
    return {
        "unparsed": np.array([name != PARSED for name in names], dtype=bool)[members],
        "truncated": np.array([name == TRUNCATED for name in names], dtype=bool)[members],
    }


def _coverage(statuses: Sequence[str], missing: Mapping[str, np.ndarray], level: float) -> ArmCoverage:
    names, members = groups(statuses)
    counts = dict(zip(names, np.bincount(members, minlength=len(names)).tolist(), strict=True))
    shares = {kind: share(missing[kind].sum(), len(members), level=level) for kind in KINDS}
    in_order = {status: counts[status] for status in STATUSES if status in counts}
    return ArmCoverage(**shares, statuses=in_order, n=len(members))


def _matched(
    presentations: Sequence[Hashable], keys: Sequence[Hashable]
) -> tuple[tuple[Hashable, np.ndarray], tuple[Hashable, np.ndarray]]:
    """Return the two presentations, each with the places of its prompts, in one order of keys."""
    kinds, kind = groups(presentations)
    if len(kinds) != 2:
        raise RunError(f"presentations are {', '.join(map(str, kinds)) or 'none'}; needed two to compare")
    names, key = groups(keys)
    each = np.bincount(combined(kind) * len(names) + key, minlength=2 * len(names)).reshape(2, -1)
    if (each != 1).any():
        which, number = np.argwhere(each != 1)[0]
        raise RunError(
            f"key {names[number]!r} stands {each[which, number]} times in {kinds[which]}; needed once in each"
        )
    one, other = (np.flatnonzero(kind == which) for which in (0, 1))
    return (kinds[0], one[np.argsort(key[one])]), (kinds[1], other[np.argsort(key[other])])


def _test(
    kind: str, one: np.ndarray, other: np.ndarray, *, first: Hashable, second: Hashable, arm: str = ""
) -> Asymmetry:
    test = discordance(one, other)
    difference = float(other.mean() - one.mean()) if test.n else np.nan
    return Asymmetry(
        kind=kind, first=first, second=second, arm=arm, difference=difference, b=test.b, c=test.c, p=test.p,
        p_holm=test.p, n=test.n, method=test.method, reason=test.reason,
    )  # fmt: skip


def _adjusted(tests: Sequence[Asymmetry]) -> tuple[Asymmetry, ...]:
    """Adjust the p-values within each kind."""
    adjusted: dict[str, float] = {}
    for kind in KINDS:
        adjusted |= holm({str(index): test.p for index, test in enumerate(tests) if test.kind == kind})
    return tuple(replace(test, p_holm=adjusted[str(index)]) for index, test in enumerate(tests))
