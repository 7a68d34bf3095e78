"""The ordering family: gold against a brute-force solver, streams, splits, layout, bad input."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter

import pytest

from tasks.contracts import SPLITS, MatchedSet, TaskError
from tasks.files import from_record, to_line, to_record
from tasks.ordering import PRESENTATIONS, Ordering
from tasks.registry import family, family_names
from tasks.validation import validate_family

FAMILY = Ordering()


def sets(count: int, *, seed: int = 1, split: str = "test", **params: object) -> list[MatchedSet]:
    return list(itertools.islice(FAMILY.generate(params, seed=seed, split=split), count))


def brute_force(text: str, forward: str, converse: str) -> str:
    """Try every order of the listed names against the premises; the orders left have to agree on the question."""
    listed, body = text.split("\n", 1)
    names = listed.split(": ")[1].rstrip(".").split(", ")
    *premises, question = [line for line in body.split("\n") if line]
    facts = []
    for line in premises:
        for phrase, first, second in ((forward, 1, 2), (converse, 2, 1)):
            found = re.fullmatch(rf"(\w+) is {phrase} (\w+)\.", line)
            if found:
                facts.append((found[first], found[second]))
    assert len(facts) == len(names) - 1
    asked = re.match(rf"Is (\w+) ({forward}|{converse}) (\w+)\?", question)
    assert asked is not None
    earlier, later = (asked[1], asked[3]) if asked[2] == forward else (asked[3], asked[1])
    verdicts = set()
    for order in itertools.permutations(names):
        place = {name: i for i, name in enumerate(order)}
        if all(place[a] < place[b] for a, b in facts):
            verdicts.add(place[earlier] < place[later])
    assert len(verdicts) == 1
    return "yes" if verdicts.pop() else "no"


@pytest.mark.parametrize(
    ("relation", "forward", "converse"),
    [("front_behind", "in front of", "behind"), ("left_right", "to the left of", "to the right of")],
)
def test_brute_force_solver_agrees_with_gold(relation: str, forward: str, converse: str) -> None:
    for n in (2, 3, 4, 5, 6):
        for matched in sets(200, n=n, relation=relation, presentations=list(PRESENTATIONS)):
            for shown in matched.presentations:
                assert brute_force(shown.messages[0].content, forward, converse) == shown.gold


@pytest.mark.parametrize("params", [{"n": 8}, {"n": 3, "names": "builtin"}, {"n": 5, "names": "random"}])
def test_first_sets_do_not_depend_on_how_many_are_asked_for(params: dict[str, object]) -> None:
    assert sets(100, **params) == sets(1000 if params["n"] == 8 else 200, **params)[:100]


def test_presentations_do_not_depend_on_which_others_are_rendered() -> None:
    every = sets(20, n=8, presentations=list(PRESENTATIONS))
    for kind in PRESENTATIONS[1:]:
        for whole, alone in zip(every, sets(20, n=8, presentations=["original", kind]), strict=True):
            assert whole[kind] == alone[kind]
            assert whole.instance.key == alone.instance.key


def test_both_relations_render_the_same_latents() -> None:
    front, left = sets(50, n=8), sets(50, n=8, relation="left_right")
    for a, b in zip(front, left, strict=True):
        assert (a.instance.key, a.instance.latent) == (b.instance.key, b.instance.latent)
        for kind in ("original", "equivalent"):
            assert a[kind].meta == b[kind].meta
            words = {"in front of": "to the left of", "behind": "to the right of", "line:": "row:"}
            said = a[kind].messages[0].content
            for old, new in words.items():
                said = said.replace(old, new)
            assert said == b[kind].messages[0].content


def test_presentations_change_what_they_say_and_nothing_else() -> None:
    for matched in sets(100, n=8, presentations=list(PRESENTATIONS)):
        text = {shown.kind: shown.messages[0].content for shown in matched.presentations}
        lines = {kind: said.split("\n") for kind, said in text.items()}
        assert "behind" not in "\n".join(lines["original"][2:-2]) and "behind" not in "\n".join(
            lines["reshuffled"][2:-2]
        )
        assert sorted(lines["original"][2:-2]) == sorted(lines["reshuffled"][2:-2])
        assert sorted(lines["equivalent"][2:-2]) == sorted(lines["rewritten"][2:-2])
        assert lines["original"][0] == lines["rewritten"][0] and lines["equivalent"][0] == lines["reshuffled"][0]
        assert len({part[-1] for part in lines.values()}) == 1
        assert matched["equivalent"].meta["premises"] == matched["reshuffled"].meta["premises"]
        assert sum("behind" in line for line in lines["rewritten"][2:-2]) == len(matched["rewritten"].meta["rewritten"])


def test_rewrites_follow_protocol_p() -> None:
    """Counts uniform on 3 … 15 at n = 16, positions uniform over the chain: chi-squared far from rejection."""
    from scipy.stats import chisquare

    rewritten = [matched["equivalent"].meta["rewritten"] for matched in sets(3000, n=16)]
    counts = Counter(len(one) for one in rewritten)
    assert set(counts) == set(range(3, 16))
    assert chisquare(list(counts.values())).pvalue > 1e-3
    assert chisquare([sum(i in one for one in rewritten) for i in range(15)]).pvalue > 1e-3


def test_names_and_premises_say_nothing_about_the_order() -> None:
    from scipy.stats import chisquare

    first_listed, first_told = Counter(), Counter()
    for matched in sets(2000, n=4):
        order = matched.instance.latent["order"]
        listed = matched["original"].messages[0].content.split(": ")[1].split(",")[0]
        first_listed[order.index(listed)] += 1
        first_told[matched["original"].meta["premises"][0]] += 1
    assert chisquare([first_listed[i] for i in range(4)]).pvalue > 1e-3
    assert chisquare([first_told[i] for i in range(3)]).pvalue > 1e-3


def test_cells_are_balanced_in_every_block_and_not_in_a_fixed_order() -> None:
    cells = [matched.instance.cell for matched in sets(400, n=4)]
    assert all(len(set(cells[i : i + 4])) == 4 for i in range(0, 400, 4))
    assert len({tuple(cells[i : i + 4]) for i in range(0, 400, 4)}) > 12


def test_splits_are_disjoint_for_many_seeds_even_where_few_orders_exist() -> None:
    orders = {
        split: {
            tuple(matched.instance.latent["order"])
            for seed in range(20)
            for matched in sets(30, n=3, names="builtin", seed=seed, split=split)
        }
        for split in SPLITS
    }
    for a, b in itertools.combinations(SPLITS, 2):
        assert orders[a].isdisjoint(orders[b])


def test_spans_cut_out_what_they_name() -> None:
    for matched in sets(20, n=5):
        order = matched.instance.latent["order"]
        for shown in matched.presentations:
            text = shown.messages[0].content
            said = {span.label: text[span.start : span.end] for span in shown.spans}
            assert set(said) == {*(f"name:{n}" for n in order), *(f"premise:{i}" for i in range(4)), "query"}
            assert all(said[f"name:{name}"] == name for name in order)
            assert all(order[i] in said[f"premise:{i}"] and order[i + 1] in said[f"premise:{i}"] for i in range(4))
            assert said["query"].startswith("Is ") and said["query"].endswith("?")


def test_golden_hashes_pin_version_1() -> None:
    """If this fails on purpose, raise the family's version and write the new hashes."""
    assert FAMILY.version == 1
    digests = {
        str(params): hashlib.sha256(
            "".join(to_line(one, version=1) for one in sets(50, **params)).encode()
        ).hexdigest()[:16]
        for params in ({"n": 8}, {"n": 4, "names": "builtin"}, {"n": 6, "names": "random", "relation": "left_right"})
    }
    assert digests == GOLDEN


