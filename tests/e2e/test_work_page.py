"""Every example of docs/work.md is run as it stands."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from work_material import alerts, log

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "work.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_commands_and_python_of_the_page_run(log_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "logs").symlink_to(log_model)
    (tmp_path / "today.log").write_text("\n".join(log(40, seed=3, every=10)[0]) + "\n")
    (tmp_path / "normal.log").write_text("\n".join(log(120, seed=4)[0]) + "\n")
    for name, number in (("alerts.csv", 20), ("labelled.csv", 60)):
        with (tmp_path / name).open("w", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), *alerts(number, seed=number)])
    (labels,), (schema,), (python,) = blocks("yaml"), blocks("json"), blocks("python")
    (tmp_path / "labels.yaml").write_text(labels)
    (tmp_path / "schema.json").write_text(schema)
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert [command.split()[1] for command in commands] == ["score", "score", "classify", "classify", "extract"]
    for command in commands:
        words = [sys.executable, "-m", *command.split(), "--quiet"]
        said = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True, text=True)
        assert (said.returncode, said.stdout, said.stderr) == (0, "", ""), command
    for command in commands:
        for out in re.findall(r"--(?:out|calibration) (\S+)", command):
            assert (tmp_path / out).stat().st_size > 0
    said = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert re.match(r"\d\.\d\d bits per byte; most surprising: Surprise\(bits=", said.stdout)
