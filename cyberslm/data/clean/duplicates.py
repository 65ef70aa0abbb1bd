"""Exact and near copies of documents or paragraphs: which one is kept, and which belong together.

The kept copy is the first by (source in the order of the configuration, file name, line), whatever order the texts
arrive in. Equal texts are found by the first 16 bytes of SHA-256; near copies are clusters of distinct texts. A
document carries its cluster's name on, also when copies are only reported, so a split by that name never has near
copies on both sides; for a text without copies it is the hash that splits by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cyberslm.data.clean.clusters import Clusters, Indices, SketchStore, cluster
from cyberslm.data.clean.config import ExactDuplicatesConfig, NearDuplicatesConfig
from cyberslm.data.clean.entry import Entry, Group, Note, Outcome
from cyberslm.data.clean.sketch import Sketcher
from cyberslm.data.clean.units import KEY_BYTES, Looker, Unit, Units

HASH_SPAN = 1 << 64
_NO_SKETCH = -1


def is_held_out(key: bytes, fraction: float) -> bool:
    """Whether a group is on the validation side: its key as a share of the range lies below ``fraction``.

    A text alone has the start of its ``sources.copy_digest`` as key, so only its content decides.
    """
    return int.from_bytes(key[:8], "big") < int(fraction * HASH_SPAN)


class DuplicateReport(NamedTuple):
    """What a survey found; ``templates`` are places of texts of one template that were kept apart, the first few."""

    texts: int
    distinct: int
    clusters: int
    largest_cluster: int
    pairs_compared: int
    pairs_passed_over: int
    template_pairs: int
    templates: tuple[tuple[str, str], ...]

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> DuplicateReport:
        """A report from its fields as JSON gives them back."""
        return cls(**plain | {"templates": tuple((one, other) for one, other in plain["templates"])})


@dataclass(frozen=True)
class _Catalogue:
    """Distinct texts, numbered in the order in which they are preferred, and found by key."""

    keys: npt.NDArray[np.uint64]
    """A key's two halves a row, sorted."""
    numbers: Indices
    """The text's number for each sorted key."""
    kept: Indices
    """File, line and document of the copy that is kept, by number."""
    names: npt.NDArray[np.uint64]
    """Keys by number."""
    roots: Indices
    """The first number of the cluster, by number."""
    originals: Indices
    """The number of the text that a text is a near copy of, or its own."""
    files: dict[tuple[str, str], int]
    """(source, name) of each file, in the order of its number."""
    order: tuple[tuple[str, str], ...]

    def find(self, key: bytes) -> int | None:
        first, second = np.frombuffer(key, ">u8").astype(np.uint64)
        at = int(np.searchsorted(self.keys[:, 0], first))
        while at < len(self.keys) and self.keys[at, 0] == first:
            if self.keys[at, 1] == second:
                return int(self.numbers[at])
            at += 1
        return None

    def place(self, number: int) -> str:
        file, line, _ = self.kept[number].tolist()
        return f"{self.order[file][1]}:{line}"

    def is_kept(self, number: int, entry: Entry, line: int) -> bool:
        file = self.files.get((entry.source, entry.name))
        return self.kept[number].tolist() == [file, entry.line + line - 1, entry.number]

    def group(self, number: int, *, near: bool) -> Group:
        root = int(self.roots[number])
        source, _ = self.order[int(self.kept[root, 0])]
        return Group(self.names[root].astype(">u8").tobytes(), source, near)


@dataclass(frozen=True)
class Deduplication:
    """The step: leaves out or only notes each copy but the first."""

    units: Units
    drop: bool
    near: bool
    catalogue: _Catalogue
    report: DuplicateReport

    def apply(self, entry: Entry) -> Outcome:
        if self.units.level == "paragraph":
            return self._paragraphs(entry)
        number = self.catalogue.find(self.units.key(entry.text))
        if number is None:
            return Outcome(entry.text)
        note = self._note(number, entry, 1)
        group = self.catalogue.group(number, near=self.near)
        if note is None:
            return Outcome(entry.text, group=group)
        return Outcome(entry.text, note.kind if self.drop else None, (note,), group)

    def _paragraphs(self, entry: Entry) -> Outcome:
        parts, notes, done = [], [], 0
        for start, end, line in self.units.spans(entry.text):
            number = self.catalogue.find(self.units.key(entry.text[start:end]))
            note = None if number is None else self._note(number, entry, line)
            if note is not None:
                notes.append(note)
                parts.append(entry.text[done:start])
                done = end
        text = "".join((*parts, entry.text[done:]))
        if not notes or not self.drop:
            return Outcome(entry.text, notes=tuple(notes))
        if not text.strip():
            return Outcome(entry.text, "nothing but copied paragraphs", tuple(notes))
        return Outcome(text, notes=tuple(notes))

    def _note(self, number: int, entry: Entry, line: int) -> Note | None:
        original = int(self.catalogue.originals[number])
        if original != number:
            return Note(f"near copy ({self.units.level})", line, detail=f"like {self.catalogue.place(original)}")
        if not self.catalogue.is_kept(number, entry, line):
            return Note(f"copy ({self.units.level})", line, detail=f"of {self.catalogue.place(number)}")
        return None


