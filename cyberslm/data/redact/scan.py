"""What every rule works on: a text, its lower-case twin of equal length, and finds in it.

Rules don't sweep the text with large patterns. They jump from one literal anchor to the next with ``str.find`` and
match a bounded pattern there, so the time is linear in the text and ordinary prose costs next to nothing.

Invisible characters (zero-width, bidirectional controls, soft hyphens) can split a secret; ``visible`` takes them out
and remembers where everything was, so that a find covers the characters hidden in it and those outside stay.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

INVISIBLE = re.compile("[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff]+")

# Not the tail of a word or number, or the letter of an escape such as \n in raw JSON.
START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
END = r"(?![A-Za-z0-9])"

MARKER_HEAD = "[redacted:"


class Span(NamedTuple):
    """A value of a kind at ``text[start:end]``; ``grown`` when an overlap made it more than one value of that kind."""

    start: int
    end: int
    kind: str
    grown: bool = False


class Scan:
    """A text and its lower-case twin, in which every character has the same place."""

    __slots__ = ("low", "text")

    def __init__(self, text: str) -> None:
        low = text.lower()
        # U+0130 is the one character whose lower case is longer.
        self.low = low if len(low) == len(text) else text.replace("\u0130", "i").lower()
        self.text = text

    def anchors(self, words: Iterable[str]) -> Iterator[int]:
        """Where each lower-case word begins, in any letter case; word by word."""
        return find_all(self.low, words)

    def back(self, end: int, pattern: re.Pattern[str], limit: int) -> int:
        """Where the text that ends at ``end`` and matches ``pattern`` backwards begins; ``end`` without a match."""
        found = pattern.match(self.text[max(0, end - limit) : end][::-1])
        return end - found.end() if found else end


def words(text: str) -> frozenset[str]:
    """The words of a text, for tables that are read more easily as one."""
    return frozenset(text.split())


def find_all(text: str, words: Iterable[str]) -> Iterator[int]:
    """Where each word begins in a text, word by word."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            yield at
            at = text.find(word, at + len(word))


def line_of(text: str, at: int) -> str:
    """The line around a place, at most 400 characters to either side."""
    start = text.rfind("\n", max(0, at - 400), at) + 1 or max(0, at - 400)
    end = text.find("\n", at, at + 400)
    return text[start : end if end >= 0 else at + 400]


class Visible(NamedTuple):
    """A text without its invisible characters; ``starts[i]`` is where piece ``i`` begins, ``shifts[i]`` what to add."""

    text: str
    starts: tuple[int, ...]
    shifts: tuple[int, ...]

    def place(self, at: int) -> int:
        """The place in the original of the visible character ``at``."""
        return at + self.shifts[bisect_right(self.starts, at) - 1]


def visible(text: str) -> Visible | None:
    """The text without invisible characters, or None when it has none."""
    if text.isascii() or not INVISIBLE.search(text):
        return None
    pieces, starts, shifts = [], [], []
    at = size = 0
    for gap in INVISIBLE.finditer(text):
        pieces.append(text[at : gap.start()])
        starts.append(size)
        shifts.append(at - size)
        size += gap.start() - at
        at = gap.end()
    starts.append(size)
    shifts.append(at - size)
    return Visible("".join([*pieces, text[at:]]), tuple(starts), tuple(shifts))
