"""The documents of a configuration: read, redacted, cleaned, each on its side of the validation split.

Reading and redacting make parts (``parts``), cleaning makes one spool of what is left (``clean.pipeline``), and every
later pass reads that. Validation sources come first. A training document that has a copy, or with a near-duplicate step
a near copy, in ``data.validation`` is left out and counted, so the two sides never share a text. Without
``data.validation`` the name of a document's group of copies decides its side. The result is the same for any number of
workers or slices.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from cyberslm.data.chat import ChatConfig, read_template
from cyberslm.data.clean.config import StepConfig
from cyberslm.data.clean.counts import StepCounts
from cyberslm.data.clean.duplicates import DuplicateReport, is_held_out
from cyberslm.data.clean.entry import Entry
from cyberslm.data.clean.pipeline import Cleaned, Pipeline, against_key
from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import find_inputs, hash_file
from cyberslm.data.parts import Files, Part, PartMaker, entries, make_tasks, read_meta
from cyberslm.data.redact.config import load_key
from cyberslm.data.redact.redactor import Redactor
from cyberslm.data.redact.report import RedactionReport, finding_lines
from cyberslm.data.sources import copy_digest
from cyberslm.data.spool import Spooled, read_spool, write_spool
from cyberslm.data.workers import map_ordered
from cyberslm.errors import DataError
from cyberslm.files import Kept
from cyberslm.text.messages import unpack

Split = Literal["train", "validation"]
Stage = Literal["read", "clean", "tokenizer", "tokens", "parts kept", "cleaning kept", "tokenizer kept", "shards kept"]

Progress = Callable[[Stage | Literal["refused"], int, int], None]
"""Called with the stage, the bytes of source files or text done, and the bytes of all of it.

What an earlier start left comes as one call each, with the number of things kept and of all; "refused" is work of
other settings or files, which was deleted.
"""

CLEANED = "cleaned"
PROGRESS_BYTES = 1 << 20
WORTH_WORKERS = 1 << 26


class Piece(NamedTuple):
    """A document that is kept; ``key`` names its source, such as data.sources[0], and ``name`` its file."""

    text: str
    text_bytes: int
    split: Split
    key: str
    name: str
    line: int


class Reading(NamedTuple):
    """What reading gave: the parts in order, and per source what was passed over before."""

    parts: tuple[Part, ...]
    passed_over: Mapping[str, Counter[str]]
    redactor: Redactor | None = None
    lasting_key: bool = True
    """Pseudonyms and digests can be compared with those of other runs."""


def read_parts(
    config: DataConfig, files: Files, kept: Kept, folder: Path, progress: Progress, *, slices: tuple[int, int] = (1, 1)
) -> Reading:
    """Make the parts of slice i of n in ``folder``, those that aren't there yet. Raises DataError."""
    redactor, lasting = make_redactor(config)
    maker = PartMaker(config, redactor, kept, folder, files.keys)
    number, count = slices
    tasks = [task for task in make_tasks(files.files) if task.number % count == number - 1]
    parts = tuple(Part(folder, task.number) for task in tasks)
    missing = [task for task, part in zip(tasks, parts, strict=True) if not _is_there(part, kept)]
    if len(missing) < len(tasks):
        progress("parts kept", len(tasks) - len(missing), len(tasks))
    total = sum(file.size for task in tasks for file in task.files)
    to_do = sum(file.size for task in missing for file in task.files)
    done = total - to_do
    progress("read", done, total)
    for task, _ in zip(missing, map_ordered(maker, missing, workers=num_workers(config, to_do)), strict=True):
        done += sum(file.size for file in task.files)
        progress("read", done, total)
    return Reading(parts, files.passed_over, redactor, lasting)


def _is_there(part: Part, kept: Kept) -> bool:
    """A part's documents go once they have been cleaned."""
    return kept.holds(part.name) and (kept.holds(CLEANED) or part.documents.exists())


