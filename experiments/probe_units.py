"""Units that folds hold out whole: a relation, a size, a template.

A probe may have learned what belongs to one wording. Where a whole unit is held out, it has to read rows whose unit it has
never seen. Two designs call for two kinds of folds:

* Each unit has both labels (a relation asks as many questions whose answer is yes as no): a fold is a unit, and each
  unit has an AUROC of its own.
* A unit has one label (a template is valid or it is not, whoever it is about): no unit can be judged alone. Units are
  dealt to folds, whole, so that each fold has some of either label. Rows of a unit then share their label and much of
  their text, so that they are one piece of evidence: intervals draw units, and shuffles exchange labels among units.
  Fifteen templates are fifteen observations, and a probe has to be good to show on so few.

The *template* of a row is what its instance calls so, or, where a family has none, its question phrase: the cell without
the gold answer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from experiments.items import Row

TEMPLATE = "template"
SHOWN = 4  # values of a unit named in a message


def with_template(table: pd.DataFrame, asked: Sequence[Row]) -> pd.DataFrame:
    """The rows' table with a column ``template``, where every instance has one; ``asked`` stands in the same order."""
    named = [row.matched.instance.latent.get(TEMPLATE) for row in asked]
    return table.assign(**{TEMPLATE: named}) if all(isinstance(one, str) for one in named) else table


def unit_names(name: str, params: Mapping[str, Mapping[str, Any]], table: pd.DataFrame) -> np.ndarray:
    """The unit that folds hold out whole, of each row."""
    if name == TEMPLATE:
        return table[TEMPLATE].to_numpy(dtype=str) if TEMPLATE in table else phrases(table)
    return np.array([str(params[setting][name]) for setting in table["setting"]])


def phrases(table: pd.DataFrame) -> np.ndarray:
    """Each row's question phrase: its cell without the gold answer, ``forward`` of ``forward-yes``."""
    return np.array(
        [
            str(cell).removesuffix(str(gold)).rstrip("-_ ") or str(cell)
            for cell, gold in zip(table["cell"], table["gold"], strict=True)
        ]
    )


def units_said(name: str, units: Sequence[Any]) -> str:
    """How many folds there are, where each is a unit."""
    shown = ", ".join(map(str, units[:SHOWN])) + (", …" if len(units) > SHOWN else "")
    return f"probe.held_out is {name}, which makes {len(units)} folds ({shown})"


def one_label(units: np.ndarray, labels: np.ndarray) -> list[str]:
    """The units whose rows all have one label, in order of their names."""
    return [str(unit) for unit in np.unique(units) if len(np.unique(labels[units == unit])) < 2]


def holding(units: np.ndarray, labels: np.ndarray) -> dict[Any, int]:
    """How many units hold each label."""
    return {label: len(np.unique(units[labels == label])) for label in np.unique(labels).tolist()}


def dealt(units: np.ndarray, labels: np.ndarray, *, folds: int, seed: int) -> dict[str, int]:
    """The fold of each unit: at most ``folds``, and no more than there are units of the rarer label.

    Units are dealt by their own label, the one most of their rows have; each counts once, however many rows it has.
    """
    from sklearn.model_selection import StratifiedKFold

    names, codes = np.unique(units, return_inverse=True)
    _, values = np.unique(labels, return_inverse=True)
    own = (np.bincount(codes, weights=values) / np.bincount(codes) > 0.5).astype(int)
    count = fold_count(units, labels, folds=folds)
    splitter = StratifiedKFold(count, shuffle=True, random_state=seed % 2**32)
    found: dict[str, int] = {}
    with warnings.catch_warnings():
        # Units that hold both labels count for one of them: some fold may lack a unit of the other.
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        for fold, (_, held_out) in enumerate(splitter.split(np.zeros((len(names), 1)), own)):
            found.update((str(names[place]), fold) for place in held_out)
    return found


def fold_count(units: np.ndarray, labels: np.ndarray, *, folds: int) -> int:
    """How many folds units of one label each are dealt to."""
    return min(folds, *holding(units, labels).values())
