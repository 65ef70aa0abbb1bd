"""Files -> documents: a stream in a fixed order, with a count of everything that is not in it.

``read_documents`` depends on nothing but the file and the settings, so files can be read in any process and order. A
file is peeled layer by layer: compression, archive, format, each told by content or name (``readers.formats``). Text is
taken as it is, with exceptions that make copies equal: a byte order mark at the start is dropped, CRLF and lone CR
become LF (in records too), and lone surrogates (JSON can spell them) become U+FFFD and are counted. A document that is
empty or only white space is skipped and counted. One document at a time is held in memory.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import InputFile, printable, reading
from cyberslm.data.readers import archives, html, json_records, mail, plain, tables
from cyberslm.data.readers.formats import (
    ARCHIVES,
    HEAD_BYTES,
    Format,
    content_format,
    named_format,
)
from cyberslm.data.readers.place import Place, Texts, Unreadable
from cyberslm.data.readers.streams import CHUNK, Budget, uncompressed
from cyberslm.data.readers.text import pieces, unix
from cyberslm.errors import DataError
from cyberslm.text.codec import mend

READERS: Mapping[Format, Callable[[io.BufferedReader, Place], Texts]] = {
    "text": plain.read_text,
    "html": html.read_html,
    "jsonl": json_records.read_jsonl,
    "json": json_records.read_json,
    "csv": tables.read_csv,
    "tsv": tables.read_tsv,
    "parquet": tables.read_parquet,
    "mbox": mail.read_mbox,
    "eml": mail.read_eml,
}
RECORDS = ("jsonl", "json", "csv", "tsv", "parquet")
"""Formats that can hold conversations."""


class Document(NamedTuple):
    """A text and where it came from.

    ``source`` is the file's printable path, ``path!member`` in an archive; ``line`` (from 1) the line where it begins,
    or the number of its row in Parquet.
    """

    text: str
    source: str
    line: int


def read_documents(file: InputFile, config: DataConfig, counts: Counts) -> Iterator[Document]:
    """The documents of one file, in its order.

    ``counts`` gains what is skipped, mended or cut; documents and bytes are counted by the caller, who may still drop
    some. Raises DataError with the place for bad input (on_bad_input: error) and for a file that changed meanwhile.
    """
    place = Place(name=printable(file.path), config=config, counts=counts)
    with reading(file.path), _opened(file) as stream:
        yield from _documents(stream, file.path.name, place, Budget.of(file.size, config))
        _unchanged(file)


def copy_digest(text: str) -> bytes:
    """SHA-256 of the text with LF line ends and no white space around it: equal for copies that differ in those."""
    return hashlib.sha256(unix(text).strip().encode("utf-8", "surrogatepass")).digest()


def _opened(file: InputFile) -> io.BufferedReader:
    return io.BufferedReader(io.FileIO(file.path), CHUNK)


def _documents(
    stream: io.BufferedReader, name: str, place: Place, budget: Budget, *, inside: bool = False
) -> Iterator[Document]:
    try:
        stream = uncompressed(stream, budget)
        head = stream.peek(HEAD_BYTES)
        form = content_format(head) or named_format(name) or "text"
        if not head:
            place.skip("empty", 1)
        elif place.config.format != "text" and form not in (*RECORDS, *ARCHIVES):
            raise Unreadable(
                f"a {form} file, and data.format: {place.config.format} reads records", reason="no records"
            )
        elif form not in ARCHIVES:
            yield from _finished(READERS[form](stream, place), place, follow_lines=form == "text")
        elif inside or (form == "zip" and not stream.seekable()):
            place.skip(archives.NESTED, None)
        else:
            for member in archives.members(stream, form, place, budget):
                yield from _documents(member.stream, member.name, member.place, budget, inside=True)
    except Unreadable as error:
        place.bad_stream(error)


def _finished(texts: Texts, place: Place, *, follow_lines: bool) -> Iterator[Document]:
    """Mended, not empty, and none longer than ``data.max_document_bytes``."""
    limit = place.config.max_document_bytes
    for found, line in texts:
        text = unix(found)
        if not text.isascii():
            text, _, replaced = mend(text)
            place.counts.mended_surrogates += replaced
        if not text or text.isspace():
            place.skip("empty", line)
        elif len(text) * 4 <= limit or len(text.encode()) <= limit:
            yield Document(text, place.name, line)
        else:
            yield from _cut(text, line, place, follow_lines=follow_lines)


def _cut(text: str, line: int, place: Place, *, follow_lines: bool) -> Iterator[Document]:
    for number, piece in enumerate(pieces(text, place.config.max_document_bytes)):
        if number:
            place.cut()
        if piece.strip():
            yield Document(piece, place.name, line)
        else:
            place.skip("empty", line)
        line += piece.count("\n") if follow_lines else 0


def _unchanged(file: InputFile) -> None:
    stat = file.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(f"{printable(file.path)} changed while it was being read; prepare from a copy that stays still")
