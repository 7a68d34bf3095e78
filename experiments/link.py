"""Failure attribution: each answer, what was measured inside when it was given, and why it failed.

Three tables.

``failures`` (``failure_rows``): a row a prompt, from the activations and the probes. What kind of failure the readout
would be, if it is one, by the decision list of ``probes.failures``; texts have no part in it. The probes are those of the
row's presentation, or, where a run asks presentations that flip the gold answer, those over every presentation: in one
presentation alone they could not tell what is to be said from what the instance is.

``attribution`` (``attribution``): the same beside the answer. ``kind`` is ``right`` (readout and text give the gold
answer), ``text`` (the readout does, the text does not: it could not be read or says something else, which what was
measured does not explain), or the label of a wrong readout:

* ``overridden``: the gold answer is readable at the last layer and the readout leans to it, less than the default leans
  away;
* ``reversed``: readable at the last layer, and the readout leans away from it;
* ``lost``: readable at the chosen layer, no longer at the last; ``lost_at`` is where it goes;
* ``not_decodable``: the probe says the other answer at both, or no probe beats the shuffles;
* ``mixed``: a margin that decides is right by no more than chance gives, or refits on other folds do not agree, or the
  answer is readable at the last layer while the presentation's readouts carry no signal beyond chance (``reads``).

``share`` is how many of the fold splits give the label.

``attribution_shares`` (``shares_table``): how often each label occurs among the wrong readouts, by arm, presentation,
outcome, n and setting, with intervals, and with the *coin*, which is what verdicts by tosses would give. A label whose
interval holds its coin was not shown. ``attribution_calibration`` (``calibration_table``): how often a label comes back
from other folds and from another half of the instances, beside how often it would by its frequency alone.

*Signal* and *default* split the readout: δ of the presentation, in its setting where the run has several, and the rest,
both counted toward the gold answer. *Against* names the component that pushes the readout most away from gold, where
components were measured.

*Repaired* says whether the other presentation's residual turned the wrong readout right, at the first layer where the
donor presentation's probe reaches the threshold (the best layer where none does); the same for an unrelated instance's
residual and a random direction is the control. The last layer is left out of that choice: its residual *is* the answer,
so putting it in repairs by construction.

The labels describe what was measured at one position with linear probes; other information may exist elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.errors import RunError
from experiments.items import PAIR
from experiments.patch_effects import residual
from experiments.patch_options import DONORS as DONORS
from experiments.probe_targets import EVERY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from experiments.rundir import RunDirectory
    from probes.linear import ProbeResult

ROW = ["setting", "key", "presentation"]
OUTCOMES = ("R", "D", "U", "N")
# Largest p of the best layer against the shuffles' best layers at which a probe's verdicts on single answers are used.
ABOVE_CHANCE = 0.05
NO_LAYER = -1
# What a wrong answer can be: the labels of a wrong readout, and a text that differs from a right one.
LABELS = ("overridden", "lost", "reversed", "not_decodable", "mixed")
KINDS = (*LABELS, "text")
FAILURE_COLUMNS = ("cause", "share", "tossed", "lost_at", "layer", "margin", "last_margin", "decodable", "margins",
                   "readable", "reads")  # fmt: skip


def failure_rows(
    acts: Mapping[str, np.ndarray],
    table: pd.DataFrame,
    labels: Sequence[str],
    results: Mapping[str, ProbeResult],
    decomposition: pd.DataFrame,
    *,
    seed: int,
    splits: int | None = None,
    fit: Mapping[str, Any] | None = None,
    keys: Mapping[str, np.ndarray] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Label the rows of both presentations of one arm, and ask how often the labels come back.

    Args:
        acts: ``[layer, row, feature]`` of each presentation, rows as in `table`; or of ``every`` one, one after the other.
        table: the arm's readouts, all presentations.
        results: the probes of each presentation on `acts`, with their null; or those over ``every`` presentation.
        fit: arguments of `fit_probes` that made them (penalty, member, …).
        splits: ways of dealing the folds that vote; five if not given.
        keys: by presentation, what counts as one observation, of each row; its instance if not given.

    Returns:
        ``failures``: cause (what the failure is if it is one: ``right`` where the readout is), share, tossed (the
        chance of each label under tossed verdicts), lost_at, layer (the chosen one), margin, last_margin (toward gold),
        decodable (margin above 0; missing where no probe beats the shuffles), margins and readable (one value a layer;
        readable is right in the sense of ``probes.failures``), reads (see ``reads_signal``).
        ``attribution_calibration``: see ``calibration_table``.
    """
    import pandas as pd

    from probes.failure_shares import calibration
    from probes.failures import SPLITS, label_failures

    rows, calibrated = [], []
    for kind in results:
        kinds = table["presentation"].unique() if kind == EVERY else (kind,)
        shown = pd.concat([table[table["presentation"] == one] for one in kinds])
        gold = (shown["gold"] == labels[0]).to_numpy().astype(int)
        readout, result = shown["difference"].to_numpy(dtype=float), results[kind]
        own = shown["key"].to_numpy() if keys is None else keys[kind]
        options: dict[str, Any] = {"result": result, "seed": seed, **(fit or {})}
        delta, text = defaults(shown, decomposition), np.ones(len(shown), dtype=bool)
        reads = reads_signal(shown, decomposition)
        found = label_failures(
            acts[kind], gold, own, readout, delta, text, reads=reads, splits=splits or SPLITS, **options
        )
        rows.append(
            shown[ROW].assign(
                cause=pd.array(found.label, dtype="string"),
                share=found.share,
                tossed=list(found.tossed),
                lost_at=found.lost_at,
                layer=found.chosen_layer,
                margin=found.margin,
                last_margin=found.last_margin,
                decodable=pd.array(found.margin > 0, dtype="boolean"),
                margins=list(found.margins.T.astype(np.float32)),
                readable=list(found.readable.T),
                reads=found.reads,
            )
        )
        if not result.p_max <= ABOVE_CHANCE:
            rows[-1]["decodable"] = pd.NA
        survived = calibration(acts[kind], gold, own, failures=found, **options)
        for part in PAIR if kind == EVERY else (kind,):
            calibrated += [{"presentation": part, **dataclasses.asdict(one)} for one in survived]
    table = pd.concat(rows, ignore_index=True)
    return table[table["presentation"].isin(PAIR)].reset_index(drop=True), pd.DataFrame(calibrated)


