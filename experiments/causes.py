"""What causes the answer: patching residuals between presentations, and switching heads off.

Both act at the answer position and go through ``patching.sweep``, whose price is about one forward pass an item for all
cells together. Pairs are called disagreeing when the two readouts have different signs.

Patching puts ``resid_post`` of one presentation into the run of the other, at every layer, both ways. Beside the matched
donor stand an unrelated instance's activation and a random direction of the donor's norm. A curve that climbs with depth
is what *any* donor's answer does at the last layers; what counts is where the matched donor parts from the controls.

Heads are ranked on one half of the instances and ablated on the other, so that the choice can't flatter the effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import UsageError
from experiments.inside import PAIR, rows_of

if TYPE_CHECKING:
    import pandas as pd

    from activations.model import Model
    from activations.prompts import Prompt
    from activations.readout import AnswerTokens
    from activations.store import ActivationStore
    from experiments.config import Config
    from experiments.rundir import RunDirectory
    from patching.sweeping import SweepResult

DONORS = ("matched", "unrelated", "random")
CHUNK = 64  # recipients in one sweep: a kill loses one chunk, and each chunk pays for its own check
FEWEST_DISAGREEING = 8  # below this, heads are ranked on all pairs


@dataclass(frozen=True, slots=True)
class Arm:
    """Everything that the sweeps of one arm need."""

    run: RunDirectory
    model: Model
    name: str
    store: ActivationStore
    table: pd.DataFrame
    prompts: Sequence[Prompt]
    answers: AnswerTokens
    config: Config


@dataclass(frozen=True, slots=True)
class Transfer:
    """One recipient prompt and its donors, as row numbers of the run."""

    recipient: int
    donor: int
    unrelated: int
    agree: bool


def patch_table(arm: Arm, done: Callable[[int], None]) -> pd.DataFrame:
    """Residual patching, a row for each pair, direction, donor and layer."""
    import pandas as pd

    from patching.controls import norm_matched_random
    from patching.edits import Cell, Edit

    layers = range(arm.model.n_layers)
    cells = [
        Cell(f"{donor}.{layer}", (Edit("resid_post", layer, source=donor),)) for donor in DONORS for layer in layers
    ]
    chunks = _chunks(patch_transfers(arm))

    def compute(chunk: list[Transfer]) -> pd.DataFrame:
        matched = _donor(arm, [one.donor for one in chunk], "resid_post")
        keys = [_row_name(arm.table, one.recipient) for one in chunk]
        donors = {
            "matched": matched,
            "unrelated": _donor(arm, [one.unrelated for one in chunk], "resid_post"),
            "random": norm_matched_random(matched, keys=keys, seed=arm.config.seed),
        }
        result = _sweep(arm, chunk, cells, donors, share=len(chunks))
        parts = []
        for number, (donor, layer) in enumerate((donor, layer) for donor in DONORS for layer in layers):
            parts.append(
                _recipients(arm, chunk, result).assign(
                    donor=donor, layer=layer, patched=result.difference[:, number].astype(np.float64)
                )
            )
        return pd.concat(parts, ignore_index=True)

    return arm.run.build_table(f"patch-{arm.name}", chunks, compute, done)


def head_table(arm: Arm, done: Callable[[int], None]) -> pd.DataFrame:
    """Patching of each head's ``z`` on the ranking half, a row for each recipient and head."""
    import pandas as pd

    from patching.edits import head_cells, head_map

    cells = head_cells(head_map(arm.model), source="matched")
    chunks = _chunks(head_transfers(arm))

    def compute(chunk: list[Transfer]) -> pd.DataFrame:
        donors = {"matched": _donor(arm, [one.donor for one in chunk], "z")}
        result = _sweep(arm, chunk, cells, donors, share=len(chunks))
        parts = []
        for number, cell in enumerate(cells):
            edit = cell.edits[0]
            parts.append(
                _recipients(arm, chunk, result).assign(
                    layer=edit.layer, head=edit.head, patched=result.difference[:, number].astype(np.float64)
                )
            )
        return pd.concat(parts, ignore_index=True)

    return arm.run.build_table(f"heads-{arm.name}", chunks, compute, done)


