"""How pairs are dealt out, what takes a head's place, and the tables of an ablation, against brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import ablate_stage
from experiments.ablate_command import load_ablate, summary
from experiments.ablate_effects import ablation_tables, family_of, grid_table, head_effects
from experiments.ablate_halves import halves
from experiments.ablate_options import AblateSettings
from experiments.errors import UsageError
from experiments.intervention_stage import Transfer

LABELS = ("yes", "no")
CONFIG = load_ablate(None, ["resamples=200"], {})
PARAMS = {"relation=a, n=4": {"relation": "a", "n": 4}, "relation=b, n=4": {"relation": "b", "n": 4}}
A, B = PARAMS


def prompts(names: list[tuple[str, str]]) -> pd.DataFrame:
    """Both presentations of each (setting, key); keys alternate between the two gold answers."""
    rows = [
        {"setting": setting, "n": 4, "key": key, "presentation": kind, "cell": f"P {gold}", "gold": gold}
        for setting, key in names
        for gold in ["yes" if int(key[1:]) % 2 else "no"]
        for kind in ("original", "equivalent")
    ]
    return pd.DataFrame(rows)


def names(settings: list[str], count: int) -> list[tuple[str, str]]:
    return [(setting, f"k{number}") for setting in settings for number in range(count)]


def test_halves_share_no_instance_and_each_has_half_of_every_cell() -> None:
    table = prompts([*names([A], 14), *[(B, f"k{number}") for number in range(100, 114)]])
    dealt = halves(table, AblateSettings(), PARAMS)
    assert not dealt.ranked & dealt.tested and len(dealt.ranked | dealt.tested) == 28 and dealt.left_out == 0
    for setting in PARAMS:
        for parity in (0, 1):
            sizes = [
                sum(name[0] == setting and int(name[1][1:]) % 2 == parity for name in side)
                for side in (dealt.ranked, dealt.tested)
            ]
            assert sum(sizes) == 7 and abs(sizes[0] - sizes[1]) == 1
    assert dealt == halves(table.sample(frac=1, random_state=0), AblateSettings(), PARAMS)


def test_an_instance_under_two_relations_is_on_one_side_of_both() -> None:
    table = prompts(names([A, B], 20))
    dealt = halves(table, AblateSettings(held_out="relation"), PARAMS)
    assert {name[0] for name in dealt.ranked} == {A} and {name[0] for name in dealt.tested} == {B}
    assert not {key for _, key in dealt.ranked} & {key for _, key in dealt.tested}
    assert len(dealt.ranked) == len(dealt.tested) == 10 and dealt.left_out == 20
    assert dict(dealt.units) == {A: "a", B: "b"}
    # Instances of one relation alone lose nothing.
    apart = halves(prompts([*names([A], 20), *[(B, f"k{n}") for n in range(50, 60)]]),
                   AblateSettings(held_out="relation"), PARAMS)  # fmt: skip
    assert (len(apart.ranked), len(apart.tested), apart.left_out) == (20, 10, 0)


def test_where_shared_instances_leave_nothing_it_is_refused() -> None:
    table = prompts([(A, "k1"), (B, "k1")])
    with pytest.raises(UsageError, match=r"of 2 pairs none is left to cut them on \(1 instances stand on both sides"):
        halves(table, AblateSettings(held_out="relation"), PARAMS)


def test_given_heads_are_cut_on_every_pair() -> None:
    dealt = halves(prompts(names([A], 8)), AblateSettings(chosen=("0.0",)), {A: PARAMS[A]})
    assert not dealt.ranked and len(dealt.tested) == 8 and sorted(dealt.fold.values()) == [0] * 4 + [1] * 4


class Store:
    """``z`` of one layer with two heads: every value is the row's number."""

    def __init__(self, rows: int) -> None:
        self.values = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 4, axis=1)

    def __getitem__(self, where: tuple[str, int]) -> np.ndarray:
        assert where == ("z", 0)
        return self.values


