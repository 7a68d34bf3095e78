"""Positions: which tokens of a prompt are kept, named by what they mean and not by a number.

Problem. "The last token of premise 17" is another number in each prompt: names are cut into one token or four, chat
templates put a preamble in front, trim what they are given, or repeat it. An index off by one gives activations of a
neighbouring word, which look like any others.

Mechanism. A plan names positions as text:

    answer            the last token of the prompt, where the answer is read
    index:5           a token by number; index:-2 counts from the end
    query             the last token of the span of that name
    query/mean        the mean over the span's tokens
    query/all         every token of the span, a row each, labelled query/0, query/1, …

A span is a run of characters of one message. To find the message in the prompt, the conversation is rendered a second
time with a marker in the message's place. What stands before and after the marker must be what the prompt begins and
ends with; the characters between are then the message, proved and not guessed. A template that repeats the message
shows the marker twice, one that alters it leaves other characters between: both are refused. Only white space trimmed
at either end of a message is allowed for. Tokens belong to a span if they cover one of its characters, white space at
its ends aside, because many tokenizers join a space to the word behind it.

Constraints. Offsets need a fast tokenizer. A span of which no token is left is refused and named. Numbers are those of
the prompt itself; padding is added to them where a batch is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from activations.errors import StoreError
from activations.prompts import Prompt, offsets, render

if TYPE_CHECKING:
    from activations.model import Model

ANSWER = "answer"
TAKES = ("last", "mean", "all")
_MARKERS = tuple(f"\ue000{n}\ue001" for n in range(8))
"""Private-use characters, which no text is expected to hold and no template changes; eight, should one hold some."""


class Span(NamedTuple):
    """Characters ``content[start:end]`` of message number ``message``, under a name."""

    label: str
    start: int
    end: int
    message: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt was made from: its messages, and the spans in them that a plan may name."""

    messages: Sequence[Mapping[str, str]]
    spans: Sequence[tuple[str, int, int, int]] = ()


class Spot(NamedTuple):
    """One row of a store: its label, its token (-1 for a mean), and the tokens it is made of."""

    label: str
    position: int
    tokens: tuple[int, ...]


def canonical(position: str | int) -> str:
    """The one way to write a position; StoreError where it is none."""
    text = str(position).strip()
    name, _, take = text.rpartition("/")
    if not name or take not in TAKES:
        name, take = text, "last"
    if name.removeprefix("-").isdecimal():
        name = f"index:{name}"
    index = name.removeprefix("index:") if name.startswith("index:") else None
    if not name or "/" in name or (index is not None and not index.removeprefix("-").isdecimal()):
        raise StoreError(
            f"position {text!r} is none; give answer, index:N (-1 is the last token), or a span's name, alone for its "
            "last token or with /mean or /all"
        )
    if take != "last" and (name == ANSWER or index is not None):
        raise StoreError(
            f"position {text!r} asks for {take} of a single token; only spans have more: leave /{take} out"
        )
    if index is not None:
        return f"index:{int(index)}"
    return name if take == "last" else f"{name}/{take}"


def needs_spans(positions: Iterable[str]) -> bool:
    """Whether any of these positions is a span."""
    return any(position != ANSWER and not position.startswith("index:") for position in positions)


def resolve(
    model: Model,
    prompts: Sequence[Prompt],
    positions: Sequence[str],
    conversations: Sequence[Conversation] | None = None,
    name: Callable[[int], str] = lambda number: f"prompt {number}",
) -> list[tuple[Spot, ...]]:
    """The rows of each prompt, in the order of the positions; ``name`` says how a message calls a prompt."""
    wanted = [canonical(position) for position in positions]
    if needs_spans(wanted) and conversations is None:
        spans = ", ".join(one for one in wanted if needs_spans([one]))
        raise StoreError(
            f"position {spans} is a span, and no spans were given; give a Conversation with messages and spans for "
            "each prompt, or use answer and index:N"
        )
    if conversations is not None and len(conversations) != len(prompts):
        raise StoreError(f"{len(conversations)} conversations for {len(prompts)} prompts; give one each")
    rows = []
    for number, prompt in enumerate(prompts):
        spots: list[Spot] = []
        finder: _Finder | None = None
        for position in wanted:
            if position == ANSWER:
                spots.append(Spot(position, prompt.answer, (prompt.answer,)))
            elif position.startswith("index:"):
                spots.append(_at_index(position, prompt, name(number)))
            else:
                if finder is None and conversations is not None:
                    finder = _Finder(model.tokenizer, prompt, conversations[number], name(number))
                assert finder is not None
                spots.extend(_of_span(position, finder))
        rows.append(tuple(spots))
    return rows


