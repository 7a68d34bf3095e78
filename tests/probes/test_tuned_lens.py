"""The tuned lens: planted translations are found, noise is not dressed up, and nothing held out is looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from scipy.optimize import approx_fprime
from scipy.special import log_softmax, rel_entr, softmax
from sklearn.linear_model import Ridge

from activations import answer_tokens, from_modules
from activations.checks import run
from probes.errors import ProbeError
from probes.lens import lens
from probes.tuned_fit import LayerFit
from probes.tuned_lens import fit_tuned_lens, from_arrays, plan
from probes.tuned_objective import Judge, Objective, part_of_vocabulary
from tests.tiny_models import ANSWERS, BUILDERS


def head(features, vocabulary, seed=0):
    """RMSNorm and a random unembedding: as a torch function, whole or of some tokens.

    As in real models there are directions that it does not read, so that a row can be flat in spite of the norm.
    """
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(vocabulary, features)).astype(np.float32))
    weight[:, -2:] = 0

    def logits(rows, tokens=None):
        normed = rows / rows.square().mean(-1, keepdim=True).sqrt()
        return normed @ (weight if tokens is None else weight[tokens]).T

    return logits


def study(features=12, rows=300, seed=0):
    """Layers: an affine distortion of the final rows, noise, the final rows with a little noise, the final rows."""
    rng = np.random.default_rng(seed)
    final = rng.normal(size=(rows, features)) + 0.5
    matrix, offset = rng.normal(size=(features, features)), 3 * rng.normal(size=features)
    distorted = (final - offset) @ np.linalg.inv(matrix)
    noise = 2 * rng.normal(size=(rows, features)) + 3
    near = final + 0.02 * rng.normal(size=final.shape)
    return np.stack([distorted, noise, near, final]).astype(np.float32), np.arange(rows) // 2


LOGITS = head(12, 40)
RESID, GROUPS = study()
FITTED = fit_tuned_lens(RESID, LOGITS, GROUPS, seed=0)


def chances(rows, logits=LOGITS):
    return softmax(logits(torch.from_numpy(rows)).numpy().astype(float), axis=1)


def test_a_planted_distortion_is_undone():
    assert FITTED.kl_lens[0] > 1
    assert FITTED.kl_tuned[0] < 1e-5
    kept = FITTED.held_out
    np.testing.assert_allclose(chances(FITTED.translate(0, RESID[0][kept])), chances(RESID[3][kept]), atol=1e-3)


def test_noise_becomes_the_best_constant():
    """The best fixed distribution is the mean of the final ones; a translator can only come near it."""
    assert FITTED.kl_lens[1] > 2 * FITTED.kl_constant
    assert FITTED.kl_tuned[1] == pytest.approx(FITTED.kl_constant, rel=0.1)
    mean = chances(RESID[3][np.isin(GROUPS.astype(str), FITTED.fitted)]).mean(axis=0)
    held = chances(RESID[3][FITTED.held_out])
    assert FITTED.kl_constant == pytest.approx(rel_entr(held, mean).sum(axis=1).mean(), rel=0.05)


def test_held_out_numbers_equal_the_formula():
    kept = FITTED.held_out
    for layer in range(4):
        plain = rel_entr(chances(RESID[3]), chances(RESID[layer])).sum(axis=1)
        tuned = rel_entr(chances(RESID[3]), chances(FITTED.translate(layer, RESID[layer]))).sum(axis=1)
        np.testing.assert_allclose(FITTED.row_kl_lens[layer][kept], plain[kept], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(FITTED.row_kl_tuned[layer][kept], tuned[kept], rtol=1e-3, atol=1e-5)
        assert np.isnan(FITTED.row_kl_tuned[layer][~kept]).all()
    assert FITTED.n_train + FITTED.n_validation + FITTED.n_held_out == 300 and FITTED.n_held_out == kept.sum()


def test_the_last_layer_is_the_identity_bit_for_bit():
    np.testing.assert_array_equal(FITTED.translate(3, RESID[3]), RESID[3])
    assert FITTED.how[3] == "identity: last layer"
    assert FITTED.kl_tuned[3] == FITTED.kl_lens[3] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_few_wide_rows_do_not_overfit(seed):
    """40 rows of width 96: far more numbers than rows. Nothing gets worse than it was."""
    resid, groups = study(features=96, rows=40, seed=seed)
    found = fit_tuned_lens(resid[1:], head(96, 50), groups, seed=seed)
    assert (found.kl_tuned <= found.kl_lens * 1.05 + 1e-6).all()


def test_a_layer_that_cannot_be_bettered_keeps_the_identity():
    resid = np.stack([RESID[3], RESID[3]])
    found = fit_tuned_lens(resid, LOGITS, GROUPS, seed=0)
    assert found.how[0] == "identity: no translation did better on validation instances"
    np.testing.assert_array_equal(found.kl_tuned, found.kl_lens)


def test_the_start_is_scikit_learns_ridge():
    rows = RESID[0] + 0.3 * np.random.default_rng(0).normal(size=RESID[0].shape).astype(np.float32)
    train, validation = np.arange(60), np.arange(60, 120)
    fit = LayerFit(
        judge=Judge(LOGITS, RESID[3]), train=train, validation=validation, blocks=validation, rank=12, iterations=0
    )
    found = fit.fit(rows, None)
    assert found.how.startswith("ridge ") and "inf" not in found.how
    centred = rows[train] - rows[train].mean(axis=0)
    alpha = float(found.how.split()[1]) * np.square(np.linalg.svd(centred, compute_uv=False)).mean()
    base = found.scale * rows
    theirs = Ridge(alpha=alpha).fit(rows[train], (RESID[3] - base)[train]).predict(rows) + base
    np.testing.assert_allclose(found(rows), theirs, atol=1e-3)


def test_what_is_held_out_is_not_looked_at():
    changed = RESID.copy()
    changed[:, FITTED.held_out] = np.random.default_rng(1).normal(size=changed[:, FITTED.held_out].shape)
    other = fit_tuned_lens(changed, LOGITS, GROUPS, seed=0)
    for one, two in zip(FITTED.translators, other.translators, strict=True):
        np.testing.assert_allclose(one.up, two.up, atol=1e-6)
        np.testing.assert_allclose(one.offset, two.offset, atol=1e-6)
    assert not set(GROUPS[FITTED.held_out].astype(str)) & set(FITTED.fitted)
    assert other.kl_tuned[0] > 1


def test_the_seed_fixes_everything():
    again, other = (fit_tuned_lens(RESID, LOGITS, GROUPS, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.row_kl_tuned, FITTED.row_kl_tuned)
    for one, two in zip(FITTED.translators, again.translators, strict=True):
        np.testing.assert_array_equal(one.up, two.up)
    assert (other.held_out != FITTED.held_out).any()


def test_steps_after_the_ridge_help_where_rows_are_many():
    """The last rows are no affine image of the layer's but its distribution is close to one: KL then beats squares."""
    rng = np.random.default_rng(0)
    layer = rng.normal(size=(1200, 6))
    final = np.concatenate([layer**3, rng.normal(size=(1200, 6))], axis=1)
    layer = np.concatenate([layer, rng.normal(size=(1200, 6))], axis=1)
    resid = np.stack([layer, final]).astype(np.float32)
    ridge, refined = (fit_tuned_lens(resid, LOGITS, np.arange(1200), iterations=i, seed=0) for i in (0, 40))
    assert refined.kl_tuned[0] < 0.97 * ridge.kl_tuned[0]
    assert "refined in" in refined.how[0] and "refined" not in ridge.how[0]


