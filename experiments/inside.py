"""What is inside: activations at the answer position, and what can be read from them.

One forward pass of a prompt gives its readout and its activations (``resid_post`` of every layer, for probes, lens and
patching donors, and ``z``, for heads). Everything else here is arithmetic on the stored arrays:

* probes on the original presentation, also tried on the equivalent, and the other way round;
* the logit lens through the model's own final norm and unembedding, whose last layer must be the readout;
* default δ and signal s of each presentation, at the output and through the lens at every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError
from experiments.items import PAIR, Row, frame

if TYPE_CHECKING:
    import pandas as pd

    from activations.capturing import Plan
    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore
    from experiments.config import Config

SITES = ("resid_post", "z")
# The lens reads stored float32 rows with the code that made the readout; above this the two are not the same model.
LENS_BOUND = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}


def plan(model: Model, config: Config) -> Plan:
    """What a run captures: ``resid_post`` of all layers, and ``z`` where a layer has heads."""
    from activations.capturing import Plan

    return Plan(sites=SITES, dtype=config.store_dtype, batch_tokens=config.batch_tokens)


def capture(
    directory: Path,
    model: Model,
    asked: Sequence[Row],
    prompts: Sequence[Prompt],
    answers: AnswerTokens,
    config: Config,
    done: Callable[[int], None],
) -> ActivationStore:
    """Fill the activation store of the model as it is now; shards that are there already are kept."""
    from activations.capturing import capture as run_capture

    index = [(row.matched.instance.key, row.presentation.kind) for row in asked]
    stored = 0

    def advance(total: int) -> None:
        nonlocal stored
        done(total - stored)
        stored = total

    return run_capture(model, prompts, plan(model, config), directory, answers=answers, index=index, progress=advance)


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


def probe_tables(
    store: ActivationStore, table: pd.DataFrame, labels: Sequence[str], layers: int, config: Config
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Probes for the gold answer: a row a layer and presentation, and a row an item with its held-out verdict."""
    import pandas as pd

    from probes.linear import fit_probes

    place = {kind: rows_of(table, kind) for kind in PAIR}
    acts = {kind: features(store, rows, layers) for kind, rows in place.items()}
    by_layer, by_row = [], []
    for kind, other in (PAIR, PAIR[::-1]):
        shown = table.iloc[place[kind]]
        gold = (shown["gold"] == labels[0]).to_numpy().astype(int)
        result = fit_probes(
            acts[kind],
            gold,
            shown["key"].to_numpy(),
            transfer=acts[other] if _same_gold(table, place) else None,
            folds=config.probe.folds,
            penalty=config.probe.penalty,
            shuffles=config.probe.shuffles,
            seed=config.seed,
        )
        low, middle, high = result.null_band()
        by_layer.append(
            pd.DataFrame(
                {
                    "presentation": kind,
                    "layer": np.arange(layers),
                    "auroc": result.auroc,
                    "auroc_low": np.nanmin(result.fold_auroc, axis=1),
                    "auroc_high": np.nanmax(result.fold_auroc, axis=1),
                    "pooled": result.pooled,
                    "transfer_auroc": np.nan if result.transfer_auroc is None else result.transfer_auroc,
                    "null_low": low,
                    "null_median": middle,
                    "null_high": high,
                    "p": result.p_value,
                    "p_max": result.p_max,
                    "n": result.n,
                    "instances": result.n_groups,
                    "excluded_folds": result.excluded_folds,
                    "method": result.method,
                }
            )
        )
        at = result.chosen_layer[result.folds]
        by_row.append(
            shown[["setting", "n", "key", "presentation", "cell", "gold"]].assign(
                fold=result.folds,
                layer=at,
                margin=result.margins[at, np.arange(result.n)],
                decodable=result.decodable,
            )
        )
    return pd.concat(by_layer, ignore_index=True), pd.concat(by_row, ignore_index=True)


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
    from probes.lens import lens

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
        split = decompose_layers(
            seen.difference,
            shown["cell"].to_numpy(),
            gold,
            resamples=config.resamples,
            declared=design(table, answers.labels),
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
                    "n": [one.n for one in split],
                    "gap": gap,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


DECOMPOSED = ("delta", "delta_low", "delta_high", "signal", "signal_low", "signal_high")


def decomposition_table(table: pd.DataFrame, labels: Sequence[str], config: Config) -> pd.DataFrame:
    """Default δ and signal s at the output, for each presentation, over all settings and within each."""
    import pandas as pd

    from probes.decompose import decompose

    records = []
    # With one setting, "all" says everything.
    several = table["setting"].nunique() > 1
    for kind, shown in table.groupby("presentation", sort=False):
        for setting, part in [("all", shown), *(shown.groupby("setting", sort=False) if several else ())]:
            gold = (part["gold"] == labels[0]).to_numpy().astype(int)
            one = decompose(
                part["difference"].to_numpy(),
                part["cell"].to_numpy(),
                gold,
                resamples=config.resamples,
                declared=design(table, labels),
                seed=config.seed,
            )
            records.append(
                {
                    "presentation": kind,
                    "setting": setting,
                    **{name: getattr(one, name) for name in DECOMPOSED},
                    "n": one.n,
                    "method": one.method,
                    "reason": one.reason,
                }
            )
    return pd.DataFrame(records)


def design(table: pd.DataFrame, labels: Sequence[str]) -> dict[str, int]:
    """The cells of the run and their gold answers (1 = yes): what a decomposition has to be balanced over."""
    cells = table.drop_duplicates("cell")
    return {str(cell): int(gold == labels[0]) for cell, gold in zip(cells["cell"], cells["gold"], strict=True)}


def unembedder(model: Model, answers: AnswerTokens) -> Callable[[np.ndarray], Any]:
    """The model's own unembedding as a function on numpy rows, as the lens wants it."""
    import torch

    from probes.lens import Unembedded

    class Seen:
        def __init__(self, logit: np.ndarray, logsumexp: np.ndarray) -> None:
            self.logit = logit
            self.logsumexp = logsumexp

    def unembed(rows: np.ndarray) -> Unembedded:
        readout = model.unembed(torch.from_numpy(np.ascontiguousarray(rows)).to(model.device), answers).cpu()
        return Seen(readout.logit.numpy(), readout.logsumexp.numpy())

    return unembed


def _same_gold(table: pd.DataFrame, place: dict[str, np.ndarray]) -> bool:
    """Transfer reads one presentation's labels off the other; a presentation that flips the gold has none to read."""
    first, second = (table["gold"].to_numpy()[rows] for rows in place.values())
    return bool((first == second).all())
