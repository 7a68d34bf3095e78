"""Failure attribution: a wrong readout gets one label, and the label a measure of how far it can be trusted.

Problem. "The model knew it and said something else" is easily read off any probe. Of thirty layers some layer is right
about every row by luck; about a row of which it knows nothing a probe is right half of the time; and refits share most
of their training rows, so that they agree even about such rows. In simulated studies (12 layers, 400 rows, AUROC 0.97)
the sign of the margin alone calls 42 % of the rows whose answer was gone "still there", the rule below 5 %.

Words. *Toward gold* means with the sign that makes the gold answer positive. `signal` is readout - default, toward gold.
A layer is *decodable* if its AUROC beats the largest AUROC over layers of all but 5 % of the label shuffles,
(1 + shuffles whose best layer is as good) / (1 + shuffles) <= 0.05. So "some layer is decodable" and "p_max <= 0.05" are
the same statement. The *chosen* layer is the best one on the other folds, fixed before the row is looked at.

At a decodable layer a row is *right* if its held-out margin toward gold is at least t, *not right* if it is 0 or less, and
*open* between. Rows that the probe knows nothing about lie on both sides of 0 alike, so those beyond -t count how many of
them are beyond t. Over the failed rows of the layer, t is the smallest value at which

    (1 + weight at or below -t) / (weight at or above t) <= 0.2

so that of the rows called right at most a fifth are expected to owe it to chance (the mirror estimate of false
discoveries, Barber and Candès). A row weighs 1 / the failed rows of its instance: rows of one instance are one piece of
evidence, and their margins change sign together. Counted each for itself, they are coins that fall alike: with forty
failed instances of three such rows each, none of them known to the probe, some row is called right in 22 % of simulated
studies, and in 1 % with these weights (3 % with one row an instance). So the fifth is one of instances, each spread
evenly over its failed rows, which may differ among themselves. Where no t does, no row is right: with fewer than five
failed instances none can be. At a layer that is not decodable every row is not right.

The decision list, first match, for one way of dealing the folds:

1. the readout gives the gold answer, and so does the text: `right`; the text does not: `text`. No failure to explain;
2. right at the last layer and signal > 0: `overridden`. The residual that is read out carries the answer, the readout
   leans to it, and the default leans away by more;
3. right at the last layer, signal <= 0: `reversed`. What is carried there is not what the readout reads;
4. not right at the last layer, right at the chosen layer or at the last decodable one: `lost`. `lost_at` is the layer
   after the last one where the row is right;
5. not right at the last, the chosen and the last decodable layer: `not_decodable`;
6. otherwise a layer that decides is open: `mixed`.

The list is applied to the study's own folds and to those of further fits. A row's label is what more than half of them
give, and `mixed` where none of 2 to 5 is; `share` is how many agree. 2 and 3 ask for the sign of the signal. Where the
default is undefined there is none, and where the readouts of a presentation carry no signal beyond chance (`reads`), it
is the sign of noise: rows that are right at the last layer are then `mixed`. The answer is there and not read.

What a label does not say. The margins are symmetric for rows without the answer only if the probe has no lean of its own
on them; a balanced design sees to that on average, not for every group of failures. `tossed` is the chance of each label
for a row if the verdicts on failed instances, all rows and layers together, were right or wrong by the toss of a coin:
the *coin* of `shares`, which a label's share has to exceed. `calibration` asks how often a label comes back from probes
that share no training row with the first ones. The last layer's probe sees what the readout sees, with an intercept of
its own, which takes the default away: `overridden` is close to "the readout would be right without the default", and a
row with a signal near 0 is near the border of 2 and 3, whatever its share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, IntArray, all_finite, binary, checked, flags, same_rows
from probes.errors import ProbeError
from probes.folds import group_codes
from probes.keyed import generator
from probes.linear import ProbeResult, fit_probes

LABELS = ("overridden", "lost", "reversed", "not_decodable", "mixed")
NO_FAILURE = ("right", "text")
ALPHA = 0.05  # of the whole search over layers
SPLITS = 5  # ways of dealing the folds that vote, the study's own one included
FALSE_RIGHT = 0.2  # expected part, of what is called right at a layer, that the probe knows nothing about
TOSSES = 100
NO_LAYER = -1
OVERRIDDEN, LOST, REVERSED, NOT_DECODABLE, MIXED = range(5)

StrArray = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Failures:
    """One label a row, and what it rests on. Margins, signal and default are in logits toward gold.

    `label` [row] is of `LABELS` or `NO_FAILURE`; `share` [row] the part of the `splits` fold splits that agree with it
    (NaN without a failure), for `mixed` the largest part that agrees. `causes` [split, row] is what each split says, as a
    place in `LABELS`; it means something for failed rows only. `tossed` [row, label] is the chance of each of `LABELS`
    under tossed verdicts, NaN without a failure. `lost_at` [row] is -1 unless lost: the lower median over the splits that
    say so. `chosen_layer`, `margin` (at that layer) and `last_margin` [row], `margins` and `readable` [layer, row] are
    those of the study's own folds; readable is right in the sense of the module text, for rows without a failure with a t
    of their own. `reads` [row] is whether the sign of the row's signal was used.
    """

    label: StrArray
    share: FloatArray
    causes: IntArray
    tossed: FloatArray
    lost_at: IntArray
    chosen_layer: IntArray
    margin: FloatArray
    last_margin: FloatArray
    margins: FloatArray
    readable: BoolArray
    signal: FloatArray
    default: FloatArray
    reads: BoolArray
    splits: int
    method: str

    @property
    def failed(self) -> BoolArray:
        """Rows whose readout is wrong."""
        found: BoolArray = ~np.isin(self.label, NO_FAILURE)
        return found


def decodable_layers(auroc: npt.ArrayLike, null: npt.ArrayLike, *, alpha: float = ALPHA) -> BoolArray:
    """Return for each layer of `auroc` [layer] whether it beats the best layers of `null` [shuffle, layer].

    Raises:
        ProbeError: with so few shuffles no AUROC could, or a value is not finite.
    """
    found, draws = checked("auroc", auroc, ("layer",)).astype(np.float64), np.asarray(null, dtype=np.float64)
    if draws.ndim != 2 or (1 + len(draws)) * alpha < 1:
        raise ProbeError(
            f"null has {len(draws)} shuffles; a layer can beat them at {alpha:g} with {int(np.ceil(1 / alpha)) - 1} or "
            "more, fit the probes with as many"
        )
    for name, values in (("auroc", found), ("null", draws)):
        all_finite(name, values, "an AUROC that is undefined beats nothing, leave its layer out of both")
    best = draws.max(axis=1)
    as_good = (best[:, None] >= found - 1e-12).sum(axis=0)
    beats: BoolArray = (1 + as_good) / (1 + len(best)) <= alpha
    return beats


def assign(
    margins: npt.ArrayLike,
    decodable: npt.ArrayLike,
    chosen: npt.ArrayLike,
    labels: npt.ArrayLike,
    readout: npt.ArrayLike,
    default: npt.ArrayLike,
    text_correct: npt.ArrayLike,
    *,
    groups: npt.ArrayLike | None = None,
    reads: npt.ArrayLike = True,
) -> Failures:
    """Apply the decision list of the module text and let the splits vote.

    Args:
        margins: [split, layer, row] held-out margins, positive for label 1; the study's own split comes first.
        decodable: [split, layer].
        chosen: [split, row] the layer chosen for each row on other folds.
        labels: [row] gold answers, 0 or 1.
        readout: [row] positive for label 1.
        default: [row] or one number, the same way round; NaN where it is undefined.
        text_correct: [row] whether the text was read and gives the gold answer.
        groups: [row] instances; without it each row is one.
        reads: [row] or one value: whether the readouts of the row's presentation carry a signal beyond chance.

    Raises:
        ProbeError: shapes differ, a margin or readout is not finite, the default is infinite, or a flag is neither
            true nor false (NaN counts as true in numpy).
    """
    held_out = checked("margins", margins, ("split", "layer", "row")).astype(np.float64)
    splits, layers, rows = held_out.shape
    all_finite("margins", held_out, "fit the probes again")
    layer_ok = flags("decodable", decodable)
    at = np.asarray(chosen, dtype=np.int64)
    for name, found, expected in (
        ("decodable", layer_ok.shape, (splits, layers)),
        ("chosen", at.shape, (splits, rows)),
    ):
        if found != expected:
            raise ProbeError(f"{name} has shape {found} and margins {held_out.shape}; needed {expected}")
    if at.min() < 0 or at.max() >= layers:
        raise ProbeError(f"chosen holds layers {at.min()} to {at.max()}; allowed are 0 to {layers - 1}")
    sign = np.where(binary("labels", labels) == 1, 1.0, -1.0)
    said = checked("readout", readout, ("row",)).astype(np.float64)
    text = flags("text_correct", checked("text_correct", text_correct, ("row",)))
    codes = np.arange(rows) if groups is None else group_codes(groups)
    for name, count in (
        ("labels", len(sign)),
        ("readout", len(said)),
        ("text_correct", len(text)),
        ("groups", len(codes)),
    ):
        same_rows(name, count, "margins", rows)
    all_finite("readout", said, "leave those rows out")
    pull = np.broadcast_to(np.asarray(default, dtype=np.float64), said.shape)
    if np.isinf(pull).any():
        raise ProbeError(
            f"default holds {np.isinf(pull).sum()} infinite values; it must be finite, or NaN where it is undefined"
        )
    signal, toward = (said - pull) * sign, held_out * sign
    readout_right = said * sign > 0
    failed = ~readout_right
    right = np.stack([right_rows(*one, failed, codes) for one in zip(toward, layer_ok, strict=True)])
    used = np.broadcast_to(flags("reads", reads), said.shape) & np.isfinite(signal)
    counted = np.where(used, signal, np.nan)
    causes = np.stack([_causes(toward[n], layer_ok[n], at[n], counted, right[n]) for n in range(splits)])
    winner, most = _vote(causes)
    share = most / splits
    share[readout_right] = np.nan
    lost_at = np.full(rows, NO_LAYER)
    for row in np.flatnonzero(failed & (winner == LOST)):
        since = [layers - right[n, ::-1, row].argmax() for n in np.flatnonzero(causes[:, row] == LOST)]
        lost_at[row] = int(np.quantile(since, 0.5, method="lower"))
    label = np.where(readout_right, np.where(text, *NO_FAILURE), np.array(LABELS)[winner]).astype(np.str_)
    return Failures(
        label=label,
        share=share,
        causes=causes,
        tossed=_tossed(toward, layer_ok, at, counted, failed, codes),
        lost_at=lost_at,
        chosen_layer=at[0],
        margin=toward[0, at[0], np.arange(rows)],
        last_margin=toward[0, -1],
        margins=toward[0],
        readable=np.where(failed, right[0], right_rows(toward[0], layer_ok[0], readout_right, codes)),
        signal=signal,
        default=pull * sign,
        reads=used,
        splits=splits,
        method=f"majority of {splits} fold splits; layers beyond the best layers of the shuffles at p = {ALPHA:g}, rows at "
        f"a mirror rate of {FALSE_RIGHT:g} over instances",
    )


def label_failures(
    features: npt.NDArray[np.floating[Any]],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    readout: npt.ArrayLike,
    default: npt.ArrayLike,
    text_correct: npt.ArrayLike,
    *,
    result: ProbeResult,
    reads: npt.ArrayLike = True,
    splits: int = SPLITS,
    seed: int,
    **fit: Any,
) -> Failures:
    """Label the rows of `features` [layer, row, feature] from their probes and `splits` - 1 further fits of these.

    `result` is the study's own fit, with its null, on the same rows. `fit` holds the arguments of `fit_probes` that it
    was made with (`penalty`, `member`, `held_out`, …), so that the refits differ in their folds alone. They need no
    shuffles: which AUROC is beyond chance is taken from the null of `result`. That makes (splits - 1) x folds fits a
    layer, against (1 + shuffles) x folds of the study. Where `held_out` gives the folds, the refits are all alike, and
    `share` says nothing.
    """
    if splits < 1:
        raise ProbeError(f"splits is {splits}; it must be 1 (the study's own folds alone) or more")
    parts = [result, *(refit(features, labels, groups, result, seed, n, fit) for n in range(1, splits))]
    return assign(
        np.stack([one.margins for one in parts]),
        np.stack([decodable_layers(one.auroc, result.null) for one in parts]),
        np.stack([one.chosen_layer[one.folds] for one in parts]),
        labels,
        readout,
        default,
        text_correct,
        groups=groups,
        reads=reads,
    )


def refit(
    features: npt.NDArray[np.floating[Any]],
    labels: npt.ArrayLike,
    groups: npt.ArrayLike,
    result: ProbeResult,
    seed: int,
    number: int,
    fit: dict[str, Any],
) -> ProbeResult:
    """The probes of `result` on folds dealt anew, without shuffles; `number` keys the deal."""
    same_rows("result", result.n, "features", np.shape(features)[1])
    if fit.get("assigned") is not None:
        raise ProbeError("assigned is given; refits deal folds of their own, leave it out")
    # Folds that hold out units are given by the units: such refits are all alike.
    dealt = {} if fit.get("held_out") is not None else {"folds": result.fold_auroc.shape[1]}
    return fit_probes(features, labels, groups, seed=split_seed(seed, number), **{**dealt, **fit, "shuffles": 0})


def split_seed(seed: int, number: int) -> int:
    """The seed of fold split `number`: keyed, so that no two studies share their refits."""
    return int(generator(seed, "probes.failures.split", number).integers(2**62))


def one_split(
    margins: FloatArray, decodable: BoolArray, chosen: IntArray, labels: IntArray, signal: FloatArray, groups: IntArray
) -> IntArray:
    """Codes of `LABELS` [row] by one split's `margins` [layer, row]; all rows given are failures."""
    toward = margins * np.where(labels == 1, 1.0, -1.0)
    right = right_rows(toward, decodable, np.ones(len(labels), dtype=bool), groups)
    return _causes(toward, decodable, chosen, signal, right)


