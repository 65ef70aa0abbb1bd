"""Zip and tar: the members, one after the other, as streams. Nothing is written to disk.

An archive is treated like a folder: members whose name says no format that is read, links and hidden ones are passed
over and counted, archives in archives too. Sizes that an archive claims are checked before they are believed.
"""

from __future__ import annotations

import errno
import io
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import IO, NamedTuple

from cyberslm.data.readers.formats import ARCHIVES, Format, named_format, why_not_read
from cyberslm.data.readers.place import Place, Unreadable, printable_text
from cyberslm.data.readers.streams import CHUNK, Budget, guarded
from cyberslm.errors import DataError

MAX_MEMBERS = 1_000_000
MAX_DIRECTORY_BYTES = 1 << 26
MAX_TAR_HEADER = 1 << 20
MAX_NAME = 1000
NESTED = "archive in an archive"

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_MAX_COMMENT = 1 << 16
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Member(NamedTuple):
    """A file in an archive; its stream is good until the next one is asked for."""

    name: str
    place: Place
    stream: io.BufferedReader


def members(stream: io.BufferedReader, form: Format, place: Place, budget: Budget) -> Iterator[Member]:
    """The members of a zip file, in the order of its directory, or of a tar file. Raises Unreadable."""
    return _zip_members(stream, place, budget) if form == "zip" else _tar_members(stream, place)


def _inside(place: Place, name: str) -> Place:
    shown = printable_text(name if len(name) <= MAX_NAME else name[:MAX_NAME] + "...")
    return replace(place, name=f"{place.name}!{shown}")


def _zip_members(stream: io.BufferedReader, place: Place, budget: Budget) -> Iterator[Member]:
    size = _zip_directory_size(stream)
    if size > MAX_DIRECTORY_BYTES:
        raise Unreadable(f"a zip directory of {size:,} bytes; the largest that is read has {MAX_DIRECTORY_BYTES:,}")
    try:
        archive = zipfile.ZipFile(stream)
    except NotImplementedError:  # zipfile's word for a newer version of the format
        raise Unreadable("a zip file of a kind that is not read; pack it anew") from None
    except (zipfile.BadZipFile, ValueError, EOFError, struct.error) as error:
        raise Unreadable(f"a damaged zip file: {type(error).__name__}") from None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise Unreadable("a damaged zip file: its directory is not where it says") from None
    with archive:
        for info in archive.infolist():
            inner = _inside(place, info.filename)
            if info.filename.endswith("/") or not _is_read(info.filename, inner):
                continue
            if info.flag_bits & 1:
                inner.bad("encrypted", reason="encrypted", line=None, fix="decrypt it")
                continue
            with guarded(_zip_chunks(archive, info), "zip data", budget) as member:
                yield Member(info.filename, inner, member)


def _tar_members(stream: io.BufferedReader, place: Place) -> Iterator[Member]:
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            number = 0
            for info in archive:
                # The archive would remember every member.
                archive.members = []  # type: ignore[attr-defined]
                number += 1
                if number > MAX_MEMBERS:
                    raise Unreadable(f"a tar file of more than {MAX_MEMBERS:,} members")
                if info.isdir():
                    continue
                inner = _inside(place, info.name)
                if not info.isreg() or info.issparse():
                    inner.skip("not a regular file", None)
                    continue
                file = archive.extractfile(info) if _is_read(info.name, inner) else None
                if file is not None:
                    yield Member(info.name, inner, guarded(_tar_chunks(file, info.size), "tar data", None))
        # The checksum of a compressed archive comes last.
        while stream.read(CHUNK):
            pass
    except DataError:
        raise
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise Unreadable(f"a damaged tar file: {error}") from None


class _Header(tarfile.TarInfo):
    """A header that is whole, and whose extension records, which tarfile reads at once, have a sane size.

    tarfile itself takes a damaged header after the first, or the end of the file, for the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if len(buf) == tarfile.BLOCKSIZE and not any(buf):
            return super().frombuf(buf, encoding, errors)
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise Unreadable(f"a tar file that is damaged or has no end mark: {error}") from None
        if header.type in _LONG_HEADERS and header.size > MAX_TAR_HEADER:
            raise Unreadable(f"a tar header of {header.size:,} bytes; the largest that is read has {MAX_TAR_HEADER:,}")
        return header


def _is_read(name: str, place: Place) -> bool:
    parts = PurePosixPath(name).parts
    why = "hidden" if any(part.startswith(".") for part in parts[:-1]) else why_not_read(parts[-1] if parts else "")
    if why is None and named_format(parts[-1]) in ARCHIVES:
        why = NESTED
    if why is not None:
        place.skip(why, None)
    return why is None


def _zip_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    try:
        with archive.open(info) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (zipfile.BadZipFile, struct.error, UnicodeDecodeError) as error:
        raise Unreadable(f"the zip data are damaged: {type(error).__name__}") from None


def _tar_chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left:
        try:
            chunk = file.read(min(left, CHUNK))
        except tarfile.ReadError:
            chunk = b""
        if not chunk:
            raise EOFError
        left -= len(chunk)
        yield chunk


def _zip_directory_size(stream: io.BufferedReader) -> int:
    """Bytes of the directory, which zipfile reads whole and believes, from the end of the file (APPNOTE 4.3.14-16)."""
    size = stream.seek(0, io.SEEK_END)
    start = max(0, size - _END.size - _MAX_COMMENT - _LOCATOR64.size)
    stream.seek(start)
    tail = stream.read(_END.size + _MAX_COMMENT + _LOCATOR64.size)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise Unreadable("a zip file that is cut short: it has no directory")
    directory = int(_END.unpack_from(tail, at)[5])
    locator = at - _LOCATOR64.size
    if locator >= 0 and tail.startswith(b"PK\6\7", locator):
        stream.seek(min(size, _LOCATOR64.unpack_from(tail, locator)[2]))
        end = stream.read(_END64.size)
        directory = _END64.unpack(end)[8] if len(end) == _END64.size else size
    stream.seek(0)
    return directory
