"""A study names what the matched donor carries beyond its controls."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from activations import answer_tokens, from_modules, load, read
from patching import (
    Cell,
    PatchError,
    Pool,
    control_donors,
    donor_from_run,
    head_cells,
    head_map,
    layer_cells,
    mean_interval,
    monotone_by_construction,
    pair_kind,
    patch_study,
    run_study,
    share_interval,
    sign_flip_p,
    span_cells,
)
from tasks.ordering import Ordering
from tests.tiny_models import ANSWERS, MESSAGES, tiny_llama

CELLS = layer_cells(4, source="matched")


def simulated(seed=0, pairs=40):
    """Both directions of each pair. Layers 0 and 1 do nothing, 2 and 3 carry the donor; a control does half of layer 3."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(2, 0.5, pairs), rng.normal(-1.5, 0.5, pairs)
    unpatched, donor = np.concatenate([second, first]), np.concatenate([first, second])
    gap = (donor - unpatched)[:, None]
    noise = rng.normal(0, 0.2, (2 * pairs, 4))
    matched = unpatched[:, None] + gap * np.array([0, 0, 0.9, 1.0]) + noise * np.array([1, 1, 1, 0])
    control = unpatched[:, None] + gap * np.array([0, 0, 0.0, 0.5]) + rng.normal(0, 0.2, (2 * pairs, 4))
    groups = [*range(pairs), *range(pairs)]
    return matched, unpatched, donor, control, groups


def test_what_exceeds_every_control_is_specific():
    matched, unpatched, donor, control, groups = simulated()
    again = matched + np.random.default_rng(3).normal(0, 0.05, matched.shape)
    study = patch_study(
        CELLS, matched, unpatched, donor, controls={"unrelated": control}, groups=groups, margin=0.5, seed=0
    )
    assert study.specific().tolist() == [False, False, True, True]
    assert (study.n, study.n_groups, study.tied) == (80, 40, 0)
    effect = (matched - unpatched[:, None]) * np.sign(donor)[:, None]
    np.testing.assert_allclose(study.matched.effect.mean, effect.mean(axis=0))
    lost = (control - unpatched[:, None]) * np.sign(donor)[:, None]
    above = study.above["unrelated"]
    wanted = mean_interval(effect - lost, groups=groups, seed=0)
    np.testing.assert_allclose([above.difference.low, above.difference.high], [wanted.low, wanted.high])
    np.testing.assert_allclose(above.p, sign_flip_p(effect - lost, groups=groups, seed=0))
    np.testing.assert_allclose(study.matched.restored.mean[3], 1)
    assert study.matched.flipped.share[3] == 1 and study.matched.flipped.share[0] == 0
    np.testing.assert_allclose(
        above.flipped.mean, study.matched.flipped.share - study.controls["unrelated"].flipped.share
    )
    assert study.specific(by="flipped").tolist() == [False, False, True, True]
    same = patch_study(
        CELLS, matched, unpatched, donor, controls={"same cell": again}, groups=groups, margin=0.5, seed=0
    )
    assert not same.specific(against=["same cell"]).any(), "a control that does as much leaves nothing that is specific"
    with pytest.raises(PatchError, match="no control 'unrelated' to exceed"):
        same.specific()
    with pytest.raises(PatchError, match=r"no control 'unrelated' to exceed \(controls: none\)"):
        patch_study(CELLS, matched, unpatched, donor, groups=groups, margin=0.5, seed=0).specific()


def test_only_rows_whose_answers_differ_flip_and_only_those_beyond_the_margin_are_restored():
    matched, unpatched, donor, _, groups = simulated(pairs=10)
    donor = donor.copy()
    donor[:3] = unpatched[:3] + 0.01  # the same answer, within the margin
    donor[3] = 0.0
    study = patch_study(CELLS, matched, unpatched, donor, groups=groups, margin=0.5, seed=0)
    assert (study.n, study.tied) == (19, 1)
    assert study.matched.flipped.n == 16 and study.matched.kept == 16 and study.matched.restored.n.tolist() == [16] * 4
    rows = np.arange(20) > 3
    hits = np.sign(matched[rows]) == np.sign(donor[rows])[:, None]
    wanted = share_interval(hits, groups=[group for group, row in zip(groups, rows, strict=True) if row])
    np.testing.assert_allclose(study.matched.flipped.low, wanted.low)
    with pytest.raises(PatchError, match="none of 20 rows has a donor with an answer"):
        patch_study(CELLS, matched, unpatched, np.zeros(20), margin=0.5, seed=0)


