"""Parameters of ordering: what is listed, filled in and refused."""

from __future__ import annotations

import math

import pytest

from tasks.contracts import TaskError
from tasks.names import objects
from tasks.ordering import PRESENTATIONS, Ordering
from tasks.relations import catalog

FAMILY = Ordering()


def test_parameters_list_the_catalog_and_the_others_apart() -> None:
    listed = {parameter.name: parameter for parameter in FAMILY.parameters()}
    assert list(listed) == ["n", "relation", "protocol", "names", "names_order", "presentations", "rho", "prompt"]
    relation = listed["relation"]
    assert relation.choices == catalog() and len(catalog()) == 31
    assert relation.other_choices["depth"] == ("depth",)
    assert len(relation.other_choices["auxiliary"]) == 6 and set(relation.other_choices) == {"depth", "auxiliary"}
    assert listed["presentations"].choices == PRESENTATIONS and len(PRESENTATIONS) == 9
    assert listed["presentations"].takes_list and listed["names"].takes_list
    assert FAMILY.validate({}) == {name: parameter.default for name, parameter in listed.items()}


def test_rho_is_filled_in_where_it_has_a_meaning() -> None:
    assert FAMILY.validate({})["rho"] is None
    distracted = {"presentations": ["original", "distracted"]}
    assert FAMILY.validate(distracted)["rho"] == 1.0
    assert FAMILY.validate({**distracted, "rho": 2})["rho"] == 2.0
    for params in ({}, distracted, {"relation": "depth", "names": ["coin", "bell"], "n": 2}):
        once = FAMILY.validate(params)
        assert FAMILY.validate(once) == once


def test_the_object_pool_serves_the_depth_study() -> None:
    pool = objects()
    assert len(pool) == len(set(pool)) >= 150 and list(pool) == sorted(pool)
    assert all(word.isalpha() and word.islower() and word.isascii() for word in pool)
    FAMILY.validate({"relation": "depth", "n": 64, "presentations": ["original", "distracted"], "rho": 1})


DISTRACTED = ["original", "distracted"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 1}, ["n is 1", "2 to 4096"]),
        ({"n": "8"}, ["n is '8'", "integer"]),
        ({"n": 8.0}, ["n is 8.0", "integer"]),
        ({"n": True}, ["n is True"]),
        ({"n": 5000}, ["n is 5000"]),
        ({"n": 25, "names": "builtin"}, ["n is 25", "builtin pool has 24 names", "census"]),
        ({"n": 3000, "names": "census"}, ["n is 3000", "census pool has 2500 names", "random"]),
        ({"n": 3000}, ["n is 3000", "census pool has 2500 names"]),
        ({"n": 200, "relation": "depth"}, ["n is 200", f"objects pool has {len(objects())} names"]),
        ({"n": 4, "names": ["Amy", "Bob"]}, ["n is 4", "list in names has 2 names"]),
        ({"n": 100, "relation": "depth", "presentations": DISTRACTED}, ["n is 100 and rho is 1.0", "200 names"]),
        ({"n": 2048, "presentations": DISTRACTED}, ["n is 2048", "needs 4096 names", "2500 names"]),
        ({"relation": "above"}, ["relation 'above'", "did you mean above_below", "front_behind", "file.toml:name"]),
        ({"relation": None}, ["relation None"]),
        ({"relation": ["front_behind"]}, ["unknown relation ['front_behind']"]),
        ({"relation": "nowhere.toml:mine"}, ["'nowhere.toml' can't be read"]),
        ({"protocol": "Q"}, ["protocol is 'Q'", "P or L"]),
        ({"protocol": ["P"]}, ["protocol is ['P']"]),
        ({"names_order": "sorted"}, ["names_order is 'sorted'", "shuffled or chain"]),
        ({"prompt": "cot"}, ["prompt is 'cot'", "direct or reasoning"]),
        ({"names": "anna"}, ["name pool 'anna'", "census, builtin, random"]),
        ({"names": 3}, ["names is 3"]),
        ({"names": "census", "relation": "depth"}, ["names is 'census'", "'depth' is about objects", "random"]),
        ({"names": "builtin", "relation": "depth"}, ["names is 'builtin'", "about objects"]),
        ({"names": "objects"}, ["names is 'objects'", "'front_behind' is about people"]),
        ({"names": ["Amy", "Amy"], "n": 2}, ["'Amy' stands twice"]),
        ({"names": ["Amy", "Mary Jane"], "n": 2}, ["'Mary Jane'", "one word"]),
        ({"names": ["Amy", "Behind"], "n": 2}, ["'Behind'", "uses this word"]),
        ({"names": ["Amy", 3], "n": 2}, ["bad name 3"]),
        ({"presentations": ["original", "inverted"]}, ["presentation 'inverted'", "reshuffled"]),
        ({"presentations": ["equivalent"]}, ["'original' comes first"]),
        ({"presentations": ["original", "original"]}, ["none stands twice"]),
        ({"presentations": []}, ["presentations is ()", "give a list"]),
        ({"presentations": None}, ["presentations is None"]),
        ({"presentations": [["original"]]}, ["presentation ['original']"]),
        ({"rho": 1}, ["rho is 1", "no presentation has distractors"]),
        ({"rho": -0.5, "presentations": DISTRACTED}, ["rho is -0.5", "0 to 1000"]),
        ({"rho": math.nan, "presentations": DISTRACTED}, ["rho is nan"]),
        ({"rho": math.inf, "presentations": DISTRACTED}, ["rho is inf"]),
        ({"rho": 10**400, "presentations": DISTRACTED}, ["rho is 1000"]),
        ({"rho": True, "presentations": DISTRACTED}, ["rho is True"]),
        ({"rho": "1", "presentations": DISTRACTED}, ["rho is '1'"]),
        ({"rho": 0, "presentations": DISTRACTED}, ["rho is 0.0", "no distractor"]),
        ({"rho": 0.05, "presentations": DISTRACTED}, ["rho is 0.05 at n=8", "no distractor"]),
        ({"size": 4}, ["no parameter 'size'", "names"]),
    ],
)
def test_bad_parameters_are_named_with_what_is_allowed(params: dict[str, object], words: list[str]) -> None:
    for refused in (lambda: FAMILY.generate(params, seed=0, split="test"), lambda: FAMILY.validate(params)):
        with pytest.raises(TaskError) as caught:
            refused()
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)