@pytest.mark.parametrize(
    ("source", "held_out", "chosen"),
    [("mean", None, None), ("mean", "relation", None), ("mean", None, ("0.0",)), ("resample", None, None),
     ("resample", "relation", None), ("resample", None, ("0.0",))],
)  # fmt: skip
def test_what_takes_a_head_s_place_comes_from_other_instances_of_the_other_side(
    source: Any, held_out: str | None, chosen: tuple[str, ...] | None
) -> None:
    table = prompts(names([A, B], 12))
    how = AblateSettings(source=source, held_out=held_out, chosen=chosen)
    dealt = halves(table, how, PARAMS)
    arm: Any = SimpleNamespace(
        table=table,
        store=Store(len(table)),
        model=SimpleNamespace(n_layers=2, heads=lambda layer: (2, None)[layer]),
        config=CONFIG,
    )
    here = list(zip(table["setting"], table["key"], strict=True))
    rows = [row for row, name in enumerate(here) if name in dealt.tested]
    chunk = [Transfer(row, row, row, True) for row in rows]
    given = ablate_stage._replacements(arm, chunk, how, dealt)[source]["z"]
    assert list(given) == [0] and given[0].shape == (len(rows), 4)
    for row, vector in zip(rows, given[0], strict=True):
        others = [
            other
            for other, name in enumerate(here)
            if name in dealt.fold
            and dealt.fold[name] != dealt.fold[here[row]]
            and table["presentation"][other] == table["presentation"][row]
            and (held_out or table["setting"][other] == table["setting"][row])
        ]
        assert here[row][1] not in {here[other][1] for other in others}
        if source == "mean":
            assert vector == pytest.approx(np.full(4, np.mean(others)))
        else:
            assert vector[0] in others and (vector == vector[0]).all()


