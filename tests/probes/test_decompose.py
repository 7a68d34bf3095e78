"""Default and signal: recovered from built data, intervals equal to scipy's, undefined is NaN with a reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import bootstrap, norm, t, ttest_ind

from probes import decompose as module
from probes.decompose import (
    decompose,
    decompose_layers,
    decompose_settings,
    paired_difference,
    paired_difference_layers,
)
from probes.errors import ProbeError

DESIGN = {"forward/yes": 1, "forward/no": 0, "backward/yes": 1, "backward/no": 0}


def study(sizes=(50, 50, 50, 50), *, default=1.58, signal=0.63, noise=1.0, seed=0):
    """Readouts built as default ± signal + noise; backward queries read lower, which balances out."""
    rng = np.random.default_rng(seed)
    cells = np.repeat(list(DESIGN), sizes)
    gold = np.array([DESIGN[cell] for cell in cells])
    shift = np.where(np.char.startswith(cells, "forward"), 0.5, -0.5)
    readout = default + np.where(gold == 1, signal, -signal) + shift + noise * rng.normal(size=len(cells))
    return readout, cells, gold


def test_exact_without_noise_whatever_the_cell_sizes():
    result = decompose(*study((10, 40, 7, 90), noise=0.0), resamples=50, seed=0)
    for low, value, high, expected in [
        (result.delta_low, result.delta, result.delta_high, 1.58),
        (result.signal_low, result.signal, result.signal_high, 0.63),
    ]:
        assert low == pytest.approx(expected)
        assert value == pytest.approx(expected)
        assert high == pytest.approx(expected)
    assert (result.n, result.cells, result.reason, result.level) == (147, 4, "", 0.95)
    assert "50 resamples" in result.method


def test_intervals_equal_scipy_bootstrap_with_t_tails():
    readout, cells, gold = study((12, 30, 20, 25), seed=3)
    samples = [readout[cells == cell] for cell in sorted(DESIGN)]  # backward/no, backward/yes, forward/no, forward/yes
    stretched = [x.mean() + (x - x.mean()) * math.sqrt(len(x) / (len(x) - 1)) for x in samples]
    spread = np.array([x.var(ddof=1) / len(x) for x in samples])
    freedom = spread.sum() ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(spread, samples, strict=True))
    tail = norm.cdf(t.ppf(0.025, freedom))

    def default(*cell, axis):
        return sum(one.mean(axis=axis) for one in cell) / 4

    def signal(*cell, axis):
        no, yes, no_too, yes_too = (one.mean(axis=axis) for one in cell)
        return (yes + yes_too - no - no_too) / 4

    ours = decompose(readout, cells, gold, resamples=40_000, seed=0)
    for statistic, low, high in [
        (default, ours.delta_low, ours.delta_high),
        (signal, ours.signal_low, ours.signal_high),
    ]:
        theirs = bootstrap(
            stretched,
            statistic,
            n_resamples=40_000,
            method="percentile",
            confidence_level=1 - 2 * tail,
            vectorized=True,
            rng=np.random.default_rng(1),
        ).confidence_interval
        width = theirs.high - theirs.low
        assert abs(low - theirs.low) < 0.02 * width
        assert abs(high - theirs.high) < 0.02 * width


def test_two_small_cells_agree_with_welch():
    rng = np.random.default_rng(0)
    gold = np.repeat([0, 1], (9, 14))
    readout = rng.normal(size=(300, 23)) * np.where(gold, 3.0, 1.0)
    ours = decompose_layers(readout, gold.astype(str), gold, seed=0)
    welch = ttest_ind(readout[:, 9:], readout[:, :9], axis=1, equal_var=False).confidence_interval(0.95)
    ratio = np.array([one.signal_high - one.signal_low for one in ours]) / ((welch.high - welch.low) / 2)
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert ((ratio > 0.8) & (ratio < 1.2)).all()


NOISES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "skewed": lambda rng, shape: rng.exponential(size=shape) - 1,
    "two lumps": lambda rng, shape: np.where(rng.random(shape) < 0.2, 4.0, 0.0) - 0.8 + 0.3 * rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape),
}


def coverage(sizes, noise, spread=(1, 1, 1, 1), studies=2000):
    """Shares of simulated studies whose 95% intervals hold δ and s; studies stand where layers do."""
    cells = np.repeat(list(DESIGN), sizes)
    gold = np.array([DESIGN[cell] for cell in cells])
    drawn = NOISES[noise](np.random.default_rng([len(noise), *sizes]), (studies, len(cells))) * np.repeat(spread, sizes)
    readout = 1.58 + np.where(gold == 1, 0.63, -0.63) + drawn
    results = decompose_layers(readout, cells, gold, resamples=1000, seed=0)
    hits = [(one.delta_low <= 1.58 <= one.delta_high, one.signal_low <= 0.63 <= one.signal_high) for one in results]
    return np.mean(hits, axis=0)


@pytest.mark.parametrize("sizes", [(8,) * 4, (25,) * 4])
def test_intervals_cover_the_truth(sizes):
    assert ((coverage(sizes, "normal") > 0.93) & (coverage(sizes, "normal") < 0.97)).all()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [(1, 1, 1, 1), (0.2, 1, 3, 1)])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("sizes", [(8,) * 4, (12,) * 4, (25,) * 4, (8, 25, 8, 25)])
def test_intervals_cover_the_truth_whatever_the_noise(sizes, noise, spread):
    found = coverage(sizes, noise, spread, studies=6000)
    # Where one small cell holds nearly all the spread and is lopsided, no interval of a mean can mend it.
    lopsided = max(spread) > 1 and noise in ("skewed", "two lumps")
    assert ((found > (0.82 if lopsided else 0.925)) & (found < 0.965)).all(), found


def test_layers_share_rows_and_resamples():
    readout, cells, gold = study()
    layers = decompose_layers(np.stack([readout, 2 * readout]), cells, gold, resamples=200, seed=0)
    alone = decompose(readout, cells, gold, resamples=200, seed=0)
    for factor, layer in enumerate(layers, start=1):
        for name in ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high"):
            assert getattr(layer, name) == pytest.approx(factor * getattr(alone, name))
        assert layer.n == alone.n


def test_resampling_in_blocks_changes_nothing(monkeypatch):
    whole = decompose(*study(), resamples=97, seed=0)
    monkeypatch.setattr(module, "_BLOCK", 500)
    blocks = decompose(*study(), resamples=97, seed=0)
    assert blocks.delta_low == pytest.approx(whole.delta_low)
    assert blocks.signal_high == pytest.approx(whole.signal_high)


def test_order_of_rows_and_seed():
    readout, cells, gold = study()
    assert decompose(readout, cells, gold, seed=1) == decompose(readout, cells, gold, seed=1)
    assert decompose(readout, cells, gold, seed=1).delta_low != decompose(readout, cells, gold, seed=2).delta_low
    order = np.random.default_rng(0).permutation(len(gold))
    assert decompose(readout[order], cells[order], gold[order], seed=1).delta == pytest.approx(
        decompose(readout, cells, gold, seed=1).delta
    )


def test_a_wider_level_is_a_wider_interval():
    narrow, wide = (decompose(*study(), seed=0, level=level) for level in (0.5, 0.99))
    assert wide.delta_low < narrow.delta_low < narrow.delta_high < wide.delta_high


def test_paired_difference_removes_what_instances_share():
    rng = np.random.default_rng(0)
    before, cells, gold = study(noise=3.0)
    after = before + 0.4 + np.where(gold == 1, 1.0, -1.0) + 0.1 * rng.normal(size=len(gold))
    change = paired_difference(before, after, cells, gold, seed=0)
    first, second = (decompose(readout, cells, gold, seed=0) for readout in (before, after))
    assert change.delta == pytest.approx(second.delta - first.delta)
    assert change.signal == pytest.approx(second.signal - first.signal)
    assert change.signal == pytest.approx(1.0, abs=0.1)
    assert change.signal_low > 0.9
    assert change.signal_high - change.signal_low < 0.2 * (first.signal_high - first.signal_low)
    assert "paired" in change.method
    assert change.n == 200


def test_paired_layers_are_the_pairs_of_each_layer():
    readout, cells, gold = study()
    before, after = np.stack([readout, readout**2]), np.stack([readout + gold, readout])
    for layer, one in enumerate(paired_difference_layers(before, after, cells, gold, seed=0)):
        alone = paired_difference(before[layer], after[layer], cells, gold, seed=0)
        for name in ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high"):
            assert getattr(one, name) == pytest.approx(getattr(alone, name))
        assert (one.n, one.method) == (alone.n, alone.method)
    with pytest.raises(ProbeError, match="after has 1 layers and before has 2"):
        paired_difference_layers(before, after[:1], cells, gold, seed=0)
    with pytest.raises(ProbeError, match="after has 199 rows and before has 200"):
        paired_difference_layers(before, after[:, 1:], cells, gold, seed=0)


def test_settings_in_one_call():
    readout, cells, gold = study((30, 40, 25, 35))
    settings = np.where(np.arange(len(gold)) % 3 == 0, "few", "many")
    readout = readout + np.where(settings == "few", 2.0, 0.0)
    found = decompose_settings(np.stack([readout, -readout]), cells, gold, settings, resamples=4000, seed=0)
    assert list(found) == ["all", "few", "many"]
    pooled = decompose_layers(np.stack([readout, -readout]), cells, gold, resamples=4000, seed=0)
    for one, other in zip(found["all"], pooled, strict=True):
        assert (one.delta, one.signal, one.n) == (other.delta, other.signal, other.n)
        # Rows of two settings differ by 2, and drawing within settings leaves that difference out.
        assert one.delta_high - one.delta_low < 0.85 * (other.delta_high - other.delta_low)
        assert "within cells and settings" in one.method
    for name in ("few", "many"):
        own = settings == name
        alone = decompose(readout[own], cells[own], gold[own], resamples=4000, seed=1)
        assert found[name][0].delta == pytest.approx(alone.delta)
        assert found[name][0].signal_low == pytest.approx(alone.signal_low, abs=0.03)
        assert found[name][0].delta_high == pytest.approx(alone.delta_high, abs=0.03)
        assert found[name][1].delta_low == pytest.approx(-found[name][0].delta_high)


def test_a_setting_without_a_cell_is_nan_and_the_whole_is_not():
    readout, cells, gold = study()
    settings = np.where((cells == "forward/no") | (np.arange(200) % 2 == 0), "whole", "part")
    found = decompose_settings(readout[None], cells, gold, settings, seed=0)
    assert found["part"][0].reason == "no row counted in 1 of 4 cells: forward/no"
    assert math.isnan(found["part"][0].delta)
    assert found["all"][0].reason == found["whole"][0].reason == ""
    settings = np.where(np.arange(200) == 0, "one", "rest")
    found = decompose_settings(readout[None], cells, gold, settings, seed=0)
    assert found["all"] == decompose_layers(readout[None], cells, gold, seed=0)
    with pytest.raises(ProbeError, match="a setting is called 'all'"):
        decompose_settings(readout[None], cells, gold, np.full(200, "all"), seed=0)


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda cells: cells != "forward/no", "no row counted in 1 of 4 cells: forward/no"),
        (lambda cells: np.char.endswith(cells, "yes"), "no row counted in 2 of 4 cells: backward/no, forward/no"),
    ],
)
def test_an_empty_cell_is_nan_with_a_reason(keep, reason):
    readout, cells, gold = study()
    kept = keep(cells)
    dropped = decompose(readout[kept], cells[kept], gold[kept], declared=DESIGN, seed=0)
    # A cell whose readouts are all missing is as empty as one without rows.
    missing = decompose(np.where(kept, readout, np.nan), cells, gold, seed=0)
    for result in (dropped, missing):
        assert result.reason == reason
        assert all(
            math.isnan(number)
            for number in (result.delta, result.delta_low, result.delta_high, result.signal, result.signal_high)
        )
        assert result.n == kept.sum()


def test_one_gold_answer_is_nan_with_a_reason():
    readout, cells, gold = study()
    result = decompose(readout[gold == 1], cells[gold == 1], gold[gold == 1], seed=0)
    assert math.isnan(result.delta)
    assert result.reason == "all 2 cells have gold yes; both are needed"


def test_a_cell_with_one_row_has_no_interval():
    result = decompose(*study((1, 20, 20, 20)), seed=0)
    assert math.isfinite(result.delta)
    assert math.isfinite(result.signal)
    assert math.isnan(result.delta_low)
    assert math.isnan(result.signal_high)
    assert result.reason == "no interval: one row counted in 1 of 4 cells: forward/yes"


def test_missing_readouts_do_not_count():
    readout, cells, gold = study()
    readout[:5] = np.nan
    assert decompose(readout, cells, gold, seed=0).n == 195
    assert paired_difference(readout, np.zeros(200), cells, gold, seed=0).n == 195


def test_a_change_that_infinity_hides_is_refused():
    """inf - inf is NaN, which would leave the row out without a word."""
    readout, cells, gold = study()
    both = np.where(np.arange(200) == 3, np.inf, readout)
    with pytest.raises(ProbeError, match="before and after are infinite in the same place"):
        paired_difference(both, both, cells, gold, seed=0)
    with pytest.raises(ProbeError, match="readout holds inf in size"):
        paired_difference(both, readout, cells, gold, seed=0)


READOUT, CELLS, GOLD = study()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"readout": READOUT[None]}, r"readout has shape \(1, 200\); needed one axis each for \[row\]"),
        ({"cells": CELLS[1:]}, "cells has 199 rows and readout has 200"),
        ({"gold": GOLD[1:]}, "gold has 199 rows and readout has 200"),
        ({"gold": GOLD * 2}, "gold holds the values 0, 2; only 0 and 1 are allowed"),
        ({"cells": np.full(200, "all")}, "cell 'all' holds rows of gold yes and gold no"),
        ({"declared": {"forward/yes": 1}}, "cell 'backward/no' has gold 0 and is not declared; declared: forward/yes"),
        ({"declared": DESIGN | {"forward/no": 1}}, "cell 'forward/no' has gold 0 and is declared gold 1"),
        ({"resamples": 0}, "resamples is 0"),
        ({"level": 95}, "level 95"),
        ({"readout": np.where(np.arange(200) == 3, -np.inf, READOUT)}, "readout holds inf in size.*or NaN for a row"),
        ({"readout": READOUT * 1e100}, r"readout holds .*e\+100 in size, whose variance overflows float64"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    arguments = {"readout": READOUT, "cells": CELLS, "gold": GOLD, "seed": 0} | changes
    with pytest.raises(ProbeError, match=message) as caught:
        decompose(**arguments)
    assert "\n" not in str(caught.value)
