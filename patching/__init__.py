"""What causes the answer: edits at the answer position, and exact sweeps over them.

The room in eight lines::

    from patching import head_cells, head_map, layer_cells, sweep

    donors = {"original": {"resid_post": resid}}       # [item, layer, d_model], from the runs that answer right
    cells = layer_cells(model.n_layers, source="original")
    with model.use("grpo"):                            # base, or any attached adapter
        result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
    print(result.difference - result.unpatched[:, None])        # [item, layer]: effect in logits
    print(result.engine, result.forward_passes, result.check_max_abs)
    heads = sweep(model, prompts, head_cells(head_map(model)), answers=answers, seed=0)    # every head zeroed, one by one

Where to read on: ``edits.py`` says what can be changed, ``branch.py`` how all cells of an item fit into one forward
pass, ``prefix.py`` what is done where that is not exact, ``check.py`` why the numbers can be believed, ``controls.py``
what an effect must be compared with, and ``effects.py`` how effects are counted.

Words: the *donor* is the run an activation is taken from (elsewhere: clean), the *recipient* the one it is put into
(elsewhere: corrupted). All edits are at the answer position, the last prompt token. Edits at earlier positions change
every later token, so nothing of this price exists for them, and they are not offered.

Names are imported on first use, so that ``import patching`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patching.sweeping import sweep as sweep

_HOME = {
    "Cell": "edits",
    "Edit": "edits",
    "Estimate": "effects",
    "HeadEffect": "effects",
    "PatchError": "edits",
    "Restoration": "effects",
    "SweepPlan": "plan",
    "SweepResult": "sweeping",
    "control_donors": "controls",
    "derangement": "controls",
    "donor_from_store": "donors",
    "full_forward": "sweeping",
    "head_cells": "edits",
    "head_map": "edits",
    "head_set_cell": "effects",
    "largest_change": "controls",
    "layer_cells": "edits",
    "mean_interval": "effects",
    "norm_matched_random": "controls",
    "random_head_sets": "effects",
    "rank_heads": "effects",
    "restoration": "effects",
    "share_flipped": "effects",
    "sign_flip_p": "effects",
    "signed_effect": "effects",
    "sweep": "sweeping",
    "sweep_plan": "plan",
    "unrelated_donor": "controls",
    "with_source": "edits",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'patching' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"patching.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
