"""Attribution patching is the derivative of the exact sweep, on every structure, and leaves the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from activations.sites import taps
from activations.structure import first, hooks
from patching import Cell, Edit, PatchError, attribution, full_forward, head_cells, head_map, layer_cells, sweep
from patching.edits import check_cells_fit
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_gpt2, tiny_llama

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")
STEP = 2e-4


def ready(build, dtype=torch.float64):
    hf_model, tokenizer = build()
    if hasattr(hf_model.config, "_experts_implementation"):
        hf_model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    model = from_modules(hf_model.to(dtype), tokenizer)
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS)


def nudges(model, prompts, *, scale, position="answer"):
    """Cells that add a small multiple of a direction at every site that the model has, and the directions."""
    places = [(site, layer) for site in SITES for layer in range(model.n_layers) if taps(model, (site, layer))]
    cells = [
        Cell(f"{site}.{layer}", (Edit(site, layer, source="nudge", position=position, how="add", scale=scale),))
        for site, layer in places
        if site != "z" or model.heads(layer)
    ]
    rng = np.random.default_rng(0)
    donor: dict[str, dict[int, np.ndarray]] = {}
    for (site, layer), width in check_cells_fit(model, cells, {"nudge": {}}, {}).items():
        donor.setdefault(site, {})[layer] = rng.standard_normal((len(prompts), width))
    return cells, {"nudge": donor}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_estimates_are_the_derivatives_of_plain_forwards(name):
    """Central differences in float64, at every site and layer of every structure."""
    model, prompts, answers = ready(BUILDERS[name])
    prompts = prompts[:2]
    cells, donors = nudges(model, prompts, scale=1.0)
    found = attribution(model, prompts, cells, answers=answers, donors=donors)
    both = []
    for sign in (1, -1):
        moved, _ = nudges(model, prompts, scale=sign * STEP)
        both.append(
            full_forward(model, prompts, moved, answers=answers, donors=donors, check_cells=0, batch_tokens=1, seed=0)
        )
    slope = (both[0].difference - both[1].difference) / (2 * STEP)
    assert len({cell.edits[0].site for cell in cells}) >= 2
    assert np.abs(slope).max() > 1e-2
    # Some norms and rotary tables are float32 whatever the model is, and a difference quotient divides by the step.
    np.testing.assert_allclose(found.estimate, slope, rtol=1e-3, atol=2e-3 * np.abs(slope).max())
    np.testing.assert_allclose(found.unpatched, both[0].unpatched, atol=1e-5)


def test_positions_and_heads_are_cut_as_the_sweep_cuts_them():
    model, prompts, answers = ready(tiny_gpt2)  # float64 throughout
    for position in ("all", "index:2", "span:words"):
        spots = [{"words": (1, 3)} for _ in prompts]
        cells, donors = nudges(model, prompts, scale=1.0, position=position)
        found = attribution(model, prompts, cells, answers=answers, donors=donors, spots=spots)
        both = []
        for sign in (1, -1):
            moved, _ = nudges(model, prompts, scale=sign * STEP, position=position)
            both.append(
                full_forward(model, prompts, moved, answers=answers, donors=donors, spots=spots, check_cells=0, seed=0)
            )
        slope = (both[0].difference - both[1].difference) / (2 * STEP)
        np.testing.assert_allclose(found.estimate, slope, rtol=1e-3, atol=1e-4)
    single = attribution(model, prompts, head_cells(head_map(model)), answers=answers)
    whole = attribution(model, prompts, [Cell("z", (Edit("z", 1),))], answers=answers)
    names = [cell.startswith("z.1.") for cell in single.cells]
    np.testing.assert_allclose(single.estimate[:, names].sum(axis=1), whole.estimate[:, 0], atol=1e-9)


def own_rows(model, prompts):
    """``resid_post`` of single prompts at the answer position, by plain hooks: ``[item, layer, width]``."""
    rows = []
    for prompt in prompts:
        kept: list[np.ndarray] = []
        handles = [
            model.module(name).register_forward_hook(
                lambda module, args, output, kept=kept: kept.append(first(output)[0, -1].double().numpy())
            )
            for name in model.structure.blocks
        ]
        with hooks(handles), torch.no_grad():
            model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
        rows.append(kept)
    return np.array(rows)


def test_small_edits_of_every_kind_are_what_the_sweep_measures():
    """Donors a little beside the recipient's own activation, so that the network is nearly linear on the way."""
    model, prompts, answers = ready(tiny_gpt2)
    rng = np.random.default_rng(1)
    own = own_rows(model, prompts)
    across = rng.standard_normal(own.shape)
    across -= (across * own).sum(-1, keepdims=True) / (own * own).sum(-1, keepdims=True) * own
    donors = {
        "near": {"resid_post": own + 1e-4 * rng.standard_normal(own.shape)},
        "across": {"resid_post": across + 1e-4 * own},  # almost orthogonal, so little is projected out
    }
    last = model.n_layers - 1
    cells = [
        *layer_cells(model.n_layers, source="near"),
        Cell("out", (Edit("resid_post", 1, source="across", how="project_out"),)),
        Cell("made", (Edit("resid_post", 1, source="shrink", how="function"),)),
        Cell(
            "both", (Edit("resid_post", 0, source="near"), Edit("resid_post", last, source="near", how="add", scale=0))
        ),
    ]
    arguments = {
        "answers": answers,
        "donors": donors,
        "functions": {"shrink": lambda vectors: vectors * (1 - 1e-4)},
    }
    found = attribution(model, prompts, cells, **arguments)
    exact = sweep(model, prompts, cells, seed=0, **arguments)
    moved = exact.difference - exact.unpatched[:, None]
    assert np.abs(moved).max(axis=0).min() > 1e-6
    np.testing.assert_allclose(found.estimate, moved, rtol=2e-2, atol=2e-3 * np.abs(moved).max())


