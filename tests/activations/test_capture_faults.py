"""Capture under faults: a batch that does not fit, layers on several devices, numbers that are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations.capturing import Plan, capture
from activations.errors import ModelError, StoreError
from activations.model import Model, from_modules
from activations.picking import Pick
from activations.positions import Spot
from activations.prompts import Prompt
from activations.readout import answer_tokens
from activations.taps import Budget, backbone
from tests import tiny_models as tiny


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def prompts_for(model: Model, n: int) -> list[Prompt]:
    made = model.encode(tiny.MESSAGES)
    return [made[i % len(made)] for i in range(n)]


@contextmanager
def memory_for(model: Model, tokens: int) -> Iterator[list[int]]:
    """A model that runs out of memory in its second block above so many padded tokens; notes what was tried."""
    tried: list[int] = []

    def check(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        tried.append(hidden.shape[0] * hidden.shape[1])
        if tried[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = model.module(model.structure.blocks[1]).register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield tried
    finally:
        handle.remove()


def test_batch_that_does_not_fit_is_halved(model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts, answers = prompts_for(model, 23), answer_tokens(model, tiny.ANSWERS)
    plan = Plan(sites=("resid_post", "z"), positions=("answer", "0", "index:-2"), batch_tokens=160)
    whole = capture(model, prompts, plan, tmp_path / "whole", answers=answers)
    with caplog.at_level(logging.WARNING, "activations"), memory_for(model, 45) as tried:
        cut = capture(model, prompts, plan, tmp_path / "cut", answers=answers)
    # The budget is halved until it fits and stays there: each size fails once.
    failed = [tokens for tokens in tried if tokens > 45]
    assert 2 <= len(failed) <= 3
    assert failed == sorted(failed, reverse=True)
    assert [record.message for record in caplog.records if "out of memory in a batch of" in record.message]
    assert len(caplog.records) == len(failed)
    for site in ("resid_post", "z"):
        np.testing.assert_allclose(cut.stack(site), whole.stack(site), atol=5e-5)
    np.testing.assert_allclose(cut.readout["logit"], whole.readout["logit"], atol=5e-5)
    for name in ("digest", "rows"):  # which rows lie in which shard has not changed
        assert cut.manifest[name] == whole.manifest[name]
    assert len(list((tmp_path / "cut").glob("shard*"))) == len(list((tmp_path / "whole").glob("shard*")))


def test_prompt_that_does_not_fit_alone_is_an_error(model: Model, tmp_path: Path) -> None:
    with memory_for(model, 3), pytest.raises(ModelError, match=r"one prompt of \d+ tokens does not fit in memory"):
        capture(model, prompts_for(model, 9), Plan(), tmp_path / "s")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.hf_model.modules())


def test_budget_cuts_runs_of_rows() -> None:
    lengths = [9, 9, 8, 4, 4, 1]
    assert Budget().cut(lengths) == [slice(0, 6)]
    assert Budget(18).cut(lengths) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert Budget(1).cut(lengths) == [slice(n, n + 1) for n in range(6)]
    for tokens in range(1, 60):
        pieces = Budget(tokens).cut(lengths)
        assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(6))
        for piece in pieces:
            size = (piece.stop - piece.start) * max(lengths[piece])
            assert size <= tokens or piece.stop - piece.start == 1


def test_pick_is_a_plain_loop() -> None:
    """Rows of a padded batch against the same rows taken one at a time."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 2, 7]
    spots = [
        (Spot("a", -1, (0, 1, 4)), Spot("b", 2, (2,))),
        (Spot("a", -1, (0, 1)), Spot("b", 1, (1,)), Spot("c", -1, (1,))),
        (Spot("b", 6, (6,)),),
    ]
    value = torch.randn(3, 7, 4, generator=generator)
    pick = Pick(spots, lengths)
    target = torch.empty(pick.n_rows, 4)
    pick.reduce(pick.gather(value), target)
    expected = [
        value[row, [7 - lengths[row] + token for token in spot.tokens]].mean(0)
        for row, own in enumerate(spots)
        for spot in own
    ]
    torch.testing.assert_close(target, torch.stack(expected))
    weights = torch.randn(3, 2, 7, 7, generator=generator)
    rows = torch.empty(pick.n_rows, 2 * 7)
    pick.reduce(pick.gather_pattern(weights, 7), rows)
    by_hand = []
    for row, own in enumerate(spots):
        left = 7 - lengths[row]
        for spot in own:
            keys = weights[row, :, [left + token for token in spot.tokens]].mean(1)[:, left:]
            by_hand.append(torch.nn.functional.pad(keys, (0, left)).flatten())
    torch.testing.assert_close(rows, torch.stack(by_hand))


