"""From fitted probes to the tables of a run.

===================  =================================  =======================================================
table                one row for each                   what it is for
===================  =================================  =======================================================
probes               curve, group it is read in, layer  AUROC with its interval, its null and the transfer
probe_curves         curve                              best and first layer, p over layers, detectable AUROC
probe_rows           row of a curve over all rows       held-out margin at the layer chosen on other folds
probe_change         curve, layer, adapter              paired change of AUROC from the base to the adapter
transfer             curve, other rows, layer           one group's, presentation's or arm's probes read another's
failures             prompt                             what kind of failure its readout is if it is one
attribution_…        presentation, check, label         how often that comes back from other folds and halves
===================  =================================  =======================================================

The work goes curve by curve; each is written when it is done, so that a kill loses one. Whatever can't be fitted has a
row with NaN and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import fitting
from experiments.errors import RunError
from experiments.fitting import BASELINES, Curve, Fitted, Material, Rows
from experiments.groups import ALL, Group
from experiments.probe_measures import LEVEL, HeldOutRows, by_curve, by_layer
from experiments.probe_targets import EVERY

if TYPE_CHECKING:
    import pandas as pd

    from probes.linear import ProbeResult, ReadingResult

RESID, BASELINE_LAYER = "resid_post", -1
FAILURE_NAMES = ("failures", "attribution_calibration")
NAMES = ("probes", "probe_curves", "probe_rows", "probe_change", "transfer", *FAILURE_NAMES)


def chunks(curves: Sequence[Curve]) -> list[tuple[Curve, ...]]:
    """The units of work: the main curves together, since failures rest on them, and every other one alone."""
    main = tuple(curve for curve in curves if curve.is_main)
    return [main, *((curve,) for curve in curves if not curve.is_main)]


def fit(
    material: Material,
    curves: Sequence[Curve],
    folds: Mapping[str, int] | None,
    decompositions: Mapping[str, pd.DataFrame],
) -> dict[str, pd.DataFrame]:
    """All tables of one unit of work, every arm in them, by name.

    Args:
        folds: of each instance; None where units are held out whole.
        decompositions: δ and s of each arm, which failures are told apart by.
    """
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in NAMES}
    main: dict[str, dict[str, Fitted]] = {}
    for curve in curves:
        fitted = [fitting.fit_arm(material, curve, arm, folds) for arm in material.arms]
        for one in fitted:
            for name, table in curve_tables(material, one, folds):
                parts[name].append(table)
            if curve.is_main:
                main.setdefault(one.arm, {})[curve.presentation] = one
        parts["probe_change"] += [change_rows(material, fitted[0], one) for one in fitted[1:]]
    for arm, of in main.items():
        for name, table in zip(FAILURE_NAMES, failures(material, arm, of, decompositions[arm]), strict=True):
            table.insert(0, "arm", arm)
            parts[name].append(table)
    found = {name: [table for table in tables if len(table)] for name, tables in parts.items()}
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items() if tables}


def curve_tables(
    material: Material, one: Fitted, folds: Mapping[str, int] | None
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Every table that one fitted curve has rows in."""
    import pandas as pd

    yield "probes", layer_rows(material, one)
    summary = by_curve(material, one.result, one.rows, one.reason, single=False, directions=None)
    yield "probe_curves", pd.DataFrame([{**_about(one, RESID), **summary}])
    yield "transfer", transfer_rows(material, one)
    if one.curve.trained == ALL:
        yield "probe_rows", verdicts(material, one)
        for layers, summary in baselines(material, one, folds):
            yield "probes", layers
            yield "probe_curves", summary


