"""The ordering family: streams, keys, splits, cells, records. What is written is in test_ordering_presentations."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import tracemalloc
from collections import Counter

import pytest

from tasks.contracts import SPLITS, MatchedSet, TaskError, latent_key
from tasks.files import from_record, to_line, to_record
from tasks.names import census
from tasks.ordering import PRESENTATIONS, Ordering
from tasks.ordering_layout import SMALL_DOMAIN, is_small
from tasks.registry import family, family_names
from tasks.streams import Streams, shuffled, stream
from tasks.validation import validate_family

FAMILY = Ordering()


def sets(count: int, *, seed: int = 1, split: str = "test", **params: object) -> list[MatchedSet]:
    return list(itertools.islice(FAMILY.generate(params, seed=seed, split=split), count))


@pytest.mark.parametrize(
    "params",
    [
        {"n": 8},
        {"n": 3, "names": "builtin"},
        {"n": 5, "names": "random", "protocol": "L"},
        {"n": 5, "relation": "depth", "presentations": ["original", "distracted"]},
    ],
)
def test_first_sets_do_not_depend_on_how_many_are_asked_for(params: dict[str, object]) -> None:
    assert sets(100, **params) == sets(1000 if params["n"] == 8 else 200, **params)[:100]


def test_presentations_do_not_depend_on_which_others_are_rendered() -> None:
    every = sets(20, n=8, presentations=list(PRESENTATIONS))
    for kind in PRESENTATIONS[1:]:
        for whole, alone in zip(every, sets(20, n=8, presentations=["original", kind]), strict=True):
            assert whole[kind] == alone[kind]
            assert whole["original"] == alone["original"]
            assert whole.instance.key == alone.instance.key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"protocol": "P"}, {"protocol": "L"}),
        ({"prompt": "direct"}, {"prompt": "reasoning"}),
        ({"names_order": "shuffled"}, {"names_order": "chain"}),
        ({"names": "default"}, {"names": "census"}),
        ({"presentations": ["original"]}, {"presentations": ["original", "distracted"], "rho": 0.5}),
        ({"presentations": ["original", "distracted"], "rho": 0.5}, {"presentations": ["original", "distracted"]}),
    ],
)
def test_what_is_not_latent_does_not_change_the_instances(one: dict[str, object], other: dict[str, object]) -> None:
    for a, b in zip(sets(40, n=7, **one), sets(40, n=7, **other), strict=True):
        assert (a.instance.key, a.instance.latent, a.instance.cell) == (
            b.instance.key, b.instance.latent, b.instance.cell,
        )  # fmt: skip
        assert a["original"].meta["premises"] == b["original"].meta["premises"]


def test_the_key_is_the_hash_of_the_latent() -> None:
    for params in ({"n": 6}, {"n": 3, "names": ["Zoë", "Émile", "Åsa", "Bob", "Łucja"]}, {"n": 4, "relation": "depth"}):
        for matched in sets(20, **params):
            assert matched.instance.key == latent_key("ordering", matched.instance.latent)


def test_instances_record_their_parameters() -> None:
    (matched,) = sets(1, n=5, relation="older_younger", protocol="L", presentations=["original", "distracted"], rho=2)
    assert matched.instance.params == {
        "n": 5, "relation": "older_younger", "protocol": "L", "names": "census", "names_order": "shuffled",
        "rho": 2.0, "prompt": "direct",
    }  # fmt: skip
    assert sets(1, n=5)[0].instance.params["rho"] is None


def test_streams_with_a_common_beginning_are_the_streams_of_the_whole_name() -> None:
    made = Streams("ordering", 2, "test", ["Amy", "Zoë"], 7)
    for index, purpose in ((0, "instance"), (12, "cells"), (0, "instance")):
        expected = stream("ordering", 2, "test", ["Amy", "Zoë"], 7, index, purpose)
        assert [made(index, purpose).random()] == [expected.random()]
        assert made(index, purpose).getrandbits(500) == stream(
            "ordering", 2, "test", ["Amy", "Zoë"], 7, index, purpose
        ).getrandbits(500)


def test_shuffled_gives_every_order_equally_often() -> None:
    from scipy.stats import chisquare

    draws = random.Random(5)
    counts = Counter(tuple(shuffled(draws, 4)) for _ in range(24_000))
    assert len(counts) == 24
    assert chisquare(list(counts.values())).pvalue > 1e-3
    assert shuffled(draws, 0) == []


@pytest.mark.parametrize("params", [{"names": list("ABCDE")}, {"names": "builtin"}])
def test_every_order_of_a_pool_is_drawn_equally_often(params: dict[str, object]) -> None:
    """Pairs of the pool, counted within the split that the order's hash gives them."""
    from scipy.stats import chisquare

    from tasks.ordering_layout import sample

    pool = params["names"] if isinstance(params["names"], list) else list(census()[:24])
    draws = random.Random(11)
    counts = Counter(tuple(sample(draws, pool, 2)) for _ in range(400 * len(pool) ** 2))
    assert len(counts) == math.perm(len(pool), 2)
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_cells_are_balanced_in_every_block_and_not_in_a_fixed_order() -> None:
    cells = [matched.instance.cell for matched in sets(400, n=4)]
    assert all(len(set(cells[i : i + 4])) == 4 for i in range(0, 400, 4))
    assert len({tuple(cells[i : i + 4]) for i in range(0, 400, 4)}) > 12


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(100), marks=pytest.mark.slow)])
def test_splits_are_disjoint_for_many_seeds_even_where_few_orders_exist(seeds: range) -> None:
    for params in ({"n": 3, "names": "builtin"}, {"n": 2, "relation": "depth"}, {"n": 4}):
        orders = {
            split: {
                tuple(matched.instance.latent["order"])
                for seed in seeds
                for matched in sets(30, seed=seed, split=split, presentations=["original"], **params)
            }
            for split in SPLITS
        }
        for a, b in itertools.combinations(SPLITS, 2):
            assert orders[a].isdisjoint(orders[b])


