"""Where each row's tokens lie in the store: text cut every T tokens, or documents packed into rows of T positions.

A row is a list of spans of the store; position t of a span holds token ``start + t`` and its target is the token after
it. Cut rows are one span each, touch, and run over document borders. Packed rows keep every document that fits in one
row; a longer one is cut into pieces of T and what is left, and every piece is packed like a document of its length.

Packing is best-fit decreasing (Johnson 1973; at most 11/9 of the rows needed) over windows of `WINDOW` documents of one
source. Lengths are whole numbers up to T, so equal ones are placed together: a window costs two sorts and about 3 T
steps. The plan follows from the lengths alone and is worked out anew at each start; it holds 12 bytes a piece and 8 a
row, while it is made twice that and about 100 bytes for each document of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cyberslm.data.store import Ints, SourceRange, TokenStore
from cyberslm.errors import DataError

WINDOW = 1 << 20


@dataclass(frozen=True)
class Usage:
    """What rows are made of: ``positions`` hold a token, ``cut`` documents were longer than a row."""

    rows: int
    seq_len: int
    positions: int
    cut: int = 0
    pieces: int = 0
    """Pieces of the documents that were cut."""

    @property
    def padding(self) -> float:
        """Share of the positions of all rows that hold nothing."""
        return 1 - self.positions / max(1, self.rows * self.seq_len)


class Rows(Protocol):
    """The rows of one source, or of the whole store; ``spans`` gives a row's (start, stop) pairs."""

    usage: Usage

    def spans(self, row: int) -> list[tuple[int, int]]: ...


class CutRows:
    """The tokens ``first`` to ``end`` cut every ``seq_len``; the last row may be short."""

    def __init__(self, first: int, end: int, seq_len: int) -> None:
        positions = max(0, end - first - 1)
        self.usage = Usage(-(-positions // seq_len), seq_len, positions)
        self._first, self._last = first, end - 1

    def spans(self, row: int) -> list[tuple[int, int]]:
        start = self._first + row * self.usage.seq_len
        return [(start, min(start + self.usage.seq_len, self._last))]


class PackedRows:
    """The documents of ``source`` packed into rows of ``seq_len``.

    ``isolated`` documents need no position for their last token, which nothing follows. With ``together`` 2, pairs of
    documents go into a row as one and are never cut; raises DataError for one that is longer than a row.
    """

    def __init__(
        self, store: TokenStore, source: SourceRange, seq_len: int, *, isolated: bool, together: int = 1
    ) -> None:
        starts, sizes, row_ends = [], [], [np.zeros(1, np.int64)]
        cut = pieces = rows = 0
        begin = source.first_token
        for first in range(source.first_document, source.end_document, WINDOW):
            ends = store.ends(first, min(first + WINDOW, source.end_document))
            begins = np.concatenate([[begin], ends[:-1]])
            begin = int(ends[-1])
            slots = ends - begins - isolated
            counts = -(-slots // seq_len)
            cut += int((counts > 1).sum())
            pieces += int(counts[counts > 1].sum())
            start, size = _pieces(begins, slots, counts, seq_len)
            row_of = best_fit(size, seq_len) if together == 1 else _fit_together(size, counts, seq_len, together)
            order = np.argsort(row_of, kind="stable")
            starts.append(start[order])
            sizes.append(size[order].astype(np.uint32))
            row_ends.append(rows + np.cumsum(np.bincount(row_of)))
            rows += len(order)
        self._starts, self._sizes = np.concatenate(starts), np.concatenate(sizes)
        self._row_ends = np.concatenate(row_ends)
        positions = int(self._sizes.sum(dtype=np.int64))
        self.usage = Usage(len(self._row_ends) - 1, seq_len, positions, cut, pieces)

    def spans(self, row: int) -> list[tuple[int, int]]:
        part = slice(*self._row_ends[row : row + 2].tolist())
        starts = self._starts[part]
        return list(zip(starts.tolist(), (starts + self._sizes[part]).tolist(), strict=True))


def best_fit(sizes: Ints, room: int) -> Ints:
    """The row of each item by best-fit decreasing into rows of ``room``; sizes are from 1 to ``room``.

    The largest go first; each goes into the row with the least room that takes it, or else opens the next row.
    """
    row_of = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[order], prepend=0, append=0))
    open_rows = _OpenRows(room)
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        items, size = order[first:end], int(sizes[order[first]])
        while items.size:
            rows, left = open_rows.take(size, len(items))
            each = left // size
            used = min(len(rows), -(-len(items) // each))
            placed = items[: used * each]
            row_of[placed] = np.repeat(rows[:used], each)[: len(placed)]
            open_rows.give(left, rows[used:])
            open_rows.give(left - each * size, rows[: used - 1])
            open_rows.give(left - (len(placed) - (used - 1) * each) * size, rows[used - 1 : used])
            items = items[len(placed) :]
    return row_of


def _fit_together(sizes: Ints, counts: Ints, room: int, together: int) -> Ints:
    """`best_fit` of groups of ``together`` documents, each of which is one piece."""
    whole = bool((counts == 1).all()) and sizes.size % together == 0
    groups = sizes.reshape(-1, together).sum(1) if whole else np.array([room + 1])
    if int(groups.max()) > room:
        raise DataError(
            f"a pair of answers with its prompts doesn't fit a row of {room} tokens: raise model.max_seq_len or prepare"
            " the data again with data.chat.max_tokens at most that"
        )
    return np.repeat(best_fit(groups, room), together)


class _OpenRows:
    """Rows by the room that is left in them; bit n of ``_known`` says that some have n left."""

    def __init__(self, room: int) -> None:
        self._room, self._count = room, 0
        self._rows: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._known = 0

    def take(self, size: int, number: int) -> tuple[Ints, int]:
        """All rows with the least room that takes ``size``, and that room; new ones for ``number`` items if none."""
        fitting = self._known >> size
        if not fitting:
            new = -(-number // (self._room // size))
            self._count += new
            return np.arange(self._count - new, self._count), self._room
        left = size + (fitting & -fitting).bit_length() - 1
        self._known ^= 1 << left
        return np.concatenate(self._rows.pop(left)), left

    def give(self, left: int, rows: Ints) -> None:
        if left and rows.size:
            self._rows.setdefault(left, []).append(rows)
            self._known |= 1 << left


def _pieces(begins: Ints, slots: Ints, counts: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Start and size of each document's pieces; a document without slots has none."""
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(begins, counts) + number * seq_len
    return start, np.minimum(np.repeat(slots, counts) - number * seq_len, seq_len)