class Corpus:
    """The documents of a reading, cleaned into scratch files of ``kept``. Raises DataError and ConfigError."""

    def __init__(self, config: DataConfig, reading: Reading, kept: Kept, progress: Progress) -> None:
        self.config = config
        self.keys = list(reading.passed_over)
        self.redaction = RedactionReport()
        self.lasting_key = reading.lasting_key
        self.steps: Mapping[tuple[str, str], StepCounts] = {}
        self.duplicates: Mapping[str, DuplicateReport] = {}
        self.file_facts: list[dict[str, object]] = []
        """One plain record for each file that was read."""
        self.finds = [part.finds for part in reading.parts]
        """JSON lines of what was redacted, in the order of the documents."""
        self._redactor = reading.redactor
        self._progress = progress
        self._read = {key: Counts(skipped=reasons.copy()) for key, reasons in reading.passed_over.items()}
        for part in reading.parts:
            meta = read_meta(part)
            self.redaction.merge(meta.redaction)
            self.file_facts += meta.files
            for key, counts in meta.counts.items():
                self._read[key].merge(counts)
        self._spools = [part.documents for part in reading.parts]
        if config.steps:
            self._take_cleaned(kept, reading.parts)
        self._total = sum(spool.stat().st_size for spool in self._spools)

    def training_texts(self) -> Iterator[str]:
        """Texts of the training documents; at the end makes sure that each split has what it needs."""
        counts = self.new_counts()
        for piece in self.pieces(counts, "tokenizer"):
            if piece.split != "train":
                continue
            if self.config.format == "text":
                yield piece.text
            else:
                yield from unpack(piece.text).contents
        self.check(counts)

    def pieces(self, counts: Mapping[str, Counts], stage: Stage) -> Iterator[Piece]:
        """Every document that is kept, each counted under its source."""
        held_out: set[bytes] = set()
        done = told = 0
        self._progress(stage, 0, self._total)
        for entry, group in self._documents(self._spools):
            text_bytes = len(entry.text.encode())
            done += text_bytes
            if done - told >= PROGRESS_BYTES:
                told = done
                self._progress(stage, min(done, self._total), self._total)
            count, digest = counts[entry.source], copy_digest(entry.text)
            split = self._split(entry, digest[:16] if group is None else group.key, digest, held_out)
            if split == "train" and group is not None and group.source.startswith("data.validation"):
                split = None
            if split is None:
                count.skip("copy in data.validation", entry.place())
            else:
                count.add(text_bytes, held_out=split == "validation")
                yield Piece(entry.text, text_bytes, split, entry.source, entry.name, entry.line)
        self._progress(stage, self._total, self._total)

    def new_counts(self) -> dict[str, Counts]:
        """Counts for each source, beginning with what was passed over, not read or left out by a step."""
        fresh = {key: Counts() for key in self._read}
        for key, counts in fresh.items():
            counts.merge(self._read[key])
        for (key, name), step in self.steps.items():
            for reason, number in step.dropped.items():
                examples = step.examples.get(reason)
                fresh[key].skip(f"{name}: {reason}", examples[0][-1] if examples else "")
                fresh[key].skipped[f"{name}: {reason}"] += number - 1
        return fresh

    def check(self, counts: Mapping[str, Counts]) -> None:
        """Raise DataError when there is no text, or when a split that is wanted is empty."""
        documents = sum(count.documents for count in counts.values())
        held_out = sum(count.validation_documents for count in counts.values())
        skipped = sum((count.skipped for count in counts.values()), start=Counter[str]())
        listed = ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items())) or "nothing"
        if documents == 0:
            raise DataError(f"data.sources hold no text: {len(self.file_facts)} files read, skipped: {listed}")
        if documents == 1 and self.config.validation_fraction > 0 and not self.config.validation:
            raise DataError(
                f"data.sources hold one document (skipped: {listed}) and none is left to validate on; add text, cut it "
                "into more documents with data.txt_unit: paragraph, or set data.validation_fraction: 0"
            )
        if documents == held_out:
            raise DataError(
                f"all {documents} documents are held out and none is left to learn from (skipped: {listed}); lower "
                "data.validation_fraction, add to data.sources, or cut text files with data.txt_unit: paragraph"
            )
        if held_out == 0 and self.config.validation:
            raise DataError("data.validation holds no text; name other files, or leave it out")
        if held_out == 0 and self.config.validation_fraction > 0:
            raise DataError(
                f"data.validation_fraction {self.config.validation_fraction} holds out none of the {documents} "
                "documents; raise it, name files in data.validation, cut text files into more documents with "
                "data.txt_unit: paragraph, or set data.validation_fraction: 0 to train without validation"
            )

    def _take_cleaned(self, kept: Kept, parts: Sequence[Part]) -> None:
        """Go on with the cleaned documents; once they are marked, the parts' own are not needed any more."""
        target, facts, finds = (kept.scratch / f"cleaned.{kind}" for kind in ("docs", "json", "finds"))
        if kept.holds(CLEANED):
            self._progress("cleaning kept", 1, 1)
        else:
            with tempfile.TemporaryDirectory(dir=kept.scratch) as between:
                counted = self._clean(target, finds, Path(between))
            facts.write_text(json.dumps(counted), encoding="utf-8")
            kept.mark(CLEANED, (target, facts, finds))
        plain = json.loads(facts.read_text(encoding="utf-8"))
        self.steps = {(source, step): StepCounts.of_plain(counts) for source, step, counts in plain["steps"]}
        self.duplicates = {name: DuplicateReport.of_plain(each) for name, each in plain["duplicates"].items()}
        self.redaction.merge(RedactionReport.of_plain(plain["redaction"]))
        self.finds.append(finds)
        self._spools = [target]
        for part in parts:
            if part.folder == kept.scratch and part.documents.exists():
                kept.mark(part.name, (part.finds, part.meta))
                part.documents.unlink()

    def _clean(self, target: Path, finds: Path, scratch: Path) -> dict[str, object]:
        """Write the cleaned documents and what was found in them anew; returns what the steps counted."""
        raw, redactor = self._spools, self._redactor
        pipeline = make_pipeline(self.config.steps, self.config, scratch=scratch, keys=self.keys, redactor=redactor)
        total = sum(spool.stat().st_size for spool in raw)
        workers = num_workers(self.config, total)

        def start() -> Iterator[Entry]:
            done = 0
            for number, spool in enumerate(raw):
                self._progress("clean", done, total)
                yield from (each.entry for each in self._documents([spool]))
                done += raw[number].stat().st_size

        pipeline.survey(start, workers=workers)
        cleaned: Iterable[Cleaned] = pipeline.run(start, workers=workers)
        unveiled = RedactionReport()
        with finds.open("x", encoding="utf-8", newline="\n") as stream:
            if redactor is not None and any(step.unicode and step.changes_texts for step in self.config.steps):
                cleaned = _redacted_again(cleaned, redactor, unveiled, stream.writelines)
            write_spool(target, (Spooled(*each) for each in cleaned), self.keys)
        return {
            "steps": [(*key, vars(counts)) for key, counts in pipeline.counts.items()],
            "duplicates": {name: report._asdict() for name, report in pipeline.duplicates.items()},
            "redaction": unveiled.plain(),
        }

    def _documents(self, spools: Iterable[Path]) -> Iterator[Spooled]:
        for spool in spools:
            yield from read_spool(spool, self.keys)

    def _split(self, entry: Entry, group: bytes, digest: bytes, held_out: set[bytes]) -> Split | None:
        if entry.source.startswith("data.validation"):
            held_out.add(digest)
            return "validation"
        if self.config.validation:
            return None if digest in held_out else "train"
        return "validation" if is_held_out(group, self.config.validation_fraction) else "train"


