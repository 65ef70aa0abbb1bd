"""Candidate pairs from sketches, checked, and joined into clusters by union-find (Tarjan 1975).

Texts are numbered in the order in which they are preferred, and the result depends on nothing but the texts and that
order. Texts that share a band key are compared with each other. A template can put thousands into one bucket; where
there are more than ``NEIGHBOURS`` a text is compared with the nearest of those that name the same things, until
``PATIENCE`` comparisons came to nothing. What was passed over is counted.

A cluster is a chain of copies, and its ends may differ. So clusters only say what belongs together; a text is a *copy
of* another only if the two have been compared, and each copy has an original that is none itself. The originals are
gone through again until nothing more joins, so that cleaning what is clean changes nothing, unless pairs were passed
over.

One band is in memory at a time; words are read back from a temporary file for the pairs that are compared.
"""

from __future__ import annotations

import functools
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from cyberslm.data.clean.sketch import IDENTITIES, Comparable, Sketch, Verdict, compare
from cyberslm.errors import StorageError

NEIGHBOURS = 32
PATIENCE = 2
MAX_TEMPLATE_EXAMPLES = 20
_MAX_REMEMBERED = 1 << 21
_CACHED_TEXTS = 1024
_CACHED_WORDS = 1 << 12
_PAIR_SHIFT = 32

Indices = npt.NDArray[np.int64]


class SketchStore:
    """Sketches in temporary files in ``folder``: 8 bytes a band and 4 a word on disk, 24 bytes a text in memory."""

    def __init__(self, folder: Path, *, num_bands: int) -> None:
        self._files = ExitStack()
        self._columns = [self._new_file(folder) for _ in range(num_bands)]
        self._words = self._new_file(folder)
        self._ends = array("Q", [0])
        self._identities = bytearray()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def num_bands(self) -> int:
        return len(self._columns)

    def add(self, sketch: Sketch) -> int:
        """The number of the sketch. Raises StorageError when the folder's disk is full."""
        with _writing():
            for at, column in enumerate(self._columns):
                column.write(sketch.bands[8 * at : 8 * at + 8])
            self._words.write(sketch.words)
        self._ends.append(self._ends[-1] + len(sketch.words))
        self._identities += sketch.identities
        return len(self) - 1

    def flush(self) -> None:
        """To be called between the last ``add`` and the first reading. Raises StorageError."""
        with _writing():
            for file in (*self._columns, self._words):
                file.flush()

    def column(self, band: int) -> npt.NDArray[np.uint64]:
        self._columns[band].seek(0)
        return np.fromfile(self._columns[band], np.uint64, len(self))

    def identities(self) -> npt.NDArray[np.uint32]:
        """One row a text; a text's ``IDENTITIES`` min-hashes of what it names."""
        return np.frombuffer(self._identities, np.uint32).reshape(-1, IDENTITIES)

    def words(self, number: int) -> npt.NDArray[np.uint32]:
        start, end = self._ends[number], self._ends[number + 1]
        self._words.seek(start)
        return np.frombuffer(self._words.read(end - start), np.uint32)

    def close(self) -> None:
        self._files.close()

    def _new_file(self, folder: Path) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile(dir=folder))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"can't write sketches for near_duplicates: {error.strerror}; free some space") from error


@dataclass
class Clusters:
    """``roots[i]`` is the first text of the cluster of text ``i``, ``originals[i]`` the text that it is a copy of."""

    roots: Indices
    originals: Indices
    pairs_compared: int = 0
    pairs_passed_over: int = 0
    template_pairs: int = 0
    templates: list[tuple[int, int]] = field(default_factory=list)
    """The first few pairs of one template that were kept apart."""


def cluster(store: SketchStore, numbers: Indices, *, threshold: float, shingle_words: int, templates: bool) -> Clusters:
    """Clusters of the texts whose sketches are ``numbers``, most preferred first."""

    def read(text: int) -> Comparable:
        return Comparable(store.words(int(numbers[text])), shingle_words)

    def judge(one: Comparable, other: Comparable) -> Verdict:
        return compare(one, other, threshold=threshold, templates=templates)

    store.flush()
    joiner = _Joiner(len(numbers), read, judge)
    identities = store.identities()[numbers]
    active = np.arange(len(numbers))
    while True:
        joiner.joined = joiner.passed_over = 0
        for band in range(store.num_bands):
            keys = store.column(band)[numbers[active]]
            for bucket in _buckets(keys, identities[active, band % IDENTITIES]):
                joiner.join(active[bucket])
        originals = joiner.originals()
        if not joiner.joined:
            break
        active = np.unique(originals)
    templates_found = sorted(set(joiner.templates))[:MAX_TEMPLATE_EXAMPLES]
    return Clusters(
        joiner.roots(), originals, joiner.compared, joiner.passed_over, joiner.template_pairs, templates_found
    )


