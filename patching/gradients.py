"""Attribution patching: what every cell of a sweep would do, estimated from one forward and one backward pass a prompt.

Problem. An exact sweep is cheap at the answer position and dear elsewhere: heads at all positions, or every token of every
layer, cost a forward pass each. A first-order estimate of all of them costs one gradient.

Mechanism. The readout's gradient with respect to an activation says how far the readout moves for a small change there. An
edit changes the activation by ``Δ`` (the donor's vector less the recipient's, or what ``add``, ``project_out`` and
functions make of it), so the estimate is ``Δ · gradient``, summed over the edit's tokens. The prompt is run once with
hooks that keep the tensors of all edited sites, and differentiated once. A head is its slice of ``z``.

It is an estimate. A linear reading fails where the network bends between recipient and donor: at early layers, across
norms that a large change rescales, in attention that saturates, in a mixture of experts that would choose other experts,
and always for cells that edit several things which depend on each other. How well it does on the model at hand has to be
measured against the exact sweep on some items, which is what ``gradients_quality.py`` is for.

Rules that keep the numbers right:

- The network is run in its own precision; the readout, the differences and the products are float32 or better. In float16
  the readout is scaled up for the backward pass, since small gradients would vanish.
- Parameters keep their ``requires_grad`` and get no ``.grad``: only gradients of activations are asked for.
- Only prompts of one length are run together. A pad may compute NaN that no real token reads; in a backward pass it is
  multiplied by a gradient of 0 and is NaN still, and reaches all.
- Each site's tensor is handed on as a copy, so that what the network does to it in place cannot change what was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from activations.batching import batches, forward_arguments, pad
from activations.readout import label_scores
from activations.sites import Where, taps
from activations.structure import first, hidden_argument, hooks, replace_hidden
from patching.edits import ANSWER, ZERO, Cell, Edit, PatchError, Spots
from patching.sweeping import prepared
from patching.writing import Functions, with_hidden

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from patching.donors import Donor
    from patching.runs import Runs

_HALF_SCALE = 64.0
"""Factor of the readout in a float16 backward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """Estimated effects of cells.

    Attributes:
        cells: cell names, the columns.
        estimate: ``[item, cell]``, change of the readout (first label minus second) in logits; what an exact sweep gives
            as ``difference - unpatched[:, None]``.
        unpatched: ``[item]``, the readout without edits.
        tokens: tokens put through the model; each also passed backwards.
    """

    cells: tuple[str, ...]
    estimate: np.ndarray
    unpatched: np.ndarray
    tokens: int


def attribution(
    model: Model,
    recipients: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    answers: AnswerTokens,
    donors: Mapping[str, Donor] | None = None,
    functions: Functions | None = None,
    spots: Spots | None = None,
    batch_tokens: int = 4096,
) -> Attribution:
    """Estimate every cell on every recipient; the arguments are those of ``sweep``.

    ``batch_tokens`` is smaller than a sweep's, because a backward pass keeps all activations of a batch.
    """
    if not recipients:
        raise PatchError("no recipients to estimate; give at least one prompt")
    if len(answers.labels) < 2:
        raise PatchError(
            f"an estimate needs two answer labels, got {list(answers.labels)}; give for example yes and no"
        )
    runs = prepared(model, recipients, cells, answers=answers, donors=donors, functions=functions, spots=spots)
    lengths = runs.lengths(range(len(recipients)))
    number = np.float64 if model.dtype == torch.float64 else np.float32
    estimate, unpatched = np.zeros((len(recipients), len(cells)), number), np.zeros(len(recipients), number)
    tokens = 0
    for items in _unpadded(lengths, batch_tokens):
        difference, own, gradient = _differentiated(runs, items)
        tokens += sum(lengths[item] for item in items)
        unpatched[items] = difference
        parts = _Parts(runs, items, own, gradient, functions or {})
        for column, cell in enumerate(cells):
            for edit in cell.edits:
                estimate[items, column] += parts.of(edit)
    if not np.isfinite(estimate).all():
        row, column = np.argwhere(~np.isfinite(estimate))[0]
        raise PatchError(
            f"the estimate of cell {cells[column].name!r} is not finite at item {row} ({model.dtype}); "
            "load the model in float32"
        )
    return Attribution(tuple(cell.name for cell in cells), estimate, unpatched, tokens)


