"""Agreement with other libraries on the same weights: the rows that `probe check --backends` adds to its table.

One row for the logits and one for each site that the model has, over all layers, at the answer position. The difference
is taken relative to a row's largest entry where that is above 1, as in :mod:`activations.checks`. What a library cannot
give is a row too, without a number and with the reason, so that an empty cell is never mistaken for agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor

from activations.backends import backend
from activations.checks import Check
from activations.errors import ModelError
from activations.sites import spans, taps
from activations.structure import FULL

if TYPE_CHECKING:
    from activations.backends import Rows
    from activations.model import Model
    from activations.prompts import Prompt

BOUND = 5e-5
SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z")


def agreement(model: Model, prompts: Sequence[Prompt], peer: str, suffix: str = "") -> list[Check]:
    """Rows for one library, on the model as it is now; ``suffix`` ends each row's name."""
    places = {site: [layer for layer in range(model.n_layers) if taps(model, (site, layer))] for site in SITES}
    wanted = [(site, layer) for site, layers in places.items() for layer in layers]
    library = backend(peer)
    with ExitStack() as stack:
        try:
            session = stack.enter_context(library.open(model))
        except ModelError as error:  # the library, or the adapter in it, is what cannot be served
            return [Check(f"hf = {peer}{suffix}", None, _bound(model), True, str(error))]
        refused = {where: reason for where in wanted if (reason := session.refusal(where))}
        theirs = session.run(prompts, [where for where in wanted if where not in refused], logits=True)
    with backend("hf").open(model) as session:
        ours = session.run(prompts, theirs.activations, logits=True)
    rows = [_row(model, f"hf = {peer}, logits{suffix}", _logits_gap(ours, theirs), f"{len(prompts)} prompts")]
    for site, layers in places.items():
        if not layers:
            continue
        given = [layer for layer in layers if (site, layer) not in refused]
        reasons = sorted({refused[site, layer] for layer in layers if (site, layer) in refused})
        gaps = [gap(ours.activations[site, layer], theirs.activations[site, layer]) for layer in given]
        left = [layer for layer in layers if (site, layer) in refused]
        note = "; ".join(
            [f"layers {spans(given)}"] * bool(given) + [f"not layers {spans(left)}: {', '.join(reasons)}"] * bool(left)
        )
        rows.append(_row(model, f"hf = {peer}, {site}{suffix}", max(gaps) if gaps else None, note))
    return rows


def gap(one: Tensor, two: Tensor) -> float:
    """The largest difference of a row, over that row's largest entry or 1."""
    one, two = one.double(), two.double().to(one.device)
    return float(((one - two).abs().amax(-1) / two.abs().amax(-1).clamp(min=1.0)).max())


def _logits_gap(ours: Rows, theirs: Rows) -> float | None:
    return None if ours.logits is None or theirs.logits is None else gap(ours.logits, theirs.logits)


def _bound(model: Model) -> float:
    return BOUND if model.dtype in FULL else 5e-2


def _row(model: Model, name: str, value: float | None, note: str) -> Check:
    return Check(name, value, _bound(model), value is None or value <= _bound(model), note)
