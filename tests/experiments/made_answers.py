"""Answers about probability operators without a model: the family's own questions, and answers with a known lean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from experiments.answer_facts import Facts, choices_of, questions
from tasks.contracts import Family, MatchedSet
from tasks.files import to_record
from tasks.registry import family as family_named

LABEL = "templates=all"


def sets_of(params: Mapping[str, Any], limit: int | None = None) -> tuple[Family, list[MatchedSet]]:
    family = family_named("modals")
    return family, list(islice(family.generate(params, seed=1, split="test"), limit))


def made(
    params: Mapping[str, Any] | None = None,
    *,
    arms: Sequence[str] = ("base",),
    limit: int | None = None,
    missing: float = 0.03,
    seed: int = 0,
) -> tuple[pd.DataFrame, Facts, dict[str, dict[str, Any]]]:
    """Behaviour, facts and params; each arm has an accuracy and a lean of its own.

    The letters are answered a little better than names, and the word not a little worse than a prefix.
    """
    family, sets = sets_of(params or {}, limit)
    rows = [
        question for one in sets for question in questions({"setting": LABEL, **to_record(one, version=family.version)})
    ]
    table = pd.DataFrame(rows)
    names = tuple(name for name in table if name not in ("setting", "key", "presentation"))
    gold = [shown.gold for one in sets for shown in one.presentations]
    cells = [one.instance.cell for one in sets for _ in one.presentations]
    rng, parts = np.random.default_rng(seed), []
    for number, arm in enumerate(arms):
        lean = 0.25 if number == 0 else rng.uniform(-0.4, 0.4)
        right = 0.6 + 0.05 * (table["group"] == "letters") - 0.1 * (table["negation"] == "not")
        right += np.where(np.array(gold) == "yes", lean, -lean)
        says = np.where(rng.random(len(table)) < right, gold, np.where(np.array(gold) == "yes", "no", "yes"))
        unread = rng.random(len(table)) < missing
        answer = [None if gone else str(word) for gone, word in zip(unread, says, strict=True)]
        parts.append(
            pd.DataFrame({
                "arm": arm, "setting": LABEL, "n": pd.array([None] * len(table), dtype="Int64"), "key": table["key"],
                "presentation": table["presentation"], "cell": cells, "gold": gold,
                "n_tokens": 2, "status": np.where(unread, "unparsed", "parsed"),
                "answer": pd.array(answer, dtype="string"), "correct": ~unread & (says == gold),
            })
        )  # fmt: skip
    shared = dict(family.validate(params or {}))
    return pd.concat(parts, ignore_index=True), Facts(table, names, choices_of(family)), {LABEL: shared}
