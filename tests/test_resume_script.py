"""`scripts/resume_matrix.py` tells a run that repeats its bits from one that doesn't."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeRun

SCRIPT = Path(__file__).parents[1] / "scripts" / "resume_matrix.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_stops_of_a_run_that_repeats_its_bits_are_equal(
    script: dict[str, Any], make_run: MakeRun, tmp_path: Path
) -> None:
    work = script["Work"](str(make_run()), ["precision=fp32"], tmp_path / "out", 4)
    assert script["matrix"](work, [script["stopped"]]) == ["equal, 3 of 3"]


def test_stop_that_leaves_a_trace_is_named(
    script: dict[str, Any], make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(work: Any, name: str, step: int) -> None:
        with monkeypatch.context() as other:
            if step == 2:
                other.setattr("cyberslm.training.trainer._step_seed", lambda *_: 1)
            work.train(name, stop_at=step)

    work = script["Work"](str(make_run()), ["model.dropout=0.1"], tmp_path / "out", 4)
    assert script["matrix"](work, [forgetful]) == ["differs at [2]"]


@pytest.mark.slow
def test_every_stop_and_kill_of_24_steps_gives_the_same_bits_in_every_way(make_run: MakeRun, tmp_path: Path) -> None:
    """The quick twins are `test_every_stop_of_a_run_resumes_to_the_same_bits` and its neighbours in tests/recipes."""
    path = make_run({"train.global_batch_size": 4})
    command = [sys.executable, str(SCRIPT), str(path), "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 7, done.stderr
    assert all(cell.strip(" |") in ("equal, 23 of 23", "-") for row in rows for cell in row[1:])
    assert done.returncode == 0
