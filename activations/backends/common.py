"""What all sessions share: the refusal message, the adapter guard, and runs of equal length.

Equal lengths matter because an unpadded batch needs no mask and no position ids that a library could get wrong.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations.backends import Rows
from activations.errors import ModelError

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.sites import Where


class Base(ABC):
    """A session of the backend ``name``; subclasses say how one batch is run and what they cannot give."""

    name = ""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.adapter = model.active

    def refusal(self, where: Where) -> str | None:
        """Why this tensor cannot be given; here: because the model has none."""
        from activations.sites import taps

        if where[0] == "pattern":
            return "patterns are read by capture's own backend, hf"
        return None if taps(self.model, where) else "the model has no such tensor in this layer"

    def refuse(self, places: Iterable[Where]) -> None:
        """ModelError for the first place that cannot be given."""
        for site, layer in places:
            if reason := self.refusal((site, layer)):
                raise ModelError(
                    f"backend {self.name} cannot give {site} of layer {layer} of {self.model.name!r}: {reason}; leave it "
                    "out" + ("" if self.name == "hf" else ", or use backend hf")
                )

    def run(
        self,
        prompts: Sequence[Prompt],
        places: Iterable[Where],
        *,
        logits: bool = False,
        columns: Sequence[Sequence[int]] | None = None,
    ) -> Rows:
        """Rows in prompt order, whatever order the batches ran in."""
        places = list(dict.fromkeys(places))
        self.refuse(places)
        if self.model.active != self.adapter:
            raise ModelError(
                f"the adapter in use was {self.adapter!r} when backend {self.name} was opened and is "
                f"{self.model.active!r} now; open the backend inside `with model.use(...)`"
            )
        asked = [(prompt.answer,) for prompt in prompts] if columns is None else [tuple(one) for one in columns]
        if len(asked) != len(prompts) or any(
            not 0 <= column < len(prompt.ids) for prompt, one in zip(prompts, asked, strict=True) for column in one
        ):
            raise ModelError(f"columns must name tokens of each of the {len(prompts)} prompts, counted from 0")
        found: dict[int, tuple[dict[Where, Tensor], Tensor | None]] = {}
        with torch.inference_mode():
            for numbers in self.batches(prompts):
                cut = [asked[number] for number in numbers]
                kept, scores = self.forward([prompts[number] for number in numbers], places, cut, logits)
                starts = list(accumulate((len(one) for one in cut), initial=0))
                for number, (start, stop) in zip(numbers, pairwise(starts), strict=True):
                    part = {where: rows[start:stop] for where, rows in kept.items()}
                    found[number] = part, None if scores is None else scores[start:stop]
        order = [found[number] for number in range(len(prompts))]
        joined = {where: torch.cat([part[where] for part, _ in order]) for where in places}
        return Rows(joined, torch.cat([scores for _, scores in order if scores is not None]) if logits else None)

    def batches(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Prompt numbers of each batch; here those of equal length."""
        lengths = [len(prompt.ids) for prompt in prompts]
        for length in dict.fromkeys(lengths):
            yield [number for number, one in enumerate(lengths) if one == length]

    @abstractmethod
    def forward(
        self, prompts: Sequence[Prompt], places: Sequence[Where], columns: Sequence[Sequence[int]], logits: bool
    ) -> tuple[dict[Where, Tensor], Tensor | None]:
        """One batch: rows of each place at the columns, and the logits there."""


def picked(value: Tensor, columns: Sequence[Sequence[int]]) -> Tensor:
    """``[prompt, token, ...]`` to ``[row, width]`` at each prompt's columns, as a copy."""
    rows = [row for row, one in enumerate(columns) for _ in one]
    tokens = [token for one in columns for token in one]
    return value[rows, tokens].flatten(1).clone()


def unpadded(model: Model, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Ids and mask of prompts that have one length."""
    ids = torch.tensor([prompt.ids for prompt in prompts], device=model.device)
    return ids, torch.ones_like(ids)


def copies(model: Model) -> tuple[Any, Any]:
    """Network and tokenizer that a library may change."""
    try:
        return copy.deepcopy(model.hf_model), copy.deepcopy(model.tokenizer)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelError(
            f"a second copy of {model.name!r} for another library does not fit in memory; use backend hf"
        ) from error
