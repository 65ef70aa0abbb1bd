"""Units of a text file joined into blocks and cut again, so that redaction sees what lies on both sides of a cut.

A block has every line of the file at its place: what was not read, such as blank or damaged lines, is blank. Redaction
may make lines fewer, where it takes out a private key; units after that keep the lines that they had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Literal

from cyberslm.data.clean.entry import Entry
from cyberslm.data.redact.redactor import Redacted


def joined(units: Iterable[Entry], limit: int) -> Iterator[Entry]:
    """Neighbouring units of one file as blocks of at most about ``limit`` characters; records stay as they are."""
    texts: list[str] = []
    first: Entry | None = None
    line = size = 0
    for entry in units:
        goes_on = first is not None and not entry.record and entry.name == first.name and entry.line > line
        if first is not None and not (goes_on and size + len(entry.text) <= limit):
            yield first._replace(text="".join(texts))
            first = None
        if first is None:
            texts, first, size = [], entry, 0
            line = entry.line
        texts += ["\n" * (entry.line - line), entry.text]
        size += len(entry.text)
        line = entry.line + entry.text.count("\n")
    if first is not None:
        yield first._replace(text="".join(texts))


def cut_again(block: Entry, redacted: Redacted, unit: Literal["paragraph", "line"]) -> Iterator[Entry]:
    """The units of a redacted block, each with the line where it began in the file."""
    gone = [block.text.count("\n", each.start, each.end) for each in redacted.findings]
    if sum(gone) != block.text.count("\n") - redacted.text.count("\n"):
        gone = [0] * len(gone)
    shifts = [0, *accumulate(gone)]
    # the line of each find in the redacted block, from 0
    at = [each.line - 1 - shift for each, shift in zip(redacted.findings, shifts, strict=False)]
    for text, line in _units(redacted.text, unit):
        yield block._replace(text=text, line=block.line + line + shifts[bisect_left(at, line)])


def _units(text: str, unit: Literal["paragraph", "line"]) -> Iterator[tuple[str, int]]:
    start, rows = 0, list[str]()
    for number, row in enumerate(text.split("\n")):
        blank = not row or row.isspace()
        if rows and (blank or unit == "line"):
            yield "\n".join(rows), start
            rows = []
        if not blank:
            start = start if rows else number
            rows.append(row)
    if rows:
        yield "\n".join(rows), start
