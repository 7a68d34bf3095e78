"""Targets that modals derives: the two things that the licensed answer is made of.

The licensed answer (the target ``gold``) is yes exactly if the inference is valid and the question affirmative, or
neither: gold is ``validity`` XNOR ``polarity``. Over affirmative questions alone gold *is* validity, and a probe for it
may have learned which templates are valid. Only rows of both polarities tell the three apart.

Both are known from the prompt's words: polarity from how the question begins, and validity, since it belongs to the
template, from anything that tells templates apart. A probe that has seen every template can therefore read validity off
its wording. Hold templates out whole; what is then left to read is what valid templates share beyond their words.

Validity is fixed within a template, so such folds are made of several templates each, and a template is one piece of
evidence, however many names it was asked about.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tasks.contracts import DerivedTarget, MatchedSet, Presentation


def validity(matched: MatchedSet, presentation: Presentation) -> int | None:
    """An instance's own answer is that to the affirmative question."""
    return int(matched.instance.gold == "yes")


def polarity(matched: MatchedSet, presentation: Presentation) -> int | None:
    return int(presentation.meta["polarity"] == "affirmative")


TARGETS: Mapping[str, DerivedTarget] = MappingProxyType(
    {
        "validity": DerivedTarget("the conclusion follows from the premises, however the question is put", validity),
        "polarity": DerivedTarget(
            "the question is affirmative: it asks for the inference, not for its failure", polarity
        ),
    }
)