def failures(
    material: Material, arm: str, of: Mapping[str, Fitted], decomposition: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What each readout of an arm would be if it is a failure, and how often such labels come back.

    Raises:
        RunError: the gold answer can't be probed, without which no failure can be attributed.
    """
    from experiments.link import failure_rows

    # Where presentations flip the gold answer, a probe over all of them is the one for what is to be said.
    over_all = of.get(EVERY)
    used = dict(of) if over_all is None else {EVERY: over_all}
    results = {}
    for kind, one in used.items():
        if one.result is None:
            raise RunError(f"probes for the gold answer of {kind} prompts can't be fitted: {one.reason}")
        results[kind] = one.result
    some = next(iter(used.values()))
    rest = ("shuffles", "assigned", "seed", "strata")
    options = {name: value for name, value in fitting.how(material, arm, some.rows, None).items() if name not in rest}
    if options.get("held_out") is None:
        options = {name: value for name, value in options.items() if name != "held_out"}
    return failure_rows(
        {kind: fitting.activations(material, arm, one.rows) for kind, one in used.items()},
        material.tables[arm],
        material.labels,
        results,
        decomposition,
        seed=material.config.seed,
        splits=material.config.probe.splits,
        fit=options,
        keys={kind: one.rows.keys for kind, one in used.items()},
    )


def layer_rows(material: Material, one: Fitted) -> pd.DataFrame:
    """The curve on the rows it was trained on, and, where these are all rows, on each group of them."""
    import pandas as pd

    parts = [_frame(material, one, one.curve.group, one.result, one.rows, one.reason)]
    if one.curve.trained == ALL:
        for name, target in one.targets.items():
            if (target.arm, target.presentation) == (one.arm, one.curve.presentation):
                found = None if one.result is None else one.result.readings[name]
                parts.append(_frame(material, one, target.group, found, target.rows, one.reason))
    return pd.concat(parts, ignore_index=True)


def _transfer(one: Fitted, group: Group) -> Any:
    """AUROC by layer of the same probes on the other presentation of a group."""
    if one.result is not None:
        for name, target in one.targets.items():
            if target.arm == one.arm and target.group == group and target.presentation != one.curve.presentation:
                return one.result.readings[name].auroc
    return np.nan


def _frame(
    material: Material,
    one: Fitted,
    group: Group,
    found: ProbeResult | ReadingResult | None,
    rows: Rows,
    reason: str,
) -> pd.DataFrame:
    """Rows of ``probes``: this curve, read in one group."""
    import pandas as pd

    table = pd.DataFrame({**_about(one, RESID), "setting": group.label, "layer": np.arange(material.layers)})
    return table.assign(**by_layer(found, rows, reason), transfer_auroc=_transfer(one, group))


def _about(one: Fitted, features: str) -> dict[str, Any]:
    curve = one.curve
    return {"arm": one.arm, "target": curve.target, "presentation": curve.presentation, "setting": curve.group.label,
            "trained": curve.trained, "features": features}  # fmt: skip


def transfer_rows(material: Material, one: Fitted) -> pd.DataFrame:
    """What a curve's probes read off other rows: another group, presentation or arm."""
    import pandas as pd

    parts = []
    for name, target in one.targets.items():
        if one.curve.trained == ALL and (target.arm, target.presentation) == (one.arm, one.curve.presentation):
            continue  # rows that the probes were trained on, held out; they stand in probes
        found = None if one.result is None else one.result.readings[name]
        part = _frame(material, one, one.curve.group, found, target.rows, one.reason)
        part = part.drop(columns=["features", "pooled", "transfer_auroc", "penalty", "above_null"])
        for column, value in (
            ("read_setting", target.group.label),
            ("read_presentation", target.presentation),
            ("read_arm", target.arm),
        ):
            part.insert(5, column, value)
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def verdicts(material: Material, one: Fitted) -> pd.DataFrame:
    """Each row's held-out margin at its fold's chosen layer; the layer is -1 where no probe could be fitted."""
    shown = material.tables[one.arm].iloc[one.rows.place]
    table = shown[["setting", "n", "key", "presentation", "cell", "gold"]].reset_index(drop=True)
    table.insert(0, "arm", one.arm)
    table.insert(1, "target", one.curve.target)
    result = one.result
    if result is None:
        return table.assign(fold=-1, layer=-1, margin=np.nan, decodable=False)
    at = result.chosen_layer[result.folds]
    return table.assign(
        fold=result.folds, layer=at, margin=result.margins[at, np.arange(result.n)], decodable=result.decodable
    )


def baselines(
    material: Material, one: Fitted, folds: Mapping[str, int] | None
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Probes on what needs no model: embedding of the last token, prompt length, bag of tokens."""
    import pandas as pd

    from probes.baselines import bag_of_tokens, prompt_length
    from probes.linear import fit_probes

    found = []
    ids = [material.tokens[place] for place in one.rows.place]
    for name in BASELINES:
        result, reason = None, one.reason
        if not reason:
            if name == "embed":
                features = material.stores[one.arm].read("embed", 0, one.rows.place)[None]
            else:
                features = prompt_length(ids) if name == "length" else bag_of_tokens(ids)
            options = fitting.how(material, one.arm, one.rows, folds)
            result, reason = fitting.tried(
                partial(fit_probes, features, one.rows.labels, one.rows.keys, allow_constant=True, **options)
            )
        # Few features leave a fit less freedom than there are rows, which an interval has to know.
        few = result is not None and features.shape[-1] < len(one.rows.place)
        directions = float(features.shape[-1]) if few else None
        about = _about(one, name)
        layers = by_layer(result, one.rows, reason, directions=directions)
        table = pd.DataFrame({**about, "layer": [BASELINE_LAYER]}).assign(**layers, transfer_auroc=np.nan)
        constant = result is not None and bool((features == features[:, :1]).all())
        summary = by_curve(material, result, one.rows, reason, single=True, directions=directions, constant=constant)
        found.append((table, pd.DataFrame([{**about, **summary}])))
    return found


def change_rows(material: Material, base: Fitted, adapter: Fitted) -> pd.DataFrame:
    """Paired change of AUROC by layer, on the same rows and folds; undefined where the labels differ between arms."""
    import pandas as pd

    from probes.controls import contrast

    curve = adapter.curve
    table = pd.DataFrame(
        {"arm": adapter.arm, "target": curve.target, "presentation": curve.presentation, "setting": curve.group.label,
         "trained": curve.trained, "layer": np.arange(material.layers)}
    )  # fmt: skip
    same = np.array_equal(base.rows.place, adapter.rows.place) and np.array_equal(base.rows.labels, adapter.rows.labels)
    if base.result is None or adapter.result is None or not same:
        reason = base.reason or adapter.reason or f"the arms differ in {curve.target}, so the rows are not the same"
        return table.assign(**_NO_CHANGE, n=len(adapter.rows.place), reason=reason)
    sides = [
        HeldOutRows(of.result.margins, of.result.labels, of.result.folds, of.rows.keys)
        for of in (base, adapter)
        if of.result is not None
    ]
    found, reason = fitting.tried(
        lambda: contrast(*sides, level=LEVEL, resamples=material.config.resamples, seed=material.config.seed)
    )
    if found is None:
        difference = adapter.result.auroc - base.result.auroc
        known = {**_NO_CHANGE, "difference": difference}
        return table.assign(**known, n=len(adapter.rows.place), reason=f"no interval: {reason}")
    return table.assign(
        difference=found.difference,
        low=found.low,
        high=found.high,
        p=found.p_value,
        p_max=found.p_max,
        n=found.n,
        method=found.method,
        reason=np.where(np.isnan(found.low), found.reason, ""),
    )


_NO_CHANGE = {**dict.fromkeys(("difference", "low", "high", "p", "p_max"), np.nan), "method": ""}
