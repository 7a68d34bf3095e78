"""Heads are ranked on some vocabularies and tested on others; ablated sets come with their controls."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from patching import (
    Edit,
    PatchError,
    ablation_cells,
    head_cells,
    head_sets,
    select_heads,
)

HEADS = [4, None, 4, 2]
CELLS = head_cells(HEADS)
UNITS = ["age"] * 30 + ["size"] * 30 + ["place"] * 30


def effects(seed=0, *, lucky=3.0):
    """Head (2, 1) works everywhere, head (0, 0) on one relation alone, the rest is noise."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(90, len(CELLS)))
    values[:, 5] += 2
    values[:30, 0] += lucky
    return values


def test_a_head_of_one_vocabulary_does_not_pass_the_others():
    found = select_heads(effects(), CELLS, UNITS, held_out={"place"}, k=2, seed=0)
    assert set(found.top) == {(2, 1), (0, 0)} and (found.n, found.n_held_out) == (60, 30)
    by_head = {(one.layer, one.head): one for one in found.tested}
    assert by_head[2, 1].low > 1 and by_head[0, 0].low < 0.5
    assert [(one.layer, one.head) for one in found.tested] == [(one.layer, one.head) for one in found.ranked]
    assert found.overlap >= 1
    values = effects()
    wanted = stats.spearmanr(values[:60].mean(axis=0), values[60:].mean(axis=0)).statistic
    assert found.spearman == pytest.approx(wanted)


def test_the_held_out_mean_does_not_know_the_ranking():
    """In noise the best of ten heads looks good where it was chosen, and like nothing elsewhere."""
    inside, outside = [], []
    for seed in range(60):
        values = np.random.default_rng(seed).normal(size=(90, len(CELLS)))
        found = select_heads(values, CELLS, UNITS, held_out={"place"}, k=1, seed=0, resamples=50)
        inside.append(found.ranked[0].mean)
        outside.append(found.tested[0].mean)
    assert np.mean(inside) > 0.12 and abs(np.mean(outside)) < 0.06


def test_an_instance_in_both_vocabularies_takes_no_part_in_the_ranking():
    groups = [*range(30), *range(30, 60), *range(15, 45)]
    found = select_heads(effects(), CELLS, UNITS, held_out={"place"}, k=2, groups=groups, seed=0)
    assert (found.n, found.left_out, found.n_held_out) == (30, 30, 30)
    with pytest.raises(PatchError, match="0 rows are left to rank heads on and 30 to test them"):
        select_heads(effects(), CELLS, UNITS, held_out={"place"}, k=2, groups=[*range(30)] * 3, seed=0)


def test_what_cannot_be_selected_is_refused():
    with pytest.raises(PatchError, match="held-out unit 'colour'; units: age, place, size"):
        select_heads(effects(), CELLS, UNITS, held_out={"colour"}, k=2, seed=0)
    with pytest.raises(PatchError, match="k is 11; give 1 to 10"):
        select_heads(effects(), CELLS, UNITS, held_out={"age"}, k=11, seed=0)
    with pytest.raises(PatchError, match="0 rows are left"):
        select_heads(effects(), CELLS, UNITS, held_out={"age", "size", "place"}, k=1, seed=0)
    with pytest.raises(PatchError, match="90 rows of effects, 89 units"):
        select_heads(effects(), CELLS, UNITS[1:], held_out={"age"}, k=1, seed=0)


def test_controls_keep_the_number_of_heads_and_their_layers():
    heads = [4, None, 6, 8]
    made = head_sets(heads, [(0, 1), (2, 0), (2, 5)], count=6, seed=0)
    assert next(iter(made.sets)) == "top" and not made.absent
    assert len(made.family("random")) == 6 and len(made.family("same layers")) == 6
    for name in (*made.family("random"), *made.family("same layers")):
        assert len(set(made.sets[name])) == 3 and not set(made.sets[name]) & set(made.sets["top"])
        assert all(head < heads[layer] for layer, head in made.sets[name])
    for name in made.family("same layers"):
        assert sorted(layer for layer, _ in made.sets[name]) == [0, 2, 2]
    assert made.sets["top without 2.0"] == ((0, 1), (2, 5)) and len(made.family("top without")) == 3
    assert (
        head_sets(heads, [(0, 1), (2, 0), (2, 5)], count=3, seed=0).sets["same layers 2"] == made.sets["same layers 2"]
    )


def test_a_control_that_cannot_be_made_is_absent_with_the_reason():
    made = head_sets([2, 4], [(0, 0), (0, 1)], count=4, seed=0)
    assert made.absent == {"same layers": "layer 0 has 2 heads, 2 of them in the top set"}
    assert not made.family("same layers") and len(made.family("random")) == 4
    lone = head_sets([3, None], [(0, 2)], count=4, seed=0)
    assert lone.absent == {"top without": "one head is the whole set"} and len(lone.family("same layers")) == 2
    assert head_sets([2, 1], [(0, 0), (1, 0)], seed=0).absent["random"] == "1 heads are left beside the top 2"
    with pytest.raises(PatchError, match=r"head 5 of layer 0 does not exist \(the layer has 3\)"):
        head_sets([3, None], [(0, 5)], seed=0)
    with pytest.raises(PatchError, match="has no heads"):
        head_sets([3, None], [(1, 0)], seed=0)
    with pytest.raises(PatchError, match="no top heads"):
        head_sets([3], [], seed=0)


def test_sets_become_cells_of_any_source_and_scope():
    made = head_sets([4, 4], [(0, 1), (1, 0)], count=2, seed=0)
    cells = ablation_cells(made)
    assert [cell.name for cell in cells] == list(made.sets) and cells[0].edits == (Edit("z", 0, 1), Edit("z", 1, 0))
    scoped = ablation_cells(made, source="mean", position="all")
    assert scoped[0].edits[0] == Edit("z", 0, 1, "mean", "all")
