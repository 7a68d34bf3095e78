"""Sites: names, what lies between attention and MLP, and attention patterns of chosen layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations.batching import forward_arguments, pad
from activations.capturing import Plan, capture
from activations.errors import ModelError, StoreError
from activations.middle import middles
from activations.model import Model, from_modules
from activations.patterns import eager
from activations.positions import Conversation, Span
from activations.prompts import Prompt
from activations.sites import SITES, canonical, choose, named, taps
from activations.structure import first
from tests import tiny_models as tiny

KINDS = (
    *("llama", "qwen3", "gpt2", "gemma2", "neox", "moe", "hybrid", "granite", "cohere", "mistral", "qwen2"),
    *("qwen3_next", "gemma3", "gemma4", "gpt_oss", "olmo2", "phi3", "falcon"),
)
PARALLEL = ("neox", "cohere", "falcon")
SOFTMAX = {"hybrid": [3], "qwen3_next": [3], "gemma4": [0, 1, 2, 3]}
SINKS = ("gpt_oss",)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def any_model(kind: str) -> Model:
    return from_modules(*tiny.BUILDERS[kind]())


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def test_transformer_lens_names_are_read() -> None:
    from transformer_lens.utilities.components_utils import get_act_name

    for site in SITES[1:]:
        assert named(get_act_name(site, 3)) == (site, 3)
    assert canonical("hook_resid_mid") == canonical("resid_mid") == "resid_mid"
    assert canonical("blocks.2.hook_z") == canonical("blocks.2.attn.hook_z") == "blocks.2.z"
    assert canonical("attn.hook_pattern") == "pattern"
    assert canonical("blocks.-1.hook_out") == "blocks.-1.resid_post"
    with pytest.raises(StoreError, match="hook_embed leaves learned positions out; use embed"):
        canonical("hook_embed")
    for bad in ("blocks.1.embed", "blocks.x.hook_z", "hook_q", "blocks.1.attn.hook_k"):
        with pytest.raises(StoreError, match="unknown site"):
            canonical(bad)


def test_names_with_a_layer_choose_it(model: Model, tmp_path: Path) -> None:
    plan = Plan(sites=("blocks.2.hook_resid_post", "hook_z", "blocks.-3.hook_mlp_out"), layers=(1,))
    store = capture(model, model.encode(tiny.MESSAGES), plan, tmp_path / "s")
    assert store.layers == {"mlp_out": (0,), "resid_post": (2,), "z": (1,)}
    with pytest.raises(StoreError, match="no layer 3 in in-memory; it has layers 0 to 2"):
        choose(model, ["blocks.3.hook_z"], None)
    with pytest.raises(StoreError, match=r"no layer -9,3-2000 in in-memory; it has"):
        choose(model, ["z"], (1, *range(3, 2001), -9))


def test_names_give_what_transformer_lens_gives(model: Model, tmp_path: Path) -> None:
    """The same names, read from TransformerLens' cache of the same weights."""
    from transformer_lens.model_bridge import TransformerBridge

    prompts = model.encode(tiny.MESSAGES)
    names = ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.1.hook_resid_post", "blocks.1.attn.hook_z",
             "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern"]  # fmt: skip
    store = capture(model, prompts, Plan(sites=tuple(names)), tmp_path / "s")
    network = copy.deepcopy(model.hf_model)
    network.config.architectures = [type(network).__name__]
    network.set_attn_implementation("eager")
    tokenizer_folder = tmp_path / "tokenizer"
    model.tokenizer.save_pretrained(tokenizer_folder)
    bridge = TransformerBridge.boot_transformers(
        "tiny", hf_model=network, tokenizer=type(model.tokenizer).from_pretrained(tokenizer_folder), device="cpu"
    )
    for row, prompt in enumerate(prompts):
        _, cache = bridge.run_with_cache(torch.tensor([prompt.ids]))
        for name in names:
            site, _ = named(name)
            theirs = cache[name][0]
            if site == "pattern":
                width = store[site, 1].shape[1] // 4
                ours = store[site, 1][row].reshape(4, width)[:, : len(prompt.ids)]
                np.testing.assert_allclose(ours, theirs[:, -1].detach().numpy(), atol=5e-5, err_msg=name)
            else:
                expected = theirs[-1].detach().flatten().numpy()
                np.testing.assert_allclose(store[site, 1][row], expected, atol=5e-5, err_msg=name)