def attribution(
    behaviour: pd.DataFrame,
    readout: pd.DataFrame,
    probes: pd.DataFrame,
    failures: pd.DataFrame,
    decomposition: pd.DataFrame,
    patch: pd.DataFrame,
    labels: Sequence[str],
    *,
    threshold: float,
    components: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """One row a prompt of one arm.

    Args:
        behaviour, readout, probes, failures, decomposition, patch: the arm's tables.
        labels: the family's labels, the first is "yes".
        threshold: AUROC that counts as readable.
        components: setting, key, presentation, component and contribution (logits toward "yes"), a row a prompt and
            component; without it, or where it is empty, against is missing.

    Returns:
        outcome (R, D, U; N where an answer of the pair was not read), correct, readout_correct, signal, default, kind,
        the columns of ``failures``, against and against_logits, and ``repaired_<donor>`` at ``patch_layer`` (missing
        where the prompt was not patched or its readout was right).
    """
    import pandas as pd

    shown = behaviour[behaviour["presentation"].isin(PAIR)]
    table = shown[[*ROW, "n", "cell", "gold", "answer", "correct"]].merge(readout[[*ROW, "difference"]], on=ROW)
    table = table.merge(outcomes(shown), on=["setting", "key"])
    sign = np.where(table["gold"] == labels[0], 1.0, -1.0)
    delta = defaults(table, decomposition)
    table["signal"] = (table["difference"].to_numpy() - delta) * sign
    table["default"] = delta * sign
    table["readout_correct"] = table["difference"].to_numpy() * sign > 0
    table = table.merge(failures[[*ROW, *FAILURE_COLUMNS]], on=ROW)
    readout_right, correct = table["readout_correct"].to_numpy(), table["correct"].to_numpy(dtype=bool)
    kind = np.select([readout_right & correct, readout_right], ["right", "text"], table["cause"].to_numpy(dtype=object))
    table["kind"] = pd.array(kind, dtype="string")
    table = table.drop(columns="cause")
    table = table.merge(_against(components, table, labels), on=ROW, how="left")
    table["patch_layer"] = table["presentation"].map(patch_layers(probes, threshold))
    at = residual(patch).merge(table[[*ROW, "patch_layer"]], left_on=[*ROW, "layer"], right_on=[*ROW, "patch_layer"])
    at = at.assign(fixed=at["patched"].to_numpy() * np.where(at["gold"] == labels[0], 1.0, -1.0) > 0)
    wide = at.pivot_table(index=ROW, columns="donor", values="fixed", aggfunc="first").reindex(columns=list(DONORS))
    table = table.merge(wide.add_prefix("repaired_").reset_index(), on=ROW, how="left")
    for donor in DONORS:
        column = table[f"repaired_{donor}"].astype("boolean")
        table[f"repaired_{donor}"] = column.mask(table["readout_correct"])
    return table


def shares_table(table: pd.DataFrame) -> pd.DataFrame:
    """How often each label occurs among the wrong readouts of one arm's attribution.

    Strata: all prompts, each presentation, outcome, n and setting, and each outcome of each presentation. A row a
    stratum, value and label: value, low, high (Wilson, over instances), coin, count, n (wrong readouts), instances,
    support (prompts of the stratum), method, reason.
    """
    import pandas as pd

    from probes.failure_shares import shares

    strata: dict[str, list[Any]] = {
        name: [str(one) for one in table[name]] for name in ("presentation", "outcome", "setting")
    }
    if table["n"].notna().any():
        strata["n"] = [str(one) for one in table["n"]]
    strata["presentation, outcome"] = [
        ", ".join(two) for two in zip(strata["presentation"], strata["outcome"], strict=True)
    ]
    tossed = [one for one in table["tossed"] if one is not None]
    kinds = table["kind"].astype(str).to_numpy()
    found = shares(
        kinds,
        strata,
        groups=table["key"].to_numpy(dtype=str),
        tossed=np.stack(tossed) if len(tossed) == len(table) else None,
    )
    return pd.DataFrame([dataclasses.asdict(one) for one in found]).rename(columns={"value_of": "of"})


def current(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The attribution table of a run, if it has the labels of this version.

    Raises:
        RunError: an earlier version made it.
    """
    if "tossed" not in table:
        raise RunError(
            f"{path} was made by an earlier version, with other labels: repeat the command in its config.yaml, with "
            "another --out"
        )
    return table


def whole(run: RunDirectory, tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """The items of a run whose attribution, behaviour and items speak of the same prompts. Nothing is mended.

    Raises:
        RunError: items or rows are missing or damaged.
    """
    out = "put it back, or repeat the command in the run's config.yaml with another --out"
    if not run.items.exists():
        raise RunError(f"{run.items} does not exist: {out}")
    items = list(run.records(run.items, keys=("setting", "key", "presentations")))
    pairs = {(str(one["setting"]), str(one["key"])) for one in items}
    rows = {name: _names(tables[name]) for name in ("attribution", "behaviour")}
    asked = dict.fromkeys((setting, key) for _, setting, key, _ in rows["attribution"])
    lacking = [name for name in asked if name not in pairs]
    if lacking:
        raise RunError(
            f"{run.items} is damaged or cut short: {len(lacking)} of {len(asked)} pairs are missing, the first "
            f"{_told(lacking[0])}; {out}"
        )
    every = [(arm, *pair, kind) for arm in dict.fromkeys(row[0] for row in rows["attribution"]) for pair in asked
             for kind in PAIR]  # fmt: skip
    for name, held in rows.items():
        missing = [row for row in every if row not in held]
        if missing:
            raise RunError(
                f"{run.tables / name}.parquet lacks {len(missing)} of {len(every)} rows, the first "
                f"{_told(missing[0])}; {out}"
            )
    return items


def _names(table: pd.DataFrame) -> dict[tuple[str, ...], None]:
    """Arm, setting, key and presentation of each row of a pair."""
    part = table.loc[table["presentation"].isin(PAIR), ["arm", *ROW]].astype(str)
    return dict.fromkeys(part.itertuples(index=False, name=None))


def _told(name: Sequence[str]) -> str:
    from experiments.report.text import clean

    return ", ".join(" ".join(clean(one).split())[:40] for one in name)


def defaults(table: pd.DataFrame, decomposition: pd.DataFrame) -> np.ndarray:
    """δ of each row: of its presentation in its setting where that is known, else over all settings."""
    return _of_rows(table, decomposition)["delta"].to_numpy(dtype=float)


def reads_signal(table: pd.DataFrame, decomposition: pd.DataFrame) -> np.ndarray:
    """Whether the interval of s leaves out 0, where ``defaults`` takes δ from: else a row's signal has no sign to use."""
    found = _of_rows(table, decomposition)
    return ((found["signal_low"] > 0) | (found["signal_high"] < 0)).to_numpy()


def _of_rows(table: pd.DataFrame, decomposition: pd.DataFrame) -> pd.DataFrame:
    """The decomposition that holds for each row."""
    import pandas as pd

    known = {(str(one["presentation"]), str(one["setting"])): one for one in decomposition.to_dict("records")}
    found = []
    for kind, setting in zip(table["presentation"].astype(str), table["setting"].astype(str), strict=True):
        own = known.get((kind, setting))
        found.append(own if own is not None and np.isfinite(own["delta"]) else known[kind, "all"])
    return pd.DataFrame(found)


def _against(components: pd.DataFrame | None, table: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """The component that pushes each row's readout most away from gold, and how far (logits, negative)."""
    import pandas as pd

    if components is None or components.empty:
        return table[ROW].assign(against=pd.array([None] * len(table), dtype="string"), against_logits=np.nan)
    joined = components[[*ROW, "component", "contribution"]].merge(table[[*ROW, "gold"]], on=ROW)
    joined = joined.assign(against_logits=joined["contribution"] * np.where(joined["gold"] == labels[0], 1.0, -1.0))
    worst = joined.loc[joined.groupby(ROW, sort=False)["against_logits"].idxmin()]
    named = worst.assign(against=pd.array(worst["component"].astype(str), dtype="string"))
    return named.loc[named["against_logits"] < 0, [*ROW, "against", "against_logits"]]


def patch_layers(probes: pd.DataFrame, threshold: float) -> dict[str, int]:
    """For each recipient presentation the layer at which its repair is judged, from the donor presentation's probes."""
    found = {}
    for recipient, donor in (PAIR, PAIR[::-1]):
        curve = probes[probes["presentation"] == donor].set_index("layer")["auroc"].sort_index()
        curve = curve.iloc[:-1]
        if curve.empty:  # one layer, the last: nothing to judge a repair at
            found[recipient] = NO_LAYER
            continue
        reached = curve.index[curve >= threshold]
        found[recipient] = int(reached[0]) if len(reached) else int(curve.idxmax())
    return found


def outcomes(behaviour: pd.DataFrame) -> pd.DataFrame:
    """R, D, U or N for each pair, from the texts that were read."""
    import pandas as pd

    right = behaviour.pivot(index=["setting", "key"], columns="presentation", values="correct")
    read = behaviour.assign(read=behaviour["answer"].notna()).pivot(
        index=["setting", "key"], columns="presentation", values="read"
    )
    first, second = (right[kind].to_numpy(dtype=bool) for kind in PAIR)
    both = read[list(PAIR)].to_numpy(dtype=bool).all(axis=1)
    outcome = np.select([~both, first & second, ~first & ~second], ["N", "R", "D"], default="U")
    return pd.DataFrame({"outcome": outcome}, index=right.index).reset_index()
