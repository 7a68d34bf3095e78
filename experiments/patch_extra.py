"""Beside the sweep of ``probe patch``: how good a gradient's estimate of it is, and which layers carry an adapter's gain.

*Estimates.* Each matched cell was also estimated from one forward and one backward pass of its recipient. Means of both are
compared cell by cell, on the same recipients: whether sizes and ranks are kept says whether the estimate would have been
enough (``patching.gradients_quality``).

*Transplants.* Base and adapter read the same tokens, so each one's activation can stand in the other's run. Put into the
base, an adapter's activation brings some of the gain; taken out of the adapter, it loses some (``patching.transplanting``).
``z`` is exchanged whole, layer by layer, since a gain is asked of layers here. Every prompt of a pair is used, in both
presentations; a row of ``transplant_rows`` is a prompt, a direction and a cell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.inside import PAIR, rows_of
from experiments.intervention_stage import CELL_BUDGET, CHUNK, IDENTITY
from experiments.items import frame
from experiments.patch_effects import ALL, STUDY, wide
from experiments.patch_options import ANSWER, PatchSettings, layers_of
from experiments.patch_stage import DONOR_BYTES, MATCHED
from experiments.study import Study

if TYPE_CHECKING:
    import pandas as pd

    from patching.edits import Cell

INTO_BASE, INTO_ADAPTER = "adapter→base", "base→adapter"  # from → to
TOP = 10  # largest effects whose overlap is stated


def estimates(table: pd.DataFrame, *, seed: int, resamples: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The tables ``patch_estimates`` (a row a cell) and ``patch_quality`` (a row for each arm, direction, site, position).

    Effects are means over recipients of all kinds, in logits toward the donor's answer.
    """
    import pandas as pd

    from patching.effects import signed_effect
    from patching.gradients_quality import estimate_quality

    cells, quality = [], []
    for (arm, *where), rows in table[table["donor"] == MATCHED].groupby(["arm", *STUDY], sort=False):
        found = wide(rows)
        donor = found.about["donor_difference"].to_numpy(dtype=np.float64)
        answered = donor != 0
        if not answered.any():
            continue
        part, toward = found.within(answered), np.sign(donor[answered]).astype(np.int64)
        assert part.estimate is not None
        before = part.about["unpatched"].to_numpy(dtype=np.float64)
        exact = signed_effect(part.values[MATCHED], before, toward)
        estimate = signed_effect(part.estimate, np.zeros(len(before)), toward)
        about = {"arm": arm, **dict(zip(STUDY, where, strict=True))}
        layers, heads = ([cell[which] for cell in part.cells] for which in (0, 1))
        cells.append(
            pd.DataFrame({"layer": layers, "head": pd.array(heads, dtype="Int64"), "estimate": estimate.mean(axis=0),
                          "exact": exact.mean(axis=0), "n": len(before)}).assign(**about)
        )  # fmt: skip
        one = estimate_quality(
            estimate, exact, groups=part.about["key"].tolist(), k=min(TOP, len(layers)), seed=seed,
            resamples=min(resamples, 1000),
        )  # fmt: skip
        values: dict[str, Any] = {}
        for field in dataclasses.fields(one):
            value = getattr(one, field.name)
            if dataclasses.is_dataclass(value):
                values |= {f"{field.name}{end}": getattr(value, name) for end, name in
                           (("", "value"), ("_low", "low"), ("_high", "high"))}  # fmt: skip
            else:
                values[field.name] = value
        known = not np.isnan(values["spearman"])
        verdict = ("enough" if one.enough() else "not enough") if known else "undefined"
        quality.append({**about, **values, "verdict": verdict, "reason": "" if known else _unknown(len(layers))})
    front = ["arm", *STUDY]
    made = pd.concat(cells, ignore_index=True) if cells else pd.DataFrame(columns=front)
    return made[[*front, *(name for name in made.columns if name not in front)]], pd.DataFrame(quality)


def _unknown(cells: int) -> str:
    return f"{cells} cells are too few to correlate" if cells < 3 else "estimates or effects do not vary over cells"


