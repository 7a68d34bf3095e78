"""Every engine gives the numbers of plain forward passes, on every structure, with padding and with adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules, read
from activations.structure import first
from patching import Cell, Edit, full_forward, head_cells, head_map, head_set_cell, largest_change, layer_cells, sweep
from patching.branch import branch_mask, chunks
from tests.tiny_models import (
    ANSWERS,
    MESSAGES,
    tiny_adapter,
    tiny_gemma2,
    tiny_gpt2,
    tiny_hybrid,
    tiny_llama,
    tiny_moe,
    tiny_neox,
    tiny_qwen3,
)

DENSE = (tiny_llama, tiny_qwen3, tiny_gpt2, tiny_neox, tiny_moe)
BOUND = 5e-6


def captured(model, prompts, *, items=None):
    """The model's own vectors at the answer position of single, unpadded prompts, as a donor."""
    resid, z = [], {layer: [] for layer in range(model.n_layers) if model.heads(layer)}
    for prompt in prompts:
        row, handles = [], []

        def keep(module, args, output, row=row):
            row.append(first(output)[0, -1].numpy().copy())

        for name in model.structure.blocks:
            handles.append(model.module(name).register_forward_hook(keep))
        for layer, rows in z.items():

            def keep_z(module, args, rows=rows):
                rows.append(args[0][0, -1].numpy().copy())

            handles.append(model.module(model.structure.out_projections[layer]).register_forward_pre_hook(keep_z))
        with torch.no_grad():
            model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        resid.append(row)
    return {"resid_post": np.array(resid), "z": {layer: np.array(rows) for layer, rows in z.items()}}


def all_cells(model):
    """Layers and heads one by one, and cells with several edits, sites, layers and donors."""
    last = model.n_layers - 1
    heads = [(layer, count - 1) for layer, count in enumerate(head_map(model)) if count]
    return [
        Cell("none", ()),
        *layer_cells(model.n_layers, source="other"),
        *head_cells(head_map(model)),
        *[Cell(cell.name + "<-other", cell.edits) for cell in head_cells(head_map(model), source="other")],
        head_set_cell("last heads", heads),
        Cell("whole mixer", (Edit("z", last),)),
        Cell("mixed", (Edit("z", last, 0, "random"), Edit("z", last, 1), Edit("resid_post", 0, source="other"))),
    ]


def donors_for(model, prompts):
    own = captured(model, prompts)
    other = {
        "resid_post": np.roll(own["resid_post"], 1, axis=0),
        "z": {layer: np.roll(values, 1, axis=0) for layer, values in own["z"].items()},
    }
    rng = np.random.default_rng(1)
    random = {"z": {layer: rng.standard_normal(values.shape) for layer, values in own["z"].items()}}
    return {"own": own, "other": other, "random": random}


@pytest.mark.parametrize("build", DENSE)
@pytest.mark.parametrize("engine", ["branch", "prefix"])
def test_shortcuts_equal_plain_forwards_cell_by_cell(build, engine):
    model = from_modules(*build())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    assert len({len(prompt.ids) for prompt in prompts}) > 1, "unequal lengths, so that the batch is padded"
    arguments = {"answers": answers, "donors": donors_for(model, prompts), "seed": 0}
    cells = all_cells(model)
    fast = sweep(model, prompts, cells, engine=engine, check_cells=10_000, **arguments)
    slow = full_forward(model, prompts, cells, batch_tokens=1, **arguments)
    assert fast.engine == engine and slow.engine == "forward"
    np.testing.assert_allclose(fast.logit, slow.logit, atol=BOUND)
    np.testing.assert_allclose(fast.unpatched, slow.unpatched, atol=BOUND)
    np.testing.assert_allclose(fast.difference[:, 0], fast.unpatched, atol=BOUND)
    assert fast.checked == len(prompts) * len(cells) and fast.check_max_abs <= BOUND
    moved = np.abs(fast.difference - fast.unpatched[:, None]).max(axis=0)
    assert (moved[1:] > 100 * BOUND).all(), "every edited cell has an effect the tolerance could not hide"


