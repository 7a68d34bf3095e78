"""The readout: how strongly the model leans to each answer, at the answer position.

The score of a label is the log-sum-exp of the logits of its surface variants ("Yes", "yes", "YES" are different
tokens); the readout of a pair of labels is the difference of the two scores. Two safeguards come with it. Variants that
the tokenizer cannot read are dropped, and labels whose variants begin with the same token are refused, because their
first token does not tell them apart. And the log-sum-exp over the *whole* vocabulary is kept beside the scores, so that
``off_label_mass`` says how much probability the model put on anything but an answer.

Readouts are computed in float32 from the residual stream of the last block, with the model's own final norm and
unembedding (``Model.unembed``): the same code as the logit lens and the patching sweeps, so that the numbers compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations.batching import batches, forward_arguments, pad
from activations.errors import ModelError
from activations.prompts import Prompt, is_unknown
from activations.structure import first, hooks

if TYPE_CHECKING:
    from activations.model import Model


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Labels in a fixed order, each with the token ids of its surface variants."""

    labels: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Readout:
    """Scores of the answer labels, one row a prompt, float32."""

    logit: Tensor
    """``[row, label]``: log-sum-exp over the label's variants."""
    logsumexp: Tensor
    """``[row]``: over the whole vocabulary."""
    top: Tensor
    """``[row]``: the most likely token id."""

    @property
    def difference(self) -> Tensor:
        """``[row]``: first label minus second; yes minus no."""
        if self.logit.shape[-1] < 2:
            raise ModelError("a readout difference needs two labels; this readout has one")
        return self.logit[:, 0] - self.logit[:, 1]

    @property
    def off_label_mass(self) -> Tensor:
        """``[row]``: probability of everything that is no variant of a label."""
        return (1 - (self.logit.logsumexp(-1) - self.logsumexp).exp()).clamp(min=0)

    def cpu(self) -> Readout:
        return Readout(self.logit.cpu(), self.logsumexp.cpu(), self.top.cpu())

    @staticmethod
    def join(parts: Sequence[Readout]) -> Readout:
        """Stack readouts of several batches, in the order given."""
        return Readout(
            torch.cat([part.logit for part in parts]),
            torch.cat([part.logsumexp for part in parts]),
            torch.cat([part.top for part in parts]),
        )

    def rows(self, order: Tensor) -> Readout:
        """The rows at these indices."""
        return Readout(self.logit[order], self.logsumexp[order], self.top[order])


def answer_tokens(model: Model, answers: Mapping[str, Sequence[str]]) -> AnswerTokens:
    """Token ids for ``{"yes": ("Yes", "yes"), "no": (...)}``: of each variant the first token."""
    tokenizer = model.tokenizer
    if not answers:
        raise ModelError("no answer labels given; give for example {'yes': ('Yes', 'yes'), 'no': ('No', 'no')}")
    owner: dict[int, str] = {}
    ids: list[tuple[int, ...]] = []
    for label, variants in answers.items():
        if isinstance(variants, str):
            raise ModelError(
                f"variants of label {label!r} are the text {variants!r}; give a list, for example [{variants!r}]"
            )
        tokens = [token for token in (_first_token(tokenizer, variant) for variant in variants) if token is not None]
        if not tokens:
            raise ModelError(
                f"label {label!r} has no variant the tokenizer can read among {list(variants)}; give other variants or "
                "another model"
            )
        for token in tokens:
            other = owner.setdefault(token, label)
            if other != label:
                raise ModelError(
                    f"labels {other!r} and {label!r} share the first token {tokenizer.convert_ids_to_tokens(token)!r} "
                    f"({token}), which cannot tell them apart; give variants that begin differently"
                )
        ids.append(tuple(dict.fromkeys(tokens)))
    return AnswerTokens(tuple(answers), tuple(ids))


def _first_token(tokenizer: Any, variant: str) -> int | None:
    tokens = tokenizer(variant, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens or any(is_unknown(tokenizer, token, variant) for token in tokens):
        return None
    # Some tokenizers make a token of a leading space alone; it begins every word and says nothing about this one.
    if not tokenizer.decode([tokens[0]]).strip():
        return None
    return int(tokens[0])


def from_logits(logits: Tensor, answers: AnswerTokens) -> Readout:
    """Readout of full logits ``[row, vocabulary]``."""
    logits = logits.float()
    return Readout(label_scores(logits, answers.ids), logits.logsumexp(-1), logits.argmax(-1))


def label_scores(logits: Tensor, ids: Sequence[Sequence[int]]) -> Tensor:
    """``[row, label]``: log-sum-exp of the columns named for each label."""
    return torch.stack([logits[:, list(variants)].logsumexp(-1) for variants in ids], dim=-1)


def read(model: Model, prompts: Sequence[Prompt], answers: AnswerTokens, *, batch_tokens: int = 8192) -> Readout:
    """Run the prompts through the model as it is now, base or adapter in use; rows in the order given, on the CPU."""
    if not prompts:
        raise ModelError("no prompts to read; give at least one")
    order: list[int] = []
    parts: list[Readout] = []
    for rows in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        parts.append(model.unembed(final_residual(model, [prompts[row] for row in rows]), answers).cpu())
        order.extend(rows)
    return Readout.join(parts).rows(torch.argsort(torch.tensor(order)))


def final_residual(model: Model, prompts: Sequence[Prompt]) -> Tensor:
    """``[row, d_model]``: the last block's output at the answer position, one batch."""
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(first(output)[:, -1].clone())

    padded = pad(prompts, model.device, model.pad_id)
    block = model.module(model.structure.blocks[-1])
    with hooks([block.register_forward_hook(keep)]), torch.inference_mode():
        model.hf_model(**forward_arguments(model.hf_model, padded, keep=1))
    return kept[0]
