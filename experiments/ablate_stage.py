"""Heads: ranked by patching on some instances, cut on others, with the sets that the cut is compared with.

``head_table`` patches the ``z`` of each head between the presentations of the pairs that rank, both ways, at the answer
position; on request also of the pairs that test, so that the ranking can be looked at where it did not choose. ``ranking``
makes the order of it. ``ablate_table`` then runs both presentations of every test pair with the top heads cut together,
with the top heads but one, with random heads and with random heads of the same layers. ``grid_table`` cuts each head by
itself.

Every table goes through ``patching.sweep`` and is made in chunks. At the answer position all cells of a prompt share one
forward pass; a cut at every position costs the layers above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import intervention_stage as stage
from experiments.ablate_halves import RANKED, TESTED, Halves, by_half
from experiments.ablate_options import AblateSettings
from experiments.intervention_stage import IDENTITY, Arm, Pair, Transfer

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Asking
    from patching.effects import HeadEffect
    from patching.heads import Head, HeadSets

FEWEST_DISAGREEING = 8  # below this, heads are ranked on all pairs
NOTHING = "none"  # the runs without a cut, in the table of cuts
ROW = ["setting", "key", "presentation"]
MATCHED = "matched"


def head_table(
    arm: Arm, how: AblateSettings, halves: Halves, done: Callable[[int], None], *, tested: bool = False
) -> pd.DataFrame:
    """Patching of each head's ``z``, a row for each recipient and head; empty where the heads are given.

    Args:
        tested: also on the pairs that the heads are cut on.
    """
    import pandas as pd

    from patching.edits import head_cells, head_map

    cells = head_cells(head_map(arm.model), source=MATCHED)
    parts = [(half, chunk) for half, transfers in head_transfers(arm, how, halves, tested=tested).items()
             for chunk in stage.chunks(transfers)]  # fmt: skip

    def compute(part: tuple[str, list[Transfer]]) -> pd.DataFrame:
        half, chunk = part
        donors = {MATCHED: stage.donor(arm, [one.donor for one in chunk], "z")}
        result = _swept(arm, chunk, cells, donors, how, share=sum(one == half for one, _ in parts))
        base = stage.recipients(arm, chunk, result)
        base = base.assign(unit=base["setting"].map(halves.units), half=half)
        direct = _direct(arm, chunk, cells, donors) if how.direct else None
        frames = []
        for number, cell in enumerate(cells):
            edit = cell.edits[0]
            frames.append(
                base.assign(layer=edit.layer, head=edit.head, patched=result.difference[:, number].astype(np.float64))
            )
            if direct is not None:
                frames[-1]["direct"] = direct[:, number]
        return pd.concat(frames, ignore_index=True)

    return arm.run.build_table(f"heads-{arm.name}", parts, compute, done)


def ablate_table(
    arm: Arm, top: Sequence[Head], how: AblateSettings, halves: Halves, done: Callable[[int], None]
) -> pd.DataFrame:
    """The test pairs with each set of heads cut, a row for each prompt and set; ``none`` is the run as it is."""
    import pandas as pd

    from patching.heads import ablation_cells

    sets = sets_of(arm, top, how).sets
    cells = ablation_cells(sets_of(arm, top, how), source=how.source, position=how.scope)
    chunks = stage.chunks(ablate_transfers(arm, halves))

    def compute(chunk: list[Transfer]) -> pd.DataFrame:
        result = _swept(arm, chunk, cells, _replacements(arm, chunk, how, halves), how, share=len(chunks))
        base = _prompts(arm, chunk, how, halves).assign(**stage.cost(result))
        parts = [base.assign(ablated=NOTHING, heads="", difference=result.unpatched.astype(np.float64))]
        for number, (name, chosen) in enumerate(sets.items()):
            listed = " ".join(f"{layer}.{head}" for layer, head in chosen)
            parts.append(
                base.assign(ablated=name, heads=listed, difference=result.difference[:, number].astype(np.float64))
            )
        return pd.concat(parts, ignore_index=True)

    return arm.run.build_table(f"ablate-{arm.name}", chunks, compute, done)


def grid_table(arm: Arm, how: AblateSettings, halves: Halves, done: Callable[[int], None]) -> pd.DataFrame:
    """The test pairs with each head cut by itself, a row for each prompt and head."""
    import pandas as pd

    from patching.edits import head_cells, head_map

    cells = head_cells(head_map(arm.model), source=how.source, position=how.scope)
    chunks = stage.chunks(ablate_transfers(arm, halves))

    def compute(chunk: list[Transfer]) -> pd.DataFrame:
        result = _swept(arm, chunk, cells, _replacements(arm, chunk, how, halves), how, share=len(chunks))
        base = _prompts(arm, chunk, how, halves).assign(
            unablated=result.unpatched.astype(np.float64), **stage.cost(result)
        )
        parts = [
            base.assign(layer=cell.edits[0].layer, head=cell.edits[0].head,
                        difference=result.difference[:, number].astype(np.float64))
            for number, cell in enumerate(cells)
        ]  # fmt: skip
        return pd.concat(parts, ignore_index=True)

    return arm.run.build_table(f"head_rows-{arm.name}", chunks, compute, done)


def sets_of(arm: Arm, top: Sequence[Head], how: AblateSettings) -> HeadSets:
    """The top heads and what they are compared with."""
    from patching.edits import head_map
    from patching.heads import head_sets

    return head_sets(
        head_map(arm.model), top, count=how.random_sets, seed=arm.config.seed, leave_one_out=how.leave_one_out
    )


def top_heads(heads: pd.DataFrame | None, how: AblateSettings, config: Asking) -> list[Head]:
    """The heads to cut: those that were given, or the first of the ranking."""
    if how.chosen is not None:
        return [(int(layer), int(head)) for layer, head in (one.split(".") for one in how.chosen)]
    assert heads is not None and how.heads is not None
    return [(one.layer, one.head) for one in ranking(heads, config)[: how.heads]]


def ranking(heads: pd.DataFrame, config: Asking) -> tuple[HeadEffect, ...]:
    """Heads by mean effect toward the donor's readout on the pairs that rank, largest first; an instance counts once.

    Toward its readout, not its answer: where too few pairs disagree, agreeing ones rank too, and only the readouts differ.
    On pairs that disagree the two are the same.
    """
    from patching.effects import rank_heads

    ranked = heads[heads["half"] == RANKED] if "half" in heads else heads
    values, cells, _ = by_instance_and_head(ranked)
    return rank_heads(values, cells, seed=config.seed, resamples=config.resamples)


def by_instance_and_head(heads: pd.DataFrame, value: str = "patched") -> tuple[np.ndarray, list[Any], pd.DataFrame]:
    """Effects ``[instance, head]`` in logits toward the donor's readout, the heads' cells, and a row for each instance."""
    from experiments.instances import by_instance
    from patching.edits import Cell, Edit
    from patching.effects import signed_effect

    wide = heads.pivot_table(index=ROW, columns=["layer", "head"], values=value)
    about = heads.drop_duplicates(ROW).set_index(ROW).loc[wide.index]
    toward = np.where(about["donor_difference"] >= about["unpatched"], 1, -1)
    effects = signed_effect(wide.to_numpy(), about["unpatched"].to_numpy(), toward)
    cells = [Cell(f"z.{layer}.{head}", (Edit("z", int(layer), int(head), MATCHED),)) for layer, head in wide.columns]
    once = by_instance(effects.T, about.reset_index(), by=("key",))
    return once.values.T, cells, once.table


def head_transfers(arm: Arm, how: AblateSettings, halves: Halves, *, tested: bool = False) -> dict[str, list[Transfer]]:
    """Both directions of the pairs of a half: its disagreeing ones, or all where those are too few."""
    found = {}
    for half in (RANKED, TESTED) if tested else (RANKED,):
        of_half = _of_half(arm, halves, half)
        disagreeing = [pair for pair in of_half if not pair[2]]
        chosen = disagreeing if len(disagreeing) >= FEWEST_DISAGREEING else of_half
        found[half] = stage.both_ways(arm, chosen[: how.pairs]) if how.chosen is None else []
    return found


def ablate_transfers(arm: Arm, halves: Halves) -> list[Transfer]:
    """Both presentations of every test pair."""
    return stage.both_ways(arm, _of_half(arm, halves, TESTED))


def chunk_count(transfers: Mapping[str, list[Transfer]] | list[Transfer]) -> int:
    """In how many sweeps these recipients are done."""
    several = transfers.values() if isinstance(transfers, Mapping) else (transfers,)
    return sum(len(stage.chunks(each)) for each in several)


def _of_half(arm: Arm, halves: Halves, half: str) -> list[Pair]:
    members = halves.ranked if half == RANKED else halves.tested
    names = {pair: (arm.table["setting"].iat[pair[0]], arm.table["key"].iat[pair[0]]) for pair in stage.pairs(arm)}
    own = [pair for pair, name in names.items() if name in members]
    return sorted(own, key=lambda pair: by_half(names[pair][1]))


def _prompts(arm: Arm, chunk: Sequence[Transfer], how: AblateSettings, halves: Halves) -> pd.DataFrame:
    base = arm.table.iloc[[one.recipient for one in chunk]][IDENTITY].reset_index(drop=True)
    return base.assign(unit=base["setting"].map(halves.units), scope=how.scope, source=how.source)


def _replacements(arm: Arm, chunk: Sequence[Transfer], how: AblateSettings, halves: Halves) -> dict[str, Any]:
    """What takes the heads' place, from rows of the other side; nothing where heads are zeroed."""
    from patching.reference_donors import mean_donor, resample_donor

    if how.source == "zero":
        return {}
    names = list(zip(arm.table["setting"], arm.table["key"], strict=True))
    fold = np.array([halves.fold.get(name, -1) for name in names])
    kinds = arm.table["presentation"].tolist()
    rows = [one.recipient for one in chunk]
    # A held-out value of a parameter has settings of its own, which the other side does not have.
    roles = [("" if how.held_out else setting, kind) for (setting, _), kind in zip(names, kinds, strict=True)]
    layers = [layer for layer in range(arm.model.n_layers) if arm.model.heads(layer)]
    place: Any = {"sites": ("z",), "layers": layers}
    if how.source == "resample":
        used = {int(fold[row]) for row in rows}
        made: dict[int, Any] = {}
        for side in used:
            reference = np.flatnonzero((fold >= 0) & (fold != side))
            own = [row for row in rows if fold[row] == side]
            made[side] = (own, resample_donor(
                arm.store, reference, reference_keys=[names[row][1] for row in reference],
                reference_roles=[roles[row] for row in reference], keys=[names[row][1] for row in own],
                roles=[roles[row] for row in own], seed=arm.config.seed, name="the other instances", **place,
            ))  # fmt: skip
        return {"resample": _merged(rows, made.values(), layers)}
    parts = []
    for role in dict.fromkeys(roles[row] for row in rows):
        reference = np.flatnonzero((fold >= 0) & np.array([one == role for one in roles]))
        own = [row for row in rows if roles[row] == role]
        parts.append((own, mean_donor(
            arm.store, reference, reference_folds=fold[reference].tolist(), item_folds=[int(fold[row]) for row in own],
            name=" ".join(filter(None, role)), **place,
        )))  # fmt: skip
    return {"mean": _merged(rows, parts, layers)}


