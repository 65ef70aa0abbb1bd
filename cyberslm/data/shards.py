"""Token shards: a memory-mapped array of ids on disk, and several of them as one.

A shard is a 128-byte little-endian header, the tokens (2 bytes each when the vocabulary has at most 65,536 ids, else
4), zeros up to a multiple of 8, and the end of each document as a 64-bit count of tokens from the shard's start. The
header is written last, so an unfinished shard has no magic. A document is never cut over two shards. Offsets are Python
integers: files beyond 4 GiB are read right. Every id is below ``vocab_size``: checked when written and again when read.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cyberslm.errors import DataError, InputError, IntegrityError

MAGIC = b"CSLMTOK\n"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQQ32s48x")
SUFFIX = ".tokens"
MIN_TOKENS = 2
PREPARE_AGAIN = "delete the folder and prepare the data again"

Ids = npt.NDArray[np.integer]


class ShardHeader(NamedTuple):
    """The header's numbers; ``text_bytes`` counts the UTF-8 bytes of the documents."""

    token_bytes: int
    vocab_size: int
    num_tokens: int
    num_documents: int
    text_bytes: int
    tokenizer_sha256: str

    @property
    def ends_offset(self) -> int:
        return HEADER.size + -(-self.num_tokens * self.token_bytes // 8) * 8

    @property
    def file_size(self) -> int:
        return self.ends_offset + 8 * self.num_documents

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, *self[:5], bytes.fromhex(self.tokenizer_sha256))


def token_bytes(vocab_size: int) -> int:
    """Bytes of one stored id."""
    return 2 if vocab_size <= 1 << 16 else 4


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
    _, version, width, vocab_size, tokens, documents, text_bytes, digest = HEADER.unpack(raw)
    if version != VERSION:
        raise IntegrityError(f"{path} has format version {version}, this program reads {VERSION}; {PREPARE_AGAIN}")
    header = ShardHeader(width, vocab_size, tokens, documents, text_bytes, digest.hex())
    if header.token_bytes != token_bytes(header.vocab_size):
        raise IntegrityError(
            f"{path} says {header.token_bytes} bytes a token, but a vocabulary of {header.vocab_size} takes "
            f"{token_bytes(header.vocab_size)}; {PREPARE_AGAIN}"
        )
    if not 1 <= header.num_documents <= header.num_tokens:
        raise IntegrityError(
            f"{path} says {header.num_documents} documents and {header.num_tokens} tokens; {PREPARE_AGAIN}"
        )
    if size != header.file_size:
        raise IntegrityError(f"{path} has {size} bytes, its header asks for {header.file_size}; {PREPARE_AGAIN}")
    return header


class ShardWriter:
    """Streams documents into the numbered shards of one split; memory does not grow with the tokens.

    Use as a context manager: leaving it without an error finishes the last shard. Meant for a folder that
    ``files.publish`` makes appear, which also turns an OSError such as a full disk into a StorageError.
    """

    def __init__(
        self, folder: Path, split: str, *, vocab_size: int, tokenizer_sha256: str, shard_tokens: int = 100_000_000
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
        self._stream: BinaryIO | None = None
        self._ends = array("Q")
        self._tokens = 0
        self._text_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish_shard()
        elif self._stream is not None:
            self._stream.close()

    def add(self, ids: Ids, *, text_bytes: int) -> None:
        """Append one document; raises DataError for an empty one or an id outside the vocabulary."""
        if ids.size == 0:
            raise DataError("a document without tokens can't be stored; skip it before")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}")
        stream = self._stream or self._begin_shard()
        stream.write(ids.astype(_dtype(token_bytes(self.vocab_size))).tobytes())
        self._tokens += ids.size
        self._ends.append(self._tokens)
        self._text_bytes += text_bytes
        self.num_tokens += ids.size
        self.num_documents += 1
        self.text_bytes += text_bytes
        if self._tokens >= self.shard_tokens:
            self._finish_shard()

    def _begin_shard(self) -> BinaryIO:
        path = self.folder / shard_name(self.split, len(self.paths))
        self._stream = path.open("xb")
        self.paths.append(path)
        self._stream.write(bytes(HEADER.size))
        return self._stream

    def _finish_shard(self) -> None:
        if self._stream is None:
            return
        header = ShardHeader(
            token_bytes=token_bytes(self.vocab_size),
            vocab_size=self.vocab_size,
            num_tokens=self._tokens,
            num_documents=len(self._ends),
            text_bytes=self._text_bytes,
            tokenizer_sha256=self.tokenizer_sha256,
        )
        stream, self._stream = self._stream, None
        with stream:
            stream.write(bytes(header.ends_offset - HEADER.size - header.num_tokens * header.token_bytes))
            stream.write(np.frombuffer(self._ends, np.uint64).astype("<u8").tobytes())
            stream.seek(0)
            stream.write(header.pack())
        self._ends = array("Q")
        self._tokens = self._text_bytes = 0


