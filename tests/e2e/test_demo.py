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


def test_demo_runs_without_an_index(project: Path) -> None:
    said = demo(project, *QUICK, "out_dir=runs/other")
    assert "corpus: topics" in said
    for part in ("gzip", "unigram", "xz after training text", "this model", "model:      runs/other/final"):
        assert part in said
    assert (project / "runs" / "other" / "final" / "manifest.json").exists()


def test_demo_gives_every_verb_the_folder_of_its_run_and_starts_again(project: Path) -> None:
    (project / ".venv" / "bin" / "cyberslm").write_text('#!/bin/sh\necho "verb: $*"\n')
    first, second = (verbs(demo(project, "seed=2")) for _ in range(2))
    assert first == second
    assert first[0] == "train configs/demo.yaml out_dir=runs/demo-topics train.max_steps=400 seed=2"
    assert first[1] == "eval runs/demo-topics"
    assert [line.partition(" --prompt")[0] for line in first[2:]] == ["generate runs/demo-topics/final"] * 3
    other = verbs(demo(project, "out_dir=runs/other"))
    assert other[0].endswith(" out_dir=runs/other")
    assert [line.split()[1] for line in other[1:]] == ["runs/other", *["runs/other/final"] * 3]


def verbs(said: str) -> list[str]:
    return [line.removeprefix("verb: ") for line in said.splitlines() if line.startswith("verb: ")]


@pytest.mark.slow
def test_demo_on_the_stand_in_beats_the_unigram_model_and_repeats_its_figures(project: Path) -> None:
    first, second = (
        {
            line[:24].strip(): float(line[24:])
            for line in demo(project).splitlines()
            if line[:24].strip() in ("unigram", "this model")
        }
        for _ in range(2)
    )
    assert first["this model"] < first["unigram"]
    assert first == second
