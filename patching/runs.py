"""One edited forward pass: the rows in it, the answer scores that come out, and what it cost.

Engines differ only in where runs lie inside a forward pass: as extra columns of one sequence, as batch rows over a shared
prefix, or as sequences of their own. Each hands over the padded tokens and a ``Rows`` list that says where the runs are;
the rest is the same for all, and is here.

Rules that keep the numbers right:

- Hooks are removed on every way out, also after an exception.
- Only answer scores are kept. The unembedding runs on the few rows, for the few answer tokens, in float32 or better:
  ``[batch, column, vocabulary]`` is never built.
- A *reference* run goes through the whole model and reads the logits that the model itself returns; all others run the
  network below the unembedding, and the scores are made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.batching import Padded, forward_arguments
from activations.readout import label_scores
from activations.structure import FULL, apply_scale, first, hooks
from activations.taps import backbone
from patching.edits import Cell, Spots
from patching.writing import UNPATCHED as UNPATCHED
from patching.writing import Functions, Writer
from patching.writing import Rows as Rows

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.donors import Key


class Runs:
    """A model, its recipients and the cells to apply: what every engine works on.

    ``tokens`` counts the tokens put through the model, pads included and skipped blocks not: the price of a sweep as it
    was paid. ``scale`` is the largest logit seen in reference runs, of any token: what rounding is measured against.
    """

    def __init__(
        self,
        model: Model,
        recipients: Sequence[Prompt],
        cells: Sequence[Cell],
        values: Mapping[Key, np.ndarray | list[np.ndarray]],
        answers: AnswerTokens,
        *,
        functions: Functions | None = None,
        spots: Spots | None = None,
    ) -> None:
        self.model = model
        self.recipients = recipients
        self.cells = cells
        self.answers = answers
        self.network = backbone(model)
        self.writer = Writer(model, recipients, cells, values, functions or {}, spots)
        self.tokens = 0.0
        self.scale = 1.0

    @property
    def half(self) -> bool:
        """Half precision: rounding depends on the shape of a batch, so nothing is asserted equal."""
        return self.model.dtype not in FULL

    def lengths(self, items: Sequence[int]) -> list[int]:
        return [len(self.recipients[item].ids) for item in items]

    @torch.no_grad()
    def __call__(
        self,
        padded: Padded,
        rows: Rows,
        *,
        extra: Mapping[str, Any] | None = None,
        reference: bool = False,
        share: float = 1.0,
    ) -> Tensor:
        """Run the model once with the rows' edits; answer scores ``[row, label]``.

        Args:
            extra: further arguments of the forward pass, a cache for one.
            reference: read the scores from the model's own logits in the last column, which is independent of the
                unembedding done here (half-precision logits are too coarse for that).
            share: the part of the blocks that are run, for the price.
        """
        kept: list[Tensor] = []
        at = tuple(torch.from_numpy(part) for part in (rows.batch, rows.slot))

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            states = first(output).view(*rows.shape, -1)
            kept.append(states[tuple(part.to(states.device) for part in at)])

        handles: list[Any] = []
        with hooks(handles):
            self.writer.install(handles, rows)
            handles.append(self.model.module(self.model.structure.blocks[-1]).register_forward_hook(keep))
            self.tokens += padded.input_ids.numel() * share
            network = self.model.hf_model if reference else self.network
            output = network(**{**self._arguments(network, padded), **(extra or {})})
        if not reference:
            return self.scores(kept[0])
        logits = output.logits[:, -1]
        self.scale = max(self.scale, float(logits.abs().max()))
        return self.scores(kept[0]) if self.half else label_scores(logits, self.answers.ids)

    def _arguments(self, network: Any, padded: Padded) -> dict[str, Any]:
        arguments = forward_arguments(network, padded, keep=1)
        if "logits_to_keep" in arguments:
            # As a tensor: given a number, some models leave the other columns out of their last blocks, and hooks
            # that read or write there would find them gone.
            arguments["logits_to_keep"] = torch.tensor([padded.input_ids.shape[1] - 1], device=padded.input_ids.device)
        return arguments

    def scores(self, resid: Tensor) -> Tensor:
        """Answer scores ``[row, label]`` of last-block rows, from the answer tokens' rows of the unembedding."""
        structure = self.model.structure
        head = self.model.module(structure.head)
        if type(head) is not nn.Linear:  # an adapter or a quantiser sits on the unembedding: use all of it
            return self.model.unembed(resid, self.answers).logit
        wide = torch.promote_types(self.model.dtype, torch.float32)
        tokens = torch.tensor([token for variants in self.answers.ids for token in variants], device=head.weight.device)
        normed = _widened(self.model.module(structure.final_norm), resid.to(head.weight.device, wide), wide)
        bias = None if head.bias is None else head.bias[tokens].to(wide)
        logits = nn.functional.linear(normed.to(wide), head.weight[tokens].to(wide), bias)
        logits = apply_scale(logits, structure.logit_scale, structure.softcap)
        parts = logits.split([len(variants) for variants in self.answers.ids], dim=-1)
        return torch.stack([part.logsumexp(-1) for part in parts], dim=-1)


def _widened(module: nn.Module, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Call a small module with its parameters in ``dtype``, the module itself untouched."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    if all(tensor.dtype == dtype for tensor in state.values()):
        made: Tensor = module(value)
        return made
    changed = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    result: Tensor = torch.func.functional_call(module, changed, (value,))
    return result
