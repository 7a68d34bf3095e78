"""From chat messages to token ids, once.

A prompt is a fixed tuple of ids. It is made in one place, by the tokenizer's own chat template, and everything after
it (behaviour, capture, patching) reads the ids and never the text again. That keeps two engines on the same tokens and
lets a store hash what was run.

Four mistakes are refused, because each gives plausible numbers: a beginning-of-sequence token added twice (by the
template and by the tokenizer), a word the tokenizer cannot read, a prompt longer than the model's context (which
tokenizers cut silently), and a tokenizer without a chat template. Models that think aloud first are asked for a direct
answer where their template has that switch (``enable_thinking=False``), so that the next token is the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activations.errors import ModelError, one_line

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the rendered text they came from."""

    ids: tuple[int, ...]
    text: str

    @property
    def answer(self) -> int:
        """The answer position: the last token, where the model's answer is read."""
        return len(self.ids) - 1

    def __len__(self) -> int:
        return len(self.ids)


def chat_template(tokenizer: Any) -> str:
    """The template in use, as text; ModelError where there is none."""
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):
        where = getattr(tokenizer, "name_or_path", "") or "in memory"
        raise ModelError(
            f"tokenizer ({where}) has no chat template; use a chat or instruct model, or set tokenizer.chat_template"
        ) from None


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template: a revision of it changes every prompt."""
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()


def ids_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over the token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(list(prompt.ids)).encode() + b"\n")
    return digest.hexdigest()


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The text a tokenizer's template makes of one conversation, up to where the model starts to answer."""
    from jinja2 import TemplateError

    template = chat_template(tokenizer)
    switches = {"enable_thinking": False} if "enable_thinking" in template else {}
    conversation = [dict(message) for message in messages]
    if not conversation:
        raise ModelError("a conversation has no messages; give at least {'role': 'user', 'content': ...}")
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **switches)
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        roles = [message.get("role") for message in conversation]
        raise ModelError(
            f"the chat template refuses a conversation with roles {roles}: {one_line(error)}; change the roles or order"
        ) from error
    return str(text)


def encode(tokenizer: Any, messages_list: Sequence[Sequence[Message]], *, context: int | None = None) -> list[Prompt]:
    """Render and tokenize conversations; ``context`` is the longest prompt the model can read, if it has a limit."""
    texts = [render(tokenizer, messages) for messages in messages_list]
    return [encode_text(tokenizer, text, context=context) for text in texts]


def encode_text(tokenizer: Any, text: str, *, context: int | None = None) -> Prompt:
    """Tokenize a text that is already rendered. No special token is added: the template has placed them."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast), verbose=False)
    ids = tuple(int(token) for token in encoded["input_ids"])
    if not ids:
        raise ModelError(f"prompt {text[:40]!r} has no tokens; give a conversation with text in it")
    beginning = tokenizer.bos_token_id
    if beginning is not None and ids[:2] == (beginning, beginning):
        raise ModelError(
            f"prompt starts with {tokenizer.bos_token!r} twice; remove it from the chat template or from the messages"
        )
    _refuse_unknown(tokenizer, text, ids, encoded.get("offset_mapping"))
    if context is not None and len(ids) > context:
        raise ModelError(
            f"prompt has {len(ids)} tokens and the model reads at most {context}; ask a shorter one or another model"
        )
    return Prompt(ids, text)


def offsets(tokenizer: Any, prompt: Prompt) -> list[tuple[int, int]]:
    """For each token the (start, end) characters of ``prompt.text`` it covers: from text spans to positions."""
    if not tokenizer.is_fast:
        raise ModelError("character offsets need a fast tokenizer; load this one with use_fast=True")
    encoded = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if tuple(encoded["input_ids"]) != prompt.ids:
        raise ModelError("the prompt's ids are not what this tokenizer makes of its text; encode it with this model")
    return [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def is_unknown(tokenizer: Any, token: int, surface: str) -> bool:
    """Whether ``token`` stands for text the tokenizer cannot read.

    Byte-level tokenizers reuse their end token as the unknown token; written out literally, it is no unknown word.
    """
    return bool(token == tokenizer.unk_token_id) and surface.strip() != tokenizer.unk_token


def _refuse_unknown(tokenizer: Any, text: str, ids: tuple[int, ...], spans: Sequence[tuple[int, int]] | None) -> None:
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
        return
    if spans is not None:
        words = [
            text[start:end]
            for token, (start, end) in zip(ids, spans, strict=True)
            if is_unknown(tokenizer, token, text[start:end])
        ]
    else:
        words = [] if tokenizer.unk_token in text else ["?"]
    if words:
        shown = ", ".join(repr(word) for word in list(dict.fromkeys(words))[:8])
        raise ModelError(f"the tokenizer cannot read {shown}; ask with words it knows, or use another model")
