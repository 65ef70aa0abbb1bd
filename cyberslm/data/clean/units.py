"""What is compared when copies are looked for: whole documents, or the paragraphs in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cyberslm.data.clean.entry import Entry
from cyberslm.data.clean.sketch import Sketch, Sketcher
from cyberslm.data.sources import copy_digest

Level = Literal["document", "paragraph"]

KEY_BYTES = 16
_BETWEEN = re.compile(r"\n[^\S\n]*\n\s*")
_WHITE = re.compile(r"\s+")


class Unit(NamedTuple):
    """A document, or a paragraph and its line in it; equal keys are equal texts."""

    key: bytes
    line: int
    sketch: Sketch | None


class Span(NamedTuple):
    start: int
    end: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Units:
    """How a text falls into units, and what names a unit by its content."""

    level: Level
    min_characters: int = 1
    fold_case: bool = False
    fold_space: bool = False

    def spans(self, text: str) -> Iterator[Span]:
        """The units of ``min_characters`` or more; the blank lines after a paragraph belong to it."""
        if self.level == "document":
            yield Span(0, len(text), 1)
            return
        start, line = 0, 1
        for border in _BETWEEN.finditer(text):
            if border.start() - start >= self.min_characters:
                yield Span(start, border.end(), line)
            line += text.count("\n", start, border.end())
            start = border.end()
        if len(text) - start >= self.min_characters:
            yield Span(start, len(text), line)

    def key(self, text: str) -> bytes:
        """The start of SHA-256 of the text without white space around it, folded by the settings."""
        if self.fold_space:
            text = _WHITE.sub(" ", text)
        if self.fold_case:
            text = text.casefold()
        return copy_digest(text)[:KEY_BYTES]


@dataclass(frozen=True)
class Looker:
    """Entry -> its units, pure; for near copies with sketches, and paragraphs too short for one are passed by."""

    units: Units
    sketcher: Sketcher | None

    def __call__(self, entry: Entry) -> tuple[Unit, ...]:
        found = []
        for start, end, line in self.units.spans(entry.text):
            text = entry.text[start:end]
            sketch = self.sketcher.sketch(text) if self.sketcher is not None else None
            if sketch is not None or self.sketcher is None or self.units.level == "document":
                found.append(Unit(self.units.key(text), line, sketch))
        return tuple(found)
