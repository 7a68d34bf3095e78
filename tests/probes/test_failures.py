"""Failure labels: each by hand, the decision list against a second writing of it, chance rows, refits."""

from __future__ import annotations

import numpy as np
import pytest

from probes.errors import ProbeError
from probes.failure_shares import calibration
from probes.failures import LABELS, assign, decodable_layers, label_failures, right_rows
from probes.linear import fit_probes

ALL = [True, True, True, True]


def one(toward, *, readout=-1.0, default=-2.0, decodable=ALL, chosen=1, gold=1, text=False):
    """Labels of a single row among forty failed ones, which are right at every layer by far more.

    `toward`, `readout` and `default` are toward gold.
    """
    sign = 1 if gold else -1
    others = 40
    margins = np.full((1, len(toward), 1 + others), 10.0 * sign)
    margins[0, :, 0] = sign * np.array(toward, dtype=float)
    return assign(
        margins, [decodable], np.full((1, 1 + others), chosen), [gold] * (1 + others),
        np.array([readout] + [-1.0] * others) * sign, np.array([default] + [-2.0] * others) * sign,
        [text] + [False] * others,
    )  # fmt: skip


@pytest.mark.parametrize("gold", [0, 1])
@pytest.mark.parametrize(
    ("row", "label", "lost_at"),
    [
        # readout -1 = default -2 + signal 1: the instance says gold, the default decides
        ({"toward": [-1, 1, 1, 1]}, "overridden", -1),
        ({"toward": [-1, -1, -1, 1]}, "overridden", -1),  # right at the last layer alone
        # readout -1 = default 0.5 + signal -1.5
        ({"toward": [-1, 1, 1, 1], "default": 0.5}, "reversed", -1),
        ({"toward": [1, 1, 1, 1], "default": -1.0}, "reversed", -1),  # a signal of 0 is not toward gold
        ({"toward": [-1, 1, 1, -1]}, "lost", 3),
        ({"toward": [-1, 1, -1, -1]}, "lost", 2),
        ({"toward": [-1, 1, -1, -1], "default": 0.5}, "lost", 2),  # whatever the signal
        ({"toward": [-1, 1, -1, 1, -1], "decodable": [True] * 5}, "lost", 4),  # wrong between does not count
        # right at the last layer, which is within the shuffles: undecodable from layer 2 on
        ({"toward": [-1, 1, 1, 1], "decodable": [True, True, False, False]}, "lost", 2),
        # right at the last decodable layer, not at the chosen one
        ({"toward": [-1, -1, 1, 1], "decodable": [True, True, True, False]}, "lost", 3),
        ({"toward": [-1, -1, -1, -1]}, "not_decodable", -1),
        # some layer is right by luck: neither the chosen nor the last decodable one
        ({"toward": [1, -1, 1, -1]}, "not_decodable", -1),
        ({"toward": [1, 1, 1, 1], "decodable": [False] * 4}, "not_decodable", -1),
        ({"toward": [0, 0, 0, 0]}, "not_decodable", -1),
        # the chosen layer of this fold is within the shuffles
        ({"toward": [1, 1, -1, -1], "decodable": [True, False, True, False]}, "not_decodable", -1),
        ({"toward": [-1, -1, -1, -1], "readout": 0.5, "text": True}, "right", -1),
        ({"toward": [-1, 1, -1, -1], "readout": 0.5}, "text", -1),
        ({"toward": [-1, 1, 1, 1], "text": True}, "overridden", -1),  # the text is right, the readout is not
        ({"toward": [1, 1, 1, 1], "readout": 0.0}, "overridden", -1),  # no readout at all is not a right one
        ({"toward": [1, 1, 1, 1], "default": np.nan}, "mixed", -1),  # 2 or 3
        ({"toward": [1, 1, 1, -1], "default": np.nan}, "lost", 3),
    ],
)
def test_each_label_by_hand_for_either_gold(row, label, lost_at, gold) -> None:
    found = one(**row, gold=gold)
    assert (found.label[0], found.lost_at[0]) == (label, lost_at)
    assert found.failed[0] == (label not in ("right", "text"))
    failed = label not in ("right", "text")
    assert found.share[0] == (label != "mixed") if failed else np.isnan(found.share[0])
    assert found.margin[0] == row["toward"][1] and found.last_margin[0] == row["toward"][-1]


def test_signal_and_default_are_counted_toward_gold() -> None:
    found = one([1, 1, 1, 1], readout=-1.0, default=-2.5, gold=0)
    assert (found.signal[0], found.default[0]) == (1.5, -2.5)


