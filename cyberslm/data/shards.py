"""Token shards, format 2: ids on disk, each document with the place it came from. `store` reads them.

A shard is little-endian and every section begins at a multiple of 8:

    header, 128 bytes | ids, 2 bytes each up to a vocabulary of 65,536, else 4 | end of each document, 64-bit, in tokens
    of the shard | a record of 24 bytes a document: line, UTF-8 bytes, source, file, member | bits of what is trained

``source`` is the place in `data.sources` (or `data.validation`), ``file`` and ``member`` are as in `places`;
``line`` is where the document begins in its file, from 1. The last section has one bit a token, the lowest first, 1 =
a target; it is absent where every token is one. The header is written last, so an unfinished shard has no magic. A
document is never cut over two shards, and where a shard ends follows from the documents alone: copying them again
gives the same bytes. Every id is below ``vocab_size``: checked when written and again when read.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cyberslm.errors import DataError, InputError, IntegrityError
from cyberslm.files import Kept

MAGIC = b"CSLMTOK\n"
VERSION = 2
HEADER = struct.Struct("<8sIIQQQQ32sQ40x")
RECORD = np.dtype([("line", "<u8"), ("text_bytes", "<u4"), ("source", "<u4"), ("file", "<u4"), ("member", "<u4")])
MAX_TEXT_BYTES = (1 << 32) - 1
SUFFIX = ".tokens"
INPUTS_FILE = "inputs.jsonl"
MEMBERS_FILE = "members.jsonl"
MIN_TOKENS = 2
PREPARE_AGAIN = "delete the folder and prepare the data again"

Ids = npt.NDArray[np.integer]


class Place(NamedTuple):
    """Where a document came from: numbers of its source and file, the line where it begins, an archive's member."""

    source: int
    file: int
    line: int
    member: int = 0


NOWHERE = Place(0, 0, 0)


class ShardHeader(NamedTuple):
    """The header's numbers; ``text_bytes`` counts the UTF-8 bytes of the documents."""

    token_bytes: int
    vocab_size: int
    num_tokens: int
    num_documents: int
    text_bytes: int
    tokenizer_sha256: str
    mask_bytes: int = 0

    @property
    def ends_offset(self) -> int:
        return HEADER.size + -(-self.num_tokens * self.token_bytes // 8) * 8

    @property
    def records_offset(self) -> int:
        return self.ends_offset + 8 * self.num_documents

    @property
    def mask_offset(self) -> int:
        return self.records_offset + RECORD.itemsize * self.num_documents

    @property
    def file_size(self) -> int:
        return self.mask_offset + self.mask_bytes

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, *self[:5], bytes.fromhex(self.tokenizer_sha256), self.mask_bytes)


def token_bytes(vocab_size: int) -> int:
    """Bytes of one stored id."""
    return 2 if vocab_size <= 1 << 16 else 4


def token_type(vocab_size: int) -> np.dtype[np.integer]:
    """How one id is stored."""
    return np.dtype("<u2" if token_bytes(vocab_size) == 2 else "<u4")


def shard_name(split: str, index: int) -> str:
    return f"{split}-{index:05d}{SUFFIX}"


