"""The label parser: a golden corpus, decorations that must not change an answer, noise, and hostile input.

``data/parser_golden.jsonl`` holds one hand-labelled response a line: the text, how the call is made (``finish_reason``,
``prompt_opened_think``, ``labels`` where they aren't the defaults), and the expected status, value and rule.
"""

from __future__ import annotations

import json
import random
import re
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks.parsing
from tasks.contracts import Parsed, Status, TaskError
from tasks.parsing import INFERRED, PARSER_VERSION, RULES, YES_NO, parse_label

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "parser_golden.jsonl").read_text(encoding="utf-8").splitlines()
]
CALL = ("finish_reason", "prompt_opened_think", "labels")


def call(entry: dict[str, Any]) -> Parsed:
    return parse_label(entry["text"], **{key: entry[key] for key in CALL if key in entry})


# --- the golden corpus -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", GOLDEN, ids=[f"{number}-{entry['group']}" for number, entry in enumerate(GOLDEN, 1)])
def test_golden(entry: dict[str, Any]) -> None:
    parsed = call(entry)
    assert (parsed.status, parsed.value, parsed.rule) == (entry["status"], entry["value"], entry["rule"])


def test_golden_corpus_is_large_distinct_and_covers_every_rule() -> None:
    calls = {json.dumps([entry["text"], *(entry.get(key) for key in CALL)]) for entry in GOLDEN}
    assert len(calls) == len(GOLDEN) >= 200
    assert {entry["rule"] for entry in GOLDEN} == set(RULES)


def test_golden_spans_show_the_label_word_in_the_given_text() -> None:
    for entry in GOLDEN:
        parsed = call(entry)
        if parsed.status != "parsed":
            continue
        assert parsed.span is not None
        shown = entry["text"][slice(*parsed.span)]
        letters = re.sub(r"[^\w' ]", "", unicodedata.normalize("NFKC", shown)).replace("İ", "I").lower()
        words = entry.get("labels", YES_NO)[parsed.value]
        assert letters in [word.lower() for word in words], (entry["text"], shown)


def test_no_status_but_parsed_carries_a_value() -> None:
    for entry in GOLDEN:
        parsed = call(entry)
        assert (parsed.value is not None) == (parsed.status == "parsed")


def test_every_rule_is_explained() -> None:
    assert tasks.parsing.__doc__ is not None
    for rule in RULES:
        assert f"``{rule}``" in tasks.parsing.__doc__
    assert set(RULES) >= INFERRED


def test_parser_version_pins_the_corpus() -> None:
    # A change that moves any golden result is a new version of the parser.
    assert PARSER_VERSION == 1


# --- decorations -----------------------------------------------------------------------------------------------------

Decoration = Callable[[str], str]


def opposite(word: str) -> str:
    return "no" if word.lower() == "yes" else "yes"


def full_width(word: str) -> str:
    return "".join(chr(ord(letter) + 0xFEE0) if letter.isalpha() else letter for letter in word)


