"""Paired statistics of answers, each from columns of "yes", "no" and missing answers and never from a model.

=====================  =============================================================================================
question               answered by
=====================  =============================================================================================
How often right?       ``share``, ``presentation_score``, ``cell_table`` (by cell), ``accuracy_bounds`` (whatever the
                       missing answers were)
What of each pair?     ``pair_profile``: both right, both wrong, one right; invariance ι
More than chance?      ``kappa_bar``, and ``pair_profile(...).kappa``: both chance references
Do numbers fit?        ``identities``; ``frechet``: what accuracies alone leave open
Equal accuracies?      ``mcnemar``, ``holm``, ``marginal_gap``
How uncertain?         ``pair_interval``: any of ``STATISTICS`` of one arm, by bootstrap over instances
Did an arm change?     ``compare_arms``: the same for the difference of two arms, paired
Only decoding noise?   ``repeat_agreement``: invariance against the same prompt sent twice
Where does it break?   ``crossing``, with the chance that fresh data say the same
Are pairs enough?      ``half_width``, ``detectable_difference``
Knows, or says yes?    ``polarity_profile``: accuracy by validity × negation, bias, floor; ``pooling``: five weightings;
                       ``breakdown`` by group, ``turned`` makes a negated question and its original a pair
Surface that matters?  ``compare_groups``, ``negation_strategy``, ``size_trend``; ``accuracy_range``, ``common_lean``
Is parsing fair?       ``coverage``: unparsed and truncated answers by arm and presentation
=====================  =============================================================================================

An answer that did not parse is wrong for accuracy over all prompts and a disagreement for strict invariance; it is left
out of R, D, U, ι and κ, whose support is the pairs with two parsed answers. Every result says how many items it is about
(`n`), how many counted (`support`) and how it was computed (`method`). What is undefined is NaN with a `reason`, never 0.
"""

from experiments.statistics.asymmetry import ArmCoverage, Asymmetry, Coverage, coverage
from experiments.statistics.chance import Kappa, KappaBar, kappa_bar
from experiments.statistics.checks import Frechet, Identities, frechet, identities
from experiments.statistics.contrasts import Arm, Contrast, Interval, compare_arms, pair_interval
from experiments.statistics.marginal import MarginalGap, McNemar, holm, marginal_gap, mcnemar
from experiments.statistics.measures import STATISTICS
from experiments.statistics.pairs import PairProfile, pair_profile
from experiments.statistics.polarity import (
    FourCells,
    PolarityProfile,
    Pooling,
    breakdown,
    polarity_profile,
    pooling,
    turned,
)
from experiments.statistics.polarity_groups import (
    GroupContrast,
    NegationStrategy,
    SizeTrend,
    compare_groups,
    negation_strategy,
    size_trend,
)
from experiments.statistics.polarity_spread import CommonLean, Spread, accuracy_range, common_lean
from experiments.statistics.power import Detectable, HalfWidth, detectable_difference, half_width
from experiments.statistics.repeats import Repeat, repeat_agreement
from experiments.statistics.shares import (
    Bounds,
    CellScore,
    PresentationScore,
    Share,
    accuracy_bounds,
    cell_table,
    presentation_score,
    share,
    unanimous,
)
from experiments.statistics.thresholds import Crossing, crossing

__all__ = [
    "STATISTICS",
    "Arm",
    "ArmCoverage",
    "Asymmetry",
    "Bounds",
    "CellScore",
    "CommonLean",
    "Contrast",
    "Coverage",
    "Crossing",
    "Detectable",
    "FourCells",
    "Frechet",
    "GroupContrast",
    "HalfWidth",
    "Identities",
    "Interval",
    "Kappa",
    "KappaBar",
    "MarginalGap",
    "McNemar",
    "NegationStrategy",
    "PairProfile",
    "PolarityProfile",
    "Pooling",
    "PresentationScore",
    "Repeat",
    "Share",
    "SizeTrend",
    "Spread",
    "accuracy_bounds",
    "accuracy_range",
    "breakdown",
    "cell_table",
    "common_lean",
    "compare_arms",
    "compare_groups",
    "coverage",
    "crossing",
    "detectable_difference",
    "frechet",
    "half_width",
    "holm",
    "identities",
    "kappa_bar",
    "marginal_gap",
    "mcnemar",
    "negation_strategy",
    "pair_interval",
    "pair_profile",
    "polarity_profile",
    "pooling",
    "presentation_score",
    "repeat_agreement",
    "share",
    "size_trend",
    "turned",
    "unanimous",
]
