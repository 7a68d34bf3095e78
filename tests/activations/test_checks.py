"""The checks hold on sound models and break on each mistake they are there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import activations.checks as checks
from activations import from_modules
from activations.checks import Check, check, self_test
from activations.errors import ModelError
from activations.model import Model
from tests.tiny_models import BUILDERS, MESSAGES, tiny_adapter, tiny_gpt2, tiny_llama


def _failing(table: list[Check]) -> list[str]:
    return [row.name for row in table if not row.ok]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_identity_holds(name: str, tmp_path: Path) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    self_test(model)
    table = check(model, model.encode(MESSAGES))
    assert _failing(table) == []
    assert [row.name for row in table] == [
        "padded = single, logits",
        "padded = single, residuals",
        "lens at the last layer = logits",
        "capture hooks on = off",
        "head zeroed = its weight columns zeroed",
        "residual + attention = residual between",
        "residual + attention + MLP = next residual",
        "base before = after adapter one",
    ]
    assert all(row.value is not None and row.value <= row.bound for row in table)


def test_the_sums_cover_what_they_can_and_say_what_not() -> None:
    notes = {}
    for name in ("llama", "neox", "granite", "gemma4"):
        model = from_modules(*BUILDERS[name]())
        notes[name] = [row.note for row in checks.sums(model, model.encode(MESSAGES))]
    assert notes["llama"] == ["relative; 3 of 3 layers"] * 2
    assert notes["neox"] == [
        "relative; 0 of 3 layers: parallel blocks or scaled additions",
        "relative; 3 of 3 layers",
    ]
    assert notes["granite"][1].startswith("relative; 0 of 3 layers: no module returns")
    assert notes["gemma4"] == [
        "relative; 4 of 4 layers",
        "relative; 0 of 4 layers: the block adds a third part or scales its output",
    ]


def test_an_output_that_is_not_what_is_added_is_caught() -> None:
    model = from_modules(*BUILDERS["gemma3"]())  # the attention's own output, in front of the second norm
    wrong = tuple(f"{block}.self_attn" for block in model.structure.blocks)
    object.__setattr__(model.structure, "attn_out", wrong)
    failing = {row.name for row in checks.sums(model, model.encode(MESSAGES)) if not row.ok}
    assert "residual + attention + MLP = next residual" in failing


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_half_precision_passes_its_loose_bounds(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model.to(torch.bfloat16), tokenizer)
    table = check(model, model.encode(MESSAGES))
    assert _failing(table) == []
    assert {row.bound for row in table} == {5e-2, 0.0}


def _only(*keys: str) -> Any:
    def arguments(hf_model: Any, padded: Any, *, keep: int | None = None) -> dict[str, Any]:
        return {"use_cache": False, **{key: getattr(padded, key) for key in ("input_ids", *keys)}}

    return arguments


@pytest.mark.parametrize(("builder", "given"), [(tiny_llama, []), (tiny_gpt2, []), (tiny_gpt2, ["attention_mask"])])
def test_a_forgotten_mask_or_position_is_caught(
    builder: Any, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_modules(*builder())
    monkeypatch.setattr(checks, "forward_arguments", _only(*given))
    assert "padded = single, logits" in _failing(check(model, model.encode(MESSAGES)))
    with pytest.raises(ModelError, match=r"self-test 'padded = single, logits': .*, allowed 5e-05; try"):
        self_test(model)


def test_a_lens_through_the_wrong_norm_is_caught() -> None:
    model = from_modules(*tiny_llama())
    object.__setattr__(model.structure, "final_norm", "model.layers.0.input_layernorm")
    with pytest.raises(ModelError, match="lens at the last layer"):
        self_test(model)


def test_heads_cut_at_the_wrong_width_are_caught() -> None:
    model = from_modules(*tiny_llama())
    name = str(model.structure.out_projections[0])
    module: Any = model.module(name)
    forward = module.forward
    module.forward = lambda value: forward(value.roll(3, -1))  # columns no longer line up with the input
    assert "head zeroed = its weight columns zeroed" in _failing(check(model, model.encode(MESSAGES)))


def test_weights_come_back_after_the_head_check_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_modules(*tiny_llama())
    before = {name: tensor.clone() for name, tensor in model.hf_model.state_dict().items()}
    calls = {"n": 0}
    run = checks.run

    def failing(model: Model, prompts: Any, **options: Any) -> Any:
        calls["n"] += 1
        if calls["n"] == 3:  # the pass with zeroed columns
            raise RuntimeError("out of memory")
        return run(model, prompts, **options)

    monkeypatch.setattr(checks, "run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        checks.heads_by_weights(model, model.encode(MESSAGES))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.hf_model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.hf_model.modules())


def test_an_adapter_without_effect_fails_its_row(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    for name, parameter in hf_model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert _failing(check(model, model.encode(MESSAGES))) == ["base before = after adapter one"]


def test_the_state_in_use_survives_a_check(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer, adapters=[str(tiny_adapter(hf_model, tmp_path / "one"))])
    with model.use("one"):
        assert _failing(check(model, model.encode(MESSAGES))) == []
        assert model.active == "one"


def test_bad_requests_are_named() -> None:
    model = from_modules(*tiny_llama())
    with pytest.raises(ModelError, match="no prompts to check with"):
        check(model, [])
    with pytest.raises(ModelError, match="no backend 'pyvene'; use hf, transformer_lens, nnsight"):
        check(model, model.encode(MESSAGES), backends=["pyvene"])
