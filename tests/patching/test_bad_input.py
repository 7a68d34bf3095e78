"""What cannot be meant is refused before a number comes back: in one line that names it and says what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from activations import Plan, answer_tokens, capture, from_modules
from activations.errors import StoreError
from patching import (
    Cell,
    Edit,
    PatchError,
    donor_from_run,
    donor_from_store,
    head_cells,
    layer_cells,
    mean_donor,
    refuse_other_tokens,
    resample_donor,
    sweep,
    sweep_plan,
)
from tests.tiny_models import ANSWERS, MESSAGES, tiny_gpt2, tiny_granite, tiny_hybrid, tiny_llama, tiny_neox


@pytest.fixture(scope="module")
def llama():
    return from_modules(*tiny_llama(), name="this llama")


@pytest.fixture(scope="module")
def store(llama, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bad") / "store"
    return capture(llama, llama.encode(MESSAGES), Plan(sites=("resid_post",), positions=("answer",)), directory)


def refused(action: Callable[[], Any], *words: str, error: type[Exception] = PatchError) -> None:
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def swept(model, cells, **options):
    return sweep(model, model.encode(MESSAGES), cells, answers=answer_tokens(model, ANSWERS), seed=0, **options)


def from_mean(store, model, rows=(0, 1), folds=("a", "b")):
    return mean_donor(
        store, list(rows), reference_folds=list(folds), item_folds=["a"] * 4, sites=("resid_post",), layers=(0,),
        name="the reference", model=model,
    )  # fmt: skip


def from_resampling(store, model):
    return resample_donor(
        store, [0, 1], reference_keys=["a", "b"], reference_roles=["x", "x"], keys=["c"], roles=["x"],
        sites=("resid_post",), layers=(0,), seed=0, name="the reference", model=model,
    )  # fmt: skip


@pytest.mark.parametrize(
    "read",
    [lambda store, model: donor_from_store(store, [0], sites=("resid_post",), layers=(0,), model=model)]
    + [from_mean, from_resampling],
    ids=["rows", "mean", "resampled"],
)
def test_a_donor_of_another_model(store, llama, read):
    assert read(store, llama)["resid_post"][0].shape[1] == 32
    other = from_modules(*tiny_llama(seed=5), name="another llama")  # alike in every size: no shape gives it away
    refused(lambda: read(store, other), str(store.directory), "another llama", "from the same base model")


def test_a_donor_of_another_width_or_depth(llama):
    cells = layer_cells(3, source="d")
    wide = {"d": {"resid_post": np.ones((4, 3, 48), dtype=np.float32)}}
    refused(lambda: swept(llama, cells, donors=wide), "donor 'd'", "[4, 48]", "[4, 32] is needed")
    shallow = {"d": {"resid_post": np.ones((4, 2, 32), dtype=np.float32)}}
    refused(lambda: swept(llama, cells, donors=shallow), "donor 'd'", "layer 2", "layers [0, 1]")


def test_a_donor_of_another_token_span(llama):
    prompts = llama.encode(MESSAGES)
    cells = [Cell("query", (Edit("resid_post", 1, source="d", position="span:query"),))]
    mine, theirs = [{"query": (2, 3, 4)}] * 4, [{"query": (2, 3, 4)}] * 3 + [{"query": (2, 3)}]
    donor = donor_from_run(llama, prompts, cells, spots=theirs)
    refused(
        lambda: swept(llama, cells, donors={"d": donor}, spots=mine),
        "donor 'd'", "2 tokens at span:query of item 3", "the recipient has 3", "same token count",
    )  # fmt: skip
    refused(lambda: swept(llama, cells, donors={"d": donor}), "recipient 0 has no span 'query'", "spots=")
    refused(lambda: donor_from_run(llama, prompts, cells), "recipient 0 has no span 'query'", "spots=")


def test_a_base_and_an_adapter_on_other_tokens(llama):
    prompts = llama.encode(MESSAGES)
    refused(
        lambda: refuse_other_tokens(prompts, prompts[1:] + prompts[:1], names=("the base", "adapter 'x'")),
        "prompt 0", "tokens against", "one tokenizer and template",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "edit", "words"),
    [
        (tiny_llama, Edit("z", 1, 4), ("head 4 is out of range", "layer 1 has heads 0 to 3")),
        (tiny_hybrid, Edit("z", 0, 99), ("head 99 is out of range", "layer 0 has heads 0 to 3")),
        (tiny_llama, Edit("resid_post", 1, 0), ("resid_post has no heads", "use site 'z'")),
        (tiny_neox, Edit("resid_mid", 1), ("has no resid_mid in layers 1", "parallel blocks")),
        (tiny_granite, Edit("mlp_out", 2), ("has no mlp_out in layers 2", "no pair of its modules")),
        (tiny_gpt2, Edit("pattern", 0), ("unknown site 'pattern'", "allowed: resid_pre")),
    ],
)
def test_a_head_or_a_site_that_the_layer_lacks(build, edit, words):
    model = from_modules(*build())
    for action in (
        lambda: swept(model, [Cell("mine", (edit,))]),
        lambda: sweep_plan(model, model.encode(MESSAGES), [Cell("mine", (edit,))]),
        lambda: donor_from_run(model, model.encode(MESSAGES), [Cell("mine", (edit,))]),
    ):
        refused(action, "cell 'mine'", *words)


def test_a_layer_without_a_head_map(llama):
    from dataclasses import replace

    model = from_modules(*tiny_llama())
    model.structure = replace(model.structure, heads=(4, None, 4))
    refused(lambda: swept(model, [Cell("mine", (Edit("z", 1, 0),))]), "layer 1 has no heads", "with heads: [0, 2]")
    assert [cell.name for cell in head_cells([1, None, 1])] == ["z.0.0", "z.2.0"]


def test_a_mean_over_nothing(store, llama):
    refused(lambda: from_mean(store, llama, (), ()), "mean over 'the reference'", "the set is empty")
    refused(lambda: from_mean(store, llama, (0, 1), ("a", "a")), "all 2 rows are in fold 'a'", "rows of other folds")


def test_a_site_that_the_store_does_not_hold(store, llama):
    refused(
        lambda: donor_from_store(store, [0], sites=("z",), layers=(0,), model=llama),
        "z",
        "resid_post",
        error=StoreError,
    )
    refused(lambda: donor_from_store(store, [0], sites=("resid_post",), layers=(7,)), "7", error=StoreError)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_cell_budget_below_one_cell(llama, budget):
    cells = layer_cells(3, source="zero")
    for action in (
        lambda: swept(llama, cells, cell_budget=budget),
        lambda: sweep_plan(llama, llama.encode(MESSAGES), cells, cell_budget=budget),
    ):
        refused(action, f"cell_budget is {budget}", "give 1 or more")


def test_a_function_whose_numbers_are_not_finite(llama):
    cell = Cell("one", (Edit("z", 1, source="f", how="function"),))
    refused(
        lambda: swept(llama, [cell], functions={"f": lambda vectors: vectors / 0.0}, engine="forward"),
        "function 'f'", "not finite",
    )  # fmt: skip