def test_part_of_a_large_vocabulary_will_do():
    logits = head(12, 3000, seed=1)
    part, whole = (fit_tuned_lens(RESID, logits, GROUPS, tokens=tokens, seed=0) for tokens in (300, 3000))
    assert "300 of 3,000 tokens" in part.method and "on the whole vocabulary" in whole.method
    np.testing.assert_array_equal(part.row_kl_lens, whole.row_kl_lens)
    assert part.kl_tuned[0] < 1e-5
    assert part.kl_tuned[1] < 1.05 * whole.kl_tuned[1] < 0.7 * whole.kl_lens[1]


def test_the_part_estimates_the_whole():
    logits = head(12, 3000, seed=1)
    judge = Judge(logits, RESID[3])
    at = np.arange(50)
    rng = np.random.default_rng(0)
    part = part_of_vocabulary(judge, RESID[2], judge.mean_probability(RESID[3]), 900, rng)
    tokens, stands = part
    assert len(set(tokens.tolist())) == len(tokens) == 900
    assert stands.sum() == pytest.approx(3000) and stands.min() == 1
    whole, cut = Objective(judge, at, None), Objective(judge, at, part)
    assert whole.value(RESID[0][:50]) == pytest.approx(judge.kl(RESID[0][:50], at).mean(), rel=1e-4)
    assert cut.value(RESID[0][:50]) == pytest.approx(whole.value(RESID[0][:50]), rel=0.1)
    assert part_of_vocabulary(judge, RESID[2], np.ones(3000), 3000, rng) is None


