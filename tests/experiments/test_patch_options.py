"""Options of a patching study: each that cannot apply is refused in one line, before the first forward pass."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from activations.errors import ModelError
from experiments import items, recipes
from experiments.config import config_text, load, settings
from experiments.errors import UsageError
from experiments.patch_command import load_patch, study
from experiments.patch_options import PatchSettings, layers_of, positions_of
from experiments.pipeline import _check as check_run
from experiments.progress import Reporter
from tasks.registry import family

RECIPES = recipes.names("patch")


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("sites=resid_pst", "sites is resid_pst: choose from resid_pre, resid_mid, resid_post, attn_out, mlp_out, z (did "
                            "you mean resid_post?)"),
        ("sites=z,z", "sites is z, z: give none twice"),
        ("sites=[]", "sites is []: give at least one"),
        ("layers=3-1", "layers is '3-1': give numbers and ranges, such as 0-3,8 or -1, or all"),
        ("layers=0-9999999999", "layers is 0-9999999999: give numbers and ranges"),
        ("layers=[]", "layers is []: give at least one, such as 0-3,8 or -1, or leave it out for all"),
        ("positions=query/mean", "positions is query/mean: give answer, all, or the name of a whole span"),
        ("positions=5", "positions is 5: give words"),
        ("directions=both", "directions is both: choose from repair, break"),
        ("kinds=agreeing", "kinds is agreeing: choose from disagreement, agreement, shared error (did you"),
        ("controls=same_cell", "controls is same_cell: choose from unrelated, random, same cell, own (did you"),
        ("decides=p", "decides is 'p': input should be 'flipped' or 'difference'"),
        ("margin=0", "margin is 0: input should be greater than 0"),
        ("cell_budget=0", "cell_budget is 0: input should be greater than or equal to 1"),
        ("pairs=1", "pairs is 1: input should be greater than or equal to 2"),
        ("limit=4", "limit is 4: input should be greater than or equal to 8"),
        ("transplant=query", "transplant is query: name answer, all or both, and none twice"),
        ("site=z", "unknown key 'site' (did you mean sites?)"),
    ],
)  # fmt: skip
def test_a_word_that_means_nothing_is_refused_with_what_is_allowed(pair: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        run(tmp_path / "run", pair)
    assert said.replace("'", "") in str(refused.value).replace("'", "") and "\n" not in str(refused.value)


def run(directory: Path, *pairs: str) -> None:
    config = load_patch(None, ["n=4", "limit=8", *pairs] if not any("limit" in pair for pair in pairs) else pairs, {})
    study(config, directory, config_text=config_text(config), reporter=Reporter(quiet=True))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["layers=9"], "layers is 9: builtin has layers 0 to 3 and no layer 9"),
        (["positions=quary"], "positions is quary: no prompt has a span called 'quary'; choose answer, all or one of "
                              "query, premise:0, premise:1"),
        (["positions=rule:*"], "no prompt has a span called 'rule:*'"),
        (["positions=all"], "positions is all: in none of 8 pairs do both presentations have equally many tokens there"),
        (["adapter=[]", "transplant=answer"], "transplant is answer but builtin has no adapter"),
        (["controls=own", "decides=flipped"], "decides is flipped but controls is own"),
        (["max_tokens=5"], "max_tokens is 5, but no answer is generated"),
        (["presentations=original"], "presentations"),
        (["family=modals"], "family"),
    ],
)  # fmt: skip
def test_what_items_or_model_cannot_give_is_refused_before_anything_is_captured(
    pairs: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as refused:  # families and rooms have errors of their own
        run(tmp_path / "run", *pairs)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "activations").exists() and not (tmp_path / "run" / "environment.json").exists()


def test_a_same_cell_donor_needs_a_second_instance_of_the_cell() -> None:
    import pandas as pd

    from experiments.patch_rows import check_controls

    table = pd.DataFrame(
        {"setting": "n=4", "presentation": ["original", "equivalent"] * 3, "cell": ["a", "a", "a", "a", "b", "b"]}
    )
    check_controls(PatchSettings(controls=("unrelated",)), table)
    with pytest.raises(UsageError, match="controls is same cell: cell b of n=4 has one instance"):
        check_controls(PatchSettings(controls=("same cell",)), table)
    with pytest.raises(UsageError, match="controls is unrelated: n=4 has one instance"):
        check_controls(PatchSettings(controls=("unrelated",)), table.iloc[4:])


def hybrid() -> Any:
    """A model with heads in layers 0 and 2 alone, and no attention output that can be told apart."""
    names = ["a", "b", "c"]
    structure = SimpleNamespace(
        blocks=names, out_projections=names, attn_out=[None, "b", None], mlp_out=[None] * 3, d_model=6,
        heads=[2, None, 2], d_head=[3, None, 3], attention=["softmax", "linear", "softmax"],
    )  # fmt: skip
    return SimpleNamespace(
        name="hybrid", n_layers=3, structure=structure, heads=lambda layer: structure.heads[layer],
        module=lambda name: SimpleNamespace(in_features=6),
    )  # fmt: skip


def test_heads_are_patched_where_there_are_some_and_refused_where_a_layer_was_named_without() -> None:
    assert layers_of(PatchSettings(sites=("z",)), hybrid(), "z") == [0, 2]
    assert layers_of(PatchSettings(sites=("z",), layers=(0, -1)), hybrid(), "z") == [0, 2]
    assert layers_of(PatchSettings(), hybrid(), "resid_post") == [0, 1, 2]
    assert layers_of(PatchSettings(sites=("attn_out",)), hybrid(), "attn_out") == [1]
    with pytest.raises(
        UsageError, match="layers is 0, 1: of hybrid layers 0,2 have heads to cut; name these, or leave z"
    ):
        layers_of(PatchSettings(sites=("z",), layers=(0, 1)), hybrid(), "z")


def test_a_site_that_the_model_lacks_is_refused_with_those_it_has() -> None:
    """Blocks whose attention and MLP read the same residual stream have nothing in the middle."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from activations.model import from_modules, load

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = from_modules(GPTNeoXForCausalLM(config).eval(), load("builtin", verify=False).tokenizer, name="parallel")
    assert layers_of(PatchSettings(), model, "resid_post") == [0, 1]
    with pytest.raises(
        UsageError, match=r"sites is resid_mid: parallel has no resid_mid in layers 0-1.* leave resid_mid out"
    ):
        layers_of(PatchSettings(sites=("resid_mid",)), model, "resid_mid")


