"""The link table: each answer, and what was measured inside when it was given.

For every prompt of a pair three measurements are put beside the outcome:

* *readable*: whether the held-out probe, at the layer chosen on other folds, gives the gold answer. A coin would be right
  half the time, so this is asked only of presentations whose probes beat shuffled labels (``ABOVE_CHANCE``); elsewhere it
  is missing, and a wrong answer counts as unreadable;
* *signal*: the readout without the presentation's default, (readout − δ), counted toward the gold answer;
* *default*: δ counted toward the gold answer; negative when the standing pull speaks against it.

A wrong answer is then one of four kinds. ``text``: the readout was right and the text was not, because it could not be
read or says something else; what was measured does not explain it. ``overridden``: readable, and the instance's signal
points to the gold answer, so the default decided. ``unused``: readable, but the signal points away. ``unreadable``: the
probe does not find it. The kinds describe what was measured at one position with linear probes; other information may
exist elsewhere.

*Repaired* says whether the other presentation's residual turned the wrong readout right, at the first layer where the
donor presentation's probe reaches the threshold (the best layer where none does); the same for an unrelated instance's
residual and a random direction is the control. The last layer is left out of that choice: its residual *is* the answer,
so putting it in repairs by construction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from experiments.causes import DONORS
from experiments.inside import PAIR

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

ROW = ["setting", "key", "presentation"]
OUTCOMES = ("R", "D", "U", "N")
# Largest p of the best layer against the shuffles' best layers at which a probe's verdicts on single answers are used.
ABOVE_CHANCE = 0.05
NO_LAYER = -1
KINDS = ("overridden", "unused", "unreadable", "text")


def attribution(
    behaviour: pd.DataFrame,
    readout: pd.DataFrame,
    probes: pd.DataFrame,
    probe_rows: pd.DataFrame,
    decomposition: pd.DataFrame,
    patch: pd.DataFrame,
    labels: Sequence[str],
    *,
    threshold: float,
) -> pd.DataFrame:
    """One row a prompt of one arm.

    Args:
        behaviour, readout, probes, probe_rows, decomposition, patch: the arm's tables.
        labels: the family's labels, the first is "yes".
        threshold: AUROC that counts as readable.

    Returns:
        outcome (R, D, U; N where an answer of the pair was not read), correct, decodable, signal, default, kind, and
        ``repaired_<donor>`` at ``patch_layer`` (missing where the prompt was not patched or its readout was right).
    """
    import pandas as pd

    shown = behaviour[behaviour["presentation"].isin(PAIR)]
    table = shown[[*ROW, "n", "cell", "gold", "answer", "correct"]].merge(readout[[*ROW, "difference"]], on=ROW)
    table = table.merge(probe_rows[[*ROW, "layer", "margin", "decodable"]], on=ROW)
    table = table.merge(outcomes(shown), on=["setting", "key"])
    found = probes.groupby("presentation")["p_max"].first() <= ABOVE_CHANCE
    table["decodable"] = table["decodable"].astype("boolean").mask(~table["presentation"].map(found).astype(bool))
    sign = np.where(table["gold"] == labels[0], 1.0, -1.0)
    pooled = decomposition[decomposition["setting"] == "all"].set_index("presentation")["delta"]
    delta = table["presentation"].map(pooled).to_numpy(dtype=float)
    table["signal"] = (table["difference"].to_numpy() - delta) * sign
    table["default"] = delta * sign
    table["readout_correct"] = table["difference"].to_numpy() * sign > 0
    table["kind"] = pd.array(
        np.select(
            [
                table["correct"],
                table["readout_correct"],
                ~table["decodable"].fillna(False).astype(bool),
                table["signal"] > 0,
            ],
            ["right", "text", "unreadable", "overridden"],
            default="unused",
        ),
        dtype="string",
    )
    table["patch_layer"] = table["presentation"].map(patch_layers(probes, threshold))
    at = patch.merge(table[[*ROW, "patch_layer"]], left_on=[*ROW, "layer"], right_on=[*ROW, "patch_layer"])
    at = at.assign(fixed=at["patched"].to_numpy() * np.where(at["gold"] == labels[0], 1.0, -1.0) > 0)
    wide = at.pivot_table(index=ROW, columns="donor", values="fixed", aggfunc="first").reindex(columns=list(DONORS))
    table = table.merge(wide.add_prefix("repaired_").reset_index(), on=ROW, how="left")
    for donor in DONORS:
        column = table[f"repaired_{donor}"].astype("boolean")
        table[f"repaired_{donor}"] = column.mask(table["readout_correct"])
    return table


def patch_layers(probes: pd.DataFrame, threshold: float) -> dict[str, int]:
    """For each recipient presentation the layer at which its repair is judged, from the donor presentation's probes."""
    found = {}
    for recipient, donor in (PAIR, PAIR[::-1]):
        curve = probes[probes["presentation"] == donor].set_index("layer")["auroc"].sort_index()
        curve = curve.iloc[:-1]
        if curve.empty:  # one layer, the last: nothing to judge a repair at
            found[recipient] = NO_LAYER
            continue
        reached = curve.index[curve >= threshold]
        found[recipient] = int(reached[0]) if len(reached) else int(curve.idxmax())
    return found


def outcomes(behaviour: pd.DataFrame) -> pd.DataFrame:
    """R, D, U or N for each pair, from the texts that were read."""
    import pandas as pd

    right = behaviour.pivot(index=["setting", "key"], columns="presentation", values="correct")
    read = behaviour.assign(read=behaviour["answer"].notna()).pivot(
        index=["setting", "key"], columns="presentation", values="read"
    )
    first, second = (right[kind].to_numpy(dtype=bool) for kind in PAIR)
    both = read[list(PAIR)].to_numpy(dtype=bool).all(axis=1)
    outcome = np.select([~both, first & second, ~first & ~second], ["N", "R", "D"], default="U")
    return pd.DataFrame({"outcome": outcome}, index=right.index).reset_index()
