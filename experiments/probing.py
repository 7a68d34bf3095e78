"""The stages of a run that need no forward pass: probes, components, and the link of each answer to what was measured."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.curves import main_rows
from experiments.study import Study, arm_table, stacked

if TYPE_CHECKING:
    import pandas as pd

    from experiments.config import Config
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


def probe(study: Study) -> None:
    """Every probe curve of every arm, one after the other."""
    from experiments import fitting, probe_tables

    run, config = study.run, study.config
    if all(run.has_table(name) for name in PROBE_TABLES):
        return
    material = _material(study)
    first = next(iter(material.tables.values()))
    folds = None if config.probe.folds is None else fitting.shared_folds(first, config.probe.folds, config.seed)
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


def _material(study: Study) -> Any:
    from activations.store import ActivationStore
    from experiments.fitting import Material

    run = study.run
    given = run.table("behaviour")
    row = ["setting", "key", "presentation"]
    return Material(
        stores={arm: ActivationStore.open(run.activations / arm) for arm in study.arms},
        tables={
            arm: arm_table(run, "readout", arm).merge(
                given[given["arm"] == arm][[*row, "answer", "correct"]], on=row, how="left", validate="one_to_one"
            )
            for arm in study.arms
        },
        tokens=[prompt.ids for prompt in study.prompts],
        params=study.params,
        labels=study.answers.labels,
        layers=study.model.n_layers,
        config=study.config,
    )


def share_out(study: Study) -> None:
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