def _redacted_again(
    cleaned: Iterable[Cleaned],
    redactor: Redactor,
    report: RedactionReport,
    write_finds: Callable[[Iterator[str]], None],
) -> Iterator[Cleaned]:
    """Mended and normalised characters may show what was hidden when the texts were redacted first."""
    for entry, group in cleaned:
        redacted = redactor.redact(entry.text)
        if redacted.findings:
            report.add(redacted)
            write_finds(finding_lines(redacted, entry.name, line=entry.line, record=entry.record))
        yield Cleaned(entry._replace(text=redacted.text), group)


def make_pipeline(
    steps: Sequence[StepConfig],
    config: DataConfig,
    *,
    scratch: Path,
    keys: Sequence[str],
    redactor: Redactor | None = None,
) -> Pipeline:
    """The cleaning steps; evaluation files are read and redacted as the sources are, so that they look the same.

    But as text, whatever ``data.format``: questions are evaluation, too.
    """
    plain = replace(config, format="text", chat=ChatConfig())

    def evaluation(paths: Sequence[str], key: str) -> Iterator[Entry]:
        for file in find_inputs(paths, key=key).files:
            with _naming(file.key):
                for entry in entries(file, plain, Counts()):
                    yield entry if redactor is None else entry._replace(text=redactor.redact(entry.text).text)

    return Pipeline(steps, scratch=scratch, sources=keys, evaluation=evaluation)


def num_workers(config: DataConfig, text_bytes: int) -> int:
    """Processes to read and clean ``text_bytes`` with; starting them takes seconds, so little text gets one."""
    if config.workers:
        return config.workers
    return available_cpus() if text_bytes > WORTH_WORKERS else 1


def available_cpus() -> int:
    """CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def settings_of(config: DataConfig) -> dict[str, object]:
    """What decides the tokens: settings, which key redacts, and the evaluation files that are kept out."""
    settings = config.shaping()
    if config.redact is not None:
        key = load_key(config.redact)
        settings["redact.key"] = hmac.digest(key.secret, b"which key", "sha256").hex()[:16] if key.lasting else None
    against: dict[str, str] = {}
    for at, step in enumerate(config.steps):
        for file in find_inputs(step.contamination.against, key=against_key(at)).files if step.contamination else ():
            with _naming(file.key):
                against[f"{file.key} {file.name}"] = hash_file(file)
    if against:
        settings["steps.against"] = against
    if (template := read_template(config.chat)) is not None and config.format != "text":
        settings["chat.template"] = hashlib.sha256(template.encode()).hexdigest()
    return settings


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Say which setting names the file that an error is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def report_of(corpus: Corpus) -> dict[str, object]:
    """What cleaning and redaction did, as plain data."""
    return {
        "steps": [{"source": source, "step": name, **each.summary()} for (source, name), each in corpus.steps.items()],
        "duplicates": {name: each._asdict() for name, each in corpus.duplicates.items()},
        "redaction": corpus.redaction.summary() | {"lasting_key": corpus.lasting_key}
        if corpus.config.redact is not None
        else None,
    }


def make_redactor(config: DataConfig) -> tuple[Redactor | None, bool]:
    """The redactor of a configuration, if it has one, and whether its key lasts beyond this preparation."""
    if config.redact is None:
        return None, True
    key = load_key(config.redact)
    return Redactor(config.redact, key), key.lasting
