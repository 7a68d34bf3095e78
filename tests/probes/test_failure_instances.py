"""Rows of one instance are one piece of evidence: the mirror rule, its promise and the coin count instances."""

from __future__ import annotations

import numpy as np
import pytest

from probes.errors import ProbeError
from probes.failures import assign, decodable_layers, label_failures, one_split, right_rows
from probes.linear import fit_probes


def noise(instances, rows_each, alike, studies, seed):
    """Margins [study, row] about nothing, of which the rows of an instance share the part `alike`."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(instances), rows_each)
    shared = rng.standard_normal((studies, instances))[:, groups]
    own = rng.standard_normal((studies, len(groups)))
    return np.sqrt(alike) * shared + np.sqrt(1 - alike) * own, groups


@pytest.mark.parametrize("rows_each", [1, 2, 3, 6])
def test_more_rows_of_the_same_instances_do_not_make_a_discovery(rows_each) -> None:
    """Forty failed instances of which the probe knows nothing. With rows for instances it is 3, 11, 22, 41 %."""
    toward, groups = noise(40, rows_each, 0.99, 2000, seed=rows_each)
    decodable, failed = np.ones(2000, bool), np.ones(len(groups), bool)
    found = right_rows(toward, decodable, failed, groups).any(axis=1).mean()
    assert found <= 0.05
    by_row = right_rows(toward, decodable, failed, np.arange(len(groups))).any(axis=1).mean()
    assert by_row == found if rows_each == 1 else by_row > 0.1


@pytest.mark.parametrize("rows_each", [1, 2, 3])
@pytest.mark.parametrize("alike", [0.0, 0.98])
@pytest.mark.parametrize("known", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("whole", [True, False])
def test_at_most_a_fifth_is_luck_whatever_rows_of_an_instance_have_in_common(rows_each, alike, known, whole) -> None:
    """Known are whole instances, or rows (settings) of instances on their own."""
    toward, groups = noise(60, rows_each, alike, 600, seed=rows_each)
    rng = np.random.default_rng(9)
    knows = (rng.random((600, 60)) < known)[:, groups] if whole else rng.random(toward.shape) < known
    right = right_rows(toward + 2.5 * knows, np.ones(600, bool), np.ones(len(groups), bool), groups)
    false = (right & ~knows).sum(axis=1) / np.maximum(right.sum(axis=1), 1)
    assert false.mean() <= 0.2 + 3 * false.std() / 600**0.5
    if known == 0.7:
        assert right[knows].mean() > 0.9


def test_rows_repeated_exactly_get_the_verdict_of_one_row() -> None:
    rng = np.random.default_rng(0)
    toward = rng.standard_normal((50, 30)) + 1.0
    decodable, once = np.ones(50, bool), np.arange(30)
    expected = right_rows(toward, decodable, np.ones(30, bool), once)
    assert expected.any() and not expected.all()
    for times in (2, 3, 7):
        groups = np.repeat(once, times)
        found = right_rows(toward[:, groups], decodable, np.ones(30 * times, bool), groups)
        assert np.array_equal(found, expected[:, groups])


@pytest.mark.parametrize(("instances", "label"), [(4, "mixed"), (5, "overridden")])
def test_five_instances_are_needed_however_many_rows(instances, label) -> None:
    groups = np.repeat(np.arange(instances), 3)
    rows = len(groups)
    found = assign(np.ones((1, 1, rows)), [[True]], np.zeros((1, rows), int), [1] * rows, [-1.0] * rows, -2.0,
                   [False] * rows, groups=groups)  # fmt: skip
    assert set(found.label) == {label}
    codes = one_split(np.ones((1, rows)), np.array([True]), np.zeros(rows, int), np.ones(rows), np.ones(rows), groups)
    assert set(codes) == {4 if label == "mixed" else 0}


def test_only_failed_rows_of_an_instance_share_its_weight() -> None:
    """Each instance has one failed row and two that did not fail: five failures are five instances."""
    toward, groups = np.ones((1, 15)), np.repeat(np.arange(5), 3)
    failed = np.arange(15) % 3 == 0
    assert right_rows(toward, np.array([True]), failed, groups)[0, failed].all()


def test_the_coin_is_tossed_for_instances() -> None:
    """Known rows, three an instance: the coin is that of one row an instance, and rows of an instance fall alike."""
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(12), 3)
    margins = 3.0 + rng.random(12)

    def coin(kept, **options):
        rows = len(kept)
        return assign(margins[groups[kept]][None, None], [[True]], np.zeros((1, rows), int), [1] * rows, [-1.0] * rows,
                      -2.0, [False] * rows, **options).tossed  # fmt: skip

    whole = coin(np.arange(36), groups=groups)
    assert np.array_equal(whole, np.repeat(coin(np.arange(0, 36, 3)), 3, axis=0))
    assert not np.allclose(whole, coin(np.arange(36)))


def test_label_failures_passes_the_instances_on() -> None:
    """Four failed instances of thirty rows each that all know the answer: too few to call any of them right."""
    rng = np.random.default_rng(0)
    groups = np.concatenate([np.arange(80), np.repeat([80, 81, 82, 83], 30)])
    gold = groups % 2
    acts = rng.standard_normal((2, len(groups), 10))
    acts[:, :, 0] += 6.0 * (2 * gold - 1)
    readout = np.where(groups < 80, 1.0, -1.0) * (2 * gold - 1)
    result = fit_probes(acts, gold, groups, shuffles=19, seed=0)
    found = label_failures(acts, gold, groups, readout, 3 * readout, gold == gold, result=result, splits=1, seed=0)
    assert found.failed.sum() == 120
    assert set(found.label[found.failed]) == {"mixed"}
    rows = label_failures(acts, gold, groups, readout, 3 * readout, gold == gold, result=result, splits=2, seed=0)
    assert "over instances" in rows.method


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margins": [[[1.0, np.nan], [1, 1]]]}, "margins holds 1 values that are not finite; fit the probes again"),
        ({"default": np.inf}, "default holds 2 infinite values; it must be finite, or NaN where it is undefined"),
        ({"default": [0.0, -np.inf]}, "default holds 1 infinite"),
        (
            {"text_correct": [True, np.nan]},
            "text_correct holds 1 values that are neither true nor false, the first nan",
        ),
        ({"text_correct": [True, None]}, "text_correct holds 1 values that are neither true nor false, the first None"),
        ({"decodable": [[True, np.nan]]}, "decodable holds 1 values that are neither"),
        ({"reads": np.nan}, "reads holds 1 values that are neither"),
        ({"groups": [0.0, np.nan]}, r"groups holds 1 missing names \(NaN or None\), the first in row 1"),
        ({"groups": ["a", None]}, "groups holds 1 missing names"),
        ({"groups": [0]}, "groups has 1 rows and margins has 2"),
    ],
)
def test_nan_is_named_and_not_taken_for_true(change, message) -> None:
    values = {"margins": np.ones((1, 2, 2)), "decodable": [[True, True]], "chosen": [[0, 0]], "labels": [1, 0],
              "readout": [1.0, 1.0], "default": 0.0, "text_correct": [True, True], **change}  # fmt: skip
    with pytest.raises(ProbeError, match=message) as caught:
        assign(**values)
    assert "\n" not in str(caught.value)


def test_an_undefined_auroc_is_no_decodable_layer() -> None:
    null = np.full((19, 2), 0.5)
    with pytest.raises(ProbeError, match="auroc holds 1 values that are not finite"):
        decodable_layers([np.nan, 0.9], null)
    with pytest.raises(ProbeError, match="null holds 38 values that are not finite"):
        decodable_layers([0.9, 0.9], null * np.nan)