def read_header(path: Path) -> ShardHeader:
    """Read and check one shard's header against its file's size; raises IntegrityError naming the file and the fix."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise IntegrityError(f"cannot read {path}: {error.strerror}; {PREPARE_AGAIN}") from error
    if len(raw) < HEADER.size or raw[:8] != MAGIC:
        raise IntegrityError(f"{path} is not a finished token shard; {PREPARE_AGAIN}")
    _, version, width, vocab_size, tokens, documents, text_bytes, digest, mask_bytes = HEADER.unpack(raw)
    if version != VERSION:
        raise IntegrityError(f"{path} has format version {version}, this program reads {VERSION}; {PREPARE_AGAIN}")
    header = ShardHeader(width, vocab_size, tokens, documents, text_bytes, digest.hex(), mask_bytes)
    if header.token_bytes != token_bytes(header.vocab_size):
        raise IntegrityError(
            f"{path} says {header.token_bytes} bytes a token, but a vocabulary of {header.vocab_size} takes "
            f"{token_bytes(header.vocab_size)}; {PREPARE_AGAIN}"
        )
    if not 1 <= header.num_documents <= header.num_tokens:
        raise IntegrityError(
            f"{path} says {header.num_documents} documents and {header.num_tokens} tokens; {PREPARE_AGAIN}"
        )
    if header.mask_bytes not in (0, -(-header.num_tokens // 8)):
        raise IntegrityError(f"{path} says {header.mask_bytes} bytes of mask; {PREPARE_AGAIN}")
    if size != header.file_size:
        raise IntegrityError(f"{path} has {size} bytes, its header asks for {header.file_size}; {PREPARE_AGAIN}")
    return header


class ShardWriter:
    """Streams documents into the numbered shards of one split.

    Memory holds the current shard's index, 32 bytes a document and, once one of its tokens is not trained, a bit a
    token. Use as a context manager: leaving it without an error finishes the last shard. Meant for a folder that
    ``files.publish`` makes appear, which also turns an OSError such as a full disk into a StorageError. With ``kept``,
    whose root is ``folder``, finished shards are marked there, and those of an earlier process are taken over:
    `taken_over` tells which documents not to add again.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        tokenizer_sha256: str,
        shard_tokens: int = 100_000_000,
        kept: Kept | None = None,
    ) -> None:
        self.folder = folder
        self.split = split
        self.vocab_size = vocab_size
        self.tokenizer_sha256 = tokenizer_sha256
        self.shard_tokens = shard_tokens
        self.num_tokens = 0
        self.num_documents = 0
        self.text_bytes = 0
        self.paths: list[Path] = []
        self._source = 0
        self._stream: BinaryIO | None = None
        self._index = _Index()
        self._kept = kept
        self._taken_over: list[tuple[Path, ShardHeader]] = []
        if kept is not None:
            self._take_over(kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish_shard()
        elif self._stream is not None:
            self._stream.close()

    def add(
        self, ids: Ids, *, text_bytes: int, place: Place = NOWHERE, trained: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Append one document; ``trained`` says which of its tokens are targets (None: all of them).

        Raises DataError for an empty one or an id outside the vocabulary, InputError for a mask of another length or a
        source that comes before the last one's.
        """
        self._check(ids, text_bytes, place, trained)
        record = np.array([(place.line, text_bytes, place.source, place.file, place.member)], RECORD)
        stream = self._stream or self._begin_shard()
        stream.write(ids.astype(token_type(self.vocab_size)).tobytes())
        self._index.add(ids.size, record, text_bytes, trained)
        self._source = place.source
        self.num_tokens += ids.size
        self.num_documents += 1
        self.text_bytes += text_bytes
        if self._index.tokens >= self.shard_tokens:
            self._finish_shard()

    def taken_over(self) -> Iterator[int]:
        """Tokens of each document, in order, that shards of an earlier process hold."""
        for path, header in self._taken_over:
            ends = np.fromfile(path, "<u8", header.num_documents, offset=header.ends_offset)
            yield from np.diff(ends, prepend=np.uint64(0)).tolist()

    def _take_over(self, kept: Kept) -> None:
        """Those without a gap before them and of this tokenizer; the others are deleted."""
        while kept.holds(name := shard_name(self.split, len(self.paths))):
            path = self.folder / name
            header = read_header(path)
            if (header.tokenizer_sha256, header.vocab_size) != (self.tokenizer_sha256, self.vocab_size):
                break
            self.paths.append(path)
            self._taken_over.append((path, header))
            self.num_tokens += header.num_tokens
            self.num_documents += header.num_documents
            self.text_bytes += header.text_bytes
        for path in self.folder.glob(f"{self.split}-*{SUFFIX}"):
            if path not in self.paths:
                path.unlink()

    def _check(self, ids: Ids, text_bytes: int, place: Place, trained: npt.NDArray[np.bool_] | None) -> None:
        if text_bytes > MAX_TEXT_BYTES:
            raise DataError(f"a document of {text_bytes:,} bytes can't be stored; the limit is {MAX_TEXT_BYTES:,}")
        if trained is not None and trained.size != ids.size:
            raise InputError(f"a loss mask of {trained.size} does not fit a document of {ids.size} tokens")
        if not ids.size:
            raise DataError("a document without tokens can't be stored; skip it before")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}")
        if place.source < self._source:
            raise InputError("documents must come in the order of their sources")

    def _begin_shard(self) -> BinaryIO:
        path = self.folder / shard_name(self.split, len(self.paths))
        self._stream = path.open("xb")
        self.paths.append(path)
        self._stream.write(bytes(HEADER.size))
        return self._stream

    def _finish_shard(self) -> None:
        if self._stream is None:
            return
        index, self._index = self._index, _Index()
        mask = index.mask_bytes()
        header = ShardHeader(
            token_bytes=token_bytes(self.vocab_size),
            vocab_size=self.vocab_size,
            num_tokens=index.tokens,
            num_documents=len(index.ends),
            text_bytes=index.text_bytes,
            tokenizer_sha256=self.tokenizer_sha256,
            mask_bytes=len(mask),
        )
        stream, self._stream = self._stream, None
        with stream:
            stream.write(bytes(header.ends_offset - HEADER.size - header.num_tokens * header.token_bytes))
            stream.write(np.frombuffer(index.ends, np.uint64).astype("<u8").tobytes())
            stream.write(index.records)
            stream.write(mask)
            stream.seek(0)
            stream.write(header.pack())
        if self._kept is not None:
            self._kept.mark(self.paths[-1].name, self.paths[-1:])


class _Index:
    """What is kept of one shard while its tokens are streamed."""

    def __init__(self) -> None:
        self.tokens = self.text_bytes = 0
        self.ends = array("Q")
        self.records = bytearray()
        self._mask: bytearray | None = None
        self._odd = np.ones(0, np.bool_)

    def add(
        self, size: int, record: npt.NDArray[np.void], text_bytes: int, trained: npt.NDArray[np.bool_] | None
    ) -> None:
        if self._mask is not None or not (trained is None or trained.all()):
            self._mark(np.ones(size, np.bool_) if trained is None else trained)
        self.tokens += size
        self.ends.append(self.tokens)
        self.records += record.tobytes()
        self.text_bytes += text_bytes

    def mask_bytes(self) -> bytes:
        """One bit a token, or nothing where all are trained."""
        return b"" if self._mask is None else bytes(self._mask) + np.packbits(self._odd, bitorder="little").tobytes()

    def _mark(self, trained: npt.NDArray[np.bool_]) -> None:
        if self._mask is None:
            self._mask, self._odd = bytearray(b"\xff" * (self.tokens // 8)), np.ones(self.tokens % 8, np.bool_)
        bits = np.concatenate([self._odd, trained])
        whole = bits.size // 8 * 8
        self._mask += np.packbits(bits[:whole], bitorder="little").tobytes()
        self._odd = bits[whole:]
