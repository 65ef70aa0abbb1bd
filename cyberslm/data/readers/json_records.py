"""JSON: one record a line, or an array of records, one record, or records in a row, streamed.

In JSON lines a bad record costs its line. In other JSON nothing tells where the next record begins, so a record that
isn't JSON ends the reading of its file. Memory holds one record, at most ``data.max_document_bytes`` of it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

from cyberslm.data.readers.place import BAD_RECORD, Place, Texts, Unreadable
from cyberslm.data.readers.records import Records, record_texts, texts_of
from cyberslm.data.readers.text import Passage, lines, passages

TOO_DEEP = "not JSON that can be read: a number too long or nesting too deep"
SPACE = " \t\n\r"


def read_jsonl(stream: io.BufferedReader, place: Place) -> Texts:
    """A record from each line."""
    return texts_of(jsonl_records(stream, place), place)


def jsonl_records(stream: io.BufferedReader, place: Place) -> Records:
    """The value of each line that isn't blank."""
    for line in lines(stream, place):
        if line.problem is not None:
            place.bad(line.problem, reason=BAD_RECORD, line=line.number)
        elif not line.text.strip():
            place.skip("blank line", line.number)
        else:
            try:
                record = json.loads(line.text)
            except json.JSONDecodeError as error:
                place.bad(f"not JSON: {error.msg} at column {error.colno}", reason=BAD_RECORD, line=line.number)
            except (ValueError, RecursionError):
                place.bad(TOO_DEEP, reason=BAD_RECORD, line=line.number)
            else:
                yield record, line.number


def read_json(stream: io.BufferedReader, place: Place) -> Texts:
    """The records of arrays and the values between them."""
    window = _Window(passages(stream, place), place)
    if not window.next():
        place.skip("empty", 1)
    while char := window.next():
        if char != "[":
            record, line = window.value()
            yield from record_texts(record, line, place)
            continue
        window.take()
        while window.next() != "]":
            record, line = window.value()
            yield from record_texts(record, line, place)
            if window.next() == ",":
                window.take()
                if window.next() == "]":
                    raise window.error("a comma before the end of an array")
            elif window.next() != "]":
                raise window.error("neither a comma nor the end of the array after a record")
        window.take()


class _Window:
    """The part of a JSON text from the current position to what has been read of it."""

    def __init__(self, found: Iterator[Passage], place: Place) -> None:
        self._found = found
        self._place = place
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._line, self._counted = 1, 0

    def next(self) -> str:
        """The next character that is no white space, or nothing at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more(1):
                return ""

    def take(self) -> None:
        self._at += 1

    def value(self) -> tuple[object, int]:
        """The value here, and its line. A value that doesn't fit the window yet is tried again in a larger one."""
        if not self.next():
            raise self.error("the text ends inside an array")
        line = self._here()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._more(len(self._text) - self._at):
                    raise self.error(error.msg, at=error.pos) from None
                continue
            except (ValueError, RecursionError):
                raise Unreadable(TOO_DEEP, line=line) from None
            # A number at the end of the window may go on in the next passage.
            if end == len(self._text) and self._more(1):
                continue
            self._at = end
            return value, line

    def error(self, problem: str, *, at: int | None = None) -> Unreadable:
        if at is not None:
            self._at = min(at, len(self._text))
        return Unreadable(f"not JSON: {problem}", line=self._here())

    def _here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _more(self, wanted: int) -> bool:
        """Drop what lies behind and read on; False at the end of the text."""
        line = self._here()
        parts, size = [self._text[self._at :]], 0
        self._text, self._at, self._counted = "", 0, 0
        for passage in self._found:
            if passage.problem is not None:
                raise Unreadable(passage.problem, line=passage.line)
            parts.append(passage.text)
            size += len(passage.text)
            if size >= wanted:
                break
        self._text = "".join(parts)
        if len(parts[0]) > self._place.config.max_document_bytes:
            raise self._place.too_long("a record", line)
        return size > 0