# Around the bare word; each result still stands for the word.
INNER: dict[str, Decoration] = {
    "plain": lambda word: word,
    "upper case": str.upper,
    "full stop": lambda word: word + ".",
    "exclamation": lambda word: word + "!",
    "bold": lambda word: f"**{word}**",
    "italics": lambda word: f"_{word}_",
    "code": lambda word: f"`{word}`",
    "straight quotes": lambda word: f'"{word}"',
    "curly quotes": lambda word: f"“{word}”",
    "single quotes": lambda word: f"‘{word}’",
    "html": lambda word: f"<strong>{word}</strong>",
    "latex text": lambda word: rf"$\text{{{word}}}$",
    "full width": full_width,
    "zero width": lambda word: word[0] + "\u200b" + word[1:],
    "brackets": lambda word: f"({word})",
}
# Around a whole answer.
OUTER: dict[str, Decoration] = {
    "reason": lambda word: f"{word}, because Amy stands there.",
    "explanation": lambda word: f"{word}\n\nExplanation: no one stands between Amy and Bob, yes-men included.",
    "answer line": lambda word: f"Answer: {word}",
    "bold answer line": lambda word: f"**Final answer:** {word}",
    "full-width colon": lambda word: f"Answer： {word}",
    "the answer is": lambda word: f"The answer is {word}",
    "therefore": lambda word: f"Bob is second. Therefore, the answer is {word}",
    "last line": lambda word: f"Amy is first.\nBob is second.\n\n{word}",
    "answer tag": lambda word: f"<answer>{word}</answer>",
    "box": lambda word: rf"\boxed{{{word}}}",
    "json": lambda word: json.dumps({"reason": f"{opposite(word)} one said", "answer": word}, ensure_ascii=False),
    "fence": lambda word: f"```text\n{word}\n```",
    "list": lambda word: f"1. {word}",
    "quoted block": lambda word: f"> {word}",
    "heading": lambda word: f"## {word}",
    "thinking": lambda word: f"<think>Is it {opposite(word)}? Surely {opposite(word)}.</think>\n\n{word}",
    "question": lambda word: f"Is Amy in front of Bob? {word}",
    "end of turn": lambda word: f"{word}<|im_end|>\n<|im_start|>user\n{opposite(word)}",
    "next question": lambda word: f"{word}\n\nQ: Is Bob in front of Amy?\nA: {opposite(word)}",
    "white space": lambda word: f" \t\r\n{word}\u00a0\n",
    "emoji": lambda word: f"✅ {word}",
}
LABELS = ("yes", "no")


def test_there_are_thirty_decorations() -> None:
    assert len(INNER) + len(OUTER) >= 30


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", [*INNER, *OUTER])
def test_a_decoration_keeps_the_label(label: str, name: str) -> None:
    text = (INNER | OUTER)[name](label.capitalize())
    assert parse_label(text).value == label, text


CASES: tuple[Decoration, ...] = (str.lower, str.upper, str.capitalize)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("outer", list(OUTER))
def test_two_decorations_keep_the_label(label: str, outer: str) -> None:
    for case in CASES:
        for inner in INNER:
            text = OUTER[outer](INNER[inner](case(label)))
            assert parse_label(text).value == label, text


@given(st.sampled_from(LABELS), st.sampled_from(CASES), st.sampled_from(list(INNER)), st.sampled_from(list(OUTER)),
       st.text(" \t\n\u00a0\u200b\u3000"), st.text(" \t\n\r\u00a0\ufeff"))  # fmt: skip
@settings(deadline=None, max_examples=400)
def test_white_space_around_decorations_keeps_the_label(
    label: str, case: Decoration, inner: str, outer: str, ahead: str, behind: str
) -> None:
    text = OUTER[outer](INNER[inner](case(label)) + behind)
    if outer != "json":
        text = ahead + text + behind
    assert parse_label(text).value == label, text


@given(st.sampled_from(LABELS), st.sampled_from(list(OUTER)))
@settings(deadline=None)
def test_the_other_label_never_comes_out_when_the_token_limit_cuts_the_text(label: str, outer: str) -> None:
    text = OUTER[outer](label.capitalize())
    for length in range(len(text)):
        assert parse_label(text[:length], finish_reason="length").value in (label, None), text[:length]


# --- noise -----------------------------------------------------------------------------------------------------------


def without_y_and_n(character: str) -> bool:
    # Every word of the lexicon has a y or an n.
    return not set("yn") & set(unicodedata.normalize("NFKC", character).casefold() + character.lower())


@given(st.text(st.characters().filter(without_y_and_n)))
@settings(deadline=None, max_examples=500)
def test_text_without_label_words_is_not_parsed(text: str) -> None:
    assert parse_label(text).status != "parsed"


WORDS = [
    "Amy", "Bob", "nobody", "nothing", "none", "not", "nor", "now", "know", "note", "yesterday", "eyes", "north",
    "snow", "cannot", "so", "therefore", "answer", "is", "the", "in", "front", "of", "behind", "because", "if", "first",
    "row", "stands", "premise", "final", "true", "one", "maybe", "1.", ",", ".", ";", ":", "(", ")", "?", "\n", "-",
    "*",
]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), max_size=40))
@settings(deadline=None, max_examples=500)
def test_prose_with_label_words_only_inside_others_is_not_parsed(words: list[str]) -> None:
    assert parse_label(" ".join(words)).status != "parsed"