def right_rows(toward: FloatArray, decodable: BoolArray, failed: BoolArray, groups: IntArray) -> BoolArray:
    """Which rows of `toward` [layer, row] are right, by the t of the `failed` ones; `groups` [row] are instances.

    An instance weighs 1 in all, spread evenly over its failed rows, and never more than 1 on either side. That is what
    the 1 of the mirror estimate has to cover, so the estimate holds whatever the margins of one instance have to do
    with each other: all alike, independent, or known in one setting and not in another.
    """
    if not failed.any():
        return np.zeros(toward.shape, dtype=bool)
    _, codes = np.unique(groups[failed], return_inverse=True)
    sizes = np.abs(toward[:, failed])
    order = np.argsort(-sizes, axis=1)
    sizes, ranked = np.take_along_axis(sizes, order, axis=1), np.take_along_axis(toward[:, failed], order, axis=1)
    weight = (1 / np.bincount(codes)[codes])[order]
    against, beyond = (weight * (ranked < 0)).cumsum(axis=1), (weight * (ranked > 0)).cumsum(axis=1)
    enough = 1 + against <= FALSE_RIGHT * beyond + 1e-9  # thirds do not add up to 1
    enough[:, :-1] &= sizes[:, :-1] > sizes[:, 1:]  # rows of one size count together
    # The smallest size at which enough rows are on the right side; infinite where there is none.
    level = np.where(enough, sizes, np.inf).min(axis=1)
    found: BoolArray = (toward >= level[:, None]) & (toward > 0) & decodable[:, None]
    return found


