"""Logit lens: what the model would answer if it stopped after a layer.

Problem. A failure can come early (the right answer never forms) or late (it forms and is overridden). Reading every
layer's residual stream through the model's own final norm and unembedding shows at which layer the answer appears.

Mechanism. `unembed` is a function on plain arrays, so nothing here knows a model. It must use the model's real final
norm, head, scale and softcap; then the last layer of the lens is the model's own readout, and `final_gap` measures that
it is. A lens whose last layer disagrees with the model is a lens for another model.

Two readings guard each other. `difference` compares the answer labels with each other; early layers often prefer one of
them while all their probability lies on other tokens. `off_label_mass` is that probability: where it is near 1, the
layer does not answer yet, whatever the sign of the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from probes.arrays import FloatArray, checked, same_rows
from probes.errors import ProbeError


class Unembedded(Protocol):
    """What `unembed` returns for rows [row, feature] of one layer."""

    @property
    def logit(self) -> npt.NDArray[np.floating]:
        """Logit of each answer label, [row, label]: log-sum-exp over the label's token variants."""

    @property
    def logsumexp(self) -> npt.NDArray[np.floating]:
        """Log-sum-exp over the whole vocabulary, [row]."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LensResult:
    """The readout after each layer, for the same rows; labels in the order that `unembed` gives them.

    `difference` [layer, row] is the first label's logit less the second's, `logit` [layer, row, label] both, and
    `off_label_mass` [layer, row] the probability of all tokens that are no answer label.
    """

    difference: FloatArray
    logit: FloatArray
    off_label_mass: FloatArray
    n: int
    method: str = "logit lens through the model's final norm and unembedding"

    @property
    def answer_layer(self) -> FloatArray:
        """The first layer of each row's final answer, see `answer_layer`."""
        return answer_layer(self.difference)

    def final_gap(self, logit: npt.NDArray[np.floating]) -> float:
        """Return how far the last layer is from the model's own `logit` [row, label], relative to the largest logit."""
        own = np.asarray(logit, dtype=np.float64)
        if own.shape != self.logit[-1].shape:
            raise ProbeError(f"logit has shape {own.shape} and the lens {self.logit[-1].shape}; both need [row, label]")
        return float(np.abs(self.logit[-1] - own).max() / np.abs(own).max())


def lens(resid: npt.NDArray[np.floating], unembed: Callable[[npt.NDArray[np.floating]], Unembedded]) -> LensResult:
    """Read `resid` [layer, row, feature] through `unembed`, one layer at a time."""
    stream = checked("resid", resid, ("layer", "row", "feature"))
    logits, missing = [], []
    for rows in stream:
        seen = unembed(rows)
        logit = checked("unembed(...).logit", seen.logit, ("row", "label")).astype(np.float64)
        whole = checked("unembed(...).logsumexp", seen.logsumexp, ("row",)).astype(np.float64)
        same_rows("unembed(...).logit", len(logit), "resid", stream.shape[1])
        same_rows("unembed(...).logsumexp", len(whole), "resid", stream.shape[1])
        if logit.shape[1] < 2:
            raise ProbeError(f"unembed gives {logit.shape[1]} label; a difference needs 2 labels or more")
        logits.append(logit)
        # Rounding can put the labels' share a hair above 1; a probability stays in [0, 1].
        missing.append(np.clip(1.0 - np.exp(logit - whole[:, None]).sum(axis=1), 0.0, 1.0))
    stacked = np.stack(logits)
    return LensResult(
        difference=stacked[:, :, 0] - stacked[:, :, 1],
        logit=stacked,
        off_label_mass=np.stack(missing),
        n=stream.shape[1],
    )


def answer_layer(difference: npt.NDArray[np.floating]) -> FloatArray:
    """Return, for each row of `difference` [layer, row], the first layer from which its sign stays the final one.

    A layer that has the final sign but loses it again does not count: the answer is there from the last change on. A
    row whose final difference is 0 or NaN has no answer, so its layer is NaN.
    """
    signs = np.sign(checked("difference", difference, ("layer", "row")).astype(np.float64))
    stays = np.logical_and.accumulate((signs == signs[-1])[::-1], axis=0)
    first = len(signs) - stays.sum(axis=0).astype(np.float64)
    undecided = np.isnan(signs[-1]) | (signs[-1] == 0)
    layers: FloatArray = np.where(undecided, np.nan, first)
    return layers
