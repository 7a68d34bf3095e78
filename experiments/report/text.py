"""Text and numbers as the page shows them.

Problem. Everything that reaches the page comes from somewhere else: a model's answer may hold markup, terminal codes,
NUL bytes, direction overrides or half a surrogate pair; a number may be undefined. Mechanism: ``clean`` is applied to
every value that the template prints (escaping is the template's), and each number goes through one of the formatters
below, which give a ``Cell``. An undefined number is an en dash that carries its reason, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DASH = "–"
OUTCOME_NAMES = {"R": "both right", "D": "both wrong", "U": "one right", "N": "not read"}
NO_REASON = "undefined; the run gives no reason"
MANY = 200  # from here on a percentage is given with one decimal

# Terminal codes whole (a bare escape character would leave their letters behind), then single characters: controls but
# tab and line feed, direction overrides that could reorder the page's own text, and halves of surrogate pairs.
_TERMINAL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~])|\x9b[0-?]*[ -/]*[@-~]", re.S
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Cell:
    """One table cell: the number, smaller lines below it, and the text shown on hovering."""

    text: str
    note: str = ""
    title: str = ""
    kind: str = ""
    rows: int = 1


def clean(text: str) -> str:
    """Text without terminal codes, control characters and direction overrides; line ends are ``\\n``."""
    text = _TERMINAL.sub("", text.replace("\r\n", "\n"))
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def shortened(text: str, head: int, tail: int = 0) -> str:
    """A long text without its middle, which is replaced by how much of it is missing."""
    if len(text) <= head + tail + 80:
        return text
    end = text[len(text) - tail :] if tail else ""
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters not shown …]\n{end}".rstrip("\n")


def undefined(reason: str | None) -> Cell:
    """The en dash that stands for a number that does not exist."""
    return Cell(DASH, title=reason or NO_REASON, kind="undefined")


def percent(value: float, n: int) -> str:
    """A share as a percentage, with no more digits than ``n`` carries."""
    return f"{value:.1%}" if n >= MANY else f"{value:.0%}"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; a value that rounds to 0 has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def span(low: float | None, high: float | None, digits: int = 2, *, sign: bool = True) -> str:
    """An interval in brackets; empty where it is undefined."""
    if low is None or high is None:
        return ""
    ends = [signed(one, digits) if sign else f"{one:.{digits}f}".replace("-", "−") for one in (low, high)]
    return f"[{ends[0]}, {ends[1]}]"


def percent_span(low: float | None, high: float | None, n: int) -> str:
    """The interval of a share, in percent."""
    if low is None or high is None:
        return ""
    return f"[{percent(low, n).rstrip('%')}, {percent(high, n).rstrip('%')}]"


def share_cell(share: Mapping[str, Any], *, count: bool = False) -> Cell:
    """A share with its Wilson interval; the count is in the title, and in the note if asked for."""
    if share["value"] is None:
        return undefined(share.get("reason"))
    n, interval = share["n"], percent_span(share["low"], share["high"], share["n"])
    counted = f"{share['count']} of {n}"
    return Cell(
        percent(share["value"], n),
        note=f"{counted}\n{interval}" if count else interval,
        title=f"{counted}; {share['method']} interval {interval}",
    )


def number_cell(
    value: float | None,
    low: float | None = None,
    high: float | None = None,
    *,
    reason: str | None = "",
    digits: int = 2,
    sign: bool = True,
    title: str = "",
) -> Cell:
    """A number with its interval below."""
    if value is None:
        return undefined(reason)
    shown = signed(value, digits) if sign else f"{value:.{digits}f}".replace("-", "−")
    return Cell(shown, note=span(low, high, digits, sign=sign), title=title or (reason or ""))


def p_text(p: float | None) -> str:
    """A p-value; below 0.001 only the bound."""
    if p is None:
        return DASH
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def p_cell(p: float | None, title: str = "", reason: str = "not tested") -> Cell:
    return undefined(reason) if p is None else Cell(p_text(p), title=title)


def listed(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
