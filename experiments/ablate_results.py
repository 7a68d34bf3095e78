"""The numbers of an ablation as results.json keeps them, made from its tables alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.ablate_effects import family_of, study
from experiments.ablate_halves import RANKED
from experiments.ablate_stage import NOTHING, ranking
from experiments.inside import DECOMPOSED, PAIR, design
from experiments.instances import by_instance, share_of
from experiments.intervention_stage import cost_of

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Asking


def ablation(
    heads: pd.DataFrame | None, table: pd.DataFrame, readout: pd.DataFrame, labels: Sequence[str], config: Asking
) -> dict[str, Any]:
    """Readouts with the top heads and with control sets cut: δ, s, accuracy and invariance by set.

    ``sets`` are nothing, the top heads and random ones; ``more_sets`` those of the same layers, and the top heads but one.
    ``above`` is the change by the top heads less that by a control, ``added`` what each top head adds to the others, both
    paired by instance; ``notes`` says of a set whether agreement rose while competence fell.

    Args:
        heads: the sweep that ranked them; None where they were given.
    """
    named = list(dict.fromkeys(table["ablated"]))
    sets = {name: _ablated(table, name, readout, labels, config) for name in named}
    known = {name: one for name, one in sets.items() if family_of(name) in (NOTHING, "top", "random")}
    found = study(table, labels, config)
    basis = "given heads"
    if heads is not None:
        ranks = heads[heads["half"] == RANKED]
        basis = "disagreeing pairs" if (ranks["pair"] == "disagreeing").all() else "all pairs (too few disagree)"
    return {
        "ranking": [] if heads is None else [dataclasses.asdict(one) for one in ranking(heads, config)],
        "ranked_on": basis,
        "sets": known,
        "more_sets": {name: one for name, one in sets.items() if name not in known},
        "above": {name: _intervals(one) for name, one in found.above.items()},
        "added": {name: _intervals(one) for name, one in found.added.items()},
        "rank_p": dict(found.rank_p),
        "notes": {
            name: {"agreement_without_competence": one.agreement_without_competence, "note": one.note}
            for name, one in found.sets.items()
        },
        "method": found.method,
        "reason": found.reason,
        "heads": None if heads is None else cost_of(heads),
        "ablate": cost_of(table),
    }


def _ablated(
    table: pd.DataFrame, name: str, readout: pd.DataFrame, labels: Sequence[str], config: Asking
) -> dict[str, Any]:
    """One set: δ, s and accuracy of each presentation, their paired change, and invariance."""
    from probes.decompose import decompose, paired_difference

    how: Any = {"resamples": config.resamples, "declared": design(readout, labels), "seed": config.seed}
    row = ["setting", "key", "presentation"]
    about = table[table["ablated"] == NOTHING].sort_values(row, ignore_index=True)
    cut = table[table["ablated"] == name].sort_values(row, ignore_index=True)
    before, values = about["difference"].to_numpy(), cut["difference"].to_numpy()
    gold, kinds = (about["gold"] == labels[0]).to_numpy(), about["presentation"].to_numpy()
    one: dict[str, Any] = {"heads": cut["heads"].iloc[0]}
    answers = {}
    for kind in PAIR:
        at = kinds == kind
        once = by_instance(np.stack([before[at], values[at]]), about[at])
        design_of = (once.table["cell"].to_numpy(), once.gold(labels[0]))
        split = decompose(once.values[1], *design_of, **how)
        one[kind] = {
            **{field: getattr(split, field) for field in DECOMPOSED},
            "accuracy": share_of((values[at] > 0) == gold[at], about["key"][at]),
            "n": split.n,
            "reason": split.reason,
        }
        answers[kind] = values[at] > 0
        if name != NOTHING:
            change = paired_difference(once.values[0], once.values[1], *design_of, **how)
            one[kind]["change"] = {field: getattr(change, field) for field in (*DECOMPOSED, "reason")}
    same = answers["original"] == answers["equivalent"]
    one["invariance"] = share_of(same, about["key"][kinds == PAIR[0]])
    one["readout"] = f"answers are signs of the readout, heads {_cut(table)}"
    return one


def _cut(table: pd.DataFrame) -> str:
    replaced = {"zero": "zeroed", "mean": "replaced by their mean", "resample": "replaced by another instance's"}
    where = {"answer": "at the answer position", "all": "at every position"}
    return f"{replaced[table['source'].iloc[0]]} {where[table['scope'].iloc[0]]}"


def _intervals(measures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dataclasses.asdict(one) for name, one in measures.items()}
