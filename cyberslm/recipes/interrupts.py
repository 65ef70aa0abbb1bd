"""Signals of a run: Ctrl-C and SIGTERM ask it to save and stop, SIGUSR1 to save and go on.

A handler only sets a flag, which the loop looks at after each step. So a signal is safe at any moment, also during
validation or while a checkpoint is written.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Interrupts:
    """What was asked for: ``number`` is the signal that stops the run, ``wants_save`` is set by SIGUSR1."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.wants_save = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take SIGUSR1, for all of a run, from preparing its data on."""
        with _handled({signal.SIGUSR1: self._save}):
            yield

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM, as long as there is something to save; a second one ends the process at once."""
        with _handled({signal.SIGINT: self._stop, signal.SIGTERM: self._stop}):
            yield

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        again = self.number is not None
        _say(b"quit without saving" if again else b"saving after this step, then stopping (again: quit without saving)")
        if again:
            raise SystemExit(128 + number)
        self.number = number

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        _say(b"saving after this step, then going on")
        self.wants_save = True


@contextmanager
def _handled(handlers: dict) -> Iterator[None]:
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not the main thread of the program: signals are its business
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(words: bytes) -> None:
    with suppress(OSError):
        os.write(2, b"\n" + words + b"\n")