def _unpadded(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of items that have the same length, none with more than ``batch_tokens`` tokens but for a single item."""
    alike: dict[int, list[int]] = {}
    for item, length in enumerate(lengths):
        alike.setdefault(length, []).append(item)
    return [
        [items[number] for number in part]
        for length, items in alike.items()
        for part in batches([length] * len(items), batch_tokens)
    ]


def _differentiated(runs: Runs, items: Sequence[int]) -> tuple[np.ndarray, dict[Where, Tensor], dict[Where, Tensor]]:
    """Readout ``[item]``; by site and layer the activations, and the readout's gradient there, ``[item, token, width]``."""
    model = runs.model
    places = sorted({(edit.site, edit.layer) for cell in runs.cells for edit in cell.edits})
    own: dict[Where, Tensor] = {}
    kept: dict[Where, Tensor] = {}
    versions: dict[Where, int] = {}
    ends: list[Tensor] = []
    handles: list[Any] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Whatever the parameters say: from here on there is a graph.
        return replace_hidden(args, kwargs, hidden_argument(args, kwargs).detach().requires_grad_())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        ends.append(first(output))

    wide = torch.promote_types(model.dtype, torch.float32)
    with torch.inference_mode(False), torch.enable_grad(), hooks(handles):
        padded = pad([runs.recipients[item] for item in items], model.device, model.pad_id)
        blocks = model.structure.blocks
        handles.append(model.module(blocks[0]).register_forward_pre_hook(enter, with_kwargs=True))
        for where in places:
            handles += _keep(model, where, own, kept, versions)
        handles.append(model.module(blocks[-1]).register_forward_hook(end))
        output = model.hf_model(**forward_arguments(model.hf_model, padded))
        if type(model.module(model.structure.head)) is nn.Linear:
            scores = runs.scores(ends[0].reshape(len(items), -1, model.d_model)[:, -1])
        else:  # an adapter or a quantiser sits on the unembedding
            scores = label_scores(output.logits[:, -1].to(wide), runs.answers.ids)
        difference = scores[:, 0] - scores[:, 1]
        factor = _HALF_SCALE if model.dtype == torch.float16 else 1.0
        if places:
            found = torch.autograd.grad(difference.sum() * factor, [kept[where] for where in places], allow_unused=True)
    shape = (len(items), padded.input_ids.shape[1], -1)
    gradient = {}
    for where, one in zip(places, found if places else (), strict=True):
        if kept[where]._version != versions[where]:
            raise PatchError(
                f"{where[0]} of layer {where[1]} is changed in place by {model.name!r}, so its gradient cannot be read; "
                "estimate another site, or sweep this one"
            )
        if one is None:
            raise PatchError(f"the readout of {model.name!r} does not depend on {where[0]} of layer {where[1]}")
        gradient[where] = one.to(wide).reshape(shape) / factor
        own[where] = own[where].to(wide).reshape(shape)
    return difference.detach().cpu().numpy(), own, gradient


def _keep(
    model: Model, where: Where, own: dict[Where, Tensor], kept: dict[Where, Tensor], versions: dict[Where, int]
) -> list[Any]:
    """Hooks that keep the tensor of a site: its values in ``own``, what to differentiate by in ``kept``."""
    carriers = [(model.module(name), is_input) for name, is_input in taps(model, where)]

    def note(tensor: Tensor) -> None:
        own[where] = tensor.detach().clone()
        kept[where], versions[where] = tensor, tensor._version

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        note(hidden_argument(args, kwargs))
        return replace_hidden(args, kwargs, kept[where].clone())

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        note(first(output))
        return with_hidden(output, kept[where].clone())

    def read(module: nn.Module, args: Any, kwargs: Any) -> None:
        note(hidden_argument(args, kwargs))  # not a copy: the residual addition reads this very tensor too

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        own[where] = hidden_argument(args, kwargs).detach().clone()

    def added(module: nn.Module, args: Any, output: Any) -> Any:
        part, stream = first(output), own[where]
        note(part)  # the sum's gradient is that of either summand
        own[where] = stream.view(part.shape) + part.detach()
        return with_hidden(output, kept[where].clone())

    if where[0] != "resid_mid":
        ((module, is_input),) = carriers
        if is_input:
            return [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [module.register_forward_hook(after)]
    if len(carriers) == 1:
        return [carriers[0][0].register_forward_pre_hook(read, with_kwargs=True)]
    (block, _), (attention, _) = carriers
    return [block.register_forward_pre_hook(enter, with_kwargs=True), attention.register_forward_hook(added)]


class _Parts:
    """Estimates of one batch, computed once for all edits that differ in the head alone."""

    def __init__(
        self,
        runs: Runs,
        items: Sequence[int],
        own: Mapping[Where, Tensor],
        gradient: Mapping[Where, Tensor],
        functions: Functions,
    ) -> None:
        self.runs, self.items, self.own, self.gradient, self.functions = runs, items, own, gradient, functions
        self.found: dict[tuple[Any, ...], np.ndarray] = {}

    def of(self, edit: Edit) -> np.ndarray:
        """``[item]``: what the edit would change, in logits."""
        cut = edit.site == "z" and edit.head is not None
        key = (edit.site, edit.layer, edit.source, edit.position, edit.how, edit.scale, cut)
        if key not in self.found:
            heads = int(self.runs.model.heads(edit.layer) or 1) if cut else 1
            self.found[key] = np.stack([self._one(edit, row, heads) for row in range(len(self.items))])
        return self.found[key][:, edit.head if edit.head is not None else 0]

    def _one(self, edit: Edit, row: int, heads: int) -> np.ndarray:
        """``[head]`` for one item: change times gradient, over the edit's tokens."""
        where, item = (edit.site, edit.layer), self.items[row]
        length = len(self.runs.recipients[item].ids)
        answer = edit.position == ANSWER
        tokens = np.array([length - 1]) if answer else self.runs.writer.tokens[edit.position][item]
        at = torch.as_tensor(tokens, device=self.gradient[where].device)
        gradient = self.gradient[where][row, at].unflatten(-1, (heads, -1))
        own = self.own[where][row, at].unflatten(-1, (heads, -1))
        return ((self._made(edit, own, item) - own) * gradient).sum((0, 2)).cpu().numpy()

    def _made(self, edit: Edit, own: Tensor, item: int) -> Tensor:
        """What the edit makes of one item's vectors ``[token, head, width]``."""
        if edit.how == "function":
            return self.functions[edit.source](own.flatten(0, 1)).reshape(own.shape).to(own.dtype)
        if edit.source == ZERO:
            return torch.zeros_like(own)
        given = np.asarray(self.runs.writer.values[edit.source, edit.site, edit.layer, edit.position][item])
        vector = torch.as_tensor(given).to(own.device, own.dtype)
        vector = vector.reshape(1 if vector.ndim == 1 else len(vector), *own.shape[1:])
        if edit.how == "add":
            return own + edit.scale * vector
        if edit.how == "project_out":
            unit = vector / vector.abs().amax(-1, keepdim=True)
            unit = unit / unit.norm(dim=-1, keepdim=True)
            return own - (own * unit).sum(-1, keepdim=True) * unit
        return vector.expand_as(own)
