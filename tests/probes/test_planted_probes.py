"""Probes find the answer at the layers where it was put, lose it where it was taken away, and find nothing in noise.

The expected layers are those of ``tests/planted/models.py``, whose own tests check them with scikit-learn.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from probes.linear import MEMBERS, ProbeResult, Reading, fit_probes
from tests.planted.models import LAYERS, PLANTS, TRUTH, Kind
from tests.planted.observed import observed

COUNT = 160
HERE = np.arange(LAYERS) >= 1


@cache
def probed(kind: Kind, trained: str, read: str, member: str = "logistic") -> ProbeResult:
    """Probes of one presentation, which also read the other; labels exchanged within cells of one direction."""
    seen = observed(kind, COUNT)
    own, other = seen[trained], seen[read]
    return fit_probes(
        own.resid_post,
        own.gold,
        own.keys,
        strata=np.array([cell.partition("-")[0] for cell in own.cells]),
        readings={read: Reading(other.resid_post, other.gold, other.keys)},
        member=member,
        folds=4,
        shuffles=39,
        seed=3,
    )


def expected(kind: Kind, presentation: str) -> np.ndarray:
    """At which layers the answer is there."""
    if presentation == "original":
        return HERE
    if kind == "no_signal":
        return HERE & False
    lost = TRUTH[kind].lost_layer
    return HERE if lost is None else HERE & (np.arange(LAYERS) < lost)


@pytest.mark.parametrize("presentation", ["original", "equivalent"])
@pytest.mark.parametrize("kind", PLANTS)
def test_the_curve_is_the_planted_one(kind: Kind, presentation: str) -> None:
    other = "equivalent" if presentation == "original" else "original"
    found, here = probed(kind, presentation, other), expected(kind, presentation)
    assert (found.auroc[here] > 0.99).all(), found.auroc
    _, _, high = found.null_band((0.025, 0.5, 0.99))
    assert (found.auroc[~here] <= np.maximum(high[~here], 0.62)).all(), (found.auroc, high)
    assert (found.above_null == here).all(), found.auroc
    assert (found.p_max <= 0.05) == bool(here.any())
    first = found.first_layer(0.9)
    assert first == (int(np.flatnonzero(here)[0]) if here.any() else None)
    assert (found.selectivity[here] > 0.35).all()
    if here.any():
        assert set(found.chosen_layer) <= set(np.flatnonzero(here))
        assert found.decodable.mean() > 0.98


@pytest.mark.parametrize("member", MEMBERS)
def test_every_kind_of_probe_finds_and_loses_it(member: str) -> None:
    found = probed("early_loss", "equivalent", "original", member)
    here = expected("early_loss", "equivalent")
    assert (found.auroc[here] > 0.99).all()
    assert (found.auroc[~here] < 0.7).all(), found.auroc
    assert found.p_max <= 0.05


@pytest.mark.parametrize("member", MEMBERS)
def test_the_signal_is_read_over_unless_it_is_absent_or_turned_around(member: str) -> None:
    """Probes of the original, read on the equivalent of held-out instances."""

    def read_over(kind: Kind) -> np.ndarray:
        return probed(kind, "original", "equivalent", member).readings["equivalent"].auroc

    assert (read_over("late_override")[HERE] > 0.99).all()
    # A bias along the signal moves every margin and no rank.
    assert (read_over("shared_override")[HERE] > 0.99).all()
    assert (read_over("reversed")[HERE] < 0.01).all()
    for kind in ("no_signal", "unread"):  # what is written aside is decodable, and not by the original's probe
        assert (np.abs(read_over(kind) - 0.5) < 0.15).all(), (kind, read_over(kind))
    lost = read_over("early_loss")
    assert (lost[1:3] > 0.99).all() and (np.abs(lost[3:] - 0.5) < 0.2).all(), lost
    for kind in PLANTS:
        assert abs(read_over(kind)[0] - 0.5) < 0.15


def test_a_reading_says_for_each_row_what_the_probe_thinks() -> None:
    same = probed("late_override", "original", "equivalent")
    reading = same.readings["equivalent"]
    assert reading.decodable(same.chosen_layer).mean() > 0.98
    assert reading.p_max <= 0.05
    turned = probed("reversed", "original", "equivalent")
    assert turned.readings["equivalent"].decodable(turned.chosen_layer).mean() < 0.02
    assert turned.readings["equivalent"].p_max > 0.5
    # A late default along the signal: the last layer's probe calls everything yes, the layers before it are not moved.
    moved = probed("shared_override", "original", "equivalent").readings["equivalent"]
    yes = (moved.margins > 0).mean(axis=1)
    assert (yes[4:] > 0.95).all()
    np.testing.assert_allclose(yes[1:4], 0.5, atol=0.05)


@pytest.mark.parametrize(("trained", "read"), [("original", "equivalent"), ("equivalent", "original")])
def test_random_weights_hold_nothing(trained: str, read: str) -> None:
    found = probed("none", trained, read)
    assert not found.above_null.any(), found.auroc
    assert found.p_max > 0.05
    assert found.first_layer(0.9) is None
    assert found.readings[read].p_max > 0.05
