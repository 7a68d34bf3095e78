"""The oracle of probability operators: against linear programming and its own counter-models; what rests on what."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tasks.contracts import TaskError
from tasks.modals_catalog import Template, packaged
from tasks.modals_oracle import COMMITMENTS, RECORDED, Reading, decide
from tasks.modals_schema import Statement, atoms, statement

TEMPLATES = packaged().templates
READINGS = [
    Reading(*values)  # type: ignore[arg-type]
    for values in itertools.product(
        ("above", "at_least"), ("held", "material", "ratio"), ("inclusive", "exclusive"), ("certain", "probable")
    )
]


def inference(template: Template) -> tuple[tuple[Statement, ...], Statement]:
    return template.premises, template.goal


# --- another way to decide: numbers and scipy ------------------------------------------------------------------------


def true_in(said: Any, world: dict[str, bool], exclusive: bool) -> bool:
    if isinstance(said, str):
        return world[said]
    parts = [true_in(part, world, exclusive) for part in said[1:]]
    if said[0] == "not":
        return not parts[0]
    if said[0] == "and":
        return all(parts)
    return parts[0] ^ parts[1] if exclusive else any(parts)


def chance(said: Any, measure: dict[str, Any], names: tuple[str, ...], exclusive: bool) -> Any:
    """Probability of a proposition under a measure over "a b"-style names of assignments."""
    return sum(
        p for name, p in measure.items()
        if true_in(said, {atom: atom in name.split() for atom in names}, exclusive)
    )  # fmt: skip


def holds(one: Statement, measure: dict[str, Any], names: tuple[str, ...], reading: Reading) -> bool:
    """Whether a statement is true of a measure, said in probabilities and not in weights."""
    exclusive = reading.disjunction == "exclusive"

    def prob(said: Any) -> Any:
        return chance(said, measure, names, exclusive)

    def probable(value: Any) -> bool:
        return bool(value > Fraction(1, 2) if reading.threshold == "above" else value >= Fraction(1, 2))

    match one:
        case ("deny", inner):
            return not holds(inner, measure, names, reading)
        case ("Pr", said):
            return probable(prob(said))
        case ("Might", said):
            return bool(prob(said) > 0)
        case ("Must", said):
            return bool(prob(said) == 1)
        case ("geq", first, second):
            return bool(prob(first) >= prob(second))
        case ("if", first, second):
            broken = prob(("and", first, ("not", second)))
            return broken == 0 if reading.conditional == "certain" else probable(1 - broken)
        case ("Pr-if", first, second):
            broken, within = prob(("and", first, ("not", second))), prob(first)
            if reading.embedded == "held":
                return bool(broken == 0)
            if reading.embedded == "material":
                return probable(1 - broken)
            if within == 0:
                return reading.threshold == "at_least"
            return probable(1 - broken / within)
    raise AssertionError(one)


def lp_follows(premises: tuple[Statement, ...], goal: Statement, reading: Reading) -> bool:
    """Largest slack of all strict inequalities at once, by scipy; the inference is valid if it can't be positive."""
    names = atoms((*premises, goal))
    worlds = [
        " ".join(n for n, t in zip(names, w, strict=True) if t) for w in itertools.product((1, 0), repeat=len(names))
    ]
    exclusive = reading.disjunction == "exclusive"

    def row(said: Any) -> np.ndarray:
        return np.array([float(chance(said, {one: 1}, names, exclusive)) for one in worlds])

    above = reading.threshold == "above"

    def limit(one: Statement) -> tuple[np.ndarray, float, bool]:
        match one:
            case ("deny", inner):
                weights, least, strict = limit(inner)
                return -weights, -least, not strict
            case ("Pr", said):
                return row(said), 0.5, above
            case ("Might", said):
                return row(said), 0.0, True
            case ("Must", said):
                return row(said), 1.0, False
            case ("geq", first, second):
                return row(first) - row(second), 0.0, False
            case (word, first, second):
                broken = row(("and", first, ("not", second)))
                if (reading.conditional == "certain") if word == "if" else (reading.embedded == "held"):
                    return -broken, 0.0, False
                if word == "if" or reading.embedded == "material":
                    return 1 - broken, 0.5, above
                return row(("and", first, second)) - broken, 0.0, above
        raise AssertionError(one)

    limits = [*(limit(one) for one in premises), limit(("deny", goal))]
    # Variables: the measure and the slack; slack counts in strict rows only.
    table = [[*(-weights), float(strict)] for weights, _, strict in limits]
    found = linprog(
        [0.0] * len(worlds) + [-1.0],
        A_ub=table,
        b_ub=[-least for _, least, _ in limits],
        A_eq=[[1.0] * len(worlds) + [0.0]],
        b_eq=[1.0],
        bounds=[(0, 1)] * (len(worlds) + 1),
    )
    if found.status == 2:
        return True
    assert found.status == 0
    return bool(-found.fun < 1e-9) if any(strict for _, _, strict in limits) else False


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_linear_programming_agrees_on_every_template_under_every_reading(name: str) -> None:
    premises, goal = inference(TEMPLATES[name])
    for reading in READINGS:
        verdict = decide(premises, goal, reading)
        assert verdict.follows == lp_follows(premises, goal, reading), reading
        if verdict.counter is not None:
            names = atoms((*premises, goal))
            measure = dict(verdict.counter)
            assert sum(measure.values()) == 1 and min(measure.values()) >= 0
            assert all(holds(one, measure, names, reading) for one in premises)
            assert not holds(goal, measure, names, reading)


