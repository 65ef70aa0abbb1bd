"""The tree between text and dataclasses: every value keeps the place it was written, every complaint is collected.

Messages must be the same on every run and safe to print, so places sort by source and line, and text from files or
arguments is shown shortened and with control characters escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cyberslm.errors import ConfigError

MAX_DEPTH = 32
MAX_PROBLEMS = 50
MAX_INTEGER_BITS = 256
HALF_CHARACTER = "holds half of a surrogate pair, which is not a character"


@dataclass(frozen=True)
class Place:
    """Where a value was written; ``base`` is the folder that its relative paths start from, ``line`` 0 means none."""

    source: str
    base: Path
    line: int = 0

    def at(self, line: int) -> Place:
        return replace(self, line=line)

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


Value = None | bool | int | float | str | dict[str, "Node"] | list["Node"]


@dataclass(frozen=True)
class Node:
    """One value. ``text`` is a plain scalar as it was written; ``quoted`` tells ``"1"`` from ``1``.

    A ``broken`` value could not be read and has been complained about.
    """

    place: Place
    value: Value
    text: str | None = None
    quoted: bool = False
    broken: bool = False

    @property
    def empty(self) -> bool:
        """Nothing was written after the colon, which adds nothing to a section; an explicit ``null`` is not empty."""
        return self.text == "" and not self.quoted

    def __str__(self) -> str:
        if isinstance(self.value, dict | list):
            return "a mapping" if isinstance(self.value, dict) else "a list"
        if self.value is None:
            return "null"
        return shown(self.value) if self.text is None or isinstance(self.value, str) else printable(self.text)


@dataclass
class Problems:
    """All complaints about one configuration, raised together as one ``ConfigError`` with one line each."""

    found: list[tuple[bool, str, int, str]] = field(default_factory=list)
    failures: int = 0
    """Complaints and the values they make unusable; whoever sees it grow has nothing to build."""

    def add(self, place: Place, message: str) -> None:
        self.add_line(place, f"{place}: {message}")

    def add_line(self, place: Place, line: str) -> None:
        """A complaint that already says where. Files come before the command line, which has no line numbers."""
        self.failures += 1
        self.found.append((not place.line, place.source, place.line, line))

    @property
    def full(self) -> bool:
        """More would not be shown, so that hints need not be worked out."""
        return len(self.found) >= MAX_PROBLEMS

    def raise_if_any(self) -> None:
        if self.found:
            lines = [line for *_, line in sorted(self.found)]
            rest = len(lines) - MAX_PROBLEMS
            raise ConfigError("\n".join(lines[:MAX_PROBLEMS] + ([f"... and {rest} more"] if rest > 0 else [])))


def printable(text: str, limit: int = 60) -> str:
    """``text`` on one line, shortened, with everything a terminal could act on escaped."""
    text = text if len(text) <= limit else text[:limit] + "..."
    return text if text.isprintable() else repr(text)[1:-1]


def shown(value: object, limit: int = 60) -> str:
    """``value`` as in Python, shortened."""
    if isinstance(value, str):
        return repr(value if len(value) <= limit else value[:limit] + "...")
    return printable(repr(value), limit)


def is_unicode(text: str) -> bool:
    """False for text with lone surrogates, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_python(value: object, place: Place, problems: Problems, depth: int = 1) -> Node:
    """The tree of JSON-like data. Values that JSON or YAML couldn't hold become problems."""
    if depth > MAX_DEPTH:
        problems.add(place, f"nested more than {MAX_DEPTH} levels deep")
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                problems.add(place, f"keys must be text, got {shown(key)}")
        pairs = ((key, entry) for key, entry in value.items() if isinstance(key, str))
        return Node(place, {key: from_python(entry, place, problems, depth + 1) for key, entry in pairs})
    elif isinstance(value, list | tuple):
        return Node(place, [from_python(entry, place, problems, depth + 1) for entry in value])
    elif isinstance(value, float) and value - value != 0:
        problems.add(place, f"numbers must be finite, got {value}")
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        problems.add(place, f"an integer of {value.bit_length()} bits; at most {MAX_INTEGER_BITS} are read")
    elif isinstance(value, str) and not is_unicode(value):
        problems.add(place, f"{shown(value)} {HALF_CHARACTER}")
    elif value is None or isinstance(value, bool | int | float | str):
        return Node(place, value)
    else:
        problems.add(place, f"must be made of mappings, lists, text, numbers, true, false and null, got {shown(value)}")
    return Node(place, None, broken=True)