def test_a_star_stands_for_every_span_that_both_presentations_have() -> None:
    sets = itertools.islice(family("ordering").generate({"n": 5, "names": "builtin"}, seed=1, split="test"), 2)
    asked = items.rows([items.Item("n=5", matched) for matched in sets])
    patch = PatchSettings(positions=("answer", "premise:*", "query", "premise:1"))
    expected = ["answer", "premise:0", "premise:1", "premise:2", "premise:3", "query"]
    assert positions_of(patch, asked, ("original", "equivalent")) == expected
    assert PatchSettings(layers="0-2,-1").layers == (0, 1, 2, -1) and PatchSettings(layers="all").layers is None


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("patch.sites=z", "patch.sites is z: a run needs resid_post"),
        ("patch.controls=random", "patch.controls is random: a run needs unrelated"),
        ("patch.directions=break", "patch.directions is break: a run needs repair"),
        ("patch.kinds=agreement", "patch.kinds is agreement: a run needs disagreement"),
        ("patch.layers=1", "patch.layers is 1: a run patches every layer"),
        ("patch.positions=query", "patch.positions is query: a run patches at the answer"),
        ("patch.estimate=true", "unknown key 'patch.estimate'"),
    ],
)
def test_a_whole_study_keeps_the_sweep_that_its_link_is_made_from(pair: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace(".", r"\.")):
        check_run(config := load(None, [pair], {}), settings(config, family("ordering")))
    config = load(None, ["patch.sites=resid_post,attn_out", "patch.controls=unrelated,random,own"], {})
    check_run(config, settings(config, family("ordering")))


def test_there_is_a_recipe_for_spans_for_sites_and_for_adapters() -> None:
    assert set(RECIPES) == {"patch-spans", "patch-sites", "patch-transplant"}


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_says_what_it_asks_and_fits_the_built_in_pair_and_another_model(name: str) -> None:
    text = recipes.path(name).read_text()
    assert recipes.describe(name).endswith("?") and text.count("command: patch") == 1
    assert "# Departs:" in text and "The built-in pair" in text and "smollm2" in text
    config = load_patch(name, ["n=6", "relation=front_behind"], {})
    assert settings(config, family("ordering"))[0].params["names"] == "builtin" and config.adapter == ("builtin",)
    other = load_patch(name, [], {"model": "made-up"})
    assert settings(other, family("ordering"))[0].params["protocol"] == "P" and other.seed == 1
    with pytest.raises(UsageError, match=f"is for `probe patch`, not `probe run`: give `probe patch {name}`"):
        load(str(recipes.path(name)), [], {})


def test_a_family_whose_own_presentations_are_no_pair_is_asked_for_one(tmp_path: Path) -> None:
    """The refusal of its words comes after the pair was made: nothing has to be said of presentations."""
    config = load_patch(None, ["family=modals", "limit=8"], {})
    with pytest.raises(ModelError, match="the tokenizer cannot read"):
        study(config, tmp_path / "run", config_text=config_text(config), reporter=Reporter(quiet=True))
    kinds = [
        shown["kind"]
        for shown in json.loads((tmp_path / "run/items.jsonl").read_text().split("\n")[0])["presentations"]
    ]
    assert kinds == ["original", "equivalent"]