def ablate_table(arm: Arm, heads: pd.DataFrame, done: Callable[[int], None]) -> pd.DataFrame:
    """Zero-ablation of the top-ranked heads and of random sets on the other half, a row for each prompt and set."""
    import pandas as pd

    from patching.edits import head_map
    from patching.effects import head_set_cell, random_head_sets

    top = [(one.layer, one.head) for one in ranking(heads, arm.config)[: arm.config.ablate.heads]]
    sets = {
        "top": tuple(top),
        **{
            f"random {number}": chosen
            for number, chosen in enumerate(
                random_head_sets(
                    head_map(arm.model),
                    size=len(top),
                    count=arm.config.ablate.random_sets,
                    exclude=top,
                    seed=arm.config.seed,
                ),
                start=1,
            )
        },
    }
    cells = [head_set_cell(name, chosen) for name, chosen in sets.items()]
    chunks = _chunks(ablate_transfers(arm))

    def compute(chunk: list[Transfer]) -> pd.DataFrame:
        result = _sweep(arm, chunk, cells, {}, share=len(chunks))
        base = arm.table.iloc[[one.recipient for one in chunk]][_IDENTITY].reset_index(drop=True)
        base = base.assign(**_cost(result))
        parts = [base.assign(ablated="none", heads="", difference=result.unpatched.astype(np.float64))]
        for number, (name, chosen) in enumerate(sets.items()):
            listed = " ".join(f"{layer}.{head}" for layer, head in chosen)
            parts.append(
                base.assign(ablated=name, heads=listed, difference=result.difference[:, number].astype(np.float64))
            )
        return pd.concat(parts, ignore_index=True)

    return arm.run.build_table(f"ablate-{arm.name}", chunks, compute, done)


def ranking(heads: pd.DataFrame, config: Config) -> tuple[Any, ...]:
    """Heads by mean effect toward the donor's answer, largest first; an instance counts once."""
    from experiments.instances import by_instance
    from patching.edits import Cell, Edit
    from patching.effects import rank_heads, signed_effect

    wide = heads.pivot_table(index=["setting", "key", "presentation"], columns=["layer", "head"], values="patched")
    about = heads.drop_duplicates(["setting", "key", "presentation"]).set_index(["setting", "key", "presentation"])
    about = about.loc[wide.index]
    toward = np.where(about["donor_difference"] >= about["unpatched"], 1, -1)
    effects = signed_effect(wide.to_numpy(), about["unpatched"].to_numpy(), toward)
    cells = [Cell(f"z.{layer}.{head}", (Edit("z", int(layer), int(head), "matched"),)) for layer, head in wide.columns]
    once = by_instance(effects.T, about.reset_index(), by=("key",))
    return rank_heads(once.values.T, cells, seed=config.seed, resamples=config.resamples)


def check_heads(model: Model, config: Config) -> None:
    """The chosen heads and a disjoint random set of the same size have to fit into the model."""
    total = sum(model.heads(layer) or 0 for layer in range(model.n_layers))
    if total < 2:
        raise UsageError(
            f"{model.name} has {total} attention heads to cut: a run ablates one and needs another as control"
        )
    if 2 * config.ablate.heads > total:
        raise UsageError(
            f"ablate.heads is {config.ablate.heads} but {model.name} has {total} heads: give at most {total // 2}, "
            "so that a random set of the same size remains as control"
        )


def patch_transfers(arm: Arm) -> list[Transfer]:
    """Both directions of the first disagreeing pairs and of as many agreeing controls."""
    pairs = _pairs(arm)
    disagreeing = [pair for pair in pairs if not pair[2]][: arm.config.patch.pairs]
    # Where nothing disagrees, the controls alone still show what patching does.
    agreeing = [pair for pair in pairs if pair[2]][: max(len(disagreeing), min(8, arm.config.patch.pairs))]
    return _both_ways(arm, [*disagreeing, *agreeing])


def head_transfers(arm: Arm) -> list[Transfer]:
    """Both directions of the ranking half: its disagreeing pairs, or all of its pairs where those are too few."""
    half = _half(arm, 0)
    disagreeing = [pair for pair in half if not pair[2]]
    chosen = disagreeing if len(disagreeing) >= FEWEST_DISAGREEING else half
    return _both_ways(arm, chosen[: arm.config.patch.pairs])


def ablate_transfers(arm: Arm) -> list[Transfer]:
    """Both presentations of every pair of the other half."""
    return _both_ways(arm, _half(arm, 1))


