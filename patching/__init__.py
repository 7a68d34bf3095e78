"""What causes the answer: edits of a run, and exact sweeps over them.

The room in nine lines::

    from patching import head_cells, head_map, layer_cells, sweep

    donors = {"original": {"resid_post": resid}}       # [item, layer, d_model], from the runs that answer right
    cells = layer_cells(model.n_layers, source="original")
    with model.use("grpo"):                            # base, or any attached adapter
        result = sweep(model, prompts, cells, answers=answers, donors=donors, seed=0)
    print(result.difference - result.unpatched[:, None])        # [item, layer]: effect in logits
    print(result.engine, result.forward_passes, result.check_max_abs)
    heads = sweep(model, prompts, head_cells(head_map(model)), answers=answers, seed=0)    # every head zeroed, one by one
    whole = head_cells(head_map(model), position="all")          # the same at every token, for half a pass a cell

Where to read on: ``edits.py`` says what can be changed, and where; ``branch.py`` and ``prefix.py`` how all cells at the
answer position share one forward pass, ``restart.py`` what is shared where edits are earlier; ``check.py`` why the numbers
can be believed, ``controls.py`` what an effect must be compared with, ``effects.py`` how effects are counted and
``statistics.py`` how sure they are. ``studies.py`` puts a study together, ``heads.py`` and ``heads_ablation.py`` rank heads
and ask what a model can do without them, ``transplanting.py`` compares a base with its adapter, ``gradients.py`` estimates
a sweep and ``direct_path.py`` says what a head does to the logits by itself.

Words: the *donor* is the run an activation is taken from (elsewhere: clean), the *recipient* the one it is put into
(elsewhere: corrupted). The answer position is the last prompt token.

Names are imported on first use, so that ``import patching`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patching.sweeping import sweep as sweep

_HOME = {
    "AblationStudy": "heads_ablation",
    "Attribution": "gradients",
    "Cell": "edits",
    "DirectPath": "direct_path",
    "Edit": "edits",
    "Estimate": "statistics",
    "EstimateQuality": "gradients_quality",
    "Gain": "transplanting",
    "HeadEffect": "effects",
    "HeadSelection": "heads",
    "HeadSets": "heads",
    "PatchError": "edits",
    "Pool": "controls",
    "Restoration": "effects",
    "Shares": "statistics",
    "Study": "studies",
    "SweepPlan": "plan",
    "SweepResult": "sweeping",
    "Transplant": "transplanting",
    "ablation_cells": "heads",
    "ablation_study": "heads_ablation",
    "attribution": "gradients",
    "control_donors": "controls",
    "derangement": "controls",
    "detectable_effect": "statistics",
    "direct_effects": "direct_path",
    "donor_from_run": "studies_capture",
    "donor_from_store": "donors",
    "estimate_quality": "gradients_quality",
    "full_forward": "sweeping",
    "gain_carried": "transplanting",
    "head_cells": "edits",
    "head_map": "edits",
    "head_set_cell": "effects",
    "head_sets": "heads",
    "items_needed": "statistics",
    "largest_change": "controls",
    "layer_cells": "edits",
    "mean_donor": "reference_donors",
    "mean_interval": "statistics",
    "monotone_by_construction": "studies",
    "norm_matched_random": "controls",
    "pair_kind": "studies",
    "patch_study": "studies",
    "random_head_sets": "effects",
    "rank_heads": "effects",
    "refuse_other_tokens": "transplanting",
    "resample_donor": "reference_donors",
    "resample_rows": "reference_donors",
    "restoration": "effects",
    "run_study": "studies",
    "select_heads": "heads",
    "share_flipped": "effects",
    "share_interval": "statistics",
    "sign_flip_p": "statistics",
    "signed_effect": "effects",
    "span_cells": "edits",
    "sweep": "sweeping",
    "sweep_plan": "plan",
    "transplant": "transplanting",
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
