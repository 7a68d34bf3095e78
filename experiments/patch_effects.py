"""From the patch table to effects: each cell beside its controls, with intervals by instance.

The rows of one arm, direction, site and position are one study (``patching.studies``), once for each kind of pair and for
all of them, and once for each group of settings. Everything is computed from the tables alone.

The p of a cell is corrected for all cells of its study by the largest of them when instances change sign. A site that is
patched at several positions is one map of all of them: its p are multiplied by the number of positions, since different
rows are left out at each. Sites are different questions and are not corrected for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.groups import groups
from experiments.patch_options import ALL as EVERY_TOKEN
from experiments.patch_options import ANSWER, DECIDING, KINDS, PatchSettings
from experiments.patch_stage import MATCHED, OWN

if TYPE_CHECKING:
    import pandas as pd

    from patching.studies import CellEffects, Study

ROW = ["setting", "key", "presentation"]
CELL = ["layer", "head"]
ALL = "all"
STUDY = ["direction", "site", "position"]
ESTIMATES = ("effect", "flipped", "restored")
ALPHA = 0.05
PERMUTATIONS = 2000  # sign flips of patching.statistics, where nothing else is asked for


@dataclass(frozen=True, slots=True, eq=False)
class Wide:
    """One arm's rows of one direction, site and position: a row a recipient.

    Attributes:
        about: identity and readouts of the recipients.
        cells: layer and head of the columns; head is None but for ``z``.
        values: by donor the patched readouts ``[recipient, cell]``.
        estimate: the same of a gradient's estimates of the change, where they were asked for.
    """

    about: pd.DataFrame
    cells: list[tuple[int, int | None]]
    values: Mapping[str, np.ndarray]
    estimate: np.ndarray | None

    def within(self, rows: np.ndarray) -> Wide:
        """Some of the recipients."""
        kept = {name: values[rows] for name, values in self.values.items()}
        return Wide(self.about[rows], self.cells, kept, None if self.estimate is None else self.estimate[rows])

    def edits(self, site: str, position: str) -> list[Any]:
        """The cells as ``patching`` knows them."""
        from patching.edits import Cell, Edit

        at = position if position in (ANSWER, EVERY_TOKEN) else f"span:{position}"
        return [
            Cell(f"{site}.{layer}{'' if head is None else f'.{head}'}", (Edit(site, layer, head, MATCHED, at),))
            for layer, head in self.cells
        ]


def wide(table: pd.DataFrame) -> Wide:
    """One arm's rows of one direction, site and position, in the order in which they stand."""
    coded = table.assign(head=table["head"].fillna(-1).astype(int))
    order = coded.drop_duplicates(ROW)[ROW]
    cells = [(int(one.layer), int(one.head)) for one in coded.drop_duplicates(CELL)[CELL].itertuples()]

    def matrix(part: pd.DataFrame, column: str) -> np.ndarray:
        made = part.pivot(index=ROW, columns=CELL, values=column)
        found: np.ndarray = made.loc[list(order.itertuples(index=False, name=None)), cells].to_numpy(dtype=np.float64)
        return found

    parts = dict(list(coded.groupby("donor", sort=False)))
    return Wide(
        about=table.drop_duplicates(ROW).reset_index(drop=True),
        cells=[(layer, None if head < 0 else head) for layer, head in cells],
        values={str(name): matrix(part, "patched") for name, part in parts.items()},
        estimate=matrix(parts[MATCHED], "estimate") if "estimate" in table else None,
    )


