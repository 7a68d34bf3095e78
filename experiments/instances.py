"""Rows of one instance are no separate evidence.

An instance may stand in several rows of a table: under two relations, in both presentations. Its rows say nearly the same,
so an interval that takes them for independent is too narrow. Two ways out, used for every number of a run:

* a mean (δ, s, an effect in logits) is taken over instances, each with the mean of its rows: ``by_instance``;
* a share counts rows, and its interval is that of as many observations as there are instances: ``share_of``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from experiments.statistics import Share, share

if TYPE_CHECKING:
    import pandas as pd

CELL = ("key", "cell", "gold")
MEAN = "mean of each instance's rows"


@dataclass(frozen=True, slots=True, eq=False)
class ByInstance:
    """One value an instance: ``values`` [..., instance], and the first row of each in ``table``."""

    values: np.ndarray
    table: pd.DataFrame
    repeated: bool

    def gold(self, label: str) -> np.ndarray:
        """1 for the instances whose gold answer is ``label``, 0 for the others."""
        return (self.table["gold"] == label).to_numpy().astype(int)

    def method(self, words: str) -> str:
        """How a number came about, with the mean over rows where there was one."""
        return f"{words}; {MEAN}" if self.repeated else words


def by_instance(values: np.ndarray, table: pd.DataFrame, *, by: Sequence[str] = CELL) -> ByInstance:
    """Take the mean over the rows that are equal in ``by``; in the order in which they first occur.

    Args:
        values: ``[..., row]``, rows as in ``table``. Where no instance repeats they come back as they are.
    """
    codes = table.groupby(list(by), sort=False).ngroup().to_numpy()
    count = int(codes.max()) + 1 if len(codes) else 0
    if count == len(codes):
        return ByInstance(values, table, repeated=False)
    order = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    sums = np.add.reduceat(np.asarray(values, dtype=np.float64)[..., order], first, axis=-1)
    return ByInstance(sums / sizes, table.iloc[order[first]], repeated=True)


def share_of(hit: np.ndarray, keys: Sequence[str] | np.ndarray | pd.Series) -> Share:
    """Share of rows that ``hit`` [row], with Wilson's interval at the number of instances among ``keys`` [row]."""
    return share_at(int(np.sum(hit)), len(hit), len(set(keys)))


def share_at(count: int, n: int, instances: int) -> Share:
    """``count`` of ``n`` rows, with Wilson's interval at the number of instances."""
    from probes.failure_shares import wilson

    found = share(count, n)
    if n in (0, instances):
        return found
    low, high = wilson(count, n, instances)
    return replace(found, low=low, high=high, method=f"{found.method} over {instances} instances")