def test_splits_are_those_of_the_first_version() -> None:
    """So that what the shipped model was trained on stays out of today's test split."""
    for split in SPLITS:
        for matched in sets(50, n=4, split=split):
            order = json.dumps(matched.instance.latent["order"], separators=(",", ":"))
            assert ("train", "train", "validation", "test")[hashlib.sha256(order.encode()).digest()[0] % 4] == split


def test_sizes_at_which_chance_could_repeat_an_order_are_remembered() -> None:
    assert is_small(census(), 3) and is_small(census(), 4) and is_small(None, 2)
    assert not is_small(census(), 8) and not is_small(None, 4096)
    # 100,000 draws among a quarter of the orders, four questions each.
    assert 100_000**2 / (2 * SMALL_DOMAIN) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"n": 2}, {"n": 3}, {"n": 4, "relation": "depth"}, {"n": 8}])
def test_no_prompt_repeats_within_100_000_sets(params: dict[str, object]) -> None:
    seen: set[bytes] = set()
    for matched in itertools.islice(FAMILY.generate(params, seed=2, split="test"), 100_000):
        for shown in matched.presentations:
            seen.add(hashlib.blake2b(shown.messages[0].content.encode(), digest_size=12).digest())
    assert len(seen) == 200_000


def test_memory_does_not_grow_with_the_number_of_sets() -> None:
    drawn = FAMILY.generate({"n": 8}, seed=0, split="test")
    sum(1 for _ in itertools.islice(drawn, 200))
    tracemalloc.start()
    sum(1 for _ in itertools.islice(drawn, 100))
    first = tracemalloc.get_traced_memory()[0]
    sum(1 for _ in itertools.islice(drawn, 3000))
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert grown < 20_000