def _merged(rows: Sequence[int], parts: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Donors of several groups of recipients as one, in the order of the recipients."""
    place = {row: number for number, row in enumerate(rows)}
    found: dict[int, np.ndarray] = {}
    for layer in layers:
        for own, donor in parts:
            values = donor["z"][layer]
            found.setdefault(layer, np.empty((len(rows), values.shape[1]), dtype=values.dtype))
            found[layer][[place[row] for row in own]] = values
    return {"z": found}


def _direct(arm: Arm, chunk: Sequence[Transfer], cells: Sequence[Any], donors: Mapping[str, Any]) -> np.ndarray:
    """Readouts ``[recipient, head]`` with the head replaced on its direct way to the logits alone."""
    from patching.direct_path import direct_effects
    from patching.donors import donor_from_store

    rows, last = [one.recipient for one in chunk], arm.model.n_layers - 1
    own = stage.donor(arm, rows, "z") | donor_from_store(arm.store, rows, sites=("resid_post",), layers=[last])
    found = direct_effects(arm.model, own, cells, answers=arm.answers, donors=donors)
    # Read from stored rows, so its own unpatched readout may differ from the sweep's by rounding; the effect may not.
    readout = arm.table["difference"].to_numpy()[rows]
    return np.asarray(found.difference - found.unpatched[:, None] + readout[:, None], dtype=np.float64)


def _swept(arm: Arm, chunk: Sequence[Transfer], cells: Any, donors: Any, how: AblateSettings, *, share: int) -> Any:
    assert how.check_cells is not None
    return stage.swept(arm, chunk, cells, donors, check_cells=-(-how.check_cells // share), cell_budget=how.cell_budget)
