"""Tiny random models, tokenizers and adapters for tests: nothing is downloaded, every seed is fixed.

Weights are drawn wider than transformers' default (0.2 against 0.02) and norm weights are shaken, so that a mistake in
a norm, a head map or a patch shows far above the tolerances.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
WORDS = (
    *("Yes", "yes", "No", "no", "?", ".", ",", ":"),
    *("Amy", "Bob", "Cara", "Dan", "Eve", "Finn", "Gus", "Hana"),
    *("is", "Is", "taller", "shorter", "older", "than", "and", "not", "the", "who", "Answer", "or", "first"),
    *(f"w{i}" for i in range(24)),
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = {"yes": ("Yes", "yes", "YES"), "no": ("No", "no", "NO")}
"""The upper-case variants are unknown to the tokenizer on purpose."""

MESSAGES = (
    [{"role": "user", "content": "Amy is taller than Bob . Is Amy taller than Bob ? Answer yes or no"}],
    [{"role": "user", "content": "Is Bob taller than Cara ?"}],
    [
        {"role": "system", "content": "Answer yes or no"},
        {"role": "user", "content": "Dan is older than Eve . Is Eve ?"},
    ],
    [{"role": "user", "content": "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 ?"}],
)
"""Four conversations of different lengths."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with a chat template; words outside ``WORDS`` become ``[UNK]``."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), behavior="removed", invert=True)
    raw.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE,
        model_max_length=128,
    )


def finish(model: torch.nn.Module, seed: int) -> Any:
    """Draw weights wide and shake norms and biases, so that no part of a network is near to doing nothing."""
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif "norm" not in name and parameter.std() < 0.05:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _sizes(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _build(config: Any, tokenizer: PreTrainedTokenizerFast, seed: int) -> tuple[Any, PreTrainedTokenizerFast]:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation or "sdpa")
    return finish(model, seed), tokenizer