@pytest.mark.parametrize("build", [*DENSE, tiny_gemma2])
def test_the_unpatched_run_is_the_readout(build):
    model = from_modules(*build())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    result = sweep(model, prompts, layer_cells(model.n_layers, source="zero"), answers=answers, seed=0)
    np.testing.assert_allclose(result.unpatched, read(model, prompts, answers).difference.numpy(), atol=BOUND)


def test_dense_models_take_the_branch_engine_and_pay_for_it_once():
    model = from_modules(*tiny_llama())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = layer_cells(model.n_layers, source="zero")
    result = sweep(model, [prompts[0]] * 4, cells, answers=answers, seed=0)
    length = len(prompts[0].ids)
    assert result.engine == "branch"
    assert result.forward_passes == pytest.approx((length + len(cells)) / length)


def test_hybrid_models_take_the_prefix_engine():
    model = from_modules(*tiny_hybrid())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    arguments = {"answers": answers, "donors": donors_for(model, prompts), "seed": 0}
    cells = all_cells(model)
    fast = sweep(model, prompts, cells, check_cells=200, **arguments)
    assert fast.engine == "prefix" and "not softmax attention" in fast.reason
    slow = full_forward(model, prompts, cells, batch_tokens=1, **arguments)
    np.testing.assert_allclose(fast.logit, slow.logit, atol=5e-5)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_hybrid])
def test_ones_own_activation_and_nothing_change_nothing(build):
    model = from_modules(*build())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = [
        Cell("nothing", ()),
        *layer_cells(model.n_layers, source="own"),
        *head_cells(head_map(model), source="own"),
        Cell("whole", (Edit("z", model.n_layers - 1, source="own"),)),
    ]
    result = sweep(model, prompts, cells, answers=answers, donors=donors_for(model, prompts), seed=0)
    assert largest_change(result.difference, result.unpatched) <= 1e-5


@pytest.mark.parametrize("engine", ["branch", "prefix"])
def test_small_budgets_change_the_price_and_not_the_numbers(engine):
    model = from_modules(*tiny_qwen3())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    arguments = {"answers": answers, "donors": donors_for(model, prompts), "seed": 0, "engine": engine}
    cells = all_cells(model)
    whole = sweep(model, prompts, cells, **arguments)
    cut = sweep(model, prompts, cells, cell_budget=7, batch_tokens=30, **arguments)
    np.testing.assert_allclose(cut.logit, whole.logit, atol=BOUND)
    assert (cut.forward_passes > whole.forward_passes) == (engine == "branch")


@pytest.mark.parametrize("engine", ["branch", "prefix", "copies", "restart", "forward"])
def test_the_same_call_gives_the_same_bits(engine):
    model = from_modules(*tiny_llama())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = head_cells(head_map(model), position="all" if engine in ("restart", "forward") else "answer")
    one, two, other = (sweep(model, prompts, cells, answers=answers, seed=seed, engine=engine) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.logit, two.logit)
    np.testing.assert_array_equal(one.logit, other.logit)


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gpt2])
def test_an_active_adapter_is_part_of_every_run(build, tmp_path):
    hf_model, tokenizer = build()
    path = tiny_adapter(hf_model, tmp_path / "adapter")
    model = from_modules(hf_model, tokenizer, adapters=[str(path)])
    (name,) = model.adapter_names
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = [*head_cells(head_map(model)), *layer_cells(model.n_layers, source="other")]
    donors = donors_for(model, prompts)
    base = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
    with model.use(name):
        results = {
            engine: sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, engine=engine)
            for engine in ("branch", "prefix", "forward")
        }
    again = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
    assert np.abs(results["branch"].unpatched - base.unpatched).max() > 1e-2, "the adapter changes the model"
    for engine in ("branch", "prefix"):
        np.testing.assert_allclose(results[engine].logit, results["forward"].logit, atol=BOUND)
    np.testing.assert_array_equal(again.logit, base.logit)


