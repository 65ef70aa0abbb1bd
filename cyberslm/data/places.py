"""Numbers for where documents came from, and names for the numbers.

A document's file is a line of ``inputs.jsonl``, from 0. Where that file is an archive, its members that gave documents
are numbered from 1 in their order, and ``members.jsonl`` names them; it is absent where there are none. Both depend on
the files alone, not on who read them or what else was read.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from cyberslm.data.shards import INPUTS_FILE, MEMBERS_FILE, PREPARE_AGAIN, Place
from cyberslm.errors import IntegrityError


class Places:
    """Numbers the places of documents that come in the order of their files, and names members in ``folder``."""

    def __init__(self, files: Sequence[Mapping[str, Any]], folder: Path) -> None:
        self._files = [(str(facts["source"]), str(facts["path"])) for facts in files]
        self._path = folder / MEMBERS_FILE
        self._stack = ExitStack()
        self._stream: IO[str] | None = None
        self._key, self._name, self._place = "", "", Place(0, 0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def of(self, key: str, name: str, line: int) -> Place:
        """The place of the next document of source ``key`` in the file or archive member ``name``."""
        if (key, name) != (self._key, self._name):
            self._move(key, name)
        return self._place._replace(line=line)

    def _move(self, key: str, name: str) -> None:
        file, member = self._place.file, self._place.member
        while not self._holds(file, key, name):
            file, member = file + 1, 0
        if name != self._files[file][1]:
            member += 1
            self._write({"file": file, "member": member, "path": name})
        self._key, self._name = key, name
        self._place = Place(int(key[key.index("[") + 1 : -1]), file, 0, member)

    def _holds(self, file: int, key: str, name: str) -> bool:
        if file >= len(self._files):
            raise IntegrityError(f"a document of {key} comes from {name}, which is not the next file that was read")
        source, path = self._files[file]
        return source == key and (name == path or name.startswith(f"{path}!"))

    def _write(self, facts: Mapping[str, object]) -> None:
        if self._stream is None:
            self._stream = self._stack.enter_context(self._path.open("x", encoding="utf-8", newline="\n"))
        self._stream.write(json.dumps(facts) + "\n")


class FileName(NamedTuple):
    """A source such as data.sources[0], and the path of a file below it; ``archive.zip!member`` for a member."""

    source: str
    path: str


class Names:
    """The names in a folder of prepared data; only the places of lines are held, 8 bytes each."""

    def __init__(self, folder: Path) -> None:
        self._inputs, self._members = folder / INPUTS_FILE, folder / MEMBERS_FILE
        self._lines: dict[Path, array[int]] = {}

    def of(self, place: Place) -> FileName:
        """The file of a place; raises IntegrityError where the lists don't tell."""
        try:
            facts = self._read(self._inputs, place.file)
            path = self._member(place) if place.member else facts["path"]
            return FileName(str(facts["source"]), str(path))
        except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
            told = f"{self._inputs} does not tell file {place.file}"
            member = f", or {self._members} its member {place.member}" if place.member else ""
            raise IntegrityError(f"{told}{member}; {PREPARE_AGAIN}") from error

    def _member(self, place: Place) -> object:
        numbers = range(len(self._starts(self._members)) - 1)
        wanted = place.file, place.member
        line = bisect_left(numbers, wanted, key=lambda number: self._numbers(self._read(self._members, number)))
        facts = self._read(self._members, line)
        if self._numbers(facts) != wanted:
            raise KeyError(wanted)
        return facts["path"]

    def _numbers(self, facts: Mapping[str, Any]) -> tuple[int, int]:
        return facts["file"], facts["member"]

    def _read(self, path: Path, line: int) -> Mapping[str, Any]:
        with path.open("rb") as stream:
            stream.seek(self._starts(path)[line])
            return dict(json.loads(stream.readline()))

    def _starts(self, path: Path) -> array[int]:
        """Where each line begins, and where the last one ends."""
        if path not in self._lines:
            with path.open("rb") as stream:
                self._lines[path] = array("Q", accumulate((len(line) for line in stream), initial=0))
        return self._lines[path]
