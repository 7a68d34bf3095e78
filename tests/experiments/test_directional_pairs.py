"""Pairs of a question and its negation, whose gold answer is the other one: what agreement means, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score

from experiments.config import load, settings
from experiments.errors import RunError
from experiments.items import make
from experiments.pairing import TURNED, as_answers_to_first, flips, may_flip
from experiments.profiles import contrast, paired, profile
from experiments.rundir import RunDirectory
from experiments.tables import TableSpec, make_table, show_table
from tasks.modals import Modals
from tasks.ordering import Ordering

PAIR = ("original", "truth_negated")
PARAMS: dict[str, dict[str, Any]] = {"all": {"presentations": list(PAIR)}}
COLUMNS = (
    "accuracy_original",
    "accuracy_equivalent",
    "invariance",
    "robust",
    "shared_wrong",
    "unstable",
    "kappa",
    "b",
    "c",
)


def answers(original: list[str | None], negated: list[str | None], valid: list[bool]) -> pd.DataFrame:
    """A behaviour table of one arm: the original's gold is yes if valid, the negated question's the other answer."""
    frames = []
    for kind, given, flipped in (("original", original, False), ("truth_negated", negated, True)):
        gold = ["yes" if one != flipped else "no" for one in valid]
        frames.append(pd.DataFrame({
            "arm": "base", "setting": "all", "n": pd.array([None] * len(valid), dtype="Int64"),
            "key": [f"{place:04d}" for place in range(len(valid))], "presentation": kind,
            "cell": ["valid" if one else "invalid" for one in valid], "gold": gold, "n_tokens": 1, "status": "parsed",
            "answer": pd.array(given, dtype="string"),
            "correct": [one == right for one, right in zip(given, gold, strict=True)],
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def drawn(count: int = 80, seed: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    words = np.array(["yes", "no", None], dtype=object)
    one, other = (rng.choice(words, count, p=[0.55, 0.38, 0.07]).tolist() for _ in range(2))
    return answers(one, other, (rng.random(count) < 0.6).tolist())


def test_four_pairs_by_hand() -> None:
    # Valid, so the original is rightly answered yes and the negated question no.
    #         changed, right  changed, wrong  yes to both  no to both
    table = answers(["yes", "no", "yes", "no"], ["no", "yes", "yes", "no"], [True] * 4)
    found = profile(table, PAIR, resamples=100, seed=1)
    whole = found["profile"]["all"]
    assert found["turned"]
    assert [whole[name]["count"] for name in ("invariance", "robust", "shared_wrong", "unstable")] == [2, 1, 1, 2]
    assert paired(table, PAIR)["equivalent"].tolist() == ["yes", "no", "no", "yes"]
    assert paired(table, PAIR)["original"].tolist() == ["yes", "no", "yes", "no"]


def test_a_model_that_always_says_yes_never_changes_its_answer_and_one_that_knows_always_does() -> None:
    valid = [True, False] * 10
    row = dict.fromkeys(COLUMNS)
    says_yes = answers(["yes"] * 20, ["yes"] * 20, valid)
    knows = answers(["yes" if one else "no" for one in valid], ["no" if one else "yes" for one in valid], valid)
    for table, expected in ((says_yes, (0, 0, 0, 1, -1)), (knows, (1, 1, 0, 0, 1))):
        made = make_table(table, PARAMS, TableSpec(columns=tuple(row), pairs=(PAIR,)), seed=1, resamples=100)
        assert made[["invariance", "robust", "shared_wrong", "unstable", "kappa"]].iloc[0].tolist() == list(expected)


def test_tables_and_profiles_say_what_pandas_says_of_changed_answers() -> None:
    table = drawn()
    wide = table.pivot(index="key", columns="presentation", values=["answer", "gold"])
    first, second = wide["answer", "original"], wide["answer", "truth_negated"]
    right = first == wide["gold", "original"], second == wide["gold", "truth_negated"]
    read = first.notna() & second.notna()
    expected = {
        "accuracy_original": accuracy_score(wide["gold", "original"], first.fillna("-")),
        "accuracy_equivalent": accuracy_score(wide["gold", "truth_negated"], second.fillna("-")),
        "invariance": (first != second)[read].mean(),  # gold changes in every pair
        "robust": (right[0] & right[1])[read].mean(),
        "shared_wrong": (~right[0] & ~right[1])[read].mean(),
        "unstable": (right[0] ^ right[1])[read].mean(),
        "b": (right[0].fillna(False) & ~right[1].fillna(False)).sum(),
        "c": (~right[0].fillna(False) & right[1].fillna(False)).sum(),
    }
    spec = TableSpec(columns=COLUMNS, pairs=(PAIR,))
    made = make_table(table, PARAMS, spec, seed=1, resamples=100)
    whole = profile(table, PAIR, resamples=100, seed=1)["profile"]["all"]
    for name, value in expected.items():
        assert made[name].iloc[0] == pytest.approx(value), name
        if name in whole:
            assert whole[name]["value"] == pytest.approx(value), name
    assert TURNED in made["invariance_method"].iloc[0]
    assert "its answers count turned" in str(show_table(made, spec).caption)


def test_pairs_that_keep_the_gold_answer_are_as_before() -> None:
    table = drawn()
    same = table[table["presentation"] == "original"]
    both = pd.concat([same, same.assign(presentation="repeat")], ignore_index=True)
    found = profile(both, ("original", "repeat"), resamples=100, seed=1)
    assert not found["turned"] and found["profile"]["all"]["invariance"]["value"] == 1
    made = make_table(both, {"all": {"presentations": ["original", "repeat"]}},
                      TableSpec(columns=("invariance",), pairs=(("original", "repeat"),)),
                      seed=1, resamples=100)  # fmt: skip
    assert TURNED not in made["invariance_method"].iloc[0]


def test_contrasts_of_arms_take_turned_answers() -> None:
    table, other = drawn(seed=3), drawn(seed=3)
    flipped = other["presentation"] == "truth_negated"
    other.loc[flipped, "answer"] = other.loc[flipped, "gold"].astype("string")
    found = contrast(table, other, pair=PAIR, resamples=100, seed=1)
    right = accuracy_score(table[flipped]["gold"], table[flipped]["answer"].fillna("-"))
    assert found["accuracy_equivalent"]["difference"] == pytest.approx(1 - right)


@pytest.mark.parametrize("rows", [(5,), (0, 1, 2), tuple(range(1, 80))])
def test_a_gold_answer_that_flips_in_some_pairs_only_is_refused_by_row(rows: tuple[int, ...]) -> None:
    table = drawn()
    places = np.flatnonzero((table["presentation"] == "truth_negated").to_numpy())[list(rows)]
    table.loc[places, "gold"] = np.where(table.loc[places, "gold"] == "yes", "no", "yes")
    # The first of the fewer is named.
    odd = "0000" if len(rows) > 40 else f"{rows[0]:04d}"
    for ask in (
        lambda: paired(table, PAIR),
        lambda: make_table(table, PARAMS, TableSpec(columns=("gap",), pairs=(PAIR,)), seed=1, resamples=100),
    ):
        with pytest.raises(RunError, match=f"{odd}.*keeps the gold answer in every set or flips it in every set"):
            ask()


def test_unread_answers_stay_unread_when_turned() -> None:
    given = pd.Series(["yes", None, "no"], dtype="string", index=[7, 8, 9])
    assert as_answers_to_first(given, flipped=True).tolist() == ["no", None, "yes"]
    assert as_answers_to_first(given, flipped=False).tolist() == ["yes", None, "no"]
    assert list(as_answers_to_first(given, flipped=True).index) == [7, 8, 9]
    assert not flips(pd.Series(["yes"]), pd.Series(["yes"]), told=str)


def test_a_run_may_compare_with_what_the_family_says_it_flips_and_with_nothing_else(tmp_path: Path) -> None:
    assert may_flip(Modals(), PAIR) and may_flip(Modals(), PAIR[::-1])
    assert not may_flip(Modals(), ("truth_negated", "direct_negated")) and not may_flip(Ordering(), PAIR)
    config = load(None, ["presentations=original,truth_negated,direct"], {"family": "modals", "model": "x", "limit": 8})
    grid = settings(config, Modals())
    make(RunDirectory(tmp_path), config, Modals(), grid, [PAIR, ("original", "direct")])
    assert (tmp_path / "items.jsonl").exists()

    class Keeping(Modals):
        """Lists as flipped what keeps the answer."""

        def generate(self, params, *, seed, split):
            for matched in super().generate(params, seed=seed, split=split):
                gold = matched.instance.gold
                yield replace(matched, presentations=tuple(replace(one, gold=gold) for one in matched.presentations))

    (tmp_path / "items.jsonl").unlink()
    with pytest.raises(RunError, match=r"keeps the gold answer between original .* says that they flip it: list there"):
        make(RunDirectory(tmp_path), config, Keeping(), grid, [PAIR])
