"""What is inside: activations at the answer position, and what can be read from them.

One forward pass of a prompt gives its readout and its activations: ``resid_post`` of every layer (probes, lens, patching
donors), ``z`` (heads), and what the parts of a readout are made from. Everything else here is arithmetic on the stored
arrays:

* the logit lens through the model's own final norm and unembedding, whose last layer must be the readout, and, if asked
  for, a tuned lens;
* default δ and signal s of each presentation, at the output and through the lens at every layer;
* each readout as a sum over the model's components, and the part of δ and s that each of them has.

Probes have modules of their own, ``fitting`` and ``probe_tables``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError
from experiments.groups import groups
from experiments.instances import by_instance
from experiments.items import PAIR as PAIR
from experiments.items import Row, frame
from experiments.progress import steps

if TYPE_CHECKING:
    import pandas as pd

    from activations.capturing import Plan
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore
    from experiments.config import Config

SITES = ("embed", "resid_post", "z")
# The lens reads stored float32 rows with the code that made the readout; above this the two are not the same model.
LENS_BOUND = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


def plan(model: Model, config: Config) -> Plan:
    """What a run captures: ``resid_post`` and ``z``, the embedding, what components are made from and what is patched."""
    from activations.capturing import Plan
    from activations.sites import named

    def covered(site: str) -> bool:
        return named(site)[0] in SITES

    more = (site for site in (*component_sites(model)[0], *config.patch.sites) if not covered(site))
    return Plan(sites=(*SITES, *more), dtype=config.store_dtype, batch_tokens=config.batch_tokens)


def component_sites(model: Model) -> tuple[tuple[str, ...], str]:
    """The sites that a readout's components are made from, or none and why this model can't be taken apart."""
    from activations.contributions import required_sites
    from activations.errors import ModelError

    try:
        return required_sites(model), ""
    except ModelError as error:
        return (), str(error)


def capture(
    directory: Path,
    model: Model,
    asked: Sequence[Row],
    prompts: Sequence[Prompt],
    answers: AnswerTokens,
    plan: Plan,
    done: Callable[[int], None],
) -> ActivationStore:
    """Fill the activation store of the model as it is now; shards that are there already are kept."""
    from activations.capturing import capture as run_capture

    index = [(row.matched.instance.key, row.presentation.kind) for row in asked]
    return run_capture(model, prompts, plan, directory, answers=answers, index=index, progress=steps(done))


def readout_table(store: ActivationStore, asked: Sequence[Row], model: Model) -> pd.DataFrame:
    """One row a prompt: scores of both labels, their difference, off-label mass and the most likely token."""
    readout = store.readout
    logit = readout["logit"].astype(np.float64)
    mass = 1.0 - np.exp(logit - readout["logsumexp"].astype(np.float64)[:, None]).sum(axis=1)
    top = [model.tokenizer.decode([int(token)]) for token in readout["top"]]
    return frame(asked).assign(
        yes=logit[:, 0],
        no=logit[:, 1],
        difference=logit[:, 0] - logit[:, 1],
        off_label_mass=np.clip(mass, 0.0, 1.0),
        top=top,
    )


def features(store: ActivationStore, rows: np.ndarray, layers: int) -> np.ndarray:
    """``resid_post`` of the given rows, ``[layer, row, d_model]``."""
    return np.stack([store["resid_post", layer][rows] for layer in range(layers)])


def rows_of(table: pd.DataFrame, presentation: str) -> np.ndarray:
    """Positions of a presentation's rows, in item order: the same item stands at the same place for every one."""
    return np.flatnonzero((table["presentation"] == presentation).to_numpy())


