"""Cells that name something the model does not have are refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from activations import answer_tokens, from_modules
from patching import (
    Cell,
    Edit,
    PatchError,
    full_forward,
    head_cells,
    head_map,
    layer_cells,
    sweep,
    sweep_plan,
    with_source,
)
from tests.tiny_models import ANSWERS, MESSAGES, tiny_hybrid, tiny_llama


@pytest.fixture(scope="module")
def setup():
    model = from_modules(*tiny_llama())
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS)


def run(setup, cells, **options):
    model, prompts, answers = setup
    return sweep(model, prompts, cells, answers=answers, seed=0, **options)


RESID = np.ones((4, 3, 32), dtype=np.float32)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ((Edit("mlp_out", 0),), r"unknown site 'mlp_out'; allowed: resid_post, z"),
        ((Edit("resid_post", 3),), r"layer 3 is out of range; allowed: 0 to 2"),
        ((Edit("resid_post", -1),), r"layer -1 is out of range"),
        ((Edit("z", 1, 4),), r"head 4 is out of range; layer 1 has heads 0 to 3"),
        ((Edit("z", 1, -1),), r"head -1 is out of range"),
        ((Edit("resid_post", 1, 0),), r"resid_post has no heads"),
        ((Edit("resid_post", 1, source="elsewhere"),), r"unknown donor 'elsewhere'; allowed: zero, original"),
        ((Edit("z", 1, 2), Edit("z", 1, 2)), r"already edited"),
        ((Edit("z", 1), Edit("z", 1, 2)), r"already edited"),
        ((Edit("z", 1, 2, "original"),), r"donor 'original' holds no 'z'; it holds: resid_post"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(setup, edits, message):
    with pytest.raises(PatchError, match=message) as caught:
        run(setup, [Cell("mine", edits)], donors={"original": {"resid_post": RESID}})
    assert "\n" not in str(caught.value)
    assert "original" in str(caught.value) or "mine" in str(caught.value)


@pytest.mark.parametrize(
    ("donor", "message"),
    [
        (RESID[:3], r"shape \[3, 32\]; \[4, 32\] is needed"),
        (RESID[:, :1], r"holds no 'resid_post' of layer 2; it holds layers \[0\]"),
        (RESID[..., :31], r"shape \[4, 31\]; \[4, 32\] is needed"),
        (RESID[0], r"shape \[3, 32\]; allowed: \[item, layer, width\]"),
        ({2: np.full((4, 32), np.nan)}, r"not finite at item 0"),
        ({0: RESID[:, 0]}, r"of layer 2; it holds layers \[0\]"),
    ],
)
def test_a_donor_that_does_not_fit_is_named(setup, donor, message):
    with pytest.raises(PatchError, match=message):
        run(setup, [Cell("last", (Edit("resid_post", 2, source="d"),))], donors={"d": {"resid_post": donor}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cell_budget": 0}, "cell_budget is 0; give 1 or more"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"check_cells": -1}, "check_cells is -1"),
        ({"engine": "fast"}, "unknown engine 'fast'; allowed: auto, branch, prefix, forward"),
        ({"donors": {"zero": {"resid_post": RESID}}}, "already means zeros"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(setup, options, message):
    with pytest.raises(PatchError, match=message):
        run(setup, [Cell("none", ())], **options)


def test_empty_inputs_and_double_names_are_refused(setup):
    model, prompts, answers = setup
    with pytest.raises(PatchError, match="no cells"):
        run(setup, [])
    with pytest.raises(PatchError, match="two cells are called 'a'"):
        run(setup, [Cell("a", ()), Cell("a", ())])
    with pytest.raises(PatchError, match="no recipients"):
        sweep(model, [], [Cell("a", ())], answers=answers, seed=0)
    one = type(answers)(answers.labels[:1], answers.ids[:1])
    with pytest.raises(PatchError, match="two answer labels"):
        full_forward(model, prompts, [Cell("a", ())], answers=one, seed=0)
    with pytest.raises(PatchError, match="layer 9"):
        sweep_plan(model, prompts, [Cell("a", (Edit("resid_post", 9),))])


def test_layers_without_heads_are_absent_and_not_zero():
    cells = head_cells([2, None, 1])
    assert [cell.name for cell in cells] == ["z.0.0", "z.0.1", "z.2.0"]


def test_the_head_map_is_the_models_own():
    model = from_modules(*tiny_hybrid())
    assert len(head_cells(head_map(model))) == sum(count or 0 for count in model.structure.heads)


def test_with_source_changes_the_donor_and_nothing_else():
    assert with_source(layer_cells(2, source="original"), "random") == layer_cells(2, source="random")
