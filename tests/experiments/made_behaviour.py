"""Behaviour tables without a model: answers drawn with a known accuracy, missing answers included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

CELLS = (("forward", "yes"), ("forward", "no"), ("converse", "yes"), ("converse", "no"))


def behaviour(
    params: Mapping[str, Mapping[str, Any]],
    *,
    arms: Sequence[str] = ("base",),
    limit: int = 20,
    missing: float = 0.05,
    seed: int = 0,
) -> pd.DataFrame:
    """One row an arm, setting, instance and presentation.

    Instances are named by size and number, so that settings of one size share them, as a family's settings do.
    Later presentations repeat the original's answer half the time, whatever is right.
    """
    rng = np.random.default_rng(seed)
    frames = []
    for number, arm in enumerate(arms):
        for label, values in params.items():
            gold = np.array([CELLS[index % 4][1] for index in range(limit)])
            kinds = values.get("presentations", ["original", "equivalent"])
            opposite = np.where(gold == "yes", "no", "yes")

            original, *others = (
                np.where(rng.random(limit) < 0.6 + 0.1 * number, gold, opposite) for _ in range(len(kinds))
            )
            answers = [original, *(np.where(rng.random(limit) < 0.5, original, other) for other in others)]
            for kind, answer in zip(kinds, answers, strict=True):
                cut = rng.random(limit) < missing
                text = [None if one else str(word) for one, word in zip(cut, answer, strict=True)]
                frames.append(
                    pd.DataFrame(
                        {
                            "arm": arm,
                            "setting": label,
                            "n": pd.array([values.get("n")] * limit, dtype="Int64"),
                            "key": [f"{values.get('n')}-{index}" for index in range(limit)],
                            "presentation": kind,
                            "cell": ["-".join(CELLS[index % 4]) for index in range(limit)],
                            "gold": gold,
                            "n_tokens": rng.integers(1, 20, limit),
                            "status": np.where(
                                cut, np.where(rng.random(limit) < 0.5, "truncated", "unparsed"), "parsed"
                            ),
                            "answer": pd.array(text, dtype="string"),
                            "correct": ~cut & (answer == gold),
                        }
                    )
                )
    return pd.concat(frames, ignore_index=True)
