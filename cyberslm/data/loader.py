"""Token store -> batches, where which row comes next is a pure function of (seed, epoch, position).

Rows come from `packing`: the text cut every T tokens, or documents packed whole. Cut rows touch, so every token but
the very first is a target exactly once an epoch; they run over document borders, the model may look across them, and a
target that is <bos> is left out, as the end of a document says nothing about which one follows. In packed rows, and in
isolated ones, the first token of every document is no target, nor is a token that the store's loss mask leaves out.
Isolated rows carry the documents' numbers, which keep attention and positions inside a document. Padding is at the end
of a row.

The order of an epoch is a keyed permutation (`order`), of all rows or of each source's (`mixture`), computed where it
is asked for: a checkpoint needs only the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cyberslm.data.config import Layout, MixtureUnit
from cyberslm.data.mixture import Mixture, laps, shares
from cyberslm.data.order import row_at
from cyberslm.data.packing import CutRows, PackedRows, Rows, Usage
from cyberslm.data.shards import MIN_TOKENS
from cyberslm.data.store import Ints, TokenStore
from cyberslm.errors import DataError, InputError

IGNORE = -100
PADDING = -1
"""The document number of padding."""


class Batch(NamedTuple):
    """``input_ids`` and ``targets`` (rows, T), int64; a target of -100 is not learned from.

    ``docs`` numbers each position's document where a row's documents are isolated; ``sources`` is the number of each
    target's source where a split has several and is measured. ``reference`` (rows, most documents of a row), float64,
    has a number for each document of a row where rows hold pairs of documents.
    """

    input_ids: Tensor
    targets: Tensor
    docs: Tensor | None = None
    sources: Tensor | None = None
    reference: Tensor | None = None

    def rows(self, first: int, stop: int) -> Batch:
        """Some of the rows."""
        return Batch._make(None if part is None else part[first:stop] for part in self)

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``; to a GPU through pinned memory, so that the host doesn't wait for it."""
        pins = device.type == "cuda" and self.input_ids.device.type == "cpu"
        parts = (part.pin_memory() if pins and part is not None else part for part in self)
        return Batch._make(None if part is None else part.to(device, non_blocking=True) for part in parts)


class Quota(NamedTuple):
    """A source's number, the rows that it holds, and those that it gives to an epoch."""

    source: int
    num_rows: int
    per_epoch: float


