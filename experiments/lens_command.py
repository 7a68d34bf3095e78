"""``probe lens``: a store's residual stream through the unembedding of the model that made it, layer by layer.

The model named in the manifest is loaded for its final norm and unembedding alone; no prompt is run. That it is the model
of the store is checked twice: weights (and the adapter's) have the hash that the manifest records, and the lens at the
last layer gives the scores that were stored beside the activations.

Everything that the store itself can refuse is refused before the model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError, UsageError
from experiments.inside import DECOMPOSED, LENS_BOUND, design, unembedder
from experiments.instances import by_instance
from experiments.progress import Reporter
from experiments.store_items import Asked, Opened, rows_at

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore
    from probes.tuned_lens import TunedLens

RESID, ANSWER = "resid_post", "answer"
LEAST_TUNED = 8  # instances: a tuned lens trains, chooses and is judged on different ones
SPEAKS = 0.5  # off-label mass below which a layer is said to answer at all


@dataclass(frozen=True, slots=True, eq=False)
class Lens:
    """What `probe lens` found.

    Attributes:
        table: one row for each presentation, lens (``logit``, ``tuned``) and layer; tidy.
        presentations: what all layers of one presentation and lens show together, with ``reading``, one sentence; for the
            tuned lens also of how many rows it reads the held-out ones, and the layers at which it explains less than the
            constant does (``worse_than_constant``).
    """

    about: Mapping[str, Any]
    table: pd.DataFrame
    presentations: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """The rows of one lens: their layers by number, and how their tokens are said."""

    asked: Asked
    layers: Sequence[int]
    labels: tuple[str, ...]
    decode: Callable[[int], str]
    resamples: int
    seed: int


def read_lens(
    opened: Opened,
    *,
    model: str | None,
    adapters: Sequence[str],
    presentations: Sequence[str] | None,
    tuned: bool,
    resamples: int,
    seed: int,
    device: str,
    reporter: Reporter,
) -> Lens:
    """Read every captured layer of ``resid_post`` at the answer position.

    Raises:
        UsageError: what the store lacks, or an option that can't apply.
        RunError: another model, or a lens that does not end in the stored readout.
        ModelError: the model can't be loaded or has no head that is known.
    """
    import pandas as pd

    from activations.readout import AnswerTokens

    store = opened.store
    layers = _check_store(store)
    asked = _asked(opened, presentations)
    if tuned and (count := asked.table["key"].nunique()) < LEAST_TUNED:
        raise UsageError(
            f"--tuned needs {LEAST_TUNED} instances or more, to train, choose and judge on different ones, and the store "
            f"has {count}: capture more, or leave it out"
        )
    place = asked.table["place"].to_numpy()
    # Read before the model is loaded: a damaged store is found at once.
    resid = store.stack(RESID, layers, place)
    own = {name: values[place] for name, values in store.readout.items()}
    loaded, adapter = _load(opened, model, adapters, device, reporter)
    content = store.manifest["content"]
    answers = AnswerTokens(tuple(content["labels"]), tuple(tuple(ids) for ids in content["answers"]))
    how = _Read(asked, layers, answers.labels, lambda token: str(loaded.tokenizer.decode([token])), resamples, seed)
    parts, found = [], []
    with loaded.use(adapter), reporter.stage("lens", 1):
        gap, bound = _identity(resid[-1], own["logit"], loaded, answers, content["dtype"])
        fitted = _tuned(resid, asked, loaded, seed) if tuned else None
        for kind in dict.fromkeys(asked.table["presentation"]):
            chosen = (asked.table["presentation"] == kind).to_numpy()
            for lens in (None, fitted) if fitted is not None else (None,):
                table, said = _one(resid, chosen, how, loaded, answers, lens)
                parts.append(table)
                found.append(said)
    about = {
        "store": str(store.directory), "model": loaded.name, "adapter": adapter, "labels": list(answers.labels), "gap": gap,
        "bound": bound, "rows": len(place), "seed": seed, "resamples": resamples,
        "method": "logit lens through the model's final norm and unembedding",
    }  # fmt: skip
    return Lens(about, pd.concat(parts, ignore_index=True), found)


def _check_store(store: ActivationStore) -> list[int]:
    """The captured layers; what a lens needs and the store lacks is refused."""
    again = "capture it with `probe capture --sites resid_post`"
    layers = store.layers.get(RESID, ())
    if not layers:
        raise UsageError(
            f"{store.directory} holds {', '.join(store.layers)} and no {RESID}, which a lens reads: {again}"
        )
    if layers[-1] != store.n_layers - 1:
        raise UsageError(
            f"{store.directory} lacks {RESID} of the last layer, {store.n_layers - 1}, by which a lens is checked: {again}"
        )
    if ANSWER not in store.manifest["rows"]["label"]:
        there = ", ".join(list(dict.fromkeys(store.manifest["rows"]["label"]))[:8])
        raise UsageError(
            f"{store.directory} has rows at {there} and none at {ANSWER}: capture with --positions {ANSWER}"
        )
    labels = store.manifest["content"]["labels"]
    if labels is None or len(labels) != 2:
        raise UsageError(
            f"{store.directory} holds no scores of two answer labels, by which a lens is checked: capture prompts of a "
            "family with answers, not prompt=reasoning"
        )
    return list(layers)


def _asked(opened: Opened, presentations: Sequence[str] | None) -> Asked:
    asked = rows_at(opened, ANSWER)
    kinds = list(dict.fromkeys(asked.table["presentation"]))
    labels = opened.store.manifest["content"]["labels"]
    if unknown := sorted(set(asked.table["gold"].astype(str)) - set(labels)):
        raise RunError(
            f"the items have the gold answer {unknown[0]!r} and the store scores {', '.join(labels)}: give its items"
        )
    if presentations is None:
        return asked
    for kind in presentations or ("",):
        if kind not in kinds:
            raise UsageError(f"--presentation is {kind!r}: the store has {', '.join(kinds)}")
    return asked.within(asked.table["presentation"].isin(presentations).to_numpy())


def _load(
    opened: Opened, model: str | None, adapters: Sequence[str], device: str, reporter: Reporter
) -> tuple[Model, str | None]:
    """The model that made the store, with its adapter attached if there is one, and the adapter's name."""
    from activations.model import load

    manifest = opened.store.manifest
    made, notes = manifest["content"].get("model") or {}, manifest["notes"]
    config: Mapping[str, Any] = {} if opened.run is None else opened.run.read_json("resolved.json")
    name = model or config.get("model") or notes.get("model")
    wanted = (manifest["content"].get("adapter") or {}).get("weights")
    if wanted is None and adapters:
        raise UsageError(
            f"--adapter is {', '.join(adapters)}, but {opened.store.directory} is of the base model: leave it out"
        )
    if not name or "weights" not in made:
        raise UsageError(f"{opened.store.directory} does not say which model made it: capture it with `probe capture`")
    if wanted is not None and not adapters:
        adapters = tuple(config.get("adapter", ())) or (("builtin",) if name == "builtin" else ())
        if not adapters:
            raise UsageError(
                f"{opened.store.directory} was made with the adapter {notes.get('adapter')!r}: give its folder or id as "
                "--adapter"
            )
    with reporter.stage(f"load {name}", 1), _one_bar():
        loaded = load(
            str(name),
            adapters=adapters if wanted is not None else (),
            device=device,
            dtype=made.get("dtype", "float32"),
            any_base=bool(config.get("any_base")),
            trust_remote_code=bool(config.get("trust_remote_code")),
            verify=False,  # the lens is checked against the stored readout, which tests what is used here
        )
    if loaded.identity["weights"] != made["weights"]:
        raise RunError(
            f"{opened.store.directory} was made by a model with weights {str(made['weights'])[:12]}, and {name!r} has "
            f"{str(loaded.identity['weights'])[:12]}: give the model of the store as --model"
        )
    if wanted is None:
        return loaded, None
    for one, about in loaded.identity["adapters"].items():
        if about["weights"] == wanted:
            return loaded, str(one)
    raise RunError(
        f"{opened.store.directory} was made with an adapter of weights {str(wanted)[:12]}, which "
        f"{', '.join(loaded.adapter_names)} has not: give that adapter as --adapter"
    )


