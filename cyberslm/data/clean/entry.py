"""What flows through cleaning, and the two shapes a step can have.

A per-document step is a pure function of one entry. A corpus-wide step first surveys all entries: its looker is pure
and may run in any process, ``add`` gathers what it found in any order, ``finish`` returns a per-document step that
knows the corpus. So the last pass is always a pure map over entries, whatever the steps are, and everything here can be
sent to a worker process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Entry(NamedTuple):
    """A text and its place: the key of its source, the printable name of its file and the line where it begins.

    ``record`` says that the text was taken out of a record, page or mail, so that its own lines are not lines of the
    file. ``number`` is the document's place in its file, as several may begin on one line.
    """

    text: str
    source: str
    name: str
    line: int = 1
    record: bool = False
    number: int = 0

    def place(self, line: int = 1) -> str:
        """Where ``line`` of the text (from 1) stands, as ``file:line``."""
        if not self.record:
            return f"{self.name}:{self.line + line - 1}"
        return f"{self.name}:{self.line}" + (f" (line {line} of the text)" if line > 1 else "")


class Note(NamedTuple):
    """Something worth counting in one text: ``line`` is where it is first met, ``detail`` says more in an example.

    ``quoted`` is a line of text that many documents share; it is the only text that a report repeats.
    """

    kind: str
    line: int = 1
    times: int = 1
    detail: str = ""
    quoted: str = ""


class Group(NamedTuple):
    """The near copies that a text belongs to: 16 bytes that name them, and the source of the copy that comes first."""

    key: bytes
    source: str
    near: bool = False


class Outcome(NamedTuple):
    """What a step makes of one entry: the text after it, or the reason why the document is left out."""

    text: str
    dropped: str | None = None
    notes: tuple[Note, ...] = ()
    group: Group | None = None


class Step(Protocol):
    def apply(self, entry: Entry) -> Outcome: ...


@runtime_checkable
class Survey(Protocol):
    """The first half of a corpus-wide step; the looker and what it returns can be sent between processes."""

    def looker(self) -> Callable[[Entry], Any]: ...

    def add(self, entry: Entry, found: Any) -> None: ...

    def finish(self) -> Step: ...
