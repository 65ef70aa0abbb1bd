"""Counts of what each step saw, changed and left out, with examples; two counts merge into what one would have been.

Examples are the first by place, not by time, so a report is the same for any number of workers and any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cyberslm.data.clean.entry import Entry, Note, Outcome
from cyberslm.data.readers.place import printable_text

MAX_EXAMPLES = 5
MAX_QUOTED = 50

Key = tuple[str, int, int, str]


@dataclass
class StepCounts:
    """One step over one source; characters are Unicode code points."""

    documents: int = 0
    characters: int = 0
    changed: int = 0
    characters_removed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    noted_documents: Counter[str] = field(default_factory=Counter)
    quoted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Key]] = field(default_factory=dict)

    def add(self, entry: Entry, outcome: Outcome) -> None:
        self.documents += 1
        self.characters += len(entry.text)
        if outcome.dropped is not None:
            self.dropped[outcome.dropped] += 1
            self.characters_removed += len(entry.text)
        elif outcome.text != entry.text:
            self.changed += 1
            self.characters_removed += len(entry.text) - len(outcome.text)
        for note in outcome.notes:
            self._note(entry, note)
        if outcome.dropped is not None and not any(note.kind == outcome.dropped for note in outcome.notes):
            self._example(outcome.dropped, (entry.name, entry.line, 1, entry.place()))

    def merge(self, other: StepCounts) -> None:
        self.documents += other.documents
        self.characters += other.characters
        self.changed += other.changed
        self.characters_removed += other.characters_removed
        self.dropped += other.dropped
        self.noted += other.noted
        self.noted_documents += other.noted_documents
        self.quoted += other.quoted
        for kind, keys in other.examples.items():
            for key in keys:
                self._example(kind, key)

    def summary(self) -> dict[str, object]:
        """Plain data for a manifest or a JSON report."""
        return {
            "documents": self.documents,
            "characters": self.characters,
            "changed": self.changed,
            "characters_removed": self.characters_removed,
            "dropped": dict(sorted(self.dropped.items())),
            "noted": dict(sorted(self.noted.items())),
            "noted_documents": dict(sorted(self.noted_documents.items())),
            "quoted": [{"line": line, "times": times} for line, times in _first(self.quoted)],
            "examples": {kind: [key[-1] for key in keys] for kind, keys in sorted(self.examples.items())},
        }

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> StepCounts:
        """Counts from their ``vars`` as JSON gives them back."""
        tallies = {name: Counter(plain[name]) for name in ("dropped", "noted", "noted_documents", "quoted")}
        examples = {
            kind: [(name, line, at, place) for name, line, at, place in keys]
            for kind, keys in plain["examples"].items()
        }
        return cls(**plain | tallies | {"examples": examples})

    def _note(self, entry: Entry, note: Note) -> None:
        if note.quoted:
            self.quoted[note.quoted] += note.times
        if note.kind:
            self.noted[note.kind] += note.times
            self.noted_documents[note.kind] += 1
            where = entry.place(note.line) + (f": {note.detail}" if note.detail else "")
            self._example(note.kind, (entry.name, entry.line, note.line, where))

    def _example(self, kind: str, key: Key) -> None:
        keys = self.examples.setdefault(kind, [])
        if len(keys) < MAX_EXAMPLES or key < keys[-1]:
            keys.append(key)
            keys.sort()
            del keys[MAX_EXAMPLES:]


Counts = dict[tuple[str, str], StepCounts]
"""(source, step) -> counts, in the order of the steps."""


def merge(into: Counts, other: Mapping[tuple[str, str], StepCounts]) -> None:
    """Add ``other`` to ``into``."""
    for key, counts in other.items():
        into.setdefault(key, StepCounts()).merge(counts)


def table(counts: Mapping[tuple[str, str], StepCounts]) -> str:
    """A plain table for a terminal: a row for each step and source, and below it what was left out or found."""
    rows: list[tuple[str, ...]] = [("step", "source", "documents", "left out", "changed", "characters", "removed")]
    below: dict[int, list[str]] = {}
    for (source, step), each in counts.items():
        numbers = (each.documents, each.dropped.total(), each.changed, each.characters, each.characters_removed)
        rows.append((step, source, *(f"{number:,}" for number in numbers)))
        below[len(rows) - 1] = _reasons(each)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for index, row in enumerate(rows):
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(_pair(row, widths))
        ]
        lines += ["  ".join(cells).rstrip(), *(f"    {reason}" for reason in below.get(index, ()))]
    return "\n".join(lines) + "\n"


def _pair(row: tuple[str, ...], widths: list[int]) -> list[tuple[str, int]]:
    return list(zip(row, widths, strict=True))


def _reasons(counts: StepCounts) -> list[str]:
    lines = []
    for kind in sorted(counts.dropped.keys() | counts.noted.keys()):
        number = f"{counts.dropped[kind]:,} left out" if kind in counts.dropped else ""
        if kind in counts.noted and kind not in counts.dropped:
            number = f"{counts.noted[kind]:,} in {counts.noted_documents[kind]:,} documents"
        examples = printable_text("; ".join(key[-1] for key in counts.examples.get(kind, ())[:2]))
        lines.append(f"{kind}: {number}, such as {examples}")
    return lines + [f"{times:,} x {printable_text(line)}" for line, times in _first(counts.quoted)]


def _first(quoted: Counter[str]) -> list[tuple[str, int]]:
    return sorted(quoted.items(), key=lambda item: (-item[1], item[0]))[:MAX_QUOTED]