@contextmanager
def _one_bar() -> Iterator[None]:
    """Without the loader's own bar, which would be drawn into the reporter's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _identity(
    last: np.ndarray, own: np.ndarray, model: Model, answers: AnswerTokens, dtype: str
) -> tuple[float, float]:
    """How far the lens at the last layer is from the stored readout, and the bound."""
    from probes.lens import lens

    gap, bound = lens(last[None], unembedder(model, answers)).final_gap(own), LENS_BOUND[dtype]
    if not gap <= bound:
        raise RunError(
            f"the lens at the last layer differs from the stored readout by {gap:.1e} (bound {bound:.0e}), though the "
            "weights are the same: check the store with `probe store verify` and the model with `probe check`"
        )
    return gap, bound


def _tuned(resid: np.ndarray, asked: Asked, model: Model, seed: int) -> TunedLens:
    from probes.tuned_lens import fit_tuned_lens

    return fit_tuned_lens(resid, model.logits_of, asked.table["key"].to_numpy(), seed=seed)


def _one(
    resid: np.ndarray, chosen: np.ndarray, how: _Read, model: Model, answers: AnswerTokens, tuned: TunedLens | None
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The layers of one presentation through one lens, and what they show together."""
    import pandas as pd

    from probes.decompose import decompose_layers
    from probes.lens import lens, overtaken_at, settled_layer

    kind = how.asked.table.loc[chosen, "presentation"].iloc[0]
    if tuned is not None:
        chosen = chosen & tuned.held_out
    whole = int(((how.asked.table["presentation"] == kind).to_numpy()).sum())
    shown = how.asked.table[chosen]
    keys = shown["key"].to_numpy()
    gold = (shown["gold"] == how.labels[0]).to_numpy().astype(int)
    seen = lens(resid[:, chosen], unembedder(model, answers), tuned=tuned, groups=keys)
    assert seen.rank is not None and seen.top is not None  # the unembedding gives both
    once = by_instance(seen.difference, shown)
    split = decompose_layers(
        once.values,
        once.table["cell"].to_numpy(),
        once.gold(how.labels[0]),
        resamples=how.resamples,
        declared=design(how.asked.table, how.labels),
        seed=how.seed,
    )
    rank = np.take_along_axis(seen.rank, np.where(gold == 1, 0, 1)[None, :, None], axis=2)[:, :, 0]
    tops = [Counter(row.tolist()).most_common(1)[0] for row in seen.top]
    table = pd.DataFrame(
        {
            "presentation": shown["presentation"].iloc[0],
            "lens": "logit" if tuned is None else "tuned",
            "layer": how.layers,
            "readout": seen.difference.mean(axis=1),
            **{name: [getattr(one, name) for one in split] for name in DECOMPOSED},
            "accuracy": ((seen.difference > 0) == (gold == 1)).mean(axis=1),
            "off_label_mass": seen.off_label_mass.mean(axis=1),
            "gold_rank": np.median(rank, axis=1),
            "gold_first": (rank == 1).mean(axis=1),
            "top_token": [how.decode(token) for token, _ in tops],
            "top_share": [count / len(shown) for _, count in tops],
            "kl_lens": np.nan if tuned is None else tuned.kl_lens,
            "kl_tuned": np.nan if tuned is None else tuned.kl_tuned,
            "kl_constant": np.nan if tuned is None else tuned.kl_constant,
            "how": "" if tuned is None else list(tuned.how),
            "n": len(shown),
            "method": seen.method,
            "reason": [one.reason for one in split],
        }
    )
    worse = [] if tuned is None else table.loc[table["kl_tuned"] > table["kl_constant"], "layer"].tolist()
    settled = settled_layer(seen.difference, keys, resamples=how.resamples, seed=how.seed)
    overtaken = overtaken_at(seen.difference, gold)
    found: dict[str, Any] = {
        "presentation": table["presentation"].iloc[0],
        "lens": table["lens"].iloc[0],
        "n": len(shown),
        "instances": len(np.unique(keys)),
        **{
            f"settled{end}": _layer(how.layers, value)
            for end, value in (("", settled.median), ("_low", settled.low), ("_high", settled.high))
        },
        "undecided": settled.undecided,
        "overtaken": overtaken.share,
        "wrong": overtaken.wrong,
        "overtaken_mirror": overtaken.mirror_share,
        "right": overtaken.right,
        "of": whole,
        "worse_than_constant": worse,
        "settled_method": settled.method,
        "reason": settled.reason,
    }
    return table, {**found, "reading": _sentence(found, table)}