def _pairs(arm: Arm) -> list[tuple[int, int, bool]]:
    """(original row, equivalent row, readouts agree), in an order keyed by the instances and the seed."""
    original, equivalent = (rows_of(arm.table, kind) for kind in PAIR)
    signs = np.sign(arm.table["difference"].to_numpy())
    pairs = [(int(o), int(e), bool(signs[o] == signs[e])) for o, e in zip(original, equivalent, strict=True)]

    def order(pair: tuple[int, int, bool]) -> bytes:
        return hashlib.sha256(f"{arm.config.seed} {_row_name(arm.table, pair[0])}".encode()).digest()

    return sorted(pairs, key=order)


def _both_ways(arm: Arm, pairs: Sequence[tuple[int, int, bool]]) -> list[Transfer]:
    from patching.controls import derangement

    place = dict(zip(PAIR, (rows_of(arm.table, kind) for kind in PAIR), strict=True))
    names = [_row_name(arm.table, int(row)) for row in place["original"]]
    settings = arm.table["setting"].iloc[place["original"]].tolist()
    other = dict(zip(names, derangement(names, settings, seed=arm.config.seed), strict=True))
    transfers = []
    for original, equivalent, agree in pairs:
        stranger = other[_row_name(arm.table, original)]
        transfers.append(Transfer(equivalent, original, int(place["original"][stranger]), agree))
        transfers.append(Transfer(original, equivalent, int(place["equivalent"][stranger]), agree))
    return transfers


def _sweep(arm: Arm, chunk: Sequence[Transfer], cells: Any, donors: Any, *, share: int) -> SweepResult:
    from patching.sweeping import sweep

    return sweep(
        arm.model,
        [arm.prompts[one.recipient] for one in chunk],
        cells,
        answers=arm.answers,
        donors=donors,
        batch_tokens=arm.config.batch_tokens,
        check_cells=-(-arm.config.patch.check_cells // share),
        seed=arm.config.seed,
    )


_IDENTITY = ["setting", "n", "key", "presentation", "cell", "gold"]


def _recipients(arm: Arm, chunk: Sequence[Transfer], result: SweepResult) -> pd.DataFrame:
    """The recipients' identity, their and their donors' readouts; ``presentation`` is the recipient's."""
    difference = arm.table["difference"].to_numpy()
    base = arm.table.iloc[[one.recipient for one in chunk]][_IDENTITY].reset_index(drop=True)
    return base.assign(
        pair=["agreeing" if one.agree else "disagreeing" for one in chunk],
        unpatched=result.unpatched.astype(np.float64),
        donor_difference=difference[[one.donor for one in chunk]],
        **_cost(result),
    )


def _cost(result: SweepResult) -> dict[str, Any]:
    return {
        "engine": result.engine,
        "forward_passes": result.forward_passes,
        "checked": result.checked,
        "check_max_abs": result.check_max_abs,
        "check_bound": result.check_bound,
    }


def _donor(arm: Arm, rows: Sequence[int], site: str) -> dict[str, dict[int, np.ndarray]]:
    from patching.donors import donor_from_store

    layers = [layer for layer in range(arm.model.n_layers) if site != "z" or arm.model.heads(layer)]
    return donor_from_store(arm.store, rows, sites=(site,), layers=layers)


def _chunks(transfers: list[Transfer]) -> list[list[Transfer]]:
    return [transfers[start : start + CHUNK] for start in range(0, len(transfers), CHUNK)]


def _row_name(table: pd.DataFrame, row: int) -> str:
    return f"{table['setting'].iat[row]} {table['key'].iat[row]}"


def _half(arm: Arm, which: int) -> list[tuple[int, int, bool]]:
    """The pairs that heads are ranked on (0) or ablated on (1).

    Within each setting and cell every other instance, in an order of their own, so that both halves have the whole
    design. The order is that of the keys' hashes, so an instance that stands under two settings is in one half of both.
    """
    taken: dict[tuple[str, str], int] = {}
    half = []
    for pair in sorted(
        _pairs(arm), key=lambda p: hashlib.sha256(f"half {arm.table['key'].iat[p[0]]}".encode()).digest()
    ):
        stratum = (arm.table["setting"].iat[pair[0]], arm.table["cell"].iat[pair[0]])
        if taken.get(stratum, 0) % 2 == which:
            half.append(pair)
        taken[stratum] = taken.get(stratum, 0) + 1
    return half


def chunk_count(transfers: list[Transfer]) -> int:
    """In how many sweeps these recipients are done."""
    return len(_chunks(transfers))
