"""The two halves of a pair, one of which may flip the gold answer.

Problem. A pair asks whether an answer stays right when only the wording changes. A negated question changes the right
answer too: whoever follows the inference has to say something else, and agreement there is a failure. Mechanism: an
answer to a question that flips the gold answer is *turned*, yes for no, into what it amounts to as an answer to the first
question, with `statistics.turned`. Everything that is known about pairs then holds for a *directional* pair as well: ι is
the share of pairs whose answer changed as the gold answer did, R of those right in both, accuracies stay what they were,
and κ is 0 for a model that changes at random and negative for one that never does.

Constraints. Whether a presentation flips is a fact about the kind: it does in every set or in none. A column of gold
answers that does neither is damaged, and refused with its row. What is said of yes and no of the second presentation
(accuracy by gold answer, yes-rate) is said in terms of the first one's question.

This is the only place that knows about it. Pairs are joined in `profiles` (results.json, comparisons) and `table_pairs`
(tables), and both turn answers here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from experiments.errors import RunError
from experiments.statistics import turned

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from tasks.contracts import Family

# Part of `method` where answers were turned.
TURNED = "answers to the second presentation turned, which flips the gold answer"


def flips(first: pd.Series, second: pd.Series, *, told: Callable[[int], str]) -> bool:
    """Whether the second presentation of a pair flips the gold answer of the first.

    Args:
        first, second: gold answers of the pairs, in one order.
        told: names the row at a place, for the message.

    Raises:
        RunError: it does so in some pairs and not in others; the first of the fewer is named.
    """
    differs: np.ndarray = first.to_numpy() != second.to_numpy()
    if differs.all() or not differs.any():
        return bool(differs.any())
    odd = differs if 2 * differs.sum() <= len(differs) else ~differs
    place = int(odd.argmax())
    raise RunError(
        f"{told(place)}: gold is {second.iloc[place]!r} where the first presentation has {first.iloc[place]!r}, unlike in "
        f"{len(odd) - int(odd.sum())} of {len(odd)} pairs: a presentation keeps the gold answer in every set or flips it "
        "in every set; make the items again"
    )


def as_answers_to_first(answers: pd.Series, *, flipped: bool) -> pd.Series:
    """Answers to the second presentation as answers to the first, None where not read; the index stays."""
    import pandas as pd

    plain = answers.astype(object).where(answers.notna(), None)
    return pd.Series(turned(plain.tolist()), index=answers.index, dtype=object) if flipped else plain


def may_flip(family: Family, pair: tuple[str, str]) -> bool:
    """Whether a family declares that one of these kinds flips the gold answer and the other does not."""
    from tasks.contracts import Directional

    declared = family.flipped if isinstance(family, Directional) else frozenset()
    return (pair[0] in declared) != (pair[1] in declared)
