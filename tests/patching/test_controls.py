"""Controls keep what they should keep, and depend on the seed and the item's key alone."""

from __future__ import annotations

import numpy as np
import pytest

from patching import PatchError, Pool, control_donors, derangement, norm_matched_random, unrelated_donor
from patching.donors import donor_from_store

KEYS = [f"item-{i}" for i in range(6)]
RESID = np.random.default_rng(0).standard_normal((6, 3, 8)).astype(np.float32) * 5
Z = {0: RESID[:, 0], 2: RESID[:, 2, :6]}
HEADS = [4, None, 3]


def test_random_directions_have_the_donors_norms_item_by_item_and_layer_by_layer():
    made = norm_matched_random({"resid_post": RESID}, keys=KEYS, seed=0)["resid_post"]
    for layer in range(3):
        assert made[layer].dtype == np.float32
        np.testing.assert_allclose(
            np.linalg.norm(made[layer], axis=-1), np.linalg.norm(RESID[:, layer], axis=-1), rtol=1e-6
        )
        cosine = (made[layer] * RESID[:, layer]).sum(-1) / np.linalg.norm(RESID[:, layer], axis=-1) ** 2
        assert np.abs(cosine).max() < 0.99


def test_norms_of_z_are_matched_within_each_head():
    made = norm_matched_random({"z": Z}, keys=KEYS, seed=0, heads=HEADS)["z"]
    for layer, values in Z.items():
        shape = (6, HEADS[layer], -1)
        np.testing.assert_allclose(
            np.linalg.norm(made[layer].reshape(shape), axis=-1),
            np.linalg.norm(values.reshape(shape), axis=-1),
            rtol=1e-5,
        )
    with pytest.raises(PatchError, match="pass heads=head_map"):
        norm_matched_random({"z": Z}, keys=KEYS, seed=0)


def test_an_item_gets_the_same_direction_whoever_else_is_asked():
    whole = norm_matched_random({"resid_post": RESID}, keys=KEYS, seed=0)["resid_post"]
    part = norm_matched_random({"resid_post": {1: RESID[[4, 2], 1]}}, keys=[KEYS[4], KEYS[2]], seed=0)["resid_post"]
    np.testing.assert_array_equal(part[1], whole[1][[4, 2]])
    other = norm_matched_random({"resid_post": RESID}, keys=KEYS, seed=1)["resid_post"]
    assert (np.abs(other[1] - whole[1]).max(axis=-1) > 1e-3).all()
    with pytest.raises(PatchError, match="5 keys for 6 donor rows"):
        norm_matched_random({"resid_post": RESID}, keys=KEYS[:5], seed=0)


def test_a_zero_vector_stays_zero():
    made = norm_matched_random({"resid_post": np.zeros((6, 1, 8), np.float32)}, keys=KEYS, seed=0)
    assert not made["resid_post"][0].any()


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_their_own_unrelated_donor_and_groups_are_kept(seed):
    keys = [f"k{i}" for i in range(40)]
    groups = [i % 4 for i in range(40)]
    order = derangement(keys, groups, seed=seed)
    assert sorted(order.tolist()) == list(range(40))
    assert all(order[row] != row and groups[order[row]] == groups[row] for row in range(40))
    shuffled = [7 * i % 40 for i in range(40)]
    moved = derangement([keys[i] for i in shuffled], [groups[i] for i in shuffled], seed=seed)
    assert all(shuffled[moved[place]] == order[row] for place, row in enumerate(shuffled)), "row order does not matter"


def test_the_seed_changes_the_derangement():
    groups = [0] * 20
    keys = [str(i) for i in range(20)]
    assert (derangement(keys, groups, seed=0) != derangement(keys, groups, seed=1)).any()


def test_what_cannot_be_deranged_is_refused():
    with pytest.raises(PatchError, match="group 'n=5' has one item"):
        derangement(["a", "b", "c"], ["n=3", "n=3", "n=5"], seed=0)
    with pytest.raises(PatchError, match="1 keys occur twice"):
        derangement(["a", "a"], [0, 0], seed=0)
    with pytest.raises(PatchError, match="2 keys but 1 groups"):
        derangement(["a", "b"], [0], seed=0)