def test_middle_is_what_the_mlp_is_added_to(any_model: Model, kind: str, tmp_path: Path) -> None:
    if kind in PARALLEL:
        assert set(middles(any_model)) == {()}
        with pytest.raises(StoreError, match=r"no resid_mid in layers 0-2; .*\(parallel blocks\)"):
            choose(any_model, ["resid_mid"], None)
        return
    assert all(len(found) == 1 and found[0][1] for found in middles(any_model))  # an input of a module, in all of these
    if kind == "gemma4":  # the block adds a third part behind the MLP
        return
    prompts = any_model.encode(tiny.MESSAGES)
    store = capture(any_model, prompts, Plan(sites=("resid_pre", "resid_mid", "resid_post")), tmp_path / "s")
    # What the MLP adds, watched at the MLP itself: behind its norm where one stands there, times Granite's multiplier.
    multiplier = getattr(any_model.hf_model.config, "residual_multiplier", 1.0)
    for layer, block in enumerate(any_model.structure.blocks):
        inside = dict(any_model.module(block).named_children())
        last = inside.get("post_feedforward_layernorm", inside.get("mlp"))
        assert last is not None
        for row, prompt in enumerate(prompts):
            kept: list[torch.Tensor] = []
            handle = last.register_forward_hook(lambda m, a, o, kept=kept: kept.append(first(o)[0, -1].clone()))
            with torch.inference_mode():
                any_model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False)
            handle.remove()
            added = store["resid_mid", layer][row] + multiplier * kept[0].numpy()
            np.testing.assert_allclose(added, store["resid_post", layer][row], atol=5e-5)


def test_middle_as_a_sum_is_bit_for_bit_the_tensor(model: Model, tmp_path: Path, monkeypatch: Any) -> None:
    """Where no module receives it, the two tensors are added as the model adds them."""
    from activations import middle

    prompts = model.encode(tiny.MESSAGES)
    plan = Plan(sites=("resid_mid",), positions=("answer", "0"))
    literal = capture(model, prompts, plan, tmp_path / "a").stack("resid_mid")
    other = from_modules(model.hf_model, model.tokenizer)
    monkeypatch.setattr(middle, "_same", lambda value, wanted: False)
    summed = capture(other, prompts, plan, tmp_path / "b").stack("resid_mid")
    assert taps(other, ("resid_mid", 0)) == (("model.layers.0", True), ("model.layers.0.self_attn", False))
    np.testing.assert_array_equal(literal, summed)


def test_parallel_blocks_have_none_also_by_their_sum(monkeypatch: Any) -> None:
    neox = from_modules(*tiny.tiny_neox())
    assert neox.structure.attn_out[0] and neox.structure.mlp_out[0]
    assert middles(neox) == ((), (), ())


def eager_copy(model: Model) -> Any:
    """The same weights in a network that was eager from the start; Falcon cannot be switched, and ignores masks then."""
    config = copy.deepcopy(model.hf_model.config)
    network = type(model.hf_model)._from_config(config, attn_implementation="eager").eval()
    network.load_state_dict(model.hf_model.state_dict())
    return network


def references(network: Any, prompt: Prompt) -> list[np.ndarray]:
    """Attention of one unpadded prompt as transformers gives it, all layers eager: [head, query, key] a layer."""
    with torch.inference_mode():
        out = network(input_ids=torch.tensor([prompt.ids]), use_cache=False, output_attentions=True)
    return [layer[0].numpy() for layer in out.attentions if layer is not None]


def test_patterns_are_those_of_transformers(any_model: Model, kind: str, tmp_path: Path) -> None:
    prompts = any_model.encode(tiny.MESSAGES)
    layers = SOFTMAX.get(kind, [0, 1, 2])
    spans = [Conversation(m, [Span("start", 0, 7, 0)]) for m in tiny.MESSAGES]
    plan = Plan(sites=("pattern",), positions=("answer", "start/mean", "index:1"))
    implementation = any_model.hf_model.config._attn_implementation
    store = capture(any_model, prompts, plan, tmp_path / "s", spans=spans)
    assert store.layers == {"pattern": tuple(layers)}
    assert any_model.hf_model.config._attn_implementation == implementation
    width = max(len(prompt.ids) for prompt in prompts)
    assert store.manifest["content"]["pattern"] == {"width": width, "heads": {str(layer): 4 for layer in layers}}
    from activations.positions import resolve

    rows, network = resolve(any_model, prompts, plan.positions, spans), eager_copy(any_model)
    for n, prompt in enumerate(prompts):
        size = len(prompt.ids)
        for layer, expected in zip(layers, references(network, prompt), strict=True):
            for i, spot in enumerate(rows[n]):
                ours = store["pattern", layer][3 * n + i].reshape(4, width)
                np.testing.assert_allclose(ours[:, :size], expected[:, list(spot.tokens)].mean(1), atol=5e-5)
                assert not ours[:, size:].any()
                if kind in SINKS:  # a sink keeps a share aside
                    assert (ours.sum(axis=1) < 1).all()
                else:
                    np.testing.assert_allclose(ours.sum(axis=1), 1.0, atol=1e-5)


