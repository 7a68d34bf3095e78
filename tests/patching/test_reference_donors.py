"""Means leave out the item's own fold, resampled rows keep the role and change the instance, empty sets are refused."""

from __future__ import annotations

import numpy as np
import pytest

from activations import answer_tokens, from_modules
from activations.capturing import Plan, capture
from activations.positions import Conversation
from patching import Cell, Edit, PatchError, donor_from_store, mean_donor, resample_donor, resample_rows, sweep
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gpt2, tiny_llama

VALUES = {("z", layer): np.random.default_rng(layer).standard_normal((8, 6)).astype(np.float32) for layer in (0, 2)}
FOLDS = [0, 0, 1, 1, 2, 2, 2, 2]
KEYS = ["a", "a", "b", "b", "c", "c", "d", "d"]
ROLES = ["original", "equivalent"] * 4


def mean(**changed):
    arguments = {
        "reference_folds": FOLDS[:6],
        "item_folds": [1, 0, 7, 1],
        "sites": ("z",),
        "layers": (0, 2),
        "name": "originals",
    }
    return mean_donor(VALUES, [0, 1, 2, 3, 4, 6], **{**arguments, **changed})


def test_a_mean_is_over_the_other_folds():
    made = mean()
    for layer in (0, 2):
        values = VALUES["z", layer].astype(np.float64)
        expected = [values[[0, 1, 4, 6]].mean(0), values[[2, 3, 4, 6]].mean(0), values[[0, 1, 2, 3, 4, 6]].mean(0)]
        np.testing.assert_allclose(made["z"][layer], np.array(expected)[[0, 1, 2, 0]], rtol=1e-6)
        assert made["z"][layer].dtype == np.float32


def test_an_items_own_fold_does_not_move_its_mean():
    before = mean()["z"][0]
    spoiled = {where: values.copy() for where, values in VALUES.items()}
    spoiled["z", 0][[2, 3]] += 100  # fold 1
    after = mean_donor(
        spoiled, [0, 1, 2, 3, 4, 6], reference_folds=FOLDS[:6], item_folds=[1, 0], sites=("z",), layers=(0,), name="x"
    )["z"][0]
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[1] - before[1]).min() > 10


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"reference_folds": [1] * 6},
            r"mean over 'originals': all 6 rows are in fold 1, which items of that fold may not",
        ),
        ({"reference_folds": [1] * 5}, r"mean over 'originals': 5 folds for 6 rows"),
        ({"item_folds": []}, r"mean over 'originals': no recipients"),
    ],
)
def test_a_mean_over_nothing_is_refused(changed, message):
    with pytest.raises(PatchError, match=message):
        mean(**changed)
    with pytest.raises(PatchError, match="the set is empty"):
        mean_donor(VALUES, [], reference_folds=[], item_folds=[0], sites=("z",), layers=(0,), name="nothing")


def resampled(keys, roles, seed=0):
    return resample_rows(
        range(8), reference_keys=KEYS, reference_roles=ROLES, keys=keys, roles=roles, seed=seed, name="all rows"
    )


def test_a_resampled_row_has_the_role_and_another_instance():
    keys, roles = KEYS * 5, ROLES * 5
    for seed in range(4):
        rows = resampled(keys, roles, seed)
        assert all(ROLES[row] == role and KEYS[row] != key for row, key, role in zip(rows, keys, roles, strict=True))
    assert len({tuple(resampled(KEYS, ROLES, seed)) for seed in range(8)}) > 4
    one = resampled(["c", "a"], ["original", "equivalent"])
    assert list(one) == [resampled(KEYS, ROLES)[4], resampled(KEYS, ROLES)[1]], "others asked beside do not matter"
    donor = resample_donor(
        VALUES, range(8), reference_keys=KEYS, reference_roles=ROLES, keys=["c"], roles=["original"], sites=("z",),
        layers=(2,), seed=0, name="all rows",
    )  # fmt: skip
    np.testing.assert_array_equal(donor["z"][2], VALUES["z", 2][[one[0]]])


def test_a_role_that_nobody_else_has_is_refused():
    with pytest.raises(PatchError, match=r"resampling from 'all rows': no row of another instance has role 'negated'"):
        resampled(["a"], ["negated"])
    with pytest.raises(PatchError, match=r"8 rows, 7 keys and 8 roles"):
        resample_rows(range(8), reference_keys=KEYS[:7], reference_roles=ROLES, keys=[], roles=[], seed=0, name="x")
    with pytest.raises(PatchError, match=r"1 keys but 2 roles"):
        resampled(["a"], ["original", "original"])


def test_spans_go_from_a_store_into_other_runs(tmp_path):
    model = from_modules(*tiny_llama())
    prompts, answers = model.encode(MESSAGES[:3]), answer_tokens(model, ANSWERS)
    conversations = [
        Conversation(messages, (("start", 0, len(" ".join(messages[-1]["content"].split()[:3])), len(messages) - 1),))
        for messages in MESSAGES[:3]
    ]
    plan = Plan(sites=("resid_post",), positions=("start/all",))
    store = capture(model, prompts, plan, tmp_path / "store", spans=conversations)
    rows = [store.select(key=str(item), label="start/").tolist() for item in range(3)]
    own = donor_from_store(store, {"span:start": rows}, sites=("resid_post",), layers=range(3), model=model)
    other = donor_from_store(store, {"span:start": rows[1:] + rows[:1]}, sites=("resid_post",), layers=range(3))
    spots = [{"start": [int(store.rows.position[row]) for row in own_rows]} for own_rows in rows]
    cells = [Cell(f"{layer}", (Edit("resid_post", layer, source="d", position="span:start"),)) for layer in range(3)]
    for donor, least, most in ((own, 0, 1e-5), (other, 1e-4, 9)):
        result = sweep(model, prompts, cells, answers=answers, donors={"d": donor}, spots=spots, seed=0)
        changed = np.abs(result.difference - result.unpatched[:, None])[:, :2].max()
        assert result.engine == "restart" and least <= changed <= most
    with pytest.raises(PatchError, match=r"was captured from weights .*; capture the donor from the same base model"):
        donor_from_store(store, [0], sites=("resid_post",), layers=(0,), model=from_modules(*tiny_gpt2()))