def test_own_activations_that_change_something_are_refused():
    matched, unpatched, donor, _, groups = simulated()
    own = np.repeat(unpatched[:, None], 4, axis=1)
    fine = patch_study(CELLS, matched, unpatched, donor, own=own + 1e-5, groups=groups, margin=0.5, seed=0)
    assert fine.own_change == pytest.approx(1e-5, rel=1e-3)
    with pytest.raises(PatchError, match=r"own activation changes the readout by 1\.0e-02"):
        patch_study(CELLS, matched, unpatched, donor, own=own + 1e-2, groups=groups, margin=0.5, seed=0)
    with pytest.raises(PatchError, match="own activation changes the readout by nan"):
        patch_study(CELLS, matched, unpatched, donor, own=own * np.nan, groups=groups, margin=0.5, seed=0)


def test_shapes_that_do_not_fit_are_refused():
    matched, unpatched, donor, control, groups = simulated()
    with pytest.raises(PatchError, match=r"readouts of 'unrelated' have shape \[80, 3\]; \[80, 4\] is needed"):
        patch_study(CELLS, matched, unpatched, donor, controls={"unrelated": control[:, :3]}, margin=0.5, seed=0)
    with pytest.raises(PatchError, match="give \\[item, cell\\]"):
        patch_study(CELLS, matched, unpatched, donor[:5], groups=groups, margin=0.5, seed=0)


def test_curves_that_climb_whatever_the_model_does_are_marked():
    assert monotone_by_construction(CELLS)
    assert monotone_by_construction(layer_cells(4, source="matched", site="resid_pre"))
    assert not monotone_by_construction(layer_cells(4, source="matched", site="mlp_out"))
    assert not monotone_by_construction(layer_cells(4, source="matched", position="all"))
    assert not monotone_by_construction(span_cells(["query"], range(4), "matched"))
    assert not monotone_by_construction(head_cells([4]))
    assert not monotone_by_construction([Cell("none", ())]) and not monotone_by_construction([])


def test_pairs_are_of_three_kinds():
    recipient, donor = np.array([1.0, -1.0, 1.0, 1.0, 0.0]), np.array([2.0, -1.0, -1.0, 3.0, -1.0])
    kinds = pair_kind(recipient, donor, np.array([1, 1, 1, -1, 1]))
    assert kinds == ["agreement", "shared error", "disagreement", "shared error", "disagreement"]
    with pytest.raises(PatchError, match=r"gold holds \[0\]"):
        pair_kind(recipient, donor, np.zeros(5, dtype=int))


def test_one_sweep_serves_the_effect_and_its_controls():
    model = from_modules(*tiny_llama())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = layer_cells(model.n_layers, source="matched")
    own = {"resid_post": donor_from_run(model, prompts, cells)["resid_post"]["answer"]}
    order = [1, 0, 3, 2]
    matched = {"resid_post": {layer: rows[order] for layer, rows in own["resid_post"].items()}}
    donors = control_donors(matched, own, keys=list("abcd"), groups=[0] * 4, cells=[0] * 4, seed=0)
    readout = read(model, prompts, answers).difference.numpy()
    study, result = run_study(
        model,
        prompts,
        cells,
        answers=answers,
        donors={"matched": matched, **donors},
        donor_readout=readout[order],
        margin=0.1,
        seed=0,
        check_cells=10,
    )
    assert set(study.controls) == {"random", "unrelated", "same cell"} == set(study.above)
    assert study.own_change < 1e-4 and study.monotone and result.checked == 10
    assert study.cells == tuple(cell.name for cell in cells)
    np.testing.assert_allclose(result.difference[:, 2], readout[order], atol=2e-5)
    with pytest.raises(PatchError, match="edits from 'matched' and a donor of that name"):
        run_study(
            model,
            prompts,
            head_cells(head_map(model)),
            answers=answers,
            donors={"matched": matched},
            donor_readout=readout,
            margin=0.1,
            seed=0,
        )


