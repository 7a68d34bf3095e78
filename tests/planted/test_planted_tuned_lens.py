"""A tuned lens reads what a layer says about the model's final answer: earlier than the plain lens, and never more.

On the plants both are known. The standing default and the override are written late but are the same in every row, so a
translator knows them from layer 0 on. The signal is not in layer 0, and no translator can put it there. Where the signal
is erased at layer 3, the plain lens shows it at layers 1 and 2, and the tuned lens, which is fitted to the final answer,
does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules
from experiments.inside import unembedder
from probes.decompose import decompose_layers
from probes.lens import lens
from probes.tuned_lens import fit_tuned_lens
from tests.planted.family import Switches
from tests.planted.models import DEFAULT, OVERRIDE, SCALE, Kind
from tests.planted.observed import network, observed

COUNT = 400


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Default and signal by layer on held-out instances, through the plain and the tuned lens."""

    plain_default: np.ndarray
    plain_signal: np.ndarray
    default: np.ndarray
    signal: np.ndarray


@cache
def curves(kind: Kind) -> Curves:
    seen = observed(kind, COUNT)["equivalent"]
    model = from_modules(*network(kind))
    unembed = unembedder(model, answer_tokens(model, Switches.answers))
    with torch.random.fork_rng(devices=[]):
        tuned = fit_tuned_lens(seen.resid_post, model.logits_of, seen.keys, seed=0)
    translated = lens(seen.resid_post, unembed, tuned=tuned, groups=seen.keys)
    kept = ~translated.in_sample
    assert kept.mean() == pytest.approx(0.25, abs=0.02)
    found = []
    for difference in (lens(seen.resid_post, unembed).difference, translated.difference):
        split = decompose_layers(difference[:, kept], seen.cells[kept], seen.gold[kept], resamples=100, seed=0)
        found += [np.array([one.delta for one in split]), np.array([one.signal for one in split])]
    return Curves(*found)


def test_what_is_written_late_but_always_is_known_early() -> None:
    found = curves("late_override")
    np.testing.assert_allclose(found.plain_default[:4], [0, 0, SCALE * DEFAULT, SCALE * DEFAULT], atol=0.3)
    np.testing.assert_allclose(found.default[1:], SCALE * (DEFAULT + OVERRIDE), rtol=0.15)
    assert abs(found.signal[0]) < 0.5
    np.testing.assert_allclose(found.signal[1:], SCALE, rtol=0.15)


def test_a_signal_that_will_be_erased_is_not_in_the_tuned_lens() -> None:
    found = curves("early_loss")
    np.testing.assert_allclose(found.plain_signal[1:3], SCALE, rtol=0.1)
    assert (np.abs(found.signal) < 0.3).all(), found.signal
    np.testing.assert_allclose(found.default[1:], SCALE * DEFAULT, atol=0.3)


def test_no_translation_makes_an_answer_that_is_not_there() -> None:
    found = curves("no_signal")
    assert (np.abs(found.signal) < 0.3).all(), found.signal