def test_the_gradient_is_that_of_the_formula(monkeypatch):
    """In pieces of one row, against finite differences of KL in float64."""
    monkeypatch.setattr("probes.tuned_objective._CELLS", 40)
    rows, final = RESID[2][:3] + 0.5, RESID[3][:3]
    value, slope = Objective(Judge(LOGITS, final), np.arange(3), None).value_and_gradient(rows)
    weight = LOGITS(torch.eye(12)).numpy().astype(float) / np.sqrt(12)  # norm of a unit row is root 12

    def formula(numbers):
        moved = numbers.reshape(3, 12)
        other = log_softmax(moved / np.sqrt(np.square(moved).mean(axis=1, keepdims=True)) @ weight, axis=1)
        own = log_softmax(final / np.sqrt(np.square(final).mean(axis=1, keepdims=True)) @ weight, axis=1)
        return (np.exp(own) * (own - other)).sum(axis=1).mean()

    assert value == pytest.approx(formula(rows.astype(float).ravel()), rel=1e-4)
    np.testing.assert_allclose(slope.ravel(), approx_fprime(rows.astype(float).ravel(), formula, 1e-6), atol=1e-4)


def masked(logits, tokens_off):
    """The same with these tokens at -inf, as generation masks a vocabulary."""
    off = torch.zeros(len(tokens_off), dtype=torch.bool) | torch.from_numpy(tokens_off)

    def read(rows, tokens=None):
        return logits(rows, tokens).masked_fill(off if tokens is None else off[tokens], -float("inf"))

    return read


def test_tokens_without_a_chance_add_nothing():
    """A masked vocabulary gives the fit of the vocabulary without those tokens: numbers and gradients."""
    kept = np.arange(40) % 4 != 0
    rest = head(12, 40)

    def without(rows, tokens=None):
        assert tokens is None
        return rest(rows, torch.from_numpy(np.flatnonzero(kept)))

    at, rows = np.arange(20), RESID[0][:20]
    one, other = (Judge(logits, RESID[3]) for logits in (masked(LOGITS, ~kept), without))
    np.testing.assert_allclose(one.kl(rows, at), other.kl(rows, at), rtol=1e-5)
    values = [Objective(judge, at, None).value_and_gradient(rows) for judge in (one, other)]
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-5) == Objective(one, at, None).value(rows)
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-6)
    found, expected = (fit_tuned_lens(RESID, judge.logits, GROUPS, layers=[0], seed=0) for judge in (one, other))
    np.testing.assert_allclose(found.kl_tuned, expected.kl_tuned, atol=1e-4)
    # The constant keeps at most 0.1 of its chances for a uniform one, here on ten tokens more of forty.
    assert found.kl_constant == pytest.approx(expected.kl_constant, abs=-np.log(1 - 0.1 / 4))
    assert found.how[0].startswith("ridge")  # and not: nothing was better than the identity


@dataclass
class Read:
    logit: np.ndarray
    logsumexp: np.ndarray


def test_reading_through_it_flags_what_it_was_fitted_on():
    def unembed(rows):
        whole = LOGITS(torch.from_numpy(rows))
        return Read(whole[:, :2].numpy(), whole.logsumexp(-1).numpy())

    plain, tuned = lens(RESID, unembed), lens(RESID, unembed, tuned=FITTED, groups=GROUPS)
    np.testing.assert_array_equal(tuned.in_sample, ~FITTED.held_out)
    assert not plain.in_sample.any() and "tuned" not in plain.method
    assert f"{FITTED.n_held_out} rows held out, {300 - FITTED.n_held_out} in sample" in tuned.method
    np.testing.assert_array_equal(tuned.difference[3], plain.difference[3])
    kept = FITTED.held_out
    np.testing.assert_allclose(tuned.difference[0][kept], plain.difference[3][kept], atol=0.01)
    assert np.abs(plain.difference[0] - plain.difference[3]).max() > 1
    # Other rows of the same instances are no fresh evidence; new instances are.
    other = lens(RESID[:, :4], unembed, tuned=FITTED, groups=[FITTED.fitted[0], "new", FITTED.fitted[-1], "new too"])
    np.testing.assert_array_equal(other.in_sample, [True, False, True, False])
    with pytest.raises(ProbeError, match="a tuned lens needs groups"):
        lens(RESID, unembed, tuned=FITTED)
    with pytest.raises(ProbeError, match="resid has 3 layers and the tuned lens 4"):
        lens(RESID[1:], unembed, tuned=FITTED, groups=GROUPS)


