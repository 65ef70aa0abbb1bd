"""A file of records, one after the other with all their fields: what the work commands go through.

Lines of text, CSV, TSV or JSON lines, compressed or not, from a file or from standard input, by the readers of
``data.readers``. A record has its line and its fields as read; the text to work on is one of them. A bad record is
refused by its line or counted; no value is quoted. One record at a time is held in memory.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import printable, reading
from cyberslm.data.readers.formats import named_format
from cyberslm.data.readers.json_records import jsonl_records
from cyberslm.data.readers.place import BAD_RECORD, NO_TEXT, Place, Unreadable
from cyberslm.data.readers.plain import refuse_binary
from cyberslm.data.readers.records import Records
from cyberslm.data.readers.streams import CHUNK, Budget, uncompressed
from cyberslm.data.readers.tables import COMMON, TAB, table_records
from cyberslm.data.readers.text import lines
from cyberslm.errors import ConfigError, DataError

Form = Literal["text", "csv", "tsv", "jsonl"]
LINE_FIELD = "text"
"""The field that a line of text is."""
MAX_RECORD_BYTES = 1 << 24


class Record(NamedTuple):
    """``text`` is what the work is about, one of the ``fields``; ``line`` is where the record begins, from 1."""

    line: int
    fields: dict[str, object]
    text: str


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    """Where records come from and which field is their text. Raises `ConfigError` for settings that don't fit."""

    path: Path | None
    """A file; null is standard input."""
    form: Form | None = None
    """What the file is; null goes by its name, and standard input is text."""
    field: str | None = None
    """Column, key or dotted path of the text; text lines need none."""
    on_bad_input: Literal["error", "skip"] = "error"
    """What a record that can't be read or has no text leads to: an error with its line, or a counted skip."""
    encodings: tuple[str, ...] = ()
    """Encodings to try in turn for what is not UTF-8."""
    option: str | None = None
    """What errors say the field is named by, such as --field."""

    def __post_init__(self) -> None:
        if self.form is not None and self.form not in get_args(Form):
            raise ConfigError(f"format is {self.form!r}; it must be one of {', '.join(get_args(Form))}")
        if self.on_bad_input not in ("error", "skip"):
            raise ConfigError(f"on_bad_input is {self.on_bad_input!r}; it must be error or skip")
        if self.path is not None and not self.path.is_file():
            what = "is not a file" if self.path.exists() else "does not exist"
            raise ConfigError(f"{printable(self.path)} {what}: give a file of records, or - for standard input")
        if self.kind != "text" and self.field is None:
            raise ConfigError(f"{self.name} is {self.kind}: name the column or key that holds its text{self._how}")
        if self.kind == "text" and self.field not in (None, LINE_FIELD):
            raise ConfigError(
                f"{self.name} is lines of text and has no field {self.field!r}: leave {self.option or 'the field'} out"
            )
        _ = self._config

    @property
    def name(self) -> str:
        return "standard input" if self.path is None else printable(self.path)

    @property
    def kind(self) -> Form:
        if self.form is not None or self.path is None:
            return self.form or "text"
        return form_of(self.path)

    def identity(self) -> dict[str, object]:
        """What decides the records, besides the content of standard input."""
        stat = None if self.path is None else self.path.stat()
        return {
            "form": self.kind,
            "field": self.field,
            "on_bad_input": self.on_bad_input,
            "encodings": list(self.encodings),
            "file": None if stat is None else [stat.st_size, stat.st_mtime_ns],
        }

    @contextmanager
    def opened(self, counts: Counts) -> Iterator[OpenRecords]:
        """The records, in their order. ``counts`` gains what is skipped.

        Raises `DataError` with the line for a bad record (``on_bad_input`` error), for damage behind which nothing can
        be read, and when the file changes meanwhile.
        """
        before = self.identity()
        with reading(self.path or Path("-")), _raw(self.path) as raw:
            size = None if self.path is None else self.path.stat().st_size
            place = _Place(name=self.name, config=self._config, counts=counts)
            yield OpenRecords(self._records(raw, place, size or 0), size, lambda: raw.passed)
            if self.identity() != before:
                raise DataError(f"{self.name} changed while it was being read: work on a copy that stays still")

    @property
    def _how(self) -> str:
        return "" if self.option is None else f" with {self.option}"

    @property
    def _config(self) -> DataConfig:
        return DataConfig(on_bad_input=self.on_bad_input, encodings=self.encodings, max_document_bytes=MAX_RECORD_BYTES)

    def _records(self, raw: io.RawIOBase, place: Place, size: int) -> Iterator[Record]:
        try:
            stream = uncompressed(io.BufferedReader(raw, CHUNK), Budget.of(size, place.config))
            for fields, line in _READERS[self.kind](stream, place):
                try:
                    yield self._record(fields, line)
                except Unreadable as error:
                    place.bad(error.problem, reason=BAD_RECORD, line=line)
        except Unreadable as error:
            place.bad_stream(error)

    def _record(self, fields: object, line: int) -> Record:
        if not isinstance(fields, dict):
            raise Unreadable(f"a JSON {type(fields).__name__} where an object, a record, is expected")
        name = self.field or LINE_FIELD
        text = _value(fields, name)
        if not isinstance(text, str):
            what = "missing" if text is None else "not a string"
            hint = "" if self.option is None else f"; name the one that holds the text{self._how}"
            raise Unreadable(f"field {name!r} is {what}{hint}")
        if not text.strip():
            raise Unreadable(f"field {name!r} is empty")
        return Record(line, fields, text)