def test_a_margin_that_chance_gives_as_well_is_open_and_leaves_the_row_mixed() -> None:
    """Of forty failed rows ten are right by far; the rest lie around 0, five on each side at every size."""
    sizes = np.concatenate([np.full(10, 9.0), np.repeat([1.0, 2.0, 3.0], 5), -np.repeat([1.0, 2.0, 3.0], 5)])
    found = right_rows(
        np.stack([sizes, -sizes, sizes]), np.array([True, True, False]), np.ones(40, bool), np.arange(40)
    )
    assert found[0].sum() == 10 and found[0, :10].all()
    assert not found[1:].any()  # turned around nothing is beyond chance; the last layer is not decodable
    labels = assign(
        np.stack([np.stack([sizes, sizes])]), [[True, True]], np.zeros((1, 40), int), [1] * 40, [-1.0] * 40, -2.0,
        [False] * 40,
    ).label  # fmt: skip
    assert labels.tolist() == ["overridden"] * 10 + ["mixed"] * 15 + ["not_decodable"] * 15


@pytest.mark.parametrize(("rows", "label"), [(4, "mixed"), (5, "overridden")])
def test_with_few_failures_nothing_is_beyond_chance(rows, label) -> None:
    found = assign(np.ones((1, 1, rows)), [[True]], np.zeros((1, rows), int), [1] * rows, [-1.0] * rows, -2.0,
                   [False] * rows)  # fmt: skip
    assert set(found.label) == {label}


@pytest.mark.parametrize("known", [0.0, 0.1, 0.3, 0.7])
def test_of_the_rows_called_right_at_most_a_fifth_is_luck(known) -> None:
    """The promised rate, over 2,000 simulated layers of sixty failures; rows without the answer are noise around 0."""
    rng = np.random.default_rng(int(10 * known))
    knows = rng.random((2000, 60)) < known
    toward = rng.standard_normal((2000, 60)) + 2.5 * knows
    right = right_rows(toward, np.ones(2000, bool), np.ones(60, bool), np.arange(60))
    false = (right & ~knows).sum(axis=1) / np.maximum(right.sum(axis=1), 1)
    assert false.mean() <= 0.2 + 3 * false.std() / 2000**0.5
    if known == 0.7:
        assert right[knows].mean() > 0.9  # and it finds what is there
    # By the sign alone luck is a larger part.
    assert known == 0.7 or ((toward > 0) & ~knows).sum() / (toward > 0).sum() > 0.4


def test_the_level_is_that_of_the_failed_rows() -> None:
    """Rows without a failure are mostly right, and would lend the others their good name."""
    margins = np.concatenate([np.full(100, 1.0), [1.0, -1.0] * 5])[None]
    failed = np.arange(110) >= 100
    assert not right_rows(margins, np.array([True]), failed, np.arange(110)).any()
    assert right_rows(margins, np.array([True]), np.ones(110, bool), np.arange(110)).sum() == 105


def level_by_hand(toward):
    """The smallest t at which at most a fifth of the rows beyond it are expected to be there by chance."""
    for t in sorted(abs(one) for one in toward):
        above, below = sum(one >= t for one in toward), sum(one <= -t for one in toward)
        if above and (1 + below) / above <= 0.2:
            return t
    return np.inf