def residual(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a patch table in which ``resid_post`` was patched at the answer: what a whole study is about.

    Tables of earlier versions have no other rows, and no column that says so.
    """
    if "site" not in table:
        return table
    return table[(table["site"] == "resid_post") & (table["position"] == ANSWER)]


def effects_table(
    table: pd.DataFrame,
    left_out: pd.DataFrame | None,
    params: Mapping[str, Mapping[str, Any]],
    patch: PatchSettings,
    *,
    seed: int,
    resamples: int,
) -> pd.DataFrame:
    """A row for each arm, group of settings, direction, kind, site, position, cell and donor.

    Groups other than ``all`` have the kinds ``all`` and ``disagreement`` alone.

    Args:
        table, left_out: the tables ``patch`` and ``patch_left_out``, of all arms; None where nothing can be left out.
        params: the family's parameters by setting.

    Raises:
        PatchError: the recipient's own activation changed a readout.
    """
    blocks: list[dict[str, Any]] = []
    positions = {
        arm_site: found.nunique() for arm_site, found in table.groupby(["arm", "site"], sort=False)["position"]
    }
    for (arm, direction, site, position), rows in table.groupby(["arm", *STUDY], sort=False):
        whole = wide(rows)
        bound = float(rows["check_bound"].max())
        without = _without(left_out, str(arm), str(direction), str(position))
        for group in groups(params):
            for kind in (ALL, *(KINDS if group.label == ALL else KINDS[:1])):
                chosen = group.holds(whole.about)
                lost = without[group.holds(without)]
                if kind != ALL:
                    chosen = chosen & (whole.about["kind"] == kind).to_numpy()
                    lost = lost[lost["kind"] == kind]
                if not chosen.any():
                    continue
                made = _study(whole.within(chosen), str(site), str(position), patch, bound, seed, resamples)
                where = {"arm": arm, "group": group.label, "direction": direction, "kind": kind, "site": site,
                         "position": position, "left_out": len(lost)}  # fmt: skip
                blocks += [{**where, **one} for one in _blocks(made, whole.cells, patch, positions[arm, site])]
    return _stacked(blocks)


def _without(left_out: pd.DataFrame | None, arm: str, direction: str, position: str) -> pd.DataFrame:
    import pandas as pd

    if left_out is None:
        return pd.DataFrame({"setting": pd.array([], dtype="str"), "kind": pd.array([], dtype="str")})
    of = (left_out["arm"] == arm) & (left_out["direction"] == direction) & (left_out["position"] == position)
    return left_out[of]


ENDS = ("", "_low", "_high")
TEXTS = ("arm", "group", "direction", "kind", "site", "position", "donor", "method", "reason")
COUNTS = ("n", "n_groups", "left_out", "tied", "flipped_n", "kept")
COLUMNS = ("arm", "group", "direction", "kind", "site", "position", "layer", "head", "donor", "n", "n_groups", "left_out",
           "tied", *(f"effect{end}" for end in (*ENDS, "_p")), *(f"flipped{end}" for end in (*ENDS, "_n")),
           *(f"restored{end}" for end in ENDS), "kept", *(f"above{end}" for end in (*ENDS, "_p")),
           *(f"above_flipped{end}" for end in (*ENDS, "_p")), "specific", "monotone", "own_change", "method",
           "reason")  # fmt: skip


def _stacked(blocks: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One table of blocks of cells: a value of a block is that of each of its cells, or of all of them."""
    import pandas as pd

    found: dict[str, Any] = {}
    for name in COLUMNS:
        missing: Any = 0 if name in COUNTS else None if name in ("layer", "head", "specific") else np.nan
        parts = [np.broadcast_to(np.asarray(one.get(name, missing)), len(one["layer"])) for one in blocks]
        kind = "str" if name in TEXTS else "Int64" if name in ("layer", "head") else "boolean" if name == "specific" else (
            "int64" if name in COUNTS else "bool" if name == "monotone" else "float64"
        )  # fmt: skip
        found[name] = pd.array(np.concatenate(parts) if parts else [], dtype=kind)
    return pd.DataFrame(found)


def _study(
    rows: Wide, site: str, position: str, patch: PatchSettings, bound: float, seed: int, resamples: int
) -> Study | str:
    """The study of these rows; where none of them has a donor with an answer, that."""
    from patching.studies import OWN_BOUND, patch_study

    donor = rows.about["donor_difference"].to_numpy(dtype=np.float64)
    if not donor.any():
        return "no donor's readout is other than 0, so none has an answer"
    return patch_study(
        rows.edits(site, position),
        rows.values[MATCHED],
        rows.about["unpatched"].to_numpy(dtype=np.float64),
        donor,
        controls={name: values for name, values in rows.values.items() if name not in (MATCHED, OWN)},
        own=rows.values.get(OWN),
        own_bound=max(OWN_BOUND, 2 * bound),
        groups=rows.about["key"].tolist(),
        margin=patch.margin,
        seed=seed,
        resamples=resamples,
    )


def _blocks(
    study: Study | str, cells: Sequence[tuple[int, int | None]], patch: PatchSettings, positions: int
) -> list[dict[str, Any]]:
    """The columns of one study: those of the matched donor, then of each control."""
    base: dict[str, Any] = {
        "layer": np.array([layer for layer, _ in cells], dtype=object),
        "head": np.array([head for _, head in cells], dtype=object),
    }
    if isinstance(study, str):
        return [{**base, "donor": MATCHED, "monotone": False, "method": "", "reason": study}]
    base |= {"n": study.n, "n_groups": study.n_groups, "tied": study.tied, "monotone": study.monotone,
             "method": study.method if positions == 1 else f"{study.method}, times {positions} positions"}  # fmt: skip
    specific, why = _specific(study, patch, positions)
    undefined = _why(study)
    found = [{**base, "donor": MATCHED, **_described(study.matched, positions), "specific": specific,
              "own_change": study.own_change, "reason": "; ".join(one for one in (undefined, why) if one)}]  # fmt: skip
    for name, effects in study.controls.items():
        above = study.above[name]
        more = {
            "above": above.difference.mean, "above_low": above.difference.low, "above_high": above.difference.high,
            "above_p": _times(above.p, positions), "above_flipped": above.flipped.mean,
            "above_flipped_low": above.flipped.low, "above_flipped_high": above.flipped.high,
            "above_flipped_p": _times(above.p_flipped, positions),
        }  # fmt: skip
        found.append({**base, "donor": name, **_described(effects, positions), **more, "reason": undefined})
    return found


def _described(effects: CellEffects, positions: int) -> dict[str, Any]:
    return {
        "effect": effects.effect.mean, "effect_low": effects.effect.low, "effect_high": effects.effect.high,
        "effect_p": _times(effects.p, positions), "flipped": effects.flipped.share, "flipped_low": effects.flipped.low,
        "flipped_high": effects.flipped.high, "flipped_n": effects.flipped.n, "restored": effects.restored.mean,
        "restored_low": effects.restored.low, "restored_high": effects.restored.high, "kept": effects.kept,
    }  # fmt: skip


def _times(p: np.ndarray, positions: int) -> np.ndarray:
    """Bonferroni over the positions of a map; NaN stays NaN."""
    return np.minimum(p * positions, 1.0)


def _specific(study: Study, patch: PatchSettings, positions: int) -> tuple[np.ndarray, str]:
    """Whether the matched donor does more than every control that decides, None where unknown; and why all are unknown."""
    unknown = np.full(len(study.cells), None, dtype=object)
    against = [name for name in study.above if name in DECIDING]
    if not against:
        return unknown, f"specific is undefined without a control among {', '.join(DECIDING)}"
    instances = study.n_groups if patch.decides == "difference" else study.matched.flipped.n_groups
    if max(2.0 ** (1 - instances), 1 / (1 + PERMUTATIONS)) * positions > ALPHA:
        several = "" if positions == 1 else f" at {positions} positions"
        return unknown, f"specific is undefined: with {instances} instances{several} no p can be {ALPHA} or less"
    tests = [study.above[name].p if patch.decides == "difference" else study.above[name].p_flipped for name in against]
    found = study.specific(ALPHA / positions, by=patch.decides, against=against).astype(object)
    found[np.any(np.isnan(tests), axis=0)] = None
    return found, ""


def _why(study: Study) -> str:
    """What is undefined in a study, and why."""
    found = []
    if not study.matched.flipped.n:
        found.append("flipped is undefined: no row's recipient and donor answer differently")
    if not study.matched.kept:
        found.append(f"restored is undefined: no row's readouts differ by more than {study.margin:g} logits")
    if study.n_groups < 2:
        found.append("one instance has no interval")
    return "; ".join(found)


def curves(effects: pd.DataFrame) -> list[dict[str, Any]]:
    """The studies over all settings as results.json keeps them: a list of cells and the numbers of each donor."""
    whole = effects[effects["group"] == ALL] if len(effects) else effects
    found = []
    for keys, rows in whole.groupby(["direction", "kind", "site", "position"], sort=False) if len(whole) else ():
        matched = rows[rows["donor"] == MATCHED]
        first = matched.iloc[0]
        donors = {
            str(name): {column: part[column].tolist() for column in _columns(part)}
            for name, part in rows.groupby("donor", sort=False)
        }
        heads = [None if head < 0 else int(head) for head in matched["head"].fillna(-1)]
        found.append(
            {
                **dict(zip(("direction", "kind", "site", "position"), keys, strict=True)),
                "layers": [int(layer) for layer in matched["layer"]],
                "heads": heads if any(head is not None for head in heads) else None,
                "donors": donors,
                "specific": [None if flag is None else bool(flag) for flag in _flags(matched["specific"])],
                **{name: first[name] for name in ("n", "n_groups", "left_out", "tied", "monotone", "own_change", "method",
                                                  "reason")},
            }
        )  # fmt: skip
    return found


def _flags(column: pd.Series) -> list[Any]:
    return [None if missing else flag for flag, missing in zip(column, column.isna(), strict=True)]


def _columns(part: pd.DataFrame) -> list[str]:
    """The numbers of a donor that are defined in some cell."""
    ends = ("", "_low", "_high", "_p", "_n")
    names = [f"{name}{end}" for name in (*ESTIMATES, "above", "above_flipped") for end in ends]
    return [name for name in (*names, "kept") if name in part and part[name].notna().any()]