@given(st.lists(st.sampled_from(["Amy", "Bob", "one", "is", "in front of", "person", "premise", "so", "Therefore"])))
@settings(deadline=None, max_examples=300)
def test_no_as_a_determiner_is_not_an_answer(words: list[str]) -> None:
    text = " ".join([*words, "there is no other person", *words, "and no one knows."])
    assert parse_label(text).value is None


FRAGMENTS = [
    "yes", "no", "Yes", "No", " ", "\n", ".", ",", "/", "?", " or ", "answer", "Answer: ", "the answer is ", "so ",
    "not ", "<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "}", "{", '"answer": ', '"', "'", "*", "_", "`",
    "```", "$", "\\", "\u200b", "\u0301", "ﷺ", "İ", "ı", "ſ", "K", "：", "\ud800", "\x00", "Q:", "\nQ: ", "unknown",
    "cannot be determined", "I can't help", "<|im_end|>", "<|channel|>analysis", "<|channel|>final", "analysisWe",
    "assistantfinal", "1. ", "a) ", "¬", "~", "-", "—", "。", "no one", "if ", "wait ", "actually ", "[ANSWER]",
]  # fmt: skip


def check(text: str, parsed: Parsed) -> None:
    assert parsed.status in get_args(Status)
    assert parsed.status not in ("overflow", "error")
    assert parsed.rule in RULES
    assert (parsed.value in YES_NO) if parsed.status == "parsed" else parsed.value is None
    if parsed.status == "parsed":
        assert parsed.span is not None
    if parsed.span is not None:
        start, end = parsed.span
        assert 0 <= start < end <= len(text)


REASONS = st.sampled_from([None, "stop", "length", "content_filter", "something else"])


@given(st.text() | st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join), REASONS, st.booleans())
@settings(deadline=None, max_examples=1000)
def test_any_text_has_a_sound_result(text: str, reason: str | None, opened: bool) -> None:
    check(text, parse_label(text, finish_reason=reason, prompt_opened_think=opened))


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
@settings(deadline=None, max_examples=500)
def test_a_token_limit_can_only_withdraw_a_reading(text: str) -> None:
    whole, cut = parse_label(text), parse_label(text, finish_reason="length")
    assert cut == whole or (cut.status == "truncated" and cut.value is None)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
@settings(deadline=None, max_examples=300)
def test_other_labels_have_sound_results(text: str) -> None:
    labels = {"İ": ["İ", "ı"], "Straße": ["straße", "is in"], "1": ["1"]}
    parsed = parse_label(text, labels=labels)
    assert parsed.value is None or parsed.value in labels


# --- hostile input ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "a", " ", "\n", "\t ", "yes ", "no ", "no, ", "yes/no ", "the no. ", "answer ", "answer is no longer ",
    "Answer: no one\n", "the answer to ", "<think>", "</think>", "<think></think>", "<answer>", "<answer>x</answer>",
    r"\boxed{", "{", '"answer": ', "'", "*", "_", "_a", "`", "\\", "if the answer is no one so ", "so no one ",
    "cannot be ", "unknown ", "I can't ", "\u0301", "ﷺ", "”", "—", "Ｎｏ ", "no-", "yes-no-", "1. ", "\nq: ", "? no ",
    "<", "<b ", "<|", "<|im_end|>", "analysisA", "a b? ", "ok. ", "!\n", "\nQ 1: no", "or no one. ", " . no the. ",
]  # fmt: skip
SIZE = 100_000
# Linear work takes about a second on a slow machine; quadratic work would take minutes.
LIMIT_S = 20.0


