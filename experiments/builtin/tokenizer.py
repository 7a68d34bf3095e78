"""A word-level tokenizer for the ordering prompts.

One token a word makes every position readable: an attention head that looks at "Amy" looks at one token. The price is
that the model knows only the words below; the package refuses prompts with others rather than feed it unknown tokens.
"""

from __future__ import annotations

import re
from typing import Any

from tasks.names import BUILTIN
from tasks.prompts import instruction
from tasks.relations import relation_named

# The vocabularies that the shipped model was trained on. Others are in the catalog; it can't read them.
RELATIONS = ("front_behind", "left_right")
SPECIAL = ("<pad>", "<unk>", "<eos>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words() -> list[str]:
    """Every word and punctuation mark that the built-in model can read, special tokens first."""
    text = [instruction("direct"), "Yes No"]
    for relation in map(relation_named, RELATIONS):
        sentences = (relation.forward, relation.converse, relation.forward_query)
        text += [f"{relation.scene}: , .", *(sentence.format(x="", y="") for sentence in sentences)]
    found = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(text))))
    return [*SPECIAL, *found, *BUILTIN]


def build() -> Any:
    """A PreTrainedTokenizerFast with a chat template, no beginning-of-sequence token and ``<eos>`` after an answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words())}, unk_token="<unk>"))
    core.add_special_tokens(list(SPECIAL))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
