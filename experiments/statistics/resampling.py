"""Resamples of matched instances: which are drawn together, within what, and the totals of each resample.

Problem. Two arms (or two presentations) that answered the same instances are not independent samples, and rows of one
instance under several settings are not independent of each other. What can be drawn anew is an instance, with all that
belongs to it: its answers in both presentations and all arms, and in every setting it stands under.

Mechanism. The unit of drawing is a cluster of rows with the same key (by default each row is its own). Within a stratum
units are drawn with replacement, as many as there are. A statistic needs only totals (`experiments.statistics.measures`),
so a resample is: how often each unit was drawn, times what the unit adds to each total. Units of one stratum that add the
same are one kind; how often each kind comes up is multinomial, so 1,800 pairs with 40 patterns of answers cost 40 draws.
Where kinds are many (clusters), drawing the units one by one is cheaper, and is done. Both give the same distribution.

Strata and clusters together. A unit can span strata: the paper's relations all render the same instances. Then the units
are put together that have the same number of rows in every stratum, and drawn within these groups. Every resample has as
many rows in each stratum as the data, which is what stratifying is for, and rows of one instance stay together. With a
complete design (each instance once in every relation) that is one group: it differs from drawing pairs within each
relation only in what it should, that an instance which is hard in all relations counts as one.

A stratum that holds one unit can't vary, so its share of the variance is missing; `Resampler.note` says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from experiments.errors import RunError
from experiments.statistics.columns import combined, divide, groups, same_length
from probes.keyed import generator

CELLS = 2_000_000  # entries of the largest array at any time, so memory does not grow with the resamples
_ONE_BY_ONE = 16  # a multinomial draw of a kind costs about as much as drawing this many units


class Resampler:
    """Draws units within strata.

    Args:
        pattern: the pattern of answers of each row.
        labels: columns that define strata; a resample keeps the number of rows of each combination.
        clusters: the key of each row; rows with one key are drawn together. None: each row by itself.
    """

    def __init__(
        self, pattern: np.ndarray, *, labels: Sequence[np.ndarray] = (), clusters: Sequence[Hashable] | None = None
    ) -> None:
        rows = len(pattern)
        stratum = combined(np.zeros(rows, dtype=np.int64), *labels)
        self._pattern, self._patterns = pattern, int(pattern.max(initial=-1)) + 1
        if clusters is None:
            self._unit, self._group, kind = np.arange(rows), stratum, combined(stratum, pattern)
        else:
            same_length(pattern=pattern, clusters=clusters)
            self._unit = groups(clusters)[1]
            self._group = _same_rows(self._unit, stratum)
            kind = np.arange(len(self._group))
        self.units = len(self._group)
        # Kinds are numbered over all strata, one stratum after the other.
        _, self._example, self._kind, self._count = np.unique(
            combined(self._group, kind), return_index=True, return_inverse=True, return_counts=True
        )
        sizes = np.bincount(self._group)
        self.strata, self.fixed = len(sizes), int((sizes == 1).sum())
        self._clustered = clusters is not None

    @property
    def note(self) -> str:
        """What was drawn, for the method of a result."""
        drawn = "over instances, all rows of one together" if self._clustered else "over instances"
        within = " within strata" if self.strata > 1 else ""
        fixed = f" ({self.fixed} of {self.strata} with one instance, which can't vary)" if self.fixed and within else ""
        return drawn + within + fixed

    def totals(self, weights: np.ndarray) -> np.ndarray:
        """Return what each kind adds to each total, where a pattern adds `weights` [pattern, total]."""
        if not self._clustered:
            return weights[self._pattern[self._example]]
        from scipy.sparse import csr_array

        rows = len(self._pattern)
        table = csr_array((np.ones(rows), (self._unit, self._pattern)), shape=(self.units, self._patterns))
        return (table @ weights)[self._example]

    @property
    def counts(self) -> np.ndarray:
        """How often each kind occurs in the data."""
        return self._count.astype(float)

    def freedom(self, without: np.ndarray) -> np.ndarray:
        """Return the degrees of freedom of a statistic's variance estimate, from its values without one of each kind.

        The variance is a sum of squares over units, so its own variance follows from how unequal they are. Units without
        which a statistic is undefined are left out.
        """
        group = self._group[self._example]
        known = np.isfinite(without)
        count = np.where(known, self._count[:, None], 0.0)

        def centred(values: np.ndarray) -> np.ndarray:
            """Subtract the mean within each stratum."""
            sums = np.zeros((2, self.strata, values.shape[1]))
            np.add.at(sums[0], group, count * values)
            np.add.at(sums[1], group, count)
            return values - divide(sums[0], sums[1])[group]

        squares = np.where(known, centred(np.where(known, without, 0.0)), 0.0) ** 2
        variance = (count * squares).sum(axis=0)
        spread = (count * np.where(known, centred(squares), 0.0) ** 2).sum(axis=0)
        # Squares that are equal up to rounding leave the variance certain.
        equal = spread <= 1e-12 * (count * squares**2).sum(axis=0)
        return np.where(equal, np.inf, 2 * variance**2 / np.where(equal, 1.0, spread))

    def draws(self, resamples: int, *, seed: int, purpose: str) -> Iterator[np.ndarray]:
        """Yield chunks [resample, kind] of how often each kind was drawn.

        Each stratum has its own stream, so what is drawn does not depend on how the resamples are cut into chunks.
        """
        if self.units == 0:
            raise RunError("0 instances; needed at least 1 to resample")
        starts = np.searchsorted(self._group[self._example], np.arange(self.strata + 1))
        streams = [generator(seed, purpose, stratum) for stratum in range(self.strata)]
        largest = max(len(self._count), int(np.bincount(self._group).max()))
        step = max(1, CELLS // largest)
        for begin in range(0, resamples, step):
            size = min(step, resamples - begin)
            chunk = np.empty((size, len(self._count)))
            for rng, low, high in zip(streams, starts[:-1], starts[1:], strict=True):
                chunk[:, low:high] = _draw(rng, self._count[low:high], size)
            yield chunk


def _draw(rng: np.random.Generator, counts: np.ndarray, size: int) -> np.ndarray:
    """Draw as many units as there are, `size` times, and count each kind."""
    units, kinds = int(counts.sum()), len(counts)
    if kinds == 1:
        return np.full((size, 1), float(units))
    if kinds * _ONE_BY_ONE < units:
        return rng.multinomial(units, counts / units, size=size)
    kind = np.repeat(np.arange(kinds), counts)
    drawn = kind[rng.integers(0, units, size=(size, units))]
    drawn += (np.arange(size) * kinds)[:, None]
    return np.bincount(drawn.ravel(), minlength=size * kinds).reshape(size, kinds)


def _same_rows(unit: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    """Return one number for each unit, the same for units that have as many rows in every stratum."""
    pairs, rows = np.unique(np.column_stack([unit, stratum]), axis=0, return_counts=True)
    count = np.bincount(pairs[:, 0])
    group = np.zeros(len(count), dtype=np.int64)
    # Entry after entry: after step i, units with the same first i (stratum, rows) have one number.
    first = np.cumsum(count) - count
    for step in range(int(count.max(initial=0))):
        entry = np.zeros(len(count), dtype=np.int64)
        has = count > step
        at = first[has] + step
        entry[has] = 1 + combined(pairs[at, 1], rows[at])
        group = combined(group, entry)
    return group
