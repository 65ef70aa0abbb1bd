"""scripts/demo itself, with a ready environment and no package index: stand-in corpus, few steps, evaluation, text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "constraints.txt", "scripts", "configs")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the script needs, whose .venv is the environment that runs the tests."""
    for name in FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    commands = {"python": '"$@"', "cyberslm": '-m cyberslm "$@"'}
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, arguments in commands.items():
        command = tmp_path / ".venv" / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}\n')
        command.chmod(0o755)
    wanted = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    (tmp_path / ".venv" / "installed-plots").write_text(hashlib.sha256(wanted).hexdigest() + "\n")
    return tmp_path


def demo(project: Path, *settings: str) -> str:
    said = subprocess.run(
        [project / "scripts" / "demo", *settings],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        check=False,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


QUICK = ("train.max_steps=20", "scheduler.warmup_steps=5", "train.global_batch_size=2", "eval.max_rows=16")


def test_demo_runs_without_an_index_and_again(project: Path) -> None:
    first = demo(project, *QUICK)
    assert "corpus: topics" in first
    for part in ("gzip", "unigram", "xz after training text", "this model", "model:      runs/demo-topics/final"):
        assert part in first
    second = demo(project, *QUICK)
    assert [line for line in second.splitlines() if line.startswith("this model")] == [
        line for line in first.splitlines() if line.startswith("this model")
    ]
    other = demo(project, *QUICK, "out_dir=runs/other")
    assert "model:      runs/other/final" in other
    assert (project / "runs" / "other" / "final" / "manifest.json").exists()


@pytest.mark.slow
def test_demo_on_the_stand_in_beats_the_unigram_model(project: Path) -> None:
    rows = dict(
        (line[:24].strip(), float(line[24:]))
        for line in demo(project).splitlines()
        if line[:24].strip() in ("unigram", "this model")
    )
    assert rows["this model"] < rows["unigram"]
