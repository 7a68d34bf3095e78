"""Columns of answers as numbers, and what is refused about them.

A behaviour table holds "yes", "no" and missing answers (None from code, NaN from a data frame). Every statistic here
counts, so a column is turned into numbers once: 1 for "yes", 0 for "no", -1 for missing. Only the distinct values of a
column are looked at one by one; a value that is none of these is refused with its place, since a typing error counted
as "missing" would look like a model that can't be parsed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from experiments.errors import RunError

MISSING = -1
_ANSWERS: Mapping[Hashable, int] = {"yes": 1, "no": 0}
_FLAGS: Mapping[Hashable, int] = {True: 1, False: 0}


def coded(**columns: Sequence[Any]) -> list[np.ndarray]:
    """Return each column as 1 for "yes", 0 for "no", -1 for missing (never in gold); anything else is named."""
    same_length(**columns)
    return [_looked_up(name, column, _ANSWERS, None if name == "gold" else MISSING) for name, column in columns.items()]


def flags(**columns: Sequence[Any]) -> list[np.ndarray]:
    """Return each column as booleans; a missing value or a word is refused, not taken for True."""
    same_length(**columns)
    return [_looked_up(name, column, _FLAGS, None).astype(bool) for name, column in columns.items()]


def groups(values: Iterable[Hashable]) -> tuple[list[Hashable], np.ndarray]:
    """Return the distinct values in order of first appearance, and the number of each item's value.

    A missing value is a group of its own.
    """
    codes, distinct = _distinct(values)
    return list(distinct), codes


def combined(*members: np.ndarray) -> np.ndarray:
    """Return one group number for each combination of group numbers (all at least 0), in order of the combinations."""
    key = np.zeros(len(members[0]), dtype=np.int64)
    for one in members:
        # Numbered anew at each step, so that the key stays below the number of items times one factor.
        key = np.unique(key * (int(one.max(initial=0)) + 1) + one, return_inverse=True)[1]
    return key


def same_length(**columns: Sequence[Any] | np.ndarray) -> None:
    """Refuse columns of different lengths, showing each."""
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise RunError(f"columns differ in length ({lengths}); all need one entry an instance, in one order")


def inside(name: str, value: Any, low: float = 0, high: float = 1, *, ends: bool = False) -> float:
    """Return a number that lies between `low` and `high`, with the `ends` if they are allowed."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not ((low <= value <= high) if ends else (low < value < high)):
        span = f"from {low} to {high}" if ends else f"above {low} and below {high}"
        raise RunError(f"{name} is {value!r}; allowed: {span}")
    return float(value)


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise RunError(f"{name} is {value!r}; allowed: a whole number of at least {least}")
    return int(value)


def percent(level: float) -> str:
    """Write a level in full: 0.95 is 95%, 0.999 is 99.9%."""
    return f"{100 * level:.6g}%"


def divide(part: Any, whole: Any) -> np.ndarray:
    """Divide, with NaN where the whole is 0."""
    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def _looked_up(name: str, column: Sequence[Any], numbers: Mapping[Hashable, int], missing: int | None) -> np.ndarray:
    """Return the number of each value; `missing` stands for None and NaN, or None if they are refused."""
    allowed = ", ".join(map(str, numbers)) + ("" if missing is None else " or None")
    codes, distinct = _distinct(column, name=name, allowed=allowed)
    table = np.empty(len(distinct), dtype=np.int64)
    for number, value in enumerate(distinct):
        if value in numbers:
            table[number] = numbers[value]
        elif missing is not None and _absent(value):
            table[number] = missing
        else:
            raise RunError(f"{name}[{int(np.argmax(codes == number))}] is {value!r}; allowed: {allowed}")
    return table[codes]


def _distinct(
    values: Iterable[Any], *, name: str = "labels", allowed: str = "hashable values"
) -> tuple[np.ndarray, list[Any]]:
    """Number the distinct values in order of first appearance."""
    import pandas as pd

    items = list(values)
    column = np.empty(len(items), dtype=object)  # np.array would make a table of a column of tuples
    column[:] = items
    try:
        codes = pd.factorize(column, use_na_sentinel=False)[0]
    except TypeError:
        index = next(index for index, value in enumerate(items) if not _hashes(value))
        raise RunError(f"{name}[{index}] is {items[index]!r}; allowed: {allowed}") from None
    # The first item of each number, since pandas gives back NaN for None.
    return codes.astype(np.int64), [items[index] for index in np.unique(codes, return_index=True)[1]]


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _absent(value: Any) -> bool:
    """Say whether a value is None, NaN or the NA of pandas."""
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and bool(np.isnan(value)))
