"""Answer sets and the readout at the answer position."""

from __future__ import annotations

import math

import pytest
import torch

from activations import answer_tokens, from_modules, read
from activations.errors import ModelError
from activations.model import Model
from activations.readout import AnswerTokens, Readout, from_logits
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_llama


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny_llama())


def test_variants_the_tokenizer_cannot_read_are_dropped(model: Model) -> None:
    tokens = answer_tokens(model, ANSWERS)
    names = [model.tokenizer.convert_ids_to_tokens(list(ids)) for ids in tokens.ids]
    assert tokens.labels == ("yes", "no")
    assert names == [["Yes", "yes"], ["No", "no"]]


def test_a_label_without_readable_variants_is_refused(model: Model) -> None:
    with pytest.raises(ModelError, match=r"'no' has no variant the tokenizer can read among \['NO', 'nope'\]"):
        answer_tokens(model, {"yes": ("Yes",), "no": ("NO", "nope")})


def test_labels_that_share_a_first_token_are_refused(model: Model) -> None:
    with pytest.raises(ModelError, match=r"'first' and 'second' share the first token 'Amy' \(\d+\)"):
        answer_tokens(model, {"first": ("Amy", "Bob"), "second": ("Cara", "Amy is taller")})


def test_a_variant_of_several_tokens_counts_by_its_first(model: Model) -> None:
    tokens = answer_tokens(model, {"yes": ("Amy is taller",), "no": ("Bob",)})
    assert model.tokenizer.convert_ids_to_tokens(tokens.ids[0][0]) == "Amy"


def test_a_bare_text_instead_of_variants_is_refused(model: Model) -> None:
    with pytest.raises(ModelError, match=r"give a list, for example \['Yes'\]"):
        answer_tokens(model, {"yes": "Yes", "no": "No"})
    with pytest.raises(ModelError, match="no answer labels"):
        answer_tokens(model, {})


@pytest.mark.parametrize("name", BUILDERS)
def test_read_equals_single_unpadded_passes(name: str) -> None:
    hf_model, tokenizer = BUILDERS[name]()
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    with torch.inference_mode():
        logits = torch.cat([hf_model(torch.tensor([prompt.ids])).logits[:, -1] for prompt in prompts])
    expected = from_logits(logits, answers)
    for batch_tokens in (1, 45, 8192):
        got = read(model, prompts, answers, batch_tokens=batch_tokens)
        assert (got.difference - expected.difference).abs().max() < 5e-5
        assert (got.logsumexp - expected.logsumexp).abs().max() < 5e-5
        assert torch.equal(got.top, expected.top)


def test_the_formula_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    got = from_logits(logits, AnswerTokens(("yes", "no"), ((0, 1), (3,))))
    total = 1 + math.e + math.e**2 + math.e**3
    assert got.logit[0].tolist() == pytest.approx([math.log(1 + math.e), 3.0])
    assert got.difference.item() == pytest.approx(math.log(1 + math.e) - 3)
    assert got.logsumexp.item() == pytest.approx(math.log(total))
    assert got.off_label_mass.item() == pytest.approx(math.e**2 / total, rel=1e-5)
    assert got.top.item() == 3


def test_a_difference_needs_two_labels() -> None:
    with pytest.raises(ModelError, match="needs two labels"):
        Readout(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2, dtype=torch.long)).difference  # noqa: B018


def test_no_prompts_is_an_error(model: Model) -> None:
    with pytest.raises(ModelError, match="no prompts to read"):
        read(model, [], answer_tokens(model, ANSWERS))
