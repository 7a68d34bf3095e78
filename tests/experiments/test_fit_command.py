"""``probe fit``: numbers recomputed from the store with scikit-learn, labels from items and runs, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from activations.store import ActivationStore
from probes.folds import assign_folds
from tests.experiments.made_store import FAST, PENALTY, captured, fitted, made, probe, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(tmp_path_factory.mktemp("fit"))


def rows(folder: Path, position: str = "answer") -> tuple[ActivationStore, pd.DataFrame]:
    """Rows at a position with what the items say of them, joined by hand."""
    store = ActivationStore.open(folder / "base")
    made = [json.loads(line) for line in (folder / "base/items.jsonl").read_text().splitlines()]
    of = {(one["key"], shown["kind"]): (one, shown) for one in made for shown in one["presentations"]}
    table = store.rows.assign(place=np.arange(len(store)))
    table = table[table["label"] == position].reset_index(drop=True)
    found = [of[key, kind] for key, kind in zip(table["key"], table["presentation"], strict=True)]
    return store, table.assign(
        n=[one["params"]["n"] for one, _ in found],
        gold=[int(shown["gold"] == "yes") for _, shown in found],
        phrase=[int(one["latent"]["phrase"] == "forward") for one, _ in found],
    )


def by_hand(values: np.ndarray, labels: Any, folds: Any, read: tuple[np.ndarray, Any, Any] | None = None) -> float:
    """Mean AUROC over folds, with scikit-learn; of these rows, or of others by their folds."""
    labels, folds = np.asarray(labels), np.asarray(folds)
    others, truth, judged = (values, labels, folds) if read is None else map(np.asarray, read)
    areas = []
    for fold in np.unique(folds):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=PENALTY, tol=1e-10, max_iter=100_000))
        model.fit(values[folds != fold].astype(float), labels[folds != fold])
        at = judged == fold
        if len(set(truth[at])) == 2:
            areas.append(roc_auc_score(truth[at], model.decision_function(others[at].astype(float))))
    return float(np.mean(areas))


def auroc(found: dict[str, Any], **where: Any) -> list[float]:
    return [one["auroc"] for one in found["layers"] if all(one[name] == value for name, value in where.items())]


@pytest.mark.parametrize("position", ["answer", "query/mean"])
def test_auroc_is_that_of_scikit_learn_also_on_other_presentations(folder: Path, position: str) -> None:
    found = fitted(folder / "base", "--read", "equivalent", "--position", position, "--layers", "1,-1")
    store, table = rows(folder, position)
    train, other = (table[table["presentation"] == kind] for kind in ("original", "equivalent"))
    codes = np.unique(train["key"], return_inverse=True)[1]
    folds = assign_folds(train["gold"].to_numpy(), codes, folds=3, stratified=True, seed=1)
    of = dict(zip(train["key"], folds, strict=True))
    for place, layer in enumerate((1, 3)):
        acts = store["resid_post", layer]
        own = acts[train["place"]]
        assert auroc(found, read="original")[place] == pytest.approx(by_hand(own, train["gold"], folds), abs=1e-9)
        read = (acts[other["place"]], other["gold"], other["key"].map(of))
        expected = by_hand(own, train["gold"], folds, read)
        assert auroc(found, read="equivalent")[place] == pytest.approx(expected, abs=1e-9)
    assert [one["layer"] for one in found["layers"]] == [1, 3, 1, 3]
    assert found["curves"][0]["n"] == 40 and found["curves"][0]["ones"] == 20
    # What the table says of all layers are layers of the model, not places in the list.
    assert {one["layer"] for one in found["curves"]} <= {1, 3}


def test_a_size_that_is_held_out_whole(folder: Path) -> None:
    code, out, err = probe(
        "fit", folder / "base", "--target", "forward_question", "--held-out", "n", *FAST[:4], "--json"
    )
    assert code == 0, err
    store, table = rows(folder)
    train = table[table["presentation"] == "original"]
    expected = [by_hand(store["resid_post", layer][train["place"]], train["phrase"], train["n"]) for layer in range(4)]
    assert auroc(json.loads(out)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("where", ["run", "run/activations/grpo", "grpo"])
def test_answers_come_from_the_run(folder: Path, where: str) -> None:
    options = {"run": ("--arm", "grpo"), "grpo": ("--run", folder / "run")}.get(where, ())
    said = pd.read_parquet(folder / "run/tables/behaviour.parquet")
    said = said[(said["arm"] == "grpo") & (said["presentation"] == "equivalent")]
    for target, ones in (("correct", said["correct"].sum()), ("answer", (said["answer"] == "yes").sum())):
        if ones in (0, len(said)):
            continue
        found = fitted(folder / where, *options, "--target", target, "--train", "equivalent", "--folds", "2")
        assert found["arm"] == "grpo"
        assert found["curves"][0]["ones"] == ones


def test_presentations_are_told_apart(folder: Path) -> None:
    (curve,) = fitted(folder / "base", "--target", "presentation")["curves"]
    assert (curve["n"], curve["instances"], curve["ones"]) == (80, 40, 40)


def test_the_table_is_written_whole_and_tidy(folder: Path, tmp_path: Path) -> None:
    for name, read in (("t.csv", pd.read_csv), ("t.parquet", pd.read_parquet)):
        found = fitted(folder / "base", "--out", tmp_path / name)
        table = read(tmp_path / name)
        assert table["layer"].tolist() == [0, 1, 2, 3]
        assert table["auroc"].tolist() == pytest.approx(auroc(found))
        for column in (
            "auroc_low",
            "null_high",
            "selectivity",
            "p",
            "p_max",
            "first_layer",
            "detectable_auroc",
            "read",
        ):
            assert column in table
    code, out, _ = probe("fit", folder / "base", *FAST[:-1])
    assert code == 0
    for words in (
        "gold from resid_post at answer",
        "shuffled 95%",
        "first layer with AUROC ≥ 0.9",
        "p over all layers",
    ):
        assert words in out


def test_a_relation_is_read_by_probes_that_saw_neither_it_nor_the_instance(tmp_path: Path) -> None:
    relations = ("front_behind", "above_below")
    path = made(tmp_path / "s", relations, count=60)
    code, out, err = probe("fit", path, "--held-out", "relation", *FAST[:4], "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "every instance stands under several values of relation" in found["notes"][0]
    store = ActivationStore.open(path)
    keys, kinds = (np.array(store.manifest["rows"][name]) for name in ("key", "presentation"))
    golds = np.array(
        [shown["gold"] == "yes" for line in (path / "items.jsonl").read_text().splitlines()
         for shown in json.loads(line)["presentations"]]
    ).astype(int)  # fmt: skip
    half = len(keys) // 2
    for number, relation in enumerate(relations):
        unit = np.arange(len(keys)) // half == number
        train, read = (np.flatnonzero(one & (kinds == "original")) for one in (~unit, unit))
        codes = np.unique(keys[train], return_inverse=True)[1]
        folds = assign_folds(golds[train], codes, folds=5, stratified=True, seed=1)
        of = dict(zip(keys[train], folds, strict=True))
        acts = store["resid_post", 1]
        expected = by_hand(acts[train], golds[train], folds, (acts[read], golds[read], [of[key] for key in keys[read]]))
        assert auroc(found, held_out=relation)[1] == pytest.approx(expected, abs=1e-9)
        assert expected > 0.9


def test_items_of_another_file_and_order_are_joined_by_key(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    whole = fitted(path)
    lines = (path / "items.jsonl").read_text().splitlines(keepends=True)
    (path / "items.jsonl").unlink()
    refused("holds no items.jsonl, so nothing says what its rows are about", path)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines)))
    assert fitted(path, "--items", tmp_path / "other.jsonl")["layers"] == whole["layers"]
    (tmp_path / "few.jsonl").write_text("".join(lines[1:]))
    refused("2 of 48 rows of", path, "--items", tmp_path / "few.jsonl", code=1)
    (tmp_path / "bad.jsonl").write_text("".join(lines[:3]) + "{")
    refused("line 4 of", path, "--items", tmp_path / "bad.jsonl", code=1)
    two = made(tmp_path / "t", ("front_behind", "above_below"))
    shuffled = (two / "items.jsonl").read_text().splitlines(keepends=True)
    (two / "items.jsonl").write_text("".join(reversed(shuffled)))
    refused("can't be told apart", two)


def test_a_position_that_only_some_prompts_have_is_told_apart_by_place(tmp_path: Path) -> None:
    """Two relations share their instances, so a row's key does not say which of the two it is about."""
    path = made(tmp_path / "s", ("front_behind", "above_below"), original=("answer", "query"), equivalent=("answer",))
    (curve,) = fitted(path, "--position", "query")["curves"]
    assert (curve["n"], curve["instances"]) == (48, 24)
    refused(
        "read is 'equivalent', but the rows at query are of original",
        path,
        "--position",
        "query",
        "--read",
        "equivalent",
    )


