"""Work through a file of records with a model: one row of new fields for each record, resumable, in bounded memory.

Records come in blocks, which depend on the input alone; the rows of a block are kept whole (`files.blocks`), so a
stopped command goes on where it was and ends with the bytes of a straight run. The result is written once, from all
rows, picked and ordered: the input's fields first, the new ones behind.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cyberslm.data.counts import Counts
from cyberslm.data.records import OpenRecords, Record, RecordFile
from cyberslm.errors import ConfigError, DataError
from cyberslm.files.blocks import Blocks, unfinished
from cyberslm.recipes.ranking import Pick, picked
from cyberslm.training.trackers import Screen, count

BLOCK_RECORDS = 512
BLOCK_CHARS = 1 << 20
MAX_COLUMNS = 4096
LINE_SECONDS = 10.0


class Row(NamedTuple):
    """The new fields of a record, and the number by which its row can be picked."""

    fields: Mapping[str, object]
    rank: float = 0.0


Worker = Callable[[Sequence[Record]], Sequence[Row]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is read and where the result goes. Raises `ConfigError` for a name that says no format."""

    source: RecordFile
    out: Path
    """CSV or JSON lines, by its name."""
    prefix: str = ""
    """Put before the names of the new fields, where the input has such fields already."""
    replace: bool = False
    """Replace a file that is there."""

    def __post_init__(self) -> None:
        if self.out.suffix not in _WRITERS:
            raise ConfigError(f"out is {self.out}; its name must end with {' or '.join(_WRITERS)}")
        if not self.out.absolute().parent.is_dir():
            raise ConfigError(f"out is {self.out}, whose folder does not exist: make it first")


@dataclass
class Done:
    """What became of the records: ``seen`` were worked on, ``written`` were picked, others skipped by reason."""

    seen: int = 0
    written: int = 0
    counts: Counts = field(default_factory=Counts)

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "records": self.seen,
            "written": self.written,
            "skipped": dict(sorted(self.counts.skipped.items())),
            "first_skipped": dict(sorted(self.counts.first.items())),
        }

    def lines(self, out: Path) -> Iterator[str]:
        """For people."""
        for reason, number in sorted(self.counts.skipped.items()):
            yield f"skipped {count(number, 'record')}: {reason}, first at {self.counts.first[reason]}"
        yield f"{count(self.seen, 'record')}, {self.written:,} written to {out}"


def work_through(
    task: Task,
    begin: Callable[[Path], Worker],
    *,
    decided_by: Mapping[str, object],
    screen: Screen,
    pick: Callable[[], Pick] = Pick,
    see: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Done:
    """Make a row of every record and write those that are picked.

    ``begin`` gets a folder that lasts as long as the work and returns what makes the rows of some records; ``pick`` is
    asked after that. ``decided_by`` names all besides input and versions that the rows follow from. ``see`` is shown
    the fields of every row once, at the end.
    """
    key = _key(task, decided_by)
    done = Done()
    with unfinished(task.out, key=key, replace=task.replace, say=screen.line) as blocks:
        worker = begin(blocks.folder)
        with task.source.opened(done.counts) as opened:
            _make_rows(task, opened, blocks, worker, screen)
        done.seen = blocks.taken
        chosen = pick()
        blocks.finish(_result(task, blocks, chosen, done, see))
    return done


def _key(task: Task, decided_by: Mapping[str, object]) -> str:
    named = {
        "input": task.source.identity(),
        "prefix": task.prefix,
        "decided_by": decided_by,
        "versions": {name: version(name) for name in ("torch",)},
        "once": secrets.token_hex(16) if task.source.path is None else None,
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _make_rows(task: Task, opened: OpenRecords, blocks: Blocks, worker: Worker, screen: Screen) -> None:
    records = opened.records
    for _ in islice(records, blocks.taken):
        pass
    screen.start_bar(total=opened.size, done=opened.position(), unit="B")
    told, before = time.monotonic(), blocks.taken
    try:
        for block in blocks_of(records):
            rows = worker(block)
            lines = [_row_line(record, row, task.prefix) for record, row in zip(block, rows, strict=True)]
            blocks.append(b"".join(lines), taken=len(block))
            screen.advance(opened.position())
            now = time.monotonic()
            if not screen.has_bar and now - told >= LINE_SECONDS:
                screen.line(f"record {blocks.taken:,} | {(blocks.taken - before) / (now - told):,.1f} records/s")
                told, before = now, blocks.taken
    finally:
        screen.stop_bar()


def blocks_of(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records in runs that depend on nothing else."""
    block: list[Record] = []
    size = 0
    for record in records:
        block.append(record)
        size += len(record.text)
        if len(block) == BLOCK_RECORDS or size >= BLOCK_CHARS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _row_line(record: Record, row: Row, prefix: str) -> bytes:
    new = {prefix + name: value for name, value in row.fields.items()}
    if clash := sorted(new.keys() & record.fields.keys()):
        raise DataError(
            f"line {record.line}: the input has a field {clash[0]!r} already; give --prefix, which is put before the"
            " names of new fields"
        )
    return _json([row.rank, {**record.fields, **new}])


def _json(value: object) -> bytes:
    """One line; characters that UTF-8 can't hold stay escaped."""
    try:
        return (json.dumps(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value) + "\n").encode()


def _result(
    task: Task, blocks: Blocks, pick: Pick, done: Done, see: Callable[[Mapping[str, Any]], None]
) -> Iterator[bytes]:
    columns: dict[str, None] = {}
    for row in blocks.rows():
        fields = json.loads(row)[1]
        see(fields)
        columns.update(dict.fromkeys(fields))

    def chosen() -> Iterator[dict[str, object]]:
        for row in picked(blocks.rows(), pick, blocks.folder):
            done.written += 1
            yield json.loads(row)[1]

    return _WRITERS[task.out.suffix](chosen(), list(columns))


def _csv_lines(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> Iterator[bytes]:
    if len(columns) > MAX_COLUMNS:
        raise DataError(f"the records have {len(columns):,} different fields, too many for CSV: write .jsonl")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])
        yield text.getvalue().encode("utf-8", "replace")
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _cell(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _json_lines(rows: Iterable[Mapping[str, object]], _columns: Sequence[str]) -> Iterator[bytes]:
    return map(_json, rows)


_WRITERS: dict[str, Callable[[Iterable[Mapping[str, object]], Sequence[str]], Iterator[bytes]]] = {
    ".csv": _csv_lines,
    ".jsonl": _json_lines,
}
