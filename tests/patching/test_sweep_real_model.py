"""The sweep on trained weights, where activations are large and rounding is not what random weights show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, load
from activations.structure import first, hooks
from patching import largest_change, layer_cells, norm_matched_random, sweep

QUESTIONS = ("Amy is taller than Bob. Is Bob taller than Amy?", "Is Cara older than Dan?", "Is ice cold?")


@pytest.mark.real_model
def test_layer_sweeps_equal_plain_forwards_on_smollm2():
    model = load("smollm2", verify=False)
    prompts = model.encode([[{"role": "user", "content": f"{text} Answer Yes or No."}] for text in QUESTIONS])
    answers = answer_tokens(model, {"yes": ("Yes", "yes"), "no": ("No", "no")})
    own = np.empty((len(prompts), model.n_layers, model.d_model), dtype=np.float32)

    def keep(item, layer):
        def after(module, args, output):
            own[item, layer] = first(output)[0, -1].numpy()

        return after

    for item, prompt in enumerate(prompts):
        blocks = [model.module(name) for name in model.structure.blocks]
        handles = [block.register_forward_hook(keep(item, layer)) for layer, block in enumerate(blocks)]
        with hooks(handles), torch.no_grad():
            model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
    donors = {
        "own": {"resid_post": own},
        "other": {"resid_post": np.roll(own, 1, axis=0)},
        "random": norm_matched_random({"resid_post": own}, keys=[prompt.text for prompt in prompts], seed=0),
    }
    for source, change in (("own", 0.0), ("other", 0.1), ("random", 1.0)):
        cells = layer_cells(model.n_layers, source=source)
        result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, check_cells=12)
        assert result.engine == "branch"
        assert result.check_max_abs <= result.check_bound
        changed = largest_change(result.difference, result.unpatched)
        assert changed >= change
        if source == "own":
            assert changed <= 1e-4
