"""``probe fit``: probes for a target over the rows of a store, with their controls, without a run.

The rows are those of one site and position, of the presentations that are trained on; every layer has its own probe.
Options are checked, and labels counted, before an activation is read. What is printed and written is what a run's tables
say of a curve, made by the same code (``probe_measures``).

Units that are held out whole may be *crossed* with instances: under two relations a family asks about the same orders.
Folds by unit would then leave nothing to train on, since the other units hold the same instances. So each unit is read by
probes of the other units, by the one whose fold held its instance out: neither the unit nor the instance was seen. There
is then one result a unit. Units that have one label each are dealt to folds instead, several together, and count as the
instances; see ``probe_units``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import fit_rows, fitting, probe_options, probe_units
from experiments.config import FOLDS
from experiments.errors import UsageError
from experiments.fit_options import Choice, as_flags
from experiments.fitting import Rows
from experiments.probe_measures import HeldOutRows, by_layer, first_layer
from experiments.progress import Reporter
from experiments.store_items import Asked, Opened, rows_at

if TYPE_CHECKING:
    import pandas as pd

    from probes.linear import ProbeResult, ReadingResult


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One set of rows that was read: what its layers show together. Names are those of a run's ``probe_curves``."""

    read: str
    held_out: str
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What `probe fit` found.

    Attributes:
        table: one row for each set of rows that was read and each layer; tidy, with the curve's numbers beside.
        curves: one for each set of rows that was read.
        meaning: what a label of 1 says.
        notes: rows that have no label, and the like.
    """

    about: Mapping[str, Any]
    table: pd.DataFrame
    curves: Sequence[Curve]
    meaning: str
    notes: Sequence[str] = field(default_factory=tuple)


def fit(opened: Opened, chosen: Choice, reporter: Reporter) -> Fit:
    """Fit and judge the probes.

    Raises:
        UsageError: an unknown target, site, layer, position, presentation or unit; too few instances; one class.
        RunError, ProbeError: the store, the items or the numbers are not fit for it.
    """
    asked = rows_at(opened, chosen.position)
    layers = _layers(opened, chosen)
    fit_rows.check_presentations(asked, chosen)
    try:
        probe_options.check(chosen.config.probe, asked.params)
    except UsageError as error:
        raise as_flags(error) from None
    labels, without = fit_rows.labels(opened, asked, chosen.target, chosen.train)
    notes = [without] if without else []
    own = fit_rows.rows(asked, labels, chosen.train)
    units = fit_rows.units(asked, own, chosen)
    fit_rows.check_rows(asked, own, units, chosen)
    others = {kind: fit_rows.rows(asked, labels, (kind,)) for kind in chosen.read}
    if units is not None and fit_rows.whole(own, units):
        own, others, note = fit_rows.by_unit(asked, own, others, chosen)
        notes.append(note)
    for kind, rows in others.items():
        if len(rows.place) == 0:
            raise UsageError(f"--read is {kind}, of which no row has the target {chosen.target}: leave it out")

    def features(rows: Rows) -> np.ndarray:
        return opened.store.stack(chosen.site, layers, asked.table["place"].to_numpy()[rows.place])

    _check_constant(features(own), layers, chosen)
    trained = "+".join(chosen.train)
    found: list[tuple[str, str, ProbeResult | ReadingResult, Rows]] = []
    crossed = units is not None and fit_rows.crossed(own, units)
    values = list(dict.fromkeys(units)) if units is not None else []
    with reporter.stage(f"probes of {len(layers)} layers", len(values) if crossed else 1) as done:
        if units is not None and crossed:
            held_out = str(chosen.config.probe.held_out)
            names = probe_units.unit_names(held_out, asked.params, asked.table)
            for unit in values:
                read = {kind: one.within(names[one.place] == unit) for kind, one in {trained: own, **others}.items()}
                read = {kind: one for kind, one in read.items() if len(one.place)}
                result = _fit(features, asked, own.within(units != unit), None, read, chosen)
                found += [(kind, str(unit), one, read[kind]) for kind, one in result.readings.items()]
                done(1)
            notes.append(
                f"every instance stands under several values of {held_out}, so each value is read by probes of the others "
                "that did not see the instance either"
            )
        else:
            result = _fit(features, asked, own, units, others, chosen)
            done(1)
            found.append((trained, "", result, own))
            found += [(kind, "", one, others[kind]) for kind, one in result.readings.items()]
    about = {
        "store": str(opened.store.directory), "arm": opened.arm, "target": chosen.target, "site": chosen.site,
        "position": chosen.position, "train": trained, "held_out_unit": chosen.config.probe.held_out or "",
        "member": chosen.config.probe.member, "shuffles": chosen.config.probe.shuffles,
        "threshold": chosen.config.probe.threshold, "seed": chosen.config.seed,
    }  # fmt: skip
    meaning = fit_rows.meaning(opened, asked, chosen.target, chosen.train)
    return _gathered(about, found, layers, chosen, meaning, notes)


def _layers(opened: Opened, chosen: Choice) -> list[int]:
    from activations.errors import StoreError

    there = opened.store.layers
    if chosen.site not in there:
        raise UsageError(f"--site is {chosen.site!r}: {opened.store.directory} holds {', '.join(there)}")
    try:
        found = [opened.store.find(chosen.site, layer)[1] for layer in chosen.layers or there[chosen.site]]
    except StoreError as error:
        raise UsageError(str(error)) from None
    if len({opened.store.width(chosen.site, layer) for layer in found}) > 1:
        raise UsageError(
            f"rows of {chosen.site} differ in width between layers: name layers of one width with --layers"
        )
    return sorted(set(found))


def _check_constant(features: np.ndarray, layers: Sequence[int], chosen: Choice) -> None:
    same = [layer for layer, rows in zip(layers, features, strict=True) if (rows == rows[0]).all()]
    if same:
        raise UsageError(
            f"{chosen.site} at {chosen.position} is the same in all {features.shape[1]} rows at layer "
            f"{', '.join(map(str, same))}, as the embedding of the token that ends every prompt is: leave the layer out "
            "with --layers, or read another --position or --site"
        )


def _fit(
    features: Callable[[Rows], np.ndarray],
    asked: Asked,
    own: Rows,
    units: np.ndarray | None,
    read: Mapping[str, Rows],
    chosen: Choice,
) -> ProbeResult:
    from probes.linear import Reading, fit_probes

    probe = chosen.config.probe
    options: dict[str, Any] = {"member": probe.member, "seed": chosen.config.seed, "shuffles": probe.shuffles}
    if probe.penalty is not None:
        options["penalty"] = probe.penalty[0] if len(probe.penalty) == 1 else probe.penalty
    if probe.inner_folds is not None:
        options["inner_folds"] = probe.inner_folds
    count, whole = probe.folds or FOLDS, units is not None and fit_rows.whole(own, units)
    if units is None:
        options["folds"] = count
    elif whole:
        # Units of one label each stand in for instances.
        folds = probe_units.dealt(units, own.labels, folds=FOLDS, seed=chosen.config.seed)
        count = max(folds.values()) + 1
        options |= {"folds": count, "assigned": np.array([folds[key] for key in own.keys])}
    else:
        options["held_out"], count = units, len(np.unique(units))

    def strata(rows: Rows) -> np.ndarray | None:
        if whole:
            return None
        return fitting.varied_strata(asked.table.iloc[rows.place], rows.labels, count)

    return fit_probes(
        features(own),
        own.labels,
        own.keys,
        strata=strata(own),
        readings={kind: Reading(features(one), one.labels, one.keys, strata(one)) for kind, one in read.items()},
        **options,
    )


def _gathered(
    about: Mapping[str, Any],
    found: Sequence[tuple[str, str, ProbeResult | ReadingResult, Rows]],
    layers: Sequence[int],
    chosen: Choice,
    meaning: str,
    notes: Sequence[str],
) -> Fit:
    import pandas as pd

    curves, frames = [], []
    for read, unit, result, rows in found:
        measured = by_layer(result, rows, "")
        whole = _summary(result, rows, measured, layers, chosen)
        whole["remark"] = _remark(measured, layers, trained=read == about["train"] and not unit)
        curves.append(Curve(read, unit, whole))
        table = pd.DataFrame({**about, "read": read, "held_out": unit, "layer": layers})
        beside = {name: value for name, value in whole.items() if name in _BESIDE}
        frames.append(table.assign(**measured, **beside))
    return Fit(about, pd.concat(frames, ignore_index=True), curves, meaning, tuple(notes))


def _remark(measured: Mapping[str, Any], layers: Sequence[int], *, trained: bool) -> str:
    """What to make of an AUROC below what shuffled labels give; empty where there is none."""
    below = np.asarray(measured["auroc"]) < np.asarray(measured["null_low"])  # NaN is below nothing
    if not below.any():
        return ""
    at = ", ".join(str(layer) for layer, under in zip(layers, np.atleast_1d(below), strict=True) if under)
    if trained:
        return (
            f"AUROC below the shuffled 95% at layer {at}: on held-out rows of the training kind that is an artefact of few "
            "rows or of units that differ, no signal"
        )
    return f"AUROC below the shuffled 95% at layer {at}: in these rows the probes' direction reads the other way round"


_BESIDE = ("ones", "zeros", "first_layer", "first_layer_low", "first_layer_high", "first_layer_never", "first_layer_reason",
           "detectable_auroc")  # fmt: skip


def _summary(
    result: ProbeResult | ReadingResult,
    rows: Rows,
    measured: Mapping[str, Any],
    layers: Sequence[int],
    chosen: Choice,
) -> dict[str, Any]:
    """What one set of rows shows over all layers; NaN with the reason where it is undefined."""
    from probes.controls import minimum_detectable_auroc

    ones, zeros = (len(np.unique(rows.keys[rows.labels == label])) for label in (1, 0))
    found: dict[str, Any] = {"n": len(rows.place), "instances": len(np.unique(rows.keys)), "ones": ones, "zeros": zeros}
    if np.isnan(result.auroc).all():
        empty = ("layer", "auroc", "auroc_low", "auroc_high", "p_max", "first_layer", "first_layer_low", "first_layer_high",
                 "first_layer_never", "detectable_auroc")  # fmt: skip
        return {**found, **dict.fromkeys(empty, np.nan), "first_layer_reason": measured["reason"],
                "reason": measured["reason"], "method": ""}  # fmt: skip
    best, folds = int(np.nanargmax(result.auroc)), result.fold_auroc.shape[1]
    first = first_layer(
        HeldOutRows(result.margins, result.labels, result.folds, rows.keys),
        result.auroc,
        threshold=chosen.config.probe.threshold,
        resamples=chosen.config.resamples,
        layers=layers,
        seed=chosen.config.seed,
    )
    detectable = np.nan
    if min(ones, zeros) >= folds and np.isfinite(result.null).all():
        detectable = minimum_detectable_auroc(ones, zeros, null=result.null, folds=folds)

    return {
        **found,
        "layer": layers[best],
        **{name: float(measured[name][best]) for name in ("auroc", "auroc_low", "auroc_high")},
        "p_max": result.p_max,
        **{name: value for name, value in first.items() if name != "first_layer_method"},
        "detectable_auroc": detectable,
        "reason": "",
        "method": f"{getattr(result, 'method', 'probes as trained, read on these rows')}; {measured['method']}",
    }
