"""Many AUROCs in one ranking, against scikit-learn's curve for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from probes.auroc import auroc


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_equals_scikit_learn_with_ties(rows):
    scores, labels = np.array([row[0] for row in rows], dtype=float), np.array([row[1] for row in rows])
    area = auroc(scores[:, None], labels[:, None])[0]
    if labels.all() or not labels.any():
        assert np.isnan(area)
    else:
        assert area == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_columns_are_independent():
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(40, 9)).round(1), rng.integers(0, 2, size=(40, 9))
    expected = [roc_auc_score(labels[:, one], scores[:, one]) for one in range(9)]
    np.testing.assert_allclose(auroc(scores, labels), expected, atol=1e-12)
