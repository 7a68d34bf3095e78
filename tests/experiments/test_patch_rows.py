"""Who is patched with what: pairs by kind in their order, donors of the right setting, cell and length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import items
from experiments.errors import UsageError
from experiments.intervention_stage import Arm, pairs
from experiments.patch_options import PatchSettings
from experiments.patch_rows import Tokens, check_spans, chosen_pairs, moves
from tasks.registry import family

SIZES = (4, 6)


@pytest.fixture(scope="module")
def asked() -> list[items.Row]:
    made = []
    for n in SIZES:
        sets = islice(family("ordering").generate({"n": n, "names": "builtin"}, seed=1, split="test"), 20)
        made += [items.Item(f"n={n}", matched) for matched in sets]
    return items.rows(made)


@pytest.fixture
def arm(asked: list[items.Row]) -> Arm:
    """Readouts that are right in 3 of 4 prompts, drawn by row."""
    table = items.frame(asked)
    right = np.random.default_rng(0).random(len(table)) < 0.75
    sign = np.where((table["gold"] == "yes") == right, 1.0, -1.0)
    config = SimpleNamespace(seed=1)
    return Arm(
        run=None, model=None, name="base", store=None, table=table.assign(difference=sign), prompts=[],
        answers=SimpleNamespace(labels=("yes", "no")), config=config,
    )  # type: ignore[arg-type]  # fmt: skip


class Widths(Tokens):
    """Spans of given widths instead of a tokenizer's."""

    def __init__(self, widths: Any) -> None:
        self.widths = widths

    def at(self, row: int, position: str) -> tuple[int, ...]:
        return tuple(range(self.widths(row, position)))


ONE = Widths(lambda row, position: 1)


def kinds_of(arm: Arm) -> Iterator[tuple[tuple[str, str], str]]:
    """Kinds by instance, told from the readouts without the code under test."""
    for name, rows in arm.table.groupby(["setting", "key"], sort=False):
        right = ((rows["difference"] > 0) == (rows["gold"] == "yes")).tolist()
        yield name, "disagreement" if right[0] != right[1] else "agreement" if right[0] else "shared error"


def test_disagreeing_pairs_come_first_and_as_many_that_agree_after_them(arm: Arm) -> None:
    truth = dict(kinds_of(arm))
    order = [(arm.table["setting"].iat[pair[0]], arm.table["key"].iat[pair[0]]) for pair in pairs(arm)]
    for most in (3, 9, 100):
        found = chosen_pairs(arm, PatchSettings(pairs=most))
        names = [(arm.table["setting"].iat[pair[0]], arm.table["key"].iat[pair[0]]) for pair, _ in found]
        assert [truth[name] for name in names] == [kind for _, kind in found]
        wrong = [name for name in order if truth[name] == "disagreement"][:most]
        agreeing = [name for name in order if truth[name] != "disagreement"]
        assert names == [*wrong, *agreeing[: max(len(wrong), min(8, most))]]


def test_kinds_can_be_named_and_then_each_has_its_number(arm: Arm) -> None:
    found = chosen_pairs(arm, PatchSettings(pairs=4, kinds=("shared error", "agreement")))
    assert [kind for _, kind in found] == ["shared error"] * min(
        4, list(dict(kinds_of(arm)).values()).count("shared error")
    ) + ["agreement"] * 4
    assert {kind for _, kind in chosen_pairs(arm, PatchSettings(kinds=("disagreement",)))} == {"disagreement"}


def test_donors_are_the_other_presentation_another_instance_and_one_of_the_same_cell(arm: Arm) -> None:
    table = arm.table
    patch = PatchSettings(controls=("unrelated", "same cell"))
    found, left = moves(arm, patch, "answer", ONE)
    assert left.empty and len(found) == 2 * len(chosen_pairs(arm, patch))
    for one in found:
        mine, other = table.iloc[one.transfer.recipient], table.iloc[one.transfer.donor]
        assert (mine["setting"], mine["key"]) == (other["setting"], other["key"])
        assert [mine["presentation"], other["presentation"]] == (
            ["equivalent", "original"] if one.direction == "repair" else ["original", "equivalent"]
        )
        for row, same in ((one.transfer.unrelated, ["setting"]), (one.same_cell, ["setting", "cell", "gold"])):
            stranger = table.iloc[row]
            assert stranger["presentation"] == other["presentation"] and stranger["key"] != mine["key"]
            assert all(stranger[name] == mine[name] for name in same)
    only, _ = moves(arm, PatchSettings(directions=("break",)), "answer", ONE)
    assert {one.direction for one in only} == {"break"} and all(one.same_cell == -1 for one in only)


def test_a_donor_of_another_length_is_passed_over_and_a_row_without_one_is_left_out(arm: Arm) -> None:
    table = arm.table
    # Spans are as wide as the hash of the instance says, and wider by one in one equivalent of eight.
    base = {key: 2 + int(key, 16) % 3 for key in table["key"]}
    longer = {key for key in base if int(key, 16) % 8 == 0}
    width = Widths(
        lambda row, position: (
            base[table["key"].iat[row]]
            + (table["key"].iat[row] in longer and table["presentation"].iat[row] == "equivalent")
        )
    )
    found, left = moves(arm, PatchSettings(pairs=100), "query", width)
    assert found and len(left) > 0
    for one in found:
        assert table["key"].iat[one.transfer.recipient] not in longer
        assert width.at(one.transfer.unrelated, "query") == width.at(one.transfer.recipient, "query")
        assert one.transfer.unrelated not in (one.transfer.recipient, one.transfer.donor)
    assert set(left["key"]) <= longer and left["reason"].str.contains("tokens of query in the donor").all()
    assert len(found) + len(left) == 2 * len(chosen_pairs(arm, PatchSettings(pairs=100)))
    lonely = next(key for key in base if key not in longer)
    alone = Widths(lambda row, position: 99 if table["key"].iat[row] == lonely else 1)
    _, left = moves(arm, PatchSettings(pairs=100), "query", alone)
    assert set(left["key"]) == {lonely} and set(left["reason"]) == {"no unrelated donor has 99 tokens at query"}


def test_the_first_unrelated_donor_is_taken_where_all_have_one_length(arm: Arm) -> None:
    """What a study of the answer position has always drawn: the next instance in the keyed order."""
    from patching.controls import derangement

    table = arm.table
    rows = np.flatnonzero(table["presentation"] == "original")
    names = [f"{table['setting'].iat[row]} {table['key'].iat[row]}" for row in rows]
    following = dict(zip(names, derangement(names, table["setting"].iloc[rows].tolist(), seed=1), strict=True))
    for one in moves(arm, PatchSettings(directions=("repair",)), "answer", ONE)[0]:
        name = f"{table['setting'].iat[one.transfer.donor]} {table['key'].iat[one.transfer.donor]}"
        assert one.transfer.unrelated == rows[following[name]]


def test_a_span_that_no_pair_can_exchange_is_refused(asked: list[items.Row]) -> None:
    table = items.frame(asked)
    check_spans(Widths(lambda row, position: 3), table, ["query"])
    uneven = Widths(lambda row, at: 5 if at == "query" and table["presentation"].iat[row] == "equivalent" else 3)
    with pytest.raises(UsageError, match=r"positions is query: in none of 40 pairs .* \(in one of them 3 and 5\)"):
        check_spans(uneven, table, ["answer", "query"])
    assert pd.Series([row.presentation.kind for row in asked]).equals(table["presentation"])