def test_saved_and_read_again(tmp_path):
    path = str(tmp_path / "tuned.safetensors")
    save_file(FITTED.arrays(), path, metadata=FITTED.words())
    with safe_open(path, "numpy") as file:
        again = from_arrays(load_file(path), file.metadata())
    for layer in range(4):
        np.testing.assert_array_equal(again.translate(layer, RESID[layer]), FITTED.translate(layer, RESID[layer]))
    assert (again.how, again.fitted, again.method) == (FITTED.how, FITTED.fitted, FITTED.method)
    assert (again.n_train, again.n_held_out, again.kl_constant) == (
        FITTED.n_train,
        FITTED.n_held_out,
        FITTED.kl_constant,
    )
    np.testing.assert_array_equal(again.row_kl_tuned, FITTED.row_kl_tuned)
    with pytest.raises(ProbeError, match="a saved tuned lens lacks fitted, how"):
        from_arrays(FITTED.arrays(), {"method": ""})


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_through_a_model(name):
    """Held-out KL falls at every layer of a network whose layers do differ; softcap and scale included."""
    model = from_modules(*BUILDERS[name]())
    words = ("Amy", "Bob", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana")
    rng = np.random.default_rng(0)
    asked = [[{"role": "user", "content": " ".join(rng.choice(words, 6)) + " ? Answer yes or no"}] for _ in range(160)]
    resid = run(model, model.encode(asked)).residuals[1:].numpy()
    found = fit_tuned_lens(resid, model.logits_of, np.arange(160), seed=0)
    assert (found.kl_tuned[:-1] < 0.5 * found.kl_lens[:-1]).all()
    assert all(parameter.grad is None for parameter in model.hf_model.parameters())

    def unembed(rows):
        seen = model.unembed(torch.from_numpy(rows), answer_tokens(model, ANSWERS))
        return Read(seen.logit.numpy(), seen.logsumexp.numpy())

    plain, tuned = lens(resid, unembed), lens(resid, unembed, tuned=found, groups=np.arange(160))
    kept = ~tuned.in_sample
    errors = [np.abs(one.difference - plain.difference[-1])[:-1, kept].mean() for one in (tuned, plain)]
    assert errors[0] < 0.6 * errors[1]


def test_layers_rank_and_progress():
    done = []
    found = fit_tuned_lens(RESID, LOGITS, GROUPS, layers=[1], rank=3, progress=done.append, seed=0)
    assert done == [1, 2, 3, 4]
    assert found.how[0] == found.how[2] == "identity: not fitted"
    assert found.translators[1].down.shape == (12, 3)
    np.testing.assert_array_equal(found.kl_tuned[[0, 2]], found.kl_lens[[0, 2]])


def test_the_plan_is_one_line():
    assert plan(30, 200, 576, 49152).startswith("tuned lens: 29 translators of width 576 from 200 rows")
    assert "3,072 of 49,152 tokens" in plan(30, 200, 576, 49152) and "\n" not in plan(30, 200, 576, 49152)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resid": RESID[0]}, r"resid has shape \(300, 12\)"),
        ({"groups": GROUPS[1:]}, "groups has 299 rows and resid has 300"),
        ({"groups": GROUPS % 7}, "groups name 7 instances; a tuned lens needs 8 or more"),
        (
            {"resid": np.where(GROUPS == 3, np.nan, RESID.transpose(0, 2, 1)).transpose(0, 2, 1)},
            "not finite at layer 0",
        ),
        ({"groups": np.where(GROUPS == 3, np.nan, GROUPS)}, r"groups holds 2 missing names \(NaN or None\)"),
        ({"layers": [4]}, r"layers are \[4\]; the residual stream has layers 0 to 3"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"rank": 0}, "rank 0"),
        ({"held_out": 0.9, "groups": GROUPS % 10}, "leave -1 of 10 instances to train on"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    given = {"resid": RESID, "groups": GROUPS} | changes
    with pytest.raises(ProbeError, match=message) as caught:
        fit_tuned_lens(given.pop("resid"), LOGITS, given.pop("groups"), seed=0, **given)
    assert "\n" not in str(caught.value)
