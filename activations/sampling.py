"""Sampling whose draws belong to a prompt, not to a batch.

Problem. `generate(do_sample=True)` draws from one global generator: what a prompt is answered then depends on its place
in the batch, on the prompts beside it, and on how often a run was interrupted. Sampled answers of a resumed run would
differ from those of an uninterrupted one, and two arms would share or not share their noise by accident.

Mechanism. Adding independent Gumbel noise to the logits and taking the largest samples exactly from their softmax
(Gumbel 1954; "Gumbel-max trick"). The noise of a row comes from a generator of its own, keyed by the seed and the row's
name, on the CPU, where it is the same for every device. Temperature, top-k and top-p are transformers' own.

Constraints. The same row gives the same text only if its logits are the same: in half precision another batch may round
a near tie the other way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from activations.errors import ModelError

# Logits divided by much less become infinite, and of several infinite ones the first would be taken.
COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: divides the logits; at least ``COLDEST``.
        top_p: keep the smallest set of tokens that holds this probability; None or 1 keeps all.
        top_k: keep this many of the most probable tokens; None keeps all.
        seed: of every draw.
    """

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= COLDEST:
            raise ModelError(f"temperature is {self.temperature}; give {COLDEST} or more, or ask greedily")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ModelError(f"top_p is {self.top_p}; give a number above 0, up to 1")
        if self.top_k is not None and self.top_k < 1:
            raise ModelError(f"top_k is {self.top_k}; give 1 or more")

    def processors(self, names: Sequence[Sequence[str]]) -> Any:
        """What transformers applies to the logits `[row, d_vocab]` of each step, so that the largest is the sample.

        Args:
            names: what identifies each row's draws, one a row.
        """
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers: list[Any] = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList([*warpers, _noise(names, self.seed)])


def _noise(names: Sequence[Sequence[str]], seed: int) -> Any:
    import torch
    from transformers import LogitsProcessor

    generators = [torch.Generator().manual_seed(_state(name, seed)) for name in names]

    class GumbelNoise(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            waiting = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=one) for one in generators])
            waiting.clamp_min_(torch.finfo(waiting.dtype).tiny)  # a time of 0 would win against any logit
            # Minus the logarithm of an exponential time is Gumbel; float32, since bfloat16 would round it to steps.
            return scores.float() - waiting.log().to(scores.device)

    return GumbelNoise()


def _state(name: Sequence[str], seed: int) -> int:
    canonical = json.dumps([seed, *name], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "big") >> 1
