"""Targets that ordering derives: the steps to its gold answer, and what a probe could mistake for one.

The question names the two ends of the order. Its gold answer is yes exactly if the question is put in the forward phrase
and names the first end first, or neither: gold is ``forward_question`` XNOR ``front_half``. Both are balanced and
independent of gold and of each other, so a layer that holds one of them says nothing about gold yet.

The others are about the text and not about the order. Where a probe for gold or ``front_half`` works because of the
surface, one of them tells: ``listed_first`` of the names line, ``told_first`` and ``reworded`` of the premises. They
differ between presentations of an instance.

There is none for the second name, which is at the other end, nor for the distance of the two, which is always n − 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from tasks.contracts import DerivedTarget, MatchedSet, Presentation


def front_half(matched: MatchedSet, presentation: Presentation) -> int | None:
    order = matched.instance.latent["order"]
    return int(order.index(_first_named(matched, presentation)) < len(order) / 2)


def forward_question(matched: MatchedSet, presentation: Presentation) -> int | None:
    return int(matched.instance.latent["phrase"] == "forward")


def listed_first(matched: MatchedSet, presentation: Presentation) -> int | None:
    first, second = _named(matched, presentation)
    starts = {span.label: span.start for span in presentation.spans}
    return int(starts[f"name:{first}"] < starts[f"name:{second}"])


def told_first(matched: MatchedSet, presentation: Presentation) -> int | None:
    own, other = _premises(matched, presentation)
    if own == other:  # two entities have one premise between them
        return None
    told = presentation.meta["premises"]
    return int(told.index(own) < told.index(other))


def reworded(matched: MatchedSet, presentation: Presentation) -> int | None:
    count = len(presentation.meta["rewritten"])
    if count in (0, len(matched.instance.latent["order"]) - 1):  # none or all: it tells nothing apart
        return None
    return int(_premises(matched, presentation)[0] in presentation.meta["rewritten"])


TARGETS: Mapping[str, DerivedTarget] = MappingProxyType(
    {
        "front_half": DerivedTarget("the first name in the question is in the front half of the order", front_half),
        "forward_question": DerivedTarget("the question is put in the forward phrase", forward_question),
        "listed_first": DerivedTarget(
            "of the two names in the question, the first one comes first in the list of names", listed_first
        ),
        "told_first": DerivedTarget(
            "the premise about the first name in the question comes before the one about the second", told_first
        ),
        "reworded": DerivedTarget(
            "the premise about the first name in the question is re-worded, where some are and some are not", reworded
        ),
    }
)


def _named(matched: MatchedSet, presentation: Presentation) -> tuple[str, str]:
    """The two names of the question, as its text has them."""
    span = next(span for span in presentation.spans if span.label == "query")
    words = re.findall(r"\w+", presentation.messages[span.message].content[span.start : span.end])
    order = matched.instance.latent["order"]
    ends = {order[0], order[-1]}
    first, second = (word for word in words if word in ends)
    return first, second


def _first_named(matched: MatchedSet, presentation: Presentation) -> str:
    return _named(matched, presentation)[0]


def _premises(matched: MatchedSet, presentation: Presentation) -> tuple[int, int]:
    """The comparison that the first name of the question stands in, and that of the second."""
    last = len(matched.instance.latent["order"]) - 2
    at_front = _first_named(matched, presentation) == matched.instance.latent["order"][0]
    return (0, last) if at_front else (last, 0)
