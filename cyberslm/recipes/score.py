"""Score the records of a file: how many bits each costs the model, and how unusual that is among normal ones.

A model of one's own logs expects the usual line and is surprised by an odd one. What a surprise is worth is read off
lines known to be normal (`evaluation.baseline`), scored the same way. Scores are rounded once, so that what is
compared is what is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from cyberslm import files
from cyberslm.data.counts import Counts
from cyberslm.data.records import LINE_FIELD, Record, RecordFile, form_of
from cyberslm.errors import ConfigError
from cyberslm.evaluation.baseline import Baseline
from cyberslm.evaluation.scoring import BATCH_TOKENS, TextScore, score_texts
from cyberslm.files import read_manifest
from cyberslm.generation.engine import Engine
from cyberslm.recipes.ranking import Pick
from cyberslm.recipes.use import find_model, load
from cyberslm.recipes.work import Done, Row, Task, Worker, blocks_of, work_through
from cyberslm.training.trackers import Screen

Measure = Literal["bits_per_byte", "bits_per_token", "bits", "max_bits"]
DIGITS = 6
MAX_SURPRISES = 100
MAX_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """How records are scored and which are written. Raises `ConfigError` naming the field."""

    by: Measure = "bits_per_byte"
    """The figure that ranks, is compared with the baseline and with the threshold."""
    threshold: float | None = None
    """Write only records whose figure is above this; null writes all."""
    top: int | None = None
    """Write only this many records, the most unusual first; null writes all."""
    sort: bool = False
    """Write all records, the most unusual first; off keeps the order of the input."""
    baseline: Path | None = None
    """A file of normal records, read like the input, that says what is usual."""
    fpr: float | None = None
    """False positive rate: write only records above what this share of normal ones exceed; needs a baseline."""
    with_end: bool = True
    """Count the end of each text as a token, as in training; off for lines that were no documents of their own."""
    surprises: int = 3
    """The most surprising tokens that are written for each record, with their characters."""
    batch_tokens: int = BATCH_TOKENS
    """Positions of one forward pass."""

    def __post_init__(self) -> None:
        if self.by not in get_args(Measure):
            raise ConfigError(f"by is {self.by!r}; it must be one of {', '.join(get_args(Measure))}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError(f"threshold is {self.threshold}; it must be a finite number")
        if self.fpr is not None and (self.threshold is not None or self.baseline is None):
            raise ConfigError("fpr sets the threshold by a baseline: give --baseline with it, and no --threshold")
        if not 0 <= self.surprises <= MAX_SURPRISES:
            raise ConfigError(f"surprises is {self.surprises}; it must be 0 to {MAX_SURPRISES}")
        if not 1 <= self.batch_tokens <= MAX_BATCH_TOKENS:
            raise ConfigError(f"batch_tokens is {self.batch_tokens}; it must be 1 to {MAX_BATCH_TOKENS:,}")
        _ = self.pick

    @property
    def pick(self) -> Pick:
        return Pick(above=self.threshold, top=self.top, ordered=self.sort)


@dataclass
class Scored:
    """The sums over all records, and what a baseline said."""

    done: Done
    bits: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    threshold: float | None = None
    baseline_records: int | None = None
    settings: ScoreSettings = field(default_factory=ScoreSettings)

    def figures(self) -> dict[str, Any]:
        """For ``--json``."""
        found = self.done.figures() | {
            "bits_per_byte": self.bits / self.num_bytes if self.num_bytes else None,
            "bits_per_token": self.bits / self.num_tokens if self.num_tokens else None,
            "threshold": self.threshold,
        }
        if self.baseline_records is not None:
            found |= {"baseline_records": self.baseline_records, "false_positive_rate": self.settings.fpr}
        return found

    def lines(self, out: Path) -> Iterator[str]:
        """For people."""
        if self.num_bytes and self.num_tokens:
            yield f"{self.bits / self.num_bytes:.4f} bits per byte, {self.bits / self.num_tokens:.3f} per token"
        else:
            yield "no text to score, so no bits per byte"
        if self.threshold is not None:
            words = f"threshold: {self.settings.by} above {self.threshold:.6g}"
            if self.settings.fpr is not None:
                words += (
                    f", false positive rate at most {self.settings.fpr:g} by {self.baseline_records:,} normal records"
                )
            yield words
        yield from self.done.lines(out)


def score(model: Path, task: Task, settings: ScoreSettings, *, screen: Screen, device: str = "auto") -> Scored:
    """Score every record of the task's input and write the picked ones.

    New fields: ``line``, ``tokens``, ``bytes``, ``bits``, ``bits_per_byte``, ``bits_per_token``, ``max_bits``,
    ``surprising`` and, with a baseline, ``percentile``: per cent of the normal records that score lower.
    """
    folder = find_model(model)
    engine = load(folder, device=device)
    found = Scored(Done(), threshold=settings.threshold, settings=settings)
    normal = None if settings.baseline is None else _like(task.source, settings.baseline)

    def begin(place: Path) -> Worker:
        baseline = None
        if normal is not None:
            baseline = Baseline(_baseline_scores(engine, normal, settings, place, screen))
            found.baseline_records = baseline.size
            if settings.fpr is not None:
                found.threshold = baseline.threshold(settings.fpr)
        return lambda records: _rows(engine, records, settings, baseline)

    def see(fields: Mapping[str, Any]) -> None:
        found.bits += fields[task.prefix + "bits"]
        found.num_bytes += fields[task.prefix + "bytes"]
        found.num_tokens += fields[task.prefix + "tokens"]

    found.done = work_through(
        task,
        begin,
        decided_by={
            "verb": "score",
            "model": read_manifest(folder)["self"],
            "device": engine.model.device.type,
            "settings": {name: getattr(settings, name) for name in ("by", "with_end", "surprises", "batch_tokens")},
            "baseline": None if normal is None else normal.identity(),
        },
        screen=screen,
        pick=lambda: replace(settings.pick, above=found.threshold),
        see=see,
    )
    return found


def _like(source: RecordFile, path: Path) -> RecordFile:
    """Another file read like the source, each by its own name: the same field, where it has fields."""
    text = form_of(path) == "text"
    return replace(source, path=path, form=None, field=None if text else source.field or LINE_FIELD)


def _baseline_scores(
    engine: Engine, normal: RecordFile, settings: ScoreSettings, place: Path, screen: Screen
) -> list[float]:
    """The figures of all normal records, kept in ``place`` once they are worked out."""
    kept = place / "baseline.json"
    if kept.is_file():
        return json.loads(kept.read_bytes())
    counts, found = Counts(), list[float]()
    with normal.opened(counts) as opened:
        screen.start_bar(total=opened.size, done=0, unit="B")
        try:
            for block in blocks_of(opened.records):
                found += [_figure(one, settings.by) for one in _scores(engine, block, settings)]
                screen.advance(opened.position())
        finally:
            screen.stop_bar()
    files.write_text(kept, json.dumps(found))
    return found


def _scores(engine: Engine, records: Sequence[Record], settings: ScoreSettings) -> list[TextScore]:
    return score_texts(
        engine.model,
        engine.tokenizer,
        [record.text for record in records],
        with_end=settings.with_end,
        surprises=settings.surprises,
        batch_tokens=settings.batch_tokens,
    )


def _figure(found: TextScore, name: Measure) -> float:
    return round(getattr(found, name), DIGITS)


def _rows(engine: Engine, records: Sequence[Record], settings: ScoreSettings, baseline: Baseline | None) -> list[Row]:
    rows = []
    for record, found in zip(records, _scores(engine, records, settings), strict=True):
        fields: dict[str, object] = {"line": record.line, "tokens": found.num_tokens, "bytes": found.num_bytes}
        fields |= {name: _figure(found, name) for name in ("bits", "bits_per_byte", "bits_per_token", "max_bits")}
        if settings.surprises:
            fields["surprising"] = [
                {
                    "bits": round(each.bits, 3),
                    "start": each.start,
                    "end": each.end,
                    "text": None if each.start is None else record.text[each.start : each.end],
                }
                for each in found.surprises
            ]
        rank = _figure(found, settings.by)
        if baseline is not None:
            fields["percentile"] = round(baseline.percentile(rank), 4)
        rows.append(Row(fields, rank))
    return rows
