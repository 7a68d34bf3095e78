"""What a family hands to the rest of the package.

A *family* generates latent problems with an exact answer (instances) and renders each one in several matched
presentations. Everything downstream, from scoring to patching, works on these records alone, so a new family needs no
change elsewhere. Three rules keep the records trustworthy:

* an instance is named by the hash of its latent content, never by its place in a file, so that shuffling, limiting or
  resuming a run can't pair the wrong rows;
* a presentation carries its own gold answer, since a presentation may flip it (a negated question);
* reading an answer has a status: text that can't be read is data, not a wrong answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Status = Literal["parsed", "unparsed", "ambiguous", "abstained", "refused", "truncated", "overflow", "error"]


class TaskError(ValueError):
    """A bad family, parameter or item. The message is one line for the user: what, value, allowed, next step."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


class Span(NamedTuple):
    """Characters ``content[start:end]`` of message number ``message`` that a probe or patch may want to look at.

    A tuple, since a long prompt has thousands of them and a frozen dataclass takes three times as long to make.
    """

    label: str
    start: int
    end: int
    message: int = 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One latent problem with its gold answer.

    Attributes:
        family: name of the family.
        key: sha256 of the canonical latent; independent of vocabulary, presentation and position in a file.
        params: the parameters it was generated with.
        latent: the latent content, JSON values only.
        gold: the answer, one of the family's labels.
        cell: stratum of the balanced design.
        split: train, validation or test.
    """

    family: str
    key: str
    params: Mapping[str, Any]
    latent: Mapping[str, Any]
    gold: str
    cell: str
    split: Split


@dataclass(frozen=True, slots=True)
class Presentation:
    """One rendering of an instance: chat messages, the gold answer under this rendering, and named spans."""

    kind: str
    messages: tuple[Message, ...]
    gold: str
    spans: tuple[Span, ...]
    meta: Mapping[str, Any]

    def chat(self) -> list[dict[str, str]]:
        """Messages as the role/content dictionaries that chat templates take."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


@dataclass(frozen=True, slots=True)
class MatchedSet:
    """The presentations of one instance. The first presentation is the original.

    A set may lack a kind that was asked for, where its wording would not be English; it never lacks the original.
    """

    instance: Instance
    presentations: tuple[Presentation, ...]

    def __getitem__(self, kind: str) -> Presentation:
        for presentation in self.presentations:
            if presentation.kind == kind:
                return presentation
        kinds = ", ".join(presentation.kind for presentation in self.presentations)
        raise KeyError(f"no presentation {kind!r} in this set; it has {kinds}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What could be read from a response.

    Attributes:
        status: only ``parsed`` carries a value; every other status says why there is none.
        value: the canonical label, or None.
        rule: name of the rule that decided.
        span: characters of the response that the value was read from, where there is such a place.
    """

    status: Status
    value: str | None
    rule: str
    span: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Grade:
    """Verdict on a parsed response. ``score`` is in [0, 1]; an answer that could not be read is not correct."""

    correct: bool
    score: float
    detail: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a family as ``probe families`` lists it.

    ``takes_list`` says that a list is one value; elsewhere a run reads a list as several settings. ``other_choices`` are
    allowed as well but listed apart, by group: values for a special use.
    """

    name: str
    default: Any
    allowed: str
    choices: tuple[str, ...] | None
    help: str
    takes_list: bool = False
    other_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DerivedTarget:
    """Something beside the gold answer that a probe may be trained to read off a prompt's activations.

    Attributes:
        help: one line that says when the label is 1.
        label: 1 or 0 for a presentation of a set; None where the question makes no sense.
    """

    help: str
    label: Callable[[MatchedSet, Presentation], int | None]


class Family(Protocol):
    """A parameterised problem generator with an exact oracle.

    ``generate`` streams: item *i* is the same however many are asked for. ``verify`` solves a rendered set again by
    reading its text, with an algorithm of its own, and returns the labels it finds by presentation.

    A family may have one method more, ``targets() -> Mapping[str, DerivedTarget]``; see ``tasks.targets``.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def answers(self) -> Mapping[str, Sequence[str]] | None:
        """Label → surface variants to look for at the answer position; None where the answer is not a label."""
        ...

    def parameters(self) -> tuple[Parameter, ...]: ...
    def validate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """All parameters, defaults filled in. Raises TaskError naming a bad one and what is allowed."""
        ...

    def generate(self, params: Mapping[str, Any], *, seed: int, split: Split) -> Iterator[MatchedSet]: ...
    def parse(
        self,
        response: str,
        presentation: Presentation,
        *,
        finish_reason: str | None = None,
        prompt_opened_think: bool = False,
    ) -> Parsed:
        """Read an answer; ``prompt_opened_think`` says that the prompt itself ended by opening a thinking block."""
        ...

    def grade(self, parsed: Parsed, presentation: Presentation) -> Grade: ...
    def verify(self, matched: MatchedSet) -> Mapping[str, str]: ...


@runtime_checkable
class Finite(Protocol):
    """A family with a last set, as a grid of templates and contents has; others draw without end.

    ``generate`` then gives each set once. Its beginnings are balanced over the cells for as long as the smallest of them
    has sets left.
    """

    def cells(self, params: Mapping[str, Any], *, split: Split) -> Mapping[str, int]:
        """How many sets there are of each cell."""
        ...


@runtime_checkable
class Directional(Protocol):
    """A family some of whose presentations flip the gold answer: what is right about the original is wrong about them.

    An answer has to change between the original and such a presentation. As a pair, which has to be asked for, the two are
    scored by that: the answer is turned, yes for no, before it is compared (``experiments.pairing``). What they make
    together are the cells of validity and negation.
    """

    @property
    def flipped(self) -> frozenset[str]:
        """Kinds of presentation whose gold answer is the other one, in every set."""
        ...


def latent_key(family: str, latent: Mapping[str, Any]) -> str:
    """Hash that names an instance: sha256 over the family's name and the canonical JSON of the latent."""
    canonical = json.dumps([family, latent], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