def one_class(path: Path) -> tuple[Any, ...]:
    made(path, count=1)
    return path, "--folds", "2", "--penalty", "1"


def few(path: Path) -> tuple[Any, ...]:
    return (made(path, count=6),)


def missing(path: Path) -> tuple[Any, ...]:
    return made(path, original=("answer",), equivalent=("answer", "query")), "--position", "query"


def prefix(path: Path) -> tuple[Any, ...]:
    return made(path, original=("query/0", "query/1")), "--position", "query/"


def old(path: Path) -> tuple[Any, ...]:
    made(path)
    text = (path / "items.jsonl").read_text().replace('"version": 2', '"version": 1')
    (path / "items.jsonl").write_text(text)
    return path, "--target", "front_half"


def unread(path: Path) -> tuple[Any, ...]:
    return made(path), "--target", "reworded"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (one_class, "all 1 rows of original are gold "),
        (few, "gold no: 3 of 6 instances, and each of 5 folds needs one; lower --folds"),
        (missing, "train is 'original', but the rows at query are of equivalent: name one of these"),
        (prefix, "position is 'query/', which stands for several: name one of them, such as query/0"),
        (old, "the items are of ordering version 1 and this is ordering version 2"),
        (unread, "no row of original has the target reworded"),
    ],
)
def test_rows_that_no_probe_can_be_trained_on(
    tmp_path: Path, make: Callable[[Path], tuple[Any, ...]], said: str
) -> None:
    refused(said, *make(tmp_path / "s"), "--out", tmp_path / "t.csv")
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--site", "embed"), "embed at answer is the same in all 40 rows at layer 0"),
        (("--site", "mlp_out"), "site is 'mlp_out': "),
        (("--layers", "0,9"), "no resid_post layer 9 in "),
        (("--layers", "0,0"), "layers is 0, 0: name none twice"),
        (("--position", "querry/mean"), "the store has answer, query/mean (did you mean query/mean?)"),
        (
            ("--target", "gld"),
            "unknown target 'gld': did you mean gold? choose gold, answer, correct, presentation, or of",
        ),
        (("--target", "correct"), "this target is about answers, which a store does not hold: give a run"),
        (("--train", "negated"), "train is 'negated', but the rows at answer are of original, equivalent"),
        (("--train", "original", "--read", "original"), "original is trained on and read held out already"),
        (("--target", "presentation", "--read", "negated"), "--read is negated but --target is presentation"),
        (("--target", "presentation", "--train", "original"), "--train is original but --target is presentation"),
        (("--held-out", "size"), "--held-out is 'size': choose template or a parameter of the family (n, relation, "),
        (("--held-out", "relation"), "--held-out is relation but the run has one value of it"),
        (("--held-out", "n", "--folds", "3"), "--folds is 3 but --held-out is n"),
        (("--member", "tree"), "--member is 'tree': input should be 'logistic', 'ridge' or 'mean_difference'"),
        (("--member", "mean_difference", "--penalty", "1"), "--penalty is 1 but --member is mean_difference"),
        (("--penalty", "0.1", "--inner-folds", "3"), "--inner-folds is 3 but --penalty is 0.1"),
        (("--penalty", "0.1,1", "--folds", "2"), "give one, for example --penalty=0.01"),
        (("--penalty", "0,1"), "--penalty is '0': input should be greater than 0"),
        (("--shuffles", "5"), "--shuffles is '5': input should be greater than or equal to 19"),
        (("--threshold", "1"), "--threshold is '1': input should be less than 1"),
        (("--penalty", "1e30"), "--penalty is '1e30': input should be less than or equal to 1000000"),
        (("--penalty", "0.1", "--penalty", "0.1"), "--penalty is 0.1, 0.1: give none twice"),
        (("--inner-folds", "5"), "--inner-folds is 5 but --folds is 5"),
        (
            ("--target", "forward_question", "--held-out", "template"),
            "and a fold needs both: leave --held-out out, or name a parameter",
        ),
        (("--held-out", "n"), "--held-out is n, which makes 2 folds (4, 6) and --penalty 0.0001"),
        (("--seed", "x"), "--seed is 'x'"),
        (("--resamples", "x"), "--resamples is 'x'"),
        (("--arm", "base"), "arm is 'base' but "),
        (("--items", "a", "--run", "b"), "--run and --items were both given"),
        (("--out", "t.txt"), "out is 't.txt': give a file that ends in .parquet or .csv"),
        (("--out", "none/t.csv"), "give a file in a folder that exists"),
        (("--out", "/proc/t.csv"), "--out is '/proc/t.csv', and no file can be made in /proc"),
    ],
)
def test_options_that_can_not_apply(folder: Path, words: tuple[str, ...], said: str) -> None:
    refused(said, folder / "base", *words)


def test_stores_and_runs_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    refused("is no run and no activation store", tmp_path, code=1)
    refused("arm is 'dpo': ", folder / "run", "--arm", "dpo")
    refused("belongs to a run, which has its items", folder / "run/activations/base", "--items", "x")
    made(tmp_path / "s")
    refused("(hashes of the weights): give a run of the same model", tmp_path / "s", "--run", folder / "run")
    shutil.copytree(folder / "run", tmp_path / "run")
    table = pd.read_parquet(tmp_path / "run/tables/behaviour.parquet")
    table.iloc[2:].to_parquet(tmp_path / "run/tables/behaviour.parquet", index=False)
    refused("2 of 80 rows of the store have no answer of base in", tmp_path / "run", "--target", "correct", code=1)
    shutil.rmtree(tmp_path / "run/activations")
    refused("keeps no activations", tmp_path / "run", code=1)
