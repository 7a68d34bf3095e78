"""The restart engine runs what it says and nothing else, and leaves the model as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import Cell, Edit, PatchError, head_cells, head_map, layer_cells, restart, sweep, sweep_plan
from patching.plan import Options
from patching.sweeping import evaluator, prepared
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_gemma4, tiny_hybrid, tiny_llama


def asked(model):
    return model.encode(MESSAGES), answer_tokens(model, ANSWERS)


def counted(model, names, work):
    """How often each of these modules runs during ``work``."""
    calls = dict.fromkeys(names, 0)
    handles = []
    for name in names:

        def count(module, args, output, name=name):
            calls[name] += 1

        handles.append(model.module(name).register_forward_hook(count))
    try:
        work()
    finally:
        for handle in handles:
            handle.remove()
    return list(calls.values())


def state(model):
    """Everything of the module tree that a restart could leave behind."""
    return {
        name: (type(module), sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.hf_model.named_modules()
    }


@pytest.mark.parametrize(
    ("edit", "attention", "mlp"),
    [
        # one unpatched run, then from the edited layer on; the mixer of that layer only if its input is edited
        (Edit("z", 1, 2, position="all"), [1, 1, 2], [1, 2, 2]),
        (Edit("mlp_out", 1, position="all"), [1, 1, 2], [1, 2, 2]),
        (Edit("resid_pre", 1, position="all"), [1, 2, 2], [1, 2, 2]),
        (Edit("resid_post", 1, position="all"), [1, 1, 2], [1, 1, 2]),
        (Edit("resid_post", 2, position="all"), [1, 1, 1], [1, 1, 1]),
        (Edit("z", 0, 2, position="all"), [1, 2, 2], [2, 2, 2]),
    ],
)
def test_blocks_below_the_edit_are_not_run(edit, attention, mlp):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    names = [f"model.layers.{layer}.{part}" for part in ("self_attn.q_proj", "mlp.down_proj") for layer in range(3)]
    runs = prepared(model, prompts, [Cell("one", (edit,))], answers=answers)
    evaluate = evaluator(runs, "restart", Options(256, 8192))
    assert counted(model, names, lambda: evaluate([0, 1], [0])) == [*attention, *mlp]


@pytest.mark.parametrize("name", ["llama", "gemma4", "hybrid", "falcon"])
def test_the_model_is_as_before_also_after_an_exception(name):
    model = from_modules(*BUILDERS[name]())
    prompts, answers = asked(model)
    before, weights = state(model), copy.deepcopy(model.hf_model.state_dict())
    cells = [Cell("z", (Edit("z", 1, 0, position="all"),)), *layer_cells(model.n_layers, source="zero", position="all")]
    sweep(model, prompts, cells, answers=answers, seed=0, engine="restart")
    assert state(model) == before
    block = model.module(model.structure.blocks[0])

    def stop(vectors):
        if "forward" in block.__dict__:
            raise InterruptedError("stopped in the middle of a restart")
        return vectors

    bent = Cell("bent", (Edit("resid_pre", 2, source="stop", position="all", how="function"),))
    with pytest.raises(InterruptedError):
        sweep(model, prompts, [bent], answers=answers, functions={"stop": stop}, seed=0, engine="restart")
    assert state(model) == before
    assert all(torch.equal(weights[key], value) for key, value in model.hf_model.state_dict().items())


def test_a_forward_that_someone_else_has_set_stays():
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    block = model.module(model.structure.blocks[0])
    own = block.forward
    block.forward = lambda *args, **kwargs: own(*args, **kwargs)
    mine = block.forward
    cells = layer_cells(3, source="d", position="all")
    with pytest.raises(PatchError, match="holds no 'resid_post' of layer"):
        sweep(model, prompts, cells, answers=answers, donors={"d": {"resid_post": {}}}, seed=0)
    result = sweep(model, prompts, layer_cells(3, source="zero", position="all"), answers=answers, seed=0)
    assert result.engine == "restart" and block.forward is mine


def test_all_heads_everywhere_cost_half_a_pass_each():
    model = from_modules(*tiny_llama(layers=8))
    prompts, answers = asked(model)
    cells = head_cells(head_map(model), position="all")
    plan = sweep_plan(model, [prompts[0]] * 2, cells)
    result = sweep(model, [prompts[0]] * 2, cells, answers=answers, seed=0)
    assert result.engine == plan.engine == "restart"
    assert result.forward_passes == pytest.approx(1 + 32 * (8 + 1) / 16) == plan.forward_passes
    small = sweep(model, [prompts[0]] * 2, cells, answers=answers, seed=0, cell_budget=1, batch_tokens=20)
    np.testing.assert_allclose(small.logit, result.logit, atol=1e-5)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma4, tiny_hybrid])
def test_cells_of_two_kinds_get_two_engines_and_one_result(build):
    model = from_modules(*build())
    prompts, answers = asked(model)
    here = layer_cells(model.n_layers, source="zero")
    everywhere = layer_cells(model.n_layers, source="zero", position="all")
    mixed = [cell for both in zip(everywhere, here, strict=True) for cell in both]
    finished = []
    result = sweep(model, prompts, mixed, answers=answers, seed=0, progress=finished.append)
    plan = sweep_plan(model, prompts, mixed)
    assert result.engines[:2] == ("restart", result.engine.partition("+")[0])
    assert result.engine == plan.engine and "+restart" in result.engine
    assert plan.forward_passes == pytest.approx(result.forward_passes)
    assert sum(finished) == len(prompts) and result.checked == 20
    parts = [sweep(model, prompts, cells, answers=answers, seed=0).difference for cells in (everywhere, here)]
    np.testing.assert_allclose(result.difference[:, ::2], parts[0], atol=1e-5)
    np.testing.assert_allclose(result.difference[:, 1::2], parts[1], atol=1e-5)
    assert f"{model.n_layers} cells by the restart engine" in str(plan)


def test_edits_at_all_positions_are_not_for_engines_that_share_a_prefix():
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    cells = [Cell("wide", (Edit("z", 1, 0, position="all"),))]
    for engine in ("branch", "prefix", "copies"):
        with pytest.raises(
            PatchError, match=rf"{engine} engine cannot run here: cell 'wide' edits position all, which"
        ):
            sweep(model, prompts, cells, answers=answers, seed=0, engine=engine)


def test_a_restart_that_is_wrong_is_found_and_not_used(monkeypatch):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    cells = head_cells(head_map(model), position="all")
    good = sweep(model, prompts, cells, answers=answers, seed=0)
    monkeypatch.setattr(restart, "start_of", lambda cell, n_layers: min(edit.layer for edit in cell.edits) + 1)
    result = sweep(model, prompts, cells, answers=answers, seed=0)
    assert result.engine == "forward" and result.reason.startswith("restart: self-check differs by")
    np.testing.assert_allclose(result.logit, good.logit, atol=1e-5)
    with pytest.raises(PatchError, match=r"restart: self-check differs by .*; use engine='auto'"):
        sweep(model, prompts, cells, answers=answers, seed=0, engine="restart")


def test_one_wrong_cell_is_found_by_the_checks_of_random_cells(monkeypatch):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    cells = head_cells(head_map(model), position="all")
    original = restart.evaluate

    def evaluate(runs, items, cells, **options):
        scores = original(runs, items, cells, **options)
        scores[0, 7:] += 0.01 * (len(cells) > 2)
        return scores

    monkeypatch.setattr(restart, "evaluate", evaluate)
    result = sweep(model, prompts, cells, answers=answers, seed=0)
    assert result.engine == "forward" and "a re-checked cell differs by 1.0e-02" in result.reason


def test_an_adapter_on_the_out_projection_is_part_of_a_restart(tmp_path):
    hf_model, tokenizer = tiny_llama()
    path = tiny_adapter(hf_model, tmp_path / "adapter", targets=("o_proj", "q_proj"))
    model = from_modules(hf_model, tokenizer, adapters=[str(path)])
    prompts, answers = asked(model)
    cells = head_cells(head_map(model), position="all")
    base = sweep(model, prompts, cells, answers=answers, seed=0, engine="restart")
    with model.use(model.adapter_names[0]):
        on = sweep(model, prompts, cells, answers=answers, seed=0, engine="restart", check_cells=50)
        plain = sweep(model, prompts, cells, answers=answers, seed=0, engine="forward", check_cells=0)
    np.testing.assert_allclose(on.logit, plain.logit, atol=1e-5)
    assert np.abs(on.difference - base.difference).max() > 1e-2
