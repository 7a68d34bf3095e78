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
    span_cells,
    sweep,
    sweep_plan,
    with_source,
)
from tests.tiny_models import ANSWERS, MESSAGES, tiny_granite, tiny_hybrid, tiny_llama, tiny_neox


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
        (
            (Edit("pattern", 0),),
            r"unknown site 'pattern'; allowed: resid_pre, resid_mid, resid_post, attn_out, mlp_out, z",
        ),
        ((Edit("resid_post", 3),), r"layer 3 is out of range; allowed: 0 to 2"),
        ((Edit("resid_post", -1),), r"layer -1 is out of range"),
        ((Edit("z", 1, 4),), r"head 4 is out of range; layer 1 has heads 0 to 3"),
        ((Edit("z", 1, -1),), r"head -1 is out of range"),
        ((Edit("resid_post", 1, 0),), r"resid_post has no heads"),
        ((Edit("resid_post", 1, source="elsewhere"),), r"unknown donor 'elsewhere'; allowed: zero, original"),
        ((Edit("z", 1, 2), Edit("z", 1, 2)), r"already edited"),
        ((Edit("z", 1), Edit("z", 1, 2)), r"already edited"),
        ((Edit("z", 1, 2), Edit("z", 1, 2, position="all")), r"already edited in the cell by z\.1\.2<-zero; keep one"),
        ((Edit("z", 1, 2, "original"),), r"donor 'original' holds no 'z'; it holds: resid_post"),
        ((Edit("z", 1, how="swap"),), r"unknown how 'swap'; allowed: replace, add, project_out, function"),
        ((Edit("z", 1, position="first"),), r"unknown position 'first'; allowed: answer, all, span:LABEL, index:N"),
        ((Edit("z", 1, position="span:"),), r"unknown position 'span:'"),
        ((Edit("z", 1, position="index:x"),), r"unknown position 'index:x'"),
        ((Edit("z", 1, how="add"),), r"add needs a direction and its source is zero; name a donor"),
        ((Edit("z", 1, scale=2.0),), r"scale is 2 but how is replace; only add has a scale"),
        (
            (Edit("resid_post", 1, source="original", how="add", scale=float("nan")),),
            r"scale is nan; give a finite number",
        ),
        (
            (Edit("z", 1, source="f", how="function"),),
            r"unknown function 'f'; allowed: none given; pass it in functions=",
        ),
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
        ({"engine": "fast"}, "unknown engine 'fast'; allowed: auto, branch, prefix, copies, restart, forward"),
        ({"donors": {"zero": {"resid_post": RESID}}}, "already means zeros"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(setup, options, message):
    with pytest.raises(PatchError, match=message):
        run(setup, [Cell("none", ())], **options)


def test_a_site_that_a_layer_lacks_is_refused_with_the_reason(setup):
    parallel, scaled = from_modules(*tiny_neox()), from_modules(*tiny_granite())
    cases = ((parallel, "resid_mid", "read the same residual stream"), (scaled, "mlp_out", "no pair of its modules"))
    for model, site, reason in cases:
        prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
        with pytest.raises(
            PatchError, match=rf"cell 'mine', edit {site}\.1<-zero: .* has no {site} in layers 1; .*{reason}"
        ):
            sweep(model, prompts, [Cell("mine", (Edit(site, 1),))], answers=answers, seed=0)


@pytest.mark.parametrize(
    ("spots", "position", "message"),
    [
        (None, "span:query", r"recipient 0 has no span 'query'; its spans: none; pass it in spots="),
        ([{"query": (1,)}] * 3, "span:query", r"spots holds 3 entries for 4 recipients"),
        ([{"query": (1,)}] * 3 + [{"name": (1,)}], "span:query", r"recipient 3 has no span 'query'; its spans: name"),
        ([{"query": ()}] * 4, "span:query", r"span 'query' of recipient 0 is tokens \[\]"),
        ([{"query": (1, 1)}] * 4, "span:query", r"is tokens \[1, 1\]; give different tokens of 0 to 19"),
        ([{"query": (9,)}] * 3 + [{"query": (99,)}], "span:query", r"span 'query' of recipient 3 is tokens \[99\]"),
        (None, "index:20", r"position index:20: recipient 0 has tokens -20 to 19"),
        (None, "index:-12", r"position index:-12: recipient 1 has tokens -10 to 9"),
    ],
)
def test_a_position_that_a_recipient_lacks_is_named(setup, spots, position, message):
    with pytest.raises(PatchError, match=message):
        run(setup, [Cell("one", (Edit("resid_post", 1, position=position),))], spots=spots)


def test_donors_at_spans_have_the_recipients_token_counts(setup):
    spots = [{"query": (1, 2, 3)}] * 4
    cell = Cell("span", (Edit("resid_post", 1, source="d", position="span:query"),))
    good = [RESID[:3, 0]] * 4
    for donor, message in (
        (
            {"span:query": {1: [*good[:2], RESID[:2, 0], good[3]]}},
            r"has 2 tokens at span:query of item 2, the recipient has 3",
        ),
        ({"span:name": {1: good}}, r"holds no 'resid_post' at span:query; it holds positions span:name"),
        ({"span:query": {1: good[:2]}}, r"holds 2 items; there are 4 recipients"),
        ({"span:query": {1: [RESID[:3, 0, :9]] * 4}}, r"has shape \[3, 9\] at item 0; \[3, 32\] is needed"),
        ({"span:query": {1: [*good[:3], good[3] * np.nan]}}, r"not finite at item 3"),
    ):
        with pytest.raises(PatchError, match=message):
            run(setup, [cell], donors={"d": {"resid_post": donor}}, spots=spots)
    flat = Cell("flat", (Edit("resid_post", 1, source="d", how="project_out"),))
    zero = RESID.copy()
    zero[2, 1] = 0
    with pytest.raises(PatchError, match=r"has length 0 at item 2, so it is no direction to project out"):
        run(setup, [flat], donors={"d": {"resid_post": zero}})
    zero[2, 1] = 1
    zero[3, 1, 8:16] = 0
    head = Cell("head", (Edit("z", 1, 1, "d", how="project_out"), Edit("z", 1, 0, "d", how="project_out")))
    with pytest.raises(PatchError, match=r"donor 'd', z of layer 1, head 1 has length 0 at item 3"):
        run(setup, [head], donors={"d": {"z": zero}})


def test_a_function_has_to_keep_the_shape(setup):
    cell = Cell("one", (Edit("z", 1, source="f", how="function"),))
    with pytest.raises(PatchError, match=r"function 'f' gave \[4\] for vectors \[4, 32\]; give the same shape"):
        run(setup, [cell], functions={"f": lambda vectors: vectors.sum(-1)}, engine="forward", check_cells=0)
    with pytest.raises(PatchError, match=r"function 'f' gave NoneType"):
        run(setup, [cell], functions={"f": lambda vectors: None})


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


def test_span_cells_go_layer_by_layer():
    assert [cell.name for cell in span_cells(("a", "b"), (0, 2), "d")] == [
        "resid_post.0@span:a",
        "resid_post.0@span:b",
        "resid_post.2@span:a",
        "resid_post.2@span:b",
    ]
    assert span_cells(("a",), (2,), "d", site="mlp_out")[0].edits == (Edit("mlp_out", 2, None, "d", "span:a"),)
    assert head_cells([1], position="all") == [Cell("z.0.0@all", (Edit("z", 0, 0, position="all"),))]


def test_with_source_changes_the_donor_and_nothing_else():
    assert with_source(layer_cells(2, source="original"), "random") == layer_cells(2, source="random")
    edits = (Edit("z", 1, 2, "a", "all", "add", 0.5), Edit("z", 2, source="f", how="function"))
    assert with_source([Cell("c", edits)], "b")[0].edits == (Edit("z", 1, 2, "b", "all", "add", 0.5), edits[1])