GOLDEN = {
    "{'n': 8}": "de154939d1604e14",
    "{'n': 4, 'names': 'builtin'}": "dcf93e7509fc3867",
    "{'n': 6, 'names': 'random', 'relation': 'left_right'}": "6832227c89289299",
}


def test_records_survive_json() -> None:
    import json

    for matched in sets(5, n=6):
        assert from_record(json.loads(to_line(matched, version=1))) == matched
    record = to_record(matched, version=1)
    assert {"key", "family", "version", "params", "gold", "cell", "split", "presentations"} <= set(record)
    assert {"label", "start", "end"} <= set(record["presentations"][0]["spans"][0])
    del record["gold"]
    with pytest.raises(TaskError, match="'gold'"):
        from_record(record)


def test_validation_finds_nothing_wrong_and_would_find_a_wrong_gold() -> None:
    params = FAMILY.validate({"n": 6, "names": "builtin"})
    assert all(one.ok for one in validate_family(FAMILY, params, sets=40, seed=3))

    class Lying(Ordering):
        def verify(self, matched: MatchedSet) -> dict[str, str]:
            found = dict(super().verify(matched))
            found["equivalent"] = "yes"
            return found

    broken = [one for one in validate_family(Lying(), params, sets=40, seed=3) if not one.ok]
    assert [one.promise for one in broken] == ["the second solver agrees with gold"]
    assert broken[0].broken == 60


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 1}, ["n is 1", "2 to 4096"]),
        ({"n": "8"}, ["n is '8'", "integer"]),
        ({"n": True}, ["n is True"]),
        ({"n": 5000}, ["n is 5000"]),
        ({"n": 25, "names": "builtin"}, ["n is 25", "24 names", "census"]),
        ({"n": 3000, "names": "census"}, ["2500 names"]),
        ({"relation": "above"}, ["relation 'above'", "front_behind, left_right"]),
        ({"names": "anna"}, ["name pool 'anna'", "census, builtin, random"]),
        ({"names": ["Amy", "Amy"], "n": 2}, ["'Amy' stands twice"]),
        ({"names": ["Amy", "Mary Jane"], "n": 2}, ["'Mary Jane'", "one word"]),
        ({"presentations": ["original", "inverted"]}, ["presentation 'inverted'", "reshuffled"]),
        ({"presentations": ["equivalent"]}, ["'original' comes first"]),
        ({"presentations": []}, ["presentations is ()"]),
        ({"size": 4}, ["no parameter 'size'", "names"]),
    ],
)
def test_bad_parameters_are_named_with_what_is_allowed(params: dict[str, object], words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        FAMILY.generate(params, seed=0, split="test")
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_bad_split_and_seed_are_refused() -> None:
    with pytest.raises(TaskError, match="split 'dev'"):
        FAMILY.generate({}, seed=0, split="dev")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="seed -1"):
        FAMILY.generate({}, seed=-1, split="test")


