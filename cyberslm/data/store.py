"""`TokenStore`: the shards of one split as one array of ids, memory-mapped, each token traced to its file.

Opening reads headers only, so a store of any size opens at once. Offsets are Python integers: files beyond 4 GiB are
read right. The documents of a source lie together, so a source is a range of documents and of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cyberslm.data.places import Names
from cyberslm.data.shards import (
    HEADER,
    PREPARE_AGAIN,
    RECORD,
    SUFFIX,
    Ids,
    Place,
    ShardHeader,
    read_header,
    shard_name,
    token_type,
)
from cyberslm.errors import InputError, IntegrityError

Ints = npt.NDArray[np.int64]


class Origin(NamedTuple):
    """Where a token came from.

    ``source`` is a key such as data.sources[0], ``file`` a path below it, or ``archive.zip!member``, ``line`` where its
    document begins there, and ``document`` the document's number in the store.
    """

    source: str
    file: str
    line: int
    document: int


class SourceRange(NamedTuple):
    """The documents and tokens of one source; the ends are exclusive."""

    source: int
    first_document: int
    end_document: int
    first_token: int
    end_token: int


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
        both = list(zip(paths, headers, strict=True))
        self._tokens: list[Ids] = [
            np.memmap(path, token_type(vocab_size), "r", HEADER.size, (header.num_tokens,)) for path, header in both
        ]
        self._ends: list[npt.NDArray[np.uint64]] = [
            np.memmap(path, np.dtype("<u8"), "r", header.ends_offset, (header.num_documents,)) for path, header in both
        ]
        self._records: list[npt.NDArray[np.void]] = [
            np.memmap(path, RECORD, "r", header.records_offset, (header.num_documents,)) for path, header in both
        ]
        self._masks: list[npt.NDArray[np.uint8] | None] = [
            np.memmap(path, np.uint8, "r", header.mask_offset, (header.mask_bytes,)) if header.mask_bytes else None
            for path, header in both
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

    @property
    def masked(self) -> bool:
        """Whether any token is not to be trained."""
        return any(mask is not None for mask in self._masks)

    @cached_property
    def sources(self) -> tuple[SourceRange, ...]:
        """The sources that have documents here, in order."""
        found: list[SourceRange] = []
        document = 0
        while document < self.num_documents:
            source = self.place(document).source
            end = bisect_right(range(self.num_documents), source, lo=document, key=lambda index: self.place(index)[0])
            found.append(SourceRange(source, document, end, self._first_token(document), self._first_token(end)))
            document = end
        return tuple(found)

    def slice(self, start: int, stop: int) -> Ints:
        """Ids ``start`` to ``stop`` (exclusive) as int64, across shards."""
        out = np.empty(max(0, stop - start), np.int64)
        for shard, first, until in self._parts(start, stop):
            base = self._token_starts[shard]
            part = out[first - start : until - start]
            part[:] = self._tokens[shard][first - base : until - base]
            if int(part.max()) >= self.vocab_size:
                raise IntegrityError(
                    f"{self.paths[shard]} holds token id {part.max()}, beyond its vocabulary; {PREPARE_AGAIN}"
                )
        return out

    def trained(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the tokens ``start`` to ``stop`` (exclusive) are to be targets."""
        out = np.ones(max(0, stop - start), np.bool_)
        for shard, first, until in self._parts(start, stop):
            mask = self._masks[shard]
            if mask is not None:
                low, high = first - self._token_starts[shard], until - self._token_starts[shard]
                bits = np.unpackbits(mask[low // 8 : -(-high // 8)], bitorder="little")
                out[first - start : until - start] = bits[low % 8 : low % 8 + high - low]
        return out

    def starts_within(self, start: int, stop: int) -> Ints:
        """The first tokens of documents from ``start`` to ``stop`` (exclusive), in order."""
        found = []
        for shard, first, until in self._parts(start, stop):
            base, ends = self._token_starts[shard], self._ends[shard]
            if first == base:
                found.append(np.array([base], np.int64))
            edges = np.array([first - base, until - base], np.uint64)
            low, high = np.searchsorted(ends, edges).tolist()
            if low < high:
                found.append(ends[low:high].astype(np.int64) + base)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def ends(self, first: int, stop: int) -> Ints:
        """The end (exclusive) of each document from number ``first`` to ``stop``, in tokens of the store."""
        parts = self._of_documents(first, stop)
        return np.concatenate(
            [self._ends[shard][low:high].astype(np.int64) + self._token_starts[shard] for shard, low, high in parts]
        )

    def records(self, first: int, stop: int) -> npt.NDArray[np.void]:
        """The RECORD of each document from number ``first`` to ``stop``."""
        return np.concatenate([self._records[shard][low:high] for shard, low, high in self._of_documents(first, stop)])

    def document_bounds(self, index: int) -> tuple[int, int]:
        """First token and end (exclusive) of a document."""
        self._check_document(index)
        return self._first_token(index), self._first_token(index + 1)

    def place(self, document: int) -> Place:
        """Numbers of a document's source and file, and the line where it begins."""
        self._check_document(document)
        shard = bisect_right(self._document_starts, document) - 1
        line, _, source, file, member = self._records[shard][document - self._document_starts[shard]].item()
        return Place(source, file, line, member)

    def document_at(self, token: int) -> int:
        """The number of the document that a token belongs to."""
        if not 0 <= token < self.num_tokens:
            raise InputError(f"token {token} is not within 0 to {self.num_tokens - 1}")
        shard = bisect_right(self._token_starts, token) - 1
        local = np.uint64(token - self._token_starts[shard])
        return self._document_starts[shard] + int(np.searchsorted(self._ends[shard], local, "right"))

    def origin(self, token: int) -> Origin:
        """The file that a token came from; raises IntegrityError when the lists beside the shards can't tell."""
        document = self.document_at(token)
        place = self.place(document)
        source, path = self._names.of(place)
        return Origin(source, path, place.line, document)

    @cached_property
    def _names(self) -> Names:
        return Names(self.paths[0].parent)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that tokens ``start`` to ``stop`` lie in, each with the part of the range that it holds."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise InputError(f"tokens {start} to {stop} are not within 0 to {self.num_tokens}")
        shard = bisect_right(self._token_starts, start) - 1
        while start < stop:
            until = min(stop, self._token_starts[shard + 1])
            yield shard, start, until
            shard, start = shard + 1, until

    def _of_documents(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that documents ``first`` to ``stop`` lie in, each with their numbers in it."""
        if not 0 <= first < stop <= self.num_documents:
            raise InputError(f"documents {first} to {stop} are not within 0 to {self.num_documents}")
        begin = bisect_right(self._document_starts, first) - 1
        for shard in range(begin, bisect_left(self._document_starts, stop)):
            base, after = self._document_starts[shard : shard + 2]
            yield shard, max(0, first - base), min(stop, after) - base

    def _first_token(self, document: int) -> int:
        """The first token of a document; the number of tokens for the one after the last."""
        shard = bisect_right(self._document_starts, document) - 1
        if shard == len(self.paths):
            return self.num_tokens
        local = document - self._document_starts[shard]
        return self._token_starts[shard] + (int(self._ends[shard][local - 1]) if local else 0)

    def _check_document(self, index: int) -> None:
        if not 0 <= index < self.num_documents:
            raise InputError(f"document {index} is not within 0 to {self.num_documents - 1}")


def _check_tokenizer(path: Path, header: ShardHeader, tokenizer_sha256: str, vocab_size: int) -> None:
    if header.tokenizer_sha256 != tokenizer_sha256:
        raise IntegrityError(
            f"{path} was written with tokenizer {header.tokenizer_sha256[:12]}, not {tokenizer_sha256[:12]}; "
            f"{PREPARE_AGAIN}"
        )
    if header.vocab_size != vocab_size:
        raise IntegrityError(f"{path} is for {header.vocab_size} ids, the tokenizer has {vocab_size}; {PREPARE_AGAIN}")
