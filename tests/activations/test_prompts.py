"""From messages to ids, once, with the four mistakes refused."""

from __future__ import annotations

import pytest

from activations.errors import ModelError
from activations.prompts import Prompt, encode, encode_text, ids_hash, offsets, template_hash
from tests.tiny_models import MESSAGES, TEMPLATE, tiny_tokenizer


def test_ids_are_the_template_and_nothing_more() -> None:
    tokenizer = tiny_tokenizer()
    (prompt,) = encode(tokenizer, [MESSAGES[1]])
    assert prompt.text == "<|bos|><|user|> Is Bob taller than Cara ? <|end|><|assistant|>"
    assert tokenizer.convert_ids_to_tokens(list(prompt.ids))[:3] == ["<|bos|>", "<|user|>", "Is"]
    assert prompt.answer == len(prompt) - 1 == len(prompt.ids) - 1


def test_a_second_beginning_token_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|bos|>" + TEMPLATE
    with pytest.raises(ModelError, match=r"starts with '<\|bos\|>' twice; remove it"):
        encode(tokenizer, [MESSAGES[0]])


def test_words_the_tokenizer_cannot_read_are_named_once_each() -> None:
    with pytest.raises(ModelError, match=r"cannot read 'Zed', 'Yolanda'; ask with words"):
        encode(tiny_tokenizer(), [[{"role": "user", "content": "Is Zed taller than Yolanda ? Zed"}]])


def test_an_unknown_token_written_out_is_no_unknown_word() -> None:
    prompt = encode_text(tiny_tokenizer(), "Amy [UNK] Bob")
    assert prompt.ids[1] == tiny_tokenizer().unk_token_id


def test_a_prompt_longer_than_the_context_is_refused_not_cut() -> None:
    with pytest.raises(ModelError, match="prompt has 20 tokens and the model reads at most 19"):
        encode(tiny_tokenizer(), [MESSAGES[0]], context=19)
    assert len(encode(tiny_tokenizer(), [MESSAGES[0]], context=20)[0]) == 20


def test_no_chat_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template; use a chat or instruct model"):
        encode(tokenizer, [MESSAGES[0]])


def test_thinking_is_switched_off_where_the_template_has_the_switch() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %} who{% endif %}"
    assert not encode(tokenizer, [MESSAGES[0]])[0].text.endswith("who")


def test_a_template_that_refuses_the_roles_gives_one_line() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match=r"roles \['user'\]: roles must alternate; change"):
        encode(tokenizer, [MESSAGES[0]])


@pytest.mark.parametrize("messages", [[], [{"role": "user"}]])
def test_a_conversation_without_text_is_refused(messages: list[dict[str, str]]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'].strip() }}{% endfor %}"
    with pytest.raises(ModelError):
        encode(tokenizer, [messages])


def test_offsets_lead_from_text_to_tokens() -> None:
    tokenizer = tiny_tokenizer()
    (prompt,) = encode(tokenizer, [MESSAGES[1]])
    start = prompt.text.index("Cara")
    token = next(i for i, (a, b) in enumerate(offsets(tokenizer, prompt)) if a <= start < b)
    assert tokenizer.convert_ids_to_tokens(prompt.ids[token]) == "Cara"
    with pytest.raises(ModelError, match="not what this tokenizer makes"):
        offsets(tokenizer, Prompt((1, 2), prompt.text))


def test_hashes_follow_what_they_name() -> None:
    one, two = tiny_tokenizer(), tiny_tokenizer()
    assert template_hash(one) == template_hash(two)
    two.chat_template = TEMPLATE + " "
    assert template_hash(one) != template_hash(two)
    a, b = Prompt((1, 2), "x"), Prompt((3,), "y")
    assert ids_hash([a, b]) != ids_hash([b, a])
    assert ids_hash([a, b]) != ids_hash([Prompt((1,), ""), Prompt((2, 3), "")])
    assert ids_hash([a]) == ids_hash([Prompt((1, 2), "another text")])
