"""Generation in batches, greedy or sampled, with nothing inherited from the checkpoint but its end tokens.

Problem. `hf_model.generate` fills whatever the caller leaves open from the checkpoint's own generation_config:
sampling, temperature, a repetition penalty, suppressed tokens. The same prompt then gives other text on another engine,
and "greedy" is not greedy. A batch adds two more traps: padding on the right makes the model continue from a pad, and
a row that ended early is filled up with pads that look like text.

Mechanism. Each batch runs under a fresh GenerationConfig that replaces the checkpoint's for the length of the call and
is taken back afterwards, also when an exception passes. Prompts are sorted by length and padded on the left, with an
explicit mask, from which the positions follow. Generation stops at the tokenizer's end token and at those that the
checkpoint names; a row is read up to its first end token.

Constraints. In float32 the text equals that of single prompts. In half precision batched and single logits differ by
rounding, and a near tie may fall the other way. The adapter in use when `generate` is called stays the one for all its
batches, whatever happens between them. A batch's budget counts the tokens to come, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from activations.batching import batches, pad
from activations.errors import ModelError
from activations.prompts import Prompt
from activations.sampling import Sampling

if TYPE_CHECKING:
    from activations.model import Model


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model answered to one prompt. `n_tokens` counts the end token, as serving engines do."""

    text: str
    finish_reason: Literal["stop", "length"]
    n_prompt_tokens: int
    n_tokens: int


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    batch_tokens: int = 8192,
    sampling: Sampling | None = None,
    names: Sequence[Sequence[str]] = (),
) -> Iterator[list[tuple[int, Generated]]]:
    """Continue each prompt by at most `max_tokens`; yields batches of (number of the prompt, answer).

    The order of the batches is by length; the numbers say which prompt each answer belongs to.

    Args:
        sampling: None takes the largest logit.
        names: with sampling, what identifies the draws of each prompt; the same name draws the same noise.
    """
    if max_tokens < 1:
        raise ModelError(f"max_tokens is {max_tokens}; give 1 or more")
    if not callable(getattr(model.hf_model, "generate", None)):
        raise ModelError(f"model {model.name!r} cannot generate; give a causal language model")
    if sampling is not None and len(names) != len(prompts):
        raise ModelError(f"sampling needs a name for each prompt's draws; got {len(names)} for {len(prompts)} prompts")
    lengths = [len(prompt.ids) for prompt in prompts]
    if model.context is not None and lengths and (longest := max(lengths)) + max_tokens > model.context:
        raise ModelError(
            f"prompt {lengths.index(longest)} has {longest} tokens, and {max_tokens} more pass the model's limit of "
            f"{model.context}; give max_tokens {max(model.context - longest, 0)} or less, or shorter prompts"
        )
    rows = batches([length + max_tokens for length in lengths], batch_tokens)
    adapter = model.active

    def run() -> Iterator[list[tuple[int, Generated]]]:
        for batch in rows:
            # Entered anew for each batch: the caller may have switched in between.
            with model.use(adapter):
                drawn = None if sampling is None else sampling.processors([names[row] for row in batch])
                made = _continue(model, [prompts[row] for row in batch], max_tokens, drawn)
            yield list(zip(batch, made, strict=True))

    return run()


def end_tokens(model: Model) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's, and those of the checkpoint's generation_config."""
    named = getattr(getattr(model.hf_model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, (list, tuple)) else [named]
    found = [model.tokenizer.eos_token_id, *listed]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None and 0 <= token < model.d_vocab))


def _continue(model: Model, prompts: Sequence[Prompt], max_tokens: int, drawn: Any) -> list[Generated]:
    from transformers import GenerationConfig

    ends = end_tokens(model)
    # Sampling is noise on the logits (see sampling), so that the largest one is always the next token.
    largest = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=list(ends) or None,
        pad_token_id=model.pad_id,
    )
    padded = pad(prompts, model.device, model.pad_id)
    arguments: dict[str, Any] = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
    own = model.hf_model.generation_config
    # Passing the config is not enough: what it leaves open would be filled from the checkpoint's.
    model.hf_model.generation_config = largest
    try:
        output = model.hf_model.generate(**arguments, generation_config=largest, logits_processor=drawn)
    finally:
        model.hf_model.generation_config = own
    new = output[:, padded.input_ids.shape[1] :].tolist()
    return [_finish(model, prompt, tokens, ends) for prompt, tokens in zip(prompts, new, strict=True)]


def _finish(model: Model, prompt: Prompt, tokens: list[int], ends: tuple[int, ...]) -> Generated:
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    text = model.tokenizer.decode(tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Generated(
        text=text,
        finish_reason="length" if end is None else "stop",
        n_prompt_tokens=len(prompt.ids),
        n_tokens=len(tokens) if end is None else end + 1,
    )
