"""Lines that many documents of one source share: headers, footers, licence banners.

The lines at both ends of every document are counted in a count-min sketch (Cormode and Muthukrishnan 2005) of 8 MiB a
source. Counts are sums, so neither order nor the number of workers matters; an estimate is never too low, and as each
document adds at most ``2 * edge_lines`` lines it is too high by one document in some thousands. A line found to be
boilerplate is cut wherever it stands. Lines are compared exactly, white space around them apart: two lines that differ
in a number are two lines.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cyberslm.data.clean.config import BoilerplateConfig
from cyberslm.data.clean.entry import Entry, Note, Outcome

_ROWS = 4
_COLUMNS = 1 << 19
_QUOTED = 100
_ROW_NUMBERS = np.arange(_ROWS)[:, None]


@dataclass(frozen=True)
class EdgeLooker:
    """Entry -> the distinct lines at its ends as 64-bit hashes, pure."""

    config: BoilerplateConfig

    def __call__(self, entry: Entry) -> npt.NDArray[np.uint64]:
        lines = entry.text.split("\n")
        if len(lines) > 2 * self.config.edge_lines:
            lines = lines[: self.config.edge_lines] + lines[-self.config.edge_lines :]
        long = {line for line in map(str.strip, lines) if len(line) >= self.config.min_characters}
        return np.fromiter(map(_number, long), np.uint64, len(long))


@dataclass
class BoilerplateSurvey:
    config: BoilerplateConfig
    _documents: Counter[str] = field(default_factory=Counter)
    _tables: dict[str, npt.NDArray[np.uint32]] = field(default_factory=dict)

    def looker(self) -> EdgeLooker:
        return EdgeLooker(self.config)

    def add(self, entry: Entry, found: npt.NDArray[np.uint64]) -> None:
        self._documents[entry.source] += 1
        table = self._tables.setdefault(entry.source, np.zeros((_ROWS, _COLUMNS), np.uint32))
        np.add.at(table, (_ROW_NUMBERS, _columns(found)), 1)

    def finish(self) -> BoilerplateStep:
        """The step; of each source it knows which counters are above the share."""
        marked = {}
        for source, table in self._tables.items():
            documents = self._documents[source]
            above = table > self.config.max_share * documents
            if documents >= self.config.min_documents and above.any():
                marked[source] = above
        return BoilerplateStep(self.config, marked)


@dataclass(frozen=True)
class BoilerplateStep:
    config: BoilerplateConfig
    marked: dict[str, npt.NDArray[np.bool_]]

    def apply(self, entry: Entry) -> Outcome:
        marked = self.marked.get(entry.source)
        if marked is None:
            return Outcome(entry.text)
        lines = entry.text.split("\n")
        stripped = list(map(str.strip, lines))
        long = [at for at, line in enumerate(stripped) if len(line) >= self.config.min_characters]
        hashes = np.fromiter((_number(stripped[at]) for at in long), np.uint64, len(long))
        hits = np.flatnonzero(np.all(marked[_ROW_NUMBERS, _columns(hashes)], axis=0))
        shared = [long[hit] for hit in hits.tolist()]
        if not shared:
            return Outcome(entry.text)
        times = Counter(stripped[at][:_QUOTED] for at in shared)
        notes = (
            Note("boilerplate line", shared[0] + 1, len(shared)),
            *(Note("", times=count, quoted=line) for line, count in times.items()),
        )
        if self.config.action == "report":
            return Outcome(entry.text, notes=notes)
        cut = set(shared)
        text = "\n".join(line for at, line in enumerate(lines) if at not in cut)
        return Outcome(text, None if text.strip() else "nothing but boilerplate", notes)


def _number(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _columns(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The column of each hash in each row."""
    low, high = hashes & np.uint64(0xFFFFFFFF), hashes >> np.uint64(32)
    return np.stack([(low + np.uint64(row) * (high | np.uint64(1))) % np.uint64(_COLUMNS) for row in range(_ROWS)])
