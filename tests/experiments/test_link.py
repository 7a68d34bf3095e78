"""The link table on hand-built tables, every kind of answer in it."""

from __future__ import annotations

import pandas as pd
import pytest

from experiments.link import attribution, outcomes, patch_layers
from experiments.results import link

LABELS = ("yes", "no")
PAIRS = {
    # key: gold, (answer, readout, decodable) of original and equivalent
    "right": ("yes", ("yes", 2.0, True), ("yes", 1.0, True)),
    "overridden": ("yes", ("no", -0.5, True), ("no", -0.8, True)),
    "unused": ("yes", ("no", -2.5, True), ("no", -3.0, True)),
    "unreadable": ("no", ("yes", 0.5, False), ("no", -1.5, False)),
    "unread": ("no", (None, -2.0, True), ("no", -2.0, True)),
}


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rows = []
    for key, (gold, *sides) in PAIRS.items():
        for kind, (answer, difference, decodable) in zip(("original", "equivalent"), sides, strict=True):
            rows.append(
                {"setting": "n=4", "n": 4, "key": key, "presentation": kind, "cell": f"forward-{gold}", "gold": gold,
                 "answer": answer, "correct": answer == gold, "difference": difference, "decodable": decodable,
                 "layer": 2, "margin": 0.0}
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
        ("unreadable", "original", "matched", [1.0, 1.0, -1.0, -1.0]),
        ("unreadable", "original", "unrelated", [1.0] * 4),
        ("unreadable", "original", "random", [-1.0] * 4),
        ("overridden", "equivalent", "matched", [-1.0, 1.0, 1.0, 1.0]),
        ("right", "original", "matched", [2.0] * 4),
    ):
        where = {"setting": "n=4", "key": key, "presentation": recipient, "gold": PAIRS[key][0], "donor": donor}
        patch += [{**where, "layer": layer, "patched": value} for layer, value in enumerate(patched)]
    return {
        "behaviour": flat[[*identity, "answer", "correct"]],
        "readout": flat[[*identity, "difference"]],
        "probes": probes,
        "probe_rows": flat[[*identity, "layer", "margin", "decodable"]],
        "decomposition": pd.DataFrame(
            {"presentation": ["original", "equivalent"], "setting": "all", "delta": [-1.0, -1.0]}
        ),
        "patch": pd.DataFrame(patch),
    }


def one(table: pd.DataFrame, key: str, presentation: str) -> pd.Series:
    found = table[(table["key"] == key) & (table["presentation"] == presentation)]
    assert len(found) == 1
    return found.iloc[0]


def test_outcomes_are_read_from_the_texts_and_an_unread_answer_makes_n(tables) -> None:
    found = outcomes(tables["behaviour"]).set_index("key")["outcome"].to_dict()
    assert found == {"right": "R", "overridden": "D", "unused": "D", "unreadable": "U", "unread": "N"}


def test_every_kind_of_failure(tables) -> None:
    table = attribution(**tables, labels=LABELS, threshold=0.9)
    assert len(table) == 10
    assert one(table, "right", "original")["kind"] == "right"
    # Readout -0.5 under a default of -1: the instance says +0.5 toward yes, its gold; the default says -1.
    overridden = one(table, "overridden", "original")
    assert (overridden["kind"], overridden["signal"], overridden["default"]) == ("overridden", 0.5, -1.0)
    assert one(table, "unused", "original")["kind"] == "unused"
    wrong = one(table, "unreadable", "original")
    # Gold is no: the default of -1 speaks for it, the instance's +1.5 against it.
    assert (wrong["kind"], wrong["signal"], wrong["default"]) == ("unreadable", -1.5, 1.0)
    unread = one(table, "unread", "original")
    assert (unread["outcome"], unread["correct"], unread["kind"]) == ("N", False, "text")


def test_a_probe_at_chance_has_no_verdict_on_single_answers(tables) -> None:
    """Half of all answers would count as readable, and half of the failures as overridden, by luck alone."""
    tables["probes"].loc[tables["probes"]["presentation"] == "original", "p_max"] = 0.2
    table = attribution(**tables, labels=LABELS, threshold=0.9)
    assert table[table["presentation"] == "original"]["decodable"].isna().all()
    assert one(table, "overridden", "original")["kind"] == "unreadable"
    assert one(table, "overridden", "equivalent")["kind"] == "overridden"
    found = {(row["outcome"], row["answered"]): row["decodable"] for row in link(table)}
    assert (found["D", "wrong"].count, found["D", "wrong"].n) == (2, 2)
    at_chance = link(table[table["presentation"] == "original"])
    assert all(row["decodable"].n == 0 and "beats shuffled" in row["decodable"].reason for row in at_chance)


def test_repair_is_judged_at_the_donors_first_readable_layer_and_never_at_the_last(tables) -> None:
    assert patch_layers(tables["probes"], 0.9) == {"equivalent": 1, "original": 2}
    assert patch_layers(tables["probes"], 0.98) == {"equivalent": 2, "original": 2}
    table = attribution(**tables, labels=LABELS, threshold=0.9)
    wrong = one(table, "unreadable", "original")
    assert (wrong["repaired_matched"], wrong["repaired_unrelated"], wrong["repaired_random"]) == (True, False, True)
    assert one(table, "overridden", "equivalent")["repaired_matched"]
    assert pd.isna(one(table, "overridden", "equivalent")["repaired_random"])  # never patched with it
    assert pd.isna(one(table, "overridden", "original")["repaired_matched"])  # never patched
    assert pd.isna(one(table, "right", "original")["repaired_matched"])  # nothing to repair
