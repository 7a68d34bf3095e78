"""Which parts of a model carry its default and its signal, and which spoke against the right answer.

Problem. δ and s say that a model leans to "yes" and how much it knows; they do not say which parts make it lean or know.

Mechanism. A readout that is a sum over components (direct logit attribution) takes δ and s apart with it, because both
are linear in the readout: each component has a default and a signal of its own, and they add up to those of the
readout. All components share rows and resamples, so their intervals describe the same draws, and a component's change
from base to adapter is the decomposition of its row-wise change.

Constraints. An interval is for its component alone: of 500 components without any effect some 25 have a 95 % interval
that excludes 0. Use the ranking to choose what to test next, on other instances, and not as a test. Components cancel:
a large signal may be taken back by the next layer, so a share of the total above 1 is no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray, IntArray, checked, same_rows
from probes.decompose import Decomposition, decompose_layers, paired_difference_layers
from probes.errors import ProbeError

# Cell means of one block of components: 128 MiB, however many components, cells and resamples there are.
_BLOCK = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentTable:
    """Default and signal of each component, in logits, and of their sum `whole`; all share rows and resamples.

    The components' `delta` and `signal` add up to those of `whole`, to rounding.
    """

    names: tuple[str, ...]
    parts: tuple[Decomposition, ...]
    whole: Decomposition

    def ranking(self, by: Literal["signal", "delta"] = "signal") -> tuple[int, ...]:
        """The components' numbers, largest |signal| or |delta| first; those that are NaN last."""
        if by not in ("signal", "delta"):
            raise ProbeError(f"components are ranked by {by!r}; choose signal or delta")
        sizes = np.abs([getattr(part, by) for part in self.parts])
        return tuple(np.argsort(-sizes, kind="stable").tolist())

    def top(self, n: int = 10, by: Literal["signal", "delta"] = "signal") -> tuple[tuple[str, Decomposition], ...]:
        """The first `n` of the ranking, with their names."""
        return tuple((self.names[i], self.parts[i]) for i in self.ranking(by)[:n])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Against:
    """For each row the component that pushes most against its gold answer.

    `component` [row] is its number, -1 where none pushes against; `size` [row] is how much it takes from the gold
    answer in logits, positive, NaN where there is none. `names` are those of the components.
    """

    component: IntArray
    size: FloatArray
    names: tuple[str, ...]

    def name(self, row: int) -> str:
        """The name of a row's component, empty where none pushes against."""
        found = int(self.component[row])
        return "" if found < 0 else self.names[found]

    def counts(self) -> dict[str, int]:
        """In how many rows each component is the one, most frequent first; components that never are, are left out."""
        rows = np.bincount(self.component[self.component >= 0], minlength=len(self.names))
        order = np.argsort(-rows, kind="stable").tolist()
        return {self.names[i]: int(rows[i]) for i in order if rows[i]}


def decompose_components(
    values: npt.ArrayLike,
    names: Sequence[str],
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> ComponentTable:
    """Split each component of `values` [component, row] into default and signal; arguments as in `decompose`.

    A row counts if it is a number in every component. An infinite value is refused.
    """
    parts = _with_sum(_named(values, names))
    found: list[Decomposition] = []
    for some in _blocks(len(parts), resamples, cells):
        found += decompose_layers(
            parts[some], cells, gold, resamples=resamples, level=level, declared=declared, seed=seed
        )
    return ComponentTable(names=tuple(names), parts=tuple(found[:-1]), whole=found[-1])


def component_change(
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    names: Sequence[str],
    cells: npt.ArrayLike,
    gold: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    declared: Mapping[str, int] | None = None,
    seed: int,
) -> ComponentTable:
    """Return how each component's default and signal change from `before` to `after`, both [component, row].

    Row i is one instance in both (base and adapter), component j the same part of the model. Drawing a row draws it in
    both arms, see `probes.decompose.paired_difference`, of which this is the same for many.
    """
    first, second = _named(before, names), _named(after, names)
    same_rows("after", second.shape[1], "before", first.shape[1])
    counted = np.isfinite(first).all(axis=0) & np.isfinite(second).all(axis=0)
    first, second = (_with_sum(np.where(counted, parts, np.nan)) for parts in (first, second))
    found: list[Decomposition] = []
    for some in _blocks(len(first), resamples, cells):
        found += paired_difference_layers(
            first[some], second[some], cells, gold, resamples=resamples, level=level, declared=declared, seed=seed
        )
    return ComponentTable(names=tuple(names), parts=tuple(found[:-1]), whole=found[-1])


def against_gold(values: npt.ArrayLike, names: Sequence[str], sign: npt.ArrayLike) -> Against:
    """Find, for each row of `values` [component, row], what spoke instead of the gold answer.

    `sign` [row] is 1 where the gold answer is the first label (yes) and -1 where it is the second. Leave out components
    that are no part of the model (a remainder). A row that holds NaN has no such component.
    """
    parts = _named(values, names)
    signs = checked("sign", sign, ("row",)).astype(np.float64)
    same_rows("sign", len(signs), "values", parts.shape[1])
    if not np.isin(signs, (-1, 1)).all():
        shown = ", ".join(f"{value:g}" for value in np.unique(signs)[:6])
        raise ProbeError(f"sign holds the values {shown}; only 1 (gold is yes) and -1 (gold is no) are allowed")
    push = np.where(np.isfinite(parts).all(axis=0), parts * signs, 0.0)
    component = push.argmin(axis=0).astype(np.int64)
    size = -push[component, np.arange(push.shape[1])]
    none = ~(size > 0)
    return Against(component=np.where(none, -1, component), size=np.where(none, np.nan, size), names=tuple(names))


def _named(values: npt.ArrayLike, names: Sequence[str]) -> FloatArray:
    parts: FloatArray = checked("values", values, ("component", "row")).astype(np.float64)
    if len(names) != len(parts) or len(set(names)) != len(names):
        raise ProbeError(
            f"values has {len(parts)} components and names {len(names)}, {len(set(names))} of them different; "
            "give each component a name of its own"
        )
    infinite = np.isinf(parts)
    if infinite.any():
        component, row = np.argwhere(infinite)[0].tolist()
        raise ProbeError(
            f"values holds {int(infinite.sum())} infinite values, first in component {names[component]!r}, row {row}; "
            "they must be finite, or NaN for a row that is not to count: measure in float32 or bfloat16"
        )
    return parts


def _with_sum(parts: FloatArray) -> FloatArray:
    """Components and their sum, [component + 1, row]; a row that is no number in one of them is NaN in all."""
    counted = np.isfinite(parts).all(axis=0)
    shown = np.where(counted, parts, np.nan)
    return np.vstack([shown, shown.sum(axis=0)])


def _blocks(count: int, resamples: int, cells: npt.ArrayLike) -> list[slice]:
    """Runs of components that fit in memory. Draws depend on seed, cell and its rows alone, so all runs share them."""
    size = max(1, _BLOCK // max(1, resamples * len(np.unique(np.asarray(cells).astype(str)))))
    return [slice(start, start + size) for start in range(0, count, size)]