def _at_index(position: str, prompt: Prompt, called: str) -> Spot:
    index, size = int(position.removeprefix("index:")), len(prompt.ids)
    if not -size <= index < size:
        raise StoreError(f"{called} has no token {index}: it has {size}; give an index from {-size} to {size - 1}")
    token = index % size
    return Spot(position, token, (token,))


def _of_span(position: str, finder: _Finder) -> list[Spot]:
    label, _, take = position.rpartition("/")
    if not label or take not in TAKES:
        label, take = position, "last"
    tokens = finder.tokens(label)
    if take == "all":
        return [Spot(f"{label}/{n}", token, (token,)) for n, token in enumerate(tokens)]
    if take == "mean":
        return [Spot(position, -1, tokens)]
    return [Spot(position, tokens[-1], tokens[-1:])]


class _Finder:
    """Spans of one prompt. Offsets and the places of messages are made once and when they are first needed."""

    def __init__(self, tokenizer: Any, prompt: Prompt, conversation: Conversation, called: str) -> None:
        self.tokenizer, self.prompt, self.conversation, self.called = tokenizer, prompt, conversation, called
        self._offsets: list[tuple[int, int]] | None = None
        self._places: dict[int, tuple[int, int, int]] = {}

    def tokens(self, label: str) -> tuple[int, ...]:
        """The tokens that cover a character of the span."""
        span = self._span(label)
        content = self._content(span)
        text = content[span.start : span.end]
        lead = len(text) - len(text.lstrip())
        first, last = span.start + lead, span.start + len(text.rstrip())
        begin, low, high = self._place(span.message)  # characters low to high of the content stand at begin
        start, end = begin + max(first, low) - low, begin + min(last, high) - low
        if self._offsets is None:
            self._offsets = offsets(self.tokenizer, self.prompt)
        found = tuple(n for n, (one, two) in enumerate(self._offsets) if one < two and one < end and two > start)
        if start >= end or not found:
            raise StoreError(
                f"{self.called}: nothing is left of span {label!r} ({_brief(text)}) after the chat template and the "
                "tokenizer; name another span, or leave this prompt out"
            )
        return found

    def _span(self, label: str) -> Span:
        spans = [Span(*span) for span in self.conversation.spans]
        named = [span for span in spans if span.label == label]
        if len(named) == 1:
            return named[0]
        labels = list(dict.fromkeys(span.label for span in spans))
        if named:
            raise StoreError(f"{self.called} has {len(named)} spans called {label!r}; give each a name of its own")
        near = get_close_matches(label, labels, 3) or labels[:6]
        have = f"it has {', '.join(near)}{', …' if len(labels) > len(near) else ''}" if labels else "it has no spans"
        raise StoreError(f"{self.called} has no span {label!r}; {have}; name a span that every prompt has")

    def _content(self, span: Span) -> str:
        messages = self.conversation.messages
        if not 0 <= span.message < len(messages):
            raise StoreError(
                f"{self.called}: span {span.label!r} is in message {span.message}, and there are {len(messages)}; "
                "messages are counted from 0"
            )
        content = messages[span.message]["content"]
        if not 0 <= span.start < span.end <= len(content):
            raise StoreError(
                f"{self.called}: span {span.label!r} is characters {span.start} to {span.end} of a message of "
                f"{len(content)}; give characters inside the message"
            )
        return content

    def _place(self, number: int) -> tuple[int, int, int]:
        """Where a message stands: (first character in the prompt, first and last character of the content there)."""
        if number not in self._places:
            self._places[number] = self._find(number)
        return self._places[number]

    def _find(self, number: int) -> tuple[int, int, int]:
        text, messages = self.prompt.text, self.conversation.messages
        content = messages[number]["content"]
        marker = next((one for one in _MARKERS if one not in text and one not in content), None)
        if marker is None:
            raise StoreError(f"{self.called} holds every marker that finds spans in it; leave this prompt out")
        marked = [{**message, "content": marker} if n == number else message for n, message in enumerate(messages)]
        parts = render(self.tokenizer, marked).split(marker)
        where = f"{self.called}: message {number} ({_brief(content)})"
        if len(parts) != 2:
            how = "leaves it out" if len(parts) == 1 else f"shows it {len(parts) - 1} times"
            raise StoreError(f"{where} has no single place in the prompt: the chat template {how}; name no span of it")
        before, after = parts
        stop = len(text) - len(after)
        shown = text[len(before) : stop]
        fits = text.startswith(before) and text.endswith(after) and len(before) <= stop
        low = content.find(shown) if shown.strip() else -1
        if not fits or low < 0 or content[:low].strip() or content[low + len(shown) :].strip():
            raise StoreError(
                f"{where} does not stand in the prompt as it is: the chat template alters it, or the prompt was made "
                "from other messages; name no span of it, or give the messages that the prompt was made from"
            )
        return len(before), low, low + len(shown)


def _brief(text: str) -> str:
    return repr(text if len(text) <= 48 else f"{text[:47]}…")
