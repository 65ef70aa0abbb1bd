"""A list of steps over a corpus: a pass that surveys for each corpus-wide step, and a last one.

    pipeline = Pipeline(steps, scratch=folder, sources=keys)
    pipeline.survey(documents, workers=n)                # passes only if there are corpus-wide steps
    for cleaned in pipeline.run(documents, workers=n):   # what is left, in the order of the documents
        ...
    print(table(pipeline.counts))

``documents`` starts a pass over the entries, the same ones each time. A survey sees what the steps before it have left,
and that is kept on disk for the pass after it, so each step is applied to a document once. The result depends on the
entries alone: not on their order, not on the number of workers or on how they are batched.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from cyberslm.data.spool import Spooled, read_spool, write_spool
from cyberslm.data.workers import map_ordered
from cyberslm.errors import InputError

BATCH_CHARACTERS = 1 << 20
BATCH_ENTRIES = 1024

Documents = Callable[[], Iterable[Entry]]
Evaluation = Callable[[Sequence[str], str], Iterable[Entry]]


class Cleaned(NamedTuple):
    """What is left of an entry, and the group whose name decides the side of the validation split that it is on."""

    entry: Entry
    group: Group


class _Batch(NamedTuple):
    """What steps left of some documents, what they counted, and what a looker saw in each that is left.

    After a looker alone, which changes nothing, the texts stay where they came from.
    """

    left: list[Spooled]
    counts: Counts
    found: list[Any]


@dataclass(frozen=True)
class _Pass:
    """Named steps in a row, then a survey's looker; what is sent to the workers."""

    steps: tuple[tuple[str, Step], ...]
    look: Callable[[Entry], Any] | None = None

    def __call__(self, documents: list[Spooled]) -> _Batch:
        counts: Counts = {}
        left = [each for each in (self._clean(*document, counts) for document in documents) if each is not None]
        found = [self.look(entry) for entry, _ in left] if self.look is not None else []
        if not self.steps and self.look is not None:
            left = [Spooled(entry._replace(text="")) for entry, _ in left]
        return _Batch(left, counts, found)

    def _clean(self, entry: Entry, group: Group | None, counts: Counts) -> Spooled | None:
        for name, step in self.steps:
            outcome = step.apply(entry)
            counts.setdefault((entry.source, name), StepCounts()).add(entry, outcome)
            if outcome.dropped is not None:
                return None
            group = _coarser(group, outcome)
            entry = entry._replace(text=outcome.text)
        return Spooled(entry, group)


class Pipeline:
    """Steps made from their settings.

    ``scratch`` is a folder for temporary files: hashes, and with corpus-wide steps after others the texts between them;
    the caller removes it. ``sources`` lists source keys, those whose copies are kept first. ``evaluation`` reads the
    files of ``contamination.against``, given with its key. Raises ConfigError where an extra is missing.
    """

    def __init__(
        self,
        steps: Sequence[StepConfig],
        *,
        scratch: Path,
        sources: Sequence[str] = (),
        evaluation: Evaluation | None = None,
    ) -> None:
        self.counts: Counts = {}
        self.duplicates: dict[str, DuplicateReport] = {}
        """What each de-duplication step found, by its name; filled by ``survey``."""
        self._names = _names(steps)
        self._scratch = scratch
        self._keys = tuple(sources)
        self._left: Path | None = None
        self._counted: Counts = {}
        self._waiting: list[tuple[str, Step]] = []
        made = [
            _make(step, at, scratch=scratch, sources=sources, evaluation=evaluation) for at, step in enumerate(steps)
        ]
        self._planned: deque[tuple[str, Step | Survey]] = deque(zip(self._names, made, strict=True))

    def survey(self, documents: Documents, *, workers: int = 1) -> None:
        """Run the passes of the corpus-wide steps; to be called once, before ``run``."""
        while self._planned:
            name, planned = self._planned.popleft()
            if isinstance(planned, Survey):
                self._look(planned, documents, workers)
                planned = planned.finish()
            if isinstance(planned, Deduplication):
                self.duplicates[name] = planned.report
            self._waiting.append((name, planned))

    def run(self, documents: Documents, *, workers: int = 1) -> Iterator[Cleaned]:
        """What the steps leave; afterwards ``counts`` are those of all passes. Raises InputError before ``survey``."""
        if self._planned:
            raise InputError("call survey before run: the corpus-wide steps don't know the corpus yet")
        counts: Counts = {}
        merge(counts, self._counted)
        for batch in self._batches(_Pass(tuple(self._waiting)), documents, workers):
            merge(counts, batch.counts)
            for entry, group in batch.left:
                yield Cleaned(entry, group or Group(copy_digest(entry.text)[:16], entry.source))
        at = {name: index for index, name in enumerate(self._names)}
        self.counts = {key: counts[key] for key in sorted(counts, key=lambda key: (at[key[1]], key[0]))}

    def _look(self, survey: Survey, documents: Documents, workers: int) -> None:
        """Apply the steps that wait, show the survey what they leave, and keep that if it is not what there was."""

        def left() -> Iterator[Spooled]:
            for batch in self._batches(_Pass(tuple(self._waiting), survey.looker()), documents, workers):
                merge(self._counted, batch.counts)
                for each, found in zip(batch.left, batch.found, strict=True):
                    survey.add(each.entry._replace(text=""), found)
                yield from batch.left

        if not self._waiting:
            deque(left(), maxlen=0)
            return
        target = Path(tempfile.mkdtemp(prefix="pass-", dir=self._scratch)) / "left.docs"
        keys = write_spool(target, left(), self._keys)
        if self._left is not None:
            self._left.unlink()
        self._left, self._keys = target, keys
        self._waiting.clear()

    def _batches(self, work: _Pass, documents: Documents, workers: int) -> Iterator[_Batch]:
        if self._left is not None:
            given: Iterable[Spooled] = read_spool(self._left, self._keys)
        else:
            given = map(Spooled, documents())
        return map_ordered(work, batches(given), workers=workers)


def batches(documents: Iterable[Spooled]) -> Iterator[list[Spooled]]:
    """Documents in lists of about a million characters."""
    batch: list[Spooled] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.entry.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_ENTRIES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def against_key(at: int) -> str:
    """The name of the list of evaluation files of step ``at``."""
    return f"data.steps[{at}].contamination.against"


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
    at: int,
    *,
    scratch: Path,
    sources: Sequence[str],
    evaluation: Evaluation | None,
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
            entries = evaluation(settings.against, against_key(at))
            return ContaminationStep(settings, index_evaluation(entries, settings, key=against_key(at)))
        case _:
            return DuplicateSurvey(settings, scratch, sources)