def _layer(layers: Sequence[int], place: float) -> float:
    """The layer at a place among the captured ones; a median may lie between two."""
    if np.isnan(place):
        return np.nan
    return float(np.interp(place, np.arange(len(layers)), layers))


def _sentence(found: Mapping[str, Any], table: pd.DataFrame) -> str:
    """One line that says what the layers show and no more."""
    parts = ["no row has an answer"]
    if not np.isnan(found["settled"]):
        ends = "" if np.isnan(found["settled_low"]) else f" [{found['settled_low']:g}, {found['settled_high']:g}]"
        parts = [f"the answer settles at layer {found['settled']:g}{ends} in the median row"]
    speaks = table.loc[table["off_label_mass"] < SPEAKS, "layer"]
    if speaks.empty:
        parts.append("no layer puts half of its probability on an answer")
    elif len(speaks) == int((table["layer"] >= speaks.iloc[0]).sum()):
        parts.append(f"from layer {speaks.iloc[0]} on most probability is on an answer")
    else:
        parts.append(f"most probability is on an answer at {len(speaks)} of {len(table)} layers")
    if found["wrong"] == 0:
        parts.append("no row ends wrong")
    else:
        led = f"the right answer had led at some layer in {found['overtaken']:.0%} of {found['wrong']} wrong rows"
        mirror = f"the wrong one in {found['overtaken_mirror']:.0%} of {found['right']} right rows"
        parts.append(f"{led}, {mirror}" if found["right"] else led)
    return "; ".join(parts)
