"""What a tuned lens is fitted on: KL(final || translated), on the whole vocabulary or a part that stands for it.

Problem. Each look at the whole vocabulary of 50 to 250 thousand tokens costs more than all else in a fit, and its logits
for all rows at once do not fit into memory.

Mechanism. Rows are cut so that the logits of a piece stay within 64 MiB. Above a given size a fit sees a part of the
vocabulary: tokens likely under the final distribution, tokens likely under the plain lens, and a draw from all others,
each standing for as many as were left out (the log of that number is added to its logit). What decides or is reported
always sees the whole. A token whose final logit is -inf (a masked vocabulary) has no chance there and adds nothing.
Gradients are taken at the rows, by torch through the model's own unembedding; the rest is numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

_CELLS = 2**24  # logits of one piece: 64 MiB
_SCOUTS = 64  # rows that say which tokens the plain lens makes likely

Rows = npt.NDArray[np.float32]
Part = tuple[IntArray, FloatArray]
"""Token ids, and how many tokens each stands for."""


class Logits(Protocol):
    """The model's unembedding: differentiable, rows [row, feature] to logits [row, token]."""

    def __call__(self, resid: Tensor, tokens: Tensor | None = None, /) -> Tensor:
        """Logits of all tokens, or of these token ids in this order."""


class Judge:
    """KL(final || translated) in nats, over the whole vocabulary or the part of it that training sees."""

    def __init__(self, logits: Logits, final: Rows) -> None:
        self.logits = logits
        self.final = final
        self.vocabulary = self._logits(final[:1]).shape[1]

    def _logits(self, rows: Rows, tokens: IntArray | None = None) -> Tensor:
        import torch

        with torch.no_grad():
            return self.logits(torch.from_numpy(np.ascontiguousarray(rows)), _ids(tokens)).float()

    def pieces(self, rows: int, tokens: int | None = None) -> Iterator[slice]:
        """Cut `rows` rows so that their logits stay within a fixed size."""
        step = max(1, _CELLS // (self.vocabulary if tokens is None else tokens))
        return (slice(start, start + step) for start in range(0, rows, step))

    def kl(self, translated: Rows, at: IntArray) -> FloatArray:
        """KL of each row [row] over the whole vocabulary; `at` [row] are the rows' places among the final rows."""
        found = []
        for piece in self.pieces(len(at)):
            own = self._logits(self.final[at[piece]]).log_softmax(-1)
            other = self._logits(translated[piece]).log_softmax(-1)
            found.append(_terms(own, other).sum(-1).cpu().numpy())
        return np.concatenate(found).astype(np.float64)

    def mean_probability(self, rows: Rows) -> FloatArray:
        """Mean probability of each token over `rows`, [token]."""
        total = np.zeros(self.vocabulary)
        for piece in self.pieces(len(rows)):
            total += self._logits(rows[piece]).softmax(-1).sum(0).cpu().numpy()
        return total / len(rows)

    def constant_kl(self, train: IntArray, validation: IntArray, at: IntArray) -> float:
        """Mean KL over rows `at` from a fixed distribution: what no knowledge of a row can beat by much.

        It is the training rows' mean, mixed with as much of the uniform one as validation rows like best.
        """
        mean = self.mean_probability(self.final[train])
        mixed = [(1 - share) * mean + share / self.vocabulary for share in (1e-9, 1e-4, 1e-3, 1e-2, 1e-1)]
        return self._constants(mixed[int(np.argmin(self._constants(mixed, validation)))][None], at)[0]

    def _constants(self, chances: Sequence[FloatArray] | FloatArray, at: IntArray) -> list[float]:
        total = np.zeros(len(chances))
        for piece in self.pieces(len(at)):
            own = self._logits(self.final[at[piece]]).log_softmax(-1).cpu().numpy().astype(np.float64)
            chance = np.exp(own)
            seen = ~np.isneginf(own)
            total += [float((chance * np.where(seen, own - np.log(one), 0)).sum()) for one in chances]
        return [float(one) for one in total / len(at)]


class Objective:
    """Mean KL over a few rows and its gradient at the rows, on the part of the vocabulary that training sees."""

    def __init__(self, judge: Judge, at: IntArray, part: Part | None) -> None:
        import torch

        self.judge = judge
        self.tokens = None if part is None else part[0]
        self.weight = None if part is None else torch.from_numpy(np.log(part[1]).astype(np.float32))
        self.width = judge.vocabulary if part is None else len(part[0])
        self.own = [self._log(judge._logits(judge.final[at[cut]], self.tokens)) for cut in self._cuts(len(at))]
        self.rows = len(at)

    def _cuts(self, rows: int) -> Iterator[slice]:
        return self.judge.pieces(rows, self.width)

    def _log(self, logits: Tensor) -> Tensor:
        return (logits if self.weight is None else logits + self.weight.to(logits.device)).log_softmax(-1)

    def value(self, translated: Rows) -> float:
        """Mean KL in nats."""
        total = 0.0
        for cut, own in zip(self._cuts(self.rows), self.own, strict=True):
            other = self._log(self.judge._logits(translated[cut], self.tokens))
            total += float(_terms(own, other).sum())
        return total / self.rows

    def value_and_gradient(self, translated: Rows) -> tuple[float, Rows]:
        """Mean KL and its gradient at each row, [row, feature]."""
        import torch

        total, slopes = 0.0, np.empty_like(translated)
        for cut, own in zip(self._cuts(self.rows), self.own, strict=True):
            rows = torch.from_numpy(np.ascontiguousarray(translated[cut])).requires_grad_()
            other = self._log(self.judge.logits(rows, _ids(self.tokens)).float())
            loss = _terms(own, other).sum() / self.rows
            (slope,) = torch.autograd.grad(loss, rows)
            total += float(loss.detach())
            slopes[cut] = slope.numpy()
        return total, slopes


def part_of_vocabulary(
    judge: Judge, plain: Rows, likely: FloatArray, tokens: int, rng: np.random.Generator
) -> Part | None:
    """Return token ids and how many tokens each stands for; None where the vocabulary is no larger than `tokens`.

    A third each: likely in the end (`likely` [token]), likely under the plain lens, and drawn from the others.
    """
    if judge.vocabulary <= tokens:
        return None
    third = tokens // 3
    seen = judge.mean_probability(plain[:_SCOUTS])
    kept = np.union1d(np.argsort(-likely, kind="stable")[:third], np.argsort(-seen, kind="stable")[:third])
    others = np.setdiff1d(np.arange(judge.vocabulary), kept)
    drawn = np.sort(rng.choice(others, size=tokens - len(kept), replace=False))
    stands = np.concatenate([np.ones(len(kept)), np.full(len(drawn), len(others) / len(drawn))])
    return np.concatenate([kept, drawn]), stands


def _terms(own: Tensor, other: Tensor) -> Tensor:
    """What each token adds to KL(own || other), [row, token], from log chances; 0 where `own` is -inf, not 0 x inf."""
    return own.exp() * (own - other).masked_fill(own == -float("inf"), 0)


def _ids(tokens: IntArray | None) -> Tensor | None:
    import torch

    return None if tokens is None else torch.from_numpy(tokens)
