"""What ordering writes: gold against brute force, what each presentation changes, protocols, distractors, spans."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter

import numpy as np
import pytest

from tasks.contracts import MatchedSet, Presentation, TaskError
from tasks.ordering import PRESENTATIONS, Ordering
from tasks.ordering_solver import Reader, solve_text
from tasks.relations import relation_named, relations

FAMILY = Ordering()
PEOPLE = [name for name, relation in relations().items() if relation.entities == "people"]

# Written down apart from the catalog: words that say the first-named entity is earlier, and later. One of each group.
SAID = {
    "front_behind": ("in front of", "behind"),
    "left_right": ("to the left of", "to the right of"),
    "before_after": ("before", "after"),
    "closer_front_back": ("to the front", "to the back"),
    "higher_lower": ("higher", "lower"),
    "born_before_after": ("before", "after"),
    "arrives_earlier_later": ("earlier", "later"),
    "shorter_taller": ("shorter", "taller"),
    "closer_farther_exit": ("closer to", "farther from"),
    "zorbic": ("more zorbic", "less zorbic"),
    "vorpward_morpward": ("vorpward", "morpward"),
    "depth": ("deeper", "shallower"),
    "aux_priority": ("higher", "lower"),
}


def sets(count: int, *, seed: int = 1, split: str = "test", **params: object) -> list[MatchedSet]:
    return list(itertools.islice(FAMILY.generate(params, seed=seed, split=split), count))


def text_of(shown: Presentation) -> str:
    return shown.messages[0].content


def parts(text: str) -> tuple[list[str], list[str], str]:
    """Listed names, premises and question of a prompt."""
    head, premises, question = text.split("\n\n")
    return head.split("\n")[0].split(": ")[1].rstrip(".").split(", "), premises.split("\n"), question


def understood(sentence: str, names: list[str], words: tuple[str, str]) -> tuple[str, str]:
    """The two names of a sentence in the order it says, by the words written down above."""
    first, second = [word for word in re.findall(r"\w+", sentence) if word in names][:2]
    forward, converse = (re.search(rf"\b{word}\b", sentence) is not None for word in words)
    assert forward != converse
    return (first, second) if forward != (" not " in sentence) else (second, first)


def brute_force(text: str, words: tuple[str, str]) -> str:
    """Try every order of the listed names against the premises; the orders left have to agree on the question."""
    names, premises, question = parts(text)
    facts = [understood(line, names, words) for line in premises]
    earlier, later = understood(question, names, words)
    verdicts = set()
    for order in itertools.permutations(names):
        place = {name: i for i, name in enumerate(order)}
        if all(place[a] < place[b] for a, b in facts):
            verdicts.add(place[earlier] < place[later])
    assert len(verdicts) == 1
    return "yes" if verdicts.pop() else "no"


@pytest.mark.parametrize("relation", SAID)
def test_brute_force_agrees_with_gold(relation: str) -> None:
    kinds = [kind for kind in PRESENTATIONS if "distracted" not in kind]
    for n, count in ((2, 12), (3, 12), (4, 12), (5, 8), (6, 4)):
        for matched in sets(count, n=n, relation=relation, presentations=kinds, protocol="PL"[n % 2]):
            for shown in matched.presentations:
                assert brute_force(text_of(shown), SAID[relation]) == shown.gold == matched.instance.gold
    for matched in sets(4, n=3, relation=relation, presentations=["original", "distracted", "distracted_equivalent"]):
        for shown in matched.presentations:
            assert brute_force(text_of(shown), SAID[relation]) == shown.gold == matched.instance.gold


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("relation", relations())
def test_the_text_solver_agrees_with_gold_in_every_presentation(relation: str, count: int) -> None:
    for protocol, n in (("P", 6), ("L", 9)):
        for matched in sets(count // 2, n=n, relation=relation, presentations=list(PRESENTATIONS), protocol=protocol):
            assert FAMILY.verify(matched) == dict.fromkeys(PRESENTATIONS, matched.instance.gold)


@pytest.mark.parametrize("protocol", ["P", "L"])
def test_all_pairs_of_relations_render_the_same_latents(protocol: str) -> None:
    """Order, names and their places, names line, premise order, rewrite count and positions, distractors, question."""
    neutral = {}
    for name in PEOPLE:
        reader = Reader(relation_named(name))
        found: list[object] = []
        for matched in sets(
            6, n=6, relation=name, presentations=list(PRESENTATIONS), rho=1, protocol=protocol, names="default"
        ):
            found += [matched.instance.key, matched.instance.latent, matched.instance.cell]
            for shown in matched.presentations:
                names, premises, question = parts(text_of(shown))
                read = [reader.statement(premise) for premise in premises]
                asked = reader.question(question.removesuffix(" Answer with Yes or No only."))
                found += [names, read, asked, shown.meta, [span.label for span in shown.spans if span.label != "rule"]]
        neutral[name] = found
    assert len(neutral) == 37
    for one, other in itertools.combinations(PEOPLE, 2):
        assert neutral[one] == neutral[other], (one, other)


def test_presentations_change_what_they_say_and_nothing_else() -> None:
    for matched in sets(100, n=8, presentations=list(PRESENTATIONS)):
        text = {shown.kind: text_of(shown) for shown in matched.presentations}
        names, premises, questions = {}, {}, set()
        for kind, said in text.items():
            names[kind], premises[kind], question = parts(said)
            questions.add(question)
        assert len(questions) == 1
        for kind in ("original", "reshuffled"):
            assert not any("behind" in line for line in premises[kind])
        assert sorted(premises["original"]) == sorted(premises["reshuffled"])
        assert sorted(premises["equivalent"]) == sorted(premises["rewritten"])
        assert names["original"] == names["rewritten"] != names["equivalent"]
        assert names["equivalent"] == names["reshuffled"] == names["fully_rewritten"] == names["negated"]
        for kind in ("reshuffled", "fully_rewritten", "negated"):
            assert matched["equivalent"].meta["premises"] == matched[kind].meta["premises"]
        assert matched["original"].meta["premises"] == matched["rewritten"].meta["premises"]
        rewritten = len(matched["rewritten"].meta["rewritten"])
        assert sum("behind" in line for line in premises["rewritten"]) == rewritten
        assert all("is behind" in line for line in premises["fully_rewritten"])
        assert text["repeat"] == text["original"]
        assert matched["repeat"].spans == matched["original"].spans


def test_negation_negates_the_converse_of_the_premises_that_the_equivalent_rewords() -> None:
    for matched in sets(50, n=8, presentations=["original", "equivalent", "negated"]):
        for said, negated in zip(
            *(parts(text_of(matched[kind]))[1] for kind in ("equivalent", "negated")), strict=True
        ):
            converse = re.fullmatch(r"(\w+) is behind (\w+)\.", said)
            if converse is None:
                assert negated == said
            else:
                assert negated == f"{converse[2]} is not behind {converse[1]}."
        assert matched["negated"].meta["rewritten"] == matched["equivalent"].meta["rewritten"]


def test_the_two_first_relations_are_worded_as_ever() -> None:
    """The shipped model was trained on these words; it knows no others."""
    names = ["Amy", "Bob"]
    for matched in sets(2, n=2, names=names, split="train", presentations=["original", "fully_rewritten"]):
        first, last = matched.instance.latent["order"]
        line, said, question = text_of(matched["original"]).split("\n\n")
        assert line in ("These people stand in one line: Amy, Bob.", "These people stand in one line: Bob, Amy.")
        assert said == f"{first} is in front of {last}."
        assert re.fullmatch(r"Is \w+ (in front of|behind) \w+\? Answer with Yes or No only\.", question)
        assert f"\n\n{last} is behind {first}.\n\n" in text_of(matched["fully_rewritten"])
    (matched,) = sets(1, n=2, relation="left_right", presentations=["original", "fully_rewritten"])
    assert text_of(matched["original"]).startswith("These people stand in one row: ")
    assert " is to the left of " in parts(text_of(matched["original"]))[1][0]
    assert " is to the right of " in parts(text_of(matched["fully_rewritten"]))[1][0]


@pytest.mark.parametrize("protocol", ["P", "L"])
def test_rewrite_counts_are_uniform(protocol: str) -> None:
    """3 … 15 at n = 16: chi-squared far from rejection."""
    from scipy.stats import chisquare

    rewritten = [matched["equivalent"].meta["rewritten"] for matched in sets(3000, n=16, protocol=protocol)]
    counts = Counter(len(one) for one in rewritten)
    assert set(counts) == set(range(3, 16))
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_phrasing_says_nothing_about_chain_position_under_p_and_much_under_l() -> None:
    from scipy.stats import chisquare, pearsonr

    found = {}
    for protocol in ("P", "L"):
        rewritten = [matched["equivalent"].meta["rewritten"] for matched in sets(3000, n=16, protocol=protocol)]
        position = np.tile(np.arange(15), len(rewritten))
        found[protocol] = pearsonr(position, np.array([[i in one for i in range(15)] for one in rewritten]).ravel())
        if protocol == "P":
            assert chisquare([sum(i in one for one in rewritten) for i in range(15)]).pvalue > 1e-3
            # Pairs of neighbours are as often re-worded together as the ends are: positions are not drawn in runs.
            together = [sum(i in one and (i + 1) % 15 in one for one in rewritten) for i in range(15)]
            assert chisquare(together).pvalue > 1e-3
        else:
            assert all(one == list(range(15 - len(one), 15)) for one in rewritten)
    assert abs(found["P"].statistic) < 0.02 and found["P"].pvalue > 1e-3
    assert found["L"].statistic > 0.4


@pytest.mark.parametrize(("n", "count"), [(7, 60), (64, 20), (1024, 2), (1025, 8)])
def test_protocols_share_originals_orders_and_counts(n: int, count: int) -> None:
    for p, last in zip(sets(count, n=n), sets(count, n=n, protocol="L"), strict=True):
        assert p.instance.key == last.instance.key
        assert p["original"] == last["original"]
        one, other = p["equivalent"], last["equivalent"]
        assert len(one.meta["rewritten"]) == len(other.meta["rewritten"])
        assert one.meta["premises"] == other.meta["premises"]
        assert parts(text_of(one))[0] == parts(text_of(other))[0]
        assert p.instance.params["protocol"] == "P" and last.instance.params["protocol"] == "L"


def test_above_1024_protocol_l_tosses_a_coin_for_each_premise() -> None:
    from scipy.stats import binomtest

    rewritten = [matched["equivalent"].meta["rewritten"] for matched in sets(12, n=1200, protocol="L")]
    counts = [len(one) for one in rewritten]
    assert binomtest(sum(counts), 12 * 1199).pvalue > 1e-3
    assert max(abs(count - 599.5) for count in counts) < 4 * (1199 / 4) ** 0.5
    assert binomtest(sum(i < 600 for one in rewritten for i in one), sum(counts), 600 / 1199).pvalue > 1e-3


def test_names_and_premises_say_nothing_about_the_order() -> None:
    from scipy.stats import chisquare

    for kind in ("original", "equivalent", "distracted"):
        first_listed, first_told = Counter(), Counter()
        for matched in sets(2000, n=4, presentations=list(dict.fromkeys(["original", "equivalent", kind]))):
            order = matched.instance.latent["order"]
            names = [name for name in parts(text_of(matched[kind]))[0] if name in order]
            first_listed[order.index(names[0])] += 1
            first_told[matched[kind].meta["premises"][0]] += 1
        assert chisquare([first_listed[i] for i in range(4)]).pvalue > 1e-3
        assert chisquare([first_told[i] for i in range(3)]).pvalue > 1e-3


def test_names_in_chain_order_are_marked() -> None:
    kinds = ["original", "equivalent", "reshuffled", "distracted"]
    for matched in sets(30, n=6, names_order="chain", presentations=kinds):
        assert matched.instance.params["names_order"] == "chain"
        order = matched.instance.latent["order"]
        for shown in matched.presentations:
            listed = parts(text_of(shown))[0]
            assert [name for name in listed if name in order] == order
            assert shown.meta["names_order"] == "chain"
            assert shown.kind == "distracted" or listed == order
    for matched in sets(5, n=6):
        assert all("names_order" not in shown.meta for shown in matched.presentations)


@pytest.mark.parametrize("rho", [0.5, 1, 2.2])
@pytest.mark.parametrize("protocol", ["P", "L"])
def test_distractors_are_about_others_and_change_nothing(rho: float, protocol: str) -> None:
    kinds = ["original", "equivalent", "distracted", "distracted_equivalent"]
    extra = round(rho * 8)
    for matched in sets(30, n=9, rho=rho, presentations=kinds, protocol=protocol):
        own = set(matched.instance.latent["order"])
        for plain, distracted in (("original", "distracted"), ("equivalent", "distracted_equivalent")):
            names, premises, question = parts(text_of(matched[distracted]))
            fewer_names, fewer, same = parts(text_of(matched[plain]))
            about = [set(re.findall(r"[A-Z]\w+", premise)) for premise in premises]
            assert all(one <= own or not one & own for one in about)
            others = [premise for premise, one in zip(premises, about, strict=True) if not one & own]
            assert len(others) == extra and len(set(names) - own) == extra + 1
            # Without them, the plain presentation is left, in its order.
            assert [premise for premise in premises if premise not in others] == fewer
            assert [name for name in names if name in own] == fewer_names
            assert question == same and matched[distracted].gold == matched[plain].gold
        shown = matched["distracted_equivalent"]
        assert shown.meta["rewritten"] == matched["equivalent"].meta["rewritten"]
        share = len(shown.meta["rewritten"]) / 8
        assert abs(len(shown.meta["rewritten_distractors"]) - share * extra) < 1
        reworded = [span for span in shown.spans if "behind" in text_of(shown)[span.start : span.end]]
        labels = {span.label for span in reworded if span.label != "query"}
        expected = {f"premise:{i}" for i in shown.meta["rewritten"]}
        assert labels == expected | {f"distractor:{i}" for i in shown.meta["rewritten_distractors"]}
        if protocol == "L":
            count = len(shown.meta["rewritten_distractors"])
            assert shown.meta["rewritten_distractors"] == list(range(extra - count, extra))


@pytest.mark.parametrize(("n", "rho"), [(3, 0.5), (5, 0.25), (5, 0.75), (16, 0.05)])
def test_a_few_distractors_are_re_worded_as_often_as_own_premises(n: int, rho: float) -> None:
    """To the nearest whole number would be 0.49 against 0.74 at n = 3: the wording would tell which premise matters."""
    kinds = ["original", "distracted_equivalent"]
    own, other = [], []
    for matched in sets(3000, n=n, rho=rho, presentations=kinds):
        meta = matched["distracted_equivalent"].meta
        own.append(len(meta["rewritten"]) / (n - 1))
        other.append(len(meta["rewritten_distractors"]) / meta["distractors"])
    spread = statistics.stdev(a - b for a, b in zip(own, other, strict=True)) / 3000**0.5
    assert abs(statistics.mean(own) - statistics.mean(other)) < 3 * spread


def test_distractors_form_a_chain_of_their_own_spread_over_the_text() -> None:
    from scipy.stats import chisquare

    places = Counter()
    for matched in sets(1500, n=5, presentations=["original", "distracted"]):
        shown = matched["distracted"]
        labels = [span.label for span in shown.spans if span.label.startswith(("premise:", "distractor:"))]
        places.update(i for i, label in enumerate(labels) if label.startswith("distractor:"))
        facts = [re.findall(r"[A-Z]\w+", text_of(shown)[s.start : s.end]) for s in shown.spans if "dist" in s.label]
        follows = dict(facts)
        (first,) = set(follows) - set(follows.values())
        chain = [first]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        assert len(chain) == 5
    assert chisquare([places[i] for i in range(8)]).pvalue > 1e-3


@pytest.mark.parametrize("relation", ["front_behind", "vorpward_morpward", "depth"])
def test_spans_cut_out_what_they_name(relation: str) -> None:
    for matched in sets(20, n=5, relation=relation, presentations=list(PRESENTATIONS), prompt="reasoning"):
        order = matched.instance.latent["order"]
        for shown in matched.presentations:
            text = text_of(shown)
            said = {span.label: text[span.start : span.end] for span in shown.spans}
            assert len(said) == len(shown.spans) and all(span.message == 0 for span in shown.spans)
            assert [span.start for span in shown.spans] == sorted(span.start for span in shown.spans)
            names = [*order] if "distracted" not in shown.kind else parts(text)[0]
            expected = {*(f"name:{name}" for name in names), *(f"premise:{i}" for i in range(4)), "query"}
            if "distracted" in shown.kind:
                assert shown.meta["distractors"] == 4
                expected |= {f"distractor:{i}" for i in range(4)}
            if relation == "vorpward_morpward":
                expected.add("rule")
                assert said["rule"] == relation_named(relation).rule == text.split("\n")[1]
            assert set(said) == expected
            assert all(said[f"name:{name}"] == name for name in names)
            for i in range(4):
                assert order[i] in said[f"premise:{i}"] and order[i + 1] in said[f"premise:{i}"]
                assert f"\n{said[f'premise:{i}']}\n" in text
            assert text.split("\n\n")[2].startswith(f"{said['query']} Think step by step.")
            assert said["query"].endswith("?")


def test_the_solver_refuses_what_it_cant_read() -> None:
    relation = relation_named("front_behind")
    good = (
        "These people stand in one line: Amy, Bob, Eve.\n\n"
        "Amy is in front of Bob.\nEve is not in front of Bob.\n\nIs Eve behind Amy? Answer with Yes or No only."
    )
    assert solve_text(good, relation) == "yes"
    for old, new, words in (
        ("Amy is in front of Bob.", "Amy is ahead of Bob.", "can't read the premise 'Amy is ahead of Bob.'"),
        ("Amy is in front of Bob.", "Ann is in front of Bob.", "'Ann', whom the names line does not list"),
        ("Is Eve behind Amy?", "Is Eve older than Amy?", "can't read the question"),
        ("Answer with Yes or No only.", "Answer at random.", "can't read the question"),
        ("in one line:", "in one row:", "can't read the names line"),
        ("Amy, Bob, Eve.", "Amy, Bob, Bob, Eve.", "lists a name twice"),
        ("Eve.\n\n", "Eve.\nAmy is tall.\n\n", "expected 'nothing'"),
        ("Eve.\n\n", "Eve.\n\nHello.\n\n", "4 paragraphs"),
        ("Eve is not in front of Bob.", "Eve is not behind Bob.", "do not order Amy and Eve"),
        ("Bob.\n\n", "Bob.\nEve is in front of Amy.\n\n", "contradict each other"),
    ):
        assert old in good
        with pytest.raises(TaskError, match=re.escape(words)):
            solve_text(good.replace(old, new), relation)
    (matched,) = sets(1, n=3, relation="vorpward_morpward")
    text = text_of(matched["original"])
    nonce = relation_named("vorpward_morpward")
    assert solve_text(text, nonce) == matched.instance.gold
    assert nonce.rule is not None
    with pytest.raises(TaskError, match="below the names line"):
        solve_text(text.replace(f"\n{nonce.rule}", ""), nonce)
