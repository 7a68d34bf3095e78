"""Reading a label from a free-text response.

A model that is right must not be scored wrong because of how it wrote the answer, and a guess must not be scored as an
answer. So a response goes down a ladder of named rules, from an explicit answer in a requested format to what prose
implies, and every rule may decline. A response that no rule can read keeps a status that says why. Two habits are
avoided since they turn "Not necessarily" and "There is no way to know" into "no": testing the first letters, and
looking for a bare label word in prose.

=========================  ============  ===========================================================================
rule                       status        decides when
=========================  ============  ===========================================================================
``unclosed_think``         unparsed      a thinking block never ends (truncated if the token limit cut it)
``answer_tag``             parsed        last closed ``<answer>`` tag; unparsed if it holds something else
``answer_tag_open``        parsed        a last ``<answer>`` tag that a stop string left open
``answer_line``            parsed        last line like ``Answer: yes`` or ``The final answer is yes``
``boxed``                  parsed        last ``\\boxed{}``
``json_field``             parsed        last JSON field ``"answer"``
``explicit_conflict``      ambiguous     two of these formats disagree
``first_word``             parsed        the response opens with the label
``contradicted``           ambiguous     it does, or an answer line does, and the other label is given as answer later
``answer_phrase``          parsed        prose says "the answer is yes", "I would say yes"
``conclusion``             parsed        the last sentence concludes: "So, no."
``last_sentence``          parsed        the last sentence is the label, or the last line opens with it
``inferred_conflict``      ambiguous     two of the last three disagree
``both_labels``            ambiguous     the answer given is "yes/no", "yes and no"
``hedge``                  abstained     the response says that it can't be told
``refusal``                refused       the response declines to answer (or a content filter stopped it)
``empty``, ``no_answer``   unparsed      nothing, or nothing that can be read
``length``                 truncated     nothing can be read and the token limit cut the response
=========================  ============  ===========================================================================

A rule that reads an explicit format may also abstain. Rules that read the end of a response (``INFERRED``) don't count
when the token limit cut that end off; a direct answer at the beginning does.

The rules are frozen under ``PARSER_VERSION``; stored responses can be read again by a later version. Compare how often
each rule fires between presentations: a parser that reads one of them worse fakes a difference in invariance.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tasks.contracts import Parsed, Status
from tasks.parsing_text import Mapped, before_run_on, first_turn, normalised, without_markup, without_thoughts
from tasks.parsing_words import (
    CONNECTIVE,
    SENTENCE_END,
    SENTENCE_LIMIT,
    Item,
    Lexicon,
    View,
    declared,
    lexicon,
    refusal,
)

PARSER_VERSION = 1

YES_NO: Mapping[str, Sequence[str]] = MappingProxyType(
    {"yes": ("yes", "yeah", "yep", "yup"), "no": ("no", "nope", "nah")}
)

INFERRED = frozenset({"answer_phrase", "conclusion", "last_sentence"})
RULES: tuple[str, ...] = (
    "unclosed_think", "answer_tag", "answer_tag_open", "answer_line", "boxed", "json_field", "explicit_conflict",
    "first_word", "contradicted", "answer_phrase", "conclusion", "last_sentence", "inferred_conflict", "both_labels",
    "hedge", "refusal", "empty", "no_answer", "length",
)  # fmt: skip

_TRUNCATED = frozenset({"length", "max_tokens"})
_FILTERED = frozenset({"content_filter", "refusal", "safety"})


def parse_label(
    text: str,
    *,
    labels: Mapping[str, Sequence[str]] = YES_NO,
    finish_reason: str | None = None,
    prompt_opened_think: bool = False,
) -> Parsed:
    """Read a label from a response. Any string has a result; none raises.

    Args:
        text: the response as the model gave it.
        labels: each canonical label and the words that stand for it, in any case.
        finish_reason: why generation stopped; "length" (or "max_tokens") means that the token limit cut the response.
        prompt_opened_think: the prompt ends in an opening ``<think>``, so the response begins inside a thought.

    Returns:
        The canonical label if the status is ``parsed``. The span points into ``text``: to the label word, to the words
        that hedge or refuse, or to everything between two labels that contradict each other.

    Raises:
        TaskError: ``labels`` is unusable (empty, or one word for two labels).
    """
    words = lexicon(declared(labels))
    reason = (finish_reason or "").lower()
    truncated = reason in _TRUNCATED
    answer = without_thoughts(text, prompt_opened_think=prompt_opened_think)
    if answer is None:
        return Parsed("truncated" if truncated else "unparsed", None, "unclosed_think", None)
    answer = first_turn(normalised(answer))
    own = before_run_on(answer)
    reading = _ladder(own, words) if own else _NOTHING
    if reading.status == "unparsed":
        reading = _settled(_ladder(answer, words), truncated=truncated)
    if reason in _FILTERED and reading.status == "unparsed":
        reading = replace(reading, status="refused", rule="refusal")
    return Parsed(reading.status, reading.value, reading.rule, reading.span)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A result in the making. ``opens``: a hedge that stands at the beginning, so a cut at the end can't change it."""

    status: Status
    value: str | None
    rule: str
    span: tuple[int, int] | None = None
    opens: bool = False


