"""A donor straight from a run: what some cells edit, taken from the model as it is now.

A study of a few hundred prompts needs no store on disk: its donors are one forward pass away. This module runs the prompts
once and keeps the tensors that the cells would edit, in the form in which ``sweep`` takes a donor.

Constraints. Everything is kept in memory, so all positions of many layers are for short prompts and few of them; a store
(``activations.capture``) is for the rest. Rows stand in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patching.edits import ALL, ANSWER, ZERO, Cell, PatchError, check_cells_fit

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt


def donor_from_run(
    model: Model, prompts: Sequence[Prompt], cells: Sequence[Cell], *, batch_tokens: int = 8192
) -> dict[str, dict[str, dict[int, Any]]]:
    """What these cells edit, whatever their sources, as a donor ``{site: {position: {layer: vectors}}}``.

    Vectors are ``[item, width]`` at the answer position and ``[item][token, width]`` at ``all`` positions, float32, or
    float64 for such a model. The model is used as it is: within ``model.use("name")`` the adapter is on.
    """
    import torch

    from activations.batching import batches, forward_arguments, pad
    from activations.positions import Spot
    from activations.taps import tapped

    edits = [edit for cell in cells for edit in cell.edits]
    if not prompts:
        raise PatchError("no prompts to take a donor from; give at least one")
    if elsewhere := [edit for edit in edits if edit.position not in (ANSWER, ALL)]:
        raise PatchError(
            f"edit {elsewhere[0]} is at {elsewhere[0].position}; a donor is taken from a run at the answer or at all "
            "positions, take others from a store with donor_from_store"
        )
    places = check_cells_fit(
        model,
        cells,
        {edit.source for edit in edits if edit.how != "function"} - {ZERO},
        {edit.source for edit in edits if edit.how == "function"},
    )
    whole = any(edit.position == ALL for edit in edits)
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    rows: dict[str, dict[str, dict[int, Any]]] = {}
    for site, layer, position in sorted({(edit.site, edit.layer, edit.position) for edit in edits}):
        rows.setdefault(site, {}).setdefault(position, {})[layer] = [None] * len(prompts)
    for batch in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        chosen = [prompts[item] for item in batch]
        spots = [
            [Spot(ALL, token, (token,)) for token in (range(len(prompt.ids)) if whole else [prompt.answer])]
            for prompt in chosen
        ]
        padded = pad(chosen, model.device, model.pad_id)
        with torch.inference_mode(), tapped(model, places, len(batch), dtype, spots, chosen) as buffers:
            model.hf_model(**forward_arguments(model.hf_model, padded))
        ends = np.cumsum([len(own) for own in spots])
        for members, buffer in buffers.items():
            for (site, layer), values in zip(members, buffer.cpu().numpy(), strict=True):
                for item, own in zip(batch, np.split(values, ends[:-1]), strict=True):
                    for position, layers in rows.get(site, {}).items():
                        if layer in layers:
                            layers[layer][item] = own[-1] if position == ANSWER else own
    for positions in rows.values():
        for layer, vectors in positions.get(ANSWER, {}).items():
            positions[ANSWER][layer] = np.stack(vectors)
    return rows
