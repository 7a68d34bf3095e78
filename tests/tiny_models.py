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


def _finish(model: torch.nn.Module, seed: int) -> Any:
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


def _build(config: Any, tokenizer: PreTrainedTokenizerFast, seed: int) -> tuple[Any, PreTrainedTokenizerFast]:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=config._attn_implementation or "sdpa")
    return _finish(model, seed), tokenizer


def tiny_llama(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Grouped-query attention: 4 heads, 2 key-value heads, width 32."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        **_sizes(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return _build(config, tokenizer, seed)


def tiny_qwen3(seed: int = 0, layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    """Head width 16 with d_model 32 and 4 heads: cutting heads by d_model / n_heads is wrong here."""
    from transformers import Qwen3Config

    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        **_sizes(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
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
        known = ("q_proj", "v_proj", "o_proj", "c_attn", "c_proj", "query_key_value", "dense", "out_proj", "down_proj")
        targets = tuple(name for name in known if name in names)
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