def test_an_adapter_on_the_unembedding_counts(tmp_path):
    hf_model, tokenizer = tiny_llama()
    path = tiny_adapter(hf_model, tmp_path / "adapter", targets=("q_proj", "lm_head"))
    model = from_modules(hf_model, tokenizer, adapters=[str(path)])
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = layer_cells(model.n_layers, source="other")
    donors = donors_for(model, prompts)
    base = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
    with model.use(model.adapter_names[0]):
        result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, check_cells=100)
    assert result.engine == "branch"
    assert result.check_max_abs <= BOUND
    assert np.abs(result.difference[:, -1] - base.difference[:, -1]).max() > 1e-2, "same residual in both"


def test_zeroing_a_head_is_zeroing_its_columns_of_the_out_projection():
    model = from_modules(*tiny_qwen3())
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    layer, head, width = model.n_layers - 1, 2, model.structure.d_head[-1]
    swept = sweep(model, prompts, [Cell("head", (Edit("z", layer, head),))], answers=answers, seed=0)
    weight = model.module(model.structure.out_projections[layer]).weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, head * width : (head + 1) * width] = 0
    zeroed = read(model, prompts, answers).difference.numpy()
    with torch.no_grad():
        weight.copy_(kept)
    np.testing.assert_allclose(swept.difference[:, 0], zeroed, atol=BOUND)


def _double_norms(hf_model):
    """RMSNorm in transformers computes in float32 whatever the model's dtype; torch's own keeps float64."""
    for name, module in list(hf_model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=module.weight.dtype)
            norm.weight = module.weight
            parent, _, attribute = name.rpartition(".")
            setattr(hf_model.get_submodule(parent), attribute, norm)
    return hf_model.double()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3, tiny_gpt2])
@pytest.mark.parametrize("engine", ["branch", "prefix"])
def test_in_float64_the_difference_vanishes_so_it_was_rounding(build, engine):
    hf_model, tokenizer = build()
    model = from_modules(_double_norms(hf_model), tokenizer)
    assert model.dtype == torch.float64
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells = all_cells(model)
    result = sweep(
        model,
        prompts,
        cells,
        answers=answers,
        donors=donors_for(model, prompts),
        seed=0,
        engine=engine,
        check_cells=10_000,
    )
    assert result.logit.dtype == np.float64
    assert result.check_max_abs < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_half_precision_states_its_difference_and_keeps_the_engine(build, dtype):
    hf_model, tokenizer = build()
    model = from_modules(hf_model.to(dtype), tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    cells, donors = all_cells(model), donors_for(from_modules(*build()), prompts)
    result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, check_cells=200)
    assert result.engine == "branch"
    assert result.logit.dtype == np.float32
    assert result.check_max_abs > 0
    assert result.check_bound >= 1e-2
    for engine in ("prefix", "restart"):
        other = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0, engine=engine)
        assert np.median(np.abs(other.difference - result.difference)) < 0.05
    exact = sweep(from_modules(*build()), prompts, cells, answers=answers, donors=donors, seed=0)
    assert np.median(np.abs(result.difference - exact.difference)) < 0.05


def test_the_mask_lets_a_branch_see_the_prefix_and_itself():
    mask = branch_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, torch.float32)
    assert mask.shape == (2, 1, 5, 5)
    assert (mask[:, 0] == 0).int().tolist() == [
        [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 0, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 1]],
    ]
    assert branch_mask(torch.ones(7, 3, dtype=torch.long), 2, torch.float32).shape == (1, 1, 5, 5)


def test_chunks_are_few_and_even():
    assert [len(part) for part in chunks(range(448), 256)] == [224, 224]
    assert [len(part) for part in chunks(range(7), 3)] == [3, 3, 1]
    assert chunks([], 3) == [[]]