def _buckets(keys: npt.NDArray[np.uint64], identities: npt.NDArray[np.uint32]) -> Iterator[Indices]:
    """Positions that share a key, those with the same identity beside each other, then in order."""
    order = np.lexsort((identities, keys))
    borders = np.flatnonzero(np.diff(keys[order])) + 1
    starts, ends = np.append(0, borders), np.append(borders, order.size)
    for at in np.flatnonzero(ends - starts > 1):
        yield order[starts[at] : ends[at]]


class _Joiner:
    """Union-find with a memory of the pairs that are not copies."""

    def __init__(
        self, size: int, read: Callable[[int], Comparable], judge: Callable[[Comparable, Comparable], Verdict]
    ) -> None:
        self._parents = array("q", range(size))
        self._judge = judge
        self._long = read
        self._cached = functools.lru_cache(maxsize=_CACHED_TEXTS)(self._read_short)
        self._apart: set[int] = set()
        self.joined = self.compared = self.passed_over = self.template_pairs = 0
        self.templates: list[tuple[int, int]] = []

    def join(self, bucket: Indices) -> None:
        texts: list[int] = bucket.tolist()
        patience = PATIENCE if len(texts) > NEIGHBOURS else NEIGHBOURS
        for at, text in enumerate(texts):
            in_vain = 0
            for before in range(at - 1, -1, -1):
                if in_vain >= patience or at - before > NEIGHBOURS:
                    self.passed_over += before + 1
                    break
                if self._root(text) != self._root(texts[before]):
                    in_vain += not self._join_pair(text, texts[before])

    def roots(self) -> Indices:
        return np.fromiter(map(self._root, range(len(self._parents))), np.int64, len(self._parents))

    def originals(self) -> Indices:
        """For each text the first of its cluster's originals that it is a copy of, or itself, which makes it one."""
        roots, originals = self.roots(), np.arange(len(self._parents))
        kept: dict[int, list[int]] = {}
        for text in np.flatnonzero(roots != originals).tolist():
            root = int(roots[text])
            candidates = kept.setdefault(root, [root])
            for candidate in candidates[:NEIGHBOURS] + candidates[NEIGHBOURS:][-NEIGHBOURS:]:
                if self._are_copies(candidate, text):
                    originals[text] = candidate
                    break
            else:
                candidates.append(text)
        return originals

    def _root(self, text: int) -> int:
        parents = self._parents
        while parents[text] != text:
            parents[text] = parents[parents[text]]
            text = parents[text]
        return text

    def _join_pair(self, text: int, other: int) -> bool:
        if not self._are_copies(text, other):
            return False
        one_root, other_root = self._root(text), self._root(other)
        self._parents[max(one_root, other_root)] = min(one_root, other_root)
        self.joined += 1
        return True

    def _are_copies(self, text: int, other: int) -> bool:
        one, other = min(text, other), max(text, other)
        pair = one << _PAIR_SHIFT | other
        if pair in self._apart:
            return False
        verdict = self._judge(self._read(one), self._read(other))
        self.compared += 1
        if verdict == "copy":
            return True
        if len(self._apart) >= _MAX_REMEMBERED:
            self._apart.clear()
        self._apart.add(pair)
        if verdict == "template":
            self.template_pairs += 1
            self.templates.append((one, other))
            if len(self.templates) > 50 * MAX_TEMPLATE_EXAMPLES:
                self.templates = sorted(set(self.templates))[:MAX_TEMPLATE_EXAMPLES]
        return False

    def _read(self, text: int) -> Comparable:
        cached = self._cached(text)
        return self._long(text) if cached is None else cached

    def _read_short(self, text: int) -> Comparable | None:
        """None for a long text, which isn't worth the memory."""
        found = self._long(text)
        return found if found.words.size <= _CACHED_WORDS else None