@pytest.mark.parametrize("start", ["", "No one "], ids=["bare", "behind prose"])
@pytest.mark.parametrize("unit", HOSTILE, ids=ascii)
def test_time_grows_linearly(unit: str, start: str) -> None:
    text = (start + unit * (SIZE // len(unit) + 1))[:SIZE]
    began = time.perf_counter()
    parsed = parse_label(text)
    assert time.perf_counter() - began < LIMIT_S
    check(text, parsed)


def test_long_random_mixtures() -> None:
    draws = random.Random(0)
    for _ in range(5):
        text = "".join(draws.choices(FRAGMENTS, k=15_000))
        began = time.perf_counter()
        check(text, parse_label(text))
        assert time.perf_counter() - began < LIMIT_S


# --- declared labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({}, "labels is empty"),
        ({"yes": []}, "words of label 'yes' are []"),
        ({"yes": "yes"}, "words of label 'yes' are 'yes'"),
        ({"yes": [""]}, "bad word '' of label 'yes'"),
        ({"yes": ["(yes)"]}, "bad word '(yes)' of label 'yes'"),
        ({"yes": ["ok"], "no": ["OK"]}, "word 'OK' stands for both 'yes' and 'no'"),
    ],
)
def test_unusable_labels_are_named(labels: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)) as error:
        parse_label("yes", labels=labels)
    assert "\n" not in str(error.value)


def test_a_task_with_its_own_labels_does_not_read_yes_and_no() -> None:
    labels = {"valid": ["valid"], "invalid": ["invalid"]}
    assert parse_label("Yes", labels=labels).value is None
    assert parse_label("Invalid, since the middle term is not distributed.", labels=labels).value == "invalid"


# --- an answer on a marked last line ---------------------------------------------------------------------------------

ECHO = "The answer has to be on a last line, written as 'Answer: Yes' or 'Answer: No'.\n\n"
LISTED = "- 'Answer: Yes' if zagata holds\n- 'Answer: No' otherwise\n\n"
TRACE = "1. fafaki is stated.\n2. guviso follows, since fafaki holds.\n3. mupigo needs mabodi, which nobody states.\n"