@st.composite
def propositions(draw: st.DrawFn) -> Any:
    first, second = draw(st.sampled_from("ab")), draw(st.sampled_from("abc"))
    kind = draw(st.sampled_from(("atom", "not", "and", "or")))
    return first if kind == "atom" else ("not", first) if kind == "not" else (kind, first, second)


@st.composite
def statements(draw: st.DrawFn) -> Statement:
    word = draw(st.sampled_from(("Pr", "Might", "Must", "geq", "if", "Pr-if")))
    said: Statement = (word, draw(propositions()))
    if word in ("geq", "if", "Pr-if"):
        said = (*said, draw(propositions()))
    return ("deny", said) if draw(st.booleans()) else said


@settings(max_examples=120, deadline=None)
@given(st.lists(statements(), min_size=1, max_size=2), statements(), st.sampled_from(READINGS))
def test_linear_programming_agrees_on_any_inference(said: list[Statement], goal: Statement, reading: Reading) -> None:
    premises = tuple(said)
    verdict = decide(premises, goal, reading)
    assert verdict.follows == lp_follows(premises, goal, reading)
    if verdict.counter is not None:
        names = atoms((*premises, goal))
        measure = dict(verdict.counter)
        # A ratio within an impossible condition is a matter of convention, which the inequalities settle by themselves.
        if not any("Pr-if" in str(one) for one in (*premises, goal)):
            assert all(holds(one, measure, names, reading) for one in premises)
            assert not holds(goal, measure, names, reading)


# --- the declared validities, and what they rest on ------------------------------------------------------------------


def test_the_oracle_agrees_with_the_declared_validity_of_all_patterns() -> None:
    found = {name: decide(*inference(one)) for name, one in TEMPLATES.items()}
    assert {name: verdict.follows for name, verdict in found.items()} == {n: t.valid for n, t in TEMPLATES.items()}
    assert all(verdict.consistent for verdict in found.values())
    patterns = {one.pattern: one.valid for one in TEMPLATES.values()}
    assert len(patterns) == 13 and sum(patterns.values()) == 10


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_template_names_exactly_the_commitments_that_it_rests_on(name: str) -> None:
    template = TEMPLATES[name]
    premises, goal = inference(template)
    broken = {
        commitment for commitment, without in COMMITMENTS.items()
        if any(decide(premises, goal, one).follows != template.valid for one in without)
    }  # fmt: skip
    assert broken == set(template.commitments)


def test_both_thresholds_agree_but_for_one_pattern() -> None:
    at_least = replace(RECORDED, threshold="at_least")
    differ = {
        n for n, t in TEMPLATES.items() if decide(*inference(t), at_least).follows != decide(*inference(t)).follows
    }
    assert differ == {"probably_not_probably_not"}
    counter = decide(*inference(TEMPLATES["probably_not_probably_not"]), at_least).counter
    assert counter == {"a": Fraction(1, 2), "": Fraction(1, 2)}


