"""The same weights through TransformerLens and nnsight give the same numbers: 5e-5 absolute in float32.

The models are tiny and random, one for each structure with a trap of its own; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from activations import from_modules
from activations.checks import PEERS, check, run
from activations.peers import by_nnsight, by_transformer_lens
from tests.tiny_models import BUILDERS, MESSAGES, tiny_adapter

RUNNERS = {"transformer_lens": by_transformer_lens, "nnsight": by_nnsight}


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    for peer in PEERS:
        pytest.importorskip(peer, reason="cross-library equality needs the library")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("name", BUILDERS)
def test_logits_and_residuals_agree(name: str, peer: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer)
    prompts = model.encode(MESSAGES)
    ours, theirs = run(model, prompts), RUNNERS[peer](model, prompts)
    assert ours.residuals.shape == theirs.residuals.shape == (model.n_layers + 1, len(prompts), model.d_model)
    assert (ours.logits - theirs.logits).abs().max() < 5e-5
    assert (ours.residuals - theirs.residuals).abs().max() < 5e-5


@pytest.mark.parametrize(
    ("name", "peer"),
    [("llama", "transformer_lens"), ("qwen3", "transformer_lens"), ("llama", "nnsight"), ("gpt2", "nnsight")],
)
def test_they_agree_with_an_adapter_on(name: str, peer: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    prompts = model.encode(MESSAGES)
    base = run(model, prompts)
    with model.use("one"):
        ours, theirs = run(model, prompts), RUNNERS[peer](model, prompts)
    assert (ours.logits - theirs.logits).abs().max() < 5e-5
    assert (ours.residuals - theirs.residuals).abs().max() < 5e-5
    assert (ours.logits - base.logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_other_libraries_leave_our_model_alone(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    before = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    attention, side = hf_model.config._attn_implementation, tokenizer.padding_side
    table = check(model, model.encode(MESSAGES), peers=PEERS)
    assert [row.name for row in table[-5:-1]] == [
        "hf = transformer_lens, logits",
        "hf = transformer_lens, residuals",
        "hf = nnsight, logits",
        "hf = nnsight, residuals",
    ]
    assert all(row.ok for row in table)
    assert (hf_model.config._attn_implementation, tokenizer.padding_side) == (attention, side)
    assert all(torch.equal(before[name], tensor) for name, tensor in hf_model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf_model.modules())
