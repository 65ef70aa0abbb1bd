"""Where a run's numbers go: `metrics.jsonl` gets every record, the screen and `train.log` one line per interval.

A record is a flat mapping with ``type`` ("train", "validation", "sample" ...) and ``step``. Screen: a progress bar on a
terminal, plain lines elsewhere, no control characters off a terminal; a reader that goes away (``| head``) ends the
lines, not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tqdm import tqdm

from cyberslm.errors import StorageError
from cyberslm.files import write_text

Record = Mapping[str, object]


class MetricsFile:
    """Append-only JSON lines. Opening it for a run that resumes at ``step`` drops what came after that step.

    Without a path nothing is written: only one process of a run keeps its log.
    """

    def __init__(self, path: Path | None, *, step: int = 0) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._open([line for record, line in _lines(path) if _step(record) <= step] if step and path else [])

    def go_back(self, step: int) -> None:
        """Drop what came after ``step``, but for the records of earlier rollbacks."""
        if self._path is not None:
            self.close()
            self._open([line for record, line in _lines(self._path) if _step(record) <= step or _is_rollback(record)])

    def _open(self, kept: list[str]) -> None:
        if self._path is None:
            return
        try:
            write_text(self._path, "".join(kept))
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{self._path} can't be written: {error.strerror}") from error

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self._path} can't be written: {error.strerror}") from error

    def sync(self) -> None:
        """Wait until what was written is on the disk, so that the log is never behind a checkpoint."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{self._path} can't be written: {error.strerror}") from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def read_metrics(path: Path) -> list[dict]:
    """All whole records of a metrics file; a last line cut by a crash is left out."""
    return [record for record, _ in _lines(path)]


def _lines(path: Path) -> list[tuple[dict, str]]:
    found = []
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and line.endswith("\n"):
                        found.append((record, line))
    return found


def _step(record: Record) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def _is_rollback(record: Record) -> bool:
    return record.get("type") == "rollback"


def _finite(record: Record) -> dict[str, object]:
    """JSON has no NaN or infinity: such a number becomes its name."""
    return {k: repr(v) if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}


class Screen:
    """Lines for people, on ``stream`` and in ``log``; ``quiet`` keeps the log only."""

    def __init__(self, log: Path | None = None, *, stream: IO[str] | None = None, quiet: bool = False) -> None:
        self._stream = None if quiet else (sys.stderr if stream is None else stream)
        self._bar: tqdm | None = None
        self._log: IO[str] | None = None
        if log is not None:
            try:
                self._log = log.open("a", encoding="utf-8")
            except OSError as error:
                raise StorageError(f"{log} can't be written: {error.strerror}") from error

    def line(self, text: str) -> None:
        if self._log is not None:
            try:
                self._log.write(text + "\n")
                self._log.flush()
            except OSError as error:
                raise StorageError(f"{self._log.name} can't be written: {error.strerror}") from error
        if self._stream is None:
            return
        try:
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    @property
    def has_bar(self) -> bool:
        return self._bar is not None

    def start_bar(self, *, total: int | None, done: int, unit: str) -> None:
        """A progress bar, on a terminal only."""
        if self._stream is not None and self._stream.isatty():
            self._bar = tqdm(total=total, initial=done, unit=unit, file=self._stream, dynamic_ncols=True, leave=False)

    def advance(self, done: int) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.update(done - self._bar.n)

    def stop_bar(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None

    def close(self) -> None:
        self.stop_bar()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()


class Meter:
    """Turns train records into one line per interval: mean loss, rate and share of the limit since the last
    line, peak memory, time to go."""

    def __init__(self, *, total_steps: int | None, interval: int) -> None:
        self.total_steps, self._interval = total_steps, interval
        self._reset()

    def _reset(self) -> None:
        self._loss_sum, self._tokens, self._seconds, self._steps, self._share = 0.0, 0, 0.0, 0, 0.0

    def add(self, record: Mapping) -> str | None:
        """The line for this record if an interval ends with it."""
        self._loss_sum += record["loss"] * record["step_tokens"]
        self._tokens += record["step_tokens"]
        self._seconds += record["seconds"]
        self._steps += 1
        self._share += record.get("share_of_limit", 0.0) * record["seconds"]
        step = record["step"]
        total = self.total_steps
        if step % self._interval and step != total:
            return None
        parts = [
            f"step {step}/{total or '?'}",
            f"loss {self._loss_sum / max(1, self._tokens):.4f}",
            f"lr {record['lr']:.2e}",
            f"gnorm {record['grad_norm']:.2f}",
            f"{self._tokens / max(self._seconds, 1e-9):,.0f} tok/s",
            f"tokens {short(record['tokens'])}",
            f"mem {record.get('peak_gpu_memory', record.get('peak_memory', 0)) / 2**30:.1f}G",
        ]
        if total is not None:
            parts.append(f"eta {clock(self._seconds / self._steps * (total - step))}")
        if "share_of_limit" in record:
            parts.insert(5, f"{self._share / max(self._seconds, 1e-9):.0%} of limit")
        if "accuracy" in record:
            parts.insert(2, _ranking(record))
        if record["skipped"]:
            parts.append(f"skipped {record['skipped']}")
        self._reset()
        return " | ".join(parts)


def validation_line(record: Mapping, *, total_steps: int | None) -> str:
    best = " | best" if record["best"] else ""
    step = f"step {record['step']}/{total_steps or '?'}"
    judged = f"ppl {record['perplexity']:,.2f}" if "perplexity" in record else _ranking(record)
    return (
        f"{step} | validation loss {record['loss']:.4f} | {judged}"
        f" | {record['bits_per_byte']:.4f} bits/byte{best}{_by_source(record)}"
    )


def _ranking(record: Mapping) -> str:
    return f"margin {record['reward_margin']:.3f} | ranked right {record['accuracy']:.1%}"


def _by_source(record: Mapping) -> str:
    start = "bits_per_byte/"
    parts = [f"{key.removeprefix(start)} {value:.4f}" for key, value in record.items() if key.startswith(start)]
    return f" | bits/byte of {', '.join(parts)}" if parts else ""


def event_line(record: Mapping) -> str | None:
    """What the loop decided on its way, for people; None for a record that is not such an event."""
    step = record["step"]
    if record["type"] == "plan":
        return f"step {step} | plan: {record['total']:,} steps in train.max_time, {clock(record['seconds'])} of it gone"
    if record["type"] == "spike":
        done = {"train": "trained on", "skip": "skipped", "rollback": "going back"}[record["verdict"]]
        return f"step {step} | loss spike {record['loss']:.4f}, usually {record['median']:.4f}: {done}"
    if record["type"] == "rollback":
        return (
            f"step {record['spike']} | rollback {record['rollbacks']} to step {step - 1};"
            f" {count(record['passed_rows'], 'row')} passed over so far"
        )
    return None


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def short(number: float, unit: str = "") -> str:
    """1234567 -> '1.23M'; with the unit 'B', '1.23 MB'."""
    space = " " if unit else ""
    for size, suffix in ((1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{space}{suffix}{unit}"
    return f"{number:.0f}{space}{unit}"


def count(number: int, thing: str) -> str:
    """'1 file', '2,000 files'."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """3661 -> '1:01:01'."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
