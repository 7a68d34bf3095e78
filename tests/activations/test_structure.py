"""Structure is found by behaviour, on architectures that each break a shortcut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from activations.errors import ModelError
from activations.structure import Structure, discover
from tests.tiny_models import BUILDERS, tiny_adapter, tiny_llama

EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"heads": (4,) * 3, "d_head": (8,) * 3, "final_norm": "model.norm"},
    "qwen3": {"heads": (4,) * 3, "d_head": (16,) * 3},
    "gpt2": {"out": "attn.c_proj", "final_norm": "transformer.ln_f", "embedding": "transformer.wte", "mlp": "mlp"},
    "gemma2": {"softcap": 5.0, "d_head": (16,) * 3, "attn": "post_attention_layernorm"},
    "neox": {"out": "attention.dense", "final_norm": "gpt_neox.final_layer_norm"},
    "moe": {"heads": (4,) * 3, "d_head": (16,) * 3, "mlp": "mlp"},
    "hybrid": {"attention": ("other",) * 3 + ("softmax",), "heads": (4,) * 4, "d_head": (8, 8, 8, 16)},
    "granite": {"logit_scale": 0.25, "attn_out": (None,) * 3},
    "cohere": {"logit_scale": 0.25, "attn": "self_attn", "mlp": "mlp"},
    "mistral": {"heads": (4,) * 3, "attn": "self_attn", "mlp": "mlp"},
    "qwen2": {"heads": (4,) * 3, "d_head": (8,) * 3},
    "qwen3_next": {"attention": ("other",) * 3 + ("softmax",), "heads": (4,) * 4, "d_head": (8, 8, 8, 16)},
    "gemma3": {"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    "gemma4": {"d_head": (16, 32) * 2, "attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    "gpt_oss": {"heads": (4,) * 3, "d_head": (16,) * 3, "attn": "self_attn", "mlp": "mlp"},
    "olmo2": {"attn": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    "phi3": {"heads": (4,) * 3, "d_head": (8,) * 3},
    "falcon": {"out": "self_attention.dense", "attn": "self_attention", "embedding": "transformer.word_embeddings"},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_each_structure_is_found(name: str) -> None:
    hf_model, _ = BUILDERS[name]()
    expected = dict(EXPECTED[name])
    structure = discover(hf_model)
    for suffix, field in (("out", "out_projections"), ("attn", "attn_out"), ("mlp", "mlp_out")):
        if suffix in expected:
            ending = expected.pop(suffix)
            found = getattr(structure, field)
            assert found == tuple(f"{block}.{ending}" for block in structure.blocks)
    for field, value in expected.items():
        assert getattr(structure, field) == value, field
    assert structure.d_model == 32
    assert len(structure.blocks) == hf_model.config.num_hidden_layers
    for names in (structure.blocks, structure.out_projections):
        assert all(hf_model.get_submodule(str(module)) is not None for module in names)


def test_mixed_layers_name_each_out_projection() -> None:
    hf_model, _ = BUILDERS["hybrid"]()
    endings = [str(name).split(".", 3)[3] for name in discover(hf_model).out_projections]
    assert endings == ["linear_attn.out_proj"] * 3 + ["self_attn.o_proj"]


@pytest.mark.parametrize("name", BUILDERS)
def test_eager_attention_and_half_precision_give_the_same_structure(name: str) -> None:
    hf_model, _ = BUILDERS[name]()
    given = discover(hf_model)
    hf_model.set_attn_implementation("eager")
    assert discover(hf_model) == given
    assert discover(hf_model.to(torch.bfloat16)) == given


def test_a_block_that_does_more_than_two_additions_says_so() -> None:
    reasons = {name: set(discover(BUILDERS[name]()[0]).unsplit) for name in BUILDERS}
    assert {name for name, found in reasons.items() if found != {None}} == {"granite", "gemma4"}
    assert reasons["gemma4"] == {"the block adds a third part or scales its output"}
    assert reasons["granite"] == {"no module returns what the block adds, as where it scales its additions"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "neox", "llama"])
def test_a_few_huge_entries_do_not_hide_which_module_adds(name: str, dtype: torch.dtype) -> None:
    """Real residual streams hold entries of thousands at their first token; a block adds far less than that."""
    hf_model, _ = BUILDERS[name]()
    expected = discover(hf_model)
    with torch.no_grad():
        hf_model.get_submodule(expected.embedding).weight[[11, 14], 5] = 3e4  # the first tokens of the probe prompts
    found = discover(hf_model.to(dtype))
    assert (found.attn_out, found.mlp_out, found.unsplit) == (expected.attn_out, expected.mlp_out, expected.unsplit)


def test_looking_leaves_no_hook_behind() -> None:
    hf_model, _ = tiny_llama()
    discover(hf_model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf_model.modules())
    hf_model.model.norm.forward = lambda value: value[0]  # a module that breaks the pass
    with pytest.raises(ModelError):
        discover(hf_model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf_model.modules())


def test_names_hold_on_a_model_with_injected_adapters(tmp_path: Any) -> None:
    from peft import PeftModel

    hf_model, _ = tiny_llama()
    plain = discover(hf_model)
    wrapped = PeftModel.from_pretrained(hf_model, str(tiny_adapter(hf_model, tmp_path))).eval()
    inside = discover(wrapped.base_model.model)
    assert isinstance(inside, Structure)
    assert inside == plain


def test_a_bidirectional_model_is_refused() -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    with pytest.raises(ModelError, match="later ones, so it is no causal language model"):
        discover(BertForMaskedLM(config).eval())


def test_a_model_without_unembedding_is_refused() -> None:
    hf_model, _ = tiny_llama()
    with pytest.raises(ModelError, match="LlamaModel has no unembedding"):
        discover(hf_model.model)


def test_an_encoder_decoder_is_refused_in_one_line() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    with pytest.raises(ModelError) as caught:
        discover(T5ForConditionalGeneration(config).eval())
    assert "\n" not in str(caught.value)


def test_logits_that_the_lens_cannot_reproduce_are_refused() -> None:
    hf_model, _ = tiny_llama()
    forward = hf_model.forward

    def bent(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits + out.logits**2
        return out

    hf_model.forward = bent
    with pytest.raises(ModelError, match="does not reproduce the model's logits"):
        discover(hf_model)


def test_a_missing_final_norm_is_refused() -> None:
    hf_model, _ = tiny_llama()

    class Shift(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + 1

    hf_model.model.norm = nn.Sequential(Shift(), Shift())
    assert discover(hf_model).final_norm == "model.norm"
    forward = hf_model.lm_head.forward
    hf_model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    hf_model.lm_head.forward = forward
    with pytest.raises(ModelError, match="found no norm"):
        discover(hf_model)


def test_vocabulary_smaller_than_the_probe_prompt_still_works() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    assert discover(LlamaForCausalLM(config).eval()).heads == (2,)