def test_golden_hashes_pin_version_2() -> None:
    """If this fails on purpose, raise the family's version and write the new hashes."""
    assert FAMILY.version == 2
    digests = {
        str(params): hashlib.sha256(
            "".join(to_line(one, version=2) for one in sets(50, **params)).encode()
        ).hexdigest()[:16]
        for params in (
            {"n": 8},
            {"n": 4, "names": "builtin"},
            {"n": 6, "names": "random", "relation": "left_right"},
            {"n": 6, "relation": "vorpward_morpward", "presentations": list(PRESENTATIONS), "prompt": "reasoning"},
            {"n": 6, "relation": "depth", "presentations": list(PRESENTATIONS), "protocol": "L", "rho": 0.5},
        )
    }  # fmt: skip
    assert list(digests.values()) == GOLDEN


GOLDEN: list[str] = ["ec97ab3c9b190a86", "2b686b6564ec620c", "6ed684eca66dd8aa", "695ee884514eb537", "960be002bb501721"]


def test_records_survive_json() -> None:
    for matched in sets(5, n=6, presentations=list(PRESENTATIONS)):
        assert from_record(json.loads(to_line(matched, version=2))) == matched
    record = to_record(matched, version=2)
    assert {"key", "family", "version", "params", "gold", "cell", "split", "presentations"} <= set(record)
    assert {"label", "start", "end"} <= set(record["presentations"][0]["spans"][0])
    del record["gold"]
    with pytest.raises(TaskError, match="'gold'"):
        from_record(record)


def test_a_set_does_not_share_what_can_be_changed_with_the_next() -> None:
    first, second = sets(2, n=4)
    first.instance.params["n"] = 99  # type: ignore[index]
    first["original"].meta["premises"].clear()
    assert second.instance.params["n"] == 4 and len(second["original"].meta["premises"]) == 3
    assert len(first["equivalent"].meta["premises"]) == 3


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


def test_bad_split_and_seed_are_refused() -> None:
    with pytest.raises(TaskError, match="split 'dev'"):
        FAMILY.generate({}, seed=0, split="dev")  # type: ignore[arg-type]
    for seed in (-1, True, "0", 1.5):
        with pytest.raises(TaskError, match=f"seed {seed!r}"):
            FAMILY.generate({}, seed=seed, split="test")  # type: ignore[arg-type]


def test_a_small_pool_runs_out_with_a_message_and_never_repeats() -> None:
    drawn = FAMILY.generate({"n": 2, "names": ["Amy", "Bob", "Eve"]}, seed=0, split="train")
    keys: list[str] = []
    with pytest.raises(TaskError, match="no new order"):
        for matched in drawn:
            keys.append(matched.instance.key)
    assert len(keys) == len(set(keys)) > 0


def test_unread_answers_are_not_correct() -> None:
    shown = sets(1, n=4)[0]["original"]
    assert FAMILY.grade(FAMILY.parse(shown.gold.title(), shown), shown).correct
    other = "No" if shown.gold == "yes" else "Yes"
    assert not FAMILY.grade(FAMILY.parse(other, shown), shown).correct
    unread = FAMILY.grade(FAMILY.parse("I like trains", shown), shown)
    assert not unread.correct and "unparsed" in unread.detail


def test_an_answer_after_reasoning_is_read_from_its_marked_line() -> None:
    shown = sets(1, n=4, prompt="reasoning")[0]["original"]
    other = "No" if shown.gold == "yes" else "Yes"
    said = f"{other}, one might think at first. But step by step it follows.\n\nAnswer: {shown.gold.title()}"
    assert FAMILY.grade(FAMILY.parse(said, shown), shown).correct


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
    file.write_text(
        "from tasks.ordering import Ordering\n"
        "class Bare:\n    def generate(self): pass\n"
        "class Nameless(Ordering):\n    name = property()\n"
        "class Late(Ordering):\n    def __init__(self): self.answers = None\n"
    )
    with pytest.raises(
        TaskError, match=r"'Bare' in .* is no family: it has no parameters, validate, parse, grade, verify"
    ):
        family(f"{file}:Bare")
    with pytest.raises(TaskError, match=r"'Nameless' in .* is no family: it has no name; see"):
        family(f"{file}:Nameless")
    assert family(f"{file}:Late").answers is None


def test_generation_has_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, tasks.ordering, tasks.validation, tasks.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
