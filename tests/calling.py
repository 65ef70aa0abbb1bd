"""The command line called in this process, as people meet it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from cyberslm import cli

Cli = Callable[..., "Said"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    def run(*arguments: object, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "argv", ["cyberslm", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = 0
        try:
            cli.run()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return Said(code, out.decode(), err.decode())

    return run
