"""The Horn family: gold against a naive reader, exact depth and size, what the surface gives away, streams, bad input.

Everything that judges a program here reads the rendered text with a reader of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.contracts import SPLITS, MatchedSet, TaskError
from tasks.files import from_record, to_line
from tasks.horn import PRESENTATIONS, Horn
from tasks.horn_program import derived, least_depth
from tasks.horn_solver import holds, solve_text
from tasks.pseudowords import CODAS, CONSONANTS, VOWELS, draw_pseudowords, pseudowords
from tasks.registry import family, family_names
from tasks.streams import stream
from tasks.validation import validate_family

FAMILY = Horn()


def sets(count: int, *, seed: int = 1, split: str = "test", **params: object) -> list[MatchedSet]:
    return list(itertools.islice(FAMILY.generate(params, seed=seed, split=split), count))


# --- a reader and judges of its own ----------------------------------------------------------------------------------


@dataclass
class Read:
    facts: list[str]
    rules: list[tuple[str, list[str]]]
    goal: str

    def heads(self) -> list[str]:
        return [head for head, _ in self.rules]


def read(text: str) -> Read:
    """Words by their place in the sentence, with no patterns in common with the solver."""
    facts, rules, goal = [], [], ""
    for line in text.split("\n")[1:]:
        words = line.replace(",", " ").replace(".", " ").replace("?", " ").split()
        if not words:
            continue
        if words[0] == "Does":
            goal = words[1]
        elif words[0] == "If":
            cut = words.index("then")
            rules.append((words[cut + 1], [word for word in words[1:cut] if word != "and"]))
        elif "whenever" in words:
            body = words[words.index("whenever") + 1 : -1]
            rules.append((words[0], [word for word in body if word != "and"]))
        else:
            facts.append(words[0])
    return Read(facts, rules, goal)


def stages(program: Read) -> dict[str, int]:
    """Each atom that follows and its least proof depth, by applying all rules at once again and again."""
    known = dict.fromkeys(program.facts, 0)
    for stage in itertools.count(1):
        new = {h for h, body in program.rules if h not in known and all(atom in known for atom in body)}
        if not new:
            return known
        known.update(dict.fromkeys(new, stage))
    raise AssertionError


def below_goal(program: Read) -> list[int]:
    """Places of the rules that the goal can make use of."""
    wanted, todo = {program.goal}, [program.goal]
    while todo:
        atom = todo.pop()
        for head, body in program.rules:
            if head == atom:
                todo += [one for one in body if one not in wanted]
                wanted.update(body)
    return [place for place, (head, _) in enumerate(program.rules) if head in wanted]


def longest(program: Read) -> int:
    """Rules on the longest chain from the facts to the goal; the programs have no cycles."""
    depth = dict.fromkeys(program.facts, 0)
    for _ in program.rules:
        for head, body in program.rules:
            if all(atom in depth for atom in body):
                depth[head] = max(depth.get(head, 0), 1 + max(depth[atom] for atom in body))
    return depth[program.goal]


@pytest.mark.parametrize("params", [{"n": 2}, {"n": 4}, {"n": 8}, {"n": 9, "distractors": 0.3}, {"n": 32}])
def test_a_naive_reader_agrees_with_gold(params: dict[str, Any]) -> None:
    for matched in sets(200, presentations=list(PRESENTATIONS), **params):
        for shown in matched.presentations:
            text = shown.messages[0].content
            program = read(text)
            assert len(program.rules) == params["n"]
            assert ("yes" if program.goal in stages(program) else "no") == shown.gold == solve_text(text)


# --- depth and size of the proof -------------------------------------------------------------------------------------


@st.composite
def allowed(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that the check lets pass: n, then a share of distractors, then a depth for what is left."""
    n = draw(st.integers(2, 60))
    proof = draw(st.integers(1, n))
    least = next(d for d in itertools.count(1) if (3**d - 1) // 2 >= proof)
    return {"n": n, "distractors": (n - proof) / n, "depth": draw(st.integers(least, proof))}


@given(allowed(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=150)
def test_every_allowed_combination_has_exactly_its_depth_and_size(params: dict[str, Any], seed: int) -> None:
    size = params["n"] - round(params["distractors"] * params["n"])
    for matched in sets(4, seed=seed, **params):
        text = matched["original"].messages[0].content
        program = read(text)
        assert len(program.rules) == params["n"]
        assert all(1 <= len(body) == len(set(body)) <= 3 for _, body in program.rules)
        assert len(set(program.facts)) == len(program.facts)
        used = below_goal(program)
        assert len(used) == size
        assert used == matched["original"].meta["proof"]
        if matched.instance.gold == "no":
            # One missing fact is all that keeps the goal from its proof.
            given_heads = {*program.facts, *program.heads()}
            missing = [(place, atom) for place in used for atom in program.rules[place][1] if atom not in given_heads]
            assert len(missing) == 1
            assert missing[0][0] == matched["original"].meta["pivot"]
            assert program.goal in program.heads()
            program.facts.append(missing[0][1])
        known = stages(program)
        assert known[program.goal] == longest(program) == params["depth"]
        assert all(program.rules[place][0] in known for place in used)


def test_every_rule_of_the_proof_is_needed() -> None:
    for matched in sets(60, n=12, distractors=0.5):
        if matched.instance.gold == "yes":
            program = read(matched["original"].messages[0].content)
            for place in below_goal(program):
                less = Read(program.facts, program.rules[:place] + program.rules[place + 1 :], program.goal)
                assert less.goal not in stages(less)


@pytest.mark.parametrize(("n", "depth"), [(2, 1), (4, 2), (8, 3), (16, 4), (31, 4), (32, 5), (128, 7), (1024, 10)])
def test_auto_depth_grows_with_n(n: int, depth: int) -> None:
    assert FAMILY.validate({"n": n})["depth"] == depth
    assert FAMILY.validate({"n": n, "depth": "auto"}) == FAMILY.validate({"n": n, "depth": depth})


def test_auto_depth_always_fits_the_proof() -> None:
    for n in range(2, 200):
        for share in (0, 0.25, 0.5, 0.75, 0.9):
            size = n - round(share * n)
            if size:
                depth = FAMILY.validate({"n": n, "distractors": share})["depth"]
                assert least_depth(size) <= depth <= size


def test_depth_and_distractors_move_apart() -> None:
    shown = {
        (depth, share): len(read(matched["original"].messages[0].content).rules)
        for depth in (5, 12, 20)
        for share in (0.25, 0.5)
        for matched in sets(1, n=64, depth=depth, distractors=share)
    }
    assert set(shown.values()) == {64} and len(shown) == 6


# --- what the surface gives away -------------------------------------------------------------------------------------


def surface(text: str) -> list[float]:
    """Everything countable without following a rule."""
    program = read(text)
    heads, facts = set(program.heads()), set(program.facts)
    bodies = [body for _, body in program.rules]
    uses = Counter(atom for body in bodies for atom in body)
    place = program.heads().index(program.goal)
    own = bodies[place]
    open_places = [i for i, body in enumerate(bodies) if any(atom not in heads | facts for atom in body)]
    where = open_places[0] if open_places else -1
    return [
        len(facts),
        sum(atom not in heads | facts for atom in uses),
        sum(atom not in uses for atom in facts),
        sum(atom not in uses for atom in heads),
        *(sum(len(body) == size for body in bodies) for size in (1, 2, 3)),
        sum(all(atom in facts for atom in body) for body in bodies),
        sum(any(atom in heads for atom in body) for body in bodies),
        max(uses.values()),
        uses[program.goal],
        place,
        len(own),
        sum(atom in facts for atom in own),
        sum(atom in heads for atom in own),
        sum(atom not in heads | facts for atom in own),
        sum(uses[atom] for atom in own),
        where,
        abs(where - place),
        len(bodies[where]),
        uses[program.heads()[where]],
        sum(atom in facts for atom in bodies[where]),
        len(text),
        len(program.goal),
    ]


def surface_accuracy(**params: Any) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = sets(2000, **params)
    features = np.array([surface(matched["original"].messages[0].content) for matched in found], dtype=float)
    gold = np.array([matched.instance.gold == "yes" for matched in found])
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    return float(cross_val_score(model, features, gold, cv=10).mean())


@pytest.mark.parametrize("params", [{"n": 4}, {"n": 8}, {"n": 16}, {"n": 16, "distractors": 0.25}], ids=str)
def test_counts_say_nothing_about_the_answer(params: dict[str, Any]) -> None:
    # Three standard errors of an accuracy over 2,000 programs.
    assert abs(surface_accuracy(**params) - 0.5) < 3 * (0.25 / 2000) ** 0.5


def test_counts_do_tell_without_distractors_as_the_documentation_says() -> None:
    assert surface_accuracy(n=8, distractors=0) > 0.99
    for matched in sets(200, n=8, distractors=0):
        program = read(matched["original"].messages[0].content)
        used = {atom for _, body in program.rules for atom in body}
        unused = [atom for atom in program.facts if atom not in used]
        underived = used - {*program.facts, *program.heads()}
        assert len(unused) == len(underived) == (matched.instance.gold == "no")


def test_both_answers_have_the_same_counts_at_the_default_share() -> None:
    from scipy.stats import ks_2samp

    counts: dict[str, list[list[float]]] = {"yes": [], "no": []}
    for matched in sets(3000, n=8):
        counts[matched.instance.gold].append(surface(matched["original"].messages[0].content))
    yes, no = np.array(counts["yes"]), np.array(counts["no"])
    assert all(ks_2samp(yes[:, i], no[:, i]).pvalue > 1e-3 for i in range(yes.shape[1]))


def test_places_of_rules_and_words_are_uniform() -> None:
    from scipy.stats import chi2_contingency, chisquare

    place, pivot = Counter(), Counter()
    first = {"goal": Counter(), "other": Counter()}
    length = {"goal": Counter(), "other": Counter()}
    for matched in sets(3000, n=6):
        program = read(matched["original"].messages[0].content)
        place[program.heads().index(program.goal)] += 1
        if matched.instance.gold == "no":
            pivot[matched["original"].meta["pivot"]] += 1
        for word in {*program.heads(), *program.facts}:
            role = "goal" if word == program.goal else "other"
            first[role][word[:2]] += 1
            length[role][len(word)] += 1
    assert chisquare([place[i] for i in range(6)]).pvalue > 1e-3
    assert chisquare([pivot[i] for i in range(6)]).pvalue > 1e-3
    for found in (first, length):
        kinds = sorted(found["other"])
        assert chi2_contingency([[found[role][kind] for kind in kinds] for role in found]).pvalue > 1e-3


def test_a_decoy_of_one_rule_tells_as_the_documentation_says() -> None:
    assert surface_accuracy(n=4, distractors=0.25) > 0.99


def way_up(text: str) -> float:
    """Rules to follow from a missing fact up to an atom that no rule uses, on average over the missing facts."""
    program = read(text)
    parent = {atom: head for head, body in program.rules for atom in body}
    given = {*program.facts, *program.heads()}
    ways = []
    for atom in [head for head, body in program.rules if any(one not in given for one in body)]:
        way, at = 0, atom
        while at in parent:
            way, at = way + 1, parent[at]
        ways.append(way)
    return sum(ways) / len(ways)


@pytest.mark.parametrize(("share", "tells"), [(0.25, True), (0.5, False), (0.75, False)])
def test_the_way_up_from_a_missing_fact_tells_below_half_as_the_documentation_says(share: float, tells: bool) -> None:
    from scipy.stats import ks_2samp

    ways: dict[str, list[float]] = {"yes": [], "no": []}
    for matched in sets(1500, n=16, depth=4, distractors=share):
        ways[matched.instance.gold].append(way_up(matched["original"].messages[0].content))
    found = ks_2samp(ways["yes"], ways["no"])
    assert found.pvalue < 1e-6 if tells else found.pvalue > 1e-3


def test_the_missing_fact_is_not_next_to_the_goal_unless_it_has_to_be() -> None:
    for depth, next_to in ((1, {True}), (2, {False}), (3, {False})):
        found = set()
        for matched in sets(100, n=6, depth=depth, distractors={1: 5 / 6, 2: 0.5, 3: 0.5}[depth]):
            meta, program = matched["original"].meta, read(matched["original"].messages[0].content)
            if meta["pivot"] is not None:
                found.add(program.rules[meta["pivot"]][0] == program.goal)
        assert found == next_to


# --- the backward chainer --------------------------------------------------------------------------------------------

ATOMS = [a + b for a in ("ta", "ro", "mi") for b in ("vu", "la")]
BODIES = st.lists(st.sampled_from(ATOMS), min_size=1, max_size=3, unique=True)
PROGRAMS = st.tuples(st.sets(st.sampled_from(ATOMS)), st.lists(st.tuples(st.sampled_from(ATOMS), BODIES), max_size=12))


@given(PROGRAMS)
@settings(deadline=None, max_examples=500)
def test_both_chainers_agree_with_the_naive_one_on_any_program(program: tuple[set[str], list[Any]]) -> None:
    """Cycles, several rules for one atom, rules that use their own head: all of them."""
    facts, rules = program
    by_head: dict[str, list[tuple[str, ...]]] = {}
    for head, body in rules:
        by_head.setdefault(head, []).append(tuple(body))
    known = stages(Read(list(facts), [(head, list(body)) for head, body in rules], ""))
    for atom in ATOMS:
        assert holds(atom, facts, by_head) == (atom in known)
    from tasks.horn_program import Rule

    number = {atom: i for i, atom in enumerate(ATOMS)}
    numbered = [Rule(number[head], tuple(number[atom] for atom in body)) for head, body in rules]
    assert derived({number[atom] for atom in facts}, numbered) == {number[atom] for atom in known}


def prompt(*lines: str, asked: str = "tavu") -> str:
    context = "Something holds only if it is stated below or follows from the rules."
    return "\n".join([context, "", *lines, "", f"Does {asked} hold? Answer with Yes or No only."])


def test_the_solver_follows_very_deep_and_cyclic_programs() -> None:
    names = pseudowords()[:20_000]
    rules = [f"If {b}, then {a}." for a, b in itertools.pairwise(names)]
    assert solve_text(prompt(*rules, f"{names[-1]} holds.", asked=names[0])) == "yes"
    assert solve_text(prompt(*rules, f"If {names[0]}, then {names[-1]}.", asked=names[0])) == "no"


def test_the_solver_reads_all_bodies_in_both_renderings() -> None:
    facts = ["rovu holds.", "mila holds.", "rola holds."]
    assert solve_text(prompt(*facts, "If rovu, mila and rola, then tavu.")) == "yes"
    assert solve_text(prompt(*facts, "tavu holds whenever rovu, mila and rola hold.")) == "yes"
    assert solve_text(prompt(*facts[:2], "tavu holds whenever rovu, mila and rola hold.")) == "no"
    assert solve_text(prompt(*facts[:1], "tavu holds whenever rovu holds.")) == "yes"
    assert solve_text(prompt(*facts[:2], "If rovu and mila, then tavu.")) == "yes"


@pytest.mark.parametrize(
    "line",
    [
        "If rovu, then.",
        "If rovu, mila, then tavu.",
        "If rovu and mila and rola, then tavu.",
        "If rovu and not mila, then tavu.",
        "tavu holds whenever rovu hold.",
        "tavu holds whenever rovu and mila holds.",
        "tavu does not hold.",
        "If if, then tavu.",
        "Tavu holds.",
        "rovu holds, or so they say.",
        "If rovu, then tavu. If mila, then tavu.",
    ],
)
def test_a_sentence_that_can_t_be_read_is_refused(line: str) -> None:
    with pytest.raises(TaskError, match="can't read the sentence") as caught:
        solve_text(prompt("rovu holds.", line))
    assert repr(line) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (prompt("rovu holds.").replace("only if", "if"), "can't read the first line"),
        (prompt("rovu holds.").replace("Does tavu hold?", "Is tavu so?"), "no question"),
        (prompt("rovu holds.") + " Please.", "no question"),
        ("Something holds only if it is stated below or follows from the rules.", "no question"),
        ("", "can't read the first line"),
    ],
)
def test_a_text_without_its_frame_is_refused(text: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        solve_text(text)


# --- words -----------------------------------------------------------------------------------------------------------


def test_pseudowords_are_pronounceable_distinct_and_no_words_of_the_prompt() -> None:
    from tasks.prompts import INSTRUCTIONS

    pool = pseudowords()
    assert len(set(pool)) == len(pool) > 200_000
    open_syllable, coda = f"[{CONSONANTS}][{VOWELS}]", f"[{''.join(CODAS)}]?"
    shape = re.compile(f"(?:{open_syllable}{coda}){{2}}|(?:{open_syllable}){{3}}")
    assert all(shape.fullmatch(word) for word in pool)
    prompts = " ".join([prompt("a holds whenever b and c hold.", "If a, then b."), *INSTRUCTIONS.values()])
    assert not ({*re.findall("[a-z]+", prompts.lower())} - {"tavu"}) & set(pool)
    assert not {"yes", "no", "normal", "banana", "final", "minus"} & set(pool)


def test_pseudowords_are_drawn_without_repeats_and_not_beyond_what_there_is() -> None:
    drawn = draw_pseudowords(stream("test"), 5000)
    assert len(set(drawn)) == 5000 and drawn == draw_pseudowords(stream("test"), 5000)
    with pytest.raises(TaskError, match="asked for 1000000 pseudowords"):
        draw_pseudowords(stream("test"), 1_000_000)


# --- presentations ---------------------------------------------------------------------------------------------------


def test_presentations_say_the_same_in_the_same_order() -> None:
    for matched in sets(50, n=12, presentations=list(PRESENTATIONS)):
        original, equivalent = (read(matched[kind].messages[0].content) for kind in ("original", "equivalent"))
        assert original == equivalent
        assert matched["repeat"].messages == matched["original"].messages
        texts = [matched[kind].messages[0].content for kind in ("original", "equivalent")]
        assert "whenever" not in texts[0] and "If " not in texts[1]


def test_sentences_are_grammatical_for_one_two_and_three_atoms() -> None:
    said = Counter()
    word = "[a-z]+"
    grammar = {
        "fact": f"{word} holds\\.",
        "if 1": f"If {word}, then {word}\\.",
        "if 2": f"If {word} and {word}, then {word}\\.",
        "if 3": f"If {word}, {word} and {word}, then {word}\\.",
        "whenever 1": f"{word} holds whenever {word} holds\\.",
        "whenever 2": f"{word} holds whenever {word} and {word} hold\\.",
        "whenever 3": f"{word} holds whenever {word}, {word} and {word} hold\\.",
    }
    for matched in sets(30, n=8):
        for shown in matched.presentations:
            context, body = shown.messages[0].content.split("\n\n", 1)
            assert context == "Something holds only if it is stated below or follows from the rules."
            *lines, question = [line for line in body.split("\n") if line]
            assert re.fullmatch(f"Does {word} hold\\? Answer with Yes or No only\\.", question)
            for line in lines:
                (kind,) = [kind for kind, pattern in grammar.items() if re.fullmatch(pattern, line)]
                said[kind] += 1
    assert set(said) == set(grammar)


def test_presentations_do_not_depend_on_which_others_are_rendered() -> None:
    every = sets(20, presentations=list(PRESENTATIONS))
    for kind in PRESENTATIONS[1:]:
        for whole, alone in zip(every, sets(20, presentations=["original", kind]), strict=True):
            assert whole[kind] == alone[kind]
            assert whole.instance == alone.instance


def test_the_reasoning_prompt_changes_the_instruction_and_how_answers_are_read() -> None:
    for direct, reasoning in zip(sets(20), sets(20, prompt="reasoning"), strict=True):
        assert direct.instance == reasoning.instance
        a, b = (matched["original"].messages[0].content.split("? ") for matched in (direct, reasoning))
        assert a[0] == b[0] and a[1] == "Answer with Yes or No only." and "last line" in b[1]
        assert FAMILY.verify(direct) == FAMILY.verify(reasoning)
    cut = {"finish_reason": "length"}
    assert FAMILY.parse("Yes, tavu holds, so", direct["original"], **cut).status == "parsed"
    assert FAMILY.parse("Yes, tavu holds, so", reasoning["original"], **cut).status == "truncated"
    assert FAMILY.parse("No fact.\n\nAnswer: Yes", reasoning["original"]).value == "yes"


def test_spans_cut_out_what_they_name() -> None:
    for matched in sets(20, n=5, presentations=list(PRESENTATIONS)):
        latent = matched.instance.latent
        words = latent["words"]
        for shown in matched.presentations:
            text = shown.messages[0].content
            said = {span.label: text[span.start : span.end] for span in shown.spans}
            facts, rules = range(len(latent["facts"])), range(5)
            assert set(said) == {*(f"fact:{i}" for i in facts), *(f"rule:{i}" for i in rules), "goal", "query"}
            assert all(said[f"fact:{i}"] == f"{words[latent['facts'][i]]} holds." for i in facts)
            for i in rules:
                assert set(re.findall(r"[a-z]{4,}", said[f"rule:{i}"])) - {"then", "holds", "hold", "whenever"} == {
                    words[atom] for atom in latent["rules"][i]
                }
            assert said["goal"] == words[latent["goal"]] and said["query"] == f"Does {said['goal']} hold?"


# --- streams, splits, keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"n": 32, "depth": 9, "distractors": 0.25}])
def test_first_sets_do_not_depend_on_how_many_are_asked_for(params: dict[str, Any]) -> None:
    assert sets(60, **params) == sets(300, **params)[:60]


def test_shares_that_round_to_the_same_number_of_rules_give_the_same_instances() -> None:
    a, b = sets(10, distractors=0.5), sets(10, distractors=0.52)
    assert [one.instance.key for one in a] == [one.instance.key for one in b]
    assert [one.instance.key for one in a] != [one.instance.key for one in sets(10, distractors=0.25)]


def test_gold_is_balanced_in_every_block_and_not_in_a_fixed_order() -> None:
    cells = [matched.instance.cell for matched in sets(400)]
    assert all(set(cells[i : i + 2]) == {"derived-yes", "severed-no"} for i in range(0, 400, 2))
    assert 60 < sum(cells[i] == "derived-yes" for i in range(0, 400, 2)) < 140


def test_keys_and_splits_hang_on_the_latent_alone() -> None:
    keys = {
        split: {one.instance.key for seed in range(15) for one in sets(40, n=2, seed=seed, split=split)}
        for split in SPLITS
    }
    assert all(len(found) == 600 for found in keys.values())
    for a, b in itertools.combinations(SPLITS, 2):
        assert keys[a].isdisjoint(keys[b])
    one, other = sets(1)[0], sets(1, prompt="reasoning", presentations=["original", "repeat"])[0]
    assert one.instance.key == other.instance.key


def test_the_split_of_an_instance_can_be_told_from_its_words() -> None:
    for split in SPLITS:
        for matched in sets(50, split=split):
            digest = hashlib.sha256(" ".join(matched.instance.latent["words"]).encode()).digest()
            assert split in {0: ("train",), 1: ("train",), 2: ("validation",), 3: ("test",)}[digest[0] % 4]


def test_records_survive_json() -> None:
    import json

    for matched in sets(5):
        assert from_record(json.loads(to_line(matched, version=1))) == matched


def test_golden_hashes_pin_version_1() -> None:
    """If this fails on purpose, raise the family's version and write the new hashes."""
    assert FAMILY.version == 1
    digests = {
        str(params): hashlib.sha256(
            "".join(to_line(one, version=1) for one in sets(50, **params)).encode()
        ).hexdigest()[:16]
        for params in ({"n": 8}, {"n": 4, "distractors": 0}, {"n": 40, "depth": 12, "distractors": 0.6})
    }
    assert digests == GOLDEN


GOLDEN = {
    "{'n': 8}": "396da9b63c1aed9e",
    "{'n': 4, 'distractors': 0}": "968dba892b8a4ec2",
    "{'n': 40, 'depth': 12, 'distractors': 0.6}": "8b6097f35dc68183",
}


def test_validation_finds_nothing_wrong() -> None:
    for params in ({}, {"n": 2, "presentations": list(PRESENTATIONS)}, {"n": 12, "distractors": 0.9}):
        checked = FAMILY.validate(params)
        assert {one.promise for one in validate_family(FAMILY, checked, sets=60, seed=3) if not one.ok} == set()


def test_the_registry_knows_it() -> None:
    assert "horn" in family_names() and family("horn").name == "horn"


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_nothing_repeats_within_a_hundred_thousand_sets(n: int) -> None:
    keys, prompts = set(), set()
    for matched in itertools.islice(FAMILY.generate({"n": n}, seed=0, split="test"), 100_000):
        keys.add(matched.instance.key)
        prompts.update(hashlib.sha256(shown.messages[0].content.encode()).digest() for shown in matched.presentations)
    assert len(keys) == 100_000 and len(prompts) == 200_000


@pytest.mark.slow
def test_splits_are_disjoint_over_a_hundred_seeds() -> None:
    keys = {
        split: {one.instance.key for seed in range(100) for one in sets(200, n=4, seed=seed, split=split)}
        for split in SPLITS
    }
    assert sum(map(len, keys.values())) == len(set.union(*keys.values())) == 60_000


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"n": 1}, ["n is 1", "2 to 1024"]),
        ({"n": "8"}, ["n is '8'", "integer"]),
        ({"n": True}, ["n is True"]),
        ({"n": 2000}, ["n is 2000", "2 to 1024"]),
        ({"distractors": 1}, ["distractors is 1", "below 1"]),
        ({"distractors": -0.1}, ["distractors is -0.1"]),
        ({"distractors": float("nan")}, ["distractors is nan"]),
        ({"distractors": "half"}, ["distractors is 'half'"]),
        ({"n": 4, "distractors": 0.9}, ["distractors is 0.9", "n=4", "none"]),
        ({"depth": 5}, ["depth is 5", "n=8", "distractors=0.5", "4 rules", "at least 5", "from 2 to 4"]),
        ({"n": 128, "depth": 3}, ["depth is 3", "64 rules", "at most 13", "from 5 to 64"]),
        ({"n": 8, "depth": 0}, ["depth is 0", "from 2 to 4"]),
        ({"depth": "deep"}, ["depth is 'deep'", "auto", "from 2 to 4"]),
        ({"depth": 2.0}, ["depth is 2.0", "integer"]),
        ({"depth": True}, ["depth is True"]),
        ({"prompt": "think"}, ["prompt is 'think'", "direct or reasoning"]),
        ({"prompt": ["direct"]}, ["prompt is ['direct']"]),
        ({"presentations": ["original", "reshuffled"]}, ["presentation 'reshuffled'", "original, equivalent, repeat"]),
        ({"presentations": ["equivalent"]}, ["'original' comes first"]),
        ({"presentations": ["original", "repeat", "repeat"]}, ["none stands twice"]),
        ({"presentations": []}, ["presentations is []"]),
        ({"presentations": 3}, ["presentations is 3"]),
        ({"rules": 4}, ["no parameter 'rules'", "depth, distractors, n, presentations, prompt"]),
    ],
)
def test_bad_parameters_are_named_with_what_is_allowed(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        FAMILY.generate(params, seed=0, split="test")
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_bad_split_and_seed_are_refused() -> None:
    with pytest.raises(TaskError, match="split 'dev'"):
        FAMILY.generate({}, seed=0, split="dev")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="seed -1"):
        FAMILY.generate({}, seed=-1, split="test")


def test_validated_parameters_are_themselves_valid() -> None:
    for given_params in ({}, {"n": 40, "depth": 12, "presentations": "original"}, {"distractors": 0}):
        checked = FAMILY.validate(given_params)
        assert FAMILY.validate(checked) == checked
        assert set(checked) == {parameter.name for parameter in FAMILY.parameters()}


def test_unread_answers_are_not_correct() -> None:
    shown = sets(1)[0]["original"]
    assert FAMILY.grade(FAMILY.parse(shown.gold.title(), shown), shown).correct
    assert not FAMILY.grade(FAMILY.parse("No" if shown.gold == "yes" else "Yes", shown), shown).correct
    unread = FAMILY.grade(FAMILY.parse("I like trains", shown), shown)
    assert not unread.correct and "unparsed" in unread.detail
