"""The stages of a run that need no forward pass: probes, components, and the link of each answer to what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.config import FOLDS
from experiments.curves import main_rows
from experiments.items import PAIR
from experiments.study import Study, arm_table, stacked

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config
    from experiments.fitting import Material
    from experiments.rundir import RunDirectory

PROBE_TABLES = (
    "probes",
    "probe_curves",
    "probe_rows",
    "probe_change",
    "transfer",
    "failures",
    "attribution_calibration",
)
# Components that are parts of the model; the others are what linearising the readout leaves over.
PARTS = ("embed", "head", "bias", "mixer", "mlp", "rest")


def probe(study: Study[Config]) -> None:
    """Every probe curve of every arm, one after the other."""
    from experiments import fitting, probe_tables

    run, config = study.run, study.config
    if all(run.has_table(name) for name in PROBE_TABLES):
        return
    material = _material(study)
    first = next(iter(material.tables.values()))
    folds = _folds(material, first)
    units = probe_tables.chunks(fitting.curves(study.params, config))
    splits = {arm: arm_table(run, "decomposition", arm) for arm in study.arms}
    parts = run.tables / "parts-probes"
    parts.mkdir(exist_ok=True)
    with study.reporter.stage("probes", len(units)) as done:
        for number, curves in enumerate(units):
            name = f"{parts.name}/{number:04d}"
            # The curves' own table is written last: where it is, the others are.
            if not run.has_table(f"{name}-probe_curves"):
                made = probe_tables.fit(material, curves, folds, splits)
                for table in sorted(made, key="probe_curves".__eq__):
                    run.write_table(f"{name}-{table}", made[table])
            done(1)
    for table in PROBE_TABLES:
        names = [f"{parts.name}/{number:04d}-{table}" for number in range(len(units))]
        run.write_table(table, stacked([run.table(name) for name in names if run.has_table(name)]))
    shutil.rmtree(parts)


def _folds(material: Material, table: pd.DataFrame) -> dict[str, int] | None:
    """The fold of each instance, or of each unit that stands in for instances; None where a fold is a unit."""
    from experiments import fitting, probe_units

    config = material.config
    if material.whole:
        shown = table[table["presentation"] == PAIR[0]]
        return probe_units.dealt(
            fitting.evidence(material, shown), shown["gold"].to_numpy(dtype=str), folds=FOLDS, seed=config.seed
        )
    return None if config.probe.folds is None else fitting.shared_folds(table, config.probe.folds, config.seed)


def _material(study: Study[Config]) -> Material:
    from activations.store import ActivationStore
    from experiments import probe_targets, probe_units
    from experiments.fitting import Material

    run, config = study.run, study.config
    derived = {
        probe_targets.column(target): probe_targets.labels(study.family, target, study.asked)
        for target in probe_targets.derived(config)
    }
    given = run.table("behaviour")
    row = ["setting", "key", "presentation"]
    tables = {
        arm: probe_units.with_template(
            arm_table(run, "readout", arm).merge(
                given[given["arm"] == arm][[*row, "answer", "correct"]], on=row, how="left", validate="one_to_one"
            ),
            study.asked,
        ).assign(**derived)
        for arm in study.arms
    }
    return Material(
        stores={arm: ActivationStore.open(run.activations / arm) for arm in study.arms},
        tables=tables,
        tokens=[prompt.ids for prompt in study.prompts],
        params=study.params,
        labels=study.answers.labels,
        layers=study.model.n_layers,
        config=config,
        whole=_whole(next(iter(tables.values())), study),
    )


def _whole(table: pd.DataFrame, study: Study[Config]) -> bool:
    """Whether what folds hold out has one gold answer each, so that units are dealt to folds and not one a fold."""
    from experiments import probe_units

    if study.config.probe.held_out is None:
        return False
    shown = table[table["presentation"] == PAIR[0]]
    units = probe_units.unit_names(study.config.probe.held_out, study.params, shown)
    return bool(probe_units.one_label(units, shown["gold"].to_numpy(dtype=str)))


def share_out(study: Study[Config]) -> None:
    """δ and s by component of the model, and their change from the base to each adapter."""
    from experiments import inside

    run = study.run
    if run.has_table("components"):
        return
    with study.reporter.stage("components", 1):
        parts = {arm: arm_table(run, "contributions", arm) for arm in study.arms}
        run.write_table("components", inside.component_table(parts, study.answers.labels, study.params, study.config))


def attribute(
    run: RunDirectory, arm: str, behaviour: pd.DataFrame, labels: Sequence[str], config: Config
) -> pd.DataFrame:
    """The link table of one arm: its answers beside everything that was measured.

    Args:
        behaviour: answers of this arm.
    """
    from experiments.link import attribution

    parts = arm_table(run, "contributions", arm)
    parts = parts[parts["kind"].isin(PARTS)] if len(parts) else None
    return attribution(
        behaviour,
        arm_table(run, "readout", arm),
        main_rows(arm_table(run, "probes", arm)),
        arm_table(run, "failures", arm),
        arm_table(run, "decomposition", arm),
        arm_table(run, "patch", arm),
        labels,
        threshold=config.probe.threshold,
        components=parts,
    )


def label_shares(attribution: pd.DataFrame) -> pd.DataFrame:
    """How often each label occurs, for every arm of a link table."""
    from experiments.link import shares_table

    found = []
    for arm, part in attribution.groupby("arm", sort=False):
        table = shares_table(part.reset_index(drop=True))
        table.insert(0, "arm", arm)
        found.append(table)
    return stacked(found)
