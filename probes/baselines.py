"""Surface baselines: what a probe can read off the prompt's tokens without any model.

Problem. A label that follows from the surface (a prompt that is longer, a name or word that comes with one answer, a
template) is perfectly decodable at every layer, the embeddings included. Such a probe says that the prompt gives the
answer away, not that the model worked it out: a high AUROC at layer 0 is a red flag.

Mechanism. The token ids of each prompt become features of one layer, [1, row, feature], which `probes.linear.fit_probes`
takes as it takes activations: same folds, same penalty, same shuffles. An activation says something only beyond what
these reach on the same rows.

- `bag_of_tokens`: how often each token occurs, without its place.
- `prompt_length`: how many tokens there are.

Constraint. A bag of words does not see order or place: where the label follows from "A before B" both baselines stay at
chance although the text determines the answer, which is what one wants of a reasoning task.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from probes.errors import ProbeError


def bag_of_tokens(ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Return how often each token id occurs in each prompt of `ids` [row][token], as float32 [1, row, feature].

    Features are the ids whose count differs between rows, in rising order; memory grows with those, not with the
    vocabulary. If no count differs there is one feature of zeros, whose probe is at chance.
    """
    rows = _checked(ids)
    lengths = [len(row) for row in rows]
    # A number for each token that occurs, so that a row counts tokens of this study and not of the vocabulary.
    names, codes = np.unique(np.concatenate(rows), return_inverse=True)
    places = np.repeat(np.arange(len(rows)), lengths)
    # The table is built for tokens that vary alone: a token is constant if every row holds it, and equally often.
    pairs, counts = np.unique(places * len(names) + codes, return_counts=True)
    row, token = np.divmod(pairs, len(names))
    held = np.bincount(token, minlength=len(names))
    least = np.full(len(names), np.iinfo(np.int64).max)
    most = np.zeros(len(names), dtype=np.int64)
    np.minimum.at(least, token, counts)
    np.maximum.at(most, token, counts)
    varies = (held < len(rows)) | (least < most)
    features = np.zeros((1, len(rows), max(1, int(varies.sum()))), dtype=np.float32)
    kept = varies[token]
    features[0, row[kept], (np.cumsum(varies) - 1)[token[kept]]] = counts[kept]
    return features


def prompt_length(ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Return the number of tokens of each prompt of `ids` [row][token], as float32 [1, row, 1]."""
    return np.array([len(row) for row in _checked(ids)], dtype=np.float32)[None, :, None]


def _checked(ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
    """Return the rows as integer arrays; none may be empty."""
    if len(ids) == 0:
        raise ProbeError("ids holds 0 prompts; needed the token ids of at least one")
    rows = [np.asarray(row) for row in ids]
    for index, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ProbeError(f"ids of row {index} have shape {row.shape}; needed a list of at least one token id")
        if not np.issubdtype(row.dtype, np.integer):
            raise ProbeError(f"ids of row {index} hold {row.dtype} values; token ids are whole numbers")
    return [row.astype(np.int64) for row in rows]
