"""Generation: batched equals single, nothing is inherited from the checkpoint, end tokens end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from activations.errors import ModelError
from activations.generation import Generated, end_tokens, generate
from activations.model import Model, from_modules
from activations.prompts import Prompt
from tests import tiny_models as tiny

MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.tiny_llama,
    "qwen3": tiny.tiny_qwen3,
    "gpt2": tiny.tiny_gpt2,
    "gemma2": tiny.tiny_gemma2,
    "hybrid": tiny.tiny_hybrid,
}
N = 12


def build(name: str = "llama") -> Model:
    return from_modules(*MODELS[name]())


@pytest.fixture(scope="module", params=list(MODELS))
def any_model(request: pytest.FixtureRequest) -> Model:
    return build(request.param)


@pytest.fixture
def model() -> Model:
    return build()


def ask(model: Model, prompts: list[Prompt], **settings: Any) -> list[Generated]:
    found: dict[int, Generated] = {}
    for batch in generate(model, prompts, **{"max_tokens": N, **settings}):
        found |= dict(batch)
    assert sorted(found) == list(range(len(prompts)))
    return [found[row] for row in range(len(prompts))]


def by_hand(model: Model, prompt: Prompt, n: int = N) -> list[int]:
    """Greedy decoding without cache, batch or generate(): the whole text again for each token."""
    ids = list(prompt.ids)
    while len(ids) < len(prompt.ids) + n:
        with torch.inference_mode():
            token = int(model.hf_model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(token)
        if token in end_tokens(model):
            break
    return ids[len(prompt.ids) :]


def test_batched_equals_single_equals_argmax_by_hand(any_model: Model) -> None:
    prompts = any_model.encode(tiny.MESSAGES)
    assert len({len(p.ids) for p in prompts}) > 1
    batched = ask(any_model, prompts)
    assert batched == [ask(any_model, [prompt])[0] for prompt in prompts]
    assert batched == ask(any_model, prompts, batch_tokens=1)
    for prompt, answer in zip(prompts, batched, strict=True):
        tokens = by_hand(any_model, prompt)
        ended = tokens[-1] in end_tokens(any_model)
        assert answer.n_tokens == len(tokens)
        assert answer.n_prompt_tokens == len(prompt.ids)
        assert answer.finish_reason == ("stop" if ended else "length")
        assert answer.text == any_model.tokenizer.decode(tokens, skip_special_tokens=True)


def test_batches_are_cut_by_padded_tokens_to_come(model: Model) -> None:
    prompts = model.encode(tiny.MESSAGES)
    longest = max(len(p.ids) for p in prompts)
    batches = list(generate(model, prompts, max_tokens=N, batch_tokens=2 * (longest + N)))
    assert [len(batch) for batch in batches] == [2, 2]
    lengths = [answer.n_prompt_tokens for batch in batches for _, answer in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_end_tokens_of_the_checkpoint_stop_and_are_not_text(model: Model) -> None:
    prompts = model.encode(tiny.MESSAGES)
    free = [by_hand(model, prompt) for prompt in prompts]
    tokens = max(free, key=lambda made: len(set(made)))
    row, end = free.index(tokens), tokens[3]
    first = tokens.index(end)
    model.hf_model.generation_config.eos_token_id = [model.tokenizer.eos_token_id, end]
    answer = ask(model, prompts)[row]
    assert answer.finish_reason == "stop"
    assert answer.n_tokens == first + 1
    assert answer.text == model.tokenizer.decode(tokens[:first], skip_special_tokens=True)
    assert end in end_tokens(model)
    model.hf_model.generation_config.eos_token_id = end
    assert set(end_tokens(model)) == {model.tokenizer.eos_token_id, end}


def test_length_is_told_from_stop(model: Model) -> None:
    prompts = model.encode(tiny.MESSAGES)
    answers = ask(model, prompts, max_tokens=1)
    assert [a.n_tokens for a in answers] == [1] * 4
    for answer, prompt in zip(answers, prompts, strict=True):
        ended = by_hand(model, prompt, 1)[0] in end_tokens(model)
        assert answer.finish_reason == ("stop" if ended else "length")


def test_nothing_is_inherited_from_the_checkpoint(model: Model) -> None:
    prompts = model.encode(tiny.MESSAGES)
    expected = ask(model, prompts)
    config = model.hf_model.generation_config
    config.do_sample, config.temperature, config.top_k, config.repetition_penalty = True, 5.0, 3, 4.0
    config.no_repeat_ngram_size, config.min_new_tokens, config.max_length = 1, 9, 7
    config.suppress_tokens = list(range(8, 40))
    before = copy.deepcopy(config.to_dict())
    assert ask(model, prompts) == expected
    assert model.hf_model.generation_config is config
    assert config.to_dict() == before


def test_config_comes_back_after_an_exception(model: Model) -> None:
    config = model.hf_model.generation_config
    inside: list[Any] = []

    def fail(*_: Any) -> None:
        inside.append(model.hf_model.generation_config)
        raise RuntimeError("stop")

    handle = model.module(model.structure.blocks[0]).register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        ask(model, model.encode(tiny.MESSAGES))
    handle.remove()
    assert inside[0] is not config
    assert model.hf_model.generation_config is config


def test_config_is_the_checkpoints_between_batches(model: Model) -> None:
    config = model.hf_model.generation_config
    for _ in generate(model, model.encode(tiny.MESSAGES), max_tokens=2, batch_tokens=1):
        assert model.hf_model.generation_config is config


def test_adapter_in_use_at_the_call_is_used_for_every_batch(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny.tiny_llama()
    model = from_modules(hf_model, tokenizer)
    base = ask(model, prompts := model.encode(tiny.MESSAGES))
    name = model.attach(str(tiny.tiny_adapter(hf_model, tmp_path / "grpo", seed=3)))
    with model.use(name):
        tuned = ask(model, prompts)
        started = generate(model, prompts, max_tokens=N, batch_tokens=1)
    assert tuned != base
    later: dict[int, Generated] = {}
    for batch in started:
        assert model.active is None
        later |= dict(batch)
    assert [later[row] for row in range(4)] == tuned
    assert ask(model, prompts) == base


def test_text_is_not_stripped(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def decode(tokens: list[int], **settings: Any) -> str:
        seen.append(settings)
        return "  Yes . \n"

    monkeypatch.setattr(model.tokenizer, "decode", decode)
    assert {a.text for a in ask(model, model.encode(tiny.MESSAGES))} == {"  Yes . \n"}
    assert seen[0] == {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


@pytest.mark.filterwarnings("error")
def test_no_warnings(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    ask(model, model.encode(tiny.MESSAGES))
    assert not caplog.records


def test_wrong_calls_are_refused_at_once(model: Model) -> None:
    prompts = model.encode(tiny.MESSAGES)
    with pytest.raises(ModelError, match="max_tokens is 0; give 1 or more"):
        generate(model, prompts, max_tokens=0)
    longest = max(len(p.ids) for p in prompts)
    with pytest.raises(ModelError, match=f"limit of 128; give max_tokens {128 - longest} or less"):
        generate(model, prompts, max_tokens=128)
    assert list(generate(model, [], max_tokens=4)) == []
