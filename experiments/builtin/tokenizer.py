"""A word-level tokenizer for the ordering prompts.

One token a word makes every position readable: an attention head that looks at "Amy" looks at one token. The price is
that the model knows only the words below; the package refuses prompts with others rather than feed it unknown tokens.
"""

from __future__ import annotations

import re
from typing import Any

from tasks.names import BUILTIN
from tasks.ordering import INSTRUCTION
from tasks.relations import RELATIONS

SPECIAL = ("<pad>", "<unk>", "<eos>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words() -> list[str]:
    """Every word and punctuation mark that the built-in model can read, special tokens first."""
    text = [INSTRUCTION, "Yes No"]
    for relation in RELATIONS.values():
        text += [f"{relation.scene}: , .", relation.premise("", "", rewritten=False)]
        text += [relation.premise("", "", rewritten=True), relation.question("", "", phrase="forward")]
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
