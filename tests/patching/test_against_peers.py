"""One cell by another library's own patching gives the same number."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import Cell, Edit, sweep
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gpt2, tiny_qwen3

LAYER, HEAD = 1, 2
BOUND = 2e-5


@pytest.fixture(scope="module", params=[tiny_qwen3, tiny_gpt2])
def case(request):
    hf_model, tokenizer = request.param()
    model = from_modules(copy.deepcopy(hf_model), copy.deepcopy(tokenizer))
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    donor = np.random.default_rng(0).standard_normal((len(prompts), model.n_layers, model.d_model)).astype(np.float32)
    result = sweep(
        model,
        prompts,
        [Cell("resid", (Edit("resid_post", LAYER, source="d"),)), Cell("head", (Edit("z", LAYER, HEAD),))],
        answers=answers,
        donors={"d": {"resid_post": donor}},
        seed=0,
    )
    assert np.abs(result.difference - result.unpatched[:, None]).max() > 100 * BOUND
    return hf_model, tokenizer, model, prompts, answers, donor, result


def score(logits, answers):
    """First label minus second, from a logit row."""
    one, two = (logits[list(variants)].logsumexp(0) for variants in answers.ids)
    return float(one - two)


def test_transformer_lens_gives_the_same_numbers(case, tmp_path):
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    hf_model, tokenizer, _model, prompts, answers, donor, result = case
    tokenizer.save_pretrained(tmp_path)
    network = copy.deepcopy(hf_model)
    network.config.architectures = [type(network).__name__]
    bridge = bridges.TransformerBridge.boot_transformers(
        "tiny", hf_model=network, tokenizer=type(tokenizer).from_pretrained(tmp_path), dtype=torch.float32, device="cpu"
    )
    for item, prompt in enumerate(prompts):

        def put(resid, hook, item=item):
            resid = resid.clone()
            resid[:, -1] = torch.from_numpy(donor[item, LAYER])
            return resid

        def zero(z, hook):
            z = z.clone()
            z[:, -1, HEAD] = 0
            return z

        ids = torch.tensor([prompt.ids])
        points = [(f"blocks.{LAYER}.hook_resid_post", put), (f"blocks.{LAYER}.attn.hook_z", zero)]
        for cell, point in enumerate(points):
            with torch.no_grad():
                logits = bridge.run_with_hooks(ids, attention_mask=torch.ones_like(ids), fwd_hooks=[point])
            assert score(logits[0, -1], answers) == pytest.approx(result.difference[item, cell], abs=BOUND)


def test_nnsight_gives_the_same_numbers(case):
    nnsight = pytest.importorskip("nnsight")
    hf_model, _tokenizer, model, prompts, answers, donor, result = case
    traced = nnsight.NNsight(copy.deepcopy(hf_model))
    width = model.structure.d_head[LAYER]
    features = slice(HEAD * width, (HEAD + 1) * width)
    for item, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids])
        vector = torch.from_numpy(donor[item, LAYER])
        blocks = traced.get(model.structure.blocks[LAYER])
        with torch.no_grad(), traced.trace(ids, use_cache=False):
            blocks.output[:, -1, :] = vector
            patched = traced.output.logits[0, -1].save()
        assert score(patched, answers) == pytest.approx(result.difference[item, 0], abs=BOUND)
        projection = traced.get(model.structure.out_projections[LAYER])
        with torch.no_grad(), traced.trace(ids, use_cache=False):
            projection.input[:, -1, features] = 0
            ablated = traced.output.logits[0, -1].save()
        assert score(ablated, answers) == pytest.approx(result.difference[item, 1], abs=BOUND)
