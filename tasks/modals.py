"""Modals: does a conclusion about what is probable follow? (Paper 002, Greff and Grissom.)

A family of another shape than the others. Its instances are not drawn from a large space but are a grid: 15 templates,
which word 13 inference patterns, times 80 contents (16 name sets × 5 activities). A matched set is one template with one
content in all its question forms; :mod:`tasks.modals_text` lists them. Negated forms flip the gold answer: a model that
follows the inference has to change its answer. There is no size.

The templates stand in ``data/modals.toml`` with their schema, validity and what it rests on; ``modals_catalog`` checks
them against the oracle.

**Counts.** 15 templates × 12 forms less one are 179: "Is it not not probable that …?", the negated direct question of
*Probably to not probably not*, is no English. With 80 contents that makes 14,320 prompts in 1,200 sets.

**Splits.** The three splits have the same templates, forms, groups and activities, and different names. So they share no
prompt and no instance, each is the whole grid, and ``test`` is the benchmark. The answer follows from template and form,
though: a model trained on one split has seen the answer to every question of another. What generalises is told by
holding out templates (``templates`` takes any list).

**Order.** Eleven templates are valid, four are not. Cells are ``valid`` and ``invalid``, and sets alternate between them
in pairs until the invalid ones run out, so that any beginning of up to 640 sets is balanced; within each cell every
template comes once before one comes again, and names and activities are spread over them. The seed decides the order, and
nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from tasks.contracts import (
    SPLITS,
    DerivedTarget,
    Grade,
    Instance,
    MatchedSet,
    Parameter,
    Parsed,
    Presentation,
    Split,
    TaskError,
    latent_key,
)
from tasks.modals_catalog import NameSet, Template, catalog_named
from tasks.modals_params import ModalsParams, as_values, checked, parameters
from tasks.modals_solver import solve_text
from tasks.modals_targets import TARGETS
from tasks.modals_text import KINDS, PRESENTATIONS, Renderer
from tasks.parsing import parse_label
from tasks.streams import shuffled, stream

CELLS = {True: "valid", False: "invalid"}
# Answers that are read once: most responses are one of a few short texts.
SHORT = 64

__all__ = ["CELLS", "PRESENTATIONS", "Modals"]


class Modals:
    """The family of probability operators. Stateless; one object serves all calls."""

    name = "modals"
    version = 1
    answers: Mapping[str, Sequence[str]] = {
        "yes": ("Yes", " Yes", "yes", " yes", "YES", " YES"),
        "no": ("No", " No", "no", " no", "NO", " NO"),
    }

    flipped = frozenset(name for name, kind in KINDS.items() if kind.negated)

    def parameters(self) -> tuple[Parameter, ...]:
        return parameters()

    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return as_values(checked(params))

    def cells(self, params: Mapping[str, Any], *, split: Split) -> Mapping[str, int]:
        """How many sets there are of each cell; the same in every split."""
        found = checked(params)
        contents = len(found.chosen_names()) * len(found.chosen_activities())
        counts = {
            cell: contents * sum(one.valid == valid for one in found.chosen_templates())
            for valid, cell in CELLS.items()
        }
        return {cell: count for cell, count in counts.items() if count}

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]:
        """Every template with every content, once.

        Raises:
            TaskError: a bad parameter, seed or split, at the call.
        """
        found = checked(params)
        if split not in SPLITS:
            raise TaskError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise TaskError(f"bad seed {seed!r}: give an integer of at least 0")
        return self._generate(found, seed, split)

    def _generate(self, params: ModalsParams, seed: int, split: Split) -> Iterator[MatchedSet]:
        renderer = Renderer(params.presentations, equivalent=params.equivalent, prompt=params.prompt)
        recorded = as_values(params)
        del recorded["presentations"]
        every = catalog_named(params.catalog).activities
        following = dict(zip(every, (*every[1:], every[0]), strict=True))
        for template, names, activity in _ordered(params, (self.name, self.version, split, seed)):
            first, second = names.names[split]
            slots = {"a": first, "b": second, "v": activity, "w": following[activity]}
            latent = {
                "template": template.name,
                "pattern": template.pattern,
                "group": names.group,
                "gender": names.gender,
                "names": [first, second],
                "activity": activity,
            }
            instance = Instance(
                family=self.name,
                key=latent_key(self.name, latent),
                params=recorded.copy(),
                latent=latent,
                gold="yes" if template.valid else "no",
                cell=CELLS[template.valid],
                split=split,
            )
            yield MatchedSet(instance, renderer.presentations(template, slots))

    def parse(
        self,
        response: str,
        presentation: Presentation,
        *,
        finish_reason: str | None = None,
        prompt_opened_think: bool = False,
    ) -> Parsed:
        """Yes or no. "Valid" or "Incorrect" alone is no answer: it would mean yes under one form and no under another."""
        read = _read_short if len(response) <= SHORT else _read
        return read(response, finish_reason, prompt_opened_think, presentation.meta.get("prompt") == "reasoning")

    def grade(self, parsed: Parsed, presentation: Presentation) -> Grade:
        if parsed.status != "parsed":
            return Grade(correct=False, score=0.0, detail=f"no answer: {parsed.status} ({parsed.rule})")
        correct = parsed.value == presentation.gold
        return Grade(correct, float(correct), f"answered {parsed.value}, gold {presentation.gold}")

    def targets(self) -> Mapping[str, DerivedTarget]:
        return TARGETS

    def verify(self, matched: MatchedSet) -> Mapping[str, str]:
        return {shown.kind: solve_text(shown.messages[-1].content) for shown in matched.presentations}


def _read(response: str, finish_reason: str | None, prompt_opened_think: bool, marked: bool) -> Parsed:
    return parse_label(
        response, finish_reason=finish_reason, prompt_opened_think=prompt_opened_think, marked=marked
    )  # fmt: skip


_read_short = lru_cache(maxsize=4096)(_read)

# --- the order of the sets -------------------------------------------------------------------------------------------


def _ordered(params: ModalsParams, name: tuple[Any, ...]) -> Iterator[tuple[Template, NameSet, str]]:
    """Valid and invalid sets by turns, in pairs of random order, and then what is left of the longer side."""
    templates, names, activities = params.chosen_templates(), params.chosen_names(), params.chosen_activities()
    draws = stream(*name, "contents")
    people = [names[i] for i in shuffled(draws, len(names))]
    places = [activities[i] for i in shuffled(draws, len(activities))]
    sides = [
        _side([one for one in templates if one.valid == valid], people, places, stream(*name, cell))
        for valid, cell in CELLS.items()
    ]
    short = min(map(len, sides))
    coins = stream(*name, "order")
    paired = (pair if coins.random() < 0.5 else pair[::-1] for pair in zip(*sides, strict=False))
    return chain(chain.from_iterable(paired), *(side[short:] for side in sides))


def _side(
    templates: Sequence[Template], names: Sequence[NameSet], activities: Sequence[str], draws: random.Random
) -> list[tuple[Template, NameSet, str]]:
    """Rounds in which each template comes once, in random order.

    Each template goes through all names before one comes again, beginning at another than its neighbours, and through
    the activities shifted by one each time: a grid that every beginning covers evenly.
    """
    count, found = len(templates), []
    for turn in range(len(names) * len(activities)):
        for place in shuffled(draws, count):
            person = (turn + place * len(names) // count) % len(names)
            activity = (person + place + turn // len(names)) % len(activities)
            found.append((templates[place], names[person], activities[activity]))
    return found
