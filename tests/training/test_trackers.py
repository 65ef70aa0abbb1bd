from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import pytest

from cyberslm.errors import StorageError
from cyberslm.training.trackers import Meter, MetricsFile, Screen, clock, read_metrics, short, validation_line


def record(step: int, loss: float = 2.0, **more: object) -> dict:
    base = {"type": "train", "step": step, "loss": loss, "lr": 1e-3, "grad_norm": 0.5, "step_tokens": 100}
    return base | {"tokens": 100 * step, "skipped": 0, "seconds": 0.5} | more


def test_resumed_file_drops_what_came_after_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.write(record(step))
    file.close()
    path.write_text(path.read_text() + '{"type": "train", "step"', encoding="utf-8")  # cut by a crash
    resumed = MetricsFile(path, step=3)
    resumed.write(record(4, loss=9.0))
    resumed.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 9.0)]


def test_numbers_that_json_lacks_are_written_by_name(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write(record(1, loss=math.nan, grad_norm=math.inf))
    file.close()
    assert json.loads((tmp_path / "m.jsonl").read_text())["loss"] == "nan"


def test_one_line_an_interval_with_the_mean_loss_and_the_time_to_go() -> None:
    meter = Meter(total_steps=10, interval=2)
    assert meter.add(record(1, loss=4.0)) is None
    line = meter.add(record(2, loss=2.0, step_tokens=300, tokens=400, peak_memory=1.5 * 2**30))
    assert line == (
        "step 2/10 | loss 2.5000 | lr 1.00e-03 | gnorm 0.50 | 400 tok/s | tokens 400 | mem 1.5G | eta 0:00:04"
    )


def test_line_has_the_share_of_the_limit_over_its_interval_and_the_memory_of_the_gpu() -> None:
    meter = Meter(total_steps=10, interval=2)
    meter.add(record(1, seconds=1.0, share_of_limit=0.1))
    line = meter.add(record(2, seconds=3.0, share_of_limit=0.3, peak_memory=2**30, peak_gpu_memory=2**31))
    assert line is not None
    assert " | 50 tok/s | 25% of limit | tokens 200 | mem 2.0G | " in line
    line = meter.add(record(4, seconds=1.0, share_of_limit=0.5))
    assert line is not None
    assert "| 50% of limit |" in line


def test_last_step_gets_a_line_too() -> None:
    meter = Meter(total_steps=3, interval=2)
    assert [meter.add(record(step)) is not None for step in (1, 2, 3)] == [False, True, True]


def test_validation_line_marks_the_best() -> None:
    values = {"step": 5, "loss": 2.0, "perplexity": 7.389, "bits_per_byte": 1.1, "best": True}
    assert validation_line(values, total_steps=9) == (
        "step 5/9 | validation loss 2.0000 | ppl 7.39 | 1.1000 bits/byte | best"
    )


def test_screen_off_a_terminal_writes_plain_lines_and_no_bar(tmp_path: Path) -> None:
    """G56: progress bars filled log files with control characters."""
    stream = io.StringIO()
    screen = Screen(tmp_path / "log", stream=stream)
    screen.start_bar(total=9, done=0, unit="step")
    screen.line("one")
    screen.advance(3)
    screen.line("two")
    screen.close()
    assert stream.getvalue() == (tmp_path / "log").read_text() == "one\ntwo\n"


def test_screen_outlives_its_reader(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    screen = Screen(tmp_path / "log", stream=Gone())
    screen.line("one")
    screen.line("two")
    screen.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(("value", "text"), [(12, "12"), (1234, "1.23k"), (2_500_000, "2.50M"), (3e9, "3.00B")])
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (61, "0:01:01"), (36_125, "10:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_resuming_rewrites_the_log_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was rewritten in place, so that a full disk or a kill cut it."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.write(record(step))
    file.close()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="metrics.jsonl"):
        MetricsFile(path, step=3)
    assert len(read_metrics(path)) == 5


def test_screen_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as stream:
        screen = Screen(tmp_path / "log", stream=stream)
        screen.line("one")
        screen.line("two")
        screen.close()
        with contextlib.suppress(OSError):
            stream.close()
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_log_that_cannot_be_written_is_named() -> None:
    screen = Screen(Path("/dev/full"), quiet=True)
    with pytest.raises(StorageError, match="/dev/full can't be written: No space left"):
        screen.line("one")
    screen.close()