def test_unrelated_donors_are_whole_rows_of_others():
    made = unrelated_donor({"resid_post": RESID, "z": Z}, keys=KEYS, groups=[0] * 6, seed=0)
    order = derangement(KEYS, [0] * 6, seed=0)
    np.testing.assert_array_equal(made["resid_post"][1], RESID[order, 1])
    np.testing.assert_array_equal(made["z"][2], Z[2][order])


def test_the_three_controls_come_by_name():
    own = {"resid_post": RESID}
    controls = control_donors({"resid_post": RESID}, own, keys=KEYS, groups=[0] * 6, seed=0)
    assert set(controls) == {"random", "unrelated", "own"} and controls["own"] is own


def test_a_donor_is_read_from_a_store():
    class Store:
        def __getitem__(self, where):
            site, layer = where
            assert site == "resid_post"
            return RESID[:, layer]

    donor = donor_from_store(Store(), [3, 1], sites=("resid_post",), layers=range(3))
    np.testing.assert_array_equal(donor["resid_post"][2], RESID[[3, 1], 2])


def test_controls_keep_the_form_of_their_donor():
    """Per token, at named positions and by layer: what ``sweep`` takes, the controls give back."""
    tokens = [np.random.default_rng(i).standard_normal((i + 1, 8)).astype(np.float32) for i in range(6)]
    donor = {"resid_post": {"span:query": {1: tokens}, "answer": {1: RESID[:, 1]}}}
    made = norm_matched_random(donor, keys=KEYS, seed=0)["resid_post"]
    for one, two in zip(made["span:query"][1], tokens, strict=True):
        np.testing.assert_allclose(np.linalg.norm(one, axis=-1), np.linalg.norm(two, axis=-1), rtol=1e-5)
        assert one.dtype == np.float32 and one.shape == two.shape
    assert made["answer"][1].shape == (6, 8)
    order = derangement(KEYS, [0] * 6, seed=0)
    moved = unrelated_donor(donor, keys=KEYS, groups=[0] * 6, seed=0)["resid_post"]
    assert all(moved["span:query"][1][row] is tokens[order[row]] for row in range(6))
    np.testing.assert_array_equal(moved["answer"][1], RESID[order, 1])
    with pytest.raises(PatchError, match="5 keys for 6 donor rows"):
        norm_matched_random(donor, keys=KEYS[:5], seed=0)


def test_same_cell_donors_share_group_and_cell():
    cells = ["yes", "no"] * 3
    made = control_donors({"resid_post": RESID}, {}, keys=KEYS, groups=[0] * 6, cells=cells, seed=0)["same cell"]
    for row in range(6):
        giver = int(np.flatnonzero((RESID[:, 1] == made["resid_post"][1][row]).all(axis=-1))[0])
        assert giver != row and cells[giver] == cells[row]
    with pytest.raises(PatchError, match="3 cells but 6 groups"):
        control_donors({"resid_post": RESID}, {}, keys=KEYS, groups=[0] * 6, cells=cells[:3], seed=0)


def test_a_pool_gives_rows_of_other_instances_of_the_group():
    big = np.random.default_rng(5).standard_normal((40, 3, 8)).astype(np.float32)
    names = [*KEYS, *(f"more-{i}" for i in range(34))]
    groups = [i % 2 for i in range(40)]
    pool = Pool({"resid_post": big}, names, groups, [i % 4 for i in range(40)])
    chosen = {"keys": KEYS, "groups": groups[:6], "seed": 0}
    made = unrelated_donor({"resid_post": RESID}, pool=pool, **chosen)["resid_post"][2]
    givers = [int(np.flatnonzero((big[:, 2] == row).all(axis=-1))[0]) for row in made]
    assert all(names[giver] != key for giver, key in zip(givers, KEYS, strict=True))
    assert [groups[giver] for giver in givers] == groups[:6] and max(givers) >= 6
    controls = control_donors({"resid_post": RESID}, {}, cells=[i % 4 for i in range(6)], pool=pool, **chosen)
    alike = [int(np.flatnonzero((big[:, 2] == row).all(axis=-1))[0]) for row in controls["same cell"]["resid_post"][2]]
    assert [giver % 4 for giver in alike] == [row % 4 for row in range(6)]
    with pytest.raises(PatchError, match="the pool has none"):
        control_donors(
            {"resid_post": RESID}, {}, cells=[0] * 6, pool=Pool({"resid_post": big}, names, groups), **chosen
        )
