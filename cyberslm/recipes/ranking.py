"""Rows of a file picked and put in order by a number that each carries, in bounded memory.

A row is a JSON line ``[rank, fields]``. The top are kept in a heap; sorting cuts the rows into runs that fit memory and
merges them (Knuth, The Art of Computer Programming 3, 5.4). Rows of equal rank stay in the order of the input.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cyberslm.errors import ConfigError
from cyberslm.files import scratch

RUN_BYTES = 1 << 26
FAN_IN = 128
MAX_TOP = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Which rows are kept, and in which order. Raises `ConfigError` for settings out of range."""

    above: float | None = None
    """Keep rows whose rank is above this number; null keeps all."""
    top: int | None = None
    """Keep this many of the highest rank, the highest first; null keeps all."""
    ordered: bool = False
    """Put all rows in order, the highest rank first; off keeps the order of the input."""

    def __post_init__(self) -> None:
        if self.top is not None and not 1 <= self.top <= MAX_TOP:
            raise ConfigError(f"top is {self.top}; it must be 1 to {MAX_TOP:,}")
        if self.top is not None and self.ordered:
            raise ConfigError("top and sort were given together: the top rows are in order already")


def picked(rows: Iterable[bytes], pick: Pick, folder: Path) -> Iterator[bytes]:
    """The rows that are kept, in their order; ``folder`` takes temporary files."""
    kept = rows if pick.above is None else (row for row in rows if rank(row) > pick.above)
    if pick.top is not None:
        return iter(heapq.nlargest(pick.top, kept, key=rank))
    return in_order(kept, folder) if pick.ordered else iter(kept)


def rank(row: bytes) -> float:
    """The number that a row carries."""
    return float(json.loads(row)[0])


def in_order(rows: Iterable[bytes], folder: Path) -> Iterator[bytes]:
    """All rows, the highest rank first, by runs of `RUN_BYTES` in temporary files."""
    with scratch(folder) as place:
        runs: list[Path] = []
        for run in _runs(rows):
            runs.append(_written(run, place / f"{len(runs)}"))
        level = 0
        while len(runs) > FAN_IN:
            level += 1
            groups = (runs[first : first + FAN_IN] for first in range(0, len(runs), FAN_IN))
            runs = [_merged_file(group, place / f"{level}-{n}") for n, group in enumerate(groups)]
        yield from _merged(runs)


def _runs(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    run: list[bytes] = []
    size = 0
    for row in rows:
        run.append(row)
        size += len(row)
        if size >= RUN_BYTES:
            yield sorted(run, key=_place)
            run, size = [], 0
    if run:
        yield sorted(run, key=_place)


def _place(row: bytes) -> float:
    return -rank(row)


def _written(rows: Iterable[bytes], path: Path) -> Path:
    with path.open("wb") as stream:
        stream.writelines(rows)
    return path


def _merged_file(runs: list[Path], path: Path) -> Path:
    _written(_merged(runs), path)
    for run in runs:
        run.unlink()
    return path


def _merged(runs: list[Path]) -> Iterator[bytes]:
    return heapq.merge(*map(_lines, runs), key=_place)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from stream
