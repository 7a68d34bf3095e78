"""The model handle: what it leaves alone, what it refuses, and its unembedding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import activations.model as model_module
from activations import answer_tokens, from_modules, pad
from activations.batching import forward_arguments
from activations.checks import check
from activations.errors import ModelError
from activations.readout import final_residual, from_logits, read
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_gpt2, tiny_llama, tiny_qwen3


def _state(hf_model: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "config": hf_model.config.to_dict(),
        "attention": hf_model.config._attn_implementation,
        "generation": hf_model.generation_config.to_dict(),
        "training": [module.training for module in hf_model.modules()],
        "grad": [parameter.requires_grad for parameter in hf_model.parameters()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in hf_model.modules()],
        "weights": {name: tensor.clone() for name, tensor in hf_model.state_dict().items()},
        "tokenizer": (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token, tokenizer.chat_template),
        "extra": tokenizer.model_max_length,
    }


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    weights_one, weights_two = one.pop("weights"), two.pop("weights")
    return one == two and all(torch.equal(weights_one[key], weights_two[key]) for key in weights_one)


def test_the_callers_objects_stay_as_they_were() -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.model.layers[0].register_forward_hook(lambda *_: None)  # somebody else's hook
    before = _state(hf_model, tokenizer)
    model = from_modules(hf_model, tokenizer)
    prompts = model.encode(MESSAGES)
    read(model, prompts, answer_tokens(model, ANSWERS))
    check(model, prompts)
    with pytest.raises(RuntimeError, match="boom"), model.use(None):
        raise RuntimeError("boom")
    assert _same(before, _state(hf_model, tokenizer))


def test_hooks_go_when_a_forward_pass_fails() -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    before = _state(hf_model, tokenizer)
    prompt = type(model.encode(MESSAGES)[0])((10_000,), "an id outside the vocabulary")
    with pytest.raises(IndexError):
        final_residual(model, [prompt])
    assert _same(before, _state(hf_model, tokenizer))


def test_training_mode_and_compiled_models_are_refused() -> None:
    hf_model, tokenizer = tiny_llama()
    with pytest.raises(ModelError, match=r"in training mode.*call \.eval\(\)"):
        from_modules(hf_model.train(), tokenizer)
    hf_model.eval()
    hf_model.model.layers[1] = torch.compile(hf_model.model.layers[1])
    with pytest.raises(ModelError, match=r"torch\.compile'd"):
        from_modules(hf_model, tokenizer)
    other, _ = tiny_llama()
    other.compile()
    with pytest.raises(ModelError, match=r"torch\.compile'd"):
        from_modules(other, tokenizer)


def test_a_model_that_carries_adapters_already_is_refused(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path))])
    with pytest.raises(ModelError, match="carries PEFT layers already"):
        from_modules(hf_model, tokenizer)


def test_sizes_and_identity() -> None:
    hf_model, tokenizer = tiny_qwen3()
    model = from_modules(hf_model, tokenizer, name="tiny")
    assert (model.n_layers, model.d_model, model.d_vocab, model.context) == (3, 32, len(tokenizer), 128)
    assert [model.heads(layer) for layer in range(3)] == [4, 4, 4]
    assert model.identity["name"] == "tiny"
    assert model.identity["attention"] == "sdpa"
    assert set(model.identity["versions"]) == {"torch", "transformers", "peft"}
    again, _ = tiny_qwen3()
    assert from_modules(again, tokenizer).identity["weights"] == model.identity["weights"]
    other, _ = tiny_qwen3(seed=1)
    assert from_modules(other, tokenizer).identity["weights"] != model.identity["weights"]


def test_encode_knows_the_models_context() -> None:
    hf_model, tokenizer = tiny_gpt2()
    model = from_modules(hf_model, tokenizer)
    long = [{"role": "user", "content": " ".join(["Amy"] * 130)}]
    with pytest.raises(ModelError, match="prompt has 134 tokens and the model reads at most 128"):
        model.encode([long])


@pytest.mark.parametrize("name", BUILDERS)
def test_unembed_equals_the_models_logits(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    resid = final_residual(model, prompts)
    with torch.inference_mode():
        padded = pad(prompts, model.device, model.pad_id)
        logits = hf_model(**forward_arguments(hf_model, padded)).logits[:, -1]
    expected, got = from_logits(logits, answers), model.unembed(resid, answers)
    assert (model.logits(resid) - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert torch.allclose(got.logit, expected.logit, rtol=1e-5, atol=1e-5)
    assert torch.allclose(got.logsumexp, expected.logsumexp, rtol=1e-5)
    assert torch.equal(got.top, expected.top)


def test_cutting_rows_and_vocabulary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model, tokenizer = BUILDERS["gemma2"]()
    model = from_modules(hf_model, tokenizer)
    answers = answer_tokens(model, ANSWERS)
    resid = torch.randn(11, 32, generator=torch.Generator().manual_seed(1))
    whole = model.unembed(resid, answers)
    monkeypatch.setattr(model_module, "_ROWS", 3)
    monkeypatch.setattr(model_module, "_COLUMNS", 7)
    cut = model.unembed(resid, answers)
    assert torch.allclose(cut.logit, whole.logit, atol=1e-6)
    assert torch.allclose(cut.logsumexp, whole.logsumexp, atol=1e-6)
    assert torch.equal(cut.top, whole.top)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_half_precision_models_unembed_in_float32(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    half = from_modules(copy.deepcopy(hf_model).to(torch.bfloat16), tokenizer)
    rounded = from_modules(copy.deepcopy(half.hf_model).float(), tokenizer)
    answers = answer_tokens(half, ANSWERS)
    resid = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    got = half.unembed(resid, answers)
    assert got.logit.dtype == torch.float32
    assert torch.allclose(got.logit, rounded.unembed(resid, answers).logit, atol=1e-6)
    assert next(half.module(half.structure.final_norm).parameters()).dtype == torch.bfloat16


def test_unembed_says_what_shape_it_takes() -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    with pytest.raises(ModelError, match=r"takes \[row, 32\], not \[2, 3, 32\]; select positions"):
        model.unembed(torch.zeros(2, 3, 32), answer_tokens(model, ANSWERS))


def test_no_cache_is_built_and_only_the_last_logits_are_made() -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    padded = pad(model.encode(MESSAGES), model.device, model.pad_id)
    out = hf_model(**forward_arguments(hf_model, padded, keep=1))
    assert out.logits.shape[1] == 1
    assert out.past_key_values is None
