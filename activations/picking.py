"""From a padded batch to rows: which tokens of which prompts are kept, and how several become one.

Problem. A span has another length in each prompt, and in a batch padded on the left another column too. Copying token
by token would launch a kernel for each row of each layer.

Mechanism. The tokens of all rows are gathered by one indexing a tensor; spans are filled up to the longest one at
weight zero, and their means are one weighted sum, in float32 or better. Index tensors are made when they are first
needed, once a device. Where only the answer is asked for, it is the last column of every row and nothing is looked up.
A row of attention probabilities is moved to begin with its own prompt's first key, so that pads do not show in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from activations.positions import Spot


class Pick:
    """Which tokens of a padded batch become which rows; index tensors are made once a device."""

    def __init__(self, spots: Sequence[Sequence[Spot]], lengths: Sequence[int]) -> None:
        columns = max(lengths)
        flat = [(row, spot.tokens) for row, own in enumerate(spots) for spot in own]
        self.n_rows = len(flat)
        self.last = all([spot.tokens for spot in own] == [(n - 1,)] for own, n in zip(spots, lengths, strict=True))
        self._several = sum(len(tokens) > 1 for _, tokens in flat)
        self._flat, self._pads = flat, [columns - n for n in lengths]
        self._here: dict[torch.device, dict[str, Tensor]] = {}

    def _make(self) -> dict[str, Tensor]:
        single = [number for number, (_, tokens) in enumerate(self._flat) if len(tokens) == 1]
        several = [number for number, (_, tokens) in enumerate(self._flat) if len(tokens) > 1]
        longest = max((len(self._flat[number][1]) for number in several), default=0)
        rows, cols, weights = [], [], []
        for number in (*single, *several):
            row, tokens = self._flat[number]
            size = longest if len(tokens) > 1 else 1  # spans are filled up to the longest, at weight zero
            rows += [row] * size
            cols += [token + self._pads[row] for token in (*tokens, *tokens[:1] * (size - len(tokens)))]
            if len(tokens) > 1:
                weights.append([1.0 / len(tokens)] * len(tokens) + [0.0] * (longest - len(tokens)))
        numbers = {"rows": rows, "cols": cols, "single": single, "several": several}
        made = {name: torch.tensor(values, dtype=torch.long) for name, values in numbers.items()}
        made["pads"] = torch.tensor([self._pads[row] for row in rows], dtype=torch.long)
        made["weights"] = torch.tensor(weights, dtype=torch.float32).reshape(len(several), longest, 1)
        return made

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        if device not in self._here:
            self._here[device] = {name: tensor.to(device, non_blocking=True) for name, tensor in self._make().items()}
        return self._here[device]

    def gather(self, value: Tensor) -> Tensor:
        """The wanted tokens of ``value`` [row, column, width]; more than one a row where means are asked for."""
        if self.last:
            return value[:, -1]
        here = self._on(value.device)
        return value[here["rows"], here["cols"]]

    def gather_pattern(self, value: Tensor, keys: int) -> Tensor:
        """The same of probabilities [row, head, query, key], each with its own prompt's keys first, then zeros."""
        here = self._on(value.device)
        rows: Tensor = value[here["rows"], :, here["cols"]]
        source = here["pads"][:, None] + torch.arange(keys, device=value.device)[None]
        inside = source < value.shape[-1]
        source = source.clamp(max=value.shape[-1] - 1)[:, None].expand(-1, rows.shape[1], -1)
        return (rows.gather(2, source) * inside[:, None]).flatten(1)

    def reduce(self, tokens: Tensor, target: Tensor) -> None:
        """Write gathered tokens to ``target`` [row, width], means taken in float32 or better."""
        if not self._several:
            target.copy_(tokens, non_blocking=True)
            return
        here = self._on(tokens.device)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        cut = len(here["single"])
        parts = tokens[cut:].to(wide).unflatten(0, (self._several, -1))
        means = (parts * here["weights"].to(wide)).sum(1)
        for name, rows in (("single", tokens[:cut]), ("several", means)):
            if len(rows):
                target.index_copy_(0, self._on(target.device)[name], rows.to(target))
