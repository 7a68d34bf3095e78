"""An engine that is not exact is not used: by rule where the rule is known, by numbers where it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from patching import PatchError, full_forward, head_cells, head_map, layer_cells, plan, sweep, sweep_plan
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gemma2, tiny_gpt2, tiny_hybrid, tiny_llama, tiny_tokenizer


def tiny_mistral(window):
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = tiny_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        sliding_window=window,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return from_modules(MistralForCausalLM(config).eval(), tokenizer)


def asked(model):
    return model.encode(MESSAGES), answer_tokens(model, ANSWERS)


def hook_count(model):
    return sum(
        len(getattr(module, name))
        for module in model.hf_model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks")
    )


def test_a_window_shorter_than_the_prompt_is_not_sent_to_the_branch_engine():
    model = tiny_mistral(window=6)
    prompts, answers = asked(model)
    assert min(len(prompt.ids) for prompt in prompts) > 6
    cells = head_cells(head_map(model))
    result = sweep(model, prompts, cells, answers=answers, seed=0)
    assert result.engine == "prefix"
    assert result.reason == "layer 0 attends to 6 tokens, the longest prompt has 20"
    slow = full_forward(model, prompts, cells, answers=answers, seed=0, batch_tokens=1)
    np.testing.assert_allclose(result.logit, slow.logit, atol=5e-6)
    with pytest.raises(PatchError, match="the branch engine cannot run here: layer 0 attends to 6 tokens"):
        sweep(model, prompts, cells, answers=answers, seed=0, engine="branch")


def test_a_window_as_long_as_the_prompt_is_no_obstacle():
    model = tiny_mistral(window=20)
    prompts, answers = asked(model)
    assert max(len(prompt.ids) for prompt in prompts) == 20
    cells = layer_cells(model.n_layers, source="zero")
    result = sweep(model, prompts, cells, answers=answers, seed=0, check_cells=100)
    assert result.engine == "branch" and result.check_max_abs < 5e-6


@pytest.mark.parametrize("build", [lambda: tiny_mistral(window=6), lambda: from_modules(*tiny_hybrid())])
def test_the_self_check_finds_what_the_rule_does_not_know(build, monkeypatch):
    model = build()
    prompts, answers = asked(model)
    cells = head_cells(head_map(model))
    expected = sweep(model, prompts, cells, answers=answers, seed=0)
    monkeypatch.setattr(plan, "_obstacle_to_branches", lambda model, longest: None)
    result = sweep(model, prompts, cells, answers=answers, seed=0)
    assert result.engine == "prefix" and result.reason.startswith("branch: self-check differs by")
    np.testing.assert_array_equal(result.logit, expected.logit)
    with pytest.raises(PatchError, match=r"branch: self-check differs by .*; use engine='auto'"):
        sweep(model, prompts, cells, answers=answers, seed=0, engine="branch")


def test_the_self_check_decides_in_half_precision_too(monkeypatch):
    model = tiny_mistral(window=6)
    model.hf_model.to(torch.bfloat16)
    prompts, answers = asked(model)
    monkeypatch.setattr(plan, "_obstacle_to_branches", lambda model, longest: None)
    result = sweep(model, prompts, head_cells(head_map(model)), answers=answers, seed=0)
    assert result.engine == "prefix"
    assert result.reason.startswith("branch: self-check differs by")


def test_windows_are_read_layer_by_layer():
    assert plan.windows(from_modules(*tiny_gemma2())) == [16, None, 16]
    assert plan.windows(tiny_mistral(window=6)) == [6, 6, 6]
    assert plan.windows(from_modules(*tiny_gpt2())) == [None] * 3


def spoil(monkeypatch, engine, wrong):
    """Make an engine's scores wrong where ``wrong(items, cells)`` says so."""
    from patching import branch, copies, prefix, restart

    module = {"branch": branch, "prefix": prefix, "copies": copies, "restart": restart}[engine]
    original = module.evaluate

    def evaluate(runs, items, cells, **options):
        scores = original(runs, items, cells, **options)
        return scores + 0.01 if wrong(items, cells) else scores

    monkeypatch.setattr(module, "evaluate", evaluate)


def test_a_recheck_that_fails_starts_over_with_the_next_engine(monkeypatch):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    cells = layer_cells(model.n_layers, source="zero")
    clean = sweep(model, prompts, cells, answers=answers, seed=0, engine="prefix")
    spoil(monkeypatch, "branch", lambda items, cells: list(cells) == list(range(3)) and 0 not in items)
    finished: list[int] = []
    result = sweep(
        model, prompts, cells, answers=answers, seed=0, check_cells=12, batch_tokens=25, progress=finished.append
    )
    assert result.engine == "prefix" and "branch: a re-checked cell differs by 1.0e-02" in result.reason
    np.testing.assert_allclose(result.logit, clean.logit, atol=5e-6)
    assert sum(finished) == len(prompts) and min(finished) > 0


