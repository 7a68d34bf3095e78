"""The prefix engine holds keys and values once, sees what the last token sees, and gives the model its cache back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import activations.middle
from activations import answer_tokens, from_modules
from activations.batching import pad
from patching import Cell, Edit, head_cells, head_map, layer_cells, prefix, sweep, sweep_plan
from patching.plan import LONG
from patching.prefix import copies_mask, prefix_cache
from patching.sweeping import prepared
from tests.patching.by_hand import HandEdit, run
from tests.tiny_models import (
    ANSWERS,
    MESSAGES,
    tiny_gemma3,
    tiny_gemma4,
    tiny_hybrid,
    tiny_llama,
    tiny_mistral,
    tiny_qwen3_next,
)


def asked(build):
    hf_model, tokenizer = build()
    model = from_modules(hf_model, tokenizer)
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS)


@pytest.mark.parametrize("build", [tiny_llama, tiny_mistral, tiny_gemma3, tiny_gemma4, tiny_hybrid, tiny_qwen3_next])
def test_keys_and_values_are_not_copied_for_each_cell(build, monkeypatch):
    model, prompts, answers = asked(build)
    seen = []
    original = prefix._forked

    def forked(cache, batch, size):
        mine = original(cache, batch, size)
        before = [
            (layer.keys.data_ptr(), layer.keys.clone())
            for layer in cache.layers
            if getattr(layer, "keys", None) is not None
        ]
        seen.append((cache, mine, batch, size, before))
        return mine

    monkeypatch.setattr(prefix, "_forked", forked)
    cells = head_cells(head_map(model))
    result = sweep(model, prompts, cells, answers=answers, seed=0, engine="prefix", cell_budget=5)
    assert result.check_max_abs < 1e-4
    for cache, mine, batch, size, before in seen:
        held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        for layer, (place, keys) in zip(held, before, strict=True):
            assert layer.keys.data_ptr() == place and torch.equal(layer.keys, keys), (
                "a pass writes nothing to the cache"
            )
        for layer in mine.layers:
            if getattr(layer, "keys", None) is not None:
                assert layer.keys.shape[0] == batch, "one copy an item, whatever the number of cells"
            elif getattr(layer, "recurrent_states", None):  # a layer that reads another's keys holds nothing
                assert layer.recurrent_states[0].shape[0] == batch * size, "states are small and one a cell"


@pytest.mark.parametrize("build", [tiny_mistral, tiny_gemma3])
def test_masks_show_what_the_window_shows(build):
    model, prompts, answers = asked(build)
    runs = prepared(model, prompts[:2], layer_cells(model.n_layers, source="zero"), answers=answers)
    padded = pad(prompts[:2], model.device, model.pad_id)  # of 20 and 10 tokens
    cache, _ = prefix_cache(runs, padded)
    masks = copies_mask(runs, padded, cache, 3)
    masks = masks if isinstance(masks, dict) else {"sliding_attention": masks}
    for kind, mask in masks.items():
        visible = (mask[:, 0] == 0).sum(-1)
        assert visible.tolist() == ([[6] * 3] * 2 if kind == "sliding_attention" else [[20] * 3, [10] * 3])


def test_long_prompts_and_small_budgets_go_to_the_prefix_engine():
    model, prompts, _ = asked(tiny_llama)
    cells = head_cells(head_map(model))
    assert sweep_plan(model, prompts, cells).engine == "branch"
    small = sweep_plan(model, prompts, cells, cell_budget=5)
    assert small.engine == "prefix" and small.forward_passes < sweep_plan(
        model, prompts, cells, cell_budget=5, engine="branch"
    ).forward_passes  # fmt: skip
    long = type(prompts[0])(prompts[0].ids * 30, "")
    assert len(long.ids) > LONG and sweep_plan(model, [long], cells).engine == "prefix"


@pytest.mark.parametrize("engine", ["branch", "prefix", "restart"])
def test_resid_mid_is_written_where_no_module_receives_it(engine, monkeypatch):
    model, prompts, answers = asked(tiny_llama)
    structure = model.structure
    sums = tuple(
        ((block, True), (attention, False))
        for block, attention in zip(structure.blocks, structure.attn_out, strict=True)
    )
    monkeypatch.setattr(activations.middle, "middles", lambda model: sums)
    vector = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    cells = [Cell(f"{layer}", (Edit("resid_mid", layer, source="d"),)) for layer in range(3)]
    donors = {"d": {"resid_mid": dict.fromkeys(range(3), vector)}}
    result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, engine=engine)
    for item, prompt in enumerate(prompts):
        for layer in range(3):
            edit = HandEdit("resid_mid", layer, [-1], lambda old, item=item: torch.from_numpy(vector[item : item + 1]))
            logits = run(model.hf_model, "llama", prompt.ids, [edit])
            expected = [float(torch.logsumexp(logits[list(ids)], 0)) for ids in answers.ids]
            np.testing.assert_allclose(result.logit[item, layer], expected, atol=1e-5)
