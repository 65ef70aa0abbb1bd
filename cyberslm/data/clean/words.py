"""Words as numbers, so that texts can be compared in numpy whatever their language.

A word is a run of letters and digits, with marks inside it kept (``CVE-2024-3094``, ``usr/bin/env``, ``1.2.3.4`` are
one word each); in scripts that write without spaces each character is one. Case and the punctuation around words don't
count. The kind of a word says how much of a document's identity it carries: two texts that share a skeleton but name
different things are different documents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

PLAIN, NAME, IDENTIFIER, CATALOGUE = range(4)
"""Nothing special; has a capital; has a digit or a mark inside; is a catalogue number (CVE-2024-3094) or a hash."""

# Thai to Lao, Burmese, Khmer, Japanese kana, and the Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
TOKEN = re.compile(rf"[^\W{UNSPACED}]+(?:[-.:/@#\\]+[^\W{UNSPACED}]+)*|[{UNSPACED}]")
PLAIN_WORD = re.compile(rf"[^\W_{UNSPACED}]+|[{UNSPACED}]")

_CATALOGUE = re.compile(r"[A-Z]{1,9}[-#:]?[0-9][\w:.-]*|[A-Z]{2,9}-[\w:.-]*[0-9][\w:.-]*|[0-9A-Fa-f]{32,}")
# When something was written or printed says little about what it is.
_DATE_OR_TIME = re.compile(
    r"(?:19|20)\d\d([-/])\d{1,2}\1\d{1,2}(?:T[\d:.]+)?Z?|\d{1,2}([-./])\d{1,2}\2(?:19|20)\d\d|\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?"
)
_IDENTIFIER = re.compile(r"[0-9.:/@#\\]")
_LETTERS = re.compile(r"[^\W\d_]+")
_DIGITS = re.compile(r"\d+")
_WHITE = re.compile(r"\s")
_PART = 1 << 20
_MAX_KNOWN = 1 << 18
_MAX_KNOWN_LENGTH = 64
_MAX_JUDGED_LENGTH = 256
NUM_SHAPES = 16
_HASH_SHIFT, _KIND_SHIFT, _MARK_MASK, _SHAPE_MASK = 6, 4, 3, 15

Words = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]


class Numbers(dict[str, int]):
    """Word -> number by a pure function; frequent words are looked up, not computed again."""

    def __init__(self, number: Callable[[str], int]) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, word: str) -> int:
        value = self._number(word)
        if len(word) <= _MAX_KNOWN_LENGTH:
            if len(self) >= _MAX_KNOWN:
                self.clear()
            self[word] = value
        return value

    def __reduce__(self) -> tuple[type[Numbers], tuple[Callable[[str], int]]]:
        return Numbers, (self._number,)


def numbers_of(text: str, pattern: re.Pattern[str], numbers: Numbers, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The number of each word of a text; a long text is taken in parts, cut at white space, to spare memory."""
    parts = []
    start = 0
    while start < len(text):
        border = _WHITE.search(text, start + _PART)
        end = border.end() if border else len(text)
        found = pattern.findall(text, start, end)
        parts.append(np.fromiter(map(numbers.__getitem__, found), dtype, len(found)))
        start = end
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def marked_number(word: str) -> int:
    """32 bits: 26 of a hash of the word without case, 2 of its kind, 4 of the shape of an identifier."""
    mark = kind(word)
    shape = _hash(_LETTERS.sub("a", _DIGITS.sub("0", word)), 1) & _SHAPE_MASK if mark >= IDENTIFIER else 0
    return _hash(word.casefold(), 4) >> _HASH_SHIFT << _HASH_SHIFT | mark << _KIND_SHIFT | shape


def plain_number(word: str) -> int:
    """64 bits of a hash of the word as it is."""
    return _hash(word, 8)


def kind(word: str) -> int:
    if len(word) > _MAX_JUDGED_LENGTH:
        return PLAIN
    if _CATALOGUE.fullmatch(word):
        return CATALOGUE
    if _IDENTIFIER.search(word):
        return PLAIN if _DATE_OR_TIME.fullmatch(word) else IDENTIFIER
    return NAME if word != word.lower() else PLAIN


def without_marks(words: Words) -> Words:
    return words >> np.uint32(_HASH_SHIFT)


def kinds(words: Words) -> Words:
    return words >> np.uint32(_KIND_SHIFT) & np.uint32(_MARK_MASK)


def shapes(words: Words) -> Words:
    return words & np.uint32(_SHAPE_MASK)


def _hash(word: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big")


def windows(numbers: Hashes, length: int) -> Hashes:
    """A hash of each run of ``length`` numbers; a shorter array gives none."""
    count = numbers.size - length + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    return combined([numbers[offset : offset + count] for offset in range(length)])


def combined(parts: Sequence[Hashes]) -> Hashes:
    """A hash of the numbers at each place of equally long arrays; multiplication wraps, as it should."""
    value = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        value *= np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
        value += part
    return mixed(value)


def mixed(value: Hashes) -> Hashes:
    """The finalizer of MurmurHash3, a bijection that spreads every bit over all."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    value ^= value >> np.uint64(33)
    return value
