"""Which row of which source comes next, when sources are mixed by share or by epochs of their own.

The endless order is cut into blocks of about `BLOCK` rows, a whole number of them an epoch. A source that gives q rows
a block (an exact fraction) gives floor((b + 1) q) - floor(b q) in block b: so in every block and every epoch it is
within one row of what was asked, without drift. Which places of a block belong to which source is a keyed permutation;
a source fills its places in its own order, a permutation for each time through it, so that all of its rows come once
before any comes twice. The row at a place is a pure function of the seed and the place, and there is no state but the
number of rows that were used before.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor

import numpy as np

from cyberslm.data.order import U64, row_at
from cyberslm.data.store import Ints
from cyberslm.errors import DataError

BLOCK = 1024
SPREAD = 0x9E3779B97F4A7C15


class Mixture:
    """An endless order of (source, row) pairs; ``num_rows`` of each source and its ``quotas`` of rows an epoch."""

    def __init__(self, num_rows: Sequence[int], quotas: Sequence[Fraction], *, seed: int) -> None:
        if sum(quotas) < 1:
            raise DataError("data.mixture asks for less than one row an epoch; raise its numbers or add text")
        self.num_rows, self.quotas, self.seed = tuple(num_rows), tuple(quotas), seed
        blocks = ceil(sum(quotas) / BLOCK)
        self._per_block = [quota / blocks for quota in quotas]

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, rounded down; an epoch may have one more or fewer for each source."""
        return floor(sum(self.quotas))

    def rows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The source and its row at each place from ``first`` to ``stop`` (exclusive) of the order."""
        found: list[tuple[int, int]] = []
        while first < stop:
            block = self._block_of(first)
            before, after = self._used(block), self._used(block + 1)
            begin, end = sum(before), sum(after)
            wanted = slice(first - begin, min(stop, end) - begin)
            edges = list(accumulate(late - early for early, late in zip(before, after, strict=True)))
            owners = np.searchsorted(edges, row_at(self.seed, block, np.arange(end - begin), end - begin), "right")
            rows = np.empty(len(owners), np.int64)
            for source in np.unique(owners[wanted]).tolist():
                places = np.flatnonzero(owners == source)
                rows[places] = self._rows_of(source, before[source] + np.arange(len(places)))
            found += zip(owners[wanted].tolist(), rows[wanted].tolist(), strict=True)
            first = min(stop, end)
        return found

    def _rows_of(self, source: int, uses: Ints) -> Ints:
        """The rows of a source at its n-th uses."""
        lap, position = np.divmod(uses, self.num_rows[source])
        return row_at((self.seed * SPREAD + source + 1) & U64, lap, position, self.num_rows[source])

    def _used(self, block: int) -> list[int]:
        """Rows of each source before ``block``."""
        return [floor(block * quota) for quota in self._per_block]

    def _block_of(self, place: int) -> int:
        # Rounding down makes blocks begin early by less than one row a source, so this steps a few times at most.
        block = floor(place / sum(self._per_block))
        while sum(self._used(block + 1)) <= place:
            block += 1
        return block


def shares(num_rows: Sequence[int], weights: Sequence[float]) -> list[Fraction]:
    """Quotas in proportion to ``weights``; an epoch has as many rows as the sources whose weight is above 0 hold."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(rows for rows, weight in zip(num_rows, exact, strict=True) if weight)
    return [total * weight / sum(exact) for weight in exact]


def laps(num_rows: Sequence[int], epochs: Sequence[float]) -> list[Fraction]:
    """Quotas that go ``epochs`` times through each source in one epoch of the mixture."""
    return [rows * Fraction(times) for rows, times in zip(num_rows, epochs, strict=True)]