def by_hand(margins, decodable, chosen, gold, readout, default, text):
    """The module's text once more, one row at a time: label, share and lost_at of every row."""
    splits, layers, rows = range(len(margins)), range(len(margins[0])), range(len(gold))
    sign = [1 if one else -1 for one in gold]
    failed = [row for row in rows if not readout[row] * sign[row] > 0]
    levels = [[level_by_hand([margins[s][k][row] * sign[row] for row in failed]) for k in layers] for s in splits]
    for row in rows:
        if row not in failed:
            yield ("right" if text[row] else "text"), None, -1
            continue
        given, lost = [], []
        for s in splits:
            state = {}
            for layer in layers:
                toward = margins[s][layer][row] * sign[row]
                state[layer] = "open" if decodable[s][layer] and toward > 0 else "not"
                if state[layer] == "open" and toward >= levels[s][layer]:
                    state[layer] = "right"
            usable = [layer for layer in layers if decodable[s][layer]]
            looked = {state[chosen[s][row]], state[usable[-1]] if usable else "not"}
            last = state[max(layers)]
            if last == "right":
                given.append("overridden" if (readout[row] - default[row]) * sign[row] > 0 else "reversed")
            elif last == "not" and "right" in looked:
                given.append("lost")
                lost.append(1 + max(layer for layer in layers if state[layer] == "right"))
            elif last == "not" and looked == {"not"}:
                given.append("not_decodable")
        best = max(set(given), key=given.count) if given else None
        share = given.count(best) / len(margins)
        if share <= 0.5:
            yield "mixed", share, -1
        else:
            yield best, share, sorted(lost)[(len(lost) - 1) // 2] if best == "lost" else -1


@pytest.mark.parametrize("seed", range(12))
def test_against_a_second_writing_of_the_list(seed) -> None:
    rng = np.random.default_rng(seed)
    splits, layers, rows = 1 + seed % 6, 1 + seed % 5, 150
    gold, readout = rng.integers(0, 2, rows), rng.standard_normal(rows)
    # Splits agree about most rows, as refits do; some layers carry the answer for some rows.
    margins = rng.standard_normal((1, layers, rows)) + 0.7 * rng.standard_normal((splits, layers, rows))
    margins += 2.0 * (rng.random((1, layers, rows)) < rng.random((1, layers, 1))) * (2 * gold - 1)
    decodable = rng.random((splits, layers)) < 0.7
    chosen = rng.integers(0, layers, (splits, rows))
    default, text = rng.standard_normal(rows) * (seed % 3), rng.random(rows) < 0.5
    found = assign(margins, decodable, chosen, gold, readout, default, text)
    again = by_hand(margins.tolist(), decodable.tolist(), chosen.tolist(), gold, readout, default, text)
    for row, (label, share, lost_at) in enumerate(again):
        assert (found.label[row], found.lost_at[row]) == (label, lost_at)
        assert np.isnan(found.share[row]) if share is None else found.share[row] == pytest.approx(share)
    assert found.causes.shape == (splits, rows)
    assert set(found.label) <= {*LABELS, "right", "text"}
    assert np.allclose(found.tossed[found.failed].sum(axis=1), 1) and np.isnan(found.tossed[~found.failed]).all()


def test_a_label_needs_more_than_half_of_the_splits() -> None:
    """Ten rows, lost in two splits of four, overridden in the others."""
    margins = np.ones((4, 2, 10))
    margins[:2, 1] = -1.0
    rest = ([1] * 10, [-1.0] * 10, -2.0, [False] * 10)
    found = assign(margins, np.ones((4, 2)), np.zeros((4, 10), int), *rest)
    assert (found.label[0], found.share[0], found.lost_at[0]) == ("mixed", 0.5, -1)
    assert [LABELS[code] for code in found.causes[:, 0]] == ["lost", "lost", "overridden", "overridden"]
    found = assign(margins[:3], np.ones((3, 2)), np.zeros((3, 10), int), *rest)
    assert (found.label[0], found.lost_at[0]) == ("lost", 1)
    assert found.share[0] == pytest.approx(2 / 3)


def test_layers_are_decodable_by_the_best_layers_of_the_shuffles() -> None:
    rng = np.random.default_rng(0)
    null = 0.5 + 0.05 * rng.standard_normal((100, 8))
    best = np.sort(null.max(axis=1))
    auroc = np.array([best[-5], best[-5] + 1e-9, 0.99, 0.5])
    assert decodable_layers(auroc, null).tolist() == [False, True, True, False]
    # The very statement of p_max, on whatever number of shuffles.
    for shuffles in (19, 39, 100):
        for value in np.linspace(0.5, 0.7, 41):
            p_max = (1 + (null[:shuffles].max(axis=1) >= value).sum()) / (1 + shuffles)
            assert decodable_layers([value], null[:shuffles])[0] == (p_max <= 0.05)
    with pytest.raises(ProbeError, match=r"null has 18 shuffles; a layer can beat them at 0.05 with 19 or more"):
        decodable_layers([0.9], null[:18])


def study(*, rows=120, strength=(0.0, 0.0, 0.0), seed=0, features=20):
    """Noise, in which layer k carries the gold answer with this strength; every readout says yes."""
    rng = np.random.default_rng(seed)
    gold = rng.permutation(np.arange(rows) % 2)
    acts = rng.standard_normal((len(strength), rows, features))
    acts[:, :, 0] += np.array(strength)[:, None] * (2 * gold - 1)
    return acts, gold, np.arange(rows)


def labelled(acts, gold, groups, *, signal=0.5, **options):
    result = fit_probes(acts, gold, groups, shuffles=39, seed=1)
    readout = 2.0 + signal * (2 * gold - 1)
    return label_failures(
        acts, gold, groups, readout, 2.0, readout * (2 * gold - 1) > 0, result=result, seed=1, **options
    ), result


def test_a_planted_answer_gets_its_label() -> None:
    carried, _ = labelled(*study(strength=(0, 4, 4)))
    failed = carried.failed
    assert failed.sum() == 60 and (carried.label[failed] == "overridden").mean() > 0.95
    assert (carried.share[failed] == 1).mean() > 0.9
    reversed_, _ = labelled(*study(strength=(0, 4, 4)), signal=-0.5)
    assert (reversed_.label[failed] == "reversed").mean() > 0.95
    lost, _ = labelled(*study(strength=(0, 4, 0)))
    assert (lost.label[failed] == "lost").mean() > 0.9
    assert set(lost.lost_at[lost.label == "lost"]) == {2}


def test_nothing_is_found_in_noise() -> None:
    """Half of the margins are right by luck; the layers they are read at are not beyond the shuffles."""
    for seed in range(6):
        found, result = labelled(*study(seed=seed))
        if result.p_max > 0.05:
            assert set(found.label[found.failed]) == {"not_decodable"}
            assert (found.tossed[found.failed][:, LABELS.index("not_decodable")] == 1).all()


def test_rows_that_the_probe_knows_nothing_about_are_not_called_known() -> None:
    """A quarter of the rows carries the answer strongly, so the layer is decodable; the failures are all others."""
    acts, gold, groups = study(rows=480, strength=(0, 0))
    known = np.arange(480) % 4 == 0
    acts[1, known, 0] += 6 * (2 * gold[known] - 1)
    result = fit_probes(acts, gold, groups, shuffles=39, seed=1)
    assert result.p_max <= 0.05
    readout = np.where(known, 1.0, -0.5) * (2 * gold - 1)
    found = label_failures(acts, gold, groups, readout, np.where(known, 0, -1.0) * (2 * gold - 1), known, result=result,
                           seed=1)  # fmt: skip
    failed = found.failed
    assert failed.sum() == 360
    # About half of the margins are above 0, and nearly all of them are on the same side in every refit.
    assert 0.4 < (found.margin[failed] > 0).mean() < 0.6
    share = (found.label[failed] == "overridden").mean()
    coin = found.tossed[failed, LABELS.index("overridden")].mean()
    assert share < 0.1 and coin < 0.1
    assert (found.label[failed] == "mixed").mean() > 0.35


def test_the_splits_are_refits_on_folds_dealt_anew() -> None:
    acts, gold, groups = study(strength=(0.6, 0.8, 0.5))
    alone, result = labelled(acts, gold, groups, splits=1)
    again, _ = labelled(acts, gold, groups, splits=5)
    assert alone.splits == 1
    assert all(
        share == (label != "mixed") for share, label in zip(alone.share, alone.label, strict=True) if label in LABELS
    )
    assert np.array_equal(alone.margins, again.margins) and np.array_equal(alone.chosen_layer, again.chosen_layer)
    assert len(set(again.share[again.failed])) > 1
    third, _ = labelled(acts, gold, groups, splits=5)
    assert np.array_equal(again.label, third.label)
    at = result.chosen_layer[result.folds]
    assert np.array_equal(again.margin > 0, np.asarray(result.decodable))
    assert np.array_equal(again.margin, result.margins[at, np.arange(120)] * (2 * gold - 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decodable": [[True]]}, r"decodable has shape \(1, 1\)"),
        ({"chosen": [[4, 0]]}, "chosen holds layers 0 to 4; allowed are 0 to 1"),
        ({"labels": [1, 2]}, "labels holds the values 1, 2"),
        ({"labels": [1]}, "labels has 1 rows and margins has 2"),
        ({"readout": [1.0, np.nan]}, "readout holds 1 values that are not finite"),
        ({"text_correct": [True]}, "text_correct has 1 rows"),
        ({"margins": np.ones((2, 2))}, r"margins has shape \(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:
    values = {"margins": np.ones((1, 2, 2)), "decodable": [[True, True]], "chosen": [[0, 0]], "labels": [1, 0],
              "readout": [1.0, 1.0], "default": 0.0, "text_correct": [True, True], **change}  # fmt: skip
    with pytest.raises(ProbeError, match=message):
        assign(**values)


def test_splits_below_one_and_another_studys_result_are_refused() -> None:
    acts, gold, groups = study()
    with pytest.raises(ProbeError, match="splits is 0; it must be 1"):
        labelled(acts, gold, groups, splits=0)
    result = fit_probes(acts, gold, groups, shuffles=19, seed=1)
    with pytest.raises(ProbeError, match="result has 120 rows and features has 100"):
        label_failures(acts[:, :100], gold[:100], groups[:100], gold[:100], 0.0, gold[:100], result=result, seed=1)


def test_given_folds_are_refused_and_held_out_units_make_refits_alike() -> None:
    acts, gold, groups = study(strength=(0.0, 1.0, 1.0))
    with pytest.raises(ProbeError, match="assigned is given; refits deal folds of their own"):
        labelled(acts, gold, groups, assigned=groups % 5)
    units = np.array(["a", "b", "c"])[(groups // 2) % 3]
    result = fit_probes(acts, gold, groups, held_out=units, shuffles=39, seed=1)
    found = label_failures(acts, gold, groups, np.ones(120), 2.0, np.zeros(120), result=result, seed=1, held_out=units)
    assert (found.causes == found.causes[0]).all() and found.failed.sum() == 60
    survived = calibration(acts, gold, groups, result=result, failures=found, seed=1, held_out=units)
    assert {one.reason for one in survived if one.check == "half"} == {
        "folds hold out whole units, of which a half has too few"
    }