def test_a_small_pool_runs_out_with_a_message_and_never_repeats() -> None:
    stream = FAMILY.generate({"n": 2, "names": ["Amy", "Bob", "Eve"]}, seed=0, split="train")
    keys: list[str] = []
    with pytest.raises(TaskError, match="no new order"):
        for matched in stream:
            keys.append(matched.instance.key)
    assert len(keys) == len(set(keys)) > 0


def test_unread_answers_are_not_correct() -> None:
    shown = sets(1, n=4)[0]["original"]
    assert FAMILY.grade(FAMILY.parse(shown.gold.title(), shown), shown).correct
    other = "No" if shown.gold == "yes" else "Yes"
    assert not FAMILY.grade(FAMILY.parse(other, shown), shown).correct
    unread = FAMILY.grade(FAMILY.parse("I like trains", shown), shown)
    assert not unread.correct and "unparsed" in unread.detail


def test_registry_names_what_exists_and_loads_from_a_file(tmp_path) -> None:
    assert "ordering" in family_names()
    with pytest.raises(TaskError, match="did you mean ordering"):
        family("orderings")
    file = tmp_path / "mine.py"
    file.write_text("from tasks.ordering import Ordering\nclass Mine(Ordering):\n    name = 'mine'\n")
    assert family(f"{file}:Mine").name == "mine"
    with pytest.raises(TaskError, match="it defines Mine"):
        family(f"{file}:Yours")
    with pytest.raises(TaskError, match="does not exist"):
        family("nowhere.py:Mine")


def test_generation_has_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, tasks.ordering, tasks.validation, tasks.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
