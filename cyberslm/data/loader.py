"""Token store -> batches, where which row comes next is a pure function of (seed, epoch, position).

The store is read as one stream. Row i of length T takes tokens i*T to i*T+T as inputs and the next ones as targets, so
rows touch and every token but the very first is a target exactly once an epoch; only the last row may be short, padded
by position. Rows run over document borders and the model may look across them; a target that is <bos> is left out, as
the end of a document says nothing about which one follows.

The order of an epoch is a keyed permutation: a Feistel network over splitmix64's mixer on the next even power of two,
walked until it falls inside the range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no
memory, no state and no library's random stream, and is fixed for ever: a checkpoint needs only the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cyberslm.data.shards import MIN_TOKENS, TokenStore
from cyberslm.errors import DataError, InputError

IGNORE = -100
ROUNDS = 8
MIN_HALF_BITS = 3
U64 = (1 << 64) - 1
UInts = npt.NDArray[np.uint64]


class Batch(NamedTuple):
    """``input_ids`` and ``targets`` (rows, T), int64; a target of -100 is not learned from."""

    input_ids: Tensor
    targets: Tensor


def row_at(seed: int, epoch: npt.ArrayLike, position: npt.ArrayLike, num_rows: int) -> npt.NDArray[np.int64]:
    """The row at ``position`` of ``epoch``'s order: for each epoch a permutation of 0..num_rows-1. Arrays broadcast."""
    epochs, positions = np.broadcast_arrays(np.asarray(epoch, np.uint64), np.asarray(position, np.uint64))
    if num_rows < 1 or (positions.size and int(positions.max()) >= num_rows):
        raise InputError(f"positions must lie within 0 to {num_rows - 1}")
    half = max(MIN_HALF_BITS, -(-(num_rows - 1).bit_length() // 2))
    keys = _round_keys(seed, epochs.ravel())
    values = _feistel(positions.ravel(), keys, half)
    while (outside := np.flatnonzero(values >= num_rows)).size:
        values[outside] = _feistel(values[outside], keys[:, outside], half)
    return values.astype(np.int64).reshape(positions.shape)


class RowLoader:
    """Batches of a token store; holds no position of its own.

    ``batch_rows`` is the number of rows of one optimizer step, over all ranks and micro-batches.
    """

    def __init__(
        self, store: TokenStore, *, seq_len: int, batch_rows: int, seed: int, pad_id: int, bos_id: int | None = None
    ) -> None:
        if seq_len < 1 or batch_rows < 1:
            raise InputError(f"seq_len ({seq_len}) and batch_rows ({batch_rows}) must be at least 1")
        if store.num_tokens < MIN_TOKENS:
            raise DataError(
                f"the data has {store.num_tokens} tokens; the smallest that can be learned from is {MIN_TOKENS}"
            )
        self.store = store
        self.seq_len = seq_len
        self.batch_rows = batch_rows
        self.seed = seed
        self.pad_id = pad_id
        self.bos_id = bos_id

    @property
    def rows_per_epoch(self) -> int:
        return -(-(self.store.num_tokens - 1) // self.seq_len)

    def batch(self, step: int, *, rank: int = 0, world: int = 1, part: int = 0, parts: int = 1) -> Batch:
        """Micro-batch ``part`` of ``parts`` for ``rank`` of ``world`` at ``step``; together they are the whole step.

        The step's rows are cut into world * parts runs whose sizes differ by at most one.
        """
        slices, index = world * parts, rank * parts + part
        if not (0 <= rank < world and 0 <= part < parts and step >= 0):
            raise InputError(f"no slice: step {step}, rank {rank} of {world}, part {part} of {parts}")
        if slices > self.batch_rows:
            raise InputError(f"{self.batch_rows} rows a step can't be cut into {world} ranks x {parts} parts")
        first = step * self.batch_rows
        wanted = range(first + self.batch_rows * index // slices, first + self.batch_rows * (index + 1) // slices)
        epochs, positions = zip(*(divmod(row, self.rows_per_epoch) for row in wanted), strict=True)
        return self._rows(row_at(self.seed, epochs, positions, self.rows_per_epoch).tolist())

    def sequential(self, batch_rows: int, *, limit: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every row once, in the order of the text; the last batch may have fewer rows. Ranks take batches in turn.

        With a ``limit`` below the number of rows, that many, spread evenly, whatever the size of a batch.
        """
        if batch_rows < 1 or limit < 0 or not 0 <= rank < world:
            raise InputError(f"no batches of {batch_rows} rows, limit {limit}, for rank {rank} of {world}")
        count = min(limit or self.rows_per_epoch, self.rows_per_epoch)
        for first in range(rank * batch_rows, count, batch_rows * world):
            last = min(first + batch_rows, count)
            yield self._rows([index * self.rows_per_epoch // count for index in range(first, last)])

    def _rows(self, rows: list[int]) -> Batch:
        inputs = np.full((len(rows), self.seq_len), self.pad_id, np.int64)
        targets = np.full((len(rows), self.seq_len), IGNORE, np.int64)
        for line, row in enumerate(rows):
            start = row * self.seq_len
            ids = self.store.slice(start, min(start + self.seq_len + 1, self.store.num_tokens))
            inputs[line, : ids.size - 1] = ids[:-1]
            targets[line, : ids.size - 1] = ids[1:]
        if self.bos_id is not None:
            targets[targets == self.bos_id] = IGNORE
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _mix(values: UInts) -> UInts:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014) after one step of its counter."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epochs: UInts) -> UInts:
    """One key for each round and element, (ROUNDS, N)."""
    start = _mix(_mix(np.full(epochs.shape, seed & U64, np.uint64)) ^ epochs)
    return _mix(start ^ np.arange(ROUNDS, dtype=np.uint64)[:, None])


def _feistel(values: UInts, keys: UInts, half: int) -> UInts:
    """A permutation of the numbers of 2 * half bits, for each column of ``keys``."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right
