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

A prompt that asks for reasoning first asks for the answer on a marked last line; ``marked=True`` says so. What comes
before that line is thought: it may open with "Yes, tavu holds", and a line of it with "The answer to this is no". So
where the token limit cut the response, only an explicit format counts, and an answer line only with a colon. An answer
line that offers a choice ("'Answer: Yes' or 'Answer: No'", "Answer: Yes if it holds") is the instruction said again and
never an answer. A response that ended without an explicit format is read as any other.

The rules are frozen under ``PARSER_VERSION``; stored responses can be read again by a later version. Compare how often
each rule fires between presentations: a parser that reads one of them worse fakes a difference in invariance.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tasks.contracts import Parsed
from tasks.parsing_prose import ANY_WORD, Reading, contradiction, prose, read_item, refused
from tasks.parsing_text import Mapped, before_run_on, first_turn, normalised, without_markup, without_thoughts
from tasks.parsing_words import Lexicon, View, declared, lexicon

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

_NOTHING = Reading("unparsed", None, "no_answer")
_TRUNCATED = frozenset({"length", "max_tokens"})
_FILTERED = frozenset({"content_filter", "refusal", "safety"})


def parse_label(
    text: str,
    *,
    labels: Mapping[str, Sequence[str]] = YES_NO,
    finish_reason: str | None = None,
    prompt_opened_think: bool = False,
    marked: bool = False,
) -> Parsed:
    """Read a label from a response. Any string has a result; none raises.

    Args:
        text: the response as the model gave it.
        labels: each canonical label and the words that stand for it, in any case.
        finish_reason: why generation stopped; "length" (or "max_tokens") means that the token limit cut the response.
        prompt_opened_think: the prompt ends in an opening ``<think>``, so the response begins inside a thought.
        marked: the prompt asked for reasoning first and the answer on a marked last line.

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
    reading = _marked(own, answer, words, truncated=truncated) if marked else None
    if reading is None:
        reading = _ladder(own, words, marked=marked) if own else _NOTHING
        if reading.status == "unparsed":
            reading = _settled(_ladder(answer, words, marked=marked), truncated=truncated)
    if reason in _FILTERED and reading.status == "unparsed":
        reading = replace(reading, status="refused", rule="refusal")
    return Parsed(reading.status, reading.value, reading.rule, reading.span)


def _settled(reading: Reading, *, truncated: bool) -> Reading:
    """Withdraw what was read from the end of a response if the token limit cut that end off."""
    if not truncated:
        return reading
    from_the_end = reading.rule in INFERRED or (reading.rule == "hedge" and not reading.opens)
    if reading.status == "unparsed" or from_the_end:
        return Reading("truncated", None, "length")
    return reading


# --- the ladder ------------------------------------------------------------------------------------------------------


def _ladder(answer: Mapped, words: Lexicon, *, marked: bool) -> Reading:
    if not answer.text:
        return Reading("unparsed", None, "empty")
    plain = without_markup(answer)
    view = View(plain.text, words, marked=marked)
    explicit = _explicit(answer, view, plain)
    return explicit or prose(view, plain) or refused(view, plain) or _NOTHING


def _marked(own: Mapped | None, answer: Mapped, words: Lexicon, *, truncated: bool) -> Reading | None:
    """The explicit answer that the prompt asked for; None if there is none and the response may be read as usual.

    It is looked for in all of the response before any other rule gets a turn: the text ahead of a line like "Question:"
    may be thought that only restates the task.
    """
    for part in (own, answer):
        if part is not None and part.text:
            plain = without_markup(part)
            reading = _explicit(part, View(plain.text, words, marked=True), plain)
            if reading is not None and reading.status != "unparsed":
                if truncated and reading.said:
                    break
                return _settled(reading, truncated=truncated)
    return Reading("truncated", None, "length") if truncated else None


def _explicit(answer: Mapped, view: View, plain: Mapped) -> Reading | None:
    """The answer in a requested format. An unparsed one is a closed tag that holds something else."""
    tag = _answer_tag(answer, view.words)
    line = _answer_line(view, plain)
    explicit = [
        reading
        for reading in (tag, line, _boxed(answer, view.words), _json_field(answer, view.words))
        if reading is not None and reading.status != "unparsed"
    ]
    if len({(reading.status, reading.value) for reading in explicit}) > 1:
        spans = [reading.span for reading in explicit if reading.span]
        span = (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None
        return Reading("ambiguous", None, "explicit_conflict", span)
    if not explicit:
        return tag
    return replace(explicit[0], said=all(reading.said for reading in explicit))


def _held(content: Mapped, words: Lexicon, rule: str) -> Reading:
    """Read what a tag, box or field holds, as a response of its own."""
    plain = without_markup(content)
    view = View(plain.text, words)
    reading = _answer_line(view, plain) or prose(view, plain)
    if reading is None:
        return Reading("unparsed", None, rule)
    # What tells why a response is ambiguous, or that it was read from an end that may be cut off, keeps its own rule.
    own = reading.status == "ambiguous" or (rule == "answer_tag_open" and reading.rule in INFERRED)
    return reading if own else replace(reading, rule=rule)


# --- explicit formats ------------------------------------------------------------------------------------------------

_ANSWER_TAG = re.compile(r"<(?P<close>/?)(?:answer|final_answer|final)>|\[(?P<end>/?)answer\]", re.IGNORECASE)


def _answer_tag(answer: Mapped, words: Lexicon) -> Reading | None:
    closed: tuple[int, int] | None = None
    opened: int | None = None
    for tag in _ANSWER_TAG.finditer(answer.text):
        if not (tag["close"] or tag["end"]):
            opened = tag.end()
        elif opened is not None:
            if ANY_WORD.search(answer.text, opened, tag.start()):
                closed = (opened, tag.start())
            opened = None
    if closed is not None:
        return _held(answer.part(*closed), words, "answer_tag")
    if opened is not None and ANY_WORD.search(answer.text, opened):
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
_COLON_BEFORE = re.compile(r"[:=>→][ \n]?[^\w\n]{0,8}\Z")
# "Answer yes or no" is an instruction said again, "Answer: yes or no" is an answer.
_STATES_BEFORE = re.compile(r"(?:[:=>→]|\b(?:is|be))[ \n]?[^\w\n]{0,8}\Z")


def _answer_line(view: View, plain: Mapped) -> Reading | None:
    for item in reversed(view.items):
        before = view.before(item)
        if not view.finished(item) or not _ANSWER_LINE_BEFORE.search(before):
            continue
        if item.kind != "both" or _STATES_BEFORE.search(before):
            found = contradiction(view, plain, item) or read_item(item, plain, "answer_line")
            return replace(found, said=not _COLON_BEFORE.search(before))
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


_BOX = re.compile(r"\\(?:f?box|boxed) ?\{")
_BOX_LIMIT = 400


def _boxed(answer: Mapped, words: Lexicon) -> Reading | None:
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


def _json_field(answer: Mapped, words: Lexicon) -> Reading | None:
    last = _last(_JSON_FIELD, answer.text)
    if last is None or last.lastgroup is None:
        return None
    content = answer.part(*last.span(last.lastgroup)).replace(_JSON_ESCAPE, lambda escape: escape[1])
    return _held(content, words, "json_field")