def test_the_built_in_pair_is_repaired_by_its_own_originals():
    """Both directions of disagreeing pairs, in one study with groups: late layers exceed unrelated donors."""
    model = load("builtin", verify=False)
    answers = answer_tokens(model, Ordering.answers)
    sets = list(islice(Ordering().generate({"n": 6, "names": "builtin"}, seed=2, split="test"), 300))
    prompts = {kind: model.encode([one[kind].chat() for one in sets]) for kind in ("original", "equivalent")}
    readout = {kind: read(model, own, answers).difference.numpy() for kind, own in prompts.items()}
    gold = np.array([1 if one.instance.gold == "yes" else -1 for one in sets])
    kinds = np.array(pair_kind(readout["equivalent"], readout["original"], gold))
    chosen = np.flatnonzero(kinds == "disagreement")[:24]
    assert len(chosen) == 24
    cells = layer_cells(model.n_layers, source="matched")
    rows = {kind: donor_from_run(model, own, cells)["resid_post"]["answer"] for kind, own in prompts.items()}

    def joined(first, second, which):
        return {"resid_post": {n: np.concatenate([rows[first][n][which], rows[second][n][which]]) for n in rows[first]}}

    everyone, directions = range(len(sets)), ("repair", "break")
    matched, own = joined("original", "equivalent", chosen), joined("equivalent", "original", chosen)
    pool = Pool(
        joined("original", "equivalent", list(everyone)),
        [f"{i} {direction}" for direction in directions for i in everyone],
        [direction for direction in directions for _ in everyone],
    )
    keys = [f"{i} {direction}" for direction in directions for i in chosen]
    groups = ["repair"] * 24 + ["break"] * 24
    donors = control_donors(matched, own, keys=keys, groups=groups, seed=0, pool=pool)
    study, _ = run_study(
        model,
        [*(prompts["equivalent"][i] for i in chosen), *(prompts["original"][i] for i in chosen)],
        cells,
        answers=answers,
        donors={"matched": matched, **donors},
        donor_readout=np.concatenate([readout["original"][chosen], readout["equivalent"][chosen]]),
        groups=[*chosen, *chosen],
        margin=0.5,
        seed=0,
    )
    assert (study.n, study.n_groups) == (48, 24) and study.own_change < 1e-3
    last = model.n_layers - 1
    assert study.matched.flipped.share[last] == 1 and study.matched.restored.mean[last] == pytest.approx(1, abs=1e-3)
    above = study.above["unrelated"]
    assert above.flipped.low[last] > 0.25 and above.p_flipped[last] < 0.01
    assert study.specific(by="flipped").tolist() == [False] * last + [True]


def test_pairs_that_agree_have_effects_and_nothing_to_flip():
    rng = np.random.default_rng(0)
    unpatched = rng.uniform(1, 2, 12)
    donor = unpatched + rng.uniform(-0.1, 0.1, 12)
    matched = np.repeat(donor[:, None], 4, axis=1)
    study = patch_study(
        CELLS,
        matched,
        unpatched,
        donor,
        controls={"unrelated": matched + 0.2},
        groups=[*range(6)] * 2,
        margin=0.5,
        seed=0,
    )
    assert study.matched.flipped.n == 0 and np.isnan(study.matched.flipped.share).all()
    assert study.matched.kept == 0 and np.isnan(study.matched.restored.mean).all()
    assert np.isfinite(study.matched.effect.low).all() and np.isfinite(study.above["unrelated"].p).all()
    assert np.isnan(study.above["unrelated"].flipped.mean).all() and not study.specific(by="flipped").any()
