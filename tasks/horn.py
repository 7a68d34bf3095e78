"""Horn clauses: facts and rules over pseudowords, asked whether one of them holds.

A second family of another kind than ordering (paper 000, appendix C): the answer takes a chain of inferences, and how
long the chain is and how much of the text it uses are set apart from each other. Three parameters do that:

===============  ====================================================================================================
``n``            rules in the program; facts are told in sentences of their own and don't count
``depth``        rules on the longest way from the facts to the goal; ``auto`` takes ⌊log₂ n⌋, moved into what the size
                 of the proof allows, so that it grows with n as in the paper
``distractors``  share of the n rules that belong to no proof of the goal
===============  ====================================================================================================

The goal has one proof, a tree of n − round(distractors · n) rules with bodies of one to three atoms. So its depth is at
most that number of rules, and at least the height of the lowest such tree. A negative program keeps all rules and lacks
one fact that the proof needs; :mod:`tasks.horn_program` tells how it is kept from showing, and what clues remain.

==============  ==========================================
``original``    "If tavu and miro, then kalovi."
``equivalent``  "kalovi holds whenever tavu and miro hold."
``repeat``      the original again, character for character
==============  ==========================================

Facts and rules stand in one order in all of them. A goal that doesn't follow does not hold: the first line says that
nothing else counts, so "No" is right and "it can't be known" is not. Gold is balanced in every block of two instances.

An instance belongs to a split by the hash of its words in the order of their atoms, so that the splits can't share an
instance, whatever the seeds. There are more than 10^16 ways to fill even the smallest program with words, so instances
already given need not be remembered.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.contracts import (
    SPLITS,
    Grade,
    Instance,
    MatchedSet,
    Message,
    Parameter,
    Parsed,
    Presentation,
    Span,
    Split,
    TaskError,
    latent_key,
)
from tasks.horn_program import Program, derived, draw_program, least_depth
from tasks.horn_solver import solve_text
from tasks.parsing import parse_label
from tasks.prompts import INSTRUCTIONS, instruction
from tasks.pseudowords import draw_pseudowords
from tasks.streams import stream

PRESENTATIONS = ("original", "equivalent", "repeat")
CONTEXT = "Something holds only if it is stated below or follows from the rules."
# Cell of the design by gold answer.
CELLS = {"yes": "derived-yes", "no": "severed-no"}
SMALLEST, LARGEST = 2, 1024


@dataclass(frozen=True, slots=True)
class HornParams:
    """Checked parameters of horn; see ``Horn.parameters`` for what each allows."""

    n: int
    depth: int
    distractors: float
    prompt: str
    presentations: tuple[str, ...]

    @property
    def proof_rules(self) -> int:
        return _proof_rules(self.n, self.distractors)


class Horn:
    """The Horn-clause family. Stateless; one object serves all calls."""

    name = "horn"
    version = 1
    answers: Mapping[str, Sequence[str]] = {
        "yes": ("Yes", " Yes", "yes", " yes", "YES", " YES"),
        "no": ("No", " No", "no", " no", "NO", " NO"),
    }

    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("n", 8, f"an integer from {SMALLEST} to {LARGEST}", None, "number of rules"),
            Parameter("depth", "auto", "auto (grows with n), or an integer that the number of proof rules allows", None,
                      "rules on the longest way from the facts to the goal"),
            Parameter("distractors", 0.5, "a number from 0, below 1", None,
                      "share of the rules that belong to no proof of the goal"),
            Parameter("prompt", "direct", f"one of {', '.join(INSTRUCTIONS)}", tuple(INSTRUCTIONS),
                      "answer at once, or reason first"),
            Parameter("presentations", ["original", "equivalent"],
                      f"'original' first, then any of {', '.join(PRESENTATIONS[1:])}, each once", PRESENTATIONS,
                      "renderings of each instance", takes_list=True),
        )  # fmt: skip

    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """All parameters, with the depth that ``auto`` stands for."""
        checked = _checked(params)
        return {
            "n": checked.n,
            "depth": checked.depth,
            "distractors": checked.distractors,
            "prompt": checked.prompt,
            "presentations": list(checked.presentations),
        }

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]:
        """Matched sets without end.

        Raises:
            TaskError: a bad parameter, seed or split, at the call.
        """
        checked = _checked(params)
        if split not in SPLITS:
            raise TaskError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise TaskError(f"bad seed {seed!r}: give an integer of at least 0")
        return self._generate(checked, seed, split)

    def _generate(self, params: HornParams, seed: int, split: Split) -> Iterator[MatchedSet]:
        # Shares of distractors that round to the same number of rules give the same instances.
        name = (self.name, self.version, split, params.n, params.proof_rules, params.depth, seed)
        described = {"n": params.n, "depth": params.depth, "distractors": params.distractors}
        golds: list[str] = []
        index = 0
        while True:
            if index % len(CELLS) == 0:
                golds = list(CELLS)
                stream(*name, index // len(CELLS), "cells").shuffle(golds)
            intended = golds[index % len(CELLS)]
            program = draw_program(
                stream(*name, index, "program"),
                rules=params.n,
                proof_rules=params.proof_rules,
                depth=params.depth,
                positive=intended == "yes",
            )
            gold = "yes" if program.goal in derived(program.facts, program.rules) else "no"
            if gold != intended:
                raise AssertionError(f"set {index} of {name} was meant to be {intended} and is {gold}")
            words = _draw_words(stream(*name, index, "words"), program.atoms, split)
            latent = {
                "words": words,
                "facts": list(program.facts),
                "rules": [[rule.head, *rule.body] for rule in program.rules],
                "goal": program.goal,
            }
            instance = Instance(
                family=self.name,
                key=latent_key(self.name, latent),
                params=described,
                latent=latent,
                gold=gold,
                cell=CELLS[gold],
                split=split,
            )
            presentations = tuple(_render(kind, program, words, gold, params.prompt) for kind in params.presentations)
            yield MatchedSet(instance, presentations)
            index += 1

    def parse(
        self,
        response: str,
        presentation: Presentation,
        *,
        finish_reason: str | None = None,
        prompt_opened_think: bool = False,
    ) -> Parsed:
        return parse_label(
            response,
            finish_reason=finish_reason,
            prompt_opened_think=prompt_opened_think,
            marked=presentation.meta.get("prompt") == "reasoning",
        )

    def grade(self, parsed: Parsed, presentation: Presentation) -> Grade:
        if parsed.status != "parsed":
            return Grade(correct=False, score=0.0, detail=f"no answer: {parsed.status} ({parsed.rule})")
        correct = parsed.value == presentation.gold
        return Grade(correct, float(correct), f"answered {parsed.value}, gold {presentation.gold}")

    def verify(self, matched: MatchedSet) -> Mapping[str, str]:
        return {shown.kind: solve_text(shown.messages[-1].content) for shown in matched.presentations}


def _proof_rules(n: int, distractors: float) -> int:
    return n - round(distractors * n)


def _checked(params: Mapping[str, Any]) -> HornParams:
    values = {parameter.name: parameter.default for parameter in Horn().parameters()}
    for key in params:
        if key not in values:
            raise TaskError(f"horn has no parameter {key!r}: choose from {', '.join(sorted(values))}")
    values.update(params)
    n, distractors = values["n"], values["distractors"]
    if not _is_integer(n) or not SMALLEST <= n <= LARGEST:
        raise TaskError(f"n is {n!r}: give an integer from {SMALLEST} to {LARGEST}")
    if isinstance(distractors, bool) or not isinstance(distractors, (int, float)) or not 0 <= distractors < 1:
        raise TaskError(f"distractors is {distractors!r}: give a number from 0, below 1")
    instruction(values["prompt"])
    return HornParams(
        n=n,
        depth=_checked_depth(values["depth"], n, distractors),
        distractors=float(distractors),
        prompt=values["prompt"],
        presentations=_checked_presentations(values["presentations"]),
    )


def _checked_depth(depth: Any, n: int, distractors: float) -> int:
    size = _proof_rules(n, distractors)
    if size < 1:
        raise TaskError(
            f"distractors is {distractors} and leaves none of n={n} rules for a proof: lower it, or raise n"
        )
    least = least_depth(size)
    if depth == "auto":
        return min(max(int(math.log2(n)), least), size)
    if not _is_integer(depth):
        raise TaskError(f"depth is {depth!r}: give auto or an integer from {least} to {size}")
    if not least <= depth <= size:
        why = (
            f"needs at least {depth} of them"
            if depth > size
            else f"can use at most {(3**depth - 1) // 2 if depth > 0 else 0} of them"
        )
        raise TaskError(
            f"depth is {depth}, but n={n} with distractors={distractors} has a proof of {size} rules, and this depth "
            f"{why}: give a depth from {least} to {size}, or change n or distractors"
        )
    return int(depth)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_presentations(given: Any) -> tuple[str, ...]:
    kinds = (given,) if isinstance(given, str) else given
    if not kinds or not isinstance(kinds, (list, tuple)):
        raise TaskError(f"presentations is {given!r}: give a list of {', '.join(PRESENTATIONS)}")
    for kind in kinds:
        if kind not in PRESENTATIONS:
            raise TaskError(f"unknown presentation {kind!r}: choose from {', '.join(PRESENTATIONS)}")
    if kinds[0] != "original" or len(set(kinds)) != len(kinds):
        raise TaskError(f"presentations is {', '.join(kinds)}: 'original' comes first and none stands twice")
    return tuple(kinds)


def _draw_words(draws: random.Random, count: int, split: Split) -> list[str]:
    """A word for each atom, of this split."""
    while True:
        words = draw_pseudowords(draws, count)
        # Any rotation of a random order is as random, and takes far less time than another draw.
        for _ in range(count):
            if _split_of(words) == split:
                return words
            words.append(words.pop(0))


def _split_of(words: Sequence[str]) -> Split:
    """Half of all instances are for training, a quarter each for validation and test."""
    digest = hashlib.sha256(" ".join(words).encode()).digest()
    return ("train", "train", "validation", "test")[digest[0] % 4]


def _render(kind: str, program: Program, words: Sequence[str], gold: str, prompt: str) -> Presentation:
    sentence = _whenever if kind == "equivalent" else _if_then
    spans: list[Span] = []
    parts = [CONTEXT, "\n\n"]
    length = len(CONTEXT) + 2
    for place, atom in enumerate(program.facts):
        text = f"{words[atom]} holds."
        spans.append(Span(f"fact:{place}", length, length + len(text)))
        parts += (text, "\n")
        length += len(text) + 1
    parts.append("\n")
    length += 1
    for place, rule in enumerate(program.rules):
        text = sentence(words[rule.head], [words[atom] for atom in rule.body])
        spans.append(Span(f"rule:{place}", length, length + len(text)))
        parts += (text, "\n")
        length += len(text) + 1
    goal = words[program.goal]
    question = f"Does {goal} hold?"
    parts += ("\n", question, " ", instruction(prompt))
    start = length + 1
    spans.append(Span("goal", start + len("Does "), start + len("Does ") + len(goal)))
    spans.append(Span("query", start, start + len(question)))
    meta = {"prompt": prompt, "proof": list(program.proof), "pivot": program.pivot}
    return Presentation(kind, (Message("user", "".join(parts)),), gold, tuple(spans), meta)


def _if_then(head: str, body: Sequence[str]) -> str:
    return f"If {_listed(body)}, then {head}."


def _whenever(head: str, body: Sequence[str]) -> str:
    return f"{head} holds whenever {_listed(body)} {'holds' if len(body) == 1 else 'hold'}."


def _listed(words: Sequence[str]) -> str:
    """ "a", "a and b", or "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
