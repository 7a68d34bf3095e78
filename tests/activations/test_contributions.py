"""Parts of a readout: they add up in every structure, and agree with autograd, TransformerLens and zeroed weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from activations import answer_tokens, contributions, from_modules, load, read
from activations.additions import additions
from activations.backends import backend
from activations.capturing import Plan, capture
from activations.contributions import BOUND, Contributions, components, required_sites, split_rows
from activations.errors import ModelError, StoreError
from activations.frozen import FrozenNorm
from activations.model import Model
from activations.readout import AnswerTokens
from activations.sites import named
from activations.store import ActivationStore
from tasks.ordering import Ordering
from tests.activations.test_other_architectures import SOUND, _build
from tests.numerics.test_float64 import Wide
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter

split = contributions.contributions
QUICK = ("llama", "gpt2", "hybrid", "gemma2", "gemma4", "granite", "falcon")


def _model(name: str, **given: Any) -> Model:
    return from_modules(*BUILDERS[name](), **given)


def _store(model: Model, folder: Path, *more: str, **plan: Any) -> tuple[ActivationStore, AnswerTokens]:
    answers = answer_tokens(model, ANSWERS)
    wanted = Plan(sites=(*required_sites(model), *more), **plan)
    return capture(model, model.encode(MESSAGES), wanted, folder, answers=answers), answers


def _in_memory(model: Model) -> Callable[[str, int], Tensor]:
    """Rows of the required sites as the network made them, at its own precision."""
    places = [(site, layer or 0) for site, layer in map(named, required_sites(model))]
    with backend("hf").open(model) as session:
        rows = session.run(model.encode(MESSAGES), places).activations
    return lambda site, layer: rows[site, layer]


def _sum(values: dict[str, Any], kinds: tuple[str, ...]) -> Any:
    return sum(values[kind] for kind in kinds)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_parts_of_every_structure_add_up_to_the_readout(name: str, tmp_path: Path) -> None:
    model = _model(name)
    store, answers = _store(model, tmp_path)
    found = split(model, store, answers)
    logit = store.readout["logit"].astype(np.float64)
    assert found.readout == pytest.approx(logit[:, 0] - logit[:, 1], abs=0)
    assert found.values.sum(axis=0) == pytest.approx(found.readout, abs=1e-12)
    assert found.gap <= 5e-6 and np.abs(found.residual).max() <= 5e-6
    assert found.names == tuple(part.name for part in components(model)) and len(set(found.names)) == len(found.names)
    heads = [model.heads(layer) or 0 for layer in range(model.n_layers)]
    assert sum(part.kind == "head" for part in found.components) == sum(heads)
    spread = {part.kind: np.abs(found.values[i]).max() for i, part in enumerate(found.components)}
    assert spread["head"] > 1e-3 and spread["mlp"] > 1e-3 and spread["embed"] > 1e-4
    assert ("softcap" in spread) == (model.structure.softcap is not None)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS])
def test_and_with_an_adapter_in_use(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one", seed=2))])
    base, answers = _store(model, tmp_path / "base")
    with model.use("one"):
        other, _ = _store(model, tmp_path / "other")
        after = split(model, other, answers)
        with pytest.raises(ModelError, match=r"captured with the base and adapter 'one' is in use now; .*use\(None\)"):
            split(model, base, answers)
    before = split(model, base, answers)
    assert max(before.gap, after.gap) <= 5e-6
    assert before.names == after.names
    assert np.abs(after.readout - before.readout).max() > 1e-3
    with pytest.raises(ModelError, match=r"captured with adapter 'one' and the base is in use now; .*use\('one'\)"):
        split(model, other, answers)


def test_a_second_norm_that_centres_and_has_a_bias(tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["olmo2"]()
    for block in hf_model.model.layers:
        block.post_attention_layernorm = torch.nn.LayerNorm(32)
        torch.nn.init.normal_(block.post_attention_layernorm.weight)
        torch.nn.init.normal_(block.post_attention_layernorm.bias)
    model = from_modules(hf_model, tokenizer)
    store, answers = _store(model, tmp_path)
    found = split(model, store, answers)
    assert found.gap <= 5e-6
    assert np.abs(found.values[found.names.index("L1 bias")]).max() > 1e-2


def test_trained_weights(tmp_path: Path) -> None:
    """The built-in pair: base and adapter, on the questions it was trained for."""
    model = load("builtin", adapters=("builtin",))
    sets = islice(Ordering().generate({"n": 4, "names": "builtin"}, seed=3, split="test"), 8)
    prompts = model.encode([shown.chat() for matched in sets for shown in matched.presentations])
    answers, plan = answer_tokens(model, {"yes": ("Yes", "yes"), "no": ("No", "no")}), Plan(sites=required_sites(model))
    for arm in (None, model.adapter_names[0]):
        with model.use(arm):
            store = capture(model, prompts, plan, tmp_path / str(arm), answers=answers)
            found = split(model, store, answers)
        assert found.gap <= 2e-5 and np.abs(found.readout).max() > 1


def test_an_adapter_on_the_unembedding_counts(tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["llama"]()
    folder = tiny_adapter(hf_model, tmp_path / "one", targets=("lm_head", "o_proj", "down_proj"))
    model = from_modules(hf_model, tokenizer, adapters=[str(folder)])
    with model.use("one"):
        store, answers = _store(model, tmp_path / "store")
        assert split(model, store, answers).gap <= 5e-6
        name = model.structure.out_projections[0] or ""
        with torch.no_grad():  # the adapter's own part of a head, and no other head's
            model.module(name).lora_A[model.peft_names["one"]].weight[:, :8] = 0
            model.module(name).base_layer.weight[:, :8] = 0
        store, answers = _store(model, tmp_path / "again")
        found = split(model, store, answers)
    parts = dict(zip(found.names, found.values, strict=True))
    assert np.abs(parts["L0H0"]).max() == 0 and np.abs(parts["L0H1"]).max() > 1e-4


@pytest.mark.parametrize("name", BUILDERS)
def test_in_float64_nothing_is_missing(name: str) -> None:
    with Wide():
        hf_model, tokenizer = BUILDERS[name]()
        if any(parameter.ndim == 3 for parameter in hf_model.parameters()):
            hf_model.set_experts_implementation("eager")
        model = from_modules(hf_model.double(), tokenizer)
        answers = answer_tokens(model, ANSWERS)
        values, readout = split_rows(model, answers, _in_memory(model))
        wanted = read(model, model.encode(MESSAGES), answers).difference
    assert values.dtype == torch.float64
    assert (readout - wanted).abs().max() < 1e-12
    assert (values.sum(0) - wanted).abs().max() < 1e-12


def _frozen(kind: str, module: Any, rows: Tensor, at: Tensor) -> Tensor:
    """A norm written out, its scale from `at` and without a gradient."""
    if kind == "layer":
        scale = (at.var(-1, unbiased=False, keepdim=True) + module.eps).rsqrt()
        return (rows - rows.mean(-1, keepdim=True)) * scale.detach() * module.weight + module.bias
    eps = getattr(module, "variance_epsilon", None) or module.eps
    scale = (at.pow(2).mean(-1, keepdim=True) + eps).rsqrt().detach()
    return rows * scale * (module.weight + (kind == "plus one"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "plain"), ("gpt2", "layer"), ("gemma2", "plus one"), ("hybrid", "plus one"), ("neox", "layer")],
)
def test_each_part_is_its_gradient_share_with_the_norm_held(name: str, kind: str) -> None:
    """Brute force in float64: autograd through a norm written out, heads by masks."""
    with Wide():
        hf_model, tokenizer = BUILDERS[name]()
        model = from_modules(hf_model.double(), tokenizer)
        answers = answer_tokens(model, ANSWERS)
        rows = _in_memory(model)
        values, _ = split_rows(model, answers, rows)
    structure = model.structure
    ours = dict(zip((part.name for part in components(model)), values, strict=False))
    stream = rows("resid_post", model.n_layers - 1).clone().requires_grad_()
    normed = _frozen(kind, model.module(structure.final_norm), stream, stream)
    logits = model.module(structure.head)(normed) * structure.logit_scale
    if structure.softcap:
        logits = structure.softcap * torch.tanh(logits / structure.softcap)
    yes, no = (logits[:, list(ids)].logsumexp(-1) for ids in answers.ids)
    (u,) = torch.autograd.grad((yes - no).sum(), stream)
    assert torch.allclose(ours["embed"], (u * rows("embed", 0)).sum(-1), atol=1e-12)
    for layer in range(model.n_layers):
        module, heads = model.module(structure.out_projections[layer] or ""), structure.heads[layer] or 0
        z = rows("z", layer)
        post = additions(model)[layer].post

        def written(part: Tensor, module: Any = module, post: str | None = post, z: Tensor = z) -> Tensor:
            out = module(part)
            return out if post is None else _frozen(kind, model.module(post), out, module(z))

        with torch.no_grad():
            nothing = written(torch.zeros_like(z))
            assert torch.allclose(ours[f"L{layer} mlp"], (u * rows("mlp_out", layer)).sum(-1), atol=1e-12)
            assert torch.allclose(ours[f"L{layer} bias"], (u * nothing).sum(-1), atol=1e-12)
            for head, own in enumerate(torch.arange(z.shape[-1]).chunk(heads)):
                masked = torch.zeros_like(z).index_copy(-1, own, z[:, own])
                assert torch.allclose(ours[f"L{layer}H{head}"], (u * (written(masked) - nothing)).sum(-1), atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformer_lens_gives_the_same(name: str, tmp_path: Path) -> None:
    """Its norms folded into the weights, as its attribution needs; biases of values stay where they are."""
    pytest.importorskip("transformer_lens", reason="cross-library equality needs the library")
    model = _model(name)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, {"yes": ("Yes",), "no": ("No",)})
    store = capture(model, prompts, Plan(sites=required_sites(model)), tmp_path, answers=answers)
    found = split(model, store, answers)
    (yes,), (no,) = answers.ids
    with backend("transformer_lens").open(model) as session, torch.no_grad():
        bridge: Any = session.bridge  # type: ignore[attr-defined]
        bridge.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt.ids])
            _, cache = bridge.run_with_cache(ids, attention_mask=torch.ones_like(ids))
            heads, labels = cache.stack_head_results(return_labels=True, pos_slice=-1)
            theirs = dict(zip(labels, cache.logit_attrs(heads, yes, no, pos_slice=-1).flatten().tolist(), strict=True))
            whole, labels = cache.decompose_resid(return_labels=True, pos_slice=-1)
            theirs |= dict(zip(labels, cache.logit_attrs(whole, yes, no, pos_slice=-1).flatten().tolist(), strict=True))
            ours = dict(zip(found.names, found.values[:, row], strict=True))
            for layer in range(model.n_layers):
                own = [f"L{layer}H{head}" for head in range(4)]
                assert [ours[one] for one in own] == pytest.approx([theirs[one] for one in own], abs=1e-5)
                assert ours[f"L{layer} mlp"] == pytest.approx(theirs[f"{layer}_mlp_out"], abs=1e-5)
                assert _sum(ours, (*own, f"L{layer} bias")) == pytest.approx(theirs[f"{layer}_attn_out"], abs=1e-5)
            assert ours["embed"] == pytest.approx(theirs["embed"] + theirs.get("pos_embed", 0.0), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "hybrid"])
def test_a_head_whose_columns_are_zero_contributes_nothing(name: str, tmp_path: Path) -> None:
    model = _model(name)
    module: Any = model.module(model.structure.out_projections[1] or "")
    width = model.structure.d_head[1] or 0
    columns = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
    with torch.no_grad():
        columns[width : 2 * width] = 0
    store, answers = _store(model, tmp_path)
    parts = dict(zip(components(model), split(model, store, answers).values, strict=True))
    sizes = [np.abs(values).max() for part, values in parts.items() if (part.kind, part.layer) == ("head", 1)]
    assert sizes[1] == 0 and min(sizes[0], sizes[2], sizes[3]) > 1e-5


def test_remainders_are_what_they_are_called(tmp_path: Path) -> None:
    """One variant each has no entropy; the spelling is the difference of entropies over the variants."""
    model = _model("llama")
    prompts = model.encode(MESSAGES)
    one = answer_tokens(model, {"yes": ("Yes",), "no": ("No",)})
    store = capture(model, prompts, Plan(sites=required_sites(model)), tmp_path / "one", answers=one)
    assert np.abs(split(model, store, one).values[-2]).max() < 1e-12
    store, answers = _store(model, tmp_path / "two")
    found = split(model, store, answers)
    logits = model.logits(torch.from_numpy(store["resid_post", -1])).double()
    entropy = [torch.distributions.Categorical(logits=logits[:, list(ids)]).entropy() for ids in answers.ids]
    assert found.values[found.names.index("spelling")] == pytest.approx((entropy[0] - entropy[1]).numpy(), abs=1e-5)


def test_blocks_of_rows_chosen_rows_and_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("gemma2")
    store, answers = _store(model, tmp_path, batch_tokens=40)
    whole = split(model, store, answers)
    monkeypatch.setattr(contributions, "_BLOCK", 1)
    few = split(model, store, answers, rows=[3, 0, 2])
    assert few.rows.tolist() == [3, 0, 2]
    assert few.values == pytest.approx(whole.values[:, [3, 0, 2]], abs=1e-12)


@pytest.mark.parametrize(("weights", "stored"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
def test_half_precision_is_held_to_a_looser_bound(weights: torch.dtype, stored: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS["llama"]()
    model = from_modules(hf_model.to(weights), tokenizer)
    store, answers = _store(model, tmp_path, dtype=stored)
    found: Contributions = split(model, store, answers)
    assert BOUND < found.gap < 3e-2 and found.bound == 5e-2
    assert found.values.sum(axis=0) == pytest.approx(found.readout, abs=1e-12)
    with pytest.raises(ModelError, match=r"miss its readout by .* allowed 1e-04"):
        split(model, store, answers, bound=BOUND)


def test_the_layer_where_the_sum_goes_wrong_is_named(tmp_path: Path) -> None:
    model = _model("llama")
    store, answers = _store(model, tmp_path, "resid_post")
    module: Any = model.module(model.structure.out_projections[1] or "")
    with torch.no_grad():
        module.weight *= 1.01
    with pytest.raises(ModelError, match=r"the parts of row \d of .* miss its readout by .*; .* at layer 1; capture"):
        split(model, store, answers)
    with torch.no_grad():
        module.weight /= 1.01
        model.hf_model.lm_head.weight *= 1.01
    with pytest.raises(ModelError, match="its readout is not the stored one: this is another model"):
        split(model, store, answers)


@pytest.mark.parametrize(
    ("kind", "mixers"), [("llama4_text", 0), ("exaone4", 0), ("deepseek_v3", 0), ("mamba", 4), ("bamba", 3)]
)
def test_architectures_outside_the_matrix(kind: str, mixers: int, tmp_path: Path) -> None:
    """An MLP that is no module's output of that shape; latent attention; mixers without heads stay one part."""
    model = from_modules(*_build(kind, SOUND[kind][0]))
    store, answers = _store(model, tmp_path)
    found = split(model, store, answers)
    assert found.gap <= 5e-6
    assert sum(part.kind == "mixer" for part in found.components) == mixers


