"""A donor taken from a run holds what hooks written by hand see at the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import Cell, Edit, donor_from_run, span_cells, sweep
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gpt2, tiny_hybrid, tiny_llama


def by_hand(model, prompt, layer, site):
    """The whole sequence ``[token, width]`` of one unpadded prompt, from a hook on the block or its out-projection."""
    kept = []
    if site == "resid_post":
        module = model.hf_model.get_submodule(model.structure.blocks[layer])
        handle = module.register_forward_hook(
            lambda module, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
    else:
        module = model.hf_model.get_submodule(model.structure.out_projections[layer])
        handle = module.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
    handle.remove()
    return kept[0].reshape(len(prompt.ids), -1).numpy()


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_hybrid])
def test_every_kind_of_position(build):
    # Linear attention runs in chunks of tokens, which pads shift: in float32 that is 1e-4 of states this wild.
    model = from_modules(*build())
    prompts = model.encode(MESSAGES)
    spots = [{"query": (5, 2, 3)}, {"query": (4,)}, {"query": (1, 2)}, {"query": tuple(range(9))}]
    places = ("answer", "index:2", "index:-3", "span:query", "all")
    cells = [
        Cell(f"{site}.{layer}@{place}", (Edit(site, layer, position=place),))
        for site in ("resid_post", "z")
        for layer in (0, 2)
        for place in places
    ]
    donor = donor_from_run(model, prompts, cells, spots=spots, batch_tokens=45)
    assert {site: set(held) for site, held in donor.items()} == {"resid_post": set(places), "z": set(places)}
    for item, prompt in enumerate(prompts):
        wanted = {
            "answer": [-1],
            "index:2": [2],
            "index:-3": [-3],
            "span:query": list(spots[item]["query"]),
            "all": list(range(len(prompt.ids))),
        }
        for site in ("resid_post", "z"):
            for layer in (0, 2):
                whole = by_hand(model, prompt, layer, site)
                for place, tokens in wanted.items():
                    found = donor[site][place][layer][item]
                    expected = whole[tokens[0]] if place in places[:3] else whole[tokens]
                    assert found.shape == expected.shape
                    np.testing.assert_allclose(found, expected, atol=1e-3 if build is tiny_hybrid else 2e-5)


def test_spans_go_from_one_run_into_another():
    """The donor's span stands elsewhere than the recipient's; put back into its own run it changes nothing."""
    model = from_modules(*tiny_llama())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    spots = [{"query": (2, 3, 4)}, {"query": (3, 4, 5)}, {"query": (6, 7, 8)}, {"query": (1, 2, 3)}]
    cells = span_cells(("query",), range(3), "d")
    own = donor_from_run(model, prompts, cells, spots=spots)
    turned = donor_from_run(model, prompts[1:] + prompts[:1], cells, spots=spots[1:] + spots[:1])
    same, other = (
        sweep(model, prompts, cells, answers=answers, donors={"d": donor}, spots=spots, seed=0)
        for donor in (own, turned)
    )
    # The last layer's output at an earlier token reaches no answer, so only the layers below can show a change.
    np.testing.assert_allclose(same.difference, same.unpatched[:, None] + np.zeros(3), atol=1e-5)
    changed = np.abs(other.difference - other.unpatched[:, None])
    assert (changed[:, :2].max(axis=1) > 1e-3).all() and changed[:, 2].max() < 1e-5
