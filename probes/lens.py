"""Logit lens: what the model would answer if it stopped after a layer.

Problem. A failure can come early (the right answer never forms) or late (it forms and is overridden). Reading every
layer's residual stream through the model's own final norm and unembedding shows at which layer the answer appears.

Mechanism. `unembed` is a function on plain arrays, so nothing here knows a model. It must use the model's real final
norm, head, scale and softcap; then the last layer of the lens is the model's own readout, and `final_gap` measures that
it is. A lens whose last layer disagrees with the model is a lens for another model.

Three readings guard each other. `difference` compares the answer labels with each other; early layers often prefer one
of them while all their probability lies on other tokens. `off_label_mass` is that probability: where it is near 1, the
layer does not answer yet, whatever the sign of the difference. `rank` says how many tokens stand before a label, which
still moves where the mass is 1 to every digit.

The lens assumes that a middle layer writes in the last layer's coordinates. `probes.tuned_lens` learns a translation
instead; its result goes in as `tuned`, and the rows it was fitted on come out flagged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, binary, checked, same_rows
from probes.errors import ProbeError
from probes.keyed import generator

PLAIN = "logit lens through the model's final norm and unembedding"


class Unembedded(Protocol):
    """What `unembed` returns for rows [row, feature] of one layer."""

    @property
    def logit(self) -> npt.NDArray[np.floating]:
        """Logit of each answer label, [row, label]: log-sum-exp over the label's token variants."""

    @property
    def logsumexp(self) -> npt.NDArray[np.floating]:
        """Log-sum-exp over the whole vocabulary, [row]."""


@runtime_checkable
class Ranked(Protocol):
    """What `unembed` may return besides."""

    @property
    def rank(self) -> npt.NDArray[np.integer]:
        """Rank of each label among the whole vocabulary, [row, label], by its best variant; 1 is the most likely."""

    @property
    def top(self) -> npt.NDArray[np.integer]:
        """The most likely token id, [row]."""


