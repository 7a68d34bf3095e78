"""The lens: equal to the formula, to TransformerLens and to whole logits; last layer the model's; summaries by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax

import activations.model as model_module
from activations import answer_tokens, from_modules
from activations.checks import run
from activations.errors import ModelError
from activations.readout import AnswerTokens
from probes.errors import ProbeError
from probes.lens import answer_layer, lens, overtaken_at, settled_layer
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_llama


@dataclass
class Read:
    logit: np.ndarray
    logsumexp: np.ndarray


@dataclass
class ReadRanked(Read):
    rank: np.ndarray
    top: np.ndarray


def unembedder(model, answers):
    """The model's own unembedding on numpy rows, ranks included."""

    def unembed(rows):
        seen, rank = model.unembed_ranked(torch.from_numpy(rows), answers)
        return ReadRanked(seen.logit.numpy(), seen.logsumexp.numpy(), rank.numpy(), seen.top.numpy())

    return unembed


HEAD = np.random.default_rng(1).normal(size=(8, 20))
RESID = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)


def unembed(rows):
    """Normalise, project to 20 tokens; "yes" is tokens 4 and 7, "no" token 5."""
    vocabulary = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True)) @ HEAD
    yes = logsumexp(vocabulary[:, [4, 7]], axis=1)
    return Read(np.stack([yes, vocabulary[:, 5]], axis=1), logsumexp(vocabulary, axis=1))


def test_equals_the_whole_vocabulary_formula():
    result = lens(RESID, unembed)
    for layer in range(3):
        rows = RESID[layer] / np.sqrt(np.square(RESID[layer]).mean(axis=1, keepdims=True))
        chance = softmax(rows @ HEAD, axis=1)
        yes, no = chance[:, [4, 7]].sum(axis=1), chance[:, 5]
        np.testing.assert_allclose(result.difference[layer], np.log(yes / no), atol=1e-5)
        np.testing.assert_allclose(result.off_label_mass[layer], 1 - yes - no, atol=1e-6)
    assert result.difference.shape == result.off_label_mass.shape == (3, 6)
    assert result.logit.shape == (3, 6, 2)
    assert result.n == 6


def test_final_gap_is_relative_to_the_models_own_logits():
    result = lens(RESID, unembed)
    own = unembed(RESID[-1]).logit
    assert result.final_gap(own) < 1e-6
    assert result.final_gap(own * 1.01) == pytest.approx(0.01 / 1.01, rel=1e-3)
    with pytest.raises(ProbeError, match=r"logit has shape \(6,\) and the lens \(6, 2\)"):
        result.final_gap(own[:, 0])


def test_off_label_mass_stays_a_probability():
    result = lens(RESID, lambda rows: Read(np.zeros((6, 2)), np.full(6, np.log(2) - 1e-9)))
    np.testing.assert_array_equal(result.off_label_mass, 0.0)


def test_answer_layer_is_the_last_change_of_sign():
    difference = np.array([[1, -1, 1, 0, -2.0], [-1, -1, 1, 5, np.nan], [2, 1, 1, 3, -1], [1, -1, 1, 0, -1]])
    np.testing.assert_array_equal(answer_layer(difference), [2, 3, 0, np.nan, 2])
    np.testing.assert_array_equal(lens(RESID, unembed).answer_layer, answer_layer(lens(RESID, unembed).difference))
    assert np.isnan(answer_layer(np.array([[1.0], [np.nan]]))[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "granite", "cohere", "gemma4", "neox"])