def form_of(path: Path) -> Form:
    """What a file of records is by its name. Raises `ConfigError` for a name that says another format."""
    named = named_format(path.name) or "text"
    for form in get_args(Form):
        if named == form:
            return form
    raise ConfigError(f"{printable(path)} is {named}: make JSON lines or CSV of it, or say with a format what it is")


class OpenRecords(NamedTuple):
    """``size`` bytes of file, of which ``position()`` are read; no size for standard input."""

    records: Iterator[Record]
    size: int | None
    position: Callable[[], int]


class _Place(Place):
    """Messages that name the options of the work commands."""

    def bad(self, problem: str, *, reason: str, line: int | None, fix: str = "mend the record") -> None:
        if self.config.on_bad_input == "error":
            way = "give its --encoding, mend it" if NO_TEXT in problem else fix
            raise DataError(f"{self.at(line)}: {problem}; {way} or give --on-bad-input skip")
        self.counts.skip(reason, self.at(line))

    def too_long(self, what: str, line: int | None = None) -> Unreadable:
        return Unreadable(f"{what} of more than {MAX_RECORD_BYTES:,} bytes, the limit", reason="too long", line=line)


def _value(fields: Mapping[str, object], name: str) -> object:
    """The field of this very name, or else the one that a dotted path leads to; None where there is neither."""
    value: object = fields
    for step in [name] if name in fields else name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(step)
    return value


def _text_lines(stream: io.BufferedReader, place: Place) -> Records:
    refuse_binary(stream)
    for line in lines(stream, place):
        if line.problem is not None:
            place.bad(line.problem, reason=NO_TEXT, line=line.number)
        elif not line.text.strip():
            place.skip("blank line", line.number)
        else:
            yield {LINE_FIELD: line.text}, line.number


def _csv(stream: io.BufferedReader, place: Place) -> Records:
    return table_records(stream, place, separators=COMMON)


def _tsv(stream: io.BufferedReader, place: Place) -> Records:
    return table_records(stream, place, separators=TAB)


_READERS: Mapping[Form, Callable[[io.BufferedReader, Place], Records]] = {
    "text": _text_lines,
    "csv": _csv,
    "tsv": _tsv,
    "jsonl": jsonl_records,
}


@contextmanager
def _raw(path: Path | None) -> Iterator[_Counted]:
    if path is not None:
        with io.FileIO(path) as raw:
            yield _Counted(raw)
    elif sys.stdin is None:
        raise ConfigError("- reads standard input, which is closed")
    else:
        yield _Counted(sys.stdin.buffer)


class _Counted(io.RawIOBase):
    """A stream of which ``passed`` bytes have been read, and which stays open when its reader is done with it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.passed = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        number = self._stream.readinto(buffer) or 0
        self.passed += number
        return number
