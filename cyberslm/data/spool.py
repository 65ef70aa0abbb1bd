"""Documents on disk between two passes, so that sources are read, redacted and cleaned once.

A spool is a file of records: a fixed head, the file's name, the text. Source keys are stored as their place in a list
that the reader gives again. A spool lives in the staging folder of what is being prepared, or in a slice that another
machine made; its text is redacted already. A record that is cut off is an error, never the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cyberslm.data.clean.entry import Entry, Group
from cyberslm.errors import IntegrityError

HEAD = struct.Struct("<IQQQBHH16s")
RECORD, NEAR, GROUPED = 1, 2, 4
MAX_NAME_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 32


class Spooled(NamedTuple):
    """A document, and the group of near copies that it belongs to once cleaning has looked for them."""

    entry: Entry
    group: Group | None = None


def write_spool(path: Path, documents: Iterable[Spooled], keys: Sequence[str]) -> tuple[str, ...]:
    """Write documents in their order; returns the source keys to read them with: ``keys``, then others that they have.

    At most 65,536 keys.
    """
    places = {key: place for place, key in enumerate(keys)}

    def place_of(key: str) -> int:
        return places.setdefault(key, len(places))

    with path.open("xb") as stream:
        for entry, group in documents:
            name, text = entry.name.encode(), entry.text.encode()
            flags, group_key, source = RECORD * entry.record, b"", 0
            if group is not None:
                flags, group_key, source = flags | GROUPED | NEAR * group.near, group.key, place_of(group.source)
            sizes = len(name), len(text), entry.line, entry.number
            head = HEAD.pack(*sizes, flags, place_of(entry.source), source, group_key)
            stream.writelines((head, name, text))
    return tuple(places)


def read_spool(path: Path, keys: Sequence[str]) -> Iterator[Spooled]:
    """The documents of a spool; IntegrityError where it is cut off or not of these keys."""
    with path.open("rb") as stream:
        while head := stream.read(HEAD.size):
            if len(head) < HEAD.size:
                raise IntegrityError(f"{path} is cut off: prepare the data again")
            name_bytes, text_bytes, line, number, flags, key, source, group_key = HEAD.unpack(head)
            if max(key, source) >= len(keys) or name_bytes > MAX_NAME_BYTES or text_bytes > MAX_TEXT_BYTES:
                raise IntegrityError(f"{path} is damaged or was made with other sources: prepare the data again")
            name, text = _text(stream, name_bytes, path), _text(stream, text_bytes, path)
            entry = Entry(text, keys[key], name, line, record=bool(flags & RECORD), number=number)
            group = Group(group_key, keys[source], near=bool(flags & NEAR)) if flags & GROUPED else None
            yield Spooled(entry, group)


def _text(stream: BinaryIO, size: int, path: Path) -> str:
    data = stream.read(size)
    if len(data) < size:
        raise IntegrityError(f"{path} is cut off: prepare the data again")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{path} is damaged: prepare the data again") from error
