"""How often: shares with Wilson intervals, over all prompts, over parsed answers, by gold answer and by cell.

An accuracy has two readings when answers are missing. Over all prompts a missing answer is wrong: what a user of the
model meets. Over the parsed answers it is left out: how good the answers are that can be read. Neither is the truth about
the missing ones; `accuracy_bounds` says how far they could move the first. Wilson intervals stay inside [0, 1] and have
width even at 0 and n, where the textbook interval has none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import MISSING, coded, groups, inside, percent, same_length, whole


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

    Accuracies are over all prompts, `accuracy_yes` and `accuracy_no` over those with that gold answer;
    `accuracy_parsed` and `yes_rate` are over the parsed ones. `floor` is the lower of the two accuracies by gold, `bias`
    is yes less no.
    """

    n: int
    parsed: Share
    accuracy: Share
    accuracy_parsed: Share
    accuracy_yes: Share
    accuracy_no: Share
    yes_rate: Share
    floor: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellScore:
    """One cell of a balanced design: `accuracy` over its `n` prompts, `yes_rate` over its parsed answers."""

    accuracy: Share
    yes_rate: Share
    parsed: Share
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What accuracy could be: `low` if every missing answer were wrong, `high` if every one were right.

    `all_prompts` takes them as wrong and carries the interval of the lower end; `parsed_only` leaves them out, on
    `support` answers. Without missing answers all four agree.
    """

    low: float
    high: float
    all_prompts: Share
    parsed_only: Share
    n: int
    support: int
    method: str = "missing answers all wrong / all right"
    reason: str = ""


def share(count: int, n: int, *, level: float = 0.95) -> Share:
    """Return count / n with its Wilson interval."""
    from statsmodels.stats.proportion import proportion_confint

    count, n, method = whole("count", count, 0), whole("n", n, 0), f"Wilson {percent(inside('level', level))}"
    if count > n:
        raise RunError(f"count is {count} of n = {n}; allowed: 0 to n")
    if n == 0:
        return Share(value=np.nan, low=np.nan, high=np.nan, count=0, n=0, method=method, reason="nothing to count")
    low, high = proportion_confint(count, n, alpha=1 - level, method="wilson")
    # At 0 and n an end is 0 or 1 exactly; rounding puts it a little beside.
    low, high = (0.0 if count == 0 else float(low)), (1.0 if count == n else float(high))
    return Share(value=count / n, low=low, high=high, count=count, n=n, method=method)


def unanimous(count: int, n: int, clusters: Sequence[Hashable], *, level: float = 0.95) -> Share | None:
    """Return a share of rows that all say the same, with an interval over instances; None if rows differ.

    Where several rows are about one instance, an interval comes from resampling instances. That has no width if no row
    differs, as if the share were known. Wilson's has one; it is taken over as many instances as the rows hold at least.

    Args:
        clusters: the instance of each row, of all rows.
    """
    if n == 0 or 0 < count < n:
        return None
    instances = -(-n // int(np.bincount(groups(clusters)[1]).max()))
    one = share(instances if count else 0, instances, level=level)
    return replace(one, count=count, n=n, method=f"{one.method} over {instances} instances, since no row differs")


def presentation_score(answers: Sequence[str | None], gold: Sequence[str], *, level: float = 0.95) -> PresentationScore:
    """Score one presentation; an answer that did not parse is wrong."""
    given, truth = coded(answers=answers, gold=gold)
    return score(given, truth, level=level)


def score(given: np.ndarray, truth: np.ndarray, *, level: float) -> PresentationScore:
    """Score one presentation of numbered answers."""
    right, parsed, n = given == truth, given != MISSING, len(truth)
    yes, no = (share(right[truth == code].sum(), (truth == code).sum(), level=level) for code in (1, 0))
    return PresentationScore(
        n=n,
        parsed=share(parsed.sum(), n, level=level),
        accuracy=share(right.sum(), n, level=level),
        accuracy_parsed=share(right.sum(), parsed.sum(), level=level),
        accuracy_yes=yes,
        accuracy_no=no,
        yes_rate=share((given == 1).sum(), parsed.sum(), level=level),
        floor=float(np.minimum(yes.value, no.value)),  # NaN if a gold answer does not occur
        bias=yes.value - no.value,
    )


def cell_table(
    answers: Sequence[str | None], gold: Sequence[str], cells: Sequence[Hashable], *, level: float = 0.95
) -> Mapping[Hashable, CellScore]:
    """Score each cell (query direction and gold, say) of one presentation, in order of first appearance."""
    given, truth = coded(answers=answers, gold=gold)
    same_length(answers=answers, cells=cells)
    names, members = groups(cells)
    n, parsed, right, yes = (
        np.bincount(members, weights=event, minlength=len(names)).astype(int)
        for event in (np.ones(len(given)), given != MISSING, given == truth, given == 1)
    )
    return {
        name: CellScore(
            accuracy=share(right[i], n[i], level=level),
            yes_rate=share(yes[i], parsed[i], level=level),
            parsed=share(parsed[i], n[i], level=level),
            n=int(n[i]),
        )
        for i, name in enumerate(names)
    }


def accuracy_bounds(answers: Sequence[str | None], gold: Sequence[str], *, level: float = 0.95) -> Bounds:
    """Bound the accuracy that complete answers would have had."""
    given, truth = coded(answers=answers, gold=gold)
    right, parsed, n = int((given == truth).sum()), int((given != MISSING).sum()), len(truth)
    return Bounds(
        low=right / n if n else np.nan,
        high=(right + n - parsed) / n if n else np.nan,
        all_prompts=share(right, n, level=level),
        parsed_only=share(right, parsed, level=level),
        n=n,
        support=parsed,
        reason="" if n else "nothing to count",
    )
