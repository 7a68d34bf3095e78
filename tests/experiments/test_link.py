"""The attribution table on hand-built tables, every label in it; its shares; and its labels from real probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.proportion import proportion_confint

from experiments.errors import RunError
from experiments.link import (
    FAILURE_COLUMNS,
    KINDS,
    LABELS,
    attribution,
    current,
    defaults,
    failure_rows,
    outcomes,
    patch_layers,
    shares_table,
)
from experiments.results import link
from probes.failures import LABELS as PROBE_LABELS
from probes.linear import fit_probes

ANSWERS = ("yes", "no")
PAIRS = {
    # key: gold, (answer, readout, right at the chosen layer, cause) of original and equivalent
    "right": ("yes", ("yes", 2.0, True, "right"), ("yes", 1.0, True, "right")),
    "overridden": ("yes", ("no", -0.5, True, "overridden"), ("no", -0.8, True, "mixed")),
    "reversed": ("yes", ("no", -2.5, True, "reversed"), ("no", -3.0, True, "lost")),
    "nothing": ("no", ("yes", 0.5, False, "not_decodable"), ("no", -1.5, False, "right")),
    "unread": ("no", (None, -2.0, True, "right"), ("no", -2.0, True, "right")),
    "lucky": ("no", ("no", 0.5, True, "lost"), ("no", -2.0, True, "right")),  # the text is right, the readout not
}
ROW = ["setting", "key", "presentation"]


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rows = []
    for key, (gold, *sides) in PAIRS.items():
        for kind, (answer, difference, decodable, cause) in zip(("original", "equivalent"), sides, strict=True):
            rows.append(
                {"setting": "n=4", "n": 4, "key": key, "presentation": kind, "cell": f"forward-{gold}", "gold": gold,
                 "answer": answer, "correct": answer == gold, "difference": difference, "decodable": decodable,
                 "layer": 2, "margin": 1.5 if gold == "yes" else -1.5, "cause": cause,
                 "share": np.nan if cause == "right" else 0.8,
                 "tossed": [np.nan] * 5 if cause == "right" else [0.0, 0.25, 0.0, 0.0, 0.75],
                 "lost_at": 3 if cause == "lost" else -1, "last_margin": -1.0,
                 "margins": [0.0, 1.0, 1.5, -1.0], "readable": [False, True, True, False], "reads": True}
            )  # fmt: skip
    flat = pd.DataFrame(rows)
    flat["answer"] = flat["answer"].astype("string")
    identity = ["setting", "n", "key", "presentation", "cell", "gold"]
    probes = pd.DataFrame(
        {
            "presentation": ["original"] * 4 + ["equivalent"] * 4,
            "layer": [0, 1, 2, 3] * 2,
            "auroc": [0.5, 0.92, 0.95, 0.99, 0.5, 0.6, 0.7, 0.99],
            "p_max": 0.01,
        }
    )
    patch = []
    for key, recipient, donor, patched in (
        ("nothing", "original", "matched", [1.0, 1.0, -1.0, -1.0]),
        ("nothing", "original", "unrelated", [1.0] * 4),
        ("nothing", "original", "random", [-1.0] * 4),
        ("overridden", "equivalent", "matched", [-1.0, 1.0, 1.0, 1.0]),
        ("right", "original", "matched", [2.0] * 4),
    ):
        where = {"setting": "n=4", "key": key, "presentation": recipient, "gold": PAIRS[key][0], "donor": donor}
        patch += [{**where, "layer": layer, "patched": value} for layer, value in enumerate(patched)]
    return {
        "behaviour": flat[[*identity, "answer", "correct"]],
        "readout": flat[[*identity, "difference"]],
        "probes": probes,
        "decomposition": pd.DataFrame(
            {"presentation": ["original", "equivalent"], "setting": "all", "delta": [-1.0, -1.0]}
        ),
        "patch": pd.DataFrame(patch),
        "failures": flat[[*ROW, *FAILURE_COLUMNS]],
    }


def one(table: pd.DataFrame, key: str, presentation: str) -> pd.Series:
    found = table[(table["key"] == key) & (table["presentation"] == presentation)]
    assert len(found) == 1
    return found.iloc[0]


def made(tables: dict[str, pd.DataFrame], **more) -> pd.DataFrame:
    return attribution(**tables, labels=ANSWERS, threshold=0.9, **more)


def test_outcomes_are_read_from_the_texts_and_an_unread_answer_makes_n(tables) -> None:
    found = outcomes(tables["behaviour"]).set_index("key")["outcome"].to_dict()
    assert found == {"right": "R", "overridden": "D", "reversed": "D", "nothing": "U", "unread": "N", "lucky": "R"}


def test_a_row_has_the_label_of_its_readout_and_the_text_only_tells_right_from_text(tables) -> None:
    table = made(tables)
    assert len(table) == 12 and LABELS == PROBE_LABELS
    for key, (_, *sides) in PAIRS.items():
        for kind, (answer, _, _, cause) in zip(("original", "equivalent"), sides, strict=True):
            expected = "text" if answer is None else cause
            assert one(table, key, kind)["kind"] == expected
    # Readout -0.5 under a default of -1: the instance says +0.5 toward yes, its gold; the default says -1.
    overridden = one(table, "overridden", "original")
    assert (overridden["signal"], overridden["default"], overridden["share"]) == (0.5, -1.0, 0.8)
    wrong = one(table, "nothing", "original")
    # Gold is no: the default of -1 speaks for it, the instance's +1.5 against it.
    assert (wrong["signal"], wrong["default"]) == (-1.5, 1.0)
    assert one(table, "reversed", "equivalent")["lost_at"] == 3
    unread = one(table, "unread", "original")
    assert (unread["outcome"], unread["correct"], unread["readout_correct"]) == ("N", False, True)
    lucky = one(table, "lucky", "original")
    assert (lucky["correct"], lucky["readout_correct"], lucky["kind"]) == (True, False, "lost")
    assert set(table["kind"]) <= {*KINDS, "right"}


def test_a_probe_at_chance_has_no_verdict_on_single_answers(tables) -> None:
    """Half of all answers would count as readable by luck alone."""
    at_chance = tables["failures"]["presentation"] == "original"
    tables["failures"]["decodable"] = tables["failures"]["decodable"].astype("boolean").mask(at_chance)
    table = made(tables)
    found = link(table[table["presentation"] == "original"])
    assert all(row["decodable"].n == 0 and "beats shuffled" in row["decodable"].reason for row in found)


def test_the_default_is_that_of_the_setting_where_there_is_one(tables) -> None:
    several = pd.DataFrame(
        {"presentation": ["original"] * 3, "setting": ["all", "n=4", "n=6"], "delta": [-1.0, -2.0, np.nan]}
    )
    rows = pd.DataFrame({"presentation": "original", "setting": ["n=4", "n=6", "n=8"]})
    assert defaults(rows, several).tolist() == [-2.0, -1.0, -1.0]


def test_what_spoke_against_is_the_component_furthest_from_gold(tables) -> None:
    parts = [
        {"setting": "n=4", "key": key, "presentation": "original", "component": name, "contribution": value}
        for key, values in {
            "overridden": (0.5, -1.0, -0.2),
            "nothing": (0.5, -1.0, -0.2),
            "right": (1.0, 2.0, 0.0),
        }.items()
        for name, value in zip(("mlp.0", "head.1.2", "embed"), values, strict=True)
    ]
    components = pd.DataFrame(parts).assign(gold="?", kind="?")
    table = made(tables, components=components)
    assert tuple(one(table, "overridden", "original")[["against", "against_logits"]]) == ("head.1.2", -1.0)
    # Gold is no there: what pushes to yes is against it.
    assert tuple(one(table, "nothing", "original")[["against", "against_logits"]]) == ("mlp.0", -0.5)
    for key, kind in (("right", "original"), ("overridden", "equivalent")):  # none against; not measured
        assert pd.isna(one(table, key, kind)["against"]) and pd.isna(one(table, key, kind)["against_logits"])
    assert made(tables, components=components.iloc[:0])["against"].isna().all()


def test_repair_is_judged_at_the_donors_first_readable_layer_and_never_at_the_last(tables) -> None:
    assert patch_layers(tables["probes"], 0.9) == {"equivalent": 1, "original": 2}
    assert patch_layers(tables["probes"], 0.98) == {"equivalent": 2, "original": 2}
    table = made(tables)
    wrong = one(table, "nothing", "original")
    assert (wrong["repaired_matched"], wrong["repaired_unrelated"], wrong["repaired_random"]) == (True, False, True)
    assert one(table, "overridden", "equivalent")["repaired_matched"]
    assert pd.isna(one(table, "overridden", "equivalent")["repaired_random"])  # never patched with it
    assert pd.isna(one(table, "overridden", "original")["repaired_matched"])  # never patched
    assert pd.isna(one(table, "right", "original")["repaired_matched"])  # nothing to repair


def test_shares_are_wilsons_over_instances(tables) -> None:
    found = shares_table(made(tables)).set_index(["stratum", "of", "label"])
    lost = found.loc[("all", "all", "lost")]
    # Six readouts are wrong, of four instances; lost are one side of "reversed" and one of "lucky".
    assert (lost["count"], lost["n"], lost["instances"], lost["support"]) == (2, 6, 4, 12)
    low, high = proportion_confint(2 / 6 * 4, 4, method="wilson")
    assert (lost["low"], lost["high"]) == pytest.approx((low, high))
    assert (lost["coin"], found.loc[("all", "all", "mixed")]["coin"]) == pytest.approx((0.25, 0.75))
    unread = found.loc[("outcome", "N", "lost")]
    assert (unread["n"], unread["reason"]) == (0, "no readout is wrong here") and np.isnan(unread["value"])
    assert found.loc[("presentation, outcome", "original, D", "overridden")]["count"] == 1
    assert {name for name, _, _ in found.index} == {"all", "presentation", "outcome", "setting", "n",
                                                    "presentation, outcome"}  # fmt: skip
    by_outcome = found.xs("outcome", level="stratum")
    assert by_outcome.groupby("of")["n"].first().sum() == 6
    assert (
        found.groupby(level=["stratum", "of"])["count"].sum() == found.groupby(level=["stratum", "of"])["n"].first()
    ).all()


def test_an_earlier_versions_table_is_refused_with_the_way_out(tables) -> None:
    table = made(tables)
    assert current(table, Path("runs/x")) is table
    with pytest.raises(RunError, match="runs/x was made by an earlier version, with other labels: repeat the command"):
        current(table.drop(columns="tossed"), Path("runs/x"))


def test_labels_from_probes_know_where_the_answer_was() -> None:
    """Layer 1 carries the answer in both presentations, the last layer only in the original."""
    rng = np.random.default_rng(0)
    rows = 100
    gold = np.array(["yes", "no"] * (rows // 2))
    sign = np.where(gold == "yes", 1.0, -1.0)
    frames, acts, results = [], {}, {}
    for kind, strength in (("original", (0, 4, 4)), ("equivalent", (0, 4, 0))):
        acts[kind] = rng.standard_normal((3, rows, 8))
        acts[kind][:, :, 0] += np.array(strength)[:, None] * sign
        results[kind] = fit_probes(acts[kind], (gold == "yes").astype(int), np.arange(rows), shuffles=39, seed=1)
        frames.append(
            pd.DataFrame({"setting": "n=4", "key": [f"k{row}" for row in range(rows)], "presentation": kind, "gold": gold,
                          "difference": -2.0 + 0.5 * sign})
        )  # fmt: skip
    split = pd.DataFrame({"presentation": ["original", "equivalent"], "setting": "all", "delta": -2.0,
                          "signal_low": 0.4, "signal_high": 0.6})  # fmt: skip
    failures, calibration = failure_rows(
        acts, pd.concat(frames, ignore_index=True), ANSWERS, results, split, seed=1, splits=3
    )
    assert len(failures) == 2 * rows and set(FAILURE_COLUMNS) <= set(failures)
    of = {kind: part[part["cause"] != "right"] for kind, part in failures.groupby("presentation")}
    assert all(len(part) == rows // 2 for part in of.values())
    assert (of["original"]["cause"] == "overridden").mean() > 0.9
    assert (of["equivalent"]["cause"] == "lost").mean() > 0.9
    assert (of["equivalent"].loc[of["equivalent"]["cause"] == "lost", "lost_at"] == 2).all()
    assert all(len(one) == 3 for one in failures["margins"]) and failures["decodable"].notna().all()

    # Where s may be 0, a row's signal has no sign to tell an override from a reversal by.
    unsure = split.assign(signal_low=-0.1)
    failures, _ = failure_rows(acts, pd.concat(frames, ignore_index=True), ANSWERS, results, unsure, seed=1, splits=3)
    wrong = failures[(failures["cause"] != "right") & (failures["presentation"] == "original")]
    assert (wrong["cause"] == "mixed").mean() > 0.9 and not failures["reads"].any()
    survived = calibration.set_index(["presentation", "check", "label"])["value"]
    assert survived["original", "half", "overridden"] > 0.9 and survived["equivalent", "half", "lost"] > 0.9
