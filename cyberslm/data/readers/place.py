"""Where reading is: the file or member with the settings for it, and the one decision what bad input leads to.

A reader yields the texts it finds, each with the line or record (from 1) where it begins. What it can't read it tells
its ``Place``, which raises or counts; what ends a whole stream it raises as ``Unreadable``, which the caller hands to
the place. Neither quotes the input: a value may be secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cyberslm.data.counts import Counts
from cyberslm.errors import DataError

if TYPE_CHECKING:
    from cyberslm.data.config import DataConfig

BAD_RECORD = "bad record"
DAMAGED = "damaged or cut short"
NO_TEXT = "binary or not UTF-8"
TOO_LONG = "longer than data.max_document_bytes"


Texts = Iterator[tuple[str, int]]
"""Texts, each with the line or record where it begins."""


class Unreadable(DataError):
    """Input that can't be read from here on; ``line`` is set where the reader knows it."""

    def __init__(self, problem: str, *, reason: str = DAMAGED, line: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.reason = reason
        self.line = line


@dataclass(frozen=True, kw_only=True)
class Place:
    """``name`` is printable: a path, or ``archive.zip!member``."""

    name: str
    config: DataConfig
    counts: Counts

    def too_long(self, what: str, line: int | None = None) -> Unreadable:
        limit = self.config.max_document_bytes
        return Unreadable(f"{what} of more than {limit:,} bytes, data.max_document_bytes", reason=TOO_LONG, line=line)

    def at(self, line: int | None) -> str:
        return self.name if line is None else f"{self.name}:{line}"

    def bad(self, problem: str, *, reason: str, line: int | None, fix: str = "mend the record") -> None:
        """Raise DataError with the place, or count a skip (``on_bad_input: skip``)."""
        if self.config.on_bad_input == "error":
            raise DataError(f"{self.at(line)}: {problem}; {fix} or set data.on_bad_input: skip")
        self.counts.skip(reason, self.at(line))

    def bad_stream(self, error: Unreadable) -> None:
        self.bad(error.problem, reason=error.reason, line=error.line, fix="mend or remove it")

    def skip(self, reason: str, line: int | None) -> None:
        """Count what is passed over in any case."""
        self.counts.skip(reason, self.at(line))

    def cut(self) -> None:
        """Count that a document that is too long was cut here."""
        self.counts.cuts += 1


def printable_text(text: str) -> str:
    """A name as every terminal and JSON file can hold it: control and format characters and lone surrogates escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )
