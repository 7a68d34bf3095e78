"""Sampling by noise on the logits: the right distribution, whatever the batch."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare

from activations.errors import ModelError
from activations.generation import generate
from activations.model import Model, load
from activations.prompts import Prompt
from activations.sampling import Sampling


@pytest.fixture(scope="module")
def model() -> Model:
    return load("builtin")


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Prompt]:
    asked = ("Is Amy in front of Bob?", "Is Bob behind Amy? Answer with Yes or No only.", "Is Eve behind Jack?")
    return model.encode([[{"role": "user", "content": text}] for text in asked])


def texts(model: Model, prompts: list[Prompt], names: list[tuple[str, str]], **how: object) -> list[str]:
    made: dict[int, str] = {}
    for part in generate(model, prompts, max_tokens=5, names=names, **how):  # type: ignore[arg-type]
        made.update({number: one.text for number, one in part})
    return [made[number] for number in range(len(prompts))]


def drawn(logits: list[float], sampling: Sampling, count: int) -> list[int]:
    scores = torch.tensor([logits])
    found = [0] * len(logits)
    for number in range(count):
        chosen = sampling.processors([("draw", str(number))])(torch.zeros((1, 1), dtype=torch.long), scores)
        found[int(chosen.argmax())] += 1
    return found


def test_draws_follow_the_softmax() -> None:
    logits = [1.0, 0.0, -1.0, 2.0, -3.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).numpy() * 4000
        observed = drawn(logits, Sampling(temperature=temperature, seed=3), 4000)
        assert chisquare(observed, expected).pvalue > 1e-3


def test_top_k_and_top_p_leave_the_rest_out() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert drawn(logits, Sampling(temperature=1.0, top_k=2), 500)[2:] == [0, 0]
    # 0.4 and 0.3 reach 0.65 together; the third would be beyond it.
    observed = drawn(logits, Sampling(temperature=1.0, top_p=0.65), 2000)
    assert observed[2:] == [0, 0]
    assert chisquare(observed[:2], [2000 * 4 / 7, 2000 * 3 / 7]).pvalue > 1e-3


def test_an_answer_does_not_depend_on_the_batch_or_on_what_was_drawn_before(
    model: Model, prompts: list[Prompt]
) -> None:
    how = {"sampling": Sampling(temperature=1.5, seed=1)}
    names = [("base", str(number)) for number in range(3)]
    together = texts(model, prompts, names, **how)
    torch.manual_seed(5)
    torch.rand(7)
    assert together == [texts(model, [one], [name], **how)[0] for one, name in zip(prompts, names, strict=True)]
    assert together == texts(model, prompts, names, batch_tokens=1, **how)


def test_names_and_seeds_change_the_draws(model: Model, prompts: list[Prompt]) -> None:
    one = prompts[:1] * 30
    answers = texts(model, one, [("a", str(i)) for i in range(30)], sampling=Sampling(temperature=30.0, seed=1))
    assert len(set(answers)) > 3
    assert answers != texts(model, one, [("b", str(i)) for i in range(30)], sampling=Sampling(temperature=30.0, seed=1))
    assert answers != texts(model, one, [("a", str(i)) for i in range(30)], sampling=Sampling(temperature=30.0, seed=2))


def test_a_low_temperature_is_greedy(model: Model, prompts: list[Prompt]) -> None:
    names = [("base", str(number)) for number in range(3)]
    assert texts(model, prompts, names, sampling=Sampling(temperature=1e-4)) == texts(model, prompts, [])


def test_bad_values_are_named(model: Model, prompts: list[Prompt]) -> None:
    for values, words in (
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": 1e-45}, "temperature is 1e-45"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
    ):
        with pytest.raises(ModelError, match=words):
            Sampling(**values)
    with pytest.raises(ModelError, match="got 1 for 3 prompts"):
        texts(model, prompts, [("a", "b")], sampling=Sampling(temperature=1.0))