class DuplicateSurvey:
    """Gathers the units of all entries, in any order; ``sources`` says whose copies are preferred.

    Memory: 70 bytes a unit and 350 a file while surveying, about 200 a unit while ``finish`` runs. ``scratch`` takes
    temporary files of 4 bytes a word and 8 a band, which hold hashes, no text.
    """

    def __init__(
        self, config: ExactDuplicatesConfig | NearDuplicatesConfig, scratch: Path, sources: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._sketcher, self._store = None, None
        if isinstance(config, NearDuplicatesConfig):
            self._units = Units(level=config.level)
            self._sketcher = Sketcher(
                threshold=config.threshold,
                shingle_words=config.shingle_words,
                permutations=config.permutations,
                min_words=config.min_words,
            )
            self._store = SketchStore(scratch, num_bands=self._sketcher.bands.number)
        else:
            self._units = Units(
                level=config.level,
                min_characters=config.min_characters if config.level == "paragraph" else 1,
                fold_case=config.fold_case,
                fold_space=config.fold_space,
            )
        self._preference = {source: at for at, source in enumerate(sources)}
        self._keys = bytearray()
        self._files: dict[tuple[str, str], int] = {}
        self._places = array("q")
        self._sketches = array("q")

    def looker(self) -> Looker:
        return Looker(self._units, self._sketcher)

    def add(self, entry: Entry, found: tuple[Unit, ...]) -> None:
        file = self._files.setdefault((entry.source, entry.name), len(self._files))
        for unit in found:
            self._keys += unit.key
            self._places.extend((file, entry.line + unit.line - 1, entry.number))
            if self._store is None or unit.sketch is None:
                self._sketches.append(_NO_SKETCH)
            else:
                self._sketches.append(self._store.add(unit.sketch))

    def finish(self) -> Deduplication:
        keys = np.frombuffer(self._keys, ">u8").astype(np.uint64).reshape(-1, KEY_BYTES // 8)
        places = np.frombuffer(self._places, np.int64).reshape(-1, 3)
        sketches = np.frombuffer(self._sketches, np.int64)
        ranks = self._ranks()
        by_key = np.lexsort((places[:, 2], places[:, 1], ranks[places[:, 0]], keys[:, 1], keys[:, 0]))
        is_first = np.ones(len(by_key), bool)
        is_first[1:] = (keys[by_key[1:]] != keys[by_key[:-1]]).any(axis=1)
        distinct = by_key[is_first]
        by_place = np.lexsort((keys[distinct, 0], places[distinct, 2], places[distinct, 1], ranks[places[distinct, 0]]))
        numbers = np.empty(len(distinct), np.int64)
        numbers[by_place] = np.arange(len(distinct))
        preferred = distinct[by_place]
        clusters = self._clusters(sketches[preferred])
        catalogue = _Catalogue(
            keys=keys[distinct],
            numbers=numbers,
            kept=places[preferred],
            names=keys[preferred],
            roots=clusters.roots,
            originals=clusters.originals,
            files=self._files,
            order=tuple(self._files),
        )
        report = _report(len(by_key), clusters, catalogue)
        near = isinstance(self._config, NearDuplicatesConfig)
        return Deduplication(self._units, self._config.action == "drop", near, catalogue, report)

    def _ranks(self) -> Indices:
        """Rank of each file: by preference of its source, then by name."""
        last = len(self._preference)
        ordered = sorted(self._files, key=lambda file: (self._preference.get(file[0], last), file))
        ranks = np.empty(len(ordered), np.int64)
        ranks[[self._files[file] for file in ordered]] = np.arange(len(ordered))
        return ranks

    def _clusters(self, sketches: Indices) -> Clusters:
        roots, originals = np.arange(len(sketches)), np.arange(len(sketches))
        if self._store is None or not isinstance(self._config, NearDuplicatesConfig):
            return Clusters(roots, originals)
        own = np.flatnonzero(sketches != _NO_SKETCH)
        found = cluster(
            self._store,
            sketches[own],
            threshold=self._config.threshold,
            shingle_words=self._config.shingle_words,
            templates=self._config.identifiers == "distinct",
        )
        self._store.close()
        roots[own], originals[own] = own[found.roots], own[found.originals]
        found.roots, found.originals = roots, originals
        found.templates = [(int(own[one]), int(own[other])) for one, other in found.templates]
        return found


def _report(texts: int, clusters: Clusters, catalogue: _Catalogue) -> DuplicateReport:
    sizes = np.bincount(clusters.roots) if len(clusters.roots) else np.zeros(1, np.int64)
    return DuplicateReport(
        texts=texts,
        distinct=len(clusters.roots),
        clusters=int((sizes > 1).sum()),
        largest_cluster=int(sizes.max()),
        pairs_compared=clusters.pairs_compared,
        pairs_passed_over=clusters.pairs_passed_over,
        template_pairs=clusters.template_pairs,
        templates=tuple((catalogue.place(one), catalogue.place(other)) for one, other in clusters.templates),
    )
