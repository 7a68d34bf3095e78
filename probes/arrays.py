"""Array types, and the shape checks that every entry point of this room repeats.

A mismatch between rows of features and rows of labels is the easiest way to get a plausible wrong number, because numpy
broadcasts many of them. So each array is checked by name at the door, and the message shows both shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.errors import ProbeError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

LARGEST = 1e150  # features beyond it have no standard deviation in float64


def checked(name: str, values: npt.ArrayLike, axes: Sequence[str]) -> npt.NDArray[Any]:
    """Return `values` as an array with one axis per name in `axes`, or say which shape came instead."""
    array = np.asarray(values)
    if array.ndim != len(axes):
        raise ProbeError(f"{name} has shape {array.shape}; needed one axis each for [{', '.join(axes)}]")
    if array.size == 0:
        raise ProbeError(f"{name} is empty (shape {array.shape}); needed at least one of each of [{', '.join(axes)}]")
    return array


def same_rows(name: str, found: int, other: str, expected: int) -> None:
    """Refuse two arrays whose row counts differ."""
    if found != expected:
        raise ProbeError(f"{name} has {found} rows and {other} has {expected}; both need the same rows in one order")


def binary(name: str, values: npt.ArrayLike) -> IntArray:
    """Return 0/1 labels as integers; other values are named, since -1/+1 labels would silently mean something else."""
    array = checked(name, values, ("row",))
    found = np.unique(array)
    if not np.isin(found, (0, 1)).all():
        shown = ", ".join(str(value) for value in found[:6].tolist())
        raise ProbeError(f"{name} holds the values {shown}; only 0 and 1 are allowed")
    return array.astype(np.int64)


def flags(name: str, values: npt.ArrayLike) -> BoolArray:
    """Return true/false (or 1/0) `values` of any shape as booleans; NaN and None, which numpy takes for one, are named."""
    array = np.asarray(values)
    if array.dtype != np.bool_:
        kinds = (bool, int, float, np.bool_, np.number)
        wrong = [one for one in array.ravel().tolist() if not isinstance(one, kinds) or one not in (0, 1)]
        if wrong:
            raise ProbeError(
                f"{name} holds {len(wrong)} values that are neither true nor false, the first {wrong[0]}; decide them, "
                "or leave those rows out"
            )
    return array.astype(np.bool_)


def all_finite(name: str, values: npt.NDArray[Any], remedy: str) -> None:
    """Refuse NaN and infinity in `values` of any shape; `remedy` ends the message."""
    bad = int(np.size(values) - np.count_nonzero(np.isfinite(values)))
    if bad:
        raise ProbeError(f"{name} holds {bad} values that are not finite; {remedy}")


def named(name: str, values: npt.NDArray[Any]) -> None:
    """Refuse missing names (NaN, None) in `values` [row]: numpy takes all of them for one name, or cannot sort them."""
    missing = [one is None or one != one for one in values.tolist()] if values.dtype.kind in "fcO" else []
    if any(missing):
        raise ProbeError(
            f"{name} holds {sum(missing)} missing names (NaN or None), the first in row {missing.index(True)}; name "
            "each row, or leave those rows out"
        )


def finite(name: str, values: npt.NDArray[Any]) -> None:
    """Refuse NaN and infinity in `values` [layer, row, feature], and what overflows when it is squared.

    The message names the first layer and row that hold one.
    """
    for layer, rows in enumerate(values):
        bad = int(np.size(rows) - np.count_nonzero(np.isfinite(rows)))
        if bad:
            first = int(np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(axis=1))[0])
            raise ProbeError(
                f"{name} holds {bad} values that are not finite at layer {layer}, first in row {first}; "
                "a probe needs finite activations, capture them again in float32 or bfloat16"
            )
        largest = float(np.abs(rows).max()) if rows.dtype == np.float64 else 0.0
        if largest > LARGEST:
            raise ProbeError(
                f"{name} holds {largest:.3g} at layer {layer}, whose square overflows; a probe needs features of at most "
                f"{LARGEST:g} in size, scale them"
            )
