"""Ordering: a total order over n entities, told by its n − 1 adjacent comparisons, asked about its two ends.

The rule never changes with n, so n is a pure load parameter. What is varied is the wording (paper 000, §4.1, B.1): the
vocabulary (``relations``), which premises are re-worded by the converse and in which order names and premises come
(``ordering_layout``), and how this is written (``ordering_text``, where the presentations are listed).

Question phrase (forward, converse) × gold (yes, no) gives four cells, each once in every block of four instances.

Two surface clues are ruled out: names and premises are shuffled independently of the order. An instance belongs to a
split by the hash of its order alone, so the splits can't share an order, whatever the seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
)
from tasks.ordering_layout import draw_distractors, draw_layout, draw_order, is_small, streams
from tasks.ordering_params import OrderingParams, as_values, checked, parameters
from tasks.ordering_solver import solve_text
from tasks.ordering_targets import TARGETS
from tasks.ordering_text import PRESENTATIONS, Renderer
from tasks.parsing import parse_label
from tasks.relations import relation_named
from tasks.streams import shuffled

CELLS = (("forward", "yes"), ("forward", "no"), ("converse", "yes"), ("converse", "no"))

__all__ = ["CELLS", "PRESENTATIONS", "Ordering", "OrderingParams"]


class Ordering:
    """The ordering family. Stateless; one object serves all calls."""

    name = "ordering"
    version = 2
    answers: Mapping[str, Sequence[str]] = {
        "yes": ("Yes", " Yes", "yes", " yes", "YES", " YES"),
        "no": ("No", " No", "no", " no", "NO", " NO"),
    }

    def parameters(self) -> tuple[Parameter, ...]:
        return parameters()

    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        return as_values(checked(params))

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]:
        """Matched sets without end, or until every order of a small pool has been given.

        Raises:
            TaskError: a bad parameter or split, at the call; an exhausted pool, at the item that can't be drawn.
        """
        found = checked(params)
        if split not in SPLITS:
            raise TaskError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise TaskError(f"bad seed {seed!r}: give an integer of at least 0")
        return self._generate(found, seed, split)

    def _generate(self, params: OrderingParams, seed: int, split: Split) -> Iterator[MatchedSet]:
        n, protocol, pool, source, count = (
            params.n, params.protocol, params.pool(), params.source(), params.distractors(),
        )  # fmt: skip
        renderer = Renderer(
            params.vocabulary(),
            params.presentations,
            n=n,
            distractors=count,
            names_order=params.names_order,
            prompt=params.prompt,
        )
        draws = streams(self.version, split=split, n=n, source=source, seed=seed)
        recorded = as_values(params) | {"names": source if isinstance(source, str) else list(source)}
        del recorded["presentations"]
        given: set[int] | None = set() if is_small(pool, n) else None
        cells: list[tuple[str, str]] = []
        index = 0
        while True:
            if index % len(CELLS) == 0:
                cells = [CELLS[i] for i in shuffled(draws(index // len(CELLS), "cells"), len(CELLS))]
            phrase, gold = cells[index % len(CELLS)]
            item = draws(index, "instance")
            order, key = draw_order(item, n=n, pool=pool, split=split, question=(phrase, gold), given=given)
            layout = draw_layout(item, n, protocol=protocol)
            others = None
            if count:
                others = draw_distractors(
                    draws(index, "distractors"),
                    layout,
                    order,
                    count=count,
                    pool=pool,
                    protocol=protocol,
                    chain_names=params.names_order == "chain",
                )
            latent = {"order": order, "phrase": phrase, "gold": gold}
            instance = Instance(self.name, key, recorded.copy(), latent, gold, f"{phrase}-{gold}", split)
            shown = renderer.presentations(order, layout, others, question=phrase, gold=gold)
            yield MatchedSet(instance, shown)
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
        relation = relation_named(matched.instance.params["relation"])
        return {p.kind: solve_text(p.messages[-1].content, relation) for p in matched.presentations}

    def targets(self) -> Mapping[str, DerivedTarget]:
        return TARGETS
