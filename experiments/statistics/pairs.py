"""What became of each pair: both right, both wrong, or right in one presentation only.

Problem. Two presentations of one instance can have the same accuracy and still answer different instances. The marginal
scores leave open whether a model is right in both, wrong in both, or right in one only; matched pairs decide it.

On the pairs whose two answers parsed (the support), with gold the same in both presentations, R, D and U are the shares
with both right, both wrong, exactly one right, and invariance is ι = R + D. Accuracy counts an answer that did not parse
as wrong, on all prompts. Strict invariance counts it as a disagreement, on all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics.chance import Kappa, kappa
from experiments.statistics.columns import MISSING, coded
from experiments.statistics.marginal import McNemar, discordance
from experiments.statistics.shares import PresentationScore, Share, score, share


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


def pair_profile(
    original: Sequence[str | None], equivalent: Sequence[str | None], gold: Sequence[str], *, level: float = 0.95
) -> PairProfile:
    """Profile two presentations of the same instances, whose `gold` answer both share."""
    first, second, truth = coded(original=original, equivalent=equivalent, gold=gold)
    n, both = len(truth), (first != MISSING) & (second != MISSING)
    support = int(both.sum())
    right_first, right_second = first == truth, second == truth

    def on_support(event: np.ndarray) -> Share:
        return share((event & both).sum(), support, level=level)

    return PairProfile(
        n=n,
        n_parsed=support,
        original=score(first, truth, level=level),
        equivalent=score(second, truth, level=level),
        common_original=on_support(right_first),
        common_equivalent=on_support(right_second),
        robust=on_support(right_first & right_second),
        shared_wrong=on_support(~right_first & ~right_second),
        unstable=on_support(right_first ^ right_second),
        invariance=on_support(first == second),
        strict_invariance=share(((first == second) & both).sum(), n, level=level),
        kappa=kappa(first, second),
        mcnemar=discordance(right_first, right_second),
    )
