"""Byte streams that can be trusted: decompressed on the fly, in bounded memory, up to a bounded size.

``inflate`` and ``guarded`` give an ordinary ``io.BufferedReader`` that can't seek. Whatever a damaged, cut or hostile
stream does surfaces as ``Unreadable``, after the bytes before it were delivered. One ``Budget`` belongs to one input
file and pays for every byte that any of its layers expands to, so that nesting and overlapping members gain nothing.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cyberslm.data.readers.formats import HEAD_BYTES, Compression, content_compression
from cyberslm.data.readers.place import Place, Unreadable
from cyberslm.errors import DataError

if TYPE_CHECKING:
    from cyberslm.data.config import DataConfig

CHUNK = 1 << 18
FEED = 1 << 16
# A kibibyte of Zstandard can become 32 MiB at once; its decoder takes no limit.
ZSTD_FEED = 1 << 10
ALWAYS_ALLOWED = 1 << 26
XZ_MEMORY = 1 << 28
MAX_LAYERS = 2


@dataclass
class Budget:
    """How many bytes the compressed parts of one input file may become, all layers together."""

    limit: int
    spent: int = 0

    @classmethod
    def of(cls, size: int, config: DataConfig) -> Budget:
        return cls(max(ALWAYS_ALLOWED, size * config.max_expansion))

    def spend(self, number: int) -> None:
        self.spent += number
        if self.spent > self.limit:
            raise Unreadable(
                f"expands to more than {self.limit:,} bytes; if that is right, raise data.max_expansion",
                reason="expands too much",
            )


class _Machine(Protocol):
    """What the decompressors of bz2 and lzma have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


def uncompressed(stream: io.BufferedReader, budget: Budget) -> io.BufferedReader:
    """What lies under a stream's compression, if it has any, told by its first bytes."""
    for _ in range(MAX_LAYERS):
        kind = content_compression(stream.peek(HEAD_BYTES))
        if kind is None:
            return stream
        stream = inflate(kind, stream, budget)
    if content_compression(stream.peek(HEAD_BYTES)) is not None:
        raise Unreadable(f"compressed more than {MAX_LAYERS} times", reason="compressed too often")
    return stream


def inflate(kind: Compression, raw: io.BufferedReader, budget: Budget) -> io.BufferedReader:
    """The decompressed stream; DataError when the library for it is not installed."""
    if kind == "gz":
        return guarded(_gzip(raw), "gzip data", budget)
    machines: dict[str, tuple[Callable[[], _Machine], int]] = {
        "bz2": (bz2.BZ2Decompressor, FEED),
        "xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY), FEED),
        "zst": (_zstandard, ZSTD_FEED),
    }
    machine, feed = machines[kind]
    return guarded(_run(raw, machine, feed), f"{kind} data", budget)


def guarded(chunks: Iterator[bytes], what: str, budget: Budget | None) -> io.BufferedReader:
    """A stream of ``chunks``; what goes wrong while they are made becomes Unreadable and names ``what``."""
    return io.BufferedReader(_Guarded(chunks, what, budget), CHUNK)


def whole(stream: io.BufferedReader, place: Place, what: str) -> bytes:
    """All bytes of a stream that must be held in memory; Unreadable when they are more than a document may have."""
    data = stream.read(place.config.max_document_bytes + 1)
    if len(data) > place.config.max_document_bytes:
        raise place.too_long(what)
    return data


class _Guarded(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes], what: str, budget: Budget | None) -> None:
        self._chunks = chunks
        self._what = what
        self._budget = budget
        self._held = memoryview(b"")
        self._failure: Unreadable | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        """Fill the whole buffer while there is data, so that a peek sees a head of a known size."""
        target = memoryview(buffer)  # type: ignore[arg-type]
        filled = 0
        while filled < len(target):
            if not self._held and not self._next():
                break
            part = self._held[: len(target) - filled]
            target[filled : filled + len(part)] = part
            self._held = self._held[len(part) :]
            filled += len(part)
        if self._failure is not None and not filled:
            raise Unreadable(self._failure.problem, reason=self._failure.reason)
        return filled

    def _next(self) -> bool:
        if self._failure is not None:
            return False
        try:
            chunk = next(self._chunks, b"")
            if self._budget is not None:
                self._budget.spend(len(chunk))
        except Unreadable as error:
            self._failure = error
            return False
        except EOFError:
            self._failure = Unreadable(f"the {self._what} end in the middle")
            return False
        except NotImplementedError:  # zipfile's word for a compression that it doesn't know
            self._failure = Unreadable(f"the {self._what} are packed by a method that is not read")
            return False
        except (zlib.error, lzma.LZMAError) as error:
            self._failure = Unreadable(f"the {self._what} are damaged: {error}")
            return False
        except OSError as error:
            # What bz2, gzip (which quotes the data) and Zstandard raise has no number; EINVAL is a place that an
            # archive names and that can't be; anything else is the disk.
            if error.errno not in (None, errno.EINVAL):
                raise
            self._failure = Unreadable(f"the {self._what} are damaged")
            return False
        self._held = memoryview(chunk)
        return bool(chunk)


def _gzip(raw: io.BufferedReader) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as stream:
        while chunk := stream.read1(CHUNK):
            yield chunk


def _run(raw: io.BufferedReader, new: Callable[[], _Machine], feed: int) -> Iterator[bytes]:
    """The data of one or more compressed streams in a row, zeros between them passed over."""
    rest = raw.read(feed)
    while rest:
        machine = new()
        while not machine.eof:
            if machine.needs_input and not rest:
                rest = raw.read(feed)
                if not rest:
                    raise EOFError
            chunk, rest = machine.decompress(rest, CHUNK), b""
            if chunk:
                yield chunk
        rest = machine.unused_data
        while rest is not None and not (rest := rest.lstrip(b"\0")):
            rest = raw.read(feed)
            if not rest:
                return


class _Zstandard:
    """Zstandard's decoder with the interface of the others."""

    needs_input = True

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError("reading .zst needs zstandard: pip install 'cyberslm[data]'") from None
        self._error = zstandard.ZstdError
        self._decoder = zstandard.ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, _max_length: int = -1, /) -> bytes:
        try:
            return self._decoder.decompress(data)
        except self._error as error:
            raise OSError(str(error)) from error


def _zstandard() -> _Machine:
    return _Zstandard()