def test_batches_do_not_matter_and_the_model_is_left_as_it_was(tmp_path):
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES) * 2, answer_tokens(model, ANSWERS)
    name = model.attach(str(tiny_adapter(hf_model, tmp_path / "lora")), name="lora")
    parameters = dict(hf_model.named_parameters())
    for number, parameter in enumerate(parameters.values()):
        parameter.requires_grad_(number % 2 == 0)

    def flags():
        return {key: parameter.requires_grad for key, parameter in parameters.items()}

    given = flags()
    before = hf_model(input_ids=torch.tensor([prompts[0].ids])).logits
    cells = head_cells(head_map(model))
    base = attribution(model, prompts, cells, answers=answers)
    np.testing.assert_allclose(
        base.estimate, attribution(model, prompts, cells, answers=answers, batch_tokens=1).estimate, atol=2e-5
    )
    assert base.tokens == sum(len(prompt.ids) for prompt in prompts)
    assert flags() == given
    with model.use(name), torch.inference_mode():
        given = flags()
        adapted = attribution(model, prompts, cells, answers=answers)
        assert flags() == given
        exact = sweep(model, prompts, cells, answers=answers, seed=0)
    assert np.abs(adapted.estimate - base.estimate).max() > 1e-2
    np.testing.assert_allclose(adapted.unpatched, exact.unpatched, atol=2e-5)
    assert all(parameter.grad is None for parameter in parameters.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf_model.modules())
    assert torch.equal(hf_model(input_ids=torch.tensor([prompts[0].ids])).logits, before)


def test_parameters_without_gradients_will_do():
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model.requires_grad_(False), tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = layer_cells(model.n_layers, source="zero")
    found = attribution(model, prompts, cells, answers=answers)
    hf_model.requires_grad_(True)
    np.testing.assert_array_equal(found.estimate, attribution(model, prompts, cells, answers=answers).estimate)


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.2), (torch.float16, 0.05)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "hybrid", "moe"])
def test_half_precision_estimates_are_those_of_float32_to_its_rounding(name, dtype, within):
    """Every weight is rounded to the half type first, so that only the arithmetic differs."""
    hf_model, tokenizer = BUILDERS[name]()
    half = from_modules(hf_model.to(dtype), tokenizer)
    prompts, answers = half.encode(MESSAGES), answer_tokens(half, ANSWERS)
    cells = head_cells(head_map(half))
    found = attribution(half, prompts, cells, answers=answers)
    full = from_modules(hf_model.float(), tokenizer)
    wanted = attribution(full, prompts, cells, answers=answers)
    assert found.estimate.dtype == np.float32
    distance = np.linalg.norm(found.estimate - wanted.estimate) / np.linalg.norm(wanted.estimate)
    assert distance < within


def test_what_cannot_be_estimated_is_refused_by_name():
    model, prompts, answers = ready(tiny_llama)
    with pytest.raises(PatchError, match="no recipients"):
        attribution(model, [], layer_cells(3, source="zero"), answers=answers)
    with pytest.raises(PatchError, match="layer 9"):
        attribution(model, prompts, [Cell("far", (Edit("z", 9, 0),))], answers=answers)
    with pytest.raises(PatchError, match="unknown donor 'nobody'"):
        attribution(model, prompts, layer_cells(3, source="nobody"), answers=answers)
