"""Profiles of tables in which an instance stands under several settings: its rows are no independent draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.profiles import details, profile, unread
from experiments.statistics import crossing, share, unanimous
from experiments.tables import TableSpec, make_table
from tests.experiments.made_behaviour import behaviour

SETTINGS: dict[str, dict[str, Any]] = {
    f"n=4, relation={name}": {"n": 4, "relation": name, "presentations": ["original", "equivalent"]} for name in "abcd"
}
HOW: Any = {"resamples": 400, "seed": 1}


@pytest.fixture(scope="module")
def same() -> pd.DataFrame:
    """The answers to one relation, given in all four: nothing is learnt from the other three."""
    one = behaviour({"n=4, relation=a": SETTINGS["n=4, relation=a"]}, arms=("base", "tuned"), limit=80, missing=0.2)
    return pd.concat([one.assign(setting=label) for label in SETTINGS], ignore_index=True)


def shares(found: Any, path: str = "") -> dict[str, dict[str, Any]]:
    """Every share of a profile, by its place."""
    if not isinstance(found, dict):
        return {}
    if {"value", "low", "high", "count", "n"} <= set(found):
        return {path: found}
    return {key: one for name, part in found.items() for key, one in shares(part, f"{path}/{name}").items()}


def test_all_intervals_over_settings_are_over_instances(same: pd.DataFrame) -> None:
    base = same[same["arm"] == "base"]
    whole = profile(base, **HOW)["profile"]["all"]
    more = details(base, threshold=0.85, **HOW)
    found = shares({"whole": whole, "cells": more["cells"], "bounds": more["bounds"]})
    assert len(found) > 30
    for place, one in found.items():
        assert "over" in one["method"] and "instances" in one["method"], place
        # Four copies of 80 instances are worth 80: Wilson over rows would be half as wide.
        honest = share(one["count"] // 4, one["n"] // 4)
        width = one["high"] - one["low"]
        assert width > 0.7 * (honest.high - honest.low) if 5 < one["count"] < one["n"] - 5 else width > 0, place


def test_no_test_takes_rows_of_one_instance_as_independent(same: pd.DataFrame) -> None:
    found = unread(same)
    for test in (*found["between_arms"], *found["between_presentations"]):
        assert math.isnan(test["p"]) and math.isnan(test["p_holm"]) and "not independent" in test["reason"]
    alone = unread(same[same["setting"] == "n=4, relation=a"])
    assert all(np.isfinite(test["p"]) for test in alone["between_arms"])


def test_the_mean_over_settings_says_so(same: pd.DataFrame) -> None:
    assert "settings" in profile(same[same["arm"] == "base"], **HOW)["kappa_bar"]["method"]


def test_a_unanimous_share_has_a_width_although_no_resample_differs(same: pd.DataFrame) -> None:
    right = same.assign(answer=same["gold"].astype("string"), correct=True, status="parsed")
    rows = make_table(right, SETTINGS, TableSpec(rows=("arm",), columns=("invariance", "unstable", "truncated_original")),
                      **HOW)  # fmt: skip
    wilson = share(80, 80)
    for row in rows.to_dict("records"):
        assert (row["invariance"], row["invariance_n"], row["unstable"]) == (1, 320, 0)
        assert row["invariance_low"] == pytest.approx(wilson.low) and row["invariance_high"] == 1
        assert row["unstable_high"] == row["truncated_original_high"] == pytest.approx(1 - wilson.low)
        assert "80 instances" in row["invariance_method"]
    assert unanimous(3, 4, ["a", "a", "b", "b"]) is None
    assert unanimous(0, 0, []) is None


def test_a_crossing_names_sizes_by_place_whatever_the_index() -> None:
    sizes = pd.Series([4, 8, 16], index=[2, 0, 1])
    found = crossing(sizes, [1.0, 0.9, 0.1], [50, 50, 50], threshold=0.85, seed=1)
    assert found.size == 16 and list(found.distribution) == [4, 8, 16, None]
