"""A list of steps over a corpus: one surveying pass for each corpus-wide step, then one pass that cleans.

    pipeline = Pipeline(steps, scratch=folder, sources=keys)
    pipeline.survey(documents, workers=n)                # passes only if there are corpus-wide steps
    for cleaned in pipeline.run(documents, workers=n):   # what is left, in the order of the documents
        ...
    print(table(pipeline.counts))

``documents`` starts a pass over the entries, the same ones each time. A survey sees what the steps before it have left.
The result depends on the entries alone: not on their order, not on the number of workers or on how they are batched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cyberslm.data.clean.boilerplate import BoilerplateSurvey
from cyberslm.data.clean.config import StepConfig
from cyberslm.data.clean.contamination import ContaminationStep, index_evaluation
from cyberslm.data.clean.counts import Counts, StepCounts, merge
from cyberslm.data.clean.duplicates import Deduplication, DuplicateReport, DuplicateSurvey
from cyberslm.data.clean.entry import Entry, Group, Outcome, Step, Survey
from cyberslm.data.clean.quality import QualityStep
from cyberslm.data.clean.texts import LengthStep, UnicodeStep
from cyberslm.data.clean.tripwires import TripwireStep
from cyberslm.data.sources import copy_digest
from cyberslm.data.workers import map_ordered
from cyberslm.errors import InputError

BATCH_CHARACTERS = 1 << 20
BATCH_ENTRIES = 1024

Documents = Callable[[], Iterable[Entry]]


class Cleaned(NamedTuple):
    """What is left of an entry, and the group whose name decides the side of the validation split that it is on."""

    entry: Entry
    group: Group


class _Batch(NamedTuple):
    cleaned: list[Cleaned]
    counts: Counts


@dataclass(frozen=True)
class _Chain:
    """Named steps in a row; what is sent to the workers."""

    steps: tuple[tuple[str, Step], ...]

    def clean(self, entry: Entry, counts: Counts) -> Cleaned | None:
        group: Group | None = None
        for name, step in self.steps:
            outcome = step.apply(entry)
            counts.setdefault((entry.source, name), StepCounts()).add(entry, outcome)
            if outcome.dropped is not None:
                return None
            group = _coarser(group, outcome)
            entry = entry._replace(text=outcome.text)
        return Cleaned(entry, group or Group(copy_digest(entry.text)[:16], entry.source))

    def __call__(self, entries: list[Entry]) -> _Batch:
        counts: Counts = {}
        cleaned = [self.clean(entry, counts) for entry in entries]
        return _Batch([each for each in cleaned if each is not None], counts)


@dataclass(frozen=True)
class _Look:
    """The steps before a survey and its looker."""

    chain: _Chain
    look: Callable[[Entry], Any]

    def __call__(self, entries: list[Entry]) -> list[tuple[Entry, Any]]:
        """Entries come back without their text, which ``add`` doesn't need."""
        left = (self.chain.clean(entry, {}) for entry in entries)
        return [(each.entry._replace(text=""), self.look(each.entry)) for each in left if each is not None]


class Pipeline:
    """Steps made from their settings.

    ``scratch`` is a folder for temporary files of hashes. ``sources`` lists source keys, those whose copies are kept
    first. ``evaluation`` reads the files of ``contamination.against``. Raises ConfigError where an extra is missing.
    """

    def __init__(
        self,
        steps: Sequence[StepConfig],
        *,
        scratch: Path,
        sources: Sequence[str] = (),
        evaluation: Callable[[Sequence[str]], Iterable[Entry]] | None = None,
    ) -> None:
        self.counts: Counts = {}
        self._names = _names(steps)
        self._ready: list[Step] = []
        self._planned: deque[Step | Survey] = deque(
            _make(step, scratch=scratch, sources=sources, evaluation=evaluation) for step in steps
        )

    @property
    def duplicates(self) -> Mapping[str, DuplicateReport]:
        """What each de-duplication step found, by its name."""
        pairs = zip(self._names, self._ready, strict=False)
        return {name: step.report for name, step in pairs if isinstance(step, Deduplication)}

    def survey(self, documents: Documents, *, workers: int = 1) -> None:
        """Run the passes of the corpus-wide steps; to be called once, before ``run``."""
        while self._planned:
            planned = self._planned.popleft()
            if not isinstance(planned, Survey):
                self._ready.append(planned)
                continue
            looking = _Look(self._chain(), planned.looker())
            for batch in map_ordered(looking, batches(documents()), workers=workers):
                for entry, found in batch:
                    planned.add(entry, found)
            self._ready.append(planned.finish())

    def run(self, documents: Documents, *, workers: int = 1) -> Iterator[Cleaned]:
        """What the steps leave; afterwards ``counts`` are those of this pass. Raises InputError before ``survey``."""
        if self._planned:
            raise InputError("call survey before run: the corpus-wide steps don't know the corpus yet")
        counts: Counts = {}
        for batch in map_ordered(self._chain(), batches(documents()), workers=workers):
            merge(counts, batch.counts)
            yield from batch.cleaned
        at = {name: index for index, name in enumerate(self._names)}
        self.counts = {key: counts[key] for key in sorted(counts, key=lambda key: (at[key[1]], key[0]))}

    def _chain(self) -> _Chain:
        return _Chain(tuple(zip(self._names, self._ready, strict=False)))


def batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries in lists of about a million characters."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_ENTRIES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _coarser(group: Group | None, outcome: Outcome) -> Group | None:
    """A cluster of near copies says more than a set of equal ones."""
    if outcome.group is None or (group is not None and group.near and not outcome.group.near):
        return group
    return outcome.group


def _names(steps: Sequence[StepConfig]) -> list[str]:
    names: list[str] = []
    for step in steps:
        times = sum(name.partition(" ")[0] == step.name for name in names)
        names.append(f"{step.name} {times + 1}" if times else step.name)
    return names


def _make(
    step: StepConfig,
    *,
    scratch: Path,
    sources: Sequence[str],
    evaluation: Callable[[Sequence[str]], Iterable[Entry]] | None,
) -> Step | Survey:
    settings = step.settings
    match step.name:
        case "tripwires":
            return TripwireStep(settings)
        case "unicode":
            return UnicodeStep(settings)
        case "length":
            return LengthStep(settings)
        case "quality":
            return QualityStep(settings)
        case "boilerplate":
            return BoilerplateSurvey(settings)
        case "contamination":
            if evaluation is None:
                raise InputError("contamination needs a function that reads the evaluation files")
            return ContaminationStep(settings, index_evaluation(evaluation(settings.against), settings))
        case _:
            return DuplicateSurvey(settings, scratch, sources)
