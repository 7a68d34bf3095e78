"""Effects of a patch table, against sums done by hand: means, shares, what exceeds controls, and what stays undefined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.patch_effects import curves, effects_table, residual
from experiments.patch_options import PatchSettings
from patching.edits import PatchError

PARAMS = {"n=4": {"n": 4}, "n=6": {"n": 6}}
HOW: Any = {"seed": 1, "resamples": 200}
PATCH = PatchSettings(controls=("unrelated", "random", "own"))


def made(
    items: int = 12,
    *,
    positions: tuple[str, ...] = ("answer",),
    donors: tuple[str, ...] = ("matched", "unrelated", "random", "own"),
    kinds: tuple[str, ...] = ("disagreement",),
    gain: float = 1.0,
) -> pd.DataFrame:
    """Recipients that lean to no, donors that lean to yes; the matched donor moves layer 1 by ``gain`` and layer 0 by 0."""
    rng = np.random.default_rng(0)
    rows = []
    for item in range(items):
        unpatched, given = -1 - rng.random(), 1 + rng.random()
        kind = kinds[item % len(kinds)]
        for position in positions:
            for donor in donors:
                for layer in (0, 1):
                    noise = 0.0 if donor == "own" else 0.1 * rng.standard_normal()
                    moved = gain * layer * (donor == "matched") + noise
                    rows.append(
                        {
                            "arm": "base", "setting": f"n={4 + 2 * (item % 2)}", "n": 4 + 2 * (item % 2),
                            "key": f"k{item}", "presentation": "equivalent", "cell": "forward-yes", "gold": "yes",
                            "pair": "disagreeing", "kind": kind, "direction": "repair", "donor": donor,
                            "site": "resid_post", "layer": layer, "head": pd.NA, "position": position,
                            "unpatched": unpatched, "donor_difference": given, "patched": unpatched + moved,
                            "engine": "branch", "forward_passes": 1.2, "checked": 20, "check_max_abs": 1e-6,
                            "check_bound": 1e-4,
                        }
                    )  # fmt: skip
    return pd.DataFrame(rows).astype({"n": "Int64", "head": "Int64"})


def effects(table: pd.DataFrame, patch: PatchSettings = PATCH, left: pd.DataFrame | None = None) -> pd.DataFrame:
    return effects_table(table, left, PARAMS, patch, **HOW)


def cell(found: pd.DataFrame, layer: int, donor: str = "matched", **where: str) -> pd.Series:
    chosen = {"group": "all", "kind": "all", "direction": "repair", "donor": donor, "layer": layer, **where}
    for name, value in chosen.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_an_effect_is_the_mean_move_toward_the_donor_and_exceeds_its_controls_row_by_row() -> None:
    table = made()
    found = effects(table)
    wide = table.pivot(index="key", columns=["donor", "layer"], values="patched")
    before = table.drop_duplicates("key").set_index("key").loc[wide.index]
    moved = {donor: wide[donor][1] - before["unpatched"] for donor in ("matched", "unrelated", "random")}
    one = cell(found, 1)
    assert one["effect"] == pytest.approx(moved["matched"].mean())
    assert one["effect_low"] < one["effect"] < one["effect_high"]
    assert one["n"] == one["n_groups"] == one["kept"] == one["flipped_n"] == 12
    assert one["flipped"] == np.mean(wide["matched"][1] > 0)
    gap = before["donor_difference"] - before["unpatched"]
    assert one["restored"] == pytest.approx((moved["matched"] / gap).mean())
    for donor in ("unrelated", "random"):
        other = cell(found, 1, donor)
        assert other["effect"] == pytest.approx(moved[donor].mean())
        assert other["above"] == pytest.approx((moved["matched"] - moved[donor]).mean())
        # An interval of scipy's for the same paired difference; ours is a bootstrap, so near and not equal.
        low, high = stats.ttest_rel(moved["matched"], moved[donor]).confidence_interval(0.95)
        assert other["above_low"] == pytest.approx(low, abs=0.05) and other["above_high"] == pytest.approx(
            high, abs=0.05
        )
        assert other["above_p"] < 0.01 and pd.isna(other["specific"])
    assert one["specific"] and not cell(found, 0)["specific"]
    assert one["own_change"] == 0 and bool(one["monotone"])


def test_kinds_and_settings_have_rows_of_their_own_and_left_out_rows_are_counted() -> None:
    table = made(kinds=("disagreement", "agreement", "shared error"))
    lost = pd.DataFrame(
        {"arm": "base", "setting": ["n=4", "n=4", "n=6"], "kind": ["agreement", "disagreement", "disagreement"],
         "direction": "repair", "position": "answer"}
    )  # fmt: skip
    found = effects(table, left=lost)
    assert set(found["kind"]) == {"all", "disagreement", "agreement", "shared error"}
    assert set(found["group"]) == {"all", "n=4", "n=6"}
    assert cell(found, 1)["left_out"] == 3 and cell(found, 1, kind="disagreement")["left_out"] == 2
    assert cell(found, 1, group="n=6")["left_out"] == 1 and cell(found, 1, group="n=6")["n"] == 6
    one = cell(found, 1, kind="agreement")
    chosen = table[(table["kind"] == "agreement") & (table["donor"] == "matched") & (table["layer"] == 1)]
    assert one["n"] == 4 and one["effect"] == pytest.approx((chosen["patched"] - chosen["unpatched"]).mean())


def test_a_map_of_two_positions_has_twice_the_p() -> None:
    one, two = (effects(made(positions=positions)) for positions in (("query",), ("query", "premise:1")))
    for column, donor in (("effect_p", "matched"), ("above_p", "unrelated")):
        single = effects(made(positions=("query", "premise:1"))[lambda t: t["position"] == "query"])
        assert cell(two, 1, donor, position="query")[column] == pytest.approx(
            2 * cell(single, 1, donor, position="query")[column]
        )
    assert "times 2 positions" in cell(two, 1, position="query")["method"]
    assert "positions" not in cell(one, 1, position="query")["method"]
    assert not cell(one, 1, position="query")["monotone"]


def test_rows_of_one_instance_are_one_draw() -> None:
    table = made(6)
    twice = pd.concat([table, table.assign(presentation="original")], ignore_index=True)
    once, again = cell(effects(table), 1), cell(effects(twice), 1)
    assert again["n"] == 12 and again["n_groups"] == once["n_groups"] == 6
    assert again["effect"] == pytest.approx(once["effect"]) and again["effect_p"] == pytest.approx(once["effect_p"])
    assert again["effect_high"] - again["effect_low"] == pytest.approx(
        once["effect_high"] - once["effect_low"], rel=0.05
    )


def test_what_cannot_be_said_is_undefined_with_the_reason() -> None:
    few = cell(effects(made(4)), 1)
    assert pd.isna(few["specific"]) and "with 4 instances no p can be 0.05 or less" in few["reason"]
    bare = cell(effects(made(donors=("matched",)), PatchSettings(controls=())), 1)
    assert pd.isna(bare["specific"]) and "without a control" in bare["reason"] and np.isnan(bare["own_change"])
    silent = cell(effects(made().assign(donor_difference=0.0)), 1)
    assert silent["n"] == 0 and "none has an answer" in silent["reason"] and np.isnan(silent.get("effect", np.nan))
    alike = cell(effects(made().assign(donor_difference=lambda t: t["unpatched"] - 0.1)), 1)
    assert np.isnan(alike["flipped"]) and "flipped is undefined" in alike["reason"]
    assert np.isnan(alike["restored"]) and "restored is undefined" in alike["reason"]
    nothing = effects(made().iloc[:0])
    assert nothing.empty and {"arm", "specific", "reason"} <= set(nothing.columns)


def test_decides_says_which_of_the_two_makes_a_cell_specific() -> None:
    # A gain of 0.5 moves every row and flips none.
    table = made(gain=0.5)
    by = {name: cell(effects(table, PatchSettings(decides=name)), 1) for name in ("difference", "flipped")}
    assert by["difference"]["flipped"] == 0
    assert bool(by["difference"]["specific"]) and not bool(by["flipped"]["specific"])


def test_the_recipients_own_activation_has_to_change_nothing() -> None:
    table = made()
    table.loc[(table["donor"] == "own") & (table["layer"] == 1), "patched"] += 0.01
    with pytest.raises(PatchError, match=r"own activation changes the readout by 1\.0e-02"):
        effects(table)


def test_a_whole_study_reads_the_residual_rows_alone() -> None:
    table = pd.concat([made(), made().assign(site="attn_out"), made(positions=("query",))], ignore_index=True)
    assert residual(table).equals(made().set_index(residual(table).index))
    earlier = made().drop(columns=["site", "position"])
    assert residual(earlier) is earlier


def test_results_hold_a_study_for_each_site_and_position_with_the_cells_in_order() -> None:
    table = made(kinds=("disagreement", "agreement"))
    found = curves(effects(table))
    assert [one["kind"] for one in found] == ["all", "disagreement", "agreement"]
    first = found[0]
    assert (
        first["layers"] == [0, 1]
        and first["heads"] is None
        and set(first["donors"]) == {"matched", "unrelated", "random"}
    )
    assert first["donors"]["matched"]["effect"][1] == cell(effects(table), 1)["effect"]
    assert "above" in first["donors"]["random"] and "above" not in first["donors"]["matched"]
    assert first["specific"] == [False, True]
