"""Reading an answer from prose: how a response opens, what its end concludes, whether it hedges or refuses.

These rules come after the explicit formats of :mod:`tasks.parsing`, which says in what order they are asked and what
their names mean. Each gets the cleaned text as a :class:`~tasks.parsing_words.View` and may decline.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tasks.contracts import Status
from tasks.parsing_text import Mapped
from tasks.parsing_words import CONNECTIVE, SENTENCE_END, SENTENCE_LIMIT, Item, View, refusal


@dataclass(frozen=True, slots=True)
class Reading:
    """A result in the making.

    Attributes:
        opens: a hedge that stands at the beginning, so a cut at the end can't change it.
        said: an answer line that is a sentence ("The answer is yes"), which a line of thought can be as well.
    """

    status: Status
    value: str | None
    rule: str
    span: tuple[int, int] | None = None
    opens: bool = False
    said: bool = False


ANY_WORD = re.compile(r"[^\W_]")


def read_item(item: Item, plain: Mapped, rule: str) -> Reading:
    """The reading of an item that a rule has taken as the answer."""
    span = plain.span(item.start, item.end)
    if item.kind == "label":
        return Reading("parsed", item.label, rule, span)
    if item.kind == "both":
        return Reading("ambiguous", None, "both_labels", span)
    return Reading("abstained", None, rule, span)


def prose(view: View, plain: Mapped) -> Reading | None:
    return _first_word(view, plain) or _inferred(view, plain) or _hedge(view, plain)


def refused(view: View, plain: Mapped) -> Reading | None:
    place = refusal(view.text)
    return Reading("refused", None, "refusal", plain.span(*place)) if place else None


# --- the first word --------------------------------------------------------------------------------------------------

_FIRST_WORD = re.compile(r"\w")
# Openers that don't answer, the number or letter of a list, and the question said again.
_PREAMBLE = re.compile(
    r"[^\w\n]{0,20}(?:(?:sure(?: thing)?|okay|ok|well|hmm+|ah|oh|alright|all right|right|great question"
    r"|good question|hello|hi|thanks|thank you|no problem|of course|understood|got it|in (?:this case|short|fact)"
    r"|overall|ultimately|finally)[^\w\s]{1,4}"
    r"|(?:actually|definitely|clearly|obviously|certainly|absolutely)[^\w\s]{0,4}"
    r"|(?:based on|according to|given|from|looking at) [^\n.,?!:]{1,120},"
    r"|assistant ?:?|\(?(?:\d{1,3}|[a-z])[.)]|[^\n?.! ]{1,40} [^\n?.!]{2,300}\?[:)]?)[ \n]"
)


def _first_word(view: View, plain: Mapped) -> Reading | None:
    starts = {item.start: item for item in view.items if item.kind != "hedge"}
    position = 0
    for _ in range(3):
        word = _FIRST_WORD.search(view.text, position)
        if word is None:
            return None
        item = starts.get(word.start())
        if item is not None and view.finished(item):
            return contradiction(view, plain, item) or read_item(item, plain, "first_word")
        preamble = _PREAMBLE.match(view.text, position)
        if preamble is None:
            return None
        position = preamble.end()
    return None


def contradiction(view: View, plain: Mapped, given: Item) -> Reading | None:
    """Another label that is given as an answer behind this one."""
    if given.kind != "label":
        return None
    for item in view.items:
        if item.start < given.end or item.kind != "label" or item.label == given.label:
            continue
        if not view.ends_phrase(item):
            continue
        if view.clause_starts(item) or view.corrects(item) or view.said_to_be_answer(item):
            return Reading("ambiguous", None, "contradicted", plain.span(given.start, item.end))
    return None


# --- what prose implies ----------------------------------------------------------------------------------------------

_CONCLUDES_BEFORE = re.compile(
    r"\b(?:therefore|so|thus|hence|in conclusion|consequently|accordingly|but|then)"
    r"(?:[,:]? (?:it is|it's|that is|that's|we have|clearly|a|my|definitely)){0,2}[,:]? \Z",
)


def _last_sentence_start(text: str) -> int:
    floor = max(0, len(text) - SENTENCE_LIMIT)
    start = floor
    for end in SENTENCE_END.finditer(text, floor):
        if ANY_WORD.search(text, end.end()):
            start = end.end()
    return start


def _inferred(view: View, plain: Mapped) -> Reading | None:
    answers = [item for item in view.items if item.kind != "hedge" and view.finished(item)]
    found = [(item, "answer_phrase") for item in answers if view.said_to_be_answer(item)]
    start = _last_sentence_start(view.text)
    line = view.text.rfind("\n") + 1
    connective = CONNECTIVE.search(view.text, start)
    for item in view.items:
        if item.start < min(start, line) or item.kind != "label" or not view.ends_phrase(item):
            continue
        in_sentence = item.start >= start
        alone = not ANY_WORD.search(view.text, start, item.start) and not ANY_WORD.search(view.text, item.end)
        opens_line = not ANY_WORD.search(view.text, line, item.start)
        concludes = _CONCLUDES_BEFORE.search(view.before(item)) or (
            connective and connective.end() <= item.start and view.clause_starts(item)
        )
        if opens_line or (in_sentence and alone):
            found.append((item, "last_sentence"))
        elif in_sentence and concludes:
            found.append((item, "conclusion"))
    if not found:
        return None
    if len({item.label for item, _ in found}) > 1:
        first = min(item.start for item, _ in found)
        last = max(item.end for item, _ in found)
        return Reading("ambiguous", None, "inferred_conflict", plain.span(first, last))
    # The last answer phrase, else the last conclusion.
    item, rule = next((pair for pair in reversed(found) if pair[1] == "answer_phrase"), found[-1])
    return read_item(item, plain, rule)


def _hedge(view: View, plain: Mapped) -> Reading | None:
    """The first hedge. A single word such as "unknown" counts only in the first and the last sentence."""
    hedges = [item for item in view.items if item.kind == "hedge"]
    if not hedges:
        return None
    first_end = SENTENCE_END.search(view.text)
    last_start = _last_sentence_start(view.text)
    for item in hedges:
        in_first = first_end is None or item.start < first_end.start()
        if not item.weak or in_first or item.start >= last_start:
            opens = (in_first and first_end is not None) or not ANY_WORD.search(view.text, 0, item.start)
            return replace(read_item(item, plain, "hedge"), opens=opens)
    return None
