"""Groups of settings: every way in which a run's numbers are pooled has one label."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.errors import UsageError
from experiments.groups import grouped, groups, swept


def params(**axes: list[object]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {"": {"protocol": "P"}}
    for name, values in axes.items():
        found = {
            f"{label}{', ' if label else ''}{name}={value}": {**one, name: value}
            for label, one in found.items()
            for value in values
        }
    return found


def test_one_setting_is_all_there_is() -> None:
    assert [(one.label, one.axis) for one in groups(params(n=[4]))] == [("all", ())]


def test_one_swept_parameter_gives_each_of_its_values() -> None:
    found = groups(params(n=[4, 8]))
    assert [(one.label, one.axis, one.settings) for one in found] == [
        ("all", (), ("n=4", "n=8")), ("n=4", ("n",), ("n=4",)), ("n=8", ("n",), ("n=8",)),
    ]  # fmt: skip


def test_two_are_pooled_over_each_other_too() -> None:
    both = params(relation=["a", "b"], n=[4, 8])
    assert swept(both) == ("relation", "n")
    found = {one.label: one.settings for one in groups(both)}
    assert list(found) == [
        "all", "relation=a", "relation=b", "n=4", "n=8",
        "relation=a, n=4", "relation=a, n=8", "relation=b, n=4", "relation=b, n=8",
    ]  # fmt: skip
    assert found["relation=b"] == ("relation=b, n=4", "relation=b, n=8")
    assert found["n=4"] == ("relation=a, n=4", "relation=b, n=4")
    table = pd.DataFrame({"setting": ["relation=a, n=4", "relation=b, n=8", "relation=b, n=4"]})
    held = {one.label: one.holds(table).tolist() for one in groups(both)}
    assert held["relation=b"] == [False, True, True] and held["n=4"] == [True, False, True]


def test_a_table_chooses_the_parameters_that_it_fixes() -> None:
    three = params(relation=["a", "b"], n=[4, 8], rho=[0, 1])
    assert [one.label for one in grouped(three, [])] == ["all"]
    assert [one.label for one in grouped(three, ["n"])] == ["n=4", "n=8"]
    assert [one.label for one in grouped(three, None)] == list(three)
    pairs = [one.label for one in grouped(three, ["relation", "n"])]
    assert pairs == ["relation=a, n=4", "relation=a, n=8", "relation=b, n=4", "relation=b, n=8"]
    # What a table fixes together is fitted and decomposed as well.
    assert set(pairs) <= {one.label for one in groups(three, ["relation", "n"])}
    # A parameter with one value fixes nothing, and a word that is none is refused.
    assert [one.label for one in grouped(three, ["protocol"])] == ["all"]
    assert [one.label for one in grouped(three, ["protocol", "n"])] == ["n=4", "n=8"]
    with pytest.raises(UsageError, match=r"names 'colour', which is no parameter: choose from protocol, relation"):
        grouped(three, ["colour"])
