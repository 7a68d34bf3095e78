"""Controls on the plants: where the answer begins, what two models differ in, and what the words alone give away."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from probes.baselines import bag_of_tokens, prompt_length
from probes.controls import auroc_interval, contrast, first_layer_interval
from probes.linear import ProbeResult, fit_probes
from tests.planted.models import PLANTS, Kind
from tests.planted.observed import observed

COUNT = 160
OPTIONS = {"folds": 4, "seed": 3}


@cache
def probed(kind: Kind, presentation: str = "equivalent") -> ProbeResult:
    seen = observed(kind, COUNT)[presentation]
    return fit_probes(seen.resid_post, seen.gold, seen.keys, shuffles=0, **OPTIONS)


@pytest.mark.parametrize("kind", PLANTS)
def test_the_first_layer_is_the_signal_heads(kind: Kind) -> None:
    for presentation in ("original", "equivalent"):
        found = first_layer_interval(probed(kind, presentation), threshold=0.9, resamples=500, seed=0)
        if presentation == "equivalent" and kind == "no_signal":
            assert found.layer is None and found.high is None and found.never_share > 0.95
        else:
            assert (found.layer, found.low, found.high) == (1, 1, 1)


@pytest.mark.parametrize("kind", PLANTS)
def test_intervals_hold_chance_where_there_is_nothing(kind: Kind) -> None:
    found = auroc_interval(probed(kind))
    absent = {"no_signal": [0, 1, 2, 3, 4, 5], "early_loss": [0, 3, 4, 5]}.get(kind, [0])
    present = [layer for layer in range(6) if layer not in absent]
    assert (found.low[absent] < 0.5).all() and (found.high[absent] > 0.5).all()
    assert (found.low[present] > 0.95).all()


def test_two_models_differ_where_one_of_them_loses_the_answer() -> None:
    """The two plants share embeddings and everything up to layer 1: as base and adapter do, on the same rows and folds."""
    before, after = probed("late_override"), probed("early_loss")
    found = contrast(before, after, resamples=500, seed=0)
    assert (np.abs(found.difference[:3]) < 0.01).all()
    assert (found.difference[3:] < -0.3).all() and (found.high[3:] < -0.15).all()
    assert found.p_max < 0.01
    none = contrast(before, probed("shared_override"), resamples=500, seed=0)
    assert (np.abs(none.difference[1:]) < 0.01).all() and not none.p_max < 0.05


def test_words_and_length_do_not_give_the_answer_away() -> None:
    for seen in observed("late_override", COUNT).values():
        words = fit_probes(bag_of_tokens(seen.ids), seen.gold, seen.keys, shuffles=39, **OPTIONS)
        assert words.auroc[0] < 0.65 and words.p_max > 0.05, words.auroc
        # All prompts of a presentation are equally long.
        length = fit_probes(prompt_length(seen.ids), seen.gold, seen.keys, shuffles=39, allow_constant=True, **OPTIONS)
        assert length.auroc[0] == 0.5 and length.p_max == 1
