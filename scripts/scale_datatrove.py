#!/usr/bin/env python3
"""Reading, redaction and the cleaning of single documents on an existing engine, datatrove (docs/scale.md).

    pip install 'cyberslm[data,scale]'
    python scripts/scale_datatrove.py my.yaml OUT --tasks 64 --workers 8
    cyberslm data prepare OUT/prepare.yaml

The engine's tasks share out what `cyberslm data prepare` would have its workers do, and call the same functions; its
executors for Slurm and Ray take the list that `pipeline` returns as well. Steps up to the first that must know the
whole corpus are done here; OUT/prepare.yaml asks for the rest, over files whose names keep the documents in their
order. So the tokens are those that one machine makes of my.yaml alone; they are traced to lines of OUT/documents, which
name the place that they came from.

    OUT/documents/SOURCE/PART-TASK.jsonl     text, source, name and line of each document that is left
    OUT/findings/00000.jsonl                 places of what was redacted, by task; never values
    OUT/logs/                                the engine's own; a task that is done is not done again
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

# The engine logs exceptions with the values of variables, which may be text that nobody should see, unless told not to.
os.environ["LOGURU_DIAGNOSE"] = "NO"

import yaml
from datatrove.data import Document, DocumentsPipeline
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.writers.jsonl import JsonlWriter

from cyberslm.data.clean.config import StepConfig
from cyberslm.data.clean.entry import Entry
from cyberslm.data.config import DataConfig
from cyberslm.data.corpus import make_pipeline, settings_of
from cyberslm.data.counts import Counts
from cyberslm.data.parts import entries, find_files, hash_or_skip, make_tasks
from cyberslm.data.redact.config import load_key
from cyberslm.data.redact.redactor import Redactor
from cyberslm.data.redact.report import finding_lines
from cyberslm.errors import ConfigError, CyberSLMError
from cyberslm.recipes.config import load_run


def to_document(entry: Entry, part: str) -> Document:
    place = {"source": entry.source, "name": entry.name, "line": entry.line, "record": entry.record}
    return Document(entry.text, entry.place(), metadata=place | {"part": part})


def to_entry(document: Document) -> Entry:
    return Entry(document.text, **{name: document.metadata[name] for name in ("source", "name", "line", "record")})


class ReadSources(PipelineStep):
    """The documents of this task's share of the files, in their order; each file's hash goes to ``files``."""

    type, name = "Reader", "cyberslm"

    def __init__(self, config: DataConfig, files: str) -> None:
        super().__init__()
        self.config, self.files = config, get_datafolder(files)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        yield from data or ()
        with self.files.open(f"{rank:05d}.jsonl", "wt") as facts:
            for part in make_tasks(find_files(self.config).files):
                if part.number % world_size != rank:
                    continue
                counts = Counts()
                for file in part.files:
                    sha256 = hash_or_skip(file, self.config, counts)
                    facts.write(json.dumps({"source": file.key, "path": file.name, "sha256": sha256}) + "\n")
                    if sha256 is None:
                        continue
                    for entry in entries(file, self.config, counts):
                        yield to_document(entry, f"part-{part.number:06d}")
                for reason, number in counts.skipped.items():
                    self.stat_update(f"skipped: {reason}", value=number)


class Redact(PipelineStep):
    """Documents without what `data.redact` takes out; the key is read where it is used and never travels."""

    type, name = "Format", "cyberslm redaction"

    def __init__(self, config: DataConfig, findings: str) -> None:
        super().__init__()
        self.config, self.findings = config, get_datafolder(findings)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:  # noqa: ARG002
        if self.config.redact is None:
            yield from data or ()
            return
        redactor = Redactor(self.config.redact, load_key(self.config.redact))
        with self.findings.open(f"{rank:05d}.jsonl", "wt") as findings:
            for document in data or ():
                redacted = redactor.redact(document.text)
                entry = to_entry(document)
                findings.writelines(finding_lines(redacted, entry.name, line=entry.line, record=entry.record))
                for found in redacted.findings:
                    self.stat_update(found.cls)
                document.text = redacted.text
                yield document


class Clean(PipelineStep):
    """What steps that judge each document alone leave of the documents."""

    type, name = "Filter", "cyberslm cleaning"

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:  # noqa: ARG002
        with tempfile.TemporaryDirectory() as scratch:
            steps = make_pipeline(self.config.steps, self.config, scratch=Path(scratch), keys=())
            steps.survey(tuple)
            for part, documents in groupby(data or (), key=lambda document: document.metadata["part"]):
                for cleaned in steps.run(lambda documents=documents: map(to_entry, documents)):
                    yield to_document(cleaned.entry, part)
                for (_, step), counts in steps.counts.items():
                    for reason, number in counts.dropped.items():
                        self.stat_update(f"{step}: {reason}", value=number)


def split_steps(steps: Sequence[StepConfig]) -> tuple[tuple[StepConfig, ...], tuple[StepConfig, ...]]:
    """The steps that can be done anywhere, and those from the first that must know the corpus."""
    alone = tuple(takewhile(lambda step: not step.corpus_wide, steps))
    return alone, tuple(steps[len(alone) :])


def pipeline(config: DataConfig, out: Path) -> list[PipelineStep]:
    """The engine's steps for everything up to the first corpus-wide step."""
    alone, _ = split_steps(config.steps)
    return [
        ReadSources(config, str(out / "files")),
        Redact(config, str(out / "findings")),
        Clean(replace(config, steps=alone)),
        JsonlWriter(str(out / "documents"), "${source}/${part}-${rank}.jsonl", compression=None, expand_metadata=True),
    ]


def finish(base: Path, config: DataConfig, out: Path) -> Path:
    """Write the settings of what is left to do."""
    _, later = split_steps(config.steps)

    def folders(key: str, sources: Sequence[str]) -> list[str]:
        """A source that left nothing has a folder too."""
        made = [out / "documents" / f"{key}[{number}]" for number in range(len(sources))]
        for folder in made:
            folder.mkdir(parents=True, exist_ok=True)
        return [folder.relative_to(out).as_posix() for folder in made]

    data = {
        "sources": folders("data.sources", config.sources),
        "validation": folders("data.validation", config.validation),
        "text_field": "text",
        "record_shape": "auto",
        "redact": None,
        "steps": [{step.name: _plain(step)} for step in later],
    }
    target = out / "prepare.yaml"
    settings = {"extends": str(base.resolve()), "out_dir": "run", "data": data}
    target.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return target


def _plain(step: StepConfig) -> dict[str, Any]:
    settings = vars(step.settings)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def begin(config: DataConfig, out: Path, tasks: int) -> None:
    """Note in OUT what it is made from. Raises ConfigError where it was begun with something else."""
    if config.redact is not None and config.redact.key_file is None:
        raise ConfigError("data.redact.key_file is not set: tasks need one key, so that pseudonyms agree")
    note, now = out / "settings.json", {"tasks": tasks, "settings": settings_of(config)}
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) != now:
        raise ConfigError(f"{out} was begun with other settings, another key or --tasks: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read, redact and clean on datatrove.")
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--tasks", type=int, default=4, help="shares that the files are cut into")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args(argv)
    try:
        config = load_run(args.config).value.data
        begin(config, args.out, args.tasks)
        steps = pipeline(config, args.out.resolve())
        logs = str(args.out.resolve() / "logs")
        LocalPipelineExecutor(steps, tasks=args.tasks, workers=args.workers, logging_dir=logs).run()
        target = finish(args.config, config, args.out)
    except CyberSLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"next: cyberslm data prepare {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
