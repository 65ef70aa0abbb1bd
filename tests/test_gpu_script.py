"""`scripts/gpu.py`, which is for a GPU, runs all of its code on small shapes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu.py"


def table(*arguments: str, folder: Path) -> list[list[str]]:
    command = [sys.executable, SCRIPT, "--device", "cpu", "--tiny", *arguments]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("kernels", "precision", "rows", "shape")]


@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path) -> None:
    rows = table(folder=tmp_path)
    assert [row[0] for row in rows[:7]] == ["torch's own kernels"] * 2 + ["deterministic kernels"] * 2 + [
        "fp32",
        "bf16",
        "fp16",
    ]
    assert len(rows) == 15
    assert not [row for row in rows if "failed" in " ".join(row)]
    assert all(row[-1].startswith("equal bits in ") for row in rows[:4])
    assert all(abs(float(row[2])) < 0.01 for row in rows[4:7])


def test_rows_that_no_time_is_left_for_say_so(tmp_path: Path) -> None:
    assert {row[-1] for row in table("--minutes", "0", folder=tmp_path)} == {"no time left"}