def test_only_the_layers_asked_for_are_eager(model: Model, tmp_path: Path) -> None:
    prompts = model.encode(tiny.MESSAGES)
    sdpa, counted = torch.nn.functional.scaled_dot_product_attention, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return sdpa(*args, **kwargs)

    configs = {id(m): m.config for m in model.hf_model.modules() if hasattr(m, "config")}
    state = model.hf_model.config.to_json_string()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        capture(model, prompts, Plan(sites=("blocks.1.pattern", "resid_post")), tmp_path / "s")
    assert len(counted) == 2
    assert all(m.config is configs[id(m)] for m in model.hf_model.modules() if hasattr(m, "config"))
    assert model.hf_model.config.to_json_string() == state


def test_eager_layers_change_the_rest_by_rounding_only(any_model: Model, tmp_path: Path) -> None:
    prompts = any_model.encode(tiny.MESSAGES)
    plain = capture(any_model, prompts, Plan(), tmp_path / "a").stack("resid_post")
    beside = capture(any_model, prompts, Plan(sites=("resid_post", "pattern")), tmp_path / "b").stack("resid_post")
    np.testing.assert_allclose(plain, beside, atol=5e-5)


def test_configuration_comes_back_after_an_exception(model: Model) -> None:
    mixer: Any = model.module("model.layers.1.self_attn")
    own = mixer.config
    with pytest.raises(RuntimeError, match="stop"), eager(model, [1]):
        assert mixer.config is not own
        assert mixer.config._attn_implementation == "eager"
        raise RuntimeError("stop")
    assert mixer.config is own
    assert own._attn_implementation == "sdpa"
    assert not mixer._forward_pre_hooks


def test_padded_and_unpadded_batches_take_the_mask_along(model: Model) -> None:
    """sdpa drops the mask of a batch without pads; eager attention must be causal all the same."""
    prompts = model.encode(tiny.MESSAGES)
    for batch in (prompts, [prompts[0], prompts[0]], prompts[:1]):
        arguments = forward_arguments(model.hf_model, pad(batch, "cpu", model.pad_id))
        with torch.inference_mode():
            plain = model.hf_model(**arguments).logits
            with eager(model, [0, 2]):
                watched = model.hf_model(**arguments).logits
        torch.testing.assert_close(plain[:, -1], watched[:, -1], atol=5e-5, rtol=0)


def test_layers_without_patterns_are_refused(tmp_path: Path) -> None:
    hybrid = from_modules(*tiny.tiny_hybrid())
    with pytest.raises(StoreError, match=r"no pattern in layers 0; it has pattern in layers 3.*no softmax attention"):
        choose(hybrid, ["pattern"], [0, 3], keys=5)
    assert choose(hybrid, ["pattern"], None, keys=5) == {("pattern", 3): 20}


def test_attention_that_returns_no_probabilities_is_refused(tmp_path: Path) -> None:
    model = from_modules(*tiny.tiny_llama())
    prompts = model.encode(tiny.MESSAGES)
    mixer = model.module("model.layers.1.self_attn")
    handle = mixer.register_forward_hook(lambda module, args, output: (output[0], None))
    with pytest.raises(ModelError, match="attention of layer 1 returns no probabilities for its 4 heads"):
        capture(model, prompts, Plan(sites=("pattern",)), tmp_path / "s")
    handle.remove()
    handle = mixer.register_forward_hook(lambda module, args, output: (output[0], output[1] * 0.5))
    with pytest.raises(
        ModelError, match=r"pattern layer 1 of 'in-memory' is not made of probabilities: .* sums to 0.5"
    ):
        capture(model, prompts, Plan(sites=("pattern",)), tmp_path / "t")
    handle.remove()
    assert not list(tmp_path.glob("*/shard*"))