def test_through_a_model_equals_whole_logits(name, monkeypatch):
    """Norm of each layer's own rows, head, scale and softcap, by transformers' modules; pieces of 7 tokens."""
    monkeypatch.setattr(model_module, "_COLUMNS", 7)
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer)
    answers = answer_tokens(model, ANSWERS)
    seen = run(model, model.encode(MESSAGES))
    resid = seen.residuals[1:].numpy()
    result = lens(resid, unembedder(model, answers))
    config = hf_model.config
    for layer, rows in enumerate(torch.from_numpy(resid)):
        with torch.inference_mode():
            logits = hf_model.lm_head if hasattr(hf_model, "lm_head") else hf_model.embed_out
            whole = logits(model.module(model.structure.final_norm)(rows))
        whole = whole * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        whole = whole if softcap is None else softcap * torch.tanh(whole / softcap)
        chance = whole.double().softmax(-1)
        yes, no = (chance[:, list(variants)].sum(-1) for variants in answers.ids)
        np.testing.assert_allclose(result.difference[layer], (yes / no).log(), atol=2e-4)
        np.testing.assert_allclose(result.off_label_mass[layer], 1 - yes - no, atol=1e-5)
        np.testing.assert_array_equal(result.top[layer], whole.argmax(-1))
        for label, variants in enumerate(answers.ids):
            best = whole[:, list(variants)].amax(-1, keepdim=True)
            np.testing.assert_array_equal(result.rank[layer, :, label], 1 + (whole > best).sum(-1))
    last = torch.stack([seen.logits[:, list(variants)].logsumexp(-1) for variants in answers.ids], dim=-1)
    assert result.final_gap(last.numpy()) < 1e-5
    assert result.rank.min() < 10 < result.rank.max()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_equals_transformer_lens(name):
    from transformer_lens.tools.analysis import logit_lens

    from activations.backends.transformer_lens import opened

    model = from_modules(*BUILDERS[name]())
    one, two = (variants[0] for variants in answer_tokens(model, ANSWERS).ids)
    prompts = model.encode(MESSAGES)
    result = lens(
        run(model, prompts).residuals[1:].numpy(), unembedder(model, AnswerTokens(("yes", "no"), ((one,), (two,))))
    )
    with opened(model) as session:
        for row, prompt in enumerate(prompts):
            theirs = logit_lens(session.bridge, torch.tensor([prompt.ids]), targets=[one, two]).readout
            np.testing.assert_allclose(result.logit[:, row], theirs.values[1:, 0], atol=1e-4)
            np.testing.assert_array_equal(result.rank[:, row], theirs.target_ranks[1:, 0] + 1)


def test_the_scale_is_each_layers_own():
    """A layer ten times larger reads the same through RMSNorm; with the last layer's scale it would not."""
    model = from_modules(*tiny_llama())
    answers = answer_tokens(model, ANSWERS)
    resid = run(model, model.encode(MESSAGES)).residuals[1:].numpy()
    once, larger = (lens(factor * resid, unembedder(model, answers)) for factor in (1, 10))
    np.testing.assert_allclose(once.difference, larger.difference, atol=1e-3)


def test_logits_of_is_differentiable_and_cuts_tokens():
    model = from_modules(*BUILDERS["gemma2"]())
    rows = torch.randn(5, model.d_model, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([9, 2, 30])
    torch.testing.assert_close(model.logits_of(rows, tokens), model.logits_of(rows)[:, tokens])
    given = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.logits_of(given, tokens)[:, 1].sum(), given)
    step = 1e-3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    moved = (model.logits_of(rows + step)[:, 2] - model.logits_of(rows - step)[:, 2]) / 2
    torch.testing.assert_close((slope * step).sum(-1), moved, rtol=1e-2, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.hf_model.parameters())
    for ask in (model.logits_of, model.logits, lambda rows: model.unembed_ranked(rows, AnswerTokens(("a",), ((1,),)))):
        with pytest.raises(ModelError, match=r"takes \[row, 32\], not \[2, 5, 32\]"):
            ask(torch.zeros(2, 5, 32))


def test_a_model_without_a_head_is_one_line():
    hf_model, tokenizer = tiny_llama()
    with pytest.raises(ModelError, match=r"LlamaModel has no unembedding.*give a \.\.\.ForCausalLM model") as caught:
        from_modules(hf_model.model, tokenizer)
    assert "\n" not in str(caught.value)