def test_layers_on_several_devices(tmp_path: Path) -> None:
    """accelerate's own hooks, one device a block, all of them the CPU here; rows do not depend on them."""
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    plain = from_modules(*tiny.tiny_llama())
    prompts = prompts_for(plain, 7)
    plan = Plan(sites=("resid_pre", "resid_mid", "z", "pattern"), positions=("answer", "1"), batch_tokens=60)
    expected = capture(plain, prompts, plan, tmp_path / "a")
    hf_model, tokenizer = tiny.tiny_llama()
    parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    parts |= {f"model.layers.{n}": "cpu" for n in range(3)}
    spread = from_modules(dispatch_model(hf_model, parts, main_device="cpu", force_hooks=True), tokenizer)
    assert hasattr(spread.module("model.layers.1"), "_hf_hook")
    store = capture(spread, prompts, plan, tmp_path / "b")
    for site in plan.sites:
        np.testing.assert_array_equal(store.stack(site), expected.stack(site))


def test_rows_come_from_whichever_device_holds_them() -> None:
    """A tensor of another kind of device: what is copied and summed is moved to the buffer's device, one row at a time."""
    pick = Pick([(Spot("a", -1, (0, 1)), Spot("b", 1, (1,)))], [2])
    here = pick._on(torch.device("meta"))
    assert {tensor.device.type for tensor in here.values()} == {"meta"}
    assert pick._on(torch.device("meta")) is here
    assert pick.gather(torch.empty(1, 2, 4, device="meta")).shape == (3, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_number_that_is_none_is_named(tmp_path: Path, value: float) -> None:
    model = from_modules(*tiny.tiny_llama())
    prompts = prompts_for(model, 4)
    order = sorted(range(4), key=lambda row: -len(prompts[row].ids))

    def spoil(module: Any, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[order.index(2), -1, 3] = value
        return output

    handle = model.module(model.structure.blocks[1]).register_forward_hook(spoil)
    index = [(f"key{n}", "original") for n in range(4)]
    with pytest.raises(StoreError) as caught:
        capture(model, prompts, Plan(positions=("0", "answer")), tmp_path / "s", index=index)
    handle.remove()
    assert "resid_post layer 1 of row 5 is not finite" in str(caught.value)
    assert "row 5 is prompt 2 (key2 original) at answer" in str(caught.value)
    assert not list((tmp_path / "s").glob("*shard*"))


def test_value_over_the_range_of_float16_is_named(tmp_path: Path) -> None:
    model = from_modules(*tiny.tiny_llama())
    prompts = prompts_for(model, 4)
    handle = model.module(model.structure.blocks[2]).register_forward_hook(lambda m, a, o: o * 1e5)
    with pytest.raises(
        StoreError, match=r"resid_post layer 2 of row \d reaches .* over the float16 limit .* is prompt"
    ):
        capture(model, prompts, Plan(dtype="float16"), tmp_path / "s")
    handle.remove()


def test_logits_are_made_only_where_they_are_read(model: Model, tmp_path: Path) -> None:
    seen: list[Any] = []
    handle = model.module(model.structure.head).register_forward_hook(lambda *_: seen.append(1))
    capture(model, prompts_for(model, 4), Plan(), tmp_path / "s", answers=answer_tokens(model, tiny.ANSWERS))
    handle.remove()
    assert not seen
    caches: list[bool] = []
    network = backbone(model)
    handle = network.register_forward_pre_hook(lambda m, a, k: caches.append(k["use_cache"]), with_kwargs=True)
    capture(model, prompts_for(model, 4), Plan(), tmp_path / "t")
    handle.remove()
    assert caches == [False]