MARKED = [
    # text, finish reason, status, value, rule
    (TRACE + "\nAnswer: No", "stop", "parsed", "no", "answer_line"),
    (TRACE + "\n**Answer: No**", "stop", "parsed", "no", "answer_line"),
    (TRACE + "\n### Final answer\nAnswer: Yes.", "stop", "parsed", "yes", "answer_line"),
    (TRACE + "\nSo zagata holds.\n\n'Answer: Yes'", "stop", "parsed", "yes", "answer_line"),
    (TRACE + "\nAnswer: $\\boxed{\\text{No}}$", "stop", "parsed", "no", "answer_line"),
    ("Does mupigo hold? Yes.\nDoes zagata hold? Yes.\n\nAnswer: No", "stop", "parsed", "no", "answer_line"),
    # An earlier answer line is a thought, the last one counts.
    ("Answer: Yes\n\nWait, gilogu needs rosovi.\n\nAnswer: No", "stop", "parsed", "no", "answer_line"),
    ("Answer: Yes\n\nWait, gilogu needs rosovi.\n\nAnswer: No", "length", "parsed", "no", "answer_line"),
    ("Answer: No.\nLet me check again: mupigo holds.\nAnswer: Yes", None, "parsed", "yes", "answer_line"),
    # Taken back without a new one.
    ("Answer: Yes\n\nWait, no. So the answer is no.", "stop", "ambiguous", None, "contradicted"),
    # The instruction said again.
    (ECHO + TRACE + "Answer: No", "stop", "parsed", "no", "answer_line"),
    (ECHO + TRACE, "length", "truncated", None, "length"),
    (ECHO + TRACE, "stop", "unparsed", None, "no_answer"),
    (LISTED + TRACE + "Answer: No", "stop", "parsed", "no", "answer_line"),
    (LISTED + TRACE, "length", "truncated", None, "length"),
    (LISTED + TRACE, "stop", "unparsed", None, "no_answer"),
    ("'Answer: Yes' or\n'Answer: No'\n\n" + TRACE, "length", "truncated", None, "length"),
    ("Answer: Yes / Answer: No\n\n" + TRACE, "length", "truncated", None, "length"),
    ("Answer: **Yes** only if zagata holds.\n" + TRACE, "length", "truncated", None, "length"),
    # Cut while thinking: what stands there may be a step on the way.
    ("Yes, fafaki holds, since it is stated. Next, mupigo", "length", "truncated", None, "length"),
    ("No. fafaki is not enough: mupigo needs", "max_tokens", "truncated", None, "length"),
    ("The answer to whether guviso holds is yes.\nNext,", "length", "truncated", None, "length"),
    ("So the answer is no", "length", "truncated", None, "length"),
    ("It can't be determined yet, so I go on with", "length", "truncated", None, "length"),
    ("<think>Answer: Yes", "length", "truncated", None, "unclosed_think"),
    ("", "length", "truncated", None, "length"),
    # Cut behind an explicit answer.
    (TRACE + "Answer: No\n\nExplanation: mupigo needs", "length", "parsed", "no", "answer_line"),
    ("Answer: Yes\n\nQuestion: Does miro hold?\nAnswer: No\n\nQuestion:", "length", "parsed", "yes", "answer_line"),
    (TRACE + "<answer>no</answer> since", "length", "parsed", "no", "answer_tag"),
    (TRACE + r"The answer is $\boxed{Yes}$", "length", "parsed", "yes", "answer_line"),
    ('{"reasoning": "mupigo needs mabodi", "answer": "No"', "length", "parsed", "no", "json_field"),
    ("Answer: cannot be determined", "length", "abstained", None, "answer_line"),
    # Finished without the line: read as any other response.
    ("Yes", "stop", "parsed", "yes", "first_word"),
    (TRACE + "Therefore, the answer is no", "stop", "parsed", "no", "answer_phrase"),
    (TRACE + "So, no.", "stop", "parsed", "no", "conclusion"),
    (TRACE, "stop", "unparsed", None, "no_answer"),
    # A line like "Question:" inside a thought does not end it.
    ("Let me see.\nQuestion: Does zagata hold? Yes would need mupigo.\n" + TRACE + "Answer: No", "stop", "parsed", "no",
     "answer_line"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason", "status", "value", "rule"), MARKED, ids=range(1, len(MARKED) + 1))
def test_marked_answers(text: str, reason: str | None, status: str, value: str | None, rule: str) -> None:
    parsed = parse_label(text, finish_reason=reason, marked=True)
    assert (parsed.status, parsed.value, parsed.rule) == (status, value, rule)
    if status == "parsed":
        assert text[slice(*parsed.span)].lower() == value


def test_the_instruction_itself_is_no_answer() -> None:
    from tasks.prompts import instruction

    said = instruction("reasoning")
    for text in (said, f"You said: {said}", said.replace("'", '"'), said.replace("'", "**")):
        assert parse_label(text, marked=True).value is None
        assert parse_label(text + " So", finish_reason="length", marked=True).status == "truncated"
        for label in LABELS:
            assert parse_label(f"{text}\n{TRACE}\nAnswer: {label}", marked=True).value == label


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join), st.sampled_from(LABELS))
@settings(deadline=None, max_examples=300)
def test_a_marked_thought_that_is_cut_off_gives_its_explicit_answer_or_none(text: str, label: str) -> None:
    whole = parse_label(text, marked=True)
    cut = parse_label(text, finish_reason="length", marked=True)
    check(text, whole)
    check(text, cut)
    assert cut == whole or (cut.status == "truncated" and cut.value is None)
    assert cut.rule not in INFERRED | {"first_word"}


@given(st.text() | st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
@settings(deadline=None, max_examples=300)
def test_marking_changes_nothing_where_a_finished_response_has_no_answer_line(text: str) -> None:
    if "answer" not in unicodedata.normalize("NFKC", text).lower() and "q" not in text.lower():
        assert parse_label(text, marked=True) == parse_label(text)


@pytest.mark.parametrize(
    "unit", ["Answer: Yes or ", "Answer: no / ", "or answer: yes ", "answer: \n", "Answer: yes if\n"]
)
def test_marked_time_grows_linearly(unit: str) -> None:
    text = (unit * (SIZE // len(unit) + 1))[:SIZE]
    began = time.perf_counter()
    parse_label(text, marked=True)
    assert time.perf_counter() - began < LIMIT_S