def _causes(
    toward: FloatArray, decodable: BoolArray, chosen: IntArray, signal: FloatArray, right: BoolArray
) -> IntArray:
    """Steps 2 to 6 for each row; a NaN in `signal` is neither toward gold nor away from it."""
    rows = np.arange(toward.shape[1])
    not_right = (toward <= 0) | ~decodable[:, None]
    seen = np.flatnonzero(decodable)
    late = seen[-1] if len(seen) else -1
    causes = np.select(
        [
            right[-1] & (signal > 0),
            right[-1] & (signal <= 0),
            not_right[-1] & (right[chosen, rows] | right[late]),
            not_right[-1] & not_right[chosen, rows] & not_right[late],
        ],
        [OVERRIDDEN, REVERSED, LOST, NOT_DECODABLE],
        MIXED,
    )
    return causes.astype(np.int64)


def _tossed(
    toward: FloatArray,
    decodable: BoolArray,
    chosen: IntArray,
    signal: FloatArray,
    failed: BoolArray,
    groups: IntArray,
) -> FloatArray:
    """Chance [row, label] of each label if the margins of each failed instance, all splits, layers and rows together,
    change sign at a toss. Tosses are keyed by their number alone, so that equal arguments give equal chances.
    """
    chance = np.full((len(signal), len(LABELS)), np.nan)
    count = int(failed.sum())
    if count == 0:
        return chance
    given, every = np.zeros((count, len(LABELS))), np.ones(count, dtype=bool)
    instances, codes = np.unique(groups[failed], return_inverse=True)
    for toss in range(TOSSES):
        coin = generator(0, "probes.failures.toss", toss).choice([-1.0, 1.0], len(instances))[codes]
        causes = []
        for margins, layer_ok, at in zip(toward[:, :, failed] * coin, decodable, chosen[:, failed], strict=True):
            right = right_rows(margins, layer_ok, every, codes)
            causes.append(_causes(margins, layer_ok, at, signal[failed], right))
        winner, _ = _vote(np.stack(causes))
        given[np.arange(count), winner] += 1
    chance[failed] = given / TOSSES
    return chance


def _vote(causes: IntArray) -> tuple[IntArray, IntArray]:
    """The cause [row] that more than half of `causes` [split, row] are, else mixed, and how often the commonest occurs."""
    votes = np.stack([(causes == cause).sum(axis=0) for cause in range(MIXED)])
    most = votes.max(axis=0)
    winner = np.where(2 * most > len(causes), votes.argmax(axis=0), MIXED)
    return winner.astype(np.int64), most.astype(np.int64)