@dataclass(frozen=True)
class RowLoader:
    """Batches of a token store; holds no position of its own.

    ``batch_rows`` is the number of rows of one optimizer step, over all ranks and micro-batches; ``ramp`` has stages of
    (steps, rows) before it. ``mixture`` gives each
    source's share of the rows, or its epochs in one of the mixture, by number; without it all rows come once an epoch.
    Raises DataError for a store that has nothing to learn from or that ``mixture`` does not fit.
    """

    store: TokenStore
    _: KW_ONLY
    seq_len: int
    batch_rows: int
    seed: int
    pad_id: int
    bos_id: int | None = None
    layout: Layout = "concat"
    isolate: bool = False
    pairs: bool = False
    """Documents 2n and 2n + 1 go into one row, whole."""
    reference: npt.NDArray[np.float64] | None = None
    """A number for each document, such as its log-probability under another model, which batches then carry."""
    mixture: Mapping[int, float] = field(default_factory=dict)
    mixture_unit: MixtureUnit = "share"
    ramp: Sequence[tuple[int, int]] = ()
    by_source: bool = False
    """No row goes from one source into the next, as with a mixture."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch_rows < 1:
            raise InputError(f"seq_len ({self.seq_len}) and batch_rows ({self.batch_rows}) must be at least 1")
        if self.store.num_tokens < MIN_TOKENS:
            raise DataError(
                f"the data has {self.store.num_tokens} tokens; the smallest that can be learned from is {MIN_TOKENS}"
            )
        if not self._row_ends[-1]:
            raise DataError("the data has no document of two tokens, and a first token is nothing to learn from")
        _ = self._mixture

    @cached_property
    def usage(self) -> Usage:
        """What all rows, each once, are made of."""
        each = [rows.usage for rows in self._groups]
        sums = (sum(getattr(usage, name) for usage in each) for name in ("positions", "cut", "pieces"))
        return Usage(self._row_ends[-1], self.seq_len, *sums)

    @property
    def rows_per_epoch(self) -> int:
        return self._row_ends[-1] if self._mixture is None else self._mixture.rows_per_epoch

    @property
    def quotas(self) -> list[Quota]:
        """What each source gives to an epoch of the mixture; empty without one."""
        if self._mixture is None:
            return []
        each = zip(self.store.sources, self._mixture.num_rows, self._mixture.quotas, strict=True)
        return [Quota(source.source, rows, float(quota)) for source, rows, quota in each]

    def first_row(self, step: int) -> int:
        """How many rows the steps before ``step`` take."""
        first = 0
        for steps, rows in self.ramp:
            if step <= steps:
                return first + step * rows
            first, step = first + steps * rows, step - steps
        return first + step * self.batch_rows

    def batch(  # noqa: PLR0913 (a place among ranks and parts)
        self, step: int, *, rank: int = 0, world: int = 1, part: int = 0, parts: int = 1, passed: int = 0
    ) -> Batch:
        """Micro-batch ``part`` of ``parts`` for ``rank`` of ``world`` at ``step``; together they are the whole step.

        The step's rows are cut into world * parts runs whose sizes differ by at most one. They are the rows ``passed``
        places further on in the order than the step's own.
        """
        slices, index = world * parts, rank * parts + part
        if not (0 <= rank < world and 0 <= part < parts and step >= 0 and passed >= 0):
            raise InputError(f"no slice: step {step}, rank {rank} of {world}, part {part} of {parts}")
        first = self.first_row(step)
        rows = self.first_row(step + 1) - first
        if slices > rows:
            raise InputError(f"{rows} rows a step can't be cut into {world} ranks x {parts} parts")
        first += passed
        pairs = self._order(first + rows * index // slices, first + rows * (index + 1) // slices)
        return self._read(pairs, docs=self.isolate)

    def bordered(self, step: int) -> Batch:
        """The whole batch of a step, with its documents numbered even where they are not isolated: to look at."""
        return self._read(self._order(self.first_row(step), self.first_row(step + 1)), docs=True)

    def sequential(
        self,
        batch_rows: int,
        *,
        limit: int = 0,
        rank: int = 0,
        world: int = 1,
        sources: Collection[int] | None = None,
    ) -> Iterator[Batch]:
        """Every row once, in the order of the text; the last batch may have fewer rows. Ranks take batches in turn.

        With a ``limit`` below the number of rows, that many, spread evenly, whatever the size of a batch. A mixture
        doesn't count here. Only rows of the ``sources``, by number, if they are given and rows are apart by source.
        """
        if batch_rows < 1 or limit < 0 or not 0 <= rank < world:
            raise InputError(f"no batches of {batch_rows} rows, limit {limit}, for rank {rank} of {world}")
        rows, total = self._rows_of(sources), self.num_rows(sources)
        count = min(limit or total, total)
        for first in range(rank * batch_rows, count, batch_rows * world):
            last = min(first + batch_rows, count)
            pairs = [self._place(_nth(rows, index * total // count)) for index in range(first, last)]
            yield self._read(pairs, docs=self.isolate, sources=len(self.store.sources) > 1)

    def num_rows(self, sources: Collection[int] | None = None) -> int:
        """How many `sequential` gives without a limit."""
        return sum(map(len, self._rows_of(sources)))

    def _rows_of(self, sources: Collection[int] | None) -> list[range]:
        if sources is None:
            return [range(self._row_ends[-1])]
        begins = [0, *self._row_ends]
        groups = enumerate(self.store.sources)
        return [range(begins[at], begins[at + 1]) for at, source in groups if source.source in sources]

    @cached_property
    def _groups(self) -> tuple[Rows, ...]:
        if self.layout == "pack":
            return tuple(
                PackedRows(self.store, source, self.seq_len, isolated=self.isolate, together=1 + self.pairs)
                for source in self.store.sources
            )
        if self.mixture or self.by_source:
            return tuple(CutRows(each.first_token, each.end_token, self.seq_len) for each in self.store.sources)
        return (CutRows(0, self.store.num_tokens, self.seq_len),)

    @cached_property
    def _row_ends(self) -> list[int]:
        return list(accumulate(rows.usage.rows for rows in self._groups))

    @cached_property
    def _mixture(self) -> Mixture | None:
        if not self.mixture:
            return None
        here = [source.source for source in self.store.sources]
        num_rows = [rows.usage.rows for rows in self._groups]
        if unsaid := sorted(set(here) - set(self.mixture)):
            raise DataError(f"data.mixture says nothing of source {unsaid[0]}: give it a number, 0 to leave it out")
        filled = {source for source, rows in zip(here, num_rows, strict=True) if rows}
        if empty := sorted(source for source, value in self.mixture.items() if value and source not in filled):
            raise DataError(f"data.mixture: source {empty[0]} has no training text; give it 0 or leave it out")
        quotas = (shares if self.mixture_unit == "share" else laps)(num_rows, [self.mixture[source] for source in here])
        return Mixture(num_rows, quotas, seed=self.seed)

    def _order(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Group and row at each place of the endless order of rows."""
        if self._mixture is not None:
            return self._mixture.rows(first, stop)
        total = self._row_ends[-1]
        epochs, positions = zip(*(divmod(place, total) for place in range(first, stop)), strict=True)
        return [self._place(row) for row in row_at(self.seed, epochs, positions, total).tolist()]

    def _place(self, row: int) -> tuple[int, int]:
        group = bisect_right(self._row_ends, row)
        return group, row - (self._row_ends[group - 1] if group else 0)

    def _read(self, pairs: Sequence[tuple[int, int]], *, docs: bool, sources: bool = False) -> Batch:
        shape = len(pairs), self.seq_len
        inputs, targets = np.full(shape, self.pad_id, np.int64), np.full(shape, IGNORE, np.int64)
        numbers = np.full(shape, PADDING, np.int64) if docs else None
        owners = np.full(shape, PADDING, np.int64) if sources else None
        for line, (group, row) in enumerate(pairs):
            spans, at = self._groups[group].spans(row), 0
            for start, stop in spans:
                here = slice(at, at + stop - start)
                inputs[line, here], targets[line, here] = self._tokens(start, stop)
                if owners is not None:
                    owners[line, here] = self._owners(start, stop)
                at += stop - start
            if numbers is not None:
                numbers[line, :at] = self._numbers(spans)
        if self.bos_id is not None:
            targets[targets == self.bos_id] = IGNORE
        arrays = (inputs, targets, numbers, owners, self._references(pairs))
        return Batch._make(None if array is None else torch.from_numpy(array) for array in arrays)

    def _references(self, pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.float64] | None:
        """The number of each row's documents, in the order of `_numbers`; 0 beyond a row's last."""
        if self.reference is None:
            return None
        rows = [
            [self.reference[self.store.document_at(start)] for start, _ in self._groups[group].spans(row)]
            for group, row in pairs
        ]
        found = np.zeros((len(rows), max(map(len, rows))))
        for line, numbers in enumerate(rows):
            found[line, : len(numbers)] = numbers
        return found

    def _tokens(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Inputs and targets of a span."""
        end = min(stop + 1, self.store.num_tokens)
        ids = self.store.slice(start, end)
        targets = np.full(stop - start, IGNORE, np.int64)
        targets[: end - start - 1] = ids[1:]
        if self.store.masked:
            targets[: end - start - 1][~self.store.trained(start + 1, end)] = IGNORE
        if self.isolate or self.layout == "pack":
            targets[self.store.starts_within(start + 1, end) - start - 1] = IGNORE
        return ids[: stop - start], targets

    def _numbers(self, spans: Sequence[tuple[int, int]]) -> Ints:
        """The document number of each position of a row, from 0."""
        begins = np.zeros(sum(stop - start for start, stop in spans), np.int64)
        at = 0
        for start, stop in spans:
            begins[at] = at > 0
            begins[at + self.store.starts_within(start + 1, stop) - start] = 1
            at += stop - start
        return np.cumsum(begins)

    def _owners(self, start: int, stop: int) -> Ints:
        """The number of the source that each target of a span comes from."""
        sources = self.store.sources
        ends = np.array([source.end_token for source in sources])
        targets = np.minimum(np.arange(start, stop) + 1, self.store.num_tokens - 1)
        return np.array([source.source for source in sources])[np.searchsorted(ends, targets, "right")]


def _nth(ranges: Sequence[range], index: int) -> int:
    """The number at place ``index`` of the ranges one after the other."""
    for numbers in ranges:
        if index < len(numbers):
            return numbers[index]
        index -= len(numbers)
    raise IndexError(index)