def test_settled_layer_by_hand():
    """Instances a, b, c settle at layers 0, 1 and 3; the fourth row never has an answer."""
    difference = np.array([[1, -1, -1, 0.0], [1, 2, 1, 0], [1, 2, -1, 0], [1, 2, 1, 0]])
    result = settled_layer(difference, ["a", "b", "c", "d"], seed=0)
    assert (result.median, result.n, result.undecided, result.instances) == (1, 3, 1, 3)
    assert (result.low, result.high, result.reason) == (0, 3, "")
    assert settled_layer(difference, ["a", "b", "c", "d"], seed=0) == result
    one = settled_layer(difference, ["a"] * 4, seed=0)
    assert one.median == 1 and np.isnan(one.low) and "one instance" in one.reason
    none = settled_layer(np.zeros((2, 3)), [0, 1, 2], seed=0)
    assert np.isnan(none.median) and none.reason == "no row has an answer"


def test_settled_layer_covers_the_median_over_instances():
    """Rows of an instance settle together; rows drawn one by one would give intervals that are too narrow."""
    rng, hits, alone = np.random.default_rng(0), [], []
    for seed in range(300):
        layer = np.repeat(np.clip(np.round(rng.normal(12, 4, size=30)), 0, 23), 4)  # its median over instances is 12
        difference = np.where(np.arange(24)[:, None] >= layer, 1.0, -1.0)
        for found, groups in ((hits, np.repeat(np.arange(30), 4)), (alone, np.arange(120))):
            one = settled_layer(difference, groups, resamples=300, seed=seed)
            found.append(one.low <= 12 <= one.high)
    assert np.mean(hits) > 0.93
    assert np.mean(alone) < np.mean(hits)


def test_overtaken_by_hand():
    difference = np.array(
        [
            # overtaken, never led, ends right, ends right after trailing, led while silent, undecided
            [2, -1, 1, -1, 1, 1.0],
            [5, -1, 1, -2, -1, 1],
            [-1, -1, 1, 1, -1, 1],
            [-3, -2, 1, 1, -1, 0],
        ]
    )
    mass = np.where(np.arange(6) == 4, [[1.0], [0], [0], [0]], 0.0)
    for sign, gold in ((1, np.ones(6)), (-1, np.zeros(6))):
        result = overtaken_at(sign * difference, gold, off_label_mass=mass, max_off_label=0.5)
        np.testing.assert_array_equal(result.at, [2, *[np.nan] * 5])
        np.testing.assert_array_equal(result.lead_layer, [1, *[np.nan] * 5])
        assert (result.wrong, result.right) == (3, 2)
        assert (result.share, result.mirror_share) == (pytest.approx(1 / 3), 0.5)
    assert overtaken_at(difference, np.ones(6)).at[4] == 1
    assert np.isnan(overtaken_at(difference[:, 2:4], [1, 1]).share)
    for changes, message in [
        ({"max_off_label": 0.5}, "off_label_mass is not given"),
        ({"max_off_label": 50.0}, r"max_off_label is 50\.0"),
        ({"off_label_mass": mass[1:]}, r"off_label_mass has shape \(3, 6\)"),
    ]:
        with pytest.raises(ProbeError, match=message):
            overtaken_at(difference, np.ones(6), **changes)


def test_a_standing_lean_fills_the_mirror_too():
    """Early layers that lean to yes whatever the question make as many rows "overtaken" as they make its mirror."""
    rng = np.random.default_rng(0)
    gold, final = rng.integers(0, 2, 4000), rng.choice([-1.0, 1.0], 4000)
    result = overtaken_at(np.stack([np.ones(4000), final]), gold)
    assert result.share == pytest.approx(0.5, abs=0.05)
    assert result.mirror_share == pytest.approx(result.share, abs=0.05)


@pytest.mark.parametrize(
    ("resid", "read", "message"),
    [
        (RESID[0], unembed, r"resid has shape \(6, 8\)"),
        (RESID, lambda rows: Read(np.zeros((6, 1)), np.zeros(6)), "unembed gives 1 label"),
        (RESID, lambda rows: Read(np.zeros((5, 2)), np.zeros(6)), r"unembed\(...\).logit has 5 rows and resid has 6"),
        (RESID, lambda rows: Read(np.zeros((6, 2)), np.zeros((6, 1))), r"unembed\(...\).logsumexp has shape \(6, 1\)"),
    ],
)
def test_bad_input_is_one_line(resid, read, message):
    with pytest.raises(ProbeError, match=message) as caught:
        lens(resid, read)
    assert "\n" not in str(caught.value)
