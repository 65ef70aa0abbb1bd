"""Bytes to lines of text, in blocks, with the lines that aren't text told apart.

A byte order mark decides the encoding and is dropped; otherwise each line is UTF-8 or one of ``data.encodings``. CRLF
and lone CR become LF. A byte that fits no encoding, or a NUL, makes its line bad and no other. Blocks end at line
borders; a line longer than ``data.max_document_bytes`` comes in parts, so memory is bounded whatever the file.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from typing import NamedTuple

from cyberslm.data.readers.encodings import decode
from cyberslm.data.readers.place import NO_TEXT, Place, Unreadable
from cyberslm.data.readers.streams import CHUNK

# UTF-32 first: its little-endian mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_RAW_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Passage(NamedTuple):
    """Whole lines with LF ends. One bad line alone has a ``problem`` and holds its bad bytes as lone surrogates."""

    text: str
    line: int
    size: int
    """Bytes of the passage in the stream."""
    problem: str | None = None
    torn: bool = False
    """The last line is too long and goes on in the next passage."""


class Line(NamedTuple):
    """A line without its end."""

    text: str
    number: int
    problem: str | None = None


def passages(stream: io.BufferedReader, place: Place) -> Iterator[Passage]:
    """The stream as text; Unreadable, with its line, when the stream breaks off."""
    mark, encoding = byte_order_mark(stream.peek(4))
    stream.read(len(mark))
    if encoding in (None, "utf-8"):
        chunks, judge = _chunks(stream), _Judge(place.config.encodings, offset=len(mark))
    else:
        chunks, judge = _as_utf8(stream, encoding), _Judge((), offset=None)
    line = 1
    try:
        for block, torn in _blocks(chunks, place.config.max_document_bytes):
            for passage in judge.passages(block, line, torn=torn):
                yield passage
                line += passage.text.count("\n")
    except Unreadable as error:
        error.line = line if error.line is None else error.line
        raise


def lines(stream: io.BufferedReader, place: Place) -> Iterator[Line]:
    """Line by line; one that is longer than a document may be is bad, and told once."""
    torn = False
    for passage in passages(stream, place):
        if passage.torn:
            if not torn:
                yield Line("", passage.line, place.too_long("a line").problem)
            torn = True
            continue
        texts = passage.text.split("\n")
        if not texts[-1]:
            texts.pop()
        # The first of them ends a line that was torn.
        for number, text in enumerate(texts[torn:], passage.line + torn):
            yield Line(text, number, passage.problem)
        torn = False


def unix(text: str) -> str:
    """The text with LF line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def byte_order_mark(head: bytes) -> tuple[bytes, str | None]:
    """The mark that bytes begin with and the encoding it stands for; ``(b"", None)`` without one."""
    return next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", None))


def pieces(text: str, limit: int) -> Iterator[str]:
    """The text cut into parts of at most ``limit`` UTF-8 bytes: after a line's end, or else a space, or anywhere."""
    return (part.decode() for part in _parts(text.encode(), limit))


class _Judge:
    """Tells text from what is none, line by line where a block has both."""

    def __init__(self, encodings: tuple[str, ...], *, offset: int | None) -> None:
        self._encodings = encodings
        # None for UTF-16 and UTF-32, which arrive here as UTF-8, so that offsets say nothing.
        self._offset = offset

    def passages(self, block: bytes, line: int, *, torn: bool) -> Iterator[Passage]:
        text = self._text(block, ())
        if text is not None:
            yield self._passed(block, Passage(text, line, len(block), None, torn))
            return
        for match in _RAW_LINE.finditer(block):
            raw = match[0]
            text = self._text(raw, self._encodings)
            problem = self._problem(raw) if text is None else None
            shown = unix(raw.decode("utf-8", "surrogateescape")) if text is None else text
            yield self._passed(raw, Passage(shown, line, len(raw), problem, torn))
            line += shown.count("\n")

    def _passed(self, raw: bytes, passage: Passage) -> Passage:
        if self._offset is not None:
            self._offset += len(raw)
        return passage

    def _text(self, raw: bytes, encodings: tuple[str, ...]) -> str | None:
        if b"\0" in raw:
            return None
        if self._offset is None:
            return unix(raw.decode("utf-8", "surrogatepass"))
        text = decode(raw, encodings)
        return None if text is None else unix(text)

    def _problem(self, raw: bytes) -> str:
        """The first byte that is no UTF-8 text."""
        if self._offset is None:
            return "a NUL character"
        at = raw.find(b"\0")
        try:
            raw[: at if at >= 0 else None].decode()
        except UnicodeDecodeError as error:
            at = error.start
        return f"{NO_TEXT} at byte {self._offset + at}"


def _chunks(stream: io.BufferedReader) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def _as_utf8(stream: io.BufferedReader, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    try:
        for chunk in _chunks(stream):
            yield decoder.decode(chunk).encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not {encoding.upper()}, which its byte order mark says: {error.reason}") from None


def _blocks(chunks: Iterator[bytes], limit: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks that end at line borders, and whether one is instead a part of a line longer than ``limit``."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        # A CR at the end of a chunk may be half of a CRLF: only the next chunk tells.
        if held and held[-1].endswith(b"\r") and not chunk.startswith(b"\n"):
            yield b"".join(held), False
            held, size = [], 0
        at = chunk.rfind(b"\n") + 1 or chunk.rfind(b"\r", 0, -1) + 1
        if at:
            held.append(chunk[:at])
            yield b"".join(held), False
            held, size = [], 0
        held.append(chunk[at:])
        size += len(chunk) - at
        if size > limit:
            *parts, last = _parts(b"".join(held), limit)
            yield from ((part, True) for part in parts)
            held, size = [last], len(last)
    if size:
        yield b"".join(held), False


def _parts(data: bytes, limit: int) -> Iterator[bytes]:
    start = 0
    while len(data) - start > limit:
        end = start + limit
        at = data.rfind(b"\n", start, end) + 1 or data.rfind(b" ", start, end) + 1 or _character_border(data, end)
        yield data[start:at]
        start = at
    yield data[start:]


def _character_border(data: bytes, end: int) -> int:
    """``end``, or the start of the UTF-8 character that lies across it."""
    for at in range(end, end - 4, -1):
        if data[at] & 0xC0 != 0x80:
            return at
    return end