def test_with_no_exact_shortcut_plain_forwards_run(monkeypatch):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    for engine in ("branch", "prefix", "copies", "restart"):
        spoil(monkeypatch, engine, lambda items, cells: True)
    cells = layer_cells(model.n_layers, source="zero")
    result = sweep(model, prompts, cells, answers=answers, seed=0)
    assert result.engine == "forward" and result.forward_passes > len(cells)
    np.testing.assert_array_equal(result.logit, full_forward(model, prompts, cells, answers=answers, seed=0).logit)


def test_a_model_that_cannot_run_a_shortcut_falls_back(monkeypatch):
    from patching import branch

    def refuse(*args, **options):
        raise RuntimeError("The size of tensor a (9)\nmust match")

    monkeypatch.setattr(branch, "branch_mask", refuse)
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    result = sweep(model, prompts, layer_cells(model.n_layers, source="zero"), answers=answers, seed=0)
    assert result.engine == "prefix" and result.reason == "branch: RuntimeError: The size of tensor a (9) must match"

    def full(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(branch, "branch_mask", full)
    with pytest.raises(torch.OutOfMemoryError):
        sweep(model, prompts, layer_cells(model.n_layers, source="zero"), answers=answers, seed=0)


def test_one_token_prompts_have_no_prefix():
    model = from_modules(*tiny_hybrid())
    prompts, answers = asked(model)
    short = type(prompts[0])(prompts[0].ids[:1], "")
    result = sweep(model, [short, prompts[1]], layer_cells(model.n_layers, source="zero"), answers=answers, seed=0)
    assert result.engine == "restart" and result.reason == "layers [0, 1, 2] are not softmax attention"
    with pytest.raises(PatchError, match="prefix engine cannot run here: a prompt has one token"):
        sweep(model, [short], layer_cells(model.n_layers, source="zero"), answers=answers, seed=0, engine="prefix")
    dense = from_modules(*tiny_llama())
    result = sweep(dense, [short, prompts[1]], layer_cells(3, source="zero"), answers=answers, seed=0, check_cells=9)
    assert result.engine == "branch" and result.check_max_abs < 5e-6


@pytest.mark.parametrize("engine", ["branch", "prefix", "copies", "restart", "forward"])
def test_no_hook_is_left_after_an_exception(engine):
    model = from_modules(*tiny_llama())
    prompts, answers = asked(model)
    before = hook_count(model)

    def fail(module, args):
        raise InterruptedError("stopped in the middle")

    handle = model.module(model.structure.blocks[1]).register_forward_pre_hook(fail)
    cells = [*layer_cells(3, source="zero"), *head_cells(head_map(model))]
    with pytest.raises(InterruptedError):
        sweep(model, prompts, cells, answers=answers, seed=0, engine=engine)
    assert hook_count(model) == before + 1
    handle.remove()
    sweep(model, prompts, cells, answers=answers, seed=0, engine=engine)
    assert hook_count(model) == before


def test_the_plan_is_what_is_paid():
    for model in (from_modules(*tiny_llama()), from_modules(*tiny_hybrid())):
        prompts, answers = asked(model)
        cells = head_cells(head_map(model))
        for options in ({}, {"cell_budget": 5, "batch_tokens": 50}, {"engine": "forward"}):
            planned = sweep_plan(model, prompts, cells, **options)
            result = sweep(model, prompts, cells, answers=answers, seed=0, **options)
            assert (planned.engine, planned.reason) == (result.engine, result.reason)
            assert planned.forward_passes == pytest.approx(result.forward_passes)
            assert (planned.mask_bytes > 0) == (planned.engine in ("branch", "prefix"))
    assert "forward passes an item" in str(planned)


def test_flash_attention_is_not_given_a_dense_mask():
    model = from_modules(*tiny_llama())
    model.hf_model.config._attn_implementation = "flash_attention_2"
    cells, options = layer_cells(3, source="zero"), plan.Options(256, 8192)
    engine, reason = plan.groups(model, [5], cells, options)[0].engines[0]
    assert engine == "copies" and "takes no 4-D mask" in reason
    model.hf_model.config._attn_implementation = "sdpa"
    assert plan.groups(model, [5], cells, options)[0].engines[0] == ("branch", "cheapest")