class TokenStore:
    """The shards of one split as one array of ``num_tokens`` ids, mapped from disk and read-only."""

    def __init__(self, paths: Sequence[Path], *, tokenizer_sha256: str, vocab_size: int) -> None:
        if not paths:
            raise InputError("a token store needs at least one shard")
        headers = [read_header(path) for path in paths]
        for path, header in zip(paths, headers, strict=True):
            _check_tokenizer(path, header, tokenizer_sha256, vocab_size)
        self.paths = tuple(paths)
        self.vocab_size = vocab_size
        self.text_bytes = sum(header.text_bytes for header in headers)
        self._token_starts = [0, *accumulate(header.num_tokens for header in headers)]
        self._document_starts = [0, *accumulate(header.num_documents for header in headers)]
        self._tokens: list[Ids] = [
            np.memmap(path, _dtype(header.token_bytes), "r", HEADER.size, (header.num_tokens,))
            for path, header in zip(paths, headers, strict=True)
        ]
        self._ends: list[Ids] = [
            np.memmap(path, np.dtype("<u8"), "r", header.ends_offset, (header.num_documents,))
            for path, header in zip(paths, headers, strict=True)
        ]
        for path, header, ends in zip(paths, headers, self._ends, strict=True):
            if int(ends[-1]) != header.num_tokens:
                raise IntegrityError(
                    f"{path}: its documents end at {ends[-1]}, not {header.num_tokens}; {PREPARE_AGAIN}"
                )

    @classmethod
    def open(cls, folder: Path, split: str, *, tokenizer_sha256: str, vocab_size: int) -> TokenStore:
        """All shards of ``split`` in ``folder``; raises IntegrityError for a gap, damage or another tokenizer."""
        paths = sorted(folder.glob(f"{split}-*{SUFFIX}"))
        wanted = [folder / shard_name(split, index) for index in range(len(paths))]
        if not paths or paths != wanted:
            missing = next((path for path in wanted if path not in paths), folder / shard_name(split, 0))
            raise IntegrityError(f"token shard {missing} is missing; {PREPARE_AGAIN}")
        return cls(paths, tokenizer_sha256=tokenizer_sha256, vocab_size=vocab_size)

    @property
    def num_tokens(self) -> int:
        return self._token_starts[-1]

    @property
    def num_documents(self) -> int:
        return self._document_starts[-1]

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Ids ``start`` to ``stop`` (exclusive) as int64, across shards."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise InputError(f"tokens {start} to {stop} are not within 0 to {self.num_tokens}")
        out = np.empty(stop - start, np.int64)
        shard, at = bisect_right(self._token_starts, start) - 1, start
        while at < stop:
            first = self._token_starts[shard]
            until = min(stop, self._token_starts[shard + 1])
            part = out[at - start : until - start]
            part[:] = self._tokens[shard][at - first : until - first]
            if int(part.max()) >= self.vocab_size:
                raise IntegrityError(
                    f"{self.paths[shard]} holds token id {part.max()}, beyond its vocabulary; {PREPARE_AGAIN}"
                )
            shard, at = shard + 1, until
        return out

    def document_bounds(self, index: int) -> tuple[int, int]:
        """First token and end (exclusive) of a document."""
        if not 0 <= index < self.num_documents:
            raise InputError(f"document {index} is not within 0 to {self.num_documents - 1}")
        shard = bisect_right(self._document_starts, index) - 1
        local, base, ends = index - self._document_starts[shard], self._token_starts[shard], self._ends[shard]
        return base + (int(ends[local - 1]) if local else 0), base + int(ends[local])


def _dtype(width: int) -> np.dtype[np.integer]:
    return np.dtype("<u2" if width == 2 else "<u4")


def _check_tokenizer(path: Path, header: ShardHeader, tokenizer_sha256: str, vocab_size: int) -> None:
    if header.tokenizer_sha256 != tokenizer_sha256:
        raise IntegrityError(
            f"{path} was written with tokenizer {header.tokenizer_sha256[:12]}, not {tokenizer_sha256[:12]}; "
            f"{PREPARE_AGAIN}"
        )
    if header.vocab_size != vocab_size:
        raise IntegrityError(f"{path} is for {header.vocab_size} ids, the tokenizer has {vocab_size}; {PREPARE_AGAIN}")
