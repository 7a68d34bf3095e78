"""Values that numpy would take without a word: missing names, NaN flags, features whose square overflows."""

from __future__ import annotations

import numpy as np
import pytest

from probes.arrays import finite, flags
from probes.errors import ProbeError
from probes.folds import given_folds, group_codes, unit_folds
from probes.linear import MEMBERS, fit_probes

LABELS = np.arange(40) % 2
ACTS = np.random.default_rng(0).standard_normal((2, 40, 5))


@pytest.mark.parametrize(
    "missing", [np.array([0.0, np.nan, np.nan]), np.array(["a", None, float("nan")], dtype=object)]
)
def test_missing_names_are_no_instance(missing):
    with pytest.raises(
        ProbeError, match=r"groups holds 2 missing names \(NaN or None\), the first in row 1; name each"
    ):
        group_codes(missing)
    with pytest.raises(ProbeError, match="assigned holds 2 missing names"):
        given_folds(missing, LABELS[:3], np.arange(3))
    with pytest.raises(ProbeError, match="held_out holds 2 missing names"):
        unit_folds(missing, LABELS[:3])


def test_names_of_any_kind_are_numbered():
    for names in ([3.0, 1.0, 3.0], ["b", "a", "b"], np.array(["b", "a", "b"], dtype=object)):
        assert group_codes(names).tolist() == [1, 0, 1]


def test_flags_are_true_or_false():
    assert flags("text", [True, False]).tolist() == flags("text", [1.0, 0.0]).tolist() == [True, False]
    assert flags("text", np.array([True, np.False_, 1], dtype=object)).tolist() == [True, False, True]
    for wrong in (2, np.nan, None, "yes"):
        with pytest.raises(ProbeError, match="text holds 1 values that are neither true nor false"):
            flags("text", np.array([True, wrong], dtype=object))


@pytest.mark.parametrize("member", MEMBERS)
def test_features_whose_square_overflows_are_named(member):
    large = ACTS.copy()
    large[1, 7, 2] = -1e200
    with pytest.raises(
        ProbeError, match=r"features holds 1e\+200 at layer 1, whose square overflows.*scale them"
    ) as caught:
        fit_probes(large, LABELS, np.arange(40), member=member, shuffles=0, seed=0)
    assert "\n" not in str(caught.value)


def test_as_large_as_allowed_is_fitted():
    found = fit_probes(ACTS * 1e149, LABELS, np.arange(40), shuffles=0, seed=0)
    np.testing.assert_allclose(found.margins, fit_probes(ACTS, LABELS, np.arange(40), shuffles=0, seed=0).margins)


def test_float32_and_half_cannot_overflow_and_are_not_searched():
    finite("features", np.full((1, 2, 3), 3e38, dtype=np.float32))
    finite("features", np.full((1, 2, 3), 6e4, dtype=np.float16))
