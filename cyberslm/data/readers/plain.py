"""Plain text to documents: the file, its paragraphs or its lines (``data.txt_unit``).

Bad bytes cost the unit they are in and no other: a line, a paragraph, or the file. A file with a NUL among its first
8,000 bytes is binary (git's rule) and refused whole.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from cyberslm.data.readers.formats import HEAD_BYTES
from cyberslm.data.readers.place import NO_TEXT, Place, Texts, Unreadable
from cyberslm.data.readers.text import Passage, byte_order_mark, passages

FIX = "set data.encodings, mend or remove it,"


def read_text(stream: io.BufferedReader, place: Place) -> Texts:
    """The documents of plain text."""
    refuse_binary(stream)
    units = {"file": _whole, "paragraph": _paragraphs, "line": _each_line}
    return units[place.config.txt_unit](passages(stream, place), place)


def refuse_binary(stream: io.BufferedReader) -> None:
    """Raise Unreadable when the head of a stream that should be text shows that it isn't."""
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if head.startswith(b"%PDF-"):
        raise Unreadable("a PDF, which is not text; convert it first", reason=NO_TEXT, line=1)
    at = head.find(b"\0")
    if at >= 0 and byte_order_mark(head)[1] is None:
        raise Unreadable(f"{NO_TEXT} at byte {at}", reason=NO_TEXT, line=head.count(b"\n", 0, at) + 1)


_Row = tuple[str, int, str | None, bool]
"""A line with its end, its number, why it is no text, and whether it goes on a line that was too long."""


def _rows(found: Iterator[Passage]) -> Iterator[_Row]:
    torn = False
    for passage in found:
        texts = passage.text.split("\n")
        last, problem = texts.pop(), passage.problem
        for number, text in enumerate(texts, passage.line):
            yield text + "\n", number, problem, torn
            torn = False
        if last:
            yield last, passage.line + len(texts), problem, torn
        torn = passage.torn


def _whole(found: Iterator[Passage], place: Place) -> Texts:
    parts: list[str] = []
    line, size = 1, 0
    for passage in found:
        if passage.problem is not None:
            place.bad(passage.problem, reason=NO_TEXT, line=passage.line, fix=FIX)
            return
        if parts and size + passage.size > place.config.max_document_bytes:
            place.cut()
            yield "".join(parts), line
            parts, line, size = [], passage.line, 0
        parts.append(passage.text)
        size += passage.size
    yield "".join(parts), line


def _each_line(found: Iterator[Passage], place: Place) -> Texts:
    for text, number, problem, goes_on in _rows(found):
        if problem is not None:
            place.bad(problem, reason=NO_TEXT, line=number, fix=FIX)
        elif not goes_on:
            yield text.removesuffix("\n"), number
        elif text != "\n":
            place.cut()
            yield text.removesuffix("\n"), number


def _paragraphs(found: Iterator[Passage], place: Place) -> Texts:
    block = _Block(place)
    for text, number, problem, goes_on in _rows(found):
        if not goes_on and (text == "\n" or text.isspace()):
            if block.texts:
                yield from block.finished()
            continue
        if block.texts and block.size + len(text) > place.config.max_document_bytes:
            place.cut()
            yield from block.finished()
        if not block.texts:
            block.line = number
        if problem is not None and block.problem is None:
            block.problem = problem, number
        block.texts.append(text)
        block.size += len(text)
    yield from block.finished()


class _Block:
    """The paragraph that is being read."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._clear()

    def _clear(self) -> None:
        self.texts: list[str] = []
        self.size = 0
        self.line = 1
        self.problem: tuple[str, int] | None = None

    def finished(self) -> Texts:
        if self.problem is not None:
            self._place.bad(self.problem[0], reason=NO_TEXT, line=self.problem[1], fix=FIX)
        elif self.texts:
            yield "".join(self.texts).removesuffix("\n"), self.line
        self._clear()