def test_or_are_refused_by_name() -> None:
    model = from_modules(*_build("opt", SOUND["opt"][0]), name="opt-like")
    with pytest.raises(ModelError, match="layer 0 of 'opt-like' cannot be taken apart into heads and MLP: no module"):
        required_sites(model)


def test_stores_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    model = _model("llama")
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    store = capture(model, prompts, Plan(sites=("resid_post", "embed", "z")), tmp_path / "a", answers=answers)
    with pytest.raises(StoreError, match=r"lacks mlp_out layers 0-2, .* sites of required_sites\(model\)"):
        split(model, store, answers)
    with pytest.raises(
        StoreError, match=r"holds the readout of \['yes', 'no'\] with tokens .* give two labels, the same"
    ):
        split(model, store, answer_tokens(model, {"no": ("No",), "yes": ("Yes",)}))
    store, _ = _store(model, tmp_path / "b", positions=("answer", "index:1"))
    assert split(model, store, answers).rows.tolist() == [0, 2, 4, 6]
    with pytest.raises(StoreError, match=r"row 1 of .* is at 'index:1' and not at the answer"):
        split(model, store, answers, rows=[1])


def test_sites_are_only_those_that_are_needed() -> None:
    sites = required_sites(_model("llama"))
    assert sites[0] == "embed" and "blocks.2.resid_post" in sites and "blocks.0.resid_post" not in sites
    assert {named(site)[0] for site in sites} == {"embed", "z", "mlp_out", "resid_post"}
    assert {named(site)[0] for site in required_sites(_model("granite"))} == {"embed", "z", "resid_mid", "resid_post"}
    keeps = {round(addition.keep, 6) for addition in additions(_model("gemma4"))}
    assert keeps == {0.7}


def test_what_is_no_norm_is_refused() -> None:
    model = _model("llama")
    name = model.structure.final_norm

    class Squashing(torch.nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.tanh(rows)

    model.hf_model.model.norm = Squashing()
    with pytest.raises(ModelError, match=f"{name} is no RMSNorm and no LayerNorm: with its scale frozen it differs by"):
        FrozenNorm.of(model, name).at(torch.randn(3, model.d_model).double())