def tiny_llama(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Grouped-query attention: 4 heads, 2 key-value heads, width 32."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": layers},
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_qwen3(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Head width 16 with d_model 32 and 4 heads: cutting heads by d_model / n_heads is wrong here."""
    from transformers import Qwen3Config

    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": layers},
        head_dim=16,
        tie_word_embeddings=True,
    )
    return _build(config, tokenizer, seed)


def tiny_gpt2(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Learned positions, Conv1D projections with biases, LayerNorm."""
    from transformers import GPT2Config

    tokenizer = tiny_tokenizer()
    sizes = _sizes(tokenizer)
    sizes["n_positions"] = sizes.pop("max_position_embeddings")
    config = GPT2Config(**sizes, n_embd=32, n_layer=layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _build(config, tokenizer, seed)


def tiny_gemma2(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Sandwich norms, final softcap, attention softcap (eager attention only), scaled embeddings."""
    from transformers import Gemma2Config

    tokenizer = tiny_tokenizer()
    config = Gemma2Config(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": layers},
        head_dim=16,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=20.0,
        sliding_window=16,
        attn_implementation="eager",
    )
    return _build(config, tokenizer, seed)


def tiny_neox(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Attention and MLP read the same input and are added together (parallel residual)."""
    from transformers import GPTNeoXConfig

    tokenizer = tiny_tokenizer()
    config = GPTNeoXConfig(
        **_sizes(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_parallel_residual=True,
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_moe(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """A mixture of experts after each attention."""
    from transformers import Qwen3MoeConfig

    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        **_sizes(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_hybrid(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Three linear-attention layers and one of softmax attention (Qwen3.5), gated, norms of the (1 + w) kind."""
    from transformers import Qwen3_5TextConfig

    tokenizer = tiny_tokenizer()
    config = Qwen3_5TextConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": 4},
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_granite(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Logits divided by a constant, residual additions and embeddings multiplied by others."""
    from transformers import GraniteConfig

    tokenizer = tiny_tokenizer()
    config = GraniteConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": layers},
        logits_scaling=4.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_cohere(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Logits multiplied by a constant, parallel blocks, tied embeddings."""
    from transformers import CohereConfig

    tokenizer = tiny_tokenizer()
    config = CohereConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": layers},
        logit_scale=0.25,
    )
    return _build(config, tokenizer, seed)


def tiny_mistral(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """A sliding window of 6 tokens, shorter than every prompt: a pad must not take a place in it."""
    from transformers import MistralConfig

    tokenizer = tiny_tokenizer()
    config = MistralConfig(**_sizes(tokenizer), **_SHAPE, head_dim=8, sliding_window=6, tie_word_embeddings=False)
    return _build(config, tokenizer, seed)


def tiny_qwen2(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Biases on queries, keys and values."""
    from transformers import Qwen2Config

    tokenizer = tiny_tokenizer()
    return _build(Qwen2Config(**_sizes(tokenizer), **_SHAPE, tie_word_embeddings=False), tokenizer, seed)


def tiny_qwen3_next(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Linear attention in three layers of four, and a mixture of experts with a shared one after each mixer."""
    from transformers import Qwen3NextConfig

    tokenizer = tiny_tokenizer()
    config = Qwen3NextConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": 4},
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_gemma3(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Sandwich norms, and layers with a short window between layers without."""
    from transformers import Gemma3TextConfig

    tokenizer = tiny_tokenizer()
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**_sizes(tokenizer), **_SHAPE, head_dim=16, sliding_window=6, layer_types=kinds)
    return _build(config, tokenizer, seed)


def tiny_gemma4(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Wider heads in full layers, keys shared between layers, a third addition in each block, and a scaled output."""
    from transformers import Gemma4TextConfig

    tokenizer = tiny_tokenizer()
    config = Gemma4TextConfig(
        **_sizes(tokenizer),
        **{**_SHAPE, "num_hidden_layers": 4},
        head_dim=16,
        global_head_dim=32,
        sliding_window=6,
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=5.0,
    )
    model, tokenizer = _build(config, tokenizer, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # 1.0 unless a checkpoint says otherwise, as those of Gemma 4 do
            buffer.fill_(0.7)
    return model, tokenizer


def tiny_gpt_oss(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Attention sinks: a learned entry in each softmax, which only written-out attention has; experts with biases."""
    from transformers import GptOssConfig

    tokenizer = tiny_tokenizer()
    config = GptOssConfig(
        **_sizes(tokenizer),
        **_SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return _build(config, tokenizer, seed)


def tiny_olmo2(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Norms behind attention and MLP only: the MLP reads the residual stream itself."""
    from transformers import Olmo2Config

    tokenizer = tiny_tokenizer()
    return _build(Olmo2Config(**_sizes(tokenizer), **_SHAPE, tie_word_embeddings=False), tokenizer, seed)


def tiny_phi3(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """One projection for queries, keys and values, and one for gate and up."""
    from transformers import Phi3Config

    tokenizer = tiny_tokenizer()
    return _build(Phi3Config(**_sizes(tokenizer), **_SHAPE, tie_word_embeddings=False), tokenizer, seed)


def tiny_falcon(seed: int = 0) -> tuple[Any, PreTrainedTokenizerFast]:
    """Parallel attention, one key-value head for all queries, and blocks that return tuples."""
    from transformers import FalconConfig

    tokenizer = tiny_tokenizer()
    sizes = {key: value for key, value in _sizes(tokenizer).items() if key != "max_position_embeddings"}
    config = FalconConfig(
        **sizes,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        alibi=False,
        bias=False,
    )
    return _build(config, tokenizer, seed)


BUILDERS: dict[str, Callable[[], tuple[Any, PreTrainedTokenizerFast]]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "gemma2": tiny_gemma2,
    "neox": tiny_neox,
    "moe": tiny_moe,
    "hybrid": tiny_hybrid,
    "granite": tiny_granite,
    "cohere": tiny_cohere,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3_next": tiny_qwen3_next,
    "gemma3": tiny_gemma3,
    "gemma4": tiny_gemma4,
    "gpt_oss": tiny_gpt_oss,
    "olmo2": tiny_olmo2,
    "phi3": tiny_phi3,
    "falcon": tiny_falcon,
}
"""One model for each structure that has its own trap."""


def tiny_adapter(
    hf_model: Any,
    directory: Path | str,
    seed: int = 0,
    *,
    targets: tuple[str, ...] = (),
    base_name: str | None = None,
    zero: bool = False,
    with_embeddings: bool = False,
) -> Path:
    """Save a PEFT LoRA for this model, rank 4, with a non-zero B unless ``zero``, out-projection included.

    The model given is left as it was: the adapter is made on a copy.
    """
    import copy

    from peft import LoraConfig, get_peft_model

    if not targets:
        names = {name.rpartition(".")[2] for name, _ in hf_model.named_modules()}
        known = ("q_proj", "v_proj", "o_proj", "c_attn", "c_proj", "query_key_value", "qkv_proj", "dense", "out_proj")
        experts = any(parameter.ndim == 3 for name, parameter in hf_model.named_parameters() if "down_proj" in name)
        # PEFT takes this name for the experts' joint weights too, and targets parameters instead of modules then
        targets = tuple(name for name in (*known, *(() if experts else ("down_proj",))) if name in names)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        peft_model = get_peft_model(
            copy.deepcopy(hf_model), LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name and not zero:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
    peft_model.peft_config["default"].base_model_name_or_path = base_name
    peft_model.peft_config["default"].inference_mode = True
    peft_model.save_pretrained(str(directory), save_embedding_layers=with_embeddings)
    return Path(directory)
