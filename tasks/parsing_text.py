"""Cleaning a response without losing where each character came from.

A response carries much that is no part of the answer: thinking blocks, markdown, LaTeX, JSON quotes, full-width
letters, zero-width characters. The parser reads a cleaned copy, yet must report the place in the *given* text. So each
cleaning step works on a :class:`Mapped` text, which keeps the original index of every character that survives.

Every pattern here runs in linear time on any input: repetitions are bounded or can't overlap with what follows them,
and runs of white space are collapsed before any pattern looks across a gap. A response is untrusted input.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Mapped:
    """A text and, for each of its characters, the index of the original character it stands for."""

    text: str
    at: Sequence[int]

    @classmethod
    def of(cls, text: str) -> Mapped:
        """The text itself, unchanged."""
        return cls(text, range(len(text)))

    def part(self, start: int, end: int) -> Mapped:
        """Characters ``start`` to ``end``."""
        return Mapped(self.text[start:end], self.at[start:end])

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where characters ``start`` to ``end`` (at least one) lie in the original text."""
        return self.at[start], self.at[end - 1] + 1

    def replace(self, pattern: re.Pattern[str], put: Callable[[re.Match[str]], str]) -> Mapped:
        """Replace each match by ``put(match)``. What is put in stands for the first character of the match."""
        pieces: list[str] = []
        at: list[int] = []
        done = 0
        for match in pattern.finditer(self.text):
            new = put(match)
            pieces += (self.text[done : match.start()], new)
            at += self.at[done : match.start()]
            at += [self.at[match.start()]] * len(new)
            done = match.end()
        if done == 0 and not pieces:
            return self
        pieces.append(self.text[done:])
        at += self.at[done:]
        return Mapped("".join(pieces), at)


# --- thinking blocks -------------------------------------------------------------------------------------------------

_THINK_NAMES = r"(?:seed:)?think(?:ing)?|thoughts?|reasoning|reflection|scratchpad|analysis"
_THINK_TAG = re.compile(
    rf"(?P<open><(?:{_THINK_NAMES})(?:[ \t][^<>/\n]{{0,80}})?>|\[THINK\]|◁think▷|<\|begin_of_thought\|>"
    r"|<\|channel\|>\s{0,4}(?:analysis|commentary)|<\|channel>\s{0,4}thought)"
    rf"|(?P<close></(?:{_THINK_NAMES})\s{{0,4}}>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
    r"|<\|channel\|>\s{0,4}final(?:\s{0,4}<\|message\|>)?|<channel\|>)",
    re.IGNORECASE,
)
# What is left of OpenAI's harmony format once a tokenizer has dropped the special tokens around the channel names.
_BARE_ANALYSIS = re.compile(r"\s*analysis(?=[A-Z])")
_BARE_FINAL = "assistantfinal"


# Most responses have no tag at all; looking for these characters is far cheaper than looking for tags.
_THINK_MARKS = ("<", "[", "◁")


def without_thoughts(text: str, *, prompt_opened_think: bool) -> Mapped | None:
    """The response without its thinking blocks, or None if a block is opened and never closed.

    Blocks don't nest: a tag that opens a block inside a block is part of the thought. A closing tag with no opening one
    ends a thought that began before the response (some chat templates open it in the prompt), so everything ahead of it
    goes. Each block leaves a line break, so that the texts on its two sides don't run together.
    """
    if _BARE_ANALYSIS.match(text):
        final = text.rfind(_BARE_FINAL)
        return None if final < 0 else Mapped.of(text).part(final + len(_BARE_FINAL), len(text))
    if not prompt_opened_think and not any(mark in text for mark in _THINK_MARKS):
        return Mapped.of(text)
    kept: list[tuple[int, int]] = []
    thinking = prompt_opened_think
    start = 0
    for tag in _THINK_TAG.finditer(text):
        if tag.lastgroup == "open":
            if not thinking:
                kept.append((start, tag.start()))
                thinking = True
            continue
        if not thinking:
            kept.clear()
        thinking = False
        start = tag.end()
    if thinking:
        return None
    kept.append((start, len(text)))
    pieces: list[str] = []
    at: list[int] = []
    for first, last in kept:
        if pieces:
            pieces.append("\n")
            at.append(first - 1)
        pieces.append(text[first:last])
        at += range(first, last)
    return Mapped("".join(pieces), at)


# --- characters ------------------------------------------------------------------------------------------------------

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]+")
_LINE_BREAK = re.compile(r"[\n\r\x0b\x0c\x1c-\x1e]")
_SPACE_TO_CHANGE = re.compile(r"\s{2,}|[^\S \n]")
_MAPPED_CHARACTERS = (
    dict.fromkeys("\u2010\u2011\u2212", "-")
    # A long dash parts two phrases ("No—Amy is behind"), a hyphen joins two words ("no-one").
    | dict.fromkeys("\u2012\u2013\u2014\u2015", " - ")
    | dict.fromkeys("‘’‚‛′", "'")
    | dict.fromkeys("“”„‟″«»‹›「」『』", '"')
    | dict.fromkeys("\u0085\u2028\u2029", "\n")
    | {"。": ". ", "、": ", "}
)
# NFKC turns one character into up to 18 (U+FDFA). No label needs such a character.
_LONGEST_EXPANSION = 4


