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


def finite(name: str, values: npt.NDArray[Any]) -> None:
    """Refuse NaN and infinity in `values` [layer, row, feature]; name the first layer and row that hold one."""
    for layer, rows in enumerate(values):
        bad = int(np.size(rows) - np.count_nonzero(np.isfinite(rows)))
        if bad:
            first = int(np.flatnonzero(~np.isfinite(rows).reshape(len(rows), -1).all(axis=1))[0])
            raise ProbeError(
                f"{name} holds {bad} values that are not finite at layer {layer}, first in row {first}; "
                "a probe needs finite activations, capture them again in float32 or bfloat16"
            )
