"""Tuned lens: a logit lens that first translates each layer into the last layer's coordinates.

Problem. The logit lens reads a middle layer as if it were written in the last layer's coordinates. Where it is not, the
lens shows nothing although the layer may know the answer, and "not there yet" is the lens' fault.

Mechanism. Each layer gets an affine translator, fitted on the run's own rows so that the distribution after it matches
the model's final one: KL(final || translated), over the whole vocabulary (Belrose et al. 2023). The fit knows nothing of
gold answers, so it cannot put an answer in; it can only show what predicts the model's *own* final answer.

Constraints. A run has hundreds of rows and the translator many more numbers, so penalty, base and stopping are chosen on
validation instances, a layer on which nothing beats the plain lens there keeps the identity, and all that is reported
comes from a third set of instances that fitted and chose nothing (`probes.tuned_fit` holds the method). A translator is
for one model in one state: base and adapter need one each. The last layer is the identity by definition.

Read `kl_tuned` against two marks. Below `kl_lens` the translation helps. Not below `kl_constant`, the KL of the best
fixed distribution, the layer tells nothing about the row, whatever the translated lens shows. It can lie above: behind
a norm even the best fixed row has a fixed length, which may be too sharp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.arrays import BoolArray, FloatArray, checked, finite, named, same_rows
from probes.errors import ProbeError
from probes.keyed import generator
from probes.tuned_fit import LayerFit, Translator, identity
from probes.tuned_objective import Judge, Logits, Rows, part_of_vocabulary

_LEAST = 8  # instances: fewer cannot be cut into three parts that say anything
_TOKENS = 3072


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TunedLens:
    """One translator a layer, and how well each does on held-out instances.

    `row_kl_lens` and `row_kl_tuned` [layer, row] are KL(final || lens) in nats without and with translation, over the
    whole vocabulary, NaN for rows that are not `held_out` [row]. `fitted` names the instances of the other rows.
    """

    translators: tuple[Translator, ...]
    row_kl_lens: FloatArray
    row_kl_tuned: FloatArray
    kl_constant: float
    held_out: BoolArray
    fitted: tuple[str, ...]
    n_train: int
    n_validation: int
    n_held_out: int
    method: str

    @property
    def layers(self) -> int:
        """How many layers it has a translator for."""
        return len(self.translators)

    @property
    def kl_lens(self) -> FloatArray:
        """Mean held-out KL of the plain lens, [layer]."""
        means: FloatArray = self.row_kl_lens[:, self.held_out].mean(axis=1)
        return means

    @property
    def kl_tuned(self) -> FloatArray:
        """Mean held-out KL of the tuned lens, [layer]."""
        means: FloatArray = self.row_kl_tuned[:, self.held_out].mean(axis=1)
        return means

    @property
    def how(self) -> tuple[str, ...]:
        """How each layer's translator was chosen."""
        return tuple(one.how for one in self.translators)

    def translate(self, layer: int, rows: npt.NDArray[np.floating]) -> Rows:
        """Rows [row, feature] of a layer in the last layer's coordinates; any rows of the same model."""
        if rows.ndim != 2 or rows.shape[1] != len(self.translators[layer].offset):
            raise ProbeError(
                f"rows have shape {rows.shape}; this tuned lens takes [row, {len(self.translators[layer].offset)}]"
            )
        return self.translators[layer](rows)

    def in_sample(self, groups: npt.ArrayLike) -> BoolArray:
        """Which rows belong to an instance that training or validation saw, [row]."""
        return np.isin(np.asarray(groups).astype(str), self.fitted)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All numbers by name, as safetensors stores them; the words are in `words`."""
        kept: dict[str, npt.NDArray[np.generic]] = {
            "row_kl_lens": self.row_kl_lens,
            "row_kl_tuned": self.row_kl_tuned,
            "kl_constant": np.array([self.kl_constant]),
            "held_out": self.held_out,
            "sizes": np.array([self.n_train, self.n_validation, self.n_held_out]),
        }
        for layer, one in enumerate(self.translators):
            kept[f"{layer}.scale"] = np.array([one.scale])
            kept |= {f"{layer}.down": one.down, f"{layer}.up": one.up, f"{layer}.offset": one.offset}
        return {name: np.ascontiguousarray(array) for name, array in kept.items()}

    def words(self) -> dict[str, str]:
        """All text, as safetensors metadata."""
        return {"method": self.method, "how": json.dumps(self.how), "fitted": json.dumps(self.fitted)}


def from_arrays(arrays: Mapping[str, npt.NDArray[np.generic]], words: Mapping[str, str]) -> TunedLens:
    """Return the tuned lens that `arrays` and `words` were taken from."""
    missing = {"method", "how", "fitted"} - set(words) | {"row_kl_lens", "held_out", "sizes"} - set(arrays)
    if missing:
        raise ProbeError(f"a saved tuned lens lacks {', '.join(sorted(missing))}; fit it again")
    how = json.loads(words["how"])
    train, validation, held_out = (int(size) for size in arrays["sizes"])
    return TunedLens(
        translators=tuple(
            Translator(
                scale=float(arrays[f"{layer}.scale"][0]),
                down=arrays[f"{layer}.down"].astype(np.float32),
                up=arrays[f"{layer}.up"].astype(np.float32),
                offset=arrays[f"{layer}.offset"].astype(np.float32),
                how=one,
            )
            for layer, one in enumerate(how)
        ),
        row_kl_lens=arrays["row_kl_lens"].astype(np.float64),
        row_kl_tuned=arrays["row_kl_tuned"].astype(np.float64),
        kl_constant=float(arrays["kl_constant"][0]),
        held_out=arrays["held_out"].astype(np.bool_),
        fitted=tuple(json.loads(words["fitted"])),
        n_train=train,
        n_validation=validation,
        n_held_out=held_out,
        method=words["method"],
    )


def plan(layers: int, rows: int, features: int, vocabulary: int, *, tokens: int = _TOKENS, iterations: int = 40) -> str:
    """Say in one line what a fit of this size will do at most, before it starts."""
    seen = min(tokens, vocabulary)
    # Forward and both backward products of the refinement, then the passes over the whole vocabulary.
    work = 2 * features * (layers - 1) * rows * (3 * seen * (iterations + 10) + 2.5 * vocabulary)
    return (
        f"tuned lens: {layers - 1} translators of width {features} from {rows} rows, at most {iterations} steps each on "
        f"{seen:,} of {vocabulary:,} tokens, up to {work / 1e12:.1f} Tflop"
    )


def fit_tuned_lens(
    resid: npt.NDArray[np.floating],
    logits: Logits,
    groups: npt.ArrayLike,
    *,
    layers: Sequence[int] | None = None,
    held_out: float = 0.25,
    validation: float = 0.25,
    rank: int = 256,
    tokens: int = _TOKENS,
    iterations: int = 40,
    progress: Callable[[int], None] | None = None,
    seed: int,
) -> TunedLens:
    """Fit translators for `resid` [layer, row, feature], whose last layer is the model's own, on instances `groups` [row].

    `held_out` of the instances are kept for the numbers reported, and `validation` of the others for choices; `layers`
    limits the fit (the others keep the identity), `rank` the directions of a translator. Up to `tokens` tokens training
    sees the whole vocabulary, above it that many. `progress` is called with the number of layers done.
    """
    stream = checked("resid", resid, ("layer", "row", "feature"))
    given = checked("groups", groups, ("row",))
    named("groups", given)
    names = given.astype(str)
    same_rows("groups", len(names), "resid", stream.shape[1])
    finite("resid", stream)
    last = len(stream) - 1
    wanted = range(last) if layers is None else sorted(set(layers))
    if any(not 0 <= layer <= last for layer in wanted):
        raise ProbeError(f"layers are {list(wanted)}; the residual stream has layers 0 to {last}")
    if not (0 < held_out < 1 and 0 < validation < 1) or rank < 1 or tokens < 3 or iterations < 0:
        raise ProbeError(
            f"held_out is {held_out}, validation {validation}, rank {rank}, tokens {tokens}, iterations {iterations}; "
            "needed two shares between 0 and 1, rank 1, tokens 3 and iterations 0 or more"
        )
    parts = _split(names, held_out, validation, seed)
    train, chosen_on, kept = (np.flatnonzero(parts == part) for part in range(3))
    blocks = np.unique(names[chosen_on], return_inverse=True)[1]
    judge = Judge(logits, stream[last].astype(np.float32))
    fit = LayerFit(judge=judge, train=train, validation=chosen_on, blocks=blocks, rank=rank, iterations=iterations)
    likely = judge.mean_probability(judge.final[train])
    translators, without, with_it = [], [], []
    for layer, given in enumerate(stream):
        rows = given.astype(np.float32)
        one = identity(rows.shape[1], "identity: last layer" if layer == last else "identity: not fitted")
        if layer < last and layer in wanted:
            rng = generator(seed, "probes.tuned_lens.tokens", layer)
            part = part_of_vocabulary(judge, rows[train], likely, tokens, rng)
            one = fit.fit(rows, part)
        translators.append(one)
        plain = judge.kl(rows[kept], kept)
        without.append(plain)
        with_it.append(plain if one.is_identity else judge.kl(one(rows[kept]), kept))
        if progress is not None:
            progress(layer + 1)
    seen = f"{tokens:,} of {judge.vocabulary:,} tokens" if judge.vocabulary > tokens else "the whole vocabulary"
    return TunedLens(
        translators=tuple(translators),
        row_kl_lens=_among(np.stack(without), kept, len(names)),
        row_kl_tuned=_among(np.stack(with_it), kept, len(names)),
        kl_constant=judge.constant_kl(train, chosen_on, kept),
        held_out=parts == 2,
        fitted=tuple(sorted(set(names[parts != 2].tolist()))),
        n_train=len(train),
        n_validation=len(chosen_on),
        n_held_out=len(kept),
        method=(
            f"tuned lens: affine translators of rank up to {rank}, ridge start, KL(final || translated) on {seen}, "
            f"chosen on {len(chosen_on)} and fitted on {len(train)} rows of other instances"
        ),
    )


def _split(names: npt.NDArray[np.str_], held_out: float, validation: float, seed: int) -> npt.NDArray[np.int64]:
    """Deal whole instances to training (0), validation (1) and held out (2), [row]."""
    instances, codes = np.unique(names, return_inverse=True)
    count = len(instances)
    if count < _LEAST:
        raise ProbeError(
            f"groups name {count} instances; a tuned lens needs {_LEAST} or more, to train, choose and judge"
        )
    last = max(2, round(held_out * count))
    middle = max(2, round(validation * (count - last)))
    if count - last - middle < 2:
        raise ProbeError(
            f"held_out {held_out} and validation {validation} leave {count - last - middle} of {count} instances to train "
            "on; give smaller shares"
        )
    dealt = np.zeros(count, dtype=np.int64)
    order = generator(seed, "probes.tuned_lens.split").permutation(count)
    dealt[order[:last]] = 2
    dealt[order[last : last + middle]] = 1
    return dealt[codes]


def _among(values: FloatArray, at: npt.NDArray[np.int64], rows: int) -> FloatArray:
    """Return `values` [layer, held-out row] at their places among all rows, NaN elsewhere."""
    placed = np.full((len(values), rows), np.nan)
    placed[:, at] = values
    return placed