_NOTHING = _Reading("unparsed", None, "no_answer")


def _settled(reading: _Reading, *, truncated: bool) -> _Reading:
    """Withdraw what was read from the end of a response if the token limit cut that end off."""
    if not truncated:
        return reading
    from_the_end = reading.rule in INFERRED or (reading.rule == "hedge" and not reading.opens)
    if reading.status == "unparsed" or from_the_end:
        return _Reading("truncated", None, "length")
    return reading


# --- the ladder ------------------------------------------------------------------------------------------------------


def _ladder(answer: Mapped, words: Lexicon) -> _Reading:
    if not answer.text:
        return _Reading("unparsed", None, "empty")
    plain = without_markup(answer)
    view = View(plain.text, words)
    tag = _answer_tag(answer, words)
    explicit = [
        reading
        for reading in (tag, _answer_line(view, plain), _boxed(answer, words), _json_field(answer, words))
        if reading is not None and reading.status != "unparsed"
    ]
    if len({(reading.status, reading.value) for reading in explicit}) > 1:
        spans = [reading.span for reading in explicit if reading.span]
        span = (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None
        return _Reading("ambiguous", None, "explicit_conflict", span)
    if explicit:
        return explicit[0]
    if tag is not None:
        return tag
    return _prose(view, plain) or _refusal(view, plain) or _NOTHING


def _prose(view: View, plain: Mapped) -> _Reading | None:
    return _first_word(view, plain) or _inferred(view, plain) or _hedge(view, plain)


def _refusal(view: View, plain: Mapped) -> _Reading | None:
    place = refusal(view.text)
    return _Reading("refused", None, "refusal", plain.span(*place)) if place else None


def _held(content: Mapped, words: Lexicon, rule: str) -> _Reading:
    """Read what a tag, box or field holds, as a response of its own."""
    plain = without_markup(content)
    view = View(plain.text, words)
    reading = _answer_line(view, plain) or _prose(view, plain)
    if reading is None:
        return _Reading("unparsed", None, rule)
    # What tells why a response is ambiguous, or that it was read from an end that may be cut off, keeps its own rule.
    own = reading.status == "ambiguous" or (rule == "answer_tag_open" and reading.rule in INFERRED)
    return reading if own else replace(reading, rule=rule)


def _item(item: Item, plain: Mapped, rule: str) -> _Reading:
    """The reading of an item that a rule has taken as the answer."""
    span = plain.span(item.start, item.end)
    if item.kind == "label":
        return _Reading("parsed", item.label, rule, span)
    if item.kind == "both":
        return _Reading("ambiguous", None, "both_labels", span)
    return _Reading("abstained", None, rule, span)


# --- explicit formats ------------------------------------------------------------------------------------------------

_ANSWER_TAG = re.compile(r"<(?P<close>/?)(?:answer|final_answer|final)>|\[(?P<end>/?)answer\]", re.IGNORECASE)
_ANY_WORD = re.compile(r"[^\W_]")


def _answer_tag(answer: Mapped, words: Lexicon) -> _Reading | None:
    closed: tuple[int, int] | None = None
    opened: int | None = None
    for tag in _ANSWER_TAG.finditer(answer.text):
        if not (tag["close"] or tag["end"]):
            opened = tag.end()
        elif opened is not None:
            if _ANY_WORD.search(answer.text, opened, tag.start()):
                closed = (opened, tag.start())
            opened = None
    if closed is not None:
        return _held(answer.part(*closed), words, "answer_tag")
    if opened is not None and _ANY_WORD.search(answer.text, opened):
        return _held(answer.part(opened, len(answer.text)), words, "answer_tag_open")
    return None


# "Answer: yes", with at most a short remark ahead of the colon, opens a line or sentence. "The answer is yes" and
# "Answer yes" must open a line: inside a line they are prose.
_ANSWER_LINE_BEFORE = re.compile(
    r"(?:(?P<line>\n)|[.!?;] )[^\w\n]{0,20}(?:(?:\d{1,3}|[a-z])[.)] )?[^\w\n]{0,8}"
    r"(?:(?:the|my|our|so|and) ){0,2}(?:(?:final|correct|short|right|direct|overall) )?"
    r"(?:(?:answer|ans)(?:(?: to [^\n]{0,150}?|[^\n.?!:=]{0,80}?) ?(?:[:=]|[-=]>|→)"
    r"|(?(line)(?: to [^\n]{0,150}?)?(?:'s| is| would be| must be)|(?!))|(?(line)|(?!)))"
    r"|(?:a|final|response|verdict|conclusion|output|prediction|label|decision|judge?ment|solution|assistant) ?[:=])"
    r"[ \n]?[^\w\n]{0,8}\Z"
)
# "Answer yes or no" is an instruction said again, "Answer: yes or no" is an answer.
_STATES_BEFORE = re.compile(r"(?:[:=>→]|\b(?:is|be))[ \n]?[^\w\n]{0,8}\Z")


def _answer_line(view: View, plain: Mapped) -> _Reading | None:
    for item in reversed(view.items):
        before = view.before(item)
        if not view.finished(item) or not _ANSWER_LINE_BEFORE.search(before):
            continue
        if item.kind != "both" or _STATES_BEFORE.search(before):
            return _contradiction(view, plain, item) or _item(item, plain, "answer_line")
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


_BOX = re.compile(r"\\(?:f?box|boxed) ?\{")
_BOX_LIMIT = 400


def _boxed(answer: Mapped, words: Lexicon) -> _Reading | None:
    last = _last(_BOX, answer.text)
    if last is None:
        return None
    depth = 1
    end = last.end()
    for end in range(last.end(), min(len(answer.text), last.end() + _BOX_LIMIT)):
        depth += {"{": 1, "}": -1}.get(answer.text[end], 0)
        if depth == 0:
            return _held(answer.part(last.end(), end), words, "boxed")
    return None


# Two quote marks: curly ones inside the string have been made straight.
_JSON_FIELD = re.compile(
    r"[\"'](?:final[_ ]?)?answer[\"'] ?: ?\[?"
    r"(?:\"{1,2}(?P<double>(?:[^\"\\\n]|\\.){1,400})|'{1,2}(?P<single>(?:[^'\\\n]|\\.){1,400})|(?P<bare>\w{1,40}))",
    re.IGNORECASE,
)

_JSON_ESCAPE = re.compile(r"\\([\"'\\/])")


def _json_field(answer: Mapped, words: Lexicon) -> _Reading | None:
    last = _last(_JSON_FIELD, answer.text)
    if last is None or last.lastgroup is None:
        return None
    content = answer.part(*last.span(last.lastgroup)).replace(_JSON_ESCAPE, lambda escape: escape[1])
    return _held(content, words, "json_field")


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


def _first_word(view: View, plain: Mapped) -> _Reading | None:
    starts = {item.start: item for item in view.items if item.kind != "hedge"}
    position = 0
    for _ in range(3):
        word = _FIRST_WORD.search(view.text, position)
        if word is None:
            return None
        item = starts.get(word.start())
        if item is not None and view.finished(item):
            return _contradiction(view, plain, item) or _item(item, plain, "first_word")
        preamble = _PREAMBLE.match(view.text, position)
        if preamble is None:
            return None
        position = preamble.end()
    return None


def _contradiction(view: View, plain: Mapped, given: Item) -> _Reading | None:
    """Another label that is given as an answer behind this one."""
    if given.kind != "label":
        return None
    for item in view.items:
        if item.start < given.end or item.kind != "label" or item.label == given.label:
            continue
        if not view.ends_phrase(item):
            continue
        if view.clause_starts(item) or view.corrects(item) or view.said_to_be_answer(item):
            return _Reading("ambiguous", None, "contradicted", plain.span(given.start, item.end))
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
        if _ANY_WORD.search(text, end.end()):
            start = end.end()
    return start


def _inferred(view: View, plain: Mapped) -> _Reading | None:
    answers = [item for item in view.items if item.kind != "hedge" and view.finished(item)]
    found = [(item, "answer_phrase") for item in answers if view.said_to_be_answer(item)]
    start = _last_sentence_start(view.text)
    line = view.text.rfind("\n") + 1
    connective = CONNECTIVE.search(view.text, start)
    for item in view.items:
        if item.start < min(start, line) or item.kind != "label" or not view.ends_phrase(item):
            continue
        in_sentence = item.start >= start
        alone = not _ANY_WORD.search(view.text, start, item.start) and not _ANY_WORD.search(view.text, item.end)
        opens_line = not _ANY_WORD.search(view.text, line, item.start)
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
        return _Reading("ambiguous", None, "inferred_conflict", plain.span(first, last))
    # The last answer phrase, else the last conclusion.
    item, rule = next((pair for pair in reversed(found) if pair[1] == "answer_phrase"), found[-1])
    return _item(item, plain, rule)


def _hedge(view: View, plain: Mapped) -> _Reading | None:
    """The first hedge. A single word such as "unknown" counts only in the first and the last sentence."""
    hedges = [item for item in view.items if item.kind == "hedge"]
    if not hedges:
        return None
    first_end = SENTENCE_END.search(view.text)
    last_start = _last_sentence_start(view.text)
    for item in hedges:
        in_first = first_end is None or item.start < first_end.start()
        if not item.weak or in_first or item.start >= last_start:
            opens = (in_first and first_end is not None) or not _ANY_WORD.search(view.text, 0, item.start)
            return replace(_item(item, plain, "hedge"), opens=opens)
    return None
