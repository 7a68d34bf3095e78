"""A wrong answer's label is the planted cause: nine of ten wrong equivalents, and none where there is nothing to find."""

from __future__ import annotations

import numpy as np
import pytest

from probes.decompose import decompose
from probes.failure_shares import shares
from probes.failures import LABELS, Failures, label_failures
from probes.linear import fit_probes
from tests.planted.models import KINDS, TRUTH, Kind
from tests.planted.observed import Observed, knows, observed, sets

COUNT = 120


def labelled(seen: Observed) -> Failures:
    split = decompose(seen.readout, seen.cells, seen.gold, resamples=200, seed=0)
    return label_failures(
        seen.resid_post,
        seen.gold,
        seen.keys,
        seen.readout,
        split.delta,
        seen.right,  # the planted models say what they lean to
        result=fit_probes(seen.resid_post, seen.gold, seen.keys, folds=4, shuffles=39, seed=3),
        reads=split.signal_low > 0 or split.signal_high < 0,
        splits=3,
        folds=4,
        seed=3,
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if TRUTH[kind].label is not None])
def test_wrong_equivalents_get_the_planted_label(kind: Kind) -> None:
    truth, seen = TRUTH[kind], observed(kind, COUNT)["equivalent"]
    found = labelled(seen)
    wrong = ~seen.right
    assert wrong.sum() >= 0.4 * COUNT
    assert (found.failed == wrong).all()
    counts = {label: int((found.label[wrong] == label).sum()) for label in LABELS}
    assert counts[truth.label] >= 0.9 * wrong.sum(), counts
    at = found.lost_at[found.label == "lost"]
    if truth.lost_layer is not None:
        assert (at == truth.lost_layer).mean() >= 0.95
        assert (found.lost_at[found.label != "lost"] == -1).all()
    if truth.label in ("overridden", "reversed", "lost"):
        assert np.nanmean(found.share[wrong]) >= 0.9
        # Verdicts that were tosses would give this label at most about half of the time.
        toss = shares(found.label, {"all": ["all"] * COUNT}, groups=seen.keys, tossed=found.tossed)
        one = next(share for share in toss if share.label == truth.label)
        assert one.low > one.coin, one
    else:
        assert not found.readable.any()


def test_an_answer_that_is_there_and_not_read_is_mixed() -> None:
    """The answer is decodable to the end, on a feature that has no part in the readout, so the signal is noise.

    Neither "the default decided against the signal" nor "the signal points away" is true of these rows.
    """
    seen = observed("unread", COUNT)["equivalent"]
    found, wrong = labelled(seen), ~seen.right
    counts = {label: int((found.label[wrong] == label).sum()) for label in LABELS}
    assert counts["mixed"] == wrong.sum(), counts
    assert found.readable[-1, wrong].mean() >= 0.9


def test_two_causes_side_by_side_are_told_apart_row_by_row() -> None:
    """Half of the overridden equivalents never had a signal: their label has to follow the row and not the majority."""
    count = 240
    seen = observed("blend", count)["equivalent"]
    found, wrong = labelled(seen), ~seen.right
    known = np.array([knows(matched) for matched in sets(count)])
    overridden = found.label == "overridden"
    assert overridden[wrong & known].mean() >= 0.9
    # The rule promises at most a fifth of chance hits among the rows that it calls readable.
    assert (~known)[wrong & overridden].mean() <= 0.25
    assert np.isin(found.label[wrong & ~known], ("not_decodable", "mixed")).mean() >= 0.5
    assert (found.label[wrong] == "lost").mean() <= 0.05


def test_originals_have_nothing_to_explain() -> None:
    seen = observed("late_override", COUNT)["original"]
    found = labelled(seen)
    assert (found.label == "right").mean() >= 0.99
    assert found.readable[1:].mean() >= 0.99
    assert not found.readable[0].any()
