"""Run directories of `probe patch` and `probe ablate` with hand-made tables: every number is known, no model is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.rundir import RunDirectory

Cell = tuple[int, int | None]
HOSTILE = "<script>alert(1)</script>\x1b[31mred\u202e $x_1$"


def effects(
    cells: Mapping[Cell, float],
    *,
    arm: str = "base",
    direction: str = "repair",
    kind: str = "disagreement",
    site: str = "resid_post",
    position: str = "answer",
    unrelated: Mapping[Cell, float] | float = 0.1,
    random: Mapping[Cell, float] | float = -0.2,
    specific: Sequence[Cell] | None = (),
    n: int = 24,
) -> pd.DataFrame:
    """Rows of ``patch_effects``: effects by cell with intervals of ±0.25; ``specific`` None is "can't be told"."""
    rows = []

    def of(control: Mapping[Cell, float] | float, cell: Cell) -> float:
        return control if isinstance(control, float) else control[cell]

    for (layer, head), effect in cells.items():
        about = {
            "arm": arm, "group": "all", "direction": direction, "kind": kind, "site": site, "position": position,
            "layer": layer, "head": head, "n": n, "n_groups": n - 2, "left_out": 3, "tied": 0, "method": "by hand",
            "monotone": site == "resid_post" and position == "answer",
        }  # fmt: skip
        told = pd.NA if specific is None else (layer, head) in specific
        reason = "specific is undefined: with 3 instances no p can be 0.05 or less" if specific is None else ""
        rows.append({**about, "donor": "matched", **_of_donor(effect, kind, n), "specific": told, "own_change": 1e-6,
                     "reason": reason})  # fmt: skip
        for name, control in (("unrelated", unrelated), ("random", random)):
            above = effect - of(control, (layer, head))
            rows.append({**about, "donor": name, **_of_donor(of(control, (layer, head)), kind, n), **_ends("above", above),
                         "above_p": 0.0005 if above > 1 else 0.4, **_ends("above_flipped", 0.1), "above_flipped_p": 0.3,
                         "specific": pd.NA, "own_change": float("nan"), "reason": ""})  # fmt: skip
    return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64", "specific": "boolean"})


def _of_donor(effect: float, kind: str, n: int) -> dict[str, Any]:
    flips = kind == "disagreement"
    share = min(max(effect / 4, 0.0), 1.0)
    return {
        **_ends("effect", effect), "effect_p": 0.01, **_ends("flipped", share if flips else float("nan")),
        "flipped_n": n if flips else 0, **_ends("restored", share), "kept": n,
    }  # fmt: skip


def _ends(name: str, value: float) -> dict[str, float]:
    return {name: value, f"{name}_low": value - 0.25, f"{name}_high": value + 0.25}


def transplant(shares: Sequence[float], *, arm: str = "grpo") -> pd.DataFrame:
    """Both directions, a layer each."""
    rows = [
        {"arm": arm, "direction": direction, "presentation": "all", "site": "resid_post", "position": "answer",
         "layer": layer, **_ends("effect", 3 * share), **_ends("share", share), **_ends("total", 3.0), "right": 0.8,
         "right_unpatched": 0.6, "n": 40, "n_groups": 20, "monotone": True, "method": "by hand", "reason": ""}
        for direction in ("adapter→base", "base→adapter")
        for layer, share in enumerate(shares)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def heads(found: Mapping[tuple[int, int], float], top: Sequence[tuple[int, int]], *, arm: str = "base") -> pd.DataFrame:
    """Rows of ``head_effects``; on the tested half every effect is half as large."""
    rows = []
    for half, scale in (("ranked", 1.0), ("tested", 0.5)):
        order = sorted(found, key=lambda place: -found[place])
        for rank, (layer, head) in enumerate(order, start=1):
            effect = scale * found[layer, head]
            rows.append({"arm": arm, "half": half, "layer": layer, "head": head, "effect": effect, "low": effect - 0.1,
                         "high": effect + 0.1, "p": 0.01, "rank": rank, "n": 20, "n_groups": 10,
                         "chosen": (layer, head) in top, "direct": float("nan"), "direct_low": float("nan"),
                         "direct_high": float("nan"), "pair": "disagreeing"})  # fmt: skip
    return pd.DataFrame(rows)


Moves = Mapping[str, tuple[float, float]]
BEFORE_AFTER: Moves = {
    "signal_original": (2.0, 0.5), "signal_equivalent": (1.8, 0.4), "signal_mean": (1.9, 0.45),
    "default_original": (-0.5, -1.5), "default_equivalent": (-0.6, -1.4), "accuracy_original": (0.85, 0.62),
    "accuracy_equivalent": (0.80, 0.60), "accuracy_mean": (0.825, 0.61), "invariance": (0.81, 0.93),
    "robust": (0.73, 0.575), "shared_wrong": (0.08, 0.355), "unstable": (0.19, 0.07),
}  # fmt: skip


def ablation(
    moves: Moves = BEFORE_AFTER, *, arm: str = "base", beyond: float = 0.9, half: float = 0.05, plain: bool = True
) -> dict[str, pd.DataFrame]:
    """``ablation``, ``ablation_above`` and ``ablation_notes`` of one arm.

    Args:
        moves: before and after by measure.
        beyond: share of each change that random heads do not make.
        half: half width of every interval.
        plain: whether agreement rises without competence.
    """
    rows, above = [], []
    sets = {"top": ("top", 1.0), "random 1": ("random", 1 - beyond), "random 2": ("random", 1 - beyond),
            "same layers 1": ("same layers", 1 - beyond)}  # fmt: skip
    for measure, (before, after) in moves.items():
        change = after - before
        for name, (family, share) in sets.items():
            values = {"before": before, "after": before + share * change, "change": share * change}
            intervals = {f"{end}{side}": value + step for end, value in values.items()
                         for side, step in (("", 0.0), ("_low", -half), ("_high", half))}  # fmt: skip
            sweep = "3.1 1.1" if family == "top" else "0.0 1.1"
            rows.append({"arm": arm, "ablated": name, "family": family, "heads": sweep, "measure": measure, **intervals,
                         "n": 80, "n_groups": 80, "method": "by hand", "reason": ""})  # fmt: skip
        for control in ("random", "same layers"):
            value = beyond * change
            above.append({"arm": arm, "control": control, "measure": measure, "value": value, "low": value - half,
                          "high": value + half, "rank_p": float("nan")})  # fmt: skip
    rose = moves["invariance"][1] > moves["invariance"][0]
    notes = pd.DataFrame({"arm": [arm], "ablated": ["top"], "agreement_without_competence": [plain and rose],
                          "note": ["agreement rose" if rose else ""]})  # fmt: skip
    return {"ablation": pd.DataFrame(rows), "ablation_above": pd.DataFrame(above), "ablation_notes": notes}


def head_grid(values: Mapping[tuple[int, int], float], *, arm: str = "base") -> pd.DataFrame:
    """Change of the mean signal with one head cut."""
    return pd.DataFrame(
        [{"arm": arm, "layer": layer, "head": head, "measure": "signal_mean", "value": value, "low": value - 0.1,
          "high": value + 0.1, "n": 80, "n_groups": 80, "method": "by hand", "reason": ""}
         for (layer, head), value in values.items()]
    )  # fmt: skip


def made(
    path: Path,
    tables: Mapping[str, pd.DataFrame],
    *,
    command: str,
    heads_of: Sequence[int | None] = (2, 2, None, 2),
    arms: Sequence[str] = ("base",),
    reason: str = "",
    **resolved: Any,
) -> RunDirectory:
    """A finished run directory of one command, without its report."""
    run = RunDirectory(path)
    run.tables.mkdir(parents=True)
    for name, table in tables.items():
        run.write_table(name, table)
    about = {
        "patch": {"sites": ["resid_post"], "layers": None, "positions": ["answer"], "directions": ["repair", "break"],
                  "controls": ["unrelated", "random"], "decides": "difference"},
        "ablate": {"heads": 2, "chosen": None, "held_out": None, "test": None, "scope": "answer", "source": "zero",
                   "random_sets": 2},
    }  # fmt: skip
    model = {
        "name": "org/made <b>", "weights": "a" * 64, "adapters": {arm: {"rank": 8} for arm in arms[1:]}, "dtype": "float32",
        "device": "cpu", "attention": "sdpa", "versions": {},
    }  # fmt: skip
    cost = {"engine": ["branch"], "forward_passes_per_item": 1.5, "cells_checked": 20, "largest_difference": 1e-6,
            "bound": 1e-4}  # fmt: skip
    of_arm: dict[str, Any] = (
        {"pairs": {"disagreement": {"found": 30, "patched": 24}}, "cost": cost, "reason": reason} if command == "patch"
        else {"ablation": {"heads": cost, "ablate": cost}}
    )  # fmt: skip
    run.write_json("resolved.json", {"digest": "d", "command": command, "family": "ordering", "family_version": 2,
                                     "split": "test", "limit": 40, "seed": 1, "params": {"n=4": {"n": 4}},
                                     **about[command], **resolved})  # fmt: skip
    run.write_json("environment.json", {"model": model, "versions": {"pairlens": None}, "python": "3.11",
                                        "platform": "Linux", "processor": "x86_64", "threads": 1, "git": None, "seed": 1,
                                        "command": ["probe", command, "--out", "a b"]})  # fmt: skip
    run.write_json("results.json", {"model": {"name": "made", "layers": len(heads_of), "heads": list(heads_of)},
                                    "arms": {arm: json.loads(json.dumps(of_arm)) for arm in arms},
                                    "pairs": {"ranked": 40, "tested": 40, "left_out": 0}})  # fmt: skip
    return run