def lens_table(
    store: ActivationStore,
    table: pd.DataFrame,
    model: Model,
    answers: AnswerTokens,
    layers: int,
    config: Config,
) -> pd.DataFrame:
    """δ and s by layer through the lens, with off-label mass; the last layer is checked against the readout.

    Raises:
        RunError: the lens at the last layer is not the model's readout.
    """
    import pandas as pd

    from probes.decompose import decompose_layers
    from probes.lens import lens, overtaken_at, settled_layer

    parts = []
    for kind in sorted(set(table["presentation"]), key=list(dict.fromkeys(table["presentation"])).index):
        rows = rows_of(table, kind)
        shown = table.iloc[rows]
        seen = lens(features(store, rows, layers), unembedder(model, answers))
        own = shown[["yes", "no"]].to_numpy()
        gap = seen.final_gap(own)
        if not gap <= LENS_BOUND[config.store_dtype]:
            raise RunError(
                f"the lens at the last layer differs from the readout by {gap:.1e} (bound "
                f"{LENS_BOUND[config.store_dtype]:.0e}): was the activation store made by this model? "
                "check it with `probe check`"
            )
        gold = (shown["gold"] == answers.labels[0]).to_numpy().astype(int)
        assert seen.rank is not None  # the unembedding above gives it
        rank = np.take_along_axis(seen.rank, np.where(gold == 1, 0, 1)[None, :, None], axis=2)[:, :, 0]
        settled = settled_layer(seen.difference, shown["key"].to_numpy(), resamples=config.resamples, seed=config.seed)
        overtaken = overtaken_at(seen.difference, gold)
        once = by_instance(seen.difference, shown)
        split = decompose_layers(
            once.values,
            once.table["cell"].to_numpy(),
            once.gold(answers.labels[0]),
            resamples=config.resamples,
            declared=design(shown, answers.labels),
            seed=config.seed,
        )
        parts.append(
            pd.DataFrame(
                {
                    "presentation": kind,
                    "layer": np.arange(layers),
                    **{name: [getattr(one, name) for one in split] for name in DECOMPOSED},
                    "off_label_mass": seen.off_label_mass.mean(axis=1),
                    "accuracy": ((seen.difference > 0) == (gold == 1)).mean(axis=1),
                    "gold_rank": np.median(rank, axis=1),
                    "gold_first": (rank == 1).mean(axis=1),
                    "settled": settled.median,
                    "settled_low": settled.low,
                    "settled_high": settled.high,
                    "overtaken": overtaken.share,
                    "overtaken_mirror": overtaken.mirror_share,
                    "n": [one.n for one in split],
                    "gap": gap,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


DECOMPOSED = ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high")


def tuned_lens_table(
    store: ActivationStore, table: pd.DataFrame, model: Model, answers: AnswerTokens, config: Config
) -> pd.DataFrame:
    """δ and s through a tuned lens, on instances that it was not fitted on, and what the translation gains.

    One lens is fitted for the model as it is, on rows of all presentations; ``kl_*`` are over all held-out rows.
    """
    import pandas as pd

    from probes.decompose import decompose_layers
    from probes.lens import lens
    from probes.tuned_lens import fit_tuned_lens

    resid, keys = store.stack("resid_post"), table["key"].to_numpy()
    tuned = fit_tuned_lens(resid, model.logits_of, keys, seed=config.seed)
    parts = []
    for kind in dict.fromkeys(table["presentation"]):
        rows = rows_of(table, kind)
        rows = rows[tuned.held_out[rows]]
        shown = table.iloc[rows]
        seen = lens(resid[:, rows], unembedder(model, answers), tuned=tuned, groups=keys[rows])
        gold = (shown["gold"] == answers.labels[0]).to_numpy().astype(int)
        once = by_instance(seen.difference, shown)
        split = decompose_layers(
            once.values, once.table["cell"].to_numpy(), once.gold(answers.labels[0]), resamples=config.resamples,
            declared=design(shown, answers.labels), seed=config.seed,
        )  # fmt: skip
        parts.append(
            pd.DataFrame(
                {
                    "presentation": kind,
                    "layer": np.arange(len(resid)),
                    **{name: [getattr(one, name) for one in split] for name in DECOMPOSED},
                    "off_label_mass": seen.off_label_mass.mean(axis=1),
                    "accuracy": ((seen.difference > 0) == (gold == 1)).mean(axis=1),
                    "kl_lens": tuned.kl_lens,
                    "kl_tuned": tuned.kl_tuned,
                    "kl_constant": tuned.kl_constant,
                    "how": tuned.how,
                    "n": [one.n for one in split],
                    "method": once.method(seen.method),
                    "reason": [one.reason for one in split],
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def decomposition_table(
    table: pd.DataFrame, labels: Sequence[str], params: Mapping[str, Mapping[str, Any]], config: Config
) -> pd.DataFrame:
    """Default δ and signal s at the output, for each presentation and group of settings.

    An instance that stands under several of the pooled settings (relations, say) counts once, with its mean readout: its
    rows are no separate evidence.
    """
    import pandas as pd

    from probes.decompose import decompose

    records = []
    for kind, shown in table.groupby("presentation", sort=False):
        for group in groups(params, config.table.rows):
            part = shown[group.holds(shown)]
            once = by_instance(part["difference"].to_numpy(), part)
            one = decompose(
                once.values,
                once.table["cell"].to_numpy(),
                once.gold(labels[0]),
                resamples=config.resamples,
                declared=design(shown, labels),
                seed=config.seed,
            )
            records.append(
                {
                    "presentation": kind,
                    "setting": group.label,
                    **{name: getattr(one, name) for name in DECOMPOSED},
                    "n": one.n,
                    "method": once.method(one.method),
                    "reason": one.reason,
                }
            )
    return pd.DataFrame(records)


def contribution_table(
    store: ActivationStore, table: pd.DataFrame, model: Model, answers: AnswerTokens
) -> pd.DataFrame:
    """What each component adds to each prompt's readout, in logits toward the first label; a row a prompt and component.

    Empty, with the reason in ``reason``, for a model whose blocks can't be taken apart.
    """
    import pandas as pd

    from activations.contributions import contributions

    _, reason = component_sites(model)
    if reason:
        return pd.DataFrame({**{name: [] for name in CONTRIBUTION}, "reason": []})
    found = contributions(model, store, answers)
    count, rows = found.values.shape
    identity = table[["setting", "key", "presentation", "cell", "gold"]].loc[np.repeat(np.arange(rows), count)]
    each = pd.DataFrame(
        {
            "component": found.names,
            "kind": [one.kind for one in found.components],
            "layer": pd.array([one.layer for one in found.components], dtype="Int64"),
            "head": pd.array([one.head for one in found.components], dtype="Int64"),
        }
    ).loc[np.tile(np.arange(count), rows)]
    return pd.concat([identity.reset_index(drop=True), each.reset_index(drop=True)], axis=1).assign(
        contribution=found.values.T.ravel(), gap=found.gap
    )


CONTRIBUTION = ("setting", "key", "presentation", "cell", "gold", "component", "kind", "layer", "head", "contribution",
                "gap")  # fmt: skip


def component_table(
    parts: Mapping[str, pd.DataFrame],
    labels: Sequence[str],
    params: Mapping[str, Mapping[str, Any]],
    config: Config,
) -> pd.DataFrame:
    """δ and s of each component by arm and presentation, and their change from the base to each adapter.

    A row is about a component; ``what`` says whether it is a value or the change from the base. The sum of all
    components stands as the component ``readout``. An instance counts once, as in ``decomposition_table``.

    Args:
        parts: contributions by arm, the base first.
    """
    import pandas as pd

    from probes.components import component_change, decompose_components

    base = next(iter(parts.values()))
    if base.empty:
        return pd.DataFrame({"arm": [], "presentation": [], "component": []})
    names = list(dict.fromkeys(base["component"]))
    about = base.iloc[: len(names)][["component", "kind", "layer", "head"]]
    frames = []
    for kind in dict.fromkeys(base["presentation"]):
        shown = {arm: part[part["presentation"] == kind] for arm, part in parts.items()}
        values = {arm: part["contribution"].to_numpy().reshape(-1, len(names)).T for arm, part in shown.items()}
        rows = next(iter(shown.values())).iloc[:: len(names)]
        once = {arm: by_instance(own, rows) for arm, own in values.items()}
        how: Any = {"resamples": config.resamples, "declared": design(rows, labels), "seed": config.seed}
        first = next(iter(once))
        for arm, own in once.items():
            about_rows = (names, own.table["cell"].to_numpy(), own.gold(labels[0]))
            found = {"value": decompose_components(own.values, *about_rows, **how)}
            if arm != first:
                found["change"] = component_change(once[first].values, own.values, *about_rows, **how)
            for what, made in found.items():
                split = pd.DataFrame(
                    [{name: getattr(one, name) for name in (*DECOMPOSED, "n", "method", "reason")}
                     for one in (*made.parts, made.whole)]
                )  # fmt: skip
                split["method"] = split["method"].map(own.method)
                whole = pd.DataFrame([{"component": "readout", "kind": "readout", "layer": pd.NA, "head": pd.NA}])
                which = pd.concat([about, whole], ignore_index=True).astype({"layer": "Int64", "head": "Int64"})
                frames.append(pd.concat([which, split], axis=1).assign(arm=arm, presentation=kind, what=what))
    table = pd.concat(frames, ignore_index=True)
    front = ["arm", "presentation", "what"]
    return table[front + [name for name in table.columns if name not in front]]


def design(table: pd.DataFrame, labels: Sequence[str]) -> dict[str, int]:
    """The cells of a presentation's rows and their gold answers (1 = yes): what a decomposition is balanced over."""
    cells = table.drop_duplicates("cell")
    return {str(cell): int(gold == labels[0]) for cell, gold in zip(cells["cell"], cells["gold"], strict=True)}


def unembedder(model: Model, answers: AnswerTokens) -> Callable[[np.ndarray], Any]:
    """The model's own unembedding as a function on numpy rows, as the lens wants it."""
    import torch

    from probes.lens import Unembedded

    def unembed(rows: np.ndarray) -> Unembedded:
        resid = torch.from_numpy(np.ascontiguousarray(rows)).to(model.device)
        readout, rank = model.unembed_ranked(resid, answers)
        readout = readout.cpu()
        return _Seen(readout.logit.numpy(), readout.logsumexp.numpy(), rank.cpu().numpy(), readout.top.numpy())

    return unembed


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """One layer's rows behind the unembedding, as numpy arrays."""

    logit: np.ndarray
    logsumexp: np.ndarray
    rank: np.ndarray
    top: np.ndarray
