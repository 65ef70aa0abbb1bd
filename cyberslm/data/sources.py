"""Files -> documents: a stream in a fixed order, with a count of everything that is not in it.

Text is taken as it is, with three exceptions that make copies equal: a UTF-8 byte order mark at the start of a file is
dropped, CRLF and lone CR become LF (in JSON strings too), and lone surrogates (JSON can spell them) become U+FFFD and
are counted. A document that is empty or only white space is skipped and counted. ``is_validation`` splits by content
alone, so copies fall on one side whatever their order, file or name. One document at a time is held in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cyberslm.data.config import DataConfig
from cyberslm.data.inputs import CHUNK, InputFile, Inspection, printable, reading
from cyberslm.errors import DataError
from cyberslm.text.codec import mend

HASH_SPAN = 1 << 64


class Document(NamedTuple):
    """A text and where it came from: ``source`` is the file's printable path, ``line`` (from 1) where it begins."""

    text: str
    source: str
    line: int


@dataclass
class Counts:
    """What one source gave. ``text_bytes`` is UTF-8; ``first`` tells where each kind of skip was first met."""

    documents: int = 0
    validation_documents: int = 0
    text_bytes: int = 0
    tokens: int = 0
    mended_surrogates: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, text_bytes: int, *, held_out: bool) -> None:
        self.documents += 1
        self.validation_documents += held_out
        self.text_bytes += text_bytes

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] += 1
        self.first.setdefault(reason, where)

    def summary(self) -> dict[str, object]:
        """Plain data for a manifest."""
        return {
            "documents": self.documents,
            "validation_documents": self.validation_documents,
            "bytes": self.text_bytes,
            "tokens": self.tokens,
            "mended_surrogates": self.mended_surrogates,
            "skipped": dict(sorted(self.skipped.items())),
            "first_skipped": dict(sorted(self.first.items())),
        }


def read_documents(file: InputFile, inspection: Inspection, config: DataConfig, counts: Counts) -> Iterator[Document]:
    """The documents of one inspected file, in its order.

    ``counts`` gains what is skipped or mended; documents and bytes are counted by the caller, who may still drop some.
    Raises DataError with the place for a bad record or file (on_bad_line: error) and for a file that changed meanwhile.
    """
    where = printable(file.path)
    if inspection.problem is not None:
        _refuse("binary or not UTF-8", where, f"{inspection.problem}; remove it", config, counts)
        return
    pieces = _records(file, config, counts) if file.is_jsonl else UNITS[config.txt_unit](file)
    for text, line in pieces:
        text, _, replaced = mend(text)
        counts.mended_surrogates += replaced
        if text.strip():
            yield Document(text, where, line)
        else:
            counts.skip("empty", f"{where}:{line}")


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: SHA-256 of ``copy_digest`` as a share of its range lies below ``fraction``."""
    return int.from_bytes(copy_digest(text)[:8], "big") < int(fraction * HASH_SPAN)


def copy_digest(text: str) -> bytes:
    """SHA-256 of the text with LF line ends and no white space around it: equal for copies that differ in those."""
    return hashlib.sha256(_unix(text).strip().encode("utf-8", "surrogatepass")).digest()


def _refuse(reason: str, where: str, problem: str, config: DataConfig, counts: Counts) -> None:
    if config.on_bad_line == "error":
        raise DataError(f"{problem} or set data.on_bad_line: skip")
    counts.skip(reason, where)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open(file: InputFile) -> io.TextIOWrapper:
    """Text with LF ends; bytes that are not UTF-8 become lone surrogates, which JSON lines are then refused for."""
    return file.path.open(encoding="utf-8-sig", errors="surrogateescape", newline=None, buffering=CHUNK)


def _lines(file: InputFile) -> Iterator[str]:
    """Lines with LF ends; at the end of the file makes sure that it is still the file that was inspected."""
    with reading(file.path), _open(file) as stream:
        yield from stream
        _unchanged(file)


def _unchanged(file: InputFile) -> None:
    stat = file.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(f"{printable(file.path)} changed while it was being read; prepare from a copy that stays still")


def _whole(file: InputFile) -> Iterator[tuple[str, int]]:
    with reading(file.path), _open(file) as stream:
        text = stream.read()
        _unchanged(file)
    yield text, 1


def _each_line(file: InputFile) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(_lines(file), 1):
        yield line.removesuffix("\n"), number


def _paragraphs(file: InputFile) -> Iterator[tuple[str, int]]:
    block: list[str] = []
    number = 0
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block).removesuffix("\n"), number - len(block)
            block = []
    if block:
        yield "".join(block).removesuffix("\n"), number - len(block) + 1


UNITS: Mapping[str, Callable[[InputFile], Iterator[tuple[str, int]]]] = {
    "file": _whole,
    "paragraph": _paragraphs,
    "line": _each_line,
}


def _records(file: InputFile, config: DataConfig, counts: Counts) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            counts.skip("blank line", f"{printable(file.path)}:{number}")
            continue
        text, problem = _record_text(line, config.text_field)
        if problem is None:
            yield _unix(text), number
        else:
            place = f"{printable(file.path)}:{number}"
            _refuse("bad record", place, f"{place}: {problem}; mend the record", config, counts)


def _record_text(line: str, name: str) -> tuple[str, str | None]:
    """The text of one JSON line, or what is wrong with it, said without quoting it."""
    try:
        line.encode()
        record = json.loads(line)
    except UnicodeEncodeError:
        return "", "not UTF-8"
    except json.JSONDecodeError as error:
        return "", f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError):
        return "", "not JSON that can be read: a number too long or nesting too deep"
    if not isinstance(record, dict):
        return "", f"a JSON {type(record).__name__} where an object with the field {name!r} is expected"
    if name not in record:
        return "", f"no field {name!r} (data.text_field); the record has {_some(record)}"
    text = record[name]
    return (text, None) if isinstance(text, str) else ("", f"field {name!r} is not a string")


def _some(record: dict[str, object]) -> str:
    names = ", ".join(repr(name[:40]) for name in list(record)[:8])
    return f"{names}, ..." if len(record) > 8 else names or "no fields"
