"""Arguments of the wrong kind at the engine's public calls: one line that names the argument, never a bare TypeError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activations.capturing import Plan, capture
from activations.errors import StoreError
from activations.model import Model, from_modules
from activations.store import ActivationStore, StoreWriter
from activations.store_merging import merge
from tests import tiny_models as tiny
from tests.activations.test_store import fill


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return fill(tmp_path_factory.mktemp("store") / "s")


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sites": 5}, r"sites is 5 \(int\); give a list, for example \['5'\]"),
        ({"sites": "z"}, r"sites is the text 'z'; give a list, for example \['z'\]"),
        ({"sites": None}, r"sites is None \(NoneType\)"),
        ({"sites": (1,)}, r"sites holds 1 \(int\); give texts"),
        ({"positions": (-1,)}, r"positions holds -1 \(int\); give texts"),
        ({"layers": 3}, r"layers is 3 \(int\); give a list, for example \[0, 1\]"),
        ({"layers": "0-3"}, r"layers is the text '0-3'; give a list, for example \[0, 1\]"),
        ({"layers": (1.5,)}, r"a number in layers is 1.5 \(float\); give a whole number"),
        ({"layers": (True,)}, r"a number in layers is True \(bool\); give a whole number"),
        ({"dtype": ["float32"]}, r"unknown storage dtype \['float32'\]"),
        ({"batch_tokens": "8192"}, r"batch_tokens is '8192' \(str\); give a whole number"),
        ({"sites": ("pattern",), "pattern_keys": "9"}, r"pattern_keys is '9' \(str\); give a whole number"),
        ({"sites": ("pattern",), "pattern_keys": 0}, r"pattern_keys is 0; give as many as the longest prompt"),
        ({"pattern_keys": 9}, "pattern_keys is 9 and the plan has no pattern"),
        ({"sites": ("embed",), "layers": (2,)}, r"layers is \[2\] and embed is the input of layer 0 alone"),
        ({"sites": ("embed", "blocks.1.z"), "layers": (0, 2)}, "embed is the input of layer 0 alone"),
    ],
)
def test_plan(given: dict[str, Any], words: str) -> None:
    refused(lambda: Plan(**given), words)


def test_embed_goes_with_layers_of_other_sites_and_with_its_own() -> None:
    assert Plan(sites=("embed",), layers=(0,)).layers == (0,)
    assert Plan(sites=("embed", "resid_post"), layers=[2]).layers == (2,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "smollm2"}, r"model is 'smollm2' \(str\); give what activations.load or from_modules returned"),
        ({"plan": {"sites": ["z"]}}, r"plan is .* \(dict\); give an activations.Plan"),
        ({"prompts": "Is Amy taller?"}, r"an entry of prompts is 'I' \(str\); give prompts as model.encode makes them"),
        ({"prompts": [[1, 2, 3]]}, r"an entry of prompts is \[1, 2, 3\] \(list\)"),
        ({"prompts": None}, r"prompts is None \(NoneType\); give a list"),
        ({"directory": None}, r"directory is None \(NoneType\); give a path"),
        ({"directory": ""}, "directory is empty; give a path, or . for the current directory"),
        ({"answers": {"yes": "Yes"}}, r"answers is .* \(dict\); give what answer_tokens returned"),
        ({"index": [1, 2]}, r"an entry of index is 1 \(int\); give \(key, presentation\), two texts"),
        ({"index": [("a", 1), ("b", 2)]}, r"an entry of index is \('a', 1\) \(tuple\)"),
        ({"spans": ["text", "text"]}, r"an entry of spans is 'text' \(str\); give one .*Conversation a prompt"),
        ({"spans": []}, "spans has 0 entries for 2 prompts"),
    ],
)
def test_capture(model: Model, tmp_path: Path, given: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {
        "model": model,
        "prompts": model.encode(tiny.MESSAGES)[:2],
        "plan": Plan(),
        "directory": tmp_path / "s",
        **given,
    }
    refused(lambda: capture(**settings), words)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: ActivationStore.open(None), r"directory is None \(NoneType\); give a path"),
        (lambda store: ActivationStore.open(b"acts"), r"directory is b'acts' \(bytes\); give a path"),
        (lambda store: ActivationStore.open(""), "directory is empty"),
        (lambda store: store[3], r"a store is asked for 3 \(int\); give a site and a layer"),
        (lambda store: store["resid_post"], r"a store is asked for 'resid_post' \(str\)"),
        (lambda store: store["resid_post", "1"], r"layer is '1' \(str\); give a whole number"),
        (lambda store: store.read(1, 1), r"site is 1 \(int\); give one of resid_post"),
        (lambda store: store.read(["resid_post"], 1), r"site is \['resid_post'\] \(list\); give one of resid_post"),
        (lambda store: store.read("resid_post", 1, "ab"), "rows is <U2"),
        (lambda store: store.read("resid_post", 1, [[1], [1, 2]]), r"rows is \[\[1\], \[1, 2\]\] \(list\)"),
        (lambda store: store.stack("resid_post", 1), r"layers is 1 \(int\); give a list"),
        (lambda store: store.stack("resid_post", []), "layers is empty; name one, or leave it out for all"),
        (lambda store: store.batches("resid_post", 1, batch_rows="8"), r"batch_rows is '8' \(str\)"),
        (lambda store: store.select(key=5), r"key is 5 \(int\); give a list, for example \['5'\]"),
        (lambda store: store.select(label=[5]), r"label holds 5 \(int\); give texts"),
        (lambda store: store.export(None), r"path is None \(NoneType\); give a path"),
        (lambda store: store.export(""), "path is empty"),
        (lambda store: store.export("x", None), "unknown export format None"),
        (lambda store: store.export("x", sites=5), r"sites is 5 \(int\)"),
        (lambda store: store.export("x", layers="0-3"), "layers is the text '0-3'"),
        (lambda store: merge("acts", "x"), r"paths is the text 'acts'; give a list, for example \['acts', 'acts-1'\]"),
        (lambda store: merge(5, "x"), r"paths is 5 \(int\)"),
        (lambda store: merge([store.directory, None], "x"), r"directory is None"),
        (lambda store: merge([store.directory, store.directory], ""), "out is empty"),
    ],
)
def test_store(
    store: ActivationStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[ActivationStore], Any],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(lambda: call(store), words)
    assert not list(tmp_path.iterdir())


def test_numpy_numbers_are_numbers(store: ActivationStore) -> None:
    import numpy as np

    np.testing.assert_array_equal(store["resid_post", np.int64(1)], store["resid_post", 1])
    np.testing.assert_array_equal(store.stack("resid_post", np.array([0, 2])), store.stack("resid_post")[[0, 2]])


def test_writer_refuses_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"key": ["a"], "presentation": ["o"], "position": [1], "n_tokens": [2]}
    settings: dict[str, Any] = {"datasets": {("z", 0): 4}, "n_layers": 1, "shards": [[0]], "rows": rows, "content": {}}
    refused(lambda: StoreWriter("", dtype="float32", **settings), "directory is empty")
    refused(lambda: StoreWriter("s", dtype=["float32"], **settings), "unknown storage dtype")
    assert not list(tmp_path.iterdir())
