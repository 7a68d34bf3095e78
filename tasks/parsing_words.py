"""Finding the words of a response that could be an answer, and judging each by its surroundings.

"No" is an answer in "No, Bob is first" and a mere determiner in "No problem" or "no one". Which of the two it is shows
in what stands next to it, so a label word counts only with a neighbour that ends its phrase. Cleaned text is scanned
once for *items*: label words, two labels offered at once ("yes or no"), and hedges ("cannot be determined"). All later
questions look at a window of fixed size around an item, which keeps the work linear in the length of the response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tasks.contracts import TaskError
from tasks.parsing_text import Mapped, normalised

WINDOW = 200

Kind = Literal["label", "both", "hedge"]


@dataclass(frozen=True, slots=True)
class Item:
    """A place where an answer could stand. ``label`` is set for kind ``label`` only."""

    kind: Kind
    start: int
    end: int
    label: str | None
    weak: bool = False


def _lower(text: str) -> str:
    # The dotted capital I is the one character whose lower case is longer than itself; items need the same places.
    return text.replace("\u0130", "I").lower()


# --- the lexicon -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The label words of a task: one pattern that finds them in lower-case text, and the label of each word."""

    pattern: re.Pattern[str]
    labels: Mapping[str, str]


@lru_cache(maxsize=64)
def lexicon(declared: tuple[tuple[str, tuple[str, ...]], ...]) -> Lexicon:
    """Compile ``(label, words)`` pairs.

    Raises:
        TaskError: no labels, an empty word, or a word of two labels.
    """
    if not declared:
        raise TaskError("labels is empty: give at least one label with its words")
    labels: dict[str, str] = {}
    for label, words in declared:
        for given in words:
            word = _lower(normalised(Mapped.of(given)).text)
            if not re.fullmatch(r"\w+(?:[ '-]\w+)*", word):
                raise TaskError(f"bad word {given!r} of label {label!r}: use words of letters or digits")
            if labels.setdefault(word, label) != label:
                raise TaskError(f"word {given!r} stands for both {labels[word]!r} and {label!r}: give it one label")
    longest_first = sorted(labels, key=len, reverse=True)
    words_pattern = "|".join(re.escape(word) for word in longest_first)
    # What follows must not make a longer word of it: an accent, an apostrophe, a hyphen or slash with a word behind it
    # ("no-one", "yes/maybe"), unless that is a label too.
    pattern = re.compile(rf"\b(?:{words_pattern})(?![\w\u0300-\u036f]|'\w|[-/](?!(?:{words_pattern})\b)\w)")
    return Lexicon(pattern, labels)


