"""Adapters: equal to PEFT, switched exactly, and refused wherever they would silently do nothing."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from activations import answer_tokens, from_modules, read
from activations.adapters import names_of
from activations.checks import check
from activations.errors import ModelError
from activations.model import Model, load
from activations.readout import from_logits
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_llama, tiny_qwen3

WEIGHTS = "adapter_model.safetensors"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _difference(model: Model) -> torch.Tensor:
    """One prompt a batch: padding is tested elsewhere."""
    return read(model, model.encode(MESSAGES), answer_tokens(model, ANSWERS), batch_tokens=1).difference


@pytest.mark.parametrize("name", BUILDERS)
def test_an_adapter_gives_pefts_numbers_and_the_base_comes_back(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    folder = tiny_adapter(hf_model, tmp_path / "one")
    model = from_modules(hf_model, tokenizer)
    base = _difference(model)
    model.attach(str(folder))
    assert torch.equal(_difference(model), base)
    with model.use("one"):
        assert model.active == "one"
        ours = _difference(model)
    assert model.active is None
    assert torch.equal(_difference(model), base)

    peft_model = PeftModel.from_pretrained(BUILDERS[name]()[0], str(folder)).eval()
    with torch.inference_mode():
        logits = [peft_model(torch.tensor([prompt.ids])).logits[:, -1] for prompt in model.encode(MESSAGES)]
    theirs = from_logits(torch.cat(logits), answer_tokens(model, ANSWERS)).difference
    assert (ours - theirs).abs().max() < 5e-5
    assert (ours - base).abs().max() > 1e-3


FORMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rank-stabilised": ("llama", {"target_modules": ["q_proj", "o_proj"], "use_rslora": True}, 0),
    "DoRA": ("llama", {"target_modules": ["q_proj", "o_proj"], "use_dora": True}, 0),
    "bias in B": ("llama", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}, 0),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, 0),
    "joint experts": ("moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, 0),
    "unembedding": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1),
    "unembedding, tied": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1),
    "embedding, tied": ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, 1),
    "both, tied": (
        "qwen3",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        2,
    ),
    "norms": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, 7),
    "MLPs": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, 9),
    "all biases": ("neox", {"target_modules": ["query_key_value"], "bias": "all"}, 19),
    "all biases, Conv1D": ("gpt2", {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}, 19),
    "targets' biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}, 3),
}
"""What PEFT can train: model, configuration, and the number of whole tensors that it brings."""


def _trained(hf_model: Any, folder: Path, **options: Any) -> Path:
    """An adapter whose every trained tensor has moved."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
        peft_model = get_peft_model(copy.deepcopy(hf_model), config)
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
        peft_model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_lora_gives_pefts_numbers_and_the_base_comes_back(form: str, tmp_path: Path) -> None:
    name, options, whole = FORMS[form]
    hf_model, tokenizer = BUILDERS[name]()
    folder = _trained(hf_model, tmp_path / "one", **options)
    weights = {key: tensor.clone() for key, tensor in hf_model.state_dict().items()}
    model = from_modules(hf_model, tokenizer, adapters=[str(folder)])
    assert len(model.identity["adapters"]["one"]["replaces"]) == whole
    base = _difference(model)
    with model.use("one"):
        ours = _difference(model)
        with model.use(None):
            assert torch.equal(_difference(model), base)
        assert torch.equal(_difference(model), ours)
    assert torch.equal(_difference(model), base)
    here = {key.replace(".base_layer", ""): tensor for key, tensor in hf_model.state_dict().items()}
    assert all(torch.equal(tensor, here[key]) for key, tensor in weights.items())
    assert all(row.ok for row in check(model, model.encode(MESSAGES)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = PeftModel.from_pretrained(BUILDERS[name]()[0], str(folder)).eval()
    with torch.inference_mode():
        logits = [peft_model(torch.tensor([prompt.ids])).logits[:, -1] for prompt in model.encode(MESSAGES)]
    theirs = from_logits(torch.cat(logits), answer_tokens(model, ANSWERS)).difference
    assert (ours - theirs).abs().max() < 5e-5
    assert (ours - base).abs().max() > 1e-3


def test_adapters_that_replace_weights_mix_with_others_and_survive_exceptions(tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["qwen2"]()
    folders = [
        _trained(hf_model, tmp_path / "head", target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
        _trained(hf_model, tmp_path / "bias", target_modules=["q_proj", "v_proj"], bias="lora_only"),
        tiny_adapter(hf_model, tmp_path / "plain"),
    ]
    alone = {}
    for folder in folders:
        model = from_modules(*BUILDERS["qwen2"](), adapters=[str(folder)])
        with model.use(folder.name):
            alone[folder.name] = _difference(model)
    model = from_modules(hf_model, tokenizer, adapters=[str(folder) for folder in folders])
    base = _difference(model)
    for one in ("head", "bias", "plain", "head"):
        for two in ("plain", "head", "bias", None):
            with pytest.raises(RuntimeError, match="boom"), model.use(one):
                with model.use(two):
                    assert torch.equal(_difference(model), base if two is None else alone[two])
                assert torch.equal(_difference(model), alone[one])
                raise RuntimeError("boom")
            assert torch.equal(_difference(model), base)
    assert len({id(parameter) for parameter in hf_model.parameters()}) == len(list(hf_model.parameters()))


def test_trained_biases_that_are_not_in_the_file_are_missed(tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["gpt2"]()
    folder = _trained(hf_model, tmp_path / "one", target_modules=["c_attn"], bias="all", fan_in_fan_out=True)
    _broken(folder, lambda config, tensors: tensors.pop("base_model.model.transformer.h.1.ln_1.bias"))
    with pytest.raises(ModelError, match=r"retrained 'transformer\.h\.1\.ln_1\.bias' and its file has nothing"):
        from_modules(hf_model, tokenizer, adapters=[str(folder)])


def test_a_refused_adapter_on_joint_experts_leaves_no_trace(tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["moe"]()
    folder = _trained(hf_model, tmp_path / "one", target_modules=["q_proj"], target_parameters=EXPERTS)
    _broken(folder, _nan_b)
    names = [(name, type(module)) for name, module in hf_model.named_modules()]
    model = from_modules(hf_model, tokenizer)
    base = _difference(model)
    with pytest.raises(ModelError, match="infinite or NaN"):
        model.attach(str(folder))
    assert [(name, type(module)) for name, module in hf_model.named_modules()] == names
    assert torch.equal(_difference(model), base)


def test_switching_takes_milliseconds(tmp_path: Path) -> None:
    """Three adapters on the built-in model, without reloading or merging; the bound is generous for a busy machine."""
    model = load("builtin", adapters=("builtin", "builtin"))
    plain = load("builtin", verify=False).hf_model
    model.attach(str(_trained(plain, tmp_path / "head", target_modules=["q_proj"], modules_to_save=["norm"])))
    names = (*model.adapter_names, None)
    took = []
    for turn in range(60):
        start = perf_counter()
        with model.use(names[turn % len(names)]):
            took.append(perf_counter() - start)
    assert median(took) <= 0.050, f"median {1000 * median(took):.1f} ms"


def test_several_adapters_nest_and_restore(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    folders = [tiny_adapter(hf_model, tmp_path / "a.b", 1), tiny_adapter(hf_model, tmp_path / "c", 2)]
    mlp_only = tiny_adapter(hf_model, tmp_path / "mlp", 3, targets=("down_proj",))
    model = from_modules(hf_model, tokenizer, adapters=[*map(str, folders), str(mlp_only)])
    assert model.adapter_names == ("a.b", "c", "mlp")
    base = _difference(model)
    alone = {}
    for name in model.adapter_names:
        with model.use(name):
            alone[name] = _difference(model)
    with model.use("a.b"):
        with model.use("mlp"):
            assert torch.equal(_difference(model), alone["mlp"])
        assert torch.equal(_difference(model), alone["a.b"])
        with pytest.raises(RuntimeError, match="boom"), model.use("c"):
            raise RuntimeError("boom")
        assert model.active == "a.b"
        with model.use(None):
            assert torch.equal(_difference(model), base)
        assert torch.equal(_difference(model), alone["a.b"])
    assert torch.equal(_difference(model), base)
    assert len({tuple(values.tolist()) for values in alone.values()}) == 3


def test_names_are_made_unique(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    one, two = tiny_adapter(hf_model, tmp_path / "x" / "run", 1), tiny_adapter(hf_model, tmp_path / "y" / "run", 2)
    model = from_modules(hf_model, tokenizer, adapters=[str(one), str(two)])
    assert model.adapter_names == ("run", "run-2")
    assert model.attach(str(one), name="grpo") == "grpo"
    hashes = [model.identity["adapters"][name]["weights"] for name in model.adapter_names]
    assert hashes[0] == hashes[2] != hashes[1]
    json.dumps(model.identity)


def test_an_unknown_adapter_is_named_with_the_known_ones(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer, name="tiny", adapters=[str(tiny_adapter(hf_model, tmp_path / "grpo"))])
    with pytest.raises(ModelError, match=r"no adapter 'sft' on model 'tiny' \(adapters: grpo\)"), model.use("sft"):
        pass


def test_a_hook_by_name_sees_the_adapters_part(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    name = str(model.structure.out_projections[1])
    kept_before_attaching = model.module(name)
    model.attach(str(tiny_adapter(hf_model, tmp_path / "one", targets=("o_proj",))))
    seen: dict[str, torch.Tensor] = {}

    def keep(key: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen[key] = output.clone()

        return after

    handles = [
        kept_before_attaching.register_forward_hook(keep("old module")),
        model.module(name).register_forward_hook(keep("by name")),
        model.module(str(model.structure.attn_out[1])).register_forward_hook(
            lambda module, args, output: keep("added to the residual")(module, args, output[0])
        ),
    ]
    with model.use("one"):
        _difference(model)
    assert torch.equal(seen["by name"], seen["added to the residual"])
    assert not torch.equal(seen["old module"], seen["by name"])
    for handle in handles:
        handle.remove()


def test_switching_leaves_flags_and_modes_alone(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in hf_model.named_parameters()}
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    with model.use("one"):
        pass
    after = {name.replace(".base_layer", ""): p.requires_grad for name, p in hf_model.named_parameters()}
    assert {name: flag for name, flag in after.items() if "lora" not in name} == before
    assert not any(flag for name, flag in after.items() if "lora" in name)
    assert not any(module.training for module in hf_model.modules())


def _broken(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def _zero_b(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        if "lora_B" in key:
            tensors[key] = torch.zeros_like(tensors[key])


def _rename(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for key in list(tensors):
        tensors[key.replace("model.layers", "model.language_model.layers")] = tensors.pop(key)


def _drop_one(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"]


def _narrow(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    key = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    tensors[key] = tensors[key][:, :16].contiguous()


def _other_rank(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["r"] = 2


def _only_a(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if "lora_B" in key]:
        del tensors[key]


def _nan(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key] = torch.full_like(tensors[key], float("nan"))


def _other_vocabulary(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["modules_to_save"] = ["lm_head"]
    tensors["base_model.model.lm_head.weight"] = torch.zeros(40, 32)


def _nan_b(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({key: tensor * 1e38 for key, tensor in tensors.items()})


def _set(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: config.update({key: value})


REFUSED = {
    "zero": (_zero_b, "only zeros in lora_B, so it changes nothing"),
    "renamed": (_rename, r"made for another base: this model has no module 'model\.language_model"),
    "incomplete": (_drop_one, r"does not fit: the file has nothing for 'model\.layers\.0\.self_attn\.o_proj\.lora_A"),
    "narrow": (_narrow, r"made for another base: .*lora_A\.weight is \[4, 16\] but .* is 32 -> 32"),
    "rank": (_other_rank, "made for another base or PEFT version"),
    "no B": (_only_a, "holds no lora_B tensor"),
    "not finite": (_nan, "infinite or NaN"),
    "type": (_set("peft_type", "NONSENSE"), "peft_type 'NONSENSE', which is unknown; give a LORA"),
    "IA3": (_set("peft_type", "IA3"), "peft_type 'IA3', which is supported by PEFT but not here"),
    "saved modules": (_set("modules_to_save", ["lm_head"]), "retrained 'lm_head.weight' and its file has nothing for"),
    "no such module": (_set("modules_to_save", ["score"]), "retrained 'score' and its file has nothing for it"),
    "saved shape": (_other_vocabulary, r"brings lm_head\.weight of \[40, 32\] and this model has one of \[60, 32\]"),
    "tokens": (_set("trainable_token_indices", [1, 2]), r"trainable_token_indices=\[1, 2\], which cannot be switched"),
    "replicated": (_set("layer_replication", [[0, 2], [1, 3]]), "layer_replication=.* which cannot be switched off"),
    "changed base": (_set("init_lora_weights", "pissa"), "init_lora_weights='pissa': it was trained on changed base"),
    "base": (_set("base_model_name_or_path", "org/Other-7B"), "made for 'org/Other-7B' and this model is 'tiny'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_would_mislead_is_refused_and_leaves_no_trace(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    hf_model, tokenizer = tiny_llama()
    hf_model.config._name_or_path = "org/Tiny-1M"
    folder = _broken(tiny_adapter(hf_model, tmp_path / "bad"), change)
    model = from_modules(hf_model, tokenizer, name="tiny")
    base, names = _difference(model), [name for name, _ in hf_model.named_modules()]
    with pytest.raises(ModelError, match=message) as caught:
        model.attach(str(folder))
    assert "\n" not in str(caught.value)
    assert [name for name, _ in hf_model.named_modules()] == names
    assert not hasattr(hf_model, "peft_config")
    assert torch.equal(_difference(model), base)
    assert model.adapter_names == ()


def test_a_refused_adapter_leaves_the_earlier_one_working(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    good = tiny_adapter(hf_model, tmp_path / "good")
    bad = _broken(tiny_adapter(hf_model, tmp_path / "bad", 2), _drop_one)
    model = from_modules(hf_model, tokenizer, adapters=[str(good)])
    with model.use("good"):
        before = _difference(model)
    with pytest.raises(ModelError):
        model.attach(str(bad))
    with model.use("good"):
        assert torch.equal(_difference(model), before)
    assert model.attach(str(tiny_adapter(BUILDERS["llama"]()[0], tmp_path / "third", 4))) == "third"


def test_an_adapter_of_a_model_with_other_shapes_is_refused(tmp_path: Path) -> None:
    other, _ = tiny_qwen3()
    hf_model, tokenizer = tiny_llama()
    folder = tiny_adapter(other, tmp_path / "other")
    with pytest.raises(ModelError, match="made for another base"):
        from_modules(hf_model, tokenizer, adapters=[str(folder)])


def test_any_base_overrides_the_recorded_name(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.config._name_or_path = "org/Tiny-1M"
    folder = tiny_adapter(hf_model, tmp_path / "one", base_name="org/Renamed")
    model = from_modules(hf_model, tokenizer)
    with pytest.raises(ModelError, match="any_base"):
        model.attach(str(folder))
    assert model.attach(str(folder), any_base=True) == "one"


@pytest.mark.parametrize("recorded", ["org/Tiny-1M", "/home/someone/tiny-1m/", "C:\\models\\Tiny-1M", "IN-MEMORY"])
def test_the_base_name_is_compared_by_its_last_part(recorded: str, tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    hf_model.config._name_or_path = "org/Tiny-1M"
    model = from_modules(hf_model, tokenizer)
    assert model.attach(str(tiny_adapter(hf_model, tmp_path / "one", base_name=recorded))) == "one"


def test_a_hub_cache_folder_counts_as_its_model() -> None:
    assert names_of("/c/hub/models--Qwen--Qwen3-0.6B/snapshots/abc") == {"qwen3-0.6b"}
    assert names_of(None, "", "a/b") == {"b"}


def test_folders_that_are_no_adapter(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    tiny_adapter(hf_model, tmp_path / "runs" / "last")
    with pytest.raises(ModelError, match=r"no adapter_config\.json; give one of its folders \['last'\]"):
        model.attach(str(tmp_path / "runs"))
    with pytest.raises(ModelError, match=r"is no folder; give a folder with adapter_config\.json"):
        model.attach(str(tmp_path / "nowhere"))
    (tmp_path / "runs" / "last" / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        model.attach(str(tmp_path / "runs" / "last"))
    (tmp_path / "runs" / "last" / WEIGHTS).write_bytes(b"not a tensor file")
    with pytest.raises(ModelError, match="is damaged"):
        model.attach(str(tmp_path / "runs" / "last"))
    (tmp_path / "runs" / "last" / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        model.attach(str(tmp_path / "runs" / "last"))


@pytest.mark.parametrize("with_embeddings", [False, True])
def test_an_adapter_on_the_unembedding_is_read_through(with_embeddings: bool, tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    folder = tiny_adapter(hf_model, tmp_path / "head", targets=("lm_head",), with_embeddings=with_embeddings)
    model = from_modules(hf_model, tokenizer, adapters=[str(folder)])
    with model.use("head"), torch.inference_mode():
        logits = torch.cat([hf_model(torch.tensor([p.ids])).logits[:, -1] for p in model.encode(MESSAGES)])
        assert (_difference(model) - from_logits(logits, answer_tokens(model, ANSWERS)).difference).abs().max() < 5e-5


def test_an_adapter_that_brings_other_base_weights_is_refused(tmp_path: Path) -> None:
    other, _ = tiny_llama(seed=5)
    folder = tiny_adapter(other, tmp_path / "head", targets=("lm_head",), with_embeddings=True)
    with pytest.raises(ModelError, match=r"brings a weight of the base itself \(.*weight\)"):
        from_modules(*tiny_llama(), adapters=[str(folder)])