@lru_cache(maxsize=4096)
def _character(character: str) -> str:
    mapped = _MAPPED_CHARACTERS.get(character)
    if mapped is not None:
        return mapped
    category = unicodedata.category(character)
    if category == "Cf" or "\ufe00" <= character <= "\ufe0f":
        return ""
    # A superscript is a footnote mark: NFKC would glue it to the word as a digit.
    if unicodedata.decomposition(character).startswith(("<super>", "<sub>")):
        return ""
    normal = unicodedata.normalize("NFKC", character)
    return normal if len(normal) <= _LONGEST_EXPANSION else character


def collapsed(text: Mapped) -> Mapped:
    """Runs of white space become one line break if they hold one, else one space; none at either end."""
    text = text.replace(_SPACE_TO_CHANGE, lambda run: "\n" if _LINE_BREAK.search(run[0]) else " ")
    start = 0 if not text.text[:1].isspace() else 1
    end = len(text.text) - (1 if text.text[-1:].isspace() else 0)
    return text.part(start, max(start, end))


def normalised(text: Mapped) -> Mapped:
    """NFKC with straight quotes and hyphens; no invisible characters; white space collapsed."""
    if not text.text.isascii():
        text = text.replace(_NOT_ASCII, lambda match: _character(match[0]))
    return collapsed(text.replace(_CONTROL, lambda _: ""))


# --- markup ----------------------------------------------------------------------------------------------------------

_FENCE_LANGUAGES = "text|txt|plaintext|json|markdown|md|python|latex|tex|xml|html|yaml|yml|bash|output|answer"
_INLINE_TAGS = "b|strong|em|i|u|span|font|code|pre|mark|small|big|center|sub|sup|tt"
_BLOCK_TAGS = "br|p|div|li|ul|ol|hr|h[1-6]|table|tr|td|body|html|answer|final_answer|final|response"
_MARKUP = re.compile(
    # Every piece of markup starts with one of these characters; the test keeps plain prose cheap.
    r"(?=[*`$\"{}_'\\<\[∴])(?:"
    r"(?P<key>[\"'](?i:(?:final[_ ]?)?answer)[\"'] ?:)"
    rf"|(?P<gone>```+(?:(?i:{_FENCE_LANGUAGES})(?=\s|\Z))?|[*`$\"{{}}]"
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # emphasis, but not the underscore in some_name
    r"|(?<!\w)'|'(?!\w)"  # a quote mark, but not an apostrophe
    r"|\\(?:boxed|fbox|text[a-z]{0,6}|math[a-z]{0,6}|operatorname|emph|displaystyle)(?![a-zA-Z]) ?"
    r"|\\[()\[\]\"']"
    rf"|</?(?i:{_INLINE_TAGS})(?: [^<>\n]{{0,80}})?>)"
    r"|(?P<negation>\\(?:neg|lnot|not)(?![a-zA-Z]))"
    r"|(?P<therefore>\\therefore(?![a-zA-Z])|∴)"
    r"|(?P<line>\\\\|\\n(?![a-z])"
    rf"|</?(?i:{_BLOCK_TAGS})(?: [^<>\n]{{0,80}})? ?/?>|\[/?(?i:answer|inst)\]"
    r"|<\|[^|<>\n]{1,40}\|>|</?s>|<(?i:bos|eos|pad|start_of_turn|end_of_turn)>)"
    r"|(?P<space>\\[,;:! ]|\\[a-zA-Z]{1,30}))"
)
_MARKUP_BECOMES = {
    "key": " : ",
    "gone": "",
    "negation": "¬",
    "therefore": " therefore ",
    "line": "\n",
    "space": " ",
}


def without_markup(text: Mapped) -> Mapped:
    """Drop markdown, LaTeX, HTML, quote marks and special tokens; keep what they hold.

    Strike-through stays: "~~Yes~~" is a withdrawn answer, and the parser doesn't read a label behind a tilde.
    """
    return collapsed(text.replace(_MARKUP, lambda match: _MARKUP_BECOMES[match.lastgroup or "gone"]))


_END_OF_TURN = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end|return|end_of_text|end_of_turn|end▁of▁sentence)\|>"
    r"|</s>|<end_of_turn>|<eos>"
)
_WORD = re.compile(r"[^\W_]")
# A base model goes on with the next question of its own. The mark must open a line and have text before it.
_RUN_ON = re.compile(
    r"\n[^\w\n]{0,8}(?:q|question|problem|example|exercise|human|user)(?: ?\d{1,3})?[^\w\n:]{0,4}:", re.IGNORECASE
)


def first_turn(text: Mapped) -> Mapped:
    """The text up to the first end-of-turn token that has a word before it."""
    first_word = _WORD.search(text.text)
    end = _END_OF_TURN.search(text.text, first_word.start()) if first_word else None
    return text.part(0, end.start()) if end else text


def before_run_on(text: Mapped) -> Mapped | None:
    """The text before a next question that the model asks itself, or None if there is none."""
    mark = _RUN_ON.search(text.text)
    return text.part(0, mark.start()) if mark else None
