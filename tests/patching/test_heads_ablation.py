"""Competence and agreement before and after an ablation: equal to the project's own statistics, and told apart."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.statistics import Arm, compare_arms, pair_profile
from patching import PatchError, ablation_study
from patching.heads_measures import MEASURES, STATISTICS
from probes.decompose import decompose, paired_difference


def design(n):
    cells = np.array(["f-yes", "b-yes", "f-no", "b-no"])[np.arange(n) % 4]
    gold = np.where(np.char.endswith(cells, "yes"), 1, -1)
    shape = {
        "presentations": ["original"] * n + ["equivalent"] * n,
        "keys": [*range(n)] * 2,
        "cells": [*cells.tolist(), *cells.tolist()],
        "gold": np.tile(gold, 2),
    }
    return np.tile(gold, 2), shape


def readouts(seed=0, n=120):
    """A model before and after: 40 % of the signal gone, a larger default, and noise that both share."""
    rng = np.random.default_rng(seed)
    gold, shape = design(n)
    own = rng.normal(0, 1, n)
    before = 0.4 + gold + np.tile(own, 2) + rng.normal(0, 0.5, 2 * n)
    after = 1.2 + 0.6 * gold + np.tile(own, 2) + rng.normal(0, 0.5, 2 * n)
    return before, after, shape


def counts(n, gold, first, second, agreeing, rng):
    """Right or wrong for each row, with these numbers right in each presentation and this number of agreeing pairs."""
    both = (agreeing - n + first + second) // 2
    order = rng.permutation(n)
    one, two = np.full(n, -1), np.full(n, -1)
    one[order[:first]] = 1
    two[order[:both]] = 1
    two[order[first : first + second - both]] = 1
    return np.concatenate([one, two]) * gold * rng.uniform(0.5, 1.5, 2 * n)


def test_the_measures_are_the_projects_own():
    before, after, shape = readouts()
    found = ablation_study(before, {"top": after}, seed=0, resamples=4000, **shape)
    n = found.n
    gold = (shape["gold"][:n] > 0).astype(int)
    words = {True: "yes", False: "no"}
    for which, readout in (("before", before), ("after", after)):
        answers = [[words[bool(value > 0)] for value in part] for part in (readout[:n], readout[n:])]
        profile = pair_profile(*answers, [words[bool(one)] for one in gold])
        numbers = {name: getattr(change, which).value for name, change in found.sets["top"].measures.items()}
        assert numbers["invariance"] == pytest.approx(profile.invariance.value)
        assert numbers["robust"] == pytest.approx(profile.robust.value)
        assert numbers["shared_wrong"] == pytest.approx(profile.shared_wrong.value)
        assert numbers["unstable"] == pytest.approx(profile.unstable.value)
        for kind, part in (("original", slice(0, n)), ("equivalent", slice(n, None))):
            own = decompose(readout[part], shape["cells"][:n], gold, seed=0)
            assert numbers[f"signal_{kind}"] == pytest.approx(own.signal)
            assert numbers[f"default_{kind}"] == pytest.approx(own.delta)
            right = np.sign(readout[part]) == shape["gold"][:n]
            assert numbers[f"accuracy_{kind}"] == pytest.approx(right.mean())


def test_the_intervals_are_those_of_the_projects_own_bootstraps():
    before, after, shape = readouts()
    top = ablation_study(before, {"top": after}, seed=0, resamples=4000, **shape).sets["top"]
    n = len(before) // 2
    gold = (shape["gold"][:n] > 0).astype(int)
    change = paired_difference(before[:n], after[:n], shape["cells"][:n], gold, resamples=4000, seed=0)
    made = top.measures["signal_original"].change
    np.testing.assert_allclose([made.low, made.high], [change.signal_low, change.signal_high], atol=0.02)
    arms = [
        Arm(*(np.where(part > 0, "yes", "no").tolist() for part in (readout[:n], readout[n:])))
        for readout in (before, after)
    ]
    names = ("invariance", "robust", "unstable", "accuracy_original", "accuracy_mean")
    theirs = compare_arms(
        *arms,
        np.where(gold == 1, "yes", "no").tolist(),
        statistics=names,
        strata=shape["cells"][:n],
        resamples=4000,
        seed=0,
    )
    for name in names:
        own, other = top.measures[name].change, theirs[name]
        assert own.value == pytest.approx(other.difference)
        # Theirs lacks the factor n / (n - 1) of each stratum: here 30 instances, 1.7 % of the width.
        np.testing.assert_allclose([own.low, own.high], [other.low, other.high], atol=0.013)


def test_more_agreement_with_less_competence_is_named_with_its_numbers():
    """The counts of a published ablation of four heads: agreement 81 to 93 %, accuracy 64.5/59.5 to 59/52 %."""
    rng = np.random.default_rng(0)
    gold, shape = design(200)
    before = counts(200, gold, 129, 119, 162, rng)
    after = 0.6 * counts(200, gold, 118, 104, 186, rng)
    found = ablation_study(before, {"top": after, "random 1": before}, seed=0, **shape)
    top, other = found.sets["top"], found.sets["random 1"]
    agreement = top.measures["invariance"]
    assert (agreement.before.value, agreement.after.value) == pytest.approx((0.81, 0.93))
    assert agreement.change.low > 0 and top.measures["accuracy_mean"].change.value == pytest.approx(-0.065)
    assert top.agreement_without_competence and top.share_removed["mean"].low > 0
    assert "invariance 81.0 → 93.0 %" in top.note and "accuracy 64.5/59.5 → 59.0/52.0 %" in top.note
    assert top.note.endswith("more agreement with less competence")
    assert other.note == "" and not other.agreement_without_competence
    assert other.measures["invariance"].change.value == 0 and other.share_removed["mean"].value == 0


def test_a_repair_is_not_called_that_and_a_small_study_is_told_to_be_one():
    rng = np.random.default_rng(1)
    gold, shape = design(200)
    repaired = ablation_study(
        counts(200, gold, 129, 119, 162, rng), {"top": 2 * counts(200, gold, 150, 148, 186, rng)}, seed=0, **shape
    ).sets["top"]
    assert repaired.measures["invariance"].change.low > 0
    assert not repaired.agreement_without_competence and repaired.note == ""
    gold, shape = design(16)
    small = ablation_study(
        counts(16, gold, 10, 10, 12, rng), {"top": counts(16, gold, 9, 9, 14, rng)}, seed=0, **shape
    ).sets["top"]
    assert not small.agreement_without_competence and small.note.endswith("by the estimates only: intervals hold 0")


def test_controls_are_subtracted_row_by_row():
    before, after, shape = readouts()
    rng = np.random.default_rng(5)
    little = {f"random {i}": before + rng.normal(0, 0.1, len(before)) for i in range(1, 10)}
    one = before - 0.1 * shape["gold"]
    found = ablation_study(
        before, {"top": after, "top without 0.1": one, "top without 1.1": before, **little}, seed=0, **shape
    )
    assert set(found.above) == {"random"} and set(found.added) == {"0.1", "1.1"}
    top = found.sets["top"]
    above = found.above["random"]["signal_mean"]
    mean = np.mean([found.sets[name].measures["signal_mean"].change.value for name in little])
    assert above.value == pytest.approx(top.measures["signal_mean"].change.value - mean) and above.high < 0
    assert found.added["1.1"]["signal_mean"].value == pytest.approx(top.measures["signal_mean"].change.value)
    assert found.added["0.1"]["signal_mean"].value > found.added["1.1"]["signal_mean"].value
    assert found.rank_p == {"random": pytest.approx(0.1)}
    assert top.share_removed["mean"].value == pytest.approx(
        1 - top.measures["signal_mean"].after.value / top.measures["signal_mean"].before.value
    )
    assert found.above["random"]["share_removed_mean"].low > 0.2


def test_pairing_narrows_and_instances_with_many_pairs_widen():
    before, after, shape = readouts()
    top = ablation_study(before, {"top": after}, seed=0, **shape).sets["top"]
    measure = top.measures["default_original"]
    assert measure.change.high - measure.change.low < 0.8 * (measure.before.high - measure.before.low)
    n = len(before) // 2
    copied = {
        "presentations": shape["presentations"] * 3,
        "keys": [(copy, key) for copy in range(3) for key in shape["keys"]],
        "cells": shape["cells"] * 3,
        "gold": np.tile(shape["gold"], 3),
    }
    tied = ablation_study(
        np.tile(before, 3), {"top": np.tile(after, 3)}, groups=[*range(n), *range(n)] * 3, seed=0, **copied
    )
    assert (tied.n, tied.n_groups) == (3 * n, n)
    again = tied.sets["top"].measures["default_original"].change
    np.testing.assert_allclose([again.low, again.high], [measure.change.low, measure.change.high], atol=1e-9)


def test_order_of_rows_does_not_matter():
    before, after, shape = readouts(n=40)
    order = np.random.default_rng(2).permutation(len(before))
    moved = {name: [values[row] for row in order] for name, values in shape.items()}
    one = ablation_study(before, {"top": after}, seed=0, **shape).sets["top"]
    two = ablation_study(before[order], {"top": after[order]}, seed=0, **{**moved, "gold": np.array(moved["gold"])})
    for name in MEASURES:
        assert two.sets["top"].measures[name].change.value == pytest.approx(one.measures[name].change.value)


def test_what_is_undefined_is_nan_with_a_reason():
    before, after, shape = readouts()
    weak = ablation_study(before * 0.01, {"top": after * 0.01}, seed=0, **shape)
    assert (
        np.isnan(weak.sets["top"].share_removed["mean"].value)
        and "share_removed_mean is undefined: signal_mean is" in weak.reason
    )
    assert np.isnan(weak.rank_p.get("random", np.nan)) and np.isfinite(
        weak.sets["top"].measures["signal_mean"].change.low
    )
    only = [row for row in range(len(before)) if shape["gold"][row] > 0]
    part = {name: [values[row] for row in only] for name, values in shape.items()}
    found = ablation_study(before[only], {"top": after[only]}, seed=0, **{**part, "gold": np.array(part["gold"])})
    assert "no cell has gold no" in found.reason
    numbers = found.sets["top"].measures
    assert np.isnan(numbers["signal_mean"].change.value) and np.isnan(numbers["default_original"].before.value)
    assert np.isfinite(numbers["invariance"].change.low)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": [0] * 240}, "key 0 has two rows of its original"),
        ({"keys": [*range(240)]}, "key 0 has no equivalent"),
        ({"presentations": ["negated"] * 240}, "row 0 is of presentation 'negated'; allowed: original, equivalent"),
        ({"cells": ["a"] * 240}, "cell 'a' holds rows of gold yes and gold no"),
        ({"cells": [str(row) for row in range(240)]}, "key 0 is in cells '0' and '120'"),
        ({"gold": np.zeros(240)}, r"gold holds \[0\.0\]; allowed: \+1 and -1"),
        ({"keys": [*range(9)]}, "keys has 9 rows and before has 240"),
    ],
)
def test_rows_that_make_no_pairs_are_refused(changed, message):
    before, after, shape = readouts()
    with pytest.raises(PatchError, match=message):
        ablation_study(before, {"top": after}, seed=0, **{**shape, **changed})


def test_empty_and_broken_readouts_are_refused():
    before, after, shape = readouts()
    with pytest.raises(PatchError, match="no ablated readouts"):
        ablation_study(before, {}, seed=0, **shape)
    with pytest.raises(PatchError, match="1 readouts are not finite"):
        ablation_study(before, {"top": np.where(np.arange(240) == 3, np.nan, after)}, seed=0, **shape)
    with pytest.raises(PatchError, match="top has 3 rows"):
        ablation_study(before, {"top": after[:3]}, seed=0, **shape)
    assert STATISTICS[-3:] == ("share_removed_original", "share_removed_equivalent", "share_removed_mean")
