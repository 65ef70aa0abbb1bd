"""Text in, escaped text out, and back: what makes the tokenizer lossless for every Unicode string.

SentencePiece writes a space as U+2581, so a real U+2581 would come back as a space. It is therefore escaped with
U+FDD0, a noncharacter: valid in UTF-8, never assigned, not meant for interchange (Unicode 23.7), so that ordinary text
doesn't pay for it.

    U+FDD0 -> U+FDD0 "0"        U+2581 -> U+FDD0 "1"

Invariants: ``unescape(escape(s)) == s``; the pieces of a ``StreamDecoder`` joined equal ``decode_bytes`` of the whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SPACE_MARK = "\u2581"
ESCAPE = "\ufdd0"
ESCAPES = ((ESCAPE, ESCAPE + "0"), (SPACE_MARK, ESCAPE + "1"))

_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Mended(NamedTuple):
    """Valid Unicode, and how many surrogate pairs were joined and lone surrogates replaced by U+FFFD to get there."""

    text: str
    joined: int
    replaced: int


def mend(text: str) -> Mended:
    """Join surrogate pairs and replace lone surrogates, which JSON escapes and file names can bring in."""
    if text.isascii() or not _SURROGATE.search(text):
        return Mended(text, 0, 0)
    text, joined = _PAIR.subn(lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    text, replaced = _SURROGATE.subn("\ufffd", text)
    return Mended(text, joined, replaced)


def escape(text: str) -> str:
    """Text without U+2581."""
    for plain, escaped in ESCAPES:
        text = text.replace(plain, escaped)
    return text


def unescape(text: str) -> str:
    """The inverse of ``escape``; an escape mark that begins no escape stays as it is."""
    for plain, escaped in reversed(ESCAPES):
        text = text.replace(escaped, plain)
    return text


def decode_bytes(data: bytes, *, escaped: bool = True) -> str:
    """UTF-8, escaped or not, to text; bytes that are not UTF-8 become U+FFFD."""
    text = data.decode("utf-8", "replace")
    return unescape(text) if escaped else text


def cut(text: str, joined: frozenset[str], size: int) -> list[str]:
    """Split into parts of at least ``size`` characters (the last may be shorter) where no token can cross.

    ``joined`` holds each pair of neighbouring characters that occurs inside a piece: a merge never spans another pair,
    so the tokens of the parts in a row are the tokens of the whole.
    """
    parts = []
    start = 0
    while len(text) - start > size:
        end = start + size
        while end < len(text) and text[end - 1 : end + 1] in joined:
            end += 1
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    return parts


class Spelling(NamedTuple):
    """How the bytes of tokens become text: are they escaped, and what encoding put before each text to be dropped.

    The prefix is dropped from the first token that has text, at the start and after the id ``begins``.
    """

    escaped: bool = True
    prefix: bytes = b""
    begins: int = -1

    def decode(self, token_bytes: Callable[[int], bytes], ids: Iterable[int]) -> str:
        """The text of all ids at once."""
        if not self.prefix:
            return decode_bytes(b"".join(map(token_bytes, ids)), escaped=self.escaped)
        decoder = StreamDecoder(token_bytes, self)
        return "".join([*map(decoder.push, ids), decoder.finish()])


ESCAPED = Spelling()


class StreamDecoder:
    """Text as tokens arrive; holds back a character's missing bytes and an escape's missing half.

    ``after`` are the ids that those to come continue.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], spelling: Spelling = ESCAPED, *, after: Sequence[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._spelling = spelling
        self._at_start = not after or after[-1] == spelling.begins

    def push(self, token: int) -> str:
        """Text that ``token`` completes, possibly none. Raises TokenizerError for an id outside the vocabulary."""
        data = self._token_bytes(token)
        if self._spelling.prefix:
            data = self._without_prefix(token, data)
        text = self._held + self._utf8.decode(data)
        if not self._spelling.escaped:
            return text
        self._held = ESCAPE if text.endswith(ESCAPE) else ""
        return unescape(text.removesuffix(ESCAPE))

    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD; the decoder is then ready for another text."""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        self._at_start = True
        self._utf8.reset()
        return unescape(text) if self._spelling.escaped else text

    def _without_prefix(self, token: int, data: bytes) -> bytes:
        if token == self._spelling.begins:
            self._at_start = True
        elif data and self._at_start:
            self._at_start = False
            return data.removeprefix(self._spelling.prefix)
        return data