def transplant_rows(
    study: Study[Any], patch: PatchSettings, positions: Sequence[str], adapter: str, done: Callable[[int], None]
) -> pd.DataFrame:
    """Readouts of each arm with the other's activations, a row for each prompt, direction and cell.

    ``base`` and ``adapter`` are the readouts of the arms' own runs.

    Args:
        positions: ``answer``, ``all`` or both.
    """
    import pandas as pd

    from patching.transplanting import transplant

    about = frame(study.asked)[IDENTITY]
    chosen = np.sort(np.concatenate([rows_of(about, kind) for kind in PAIR]))
    gold = np.where(about["gold"].to_numpy() == study.answers.labels[0], 1, -1)
    cells = transplant_cells(patch, positions, study)

    def compute(rows: np.ndarray) -> pd.DataFrame:
        found = transplant(
            study.model,
            [study.prompts[row] for row in rows],
            cells,
            adapter=adapter,
            answers=study.answers,
            gold=gold[rows],
            margin=patch.margin,
            batch_tokens=study.config.batch_tokens,
            seed=study.config.seed,
            resamples=1,  # shares are made of all rows together, below
            cell_budget=patch.cell_budget or CELL_BUDGET,
            check_cells=patch.check_cells,
        )
        parts = []
        for direction, result in ((INTO_BASE, found.base), (INTO_ADAPTER, found.adapter)):
            for number, cell in enumerate(cells):
                edit = cell.edits[0]
                parts.append(
                    about.iloc[rows].assign(
                        direction=direction, site=edit.site, layer=edit.layer, position=edit.position,
                        base=found.base.unpatched.astype(np.float64), adapter=found.adapter.unpatched.astype(np.float64),
                        patched=result.difference[:, number].astype(np.float64), engine=result.engine,
                        forward_passes=result.forward_passes, checked=result.checked, check_max_abs=result.check_max_abs,
                        check_bound=result.check_bound,
                    )
                )  # fmt: skip
        return pd.concat(parts, ignore_index=True)

    return study.run.build_table(
        f"transplant_rows-{adapter}", [chosen[start : start + size] for size in [_fitting(study, cells)]
                                       for start in range(0, len(chosen), size)], compute, done
    )  # fmt: skip


def transplant_cells(patch: PatchSettings, positions: Sequence[str], study: Study[Any]) -> list[Cell]:
    """One cell for each site, layer and position."""
    from patching.edits import Cell, Edit

    return [
        Cell(f"{site}.{layer}@{position}", (Edit(site, layer, source=MATCHED, position=position),))
        for site in patch.sites
        for position in positions
        for layer in layers_of(patch, study.model, site)
    ]


def transplant_chunks(study: Study[Any], patch: PatchSettings, positions: Sequence[str]) -> int:
    """In how many pieces the prompts are done."""
    count = sum(row.presentation.kind in PAIR for row in study.asked)
    return -(-count // _fitting(study, transplant_cells(patch, positions, study)))


def _fitting(study: Study[Any], cells: Sequence[Cell]) -> int:
    """Prompts whose activations of both arms fit into ``DONOR_BYTES``."""
    from activations.sites import choose

    where = {(cell.edits[0].site, cell.edits[0].layer, cell.edits[0].position) for cell in cells}
    longest = max(len(prompt.ids) for prompt in study.prompts)
    numbers = sum(
        choose(study.model, [site], [layer])[site, layer] * (1 if position == ANSWER else longest)
        for site, layer, position in where
    )
    return max(1, min(CHUNK, DONOR_BYTES // (2 * 4 * numbers)))


def transplant_table(rows: pd.DataFrame, first: str, *, margin: float, seed: int, resamples: int) -> pd.DataFrame:
    """The share of the gain that each cell carries: a row for each adapter, direction, presentation, site, position, layer.

    Args:
        rows: ``transplant_rows`` of all adapters, which are its ``arm``.
        first: the family's first label.

    Returns:
        ``effect`` is in logits toward the gold answer: brought into the base, or lost out of the adapter; ``share`` of the
        gain ``total``; ``right`` the share of rows with the right readout, ``right_unpatched`` that without edits.
    """
    import pandas as pd

    from patching.transplanting import gain_carried

    parts = []
    for (adapter, direction, site, position), every in rows.groupby(
        ["arm", "direction", "site", "position"], sort=False
    ):
        for kind in (ALL, *PAIR):
            part = every if kind == ALL else every[every["presentation"] == kind]
            name = ["setting", "key", "presentation"]
            values = part.pivot(index=name, columns="layer", values="patched")
            about = part.drop_duplicates(name).set_index(name).loc[values.index].reset_index()
            found = gain_carried(
                values.to_numpy(),
                about["base"].to_numpy(),
                about["adapter"].to_numpy(),
                np.where(about["gold"] == first, 1, -1),
                into_adapter=direction == INTO_ADAPTER,
                groups=about["key"].tolist(),
                margin=margin,
                seed=seed,
                resamples=resamples,
            )
            one: dict[str, Any] = {"layer": values.columns.to_numpy()}
            for column, estimate in (("effect", found.moved), ("share", found.share), ("total", found.total)):
                one |= {column: estimate.mean, f"{column}_low": estimate.low, f"{column}_high": estimate.high}
            flat = {key: np.broadcast_to(value, len(values.columns)) for key, value in one.items()}
            parts.append(
                pd.DataFrame(flat).assign(
                    arm=adapter, direction=direction, presentation=kind, site=site, position=position, right=found.right,
                    right_unpatched=found.right_unpatched, n=len(about), n_groups=about["key"].nunique(),
                    monotone=site.startswith("resid") and position == ANSWER,
                    method=f"logits toward the gold answer, means; share of the mean gain, margin {margin:g}; 95% "
                    f"bootstrap over instances ({resamples} resamples), ends moved out by t",
                    reason=found.reason,
                )
            )  # fmt: skip
    found_table = pd.concat(parts, ignore_index=True)
    front = ["arm", "direction", "presentation", "site", "position", "layer"]
    return found_table[[*front, *(name for name in found_table.columns if name not in front)]]