class Translation(Protocol):
    """A tuned lens: what turns a layer's rows into the last layer's coordinates."""

    @property
    def method(self) -> str:
        """One line that says how it was fitted."""

    @property
    def layers(self) -> int:
        """How many layers it has a translation for."""

    def translate(self, layer: int, rows: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """Rows [row, feature] of a layer, translated."""

    def in_sample(self, groups: npt.ArrayLike) -> BoolArray:
        """Which of these rows belong to an instance that the translation was fitted on, [row]."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LensResult:
    """The readout after each layer, for the same rows; labels in the order that `unembed` gives them.

    `difference` [layer, row] is the first label's logit less the second's, `logit` [layer, row, label] both, and
    `off_label_mass` [layer, row] the probability of all tokens that are no answer label. `rank` [layer, row, label] and
    `top` [layer, row] are there if `unembed` gives them. `in_sample` [row] marks rows whose instance a tuned lens was
    fitted on: their numbers flatter it, so summaries belong on the others. It is False throughout for a plain lens.
    """

    difference: FloatArray
    logit: FloatArray
    off_label_mass: FloatArray
    rank: IntArray | None
    top: IntArray | None
    in_sample: BoolArray
    n: int
    method: str = PLAIN

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


def lens(
    resid: npt.NDArray[np.floating],
    unembed: Callable[[npt.NDArray[np.floating]], Unembedded],
    *,
    tuned: Translation | None = None,
    groups: npt.ArrayLike | None = None,
) -> LensResult:
    """Read `resid` [layer, row, feature] through `unembed`, one layer at a time, translated first if `tuned` is given.

    With `tuned`, `groups` [row] names the instance of each row, as it did for the fit.
    """
    stream = checked("resid", resid, ("layer", "row", "feature"))
    rows_seen = stream.shape[1]
    in_sample, method = np.zeros(rows_seen, dtype=np.bool_), PLAIN
    if tuned is not None:
        if tuned.layers != len(stream):
            raise ProbeError(f"resid has {len(stream)} layers and the tuned lens {tuned.layers}; both need the same")
        if groups is None:
            raise ProbeError("a tuned lens needs groups [row], to tell the rows it was fitted on from the others")
        names = checked("groups", groups, ("row",))
        same_rows("groups", len(names), "resid", rows_seen)
        in_sample = tuned.in_sample(names)
        fitted = int(in_sample.sum())
        method = f"{tuned.method}; {rows_seen - fitted} rows held out" + (f", {fitted} in sample" if fitted else "")
    logits, missing, ranks, tops = [], [], [], []
    for layer, rows in enumerate(stream):
        seen = unembed(rows if tuned is None else tuned.translate(layer, rows))
        logit = checked("unembed(...).logit", seen.logit, ("row", "label")).astype(np.float64)
        whole = checked("unembed(...).logsumexp", seen.logsumexp, ("row",)).astype(np.float64)
        same_rows("unembed(...).logit", len(logit), "resid", rows_seen)
        same_rows("unembed(...).logsumexp", len(whole), "resid", rows_seen)
        if logit.shape[1] < 2:
            raise ProbeError(f"unembed gives {logit.shape[1]} label; a difference needs 2 labels or more")
        logits.append(logit)
        # Rounding can put the labels' share a hair above 1; a probability stays in [0, 1].
        missing.append(np.clip(1.0 - np.exp(logit - whole[:, None]).sum(axis=1), 0.0, 1.0))
        if isinstance(seen, Ranked):
            ranks.append(checked("unembed(...).rank", seen.rank, ("row", "label")).astype(np.int64))
            tops.append(checked("unembed(...).top", seen.top, ("row",)).astype(np.int64))
            same_rows("unembed(...).rank", len(ranks[-1]), "resid", rows_seen)
            same_rows("unembed(...).top", len(tops[-1]), "resid", rows_seen)
    stacked = np.stack(logits)
    return LensResult(
        difference=stacked[:, :, 0] - stacked[:, :, 1],
        logit=stacked,
        off_label_mass=np.stack(missing),
        rank=np.stack(ranks) if ranks else None,
        top=np.stack(tops) if tops else None,
        in_sample=in_sample,
        n=rows_seen,
        method=method,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledLayer:
    """The median layer at which the final answer settles, and its interval over instances.

    `n` rows have an answer and `undecided` rows have none; `reason` is empty unless a number is NaN.
    """

    median: float
    low: float
    high: float
    n: int
    undecided: int
    instances: int
    level: float
    method: str
    reason: str = ""


def settled_layer(
    difference: npt.NDArray[np.floating],
    groups: npt.ArrayLike,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int,
) -> SettledLayer:
    """Summarise `answer_layer` over the rows of `difference` [layer, row], whose instances are `groups` [row].

    Instances are drawn again with all their rows, since the rows of one instance are no separate evidence. The ends of
    the interval are layers of the resamples, rounded outwards: a median of layers moves in steps.
    """
    layers = answer_layer(difference)
    names = checked("groups", groups, ("row",))
    same_rows("groups", len(names), "difference", len(layers))
    if resamples < 1 or not 0 < level < 1:
        raise ProbeError(f"resamples is {resamples} and level {level}; needed at least 1 and between 0 and 1")
    decided = np.isfinite(layers)
    n, instances = int(decided.sum()), len(np.unique(names[decided]))
    median, low, high, reason = (float(np.median(layers[decided])) if n else np.nan), np.nan, np.nan, ""
    if instances < 2:
        reason = "no row has an answer" if n == 0 else "no interval: all rows with an answer are of one instance"
    else:
        codes = np.unique(names[decided], return_inverse=True)[1]
        at = np.zeros((instances, len(difference)))
        np.add.at(at, (codes, layers[decided].astype(np.int64)), 1)
        drawn = generator(seed, "probes.lens.settled").multinomial(instances, [1 / instances] * instances, resamples)
        medians = _medians(drawn @ at)
        low = float(np.quantile(medians, (1 - level) / 2, method="lower"))
        high = float(np.quantile(medians, (1 + level) / 2, method="higher"))
    return SettledLayer(
        median=median,
        low=low,
        high=high,
        n=n,
        undecided=len(layers) - n,
        instances=instances,
        level=level,
        method=f"median over rows, percentile bootstrap over instances ({resamples} resamples)",
        reason=reason,
    )


def _medians(counts: FloatArray) -> FloatArray:
    """Return the median layer of each row of `counts` [resample, layer]."""
    running = counts.cumsum(axis=1)
    total = running[:, -1:]
    lower = (running < np.ceil(total / 2)).sum(axis=1)
    upper = (running < np.floor(total / 2) + 1).sum(axis=1)
    middle: FloatArray = (lower + upper) / 2
    return middle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Overtaken:
    """Rows whose right answer led at a layer and lost in the end.

    `at` [row] is the first layer from which the wrong answer stays ahead, and `lead_layer` [row] the layer before it at
    which the right answer led by most; both are NaN where the row ends right, undecided, or never had the right answer
    ahead. `share` is theirs among the `wrong` rows that end wrong. `mirror_share` is the same for the other side: among
    the `right` rows that end right, those in which the wrong answer led first. A lens that leans to one label at a
    layer, whatever the question, makes both alike, so a share means something only by how far it exceeds the mirror.
    """

    at: FloatArray
    lead_layer: FloatArray
    share: float
    wrong: int
    mirror_share: float
    right: int


def overtaken_at(
    difference: npt.NDArray[np.floating],
    gold: npt.ArrayLike,
    *,
    off_label_mass: npt.NDArray[np.floating] | None = None,
    max_off_label: float = 1.0,
) -> Overtaken:
    """Find where the right answer (`gold` [row], 1 = first label) led and was overtaken in `difference` [layer, row].

    With `off_label_mass` [layer, row], an answer leads only where at most `max_off_label` of the probability lies on
    other tokens. Subtract the default of each layer from `difference` to see the instance's part alone.
    """
    values = checked("difference", difference, ("layer", "row")).astype(np.float64)
    answers = binary("gold", gold)
    same_rows("gold", len(answers), "difference", values.shape[1])
    if not 0 < max_off_label <= 1:
        raise ProbeError(f"max_off_label is {max_off_label}; a share above 0 and at most 1 is needed")
    speaks = np.ones(values.shape, dtype=np.bool_)
    if off_label_mass is not None:
        mass = checked("off_label_mass", off_label_mass, ("layer", "row"))
        if mass.shape != values.shape:
            raise ProbeError(f"off_label_mass has shape {mass.shape} and difference {values.shape}; both need the same")
        speaks = mass <= max_off_label
    elif max_off_label < 1:
        raise ProbeError(f"max_off_label is {max_off_label} and off_label_mass is not given; give it, [layer, row]")
    lead = values * np.where(answers == 1, 1.0, -1.0)
    settled = answer_layer(values)
    before = speaks & (np.arange(len(values))[:, None] < settled)
    led, trailed = (np.count_nonzero(before & (side * lead > 0), axis=0) > 0 for side in (1, -1))
    wrong, right = lead[-1] < 0, lead[-1] > 0
    lost = wrong & led
    largest = np.where(before & (lead > 0), lead, -np.inf).argmax(axis=0)
    return Overtaken(
        at=np.where(lost, settled, np.nan),
        lead_layer=np.where(lost, largest, np.nan),
        share=float(led[wrong].mean()) if wrong.any() else np.nan,
        wrong=int(wrong.sum()),
        mirror_share=float(trailed[right].mean()) if right.any() else np.nan,
        right=int(right.sum()),
    )
