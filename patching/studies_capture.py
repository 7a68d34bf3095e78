"""A donor straight from a run: what some cells edit, taken from the model as it is now.

A study of a few hundred prompts needs no store on disk: its donors are one forward pass away. This module runs the prompts
once and keeps the tensors that the cells would edit, in the form in which ``sweep`` takes a donor. Only the tokens that
some cell edits are kept, each once, however many positions share it.

Constraints. Everything is kept in memory, so all positions of many layers are for short prompts and few of them; a store
(``activations.capture``) is for the rest. Rows stand in the order of the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patching.edits import ALL, ANSWER, ZERO, Cell, PatchError, Spots, check_cells_fit, check_spots, tokens_of

if TYPE_CHECKING:
    from activations.model import Model
    from activations.prompts import Prompt


def donor_from_run(
    model: Model,
    prompts: Sequence[Prompt],
    cells: Sequence[Cell],
    *,
    spots: Spots | None = None,
    batch_tokens: int = 8192,
) -> dict[str, dict[str, dict[int, Any]]]:
    """What these cells edit, whatever their sources, as a donor ``{site: {position: {layer: vectors}}}``.

    Vectors are ``[item, width]`` at the answer position and at ``index:N``, ``[item][token, width]`` at a span and at
    ``all`` positions; float32, or float64 for such a model. ``spots`` holds the spans of *these* prompts, for each the
    token numbers by label; the recipients' may stand elsewhere, but must have as many tokens. The model is used as it
    is: within ``model.use("name")`` the adapter is on.
    """
    import torch

    from activations.batching import batches, forward_arguments, pad
    from activations.positions import Spot
    from activations.taps import tapped

    edits = [edit for cell in cells for edit in cell.edits]
    if not prompts:
        raise PatchError("no prompts to take a donor from; give at least one")
    places = check_cells_fit(
        model,
        cells,
        {edit.source for edit in edits if edit.how != "function"} - {ZERO},
        {edit.source for edit in edits if edit.how == "function"},
    )
    check_spots(cells, prompts, spots)
    positions = sorted({edit.position for edit in edits})
    tokens = [
        {position: tokens_of(prompt, position, {} if spots is None else spots[item]) for position in positions}
        for item, prompt in enumerate(prompts)
    ]
    kept = [sorted({token for own in one.values() for token in own}) for one in tokens]
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    rows: dict[str, dict[str, dict[int, Any]]] = {}
    for site, layer, position in sorted({(edit.site, edit.layer, edit.position) for edit in edits}):
        rows.setdefault(site, {}).setdefault(position, {})[layer] = [None] * len(prompts)
    for batch in batches([len(prompt.ids) for prompt in prompts], batch_tokens):
        chosen = [prompts[item] for item in batch]
        wanted = [[Spot(ALL, token, (token,)) for token in kept[item]] for item in batch]
        padded = pad(chosen, model.device, model.pad_id)
        with torch.inference_mode(), tapped(model, places, len(batch), dtype, wanted, chosen) as buffers:
            model.hf_model(**forward_arguments(model.hf_model, padded))
        ends = np.cumsum([len(own) for own in wanted])
        for members, buffer in buffers.items():
            for (site, layer), values in zip(members, buffer.cpu().numpy(), strict=True):
                for item, own in zip(batch, np.split(values, ends[:-1]), strict=True):
                    for position, layers in rows.get(site, {}).items():
                        if layer in layers:
                            # A copy, so that a few tokens do not hold on to the whole batch.
                            layers[layer][item] = own[np.searchsorted(kept[item], tokens[item][position])].copy()
    for held in rows.values():
        for position in held:
            if position == ANSWER or position.startswith("index:"):
                held[position] = {layer: np.concatenate(vectors) for layer, vectors in held[position].items()}
    return rows
