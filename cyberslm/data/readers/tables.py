"""CSV, TSV and Parquet: a record from each row, named by the columns.

CSV has a header line; its separator is the commonest of comma, semicolon, bar and tab there. A row with another number
of cells than the header, or with bytes that aren't text, is a bad record. Parquet is read by row groups, only the
columns that can hold the text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from cyberslm.data.readers.place import BAD_RECORD, NO_TEXT, Place, Texts, Unreadable
from cyberslm.data.readers.plain import refuse_binary
from cyberslm.data.readers.records import Records, record_texts, texts_of, wanted_fields
from cyberslm.data.readers.streams import whole
from cyberslm.data.readers.text import passages
from cyberslm.errors import DataError

PARQUET_ROWS = 64
COMMON, TAB = ",;|\t", "\t"
"""Separators that a header is looked through for."""

_BAD = re.compile("[\0\udc80-\udcff]")
_QUOTED = re.compile('"[^"]*"')


def read_csv(stream: io.BufferedReader, place: Place) -> Texts:
    """A record from each row below the header."""
    return texts_of(table_records(stream, place, separators=COMMON), place)


def read_tsv(stream: io.BufferedReader, place: Place) -> Texts:
    """As ``read_csv`` with tabs."""
    return texts_of(table_records(stream, place, separators=TAB), place)


def table_records(stream: io.BufferedReader, place: Place, *, separators: str) -> Records:
    """Each row below the header, by the names of the columns."""
    refuse_binary(stream)
    lines = _lines(stream, place)
    first = next(lines, "")
    bare = _QUOTED.sub("", first)
    separator = max(separators, key=bare.count)
    header = _header(first, separator)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 2
        try:
            row = _next(reader, place.config.max_document_bytes)
        except csv.Error as error:
            if "field limit" in str(error):
                # Inside a cell nothing tells where the next row begins.
                raise place.too_long("a cell", line) from None
            place.bad(f"not CSV: {error}", reason=BAD_RECORD, line=line)
            continue
        if row is None:
            return
        if not row:
            place.skip("blank line", line)
        elif any(map(_BAD.search, row)):
            place.bad(NO_TEXT, reason=BAD_RECORD, line=line, fix="set data.encodings, mend the record")
        elif len(row) != len(header):
            place.bad(f"{len(row)} cells where the header has {len(header)}", reason=BAD_RECORD, line=line)
        else:
            yield dict(zip(header, row, strict=True)), line


def _header(first: str, separator: str) -> list[str]:
    try:
        header = next(csv.reader([first], delimiter=separator, strict=True), [])
    except csv.Error:
        header = []
    if _BAD.search(first) or not any(header) or len(set(header)) < len(header):
        raise Unreadable("the first line is no header: it must hold a different name for each column", line=1)
    return header


def _next(reader: Iterator[list[str]], limit: int) -> list[str] | None:
    """The next row; the module-wide limit of a cell is raised for this call only."""
    before = csv.field_size_limit(limit)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


def _lines(stream: io.BufferedReader, place: Place) -> Iterator[str]:
    for passage in passages(stream, place):
        if passage.torn:
            raise place.too_long("a line", passage.line)
        for text in passage.text.removesuffix("\n").split("\n"):
            yield text + "\n"


def read_parquet(stream: io.BufferedReader, place: Place) -> Texts:
    """A record from each row, numbered from 1. A file inside another must fit in memory; one of its own need not."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("reading Parquet needs pyarrow: pip install 'cyberslm[data]'") from None
    source = stream if stream.seekable() else io.BytesIO(whole(stream, place, "a Parquet file in another file"))
    row = 0
    try:
        file = parquet.ParquetFile(source)
        columns = sorted(wanted_fields(place) & set(file.schema_arrow.names))
        if not columns:
            names = ", ".join(ascii(name[:40]) for name in file.schema_arrow.names[:8])
            raise Unreadable(
                f"no column that holds text; it has {names}; name one in data.text_field", reason=BAD_RECORD
            )
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                filled = {name: "" if value is None else value for name, value in record.items()}
                yield from record_texts(filled, row, place)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unreadable(f"damaged Parquet after row {row}: {type(error).__name__}", line=row + 1) from None
