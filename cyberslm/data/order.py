"""The order of rows: for each (seed, epoch) a permutation that is computed where it is asked for.

A Feistel network over splitmix64's mixer on the next even power of two, walked until it falls inside the range (Black
and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no memory, no state and no library's random
stream, and is fixed for ever: a change here would break the exact resumption of every earlier run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cyberslm.errors import InputError

ROUNDS = 8
MIN_HALF_BITS = 3
U64 = (1 << 64) - 1
UInts = npt.NDArray[np.uint64]


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