def test_no_threshold_licenses_the_comparative() -> None:
    """P(b | a) may be as high as you like below 1: with a certain and b not, b is less likely than a."""
    premises, goal = inference(TEMPLATES["conditional_comparative"])
    for threshold, embedded in itertools.product(("above", "at_least"), ("material", "ratio")):
        assert not decide(premises, goal, replace(RECORDED, threshold=threshold, embedded=embedded)).follows  # type: ignore[arg-type]
    assert decide(premises, goal).follows
    for high in (Fraction(9, 10), Fraction(999, 1000)):
        measure = {"a b": high, "a": 1 - high, "b": Fraction(0), "": Fraction(0)}
        assert chance("b", measure, ("a", "b"), False) == high < chance("a", measure, ("a", "b"), False)


def test_what_the_source_of_complement_transfer_concludes_follows_too() -> None:
    premises = (statement("b >= a"), statement("a >= ~a"))
    assert decide(premises, statement("b >= ~b")).follows


def test_improbable_may_be_read_as_probably_not() -> None:
    premises = (statement("if(a, b)"), statement("Pr(~b)"))
    for threshold in ("above", "at_least"):
        assert decide(premises, statement("Pr(~a)"), replace(RECORDED, threshold=threshold)).follows  # type: ignore[arg-type]


def orderings() -> list[dict[tuple[bool, bool], int]]:
    """Every ranking of the four assignments of a and b, ties allowed; higher is likelier."""
    worlds = list(itertools.product((True, False), repeat=2))
    return [dict(zip(worlds, ranks, strict=True)) for ranks in itertools.product(range(4), repeat=4)]


def test_likelihood_by_the_best_case_licenses_the_comparative_and_the_fallacy() -> None:
    """Kratzer's comparison, in which a proposition is as likely as its likeliest case, with if restricting probably.

    It would be another commitment for the comparative. It can't be the recorded one: conjunctivitis is valid under it.
    """

    def best(rank: dict[tuple[bool, bool], int], *worlds: tuple[bool, bool]) -> int:
        return max(rank[one] for one in worlds)

    ab, a_only, b_only, none = (True, True), (True, False), (False, True), (False, False)
    for rank in orderings():
        a, b = best(rank, ab, a_only), best(rank, ab, b_only)
        if rank[ab] > rank[a_only]:  # within a, b is likelier than not
            assert b >= a
        if a > best(rank, b_only, none) and b > best(rank, a_only, none):
            assert rank[ab] > best(rank, a_only, b_only, none)


# --- the notation ----------------------------------------------------------------------------------------------------


def test_the_notation() -> None:
    assert statement("~Pr(~a)") == ("deny", ("Pr", ("not", "a")))
    assert statement("a & ~b >= ~a | b & c") == (
        "geq",
        ("and", "a", ("not", "b")),
        ("or", ("not", "a"), ("and", "b", "c")),
    )
    assert statement("Pr(if(a, b))") == ("Pr-if", "a", "b") and statement("if(a,b)") == ("if", "a", "b")
    assert atoms((statement("b >= a"), statement("Must(c)"))) == ("b", "a", "c")


@pytest.mark.parametrize(
    "text", ["", "a", "Pr()", "Pr(A)", "Pa(a)", "Must(if(a, b))", "if(a)", ">= a", "Pr(a", "Pr(a &)"]
)
def test_what_is_no_notation_is_refused(text: str) -> None:
    with pytest.raises(TaskError, match="can't read"):
        statement(text)


def test_too_many_atoms_are_refused() -> None:
    with pytest.raises(TaskError, match="4 atoms: the oracle judges up to 3"):
        decide((statement("Pr(a & b)"), statement("Pr(c & d)")), statement("Pr(a)"))


def test_impossible_premises_are_seen() -> None:
    verdict = decide((statement("Must(a)"), statement("Pr(~a)")), statement("Pr(b)"))
    assert verdict.follows and not verdict.consistent