def test_head_effects_are_means_over_instances_and_ranked_in_each_half() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for half, keys in (("ranked", range(9)), ("tested", range(20, 27))):
        for key in keys:
            for kind in ("original", "equivalent"):
                unpatched, donor = rng.normal(size=2)
                about = {"setting": A, "key": f"k{key}", "presentation": kind, "pair": "disagreeing", "half": half,
                         "unpatched": unpatched, "donor_difference": donor}  # fmt: skip
                for layer, head in ((0, 0), (0, 1), (2, 0)):
                    moved = rng.normal(0.5 * (layer + head), 1.0)
                    rows.append({**about, "layer": layer, "head": head, "patched": unpatched + moved})
    table = pd.DataFrame(rows)
    found = head_effects(table, [(2, 0)], CONFIG)
    toward = np.where(table["donor_difference"] >= table["unpatched"], 1, -1)
    effect = (table["patched"] - table["unpatched"]) * toward
    for half, part in found.groupby("half"):
        own = table["half"] == half
        by_hand = effect[own].groupby([table["layer"], table["head"]]).mean()
        places = list(zip(part["layer"], part["head"], strict=True))
        assert list(part["effect"]) == pytest.approx([by_hand[place] for place in places])
        assert list(part["effect"]) == sorted(part["effect"], reverse=True) and list(part["rank"]) == [1, 2, 3]
        assert set(part["n"]) == {2 * table.loc[own, "key"].nunique()} and set(part["n_groups"]) == {own.sum() // 6}
    assert found.groupby("half")["chosen"].sum().to_dict() == {"ranked": 1, "tested": 1}
    assert found["direct"].isna().all() and (found["low"] < found["effect"]).all() and (found["p"] <= 1).all()


def cut(golds: tuple[str, ...] = ("yes", "no"), count: int = 30) -> pd.DataFrame:
    """Readouts that follow the gold answer, and hardly do with the top heads cut, where all say no."""
    rng = np.random.default_rng(1)
    base = prompts(names([A], count))
    base = base[base["gold"].isin(golds)]
    sign = np.where(base["gold"] == "yes", 1.0, -1.0)
    parts = [base.assign(ablated="none", heads="", difference=2 * sign + 2 * rng.normal(size=len(base)))]
    means = {"top": -3 + 0.1 * sign, "top without 0.0": sign, "random 1": 1.9 * sign, "same layers 1": 1.8 * sign}
    for name, mean in means.items():
        parts.append(base.assign(ablated=name, heads="0.0 1.1", difference=mean + 0.5 * rng.normal(size=len(base))))
    return pd.concat(parts, ignore_index=True)


def measures(table: pd.DataFrame) -> dict[str, float]:
    """δ, s, accuracy and agreement, by pandas alone."""
    right = (table["difference"] > 0) == (table["gold"] == "yes")
    both = right.groupby([table["setting"], table["key"]]).sum()
    found: dict[str, float] = {"robust": (both == 2).mean(), "shared_wrong": (both == 0).mean()}
    found |= {"unstable": (both == 1).mean(), "invariance": (both != 1).mean()}
    for kind, part in table.groupby("presentation"):
        cells = part.groupby("gold")["difference"].mean()
        found[f"accuracy_{kind}"] = right[part.index].mean()
        found[f"default_{kind}"], found[f"signal_{kind}"] = cells.mean(), (cells["yes"] - cells["no"]) / 2
    return found


def test_the_tables_hold_what_pandas_gives_and_the_paper_s_case_is_marked() -> None:
    table = cut()
    made = ablation_tables(table, LABELS, CONFIG, {"random": "made up"})
    ablation = made["ablation"]
    before = measures(table[table["ablated"] == "none"].reset_index(drop=True))
    for name, part in ablation.groupby("ablated"):
        after = measures(table[table["ablated"] == name].reset_index(drop=True))
        row = part.set_index("measure")
        for measure, value in after.items():
            assert row["before"][measure] == pytest.approx(before[measure])
            assert row["after"][measure] == pytest.approx(value)
            assert row["change"][measure] == pytest.approx(value - before[measure], abs=1e-12)
        for kind in ("original", "equivalent"):
            removed = 1 - after[f"signal_{kind}"] / before[f"signal_{kind}"]
            assert row["change"][f"share_removed_{kind}"] == pytest.approx(removed)
        assert set(part["family"]) == {family_of(name)} and set(part["n"]) == {30}
    notes = made["ablation_notes"].set_index("ablated")
    assert notes["agreement_without_competence"].to_dict() == {
        "top": True, "top without 0.0": False, "random 1": False, "same layers 1": False
    }  # fmt: skip
    assert "more agreement with less competence" in notes["note"]["top"]
    above = made["ablation_above"].set_index(["control", "measure"])
    assert set(above.index.get_level_values("control")) == {"random", "same layers", "top without 0.0"}
    top, other = (ablation[ablation["ablated"] == name].set_index("measure") for name in ("top", "same layers 1"))
    gap = top["change"]["signal_mean"] - other["change"]["signal_mean"]
    assert above["value"]["same layers", "signal_mean"] == pytest.approx(gap)
    assert above["rank_p"]["same layers", "share_removed_mean"] == 0.5
    assert np.isnan(above["rank_p"]["same layers", "invariance"])
    absent = above.loc[above["reason"] == "made up"]
    assert set(absent.index.get_level_values("control")) == {"random"} and absent["value"].isna().all()


def test_what_one_gold_answer_can_not_give_is_undefined_with_a_reason() -> None:
    ablation = ablation_tables(cut(("yes",)), LABELS, CONFIG, {})["ablation"]
    undefined = ablation[ablation["change"].isna()]
    assert set(undefined["measure"]) == {
        name for name in ablation["measure"] if name.startswith(("signal", "default", "share_removed"))
    }
    assert set(undefined["reason"]) == {"δ and s are undefined: no cell has gold no"}
    assert set(ablation.loc[ablation["change"].notna(), "reason"]) == {""}


def test_the_summary_has_a_row_a_set_and_no_empty_column() -> None:
    made = {name: table.assign(arm="base") for name, table in ablation_tables(cut(), LABELS, CONFIG, {}).items()}
    found = summary(made["ablation"], made["ablation_notes"])
    assert list(found["ablated"]) == ["top", "top without 0.0", "random 1", "same layers 1"]
    assert {"signal_mean_before", "invariance_change", "share_removed_mean_change"} < set(found.columns)
    assert "share_removed_mean_before" not in found.columns


def test_the_grid_is_the_study_of_each_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = cut()
    none = table[table["ablated"] == "none"].reset_index(drop=True)
    heads = {(0, 0): "top", (0, 1): "random 1", (3, 1): "same layers 1"}
    rows = pd.concat(
        [table[table["ablated"] == name].reset_index(drop=True).assign(layer=layer, head=head, unablated=none["difference"])
         for (layer, head), name in heads.items()], ignore_index=True
    )  # fmt: skip
    found = grid_table(rows, LABELS, CONFIG)
    whole = ablation_tables(table, LABELS, CONFIG, {})["ablation"]
    for (layer, head), name in heads.items():
        one = found[(found["layer"] == layer) & (found["head"] == head)].set_index("measure")
        other = whole[whole["ablated"] == name].set_index("measure")
        assert one["value"].to_dict() == pytest.approx(other["change"].to_dict())
    monkeypatch.setattr("experiments.ablate_effects.GRID_BLOCK", 2)
    pd.testing.assert_frame_equal(grid_table(rows, LABELS, CONFIG), found, check_exact=False)