def declared(labels: Mapping[str, Sequence[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The labels in a form that :func:`lexicon` can keep compiled."""
    for label, words in labels.items():
        if isinstance(words, str) or not words:
            raise TaskError(f"words of label {label!r} are {words!r}: give a list with at least one word")
    return tuple((label, tuple(words)) for label, words in labels.items())


# --- hedges and refusals ---------------------------------------------------------------------------------------------

_KNOWING = (
    r"determined?|decided?|deduced?|concluded?|infer(?:red)?|establish(?:ed)?|ascertain(?:ed)?|verif(?:y|ied)"
    r"|know|known|tell|say|certain|sure"
)
_INFORMATION = r"(?:information|info|data|evidence|context|details|facts|premises|clues)"
_HEDGE = re.compile(
    r"\b(?:(?P<strong>"
    r"(?:can(?: ?not|'t)|could(?: not|n't)|not possible to|impossible to|unable to|not able to|no way (?:of|to))"
    rf"(?: be| (?:definitively|conclusively|logically|reliably|really|possible to)){{0,2}} (?:{_KNOWING})"
    r"|not necessarily|undetermined|indeterminate|undecidable|inconclusive"
    rf"|(?:not|no|(?:is|are|do|does|did)n't) (?:have )?(?:enough|sufficient) {_INFORMATION}"
    rf"|insufficient(?: {_INFORMATION})?|do(?: not|n't) know|not (?:entirely )?(?:sure|certain)"
    r"|(?:it|that) depends)"
    r"|(?P<weak>unknown|unclear|uncertain|unsure|unknowable|maybe|perhaps|possibly|ambiguous|depends))\b"
)
# A weak hedge is about the answer if its phrase ends or goes on like this; not in "unknown to Bob".
_HEDGE_GOES_ON = re.compile(r" (?:whether|if|who|which|on|from|given|based|because|since|as)\b")
_REFUSAL = re.compile(
    r"\b(?:i (?:can(?: ?not|'t)|am (?:unable|not able) to|won't|will not|must decline|decline to|refuse to)"
    r"|i'm (?:unable|not able) to)(?: \w{1,15}){0,3}? "
    r"(?:help|assist|answer|comply|respond|provide|continue|fulfill|engage|discuss|do (?:that|this))\b"
    r"|\bas (?:an ai|a language model)\b|\bi must decline\b"
    r"|\bagainst my (?:guidelines|policy|policies|programming)\b"
)
_REFUSAL_WITHIN = 400


def refusal(text: str) -> tuple[int, int] | None:
    """Where the text refuses to answer, near its beginning."""
    match = _REFUSAL.search(text, 0, _REFUSAL_WITHIN)
    return match.span() if match else None


# --- what follows an item --------------------------------------------------------------------------------------------

# A phrase ends here: end of text or line, or punctuation that isn't (part of) a question mark.
_PHRASE_END = re.compile(r" ?(?:\Z|\n|(?![^\w\s]{0,4}\?)[^\w\s'])")
_QUESTION = re.compile(r" ?[^\w\s]{0,4}\?")
# "No. 3" is a number, not an answer.
_NUMERO = re.compile(r"\. ?\d")
# Words that go on after a finished answer ("No it isn't") and never follow a determiner or an adjective.
_GOES_ON = re.compile(r" (?:it|they|he|she|we|you|i|this|that|these|those|the|there|because|since|as|but)\b")
# Interjections are never determiners: "Yes Amy is in front" answers, "No Amy is in front" might not.
_INTERJECTIONS = frozenset({"yes", "yeah", "yep", "yup", "nope", "nah"})
_BETWEEN_LABELS = re.compile(
    r" ?(?P<sign>[/|&,;+-]?) ?(?P<word>(?:(?:or|and/or|nor|vs\.?|versus|and|but|also|maybe|then) ){0,2})"
)


# --- what precedes an item -------------------------------------------------------------------------------------------

_PHRASE_BEFORE = re.compile(
    r"\b(?:(?:answer|verdict|conclusion|statement|claim|argument|inference|response|reply)"
    r"(?: to [^\n]{0,150}?)?(?: \([^()\n]{0,40}\))?"
    r"(?:'s| (?:is|would be|must be|should be|has to be|will be)| ?[:=]| ?[-=]>)"
    r"(?: (?:therefore|thus|hence|simply|clearly|definitely|indeed|also|then|a|an|both|either)){0,2}"
    r"|(?:i'd|i would|i'll|i will|i) (?:say|answer|respond|reply|go with|conclude)(?: with)?"
    r"|(?:it is|it's|that is|that's|this is) an?(?: (?:clear|definite|definitive|firm|resounding))?"
    r")[:,]? ?\Z",
)
# A sentence with one of these says what would be, or what isn't said: "does not mean that the answer is no".
_CONDITION = re.compile(
    r"\b(?:if|unless|whether|suppose|supposing|assume|assuming|might|may|not that)\b"
    r"|(?:\bnot|n't|\bcannot|\b(?:wrong|incorrect|false) to) (?:say|claim|conclude|mean|think|imply)\b"
)
CONNECTIVE = re.compile(r"\b(?:therefore|so|thus|hence|conclusion|consequently|accordingly)\b(?! far\b)")
SENTENCE_END = re.compile(r"[.!?](?=[ \n]|\Z)|\n")
SENTENCE_LIMIT = 1000
_CORRECTION_BEFORE = re.compile(
    r"\b(?:actually|rather|wait|mean|meant|sorry|correction|instead|but|so|hence|thus|therefore|or|maybe|perhaps)"
    r"[,:.]? \Z",
)


# "Answer: Yes or Answer: No", "Answer: Yes if it holds": what an answer line is to look like, not an answer.
_ANSWER_COLON = r"\banswer ?[:=] ?[^\w\n]{0,8}\Z"
_CHOICE_AHEAD = re.compile(rf"(?:\bor|/)[ \n]?[^\w\n]{{0,8}}(?:final )?{_ANSWER_COLON}")
_CHOICE_BEHIND = re.compile(r"[^\w\s,.;:!?]{0,2} (?:only )?(?:(?:or|if|when|whenever|unless|otherwise)\b|/)")
_IN_ANSWER_LINE = re.compile(_ANSWER_COLON)


class View:
    """A cleaned text in lower case with its items, and the questions that the rules ask about them.

    Lower case is written once here, so that no pattern has to ignore case, which costs several times as much. With
    ``marked`` the prompt has asked for an answer line, and places where the response only repeats that are no items.
    """

    def __init__(self, text: str, words: Lexicon, *, marked: bool = False) -> None:
        self.text = text = _lower(text)
        self.words = words
        labels = self._pairs_joined(self._labels())
        if marked:
            labels = [item for item in labels if not self._offers(item)]
        solid = {position for item in labels if self.finished(item) for position in range(item.start, item.end)}
        hedges = [
            Item("hedge", match.start(), match.end(), None, match.lastgroup == "weak")
            for match in _HEDGE.finditer(text)
            if match.start() not in solid and match.end() - 1 not in solid and self._hedges(match)
        ]
        self.items = sorted(labels + hedges, key=lambda item: item.start)

    def _offers(self, item: Item) -> bool:
        """Whether the item is one side of a choice between answer lines."""
        before = self.before(item)
        if item.kind != "label" or not _IN_ANSWER_LINE.search(before):
            return False
        return bool(_CHOICE_BEHIND.match(self.text, item.end) or _CHOICE_AHEAD.search(before))

    def _hedges(self, match: re.Match[str]) -> bool:
        if match.lastgroup == "strong" or _PHRASE_END.match(self.text, match.end()):
            return True
        opens = not any(character.isalnum() for character in self.text[max(0, match.start() - WINDOW) : match.start()])
        return opens or _HEDGE_GOES_ON.match(self.text, match.end()) is not None

    def _labels(self) -> list[Item]:
        found: list[Item] = []
        for match in self.words.pattern.finditer(self.text):
            start = match.start()
            tail = self.text[max(0, start - 2) : start]
            # "un-no" and "d'no" are words of their own; in "yes-no" the hyphen parts two labels.
            glued = (
                len(tail) == 2 and tail[0].isalnum() and tail[1] in "-'" and not (found and found[-1].end == start - 1)
            )
            negated = tail.rstrip(" ")[-1:] in ("¬", "~", "≠")
            accented = "\u0300" <= tail[-1:] <= "\u036f"
            if not (glued or negated or accented):
                found.append(Item("label", start, match.end(), self.words.labels[match[0]]))
        return found

    def _pairs_joined(self, labels: list[Item]) -> list[Item]:
        """Different labels offered side by side ("Yes/No", "yes or no") become one item of kind ``both``."""
        joined: list[Item] = []
        run: list[Item] = []
        for item in reversed(labels):
            if run and not self._side_by_side(item, run[-1], in_list=len(run) > 1):
                joined += self._merged(run)
                run = []
            run.append(item)
        return joined + self._merged(run)

    @staticmethod
    def _merged(run: list[Item]) -> list[Item]:
        if len({item.label for item in run}) < 2:
            return run
        return [Item("both", run[-1].start, run[0].end, None)]

    def _side_by_side(self, first: Item, second: Item, *, in_list: bool) -> bool:
        if second.start - first.end > 16:
            return False
        gap = _BETWEEN_LABELS.fullmatch(self.text, first.end, second.start)
        if gap is None:
            return False
        # "yes or no question" offers both; "yes, no one" doesn't: there the second label must end its phrase or list.
        offered = gap["sign"] in ("/", "|") or gap["word"].startswith(("or", "nor", "and/or", "vs", "versus"))
        return offered or in_list or self.ends_phrase(second)

    def ends_phrase(self, item: Item) -> bool:
        """Whether nothing more of its phrase follows the item, and no question mark."""
        if self.text[item.start : item.end] == "no" and _NUMERO.match(self.text, item.end):
            return False
        return _PHRASE_END.match(self.text, item.end) is not None

    def finished(self, item: Item) -> bool:
        """Whether the item can be a whole answer, judged by what follows: its phrase ends, or a new one starts."""
        if item.kind == "hedge" or self.ends_phrase(item):
            return True
        if item.kind == "both":
            return False
        word = self.text[item.start : item.end]
        if word in _INTERJECTIONS:
            return _QUESTION.match(self.text, item.end) is None
        if _GOES_ON.match(self.text, item.end):
            return True
        return (
            self.text[item.end : item.end + 1] == " " and self.words.pattern.match(self.text, item.end + 1) is not None
        )

    def before(self, item: Item) -> str:
        """Text ahead of the item, at most a window; the beginning of the text looks like a new line."""
        start = item.start - WINDOW
        return "\n" + self.text[: item.start] if start <= 0 else self.text[start : item.start]

    def clause_starts(self, item: Item) -> bool:
        """Whether the item opens a clause: at the beginning, or behind punctuation."""
        before = self.before(item).rstrip(" ")
        return not before[-1].isalnum() and before[-1] not in "'_%"

    def said_to_be_answer(self, item: Item) -> bool:
        """Whether prose says that the item is the answer, neither under a condition nor as a question."""
        before = self.before(item)
        if not _PHRASE_BEFORE.search(before):
            return False
        sentence_end = SENTENCE_END.search(self.text, item.end, item.end + SENTENCE_LIMIT)
        if sentence_end and sentence_end[0] == "?":
            return False
        *_, start = [0] + [end.end() for end in SENTENCE_END.finditer(before)]
        conditions = list(_CONDITION.finditer(before, start))
        # "If A stands before B, so does C, so the answer is yes": the connective ends the condition.
        return not conditions or CONNECTIVE.search(before, conditions[-1].end()) is not None

    def corrects(self, item: Item) -> bool:
        """Whether the item follows a word that takes back what was said ("wait no", "or rather yes")."""
        return _CORRECTION_BEFORE.search(self.before(item)) is not None
