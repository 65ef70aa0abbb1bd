"""Reading and redacting as a map over files: tasks of neighbouring files in, parts on disk out.

Tasks follow from the list of files alone, so workers and machines may share them in any way: a part has the same bytes
whoever makes it. A part is three files: ``.docs`` (a spool), ``.json`` (what was counted, and each file's hash) and
``.finds`` (places of what was redacted, never values).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cyberslm.data.blocks import cut_again, joined
from cyberslm.data.clean.entry import Entry
from cyberslm.data.config import DataConfig
from cyberslm.data.counts import Counts
from cyberslm.data.inputs import InputFile, find_inputs, hash_file, printable
from cyberslm.data.readers.formats import named_format
from cyberslm.data.redact.redactor import Redactor
from cyberslm.data.redact.report import RedactionReport, finding_lines
from cyberslm.data.sources import read_documents
from cyberslm.data.spool import Spooled, write_spool
from cyberslm.errors import DataError
from cyberslm.files import Kept

TASK_BYTES = 1 << 24
TASK_FILES = 1000


class Task(NamedTuple):
    """Files that one part is made of, neighbours in the order of all files."""

    number: int
    files: tuple[InputFile, ...]


class Files(NamedTuple):
    """All files of a configuration, validation first, and per source what was passed over and why."""

    files: tuple[InputFile, ...]
    passed_over: Mapping[str, Counter[str]]

    @property
    def keys(self) -> list[str]:
        """Every source key, in order."""
        return list(self.passed_over)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def find_files(config: DataConfig) -> Files:
    """The files of ``data.validation`` and ``data.sources``. Raises DataError."""
    validation = find_inputs(config.validation, key="data.validation")
    train = find_inputs(config.sources, key="data.sources")
    return Files((*validation.files, *train.files), validation.passed_over | train.passed_over)


def make_tasks(files: Sequence[InputFile]) -> Iterator[Task]:
    """Files cut into tasks of at least ``TASK_BYTES`` or ``TASK_FILES`` files, but for the last."""
    number, batch, size = 0, list[InputFile](), 0
    for file in files:
        batch.append(file)
        size += file.size
        if size >= TASK_BYTES or len(batch) >= TASK_FILES:
            yield Task(number, tuple(batch))
            number, batch, size = number + 1, [], 0
    if batch:
        yield Task(number, tuple(batch))


class Part(NamedTuple):
    """One task's outcome in ``folder``."""

    folder: Path
    number: int

    @property
    def name(self) -> str:
        return f"part-{self.number:06d}"

    @property
    def documents(self) -> Path:
        return self.folder / f"{self.name}.docs"

    @property
    def finds(self) -> Path:
        return self.folder / f"{self.name}.finds"

    @property
    def meta(self) -> Path:
        return self.folder / f"{self.name}.json"


class PartMeta(NamedTuple):
    """What was counted while a part was made: per source, of redaction, and a plain record of each file."""

    counts: dict[str, Counts]
    redaction: RedactionReport
    files: list[dict[str, Any]]


@dataclass(frozen=True)
class PartMaker:
    """Makes the part of a task in ``folder`` and marks it; can be sent to a worker process."""

    config: DataConfig
    redactor: Redactor | None
    kept: Kept
    folder: Path
    keys: Sequence[str]

    def __call__(self, task: Task) -> Part:
        part = Part(self.folder, task.number)
        with self.kept.writing():
            self._write(part, task)
            self.kept.mark(part.name, (part.documents, part.finds, part.meta))
        return part

    def _write(self, part: Part, task: Task) -> None:
        meta = PartMeta({}, RedactionReport(), [])
        part.documents.unlink(missing_ok=True)
        with part.finds.open("w", encoding="utf-8", newline="\n") as finds:
            write_spool(part.documents, self._documents(task, meta, finds.writelines), self.keys)
        plain = {
            "counts": {key: vars(counts) for key, counts in meta.counts.items()},
            "redaction": meta.redaction.plain(),
            "files": meta.files,
        }
        part.meta.write_text(json.dumps(plain), encoding="utf-8")

    def _documents(self, task: Task, meta: PartMeta, write_finds: Any) -> Iterator[Spooled]:
        for file in task.files:
            counts = meta.counts.setdefault(file.key, Counts())
            facts = {"source": file.key, "path": file.name, "size": file.size, "mtime_ns": file.mtime_ns}
            meta.files.append(facts | {"sha256": hash_or_skip(file, self.config, counts)})
            if meta.files[-1]["sha256"] is None:
                continue
            found = self._redacted(entries(file, self.config, counts), meta.redaction, write_finds)
            yield from (Spooled(entry._replace(number=number)) for number, entry in enumerate(found))

    def _redacted(self, found: Iterator[Entry], report: RedactionReport, write_finds: Any) -> Iterator[Entry]:
        """Redacted before texts are cut into lines or paragraphs, for a secret may run over several."""
        if self.redactor is None:
            yield from found
            return
        unit = self.config.txt_unit
        blocks = found if unit == "file" else joined(found, self.config.max_document_bytes)
        for block in blocks:
            redacted = self.redactor.redact(block.text)
            report.add(redacted)
            if redacted.findings:
                write_finds(finding_lines(redacted, block.name, line=block.line, record=block.record))
            if unit == "file" or block.record:
                yield block._replace(text=redacted.text)
            else:
                yield from cut_again(block, redacted, unit)


def hash_or_skip(file: InputFile, config: DataConfig, counts: Counts) -> str | None:
    """SHA-256 of a file's bytes; None, which is counted, for one that can't be read and may be skipped."""
    try:
        return hash_file(file)
    except DataError:
        if config.on_bad_input == "error":
            raise
    counts.skip("unreadable", file.name)
    return None


def entries(file: InputFile, config: DataConfig, counts: Counts) -> Iterator[Entry]:
    """The documents of a file under names that are equal on every machine."""
    own = len(printable(file.path))
    for document in read_documents(file, config, counts):
        name = file.name + document.source[own:]
        record = named_format(name.rpartition("!")[2]) not in ("text", None)
        yield Entry(document.text, file.key, name, document.line, record=record)


def read_meta(part: Part) -> PartMeta:
    """What `PartMaker` counted."""
    plain = json.loads(part.meta.read_text(encoding="utf-8"))
    counts = {
        key: Counts(**each | {"skipped": Counter(each["skipped"])}) for key, each in dict(plain["counts"]).items()
    }
    return PartMeta(counts, RedactionReport.of_plain(plain["redaction"]), plain["files"])
