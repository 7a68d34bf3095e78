"""From the readouts of an ablation to its tables: which heads, what cutting them does, and what the controls do.

==================  ==================================================================================================
table               a row for each
==================  ==================================================================================================
head_effects        half of the instances × head: mean effect of patching it, in logits toward the donor's readout
ablation            set of heads × measure: before, after, change, each with an interval by instance
ablation_above      control × measure: the change by the top heads less that by the control
ablation_notes      set of heads: whether agreement rose while competence fell, and the sentence that says so
head_grid           head × measure: the change with this head cut by itself (where that was asked for)
==================  ==================================================================================================

The intervals are paired: an instance is drawn with both presentations, before and after, under every set of heads. What
the numbers mean is said where they are made, in ``patching.heads_ablation``; here they are laid out. A number that is
undefined is NaN with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.ablate_halves import RANKED, TESTED
from experiments.ablate_stage import NOTHING, ROW, by_instance_and_head

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Asking
    from patching.heads import Head
    from patching.heads_ablation import AblationStudy

GRID_BLOCK = 64  # heads in one study: its resamples hold every measure of every head at once
ENDS = ("", "_low", "_high")


def family_of(ablated: str) -> str:
    """What kind of set a name stands for: ``top``, ``top without``, ``random`` or ``same layers``."""
    return ablated if ablated in (NOTHING, "top") else ablated.rpartition(" ")[0]


def head_effects(heads: pd.DataFrame, top: Sequence[Head], config: Asking) -> pd.DataFrame:
    """The effect of patching each head, on the instances that rank and, where they were swept, on those that test.

    ``rank`` is the place in the half's own order. Intervals are of each head by itself; ``p`` is that of its |t| against
    the largest of all heads.
    """
    import pandas as pd

    from patching.statistics import mean_interval, sign_flip_p

    frames = []
    for half in (RANKED, TESTED):
        part = heads[heads["half"] == half]
        if part.empty:
            continue
        values, cells, _ = by_instance_and_head(part)
        how: dict[str, Any] = {"seed": config.seed, "resamples": config.resamples}
        found = mean_interval(values, **how)
        places = [(cell.edits[0].layer, cell.edits[0].head) for cell in cells]
        frame = pd.DataFrame(
            {
                "half": half,
                "layer": [layer for layer, _ in places],
                "head": [head for _, head in places],
                "effect": found.mean,
                "low": found.low,
                "high": found.high,
                "p": sign_flip_p(values, seed=config.seed),
                "n": len(part.drop_duplicates(ROW)),
                "n_groups": found.n,
                "chosen": [place in set(top) for place in places],
                "direct": np.nan,
                "direct_low": np.nan,
                "direct_high": np.nan,
                "pair": "disagreeing" if (part["pair"] == "disagreeing").all() else "all",
            }
        )
        if "direct" in part:
            alone = mean_interval(by_instance_and_head(part, "direct")[0], **how)
            frame[["direct", "direct_low", "direct_high"]] = np.stack([alone.mean, alone.low, alone.high], axis=1)
        frame = frame.sort_values(["effect", "layer", "head"], ascending=[False, True, True]).reset_index(drop=True)
        frame.insert(9, "rank", np.arange(1, len(frame) + 1))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def ablation_tables(
    table: pd.DataFrame, labels: Sequence[str], config: Asking, absent: Mapping[str, str]
) -> dict[str, pd.DataFrame]:
    """``ablation``, ``ablation_above`` and ``ablation_notes`` of one arm.

    Args:
        table: the arm's rows of the table of cuts.
        labels: the family's, "yes" first.
        absent: controls that this model can't give, with the reason.
    """
    import pandas as pd

    from patching.heads_measures import STATISTICS

    found = study(table, labels, config)
    heads = dict(zip(table["ablated"], table["heads"], strict=True))
    rows, above = [], []
    for name, one in found.sets.items():
        about = {"ablated": name, "family": family_of(name), "heads": heads[name]}
        counts = {"n": found.n, "n_groups": found.n_groups, "method": found.method}
        for measure, change in one.measures.items():
            values = {f"{side}{end}": value for side in ("before", "after", "change")
                      for end, value in zip(ENDS, _ends(getattr(change, side)), strict=True)}  # fmt: skip
            rows.append({**about, "measure": measure, **values, **counts, "reason": _reason(values["change"], found)})
        for kind, removed in one.share_removed.items():
            values = {f"{side}{end}": np.nan for side in ("before", "after") for end in ENDS}
            values |= {f"change{end}": value for end, value in zip(ENDS, _ends(removed), strict=True)}
            rows.append({**about, "measure": f"share_removed_{kind}", **values, **counts,
                         "reason": _reason(values["change"], found)})  # fmt: skip
    added = {f"top without {head}": one for head, one in found.added.items()}
    for control, measures in {**found.above, **added}.items():
        for measure, difference in measures.items():
            # The rank is by the share of the mean signal that a set removes, and says nothing about other measures.
            rank = found.rank_p.get(control, np.nan) if measure == "share_removed_mean" else np.nan
            ends = dict(zip(("value", "low", "high"), _ends(difference), strict=True))
            reason = _reason(difference.value, found)
            above.append({"control": control, "measure": measure, **ends, "rank_p": rank, "reason": reason})
    for control, reason in absent.items():
        nothing = dict.fromkeys(("value", "low", "high", "rank_p"), np.nan)
        above += [{"control": control, "measure": name, **nothing, "reason": reason} for name in STATISTICS]
    notes = [
        {"ablated": name, "agreement_without_competence": one.agreement_without_competence, "note": one.note}
        for name, one in found.sets.items()
    ]
    columns = ["control", "measure", "value", "low", "high", "rank_p", "reason"]
    return {
        "ablation": pd.DataFrame(rows),
        "ablation_above": pd.DataFrame(above, columns=columns),
        "ablation_notes": pd.DataFrame(notes),
    }


def grid_table(rows: pd.DataFrame, labels: Sequence[str], config: Asking) -> pd.DataFrame:
    """``head_grid`` of one arm: the change of each measure with one head cut by itself.

    Args:
        rows: readouts with each head cut, and ``unablated``.
    """
    import pandas as pd

    wide = rows.pivot(index=ROW, columns=["layer", "head"], values="difference")
    about = rows.drop_duplicates(ROW).set_index(ROW).loc[wide.index].reset_index()
    places = list(wide.columns)
    found = []
    for start in range(0, len(places), GRID_BLOCK):
        block = places[start : start + GRID_BLOCK]
        after = {f"{layer}.{head}": wide[layer, head].to_numpy() for layer, head in block}
        one = _study(about["unablated"].to_numpy(), after, about, labels, config)
        for layer, head in block:
            cut = one.sets[f"{layer}.{head}"]
            values = {name: change.change for name, change in cut.measures.items()}
            values |= {f"share_removed_{kind}": removed for kind, removed in cut.share_removed.items()}
            found += [
                {"layer": int(layer), "head": int(head), "measure": measure,
                 **dict(zip(("value", "low", "high"), _ends(value), strict=True)), "n": one.n, "n_groups": one.n_groups,
                 "method": one.method, "reason": _reason(value.value, one)}
                for measure, value in values.items()
            ]  # fmt: skip
    return pd.DataFrame(found)


def study(table: pd.DataFrame, labels: Sequence[str], config: Asking) -> AblationStudy:
    """The sets of one arm side by side."""
    names = list(dict.fromkeys(table["ablated"]))
    wide = table.pivot(index=ROW, columns="ablated", values="difference")
    about = table[table["ablated"] == NOTHING].set_index(ROW).loc[wide.index].reset_index()
    after = {name: wide[name].to_numpy() for name in names if name != NOTHING}
    return _study(wide[NOTHING].to_numpy(), after, about, labels, config)


def _study(
    before: np.ndarray, after: Mapping[str, np.ndarray], about: pd.DataFrame, labels: Sequence[str], config: Asking
) -> AblationStudy:
    from patching.heads_ablation import ablation_study

    return ablation_study(
        before,
        after,
        presentations=about["presentation"].tolist(),
        keys=list(zip(about["setting"], about["key"], strict=True)),
        cells=about["cell"].tolist(),
        gold=np.where(about["gold"] == labels[0], 1, -1),
        groups=about["key"].tolist(),
        seed=config.seed,
        resamples=config.resamples,
    )


def _ends(one: Any) -> tuple[float, float, float]:
    return one.value, one.low, one.high


def _reason(value: float, found: AblationStudy) -> str:
    return found.reason if np.isnan(value) else ""
