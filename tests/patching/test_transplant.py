"""Base and adapter exchange activations on identical tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules, load, read
from activations.structure import first, hooks
from patching import Cell, Edit, PatchError, gain_carried, layer_cells, refuse_other_tokens, transplant
from tasks.ordering import Ordering
from tests.tiny_models import ANSWERS, MESSAGES, tiny_adapter, tiny_llama

GOLD = np.array([1, -1, 1, -1])


@pytest.fixture
def pair(tmp_path):
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    name = model.attach(str(tiny_adapter(hf_model, tmp_path / "lora")), name="lora")
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS), name


def test_the_last_layer_is_the_other_arms_readout(pair):
    model, prompts, answers, name = pair
    found = transplant(
        model, prompts, layer_cells(3, source="any"), adapter=name, answers=answers, gold=GOLD, margin=1e-3, seed=0
    )
    plain = read(model, prompts, answers).difference.numpy()
    with model.use(name):
        trained = read(model, prompts, answers).difference.numpy()
    np.testing.assert_allclose(found.base.unpatched, plain, atol=1e-5)
    np.testing.assert_allclose(found.adapter.unpatched, trained, atol=1e-5)
    np.testing.assert_allclose(found.base.difference[:, -1], trained, atol=1e-5)
    np.testing.assert_allclose(found.adapter.difference[:, -1], plain, atol=1e-5)
    assert found.into_base.share.mean[-1] == pytest.approx(1, abs=1e-4)
    assert found.into_adapter.share.mean[-1] == pytest.approx(1, abs=1e-4)
    assert np.abs(found.base.difference[:, 0] - trained).max() > 1e-2
    assert model.active is None


@pytest.mark.parametrize("position", ["answer", "all", "index:3", "span:few"])
def test_a_cell_is_what_hooks_do_by_hand(pair, position):
    """The adapter's MLP output of layer 1 in the base's run, by two plain forwards of an unpadded prompt."""
    model, prompts, answers, name = pair
    cells = [Cell("mlp", (Edit("mlp_out", 1, source="any", position=position),))]
    found = transplant(
        model,
        prompts,
        cells,
        adapter=name,
        answers=answers,
        gold=GOLD,
        spots=[{"few": (2, 4)}] * 4,
        margin=1e-3,
        seed=0,
    )
    places = {"answer": slice(-1, None), "all": slice(None), "index:3": slice(3, 4), "span:few": [2, 4]}
    module = model.module(model.structure.mlp_out[1])
    for item, prompt in enumerate(prompts):
        ids, kept = torch.tensor([prompt.ids]), []

        def keep(module, args, output, kept=kept):
            kept.append(first(output).clone())

        def put(module, args, output, kept=kept):
            changed = first(output).clone()
            place = places[position]
            changed[:, place] = kept[0][:, place]
            return changed

        with torch.no_grad():
            with model.use(name), hooks([module.register_forward_hook(keep)]):
                model.hf_model(input_ids=ids)
            with hooks([module.register_forward_hook(put)]):
                logits = model.hf_model(input_ids=ids).logits[0, -1].double()
        yes, no = (logits[list(tokens)].logsumexp(0) for tokens in answers.ids)
        assert found.base.difference[item, 0] == pytest.approx(float(yes - no), abs=2e-5)


def test_other_tokens_are_refused_by_name(pair):
    model, prompts, answers, name = pair
    other = [prompts[0], replace(prompts[1], ids=(*prompts[1].ids[:3], 9, *prompts[1].ids[4:])), *prompts[2:]]
    arguments = {"adapter": name, "answers": answers, "gold": GOLD, "margin": 0.1, "seed": 0}
    cells = layer_cells(3, source="any")
    with pytest.raises(PatchError, match=r"differ at prompt 1: token 3 is \d+ against 9"):
        transplant(model, prompts, cells, adapter_prompts=other, **arguments)
    with pytest.raises(PatchError, match=f"prompt 0: {len(prompts[0].ids)} tokens against {len(prompts[1].ids)}"):
        refuse_other_tokens(prompts, prompts[1:] + prompts[:1], names=("the base", "adapter 'x'"))
    with pytest.raises(PatchError, match="the base has 4 prompts and adapter 'x' has 3"):
        refuse_other_tokens(prompts, prompts[1:], names=("the base", "adapter 'x'"))
    with pytest.raises(PatchError, match="recipient 0 has no span 'few'; its spans: none; pass it in spots="):
        transplant(model, prompts, [Cell("early", (Edit("z", 1, 0, "any", "span:few"),))], **arguments)
    with pytest.raises(PatchError, match="give \\+1 or -1"):
        transplant(model, prompts, cells, **{**arguments, "gold": np.array([1, 0, 1, 1])})


def test_shares_are_ratios_of_mean_gains():
    rng = np.random.default_rng(0)
    gold = np.where(np.arange(300) % 2, 1, -1)
    base, gain = rng.normal(0, 1, 300), rng.normal(2, 1, 300)
    adapter = base + gold * gain
    patched = base[:, None] + gold[:, None] * gain[:, None] * np.array([0.0, 0.25, 1.0])
    found = gain_carried(patched, base, adapter, gold, margin=0.5, seed=0)
    np.testing.assert_allclose(found.share.mean, [0, 0.25, 1], atol=1e-9)
    np.testing.assert_allclose(found.share.high - found.share.low, 0, atol=1e-9)
    assert found.total.mean[0] == pytest.approx(gain.mean()) and found.total.low[0] < 2 < found.total.high[0]
    assert found.moved.mean[1] == pytest.approx(0.25 * gain.mean())
    back = gain_carried(
        adapter[:, None] - patched + base[:, None], base, adapter, gold, into_adapter=True, margin=0.5, seed=0
    )
    np.testing.assert_allclose(back.share.mean, [0, 0.25, 1], atol=1e-9)


def test_a_gain_within_the_margin_has_no_shares():
    gold = np.array([1, -1, 1, -1])
    base = np.array([1.0, -1.0, 0.5, -0.5])
    found = gain_carried(base[:, None], base, base + 0.01 * gold, gold, margin=0.1, seed=0)
    assert np.isnan(found.share.mean).all() and "0.01 logits" in found.reason
    assert found.moved.mean[0] == 0 and found.right_unpatched == 1
    with pytest.raises(PatchError, match="margin is 0"):
        gain_carried(base[:, None], base, base, gold, margin=0, seed=0)


def test_instances_with_many_rows_widen_the_interval():
    rng = np.random.default_rng(1)
    groups = np.repeat(np.arange(25), 4)
    own = rng.normal(0, 1, 25)[groups]
    base, gold = np.zeros(100), np.ones(100, dtype=int)
    adapter, patched = np.full(100, 2.0), (1 + own)[:, None]
    alone = gain_carried(patched, base, adapter, gold, margin=0.5, seed=0)
    tied = gain_carried(patched, base, adapter, gold, groups=groups, margin=0.5, seed=0)
    width = [(one.share.high - one.share.low)[0] for one in (alone, tied)]
    assert width[1] == pytest.approx(2 * width[0], rel=0.25)


def test_the_built_in_pairs_gain_is_found():
    """GRPO's gain on the built-in pair: residuals carry none of it at first and all of it at last."""
    model = load("builtin", adapters=("builtin",), verify=False)
    sets = list(islice(Ordering().generate({"n": 6, "names": "builtin"}, seed=1, split="test"), 40))
    prompts = model.encode([matched["equivalent"].chat() for matched in sets])
    gold = np.array([1 if matched.instance.gold == "yes" else -1 for matched in sets])
    answers = answer_tokens(model, Ordering.answers)
    found = transplant(
        model,
        prompts,
        layer_cells(model.n_layers, source="any"),
        adapter="grpo",
        answers=answers,
        gold=gold,
        margin=0.1,
        seed=0,
    )
    assert found.into_base.reason == "" and found.into_base.total.low[0] > 0
    share = found.into_base.share.mean
    assert share[-1] == pytest.approx(1, abs=1e-3) and share[0] < 0.5
    assert found.into_adapter.right_unpatched >= found.into_base.right_unpatched
    assert found.into_base.right[-1] == found.into_adapter.right_unpatched
