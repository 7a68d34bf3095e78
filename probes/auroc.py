"""Area under the ROC curve for many score and label sets at once.

AUROC is the chance that a row of class 1 scores above a row of class 0, a tie counting half. With mid-ranks (tied
scores share the mean of their ranks) it is the Mann-Whitney count: the rank sum of class 1, less what it would be if
class 1 held the lowest ranks, over the number of pairs. All columns are ranked in one call, so a hundred shuffles cost
one pass over an array instead of a hundred curves.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from probes.arrays import BoolArray, FloatArray, IntArray


def auroc(scores: FloatArray, labels: IntArray | BoolArray | FloatArray) -> FloatArray:
    """Return the AUROC of each column of `scores` [row, set] against the same column of `labels` [row, set] (0/1).

    A column with one class has no pair to compare: it is NaN, never 0.5.
    """
    positive = np.asarray(labels, dtype=np.float64)
    ones = positive.sum(axis=0)
    zeros = len(positive) - ones
    ranks = np.asarray(rankdata(scores, method="average", axis=0), dtype=np.float64)
    above = (ranks * positive).sum(axis=0) - ones * (ones + 1) / 2
    pairs = ones * zeros
    areas: FloatArray = np.divide(above, pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0)
    return areas
