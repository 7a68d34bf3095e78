"""The tokenizer of the planted models: one token a word, with a chat template."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.planted.family import FILLERS, MARKERS, QUERIES, STATES

SPECIAL = ("[PAD]", "[UNK]", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
ANSWER_WORDS = ("Yes", "yes", "No", "no")
STATE_WORDS = tuple(word for words in STATES.values() for word in words)
VOCABULARY = (*SPECIAL, *ANSWER_WORDS, *QUERIES.values(), *MARKERS.values(), *FILLERS, *STATE_WORDS)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Every word of the family is a token; any other word becomes ``[UNK]``."""
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), behavior="removed", invert=True)
    raw.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE,
        model_max_length=64,
    )
