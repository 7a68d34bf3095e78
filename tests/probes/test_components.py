"""Components: their defaults and signals are those of single decompositions and add up; what spoke against is named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes import components as module
from probes.components import against_gold, component_change, decompose_components
from probes.decompose import decompose, paired_difference
from probes.errors import ProbeError

DESIGN = {"forward/yes": 1, "forward/no": 0, "backward/yes": 1, "backward/no": 0}
NAMES = ("embed", "L0H0", "L0H1", "L0 mlp", "rounding")


def study(sizes=(30, 40, 25, 30), seed=0):
    """Five components: L0H1 knows (signal 2), L0 mlp leans (default -3), the others do nothing or little."""
    rng = np.random.default_rng(seed)
    cells = np.repeat(list(DESIGN), sizes)
    gold = np.array([DESIGN[cell] for cell in cells])
    values = rng.normal(size=(5, len(cells)))
    values[2] += np.where(gold == 1, 2.0, -2.0)
    values[3] -= 3.0
    values[4] *= 1e-7
    return values, cells, gold


def test_each_component_is_its_own_decomposition_with_shared_draws():
    values, cells, gold = study()
    table = decompose_components(values, NAMES, cells, gold, resamples=200, declared=DESIGN, seed=3)
    for row, part in zip(values, table.parts, strict=True):
        alone = decompose(row, cells, gold, resamples=200, declared=DESIGN, seed=3)
        for field in ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high"):
            assert getattr(part, field) == pytest.approx(getattr(alone, field), abs=1e-12)
        assert (part.n, part.cells, part.level, part.reason) == (125, 4, 0.95, "")
    assert table.parts[2].signal_low < 2 < table.parts[2].signal_high
    assert table.parts[3].delta_low < -3 < table.parts[3].delta_high


def test_they_add_up_to_those_of_the_readout():
    values, cells, gold = study()
    table = decompose_components(values, NAMES, cells, gold, resamples=50, seed=0)
    whole = decompose(values.sum(axis=0), cells, gold, resamples=50, seed=0)
    assert table.whole.signal_high == pytest.approx(whole.signal_high, abs=1e-12)
    for field in ("delta", "signal"):
        assert sum(getattr(part, field) for part in table.parts) == pytest.approx(getattr(whole, field), abs=1e-12)


def test_few_at_a_time_gives_the_same(monkeypatch):
    values, cells, gold = study()
    whole = decompose_components(values, NAMES, cells, gold, resamples=50, seed=0)
    monkeypatch.setattr(module, "_BLOCK", 50 * 4 * 2)
    cut = decompose_components(values, NAMES, cells, gold, resamples=50, seed=0)
    assert [part.signal_low for part in cut.parts] == pytest.approx([part.signal_low for part in whole.parts])
    assert [part.delta_high for part in cut.parts] == pytest.approx([part.delta_high for part in whole.parts])


def test_ranking_and_top():
    values, cells, gold = study()
    table = decompose_components(values, NAMES, cells, gold, resamples=20, seed=0)
    assert table.ranking()[0] == 2 and table.ranking("delta")[0] == 3 and table.ranking()[-1] == 4
    (first, part), (second, _) = table.top(2, "delta")
    assert first == "L0 mlp" and part is table.parts[3] and second != first
    with pytest.raises(ProbeError, match="ranked by 's'; choose signal or delta"):
        table.ranking("s")


def test_change_is_the_paired_difference_of_each_component():
    values, cells, gold = study()
    after = values + np.random.default_rng(1).normal(size=values.shape) / 10
    after[2] += np.where(gold == 1, 1.0, -1.0)
    table = component_change(values, after, NAMES, cells, gold, resamples=100, seed=5)
    for i, part in enumerate(table.parts):
        alone = paired_difference(values[i], after[i], cells, gold, resamples=100, seed=5)
        assert part.method == alone.method == table.whole.method
        for field in ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high"):
            assert getattr(part, field) == pytest.approx(getattr(alone, field), abs=1e-12)
    assert table.top(1)[0][0] == "L0H1" and table.parts[2].signal_low < 1 < table.parts[2].signal_high


def test_rows_that_are_no_numbers_and_cells_that_are_empty():
    values, cells, gold = study()
    values[0, :3] = np.nan
    table = decompose_components(values, NAMES, cells, gold, resamples=20, seed=0)
    assert {part.n for part in (*table.parts, table.whole)} == {122}
    assert sum(part.signal for part in table.parts) == pytest.approx(table.whole.signal, abs=1e-12)
    values[1, cells == "backward/no"] = np.nan
    table = decompose_components(values, NAMES, cells, gold, resamples=20, seed=0)
    assert all(math.isnan(part.signal) and "backward/no" in part.reason for part in (*table.parts, table.whole))
    assert sorted(table.ranking()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("change", [np.inf, -np.inf])
def test_an_infinite_part_is_refused_and_not_left_out(change):
    values, cells, gold = study()
    values[2, 7] = change
    message = r"values holds 1 infinite values, first in component 'L0H1', row 7; they must be finite, or NaN"
    with pytest.raises(ProbeError, match=message):
        decompose_components(values, NAMES, cells, gold, resamples=20, seed=0)
    with pytest.raises(ProbeError, match=message):
        component_change(values, np.zeros_like(values), NAMES, cells, gold, resamples=20, seed=0)
    with pytest.raises(ProbeError, match=message):
        against_gold(values, NAMES, np.where(gold == 1, 1, -1))


def test_parts_too_large_for_an_interval_are_one_line():
    values, cells, gold = study()
    with pytest.raises(ProbeError, match=r"readout holds .*e\+30. in size, whose variance overflows float64") as caught:
        decompose_components(values * 1e300, NAMES, cells, gold, resamples=20, seed=0)
    assert "\n" not in str(caught.value)
    plain, large = (decompose_components(values * one, NAMES, cells, gold, resamples=20, seed=0) for one in (1, 1e68))
    for one, other in zip(plain.parts, large.parts, strict=True):
        assert (other.signal_low, other.delta_high) == pytest.approx((one.signal_low * 1e68, one.delta_high * 1e68))


def test_what_spoke_against_the_gold_answer():
    values = np.array([[1.0, -2.0, 0.5, 1.0, np.nan], [-3.0, 1.0, 0.5, -1.0, 1.0], [0.0, -1.0, 0.5, 4.0, 1.0]])
    sign = np.array([1, 1, 1, -1, 1])
    found = against_gold(values, ("a", "b", "c"), sign)
    assert found.component.tolist() == [1, 0, -1, 2, -1]
    assert found.size[:2].tolist() == [3.0, 2.0] and found.size[3] == 4.0
    assert np.isnan(found.size[[2, 4]]).all()
    assert [found.name(row) for row in range(5)] == ["b", "a", "", "c", ""]
    assert found.counts() == {"a": 1, "b": 1, "c": 1}
    for row in range(4):  # brute force
        pushes = {name: -value * sign[row] for name, value in zip("abc", values[:, row], strict=True)}
        worst = max(pushes, key=lambda name: pushes[name])
        assert found.name(row) == (worst if pushes[worst] > 0 else "")


def test_refusals():
    values, cells, gold = study()
    with pytest.raises(ProbeError, match="values has 5 components and names 4, 4 of them different"):
        decompose_components(values, NAMES[:4], cells, gold, seed=0)
    with pytest.raises(ProbeError, match="give each component a name of its own"):
        decompose_components(values, ("a",) * 5, cells, gold, seed=0)
    with pytest.raises(ProbeError, match="after has 124 rows and before has 125"):
        component_change(values, values[:, 1:], NAMES, cells, gold, seed=0)
    with pytest.raises(ProbeError, match=r"sign holds the values 0, 1; only 1 .* and -1"):
        against_gold(values, NAMES, gold)
    with pytest.raises(ProbeError, match="resamples is 0"):
        decompose_components(values, NAMES, cells, gold, resamples=0, seed=0)
