"""Architectures outside the matrix: whatever is not known by name either passes every check or is refused with the reason.

Built from nothing but sizes, the way a model that comes out next month would meet this package.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from activations import from_modules
from activations.checks import check, self_test
from activations.errors import ModelError
from tests.tiny_models import MESSAGES, finish, tiny_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
STATE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
SOUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": ({**LATENT, **EXPERTS, "num_key_value_heads": 4, "first_k_dense_replace": 1}, {"d_head": (12,) * 4}),
    "bloom": ({"n_layer": 4, "n_head": 4}, {"heads": (4,) * 4}),
    "mamba": ({"state_size": 8}, {"attention": ("other",) * 4, "heads": (None,) * 4}),
    "bamba": (
        {**STATE, "attn_layer_indices": [1], "mamba_d_ssm": 64},
        {"attention": ("other", "softmax", "other", "other"), "heads": (None, 4, None, None)},
    ),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, {"attn_out": (None,) * 4}),
    "phi": ({}, {"heads": (4,) * 4}),
    "stablelm": ({}, {"heads": (4,) * 4}),
    "exaone4": ({}, {"heads": (4,) * 4}),
    "llama4_text": ({"num_local_experts": 4, "head_dim": 8}, {"mlp_out": (None,) * 4}),
}
"""Model type: what its configuration needs besides sizes, and what must be found."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "openai-gpt": (
        {"n_embd": 32, "n_layer": 4, "n_head": 4},
        "found no norm between the last block and the unembedding",
    ),
    "falcon_h1": (
        {**STATE, "mamba_d_ssm": 64, "head_dim": 8},
        r"reads 64 features but attention has 4 heads of 8; its heads cannot be cut",
    ),
    "rwkv": ({"attention_hidden_size": 32}, "fails its self-test 'padded = single, logits'"),
    "recurrent_gemma": ({"attention_window_size": 6, "lru_width": 32}, "fails its self-test 'padded = single"),
}
"""Model type: its configuration, and why its numbers would be wrong (the last two read their pads)."""


def _build(kind: str, extra: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    known = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**known, **SIZES, **extra})
        return finish(AutoModelForCausalLM.from_config(config), 0), tokenizer


@pytest.mark.parametrize("kind", SOUND)
def test_unknown_architectures_pass_the_whole_table(kind: str) -> None:
    extra, expected = SOUND[kind]
    model = from_modules(*_build(kind, extra))
    self_test(model)
    assert [row.name for row in check(model, model.encode(MESSAGES)) if not row.ok] == []
    assert {field: getattr(model.structure, field) for field in expected} == expected


@pytest.mark.parametrize("kind", REFUSED)
def test_or_are_refused_with_the_reason(kind: str) -> None:
    extra, reason = REFUSED[kind]
    hf_model, tokenizer = _build(kind, extra)
    with pytest.raises(ModelError, match=reason) as caught:
        self_test(from_modules(hf_model, tokenizer))
    assert "\n" not in str(caught.value)
