"""Every command and every Python line of the README is run as it stands, in a folder with a little text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import write_corpus

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
NOT_HERE = {
    "./scripts/demo": "test_demo.py",
    "./scripts/test": "this suite",
    ". .venv/bin/activate": "the test's own environment",
    "pip install -c constraints.txt -e '.[plots]'": "what scripts/common.sh does",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def make_short(config: Path) -> None:
    """Leave the rest as `init` wrote it: what the commands do doesn't depend on how many steps there are."""
    text, found = re.subn(r"(?<=  max_steps: )\d+$", "8", config.read_text(encoding="utf-8"), flags=re.M)
    text, more = re.subn(r"(?<=  warmup_steps: )\d+$", "2", text, flags=re.M)
    assert (found, more) == (1, 1)
    config.write_text(text, encoding="utf-8")


def test_commands_and_python_of_the_readme_run(tmp_path: Path) -> None:
    write_corpus(tmp_path / "path" / "to" / "your" / "text")
    (tmp_path / "bin").mkdir()
    verb = tmp_path / "bin" / "cyberslm"
    verb.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cyberslm "$@"\n')
    verb.chmod(0o755)
    environment = os.environ | {"PATH": f"{verb.parent}:{os.environ['PATH']}"}
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.strip() not in NOT_HERE]
    assert len(commands) >= 5
    for command in commands:
        said = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
        )
        assert said.returncode == 0, f"{command}\n{said.stderr}"
        if command.startswith("cyberslm init"):
            make_short(tmp_path / "my.yaml")
    (python,) = blocks("python")
    said = subprocess.run([sys.executable, "-c", python], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "length" in said.stdout or "stop" in said.stdout


def test_commands_inside_sentences_are_verbs_that_exist(tmp_path: Path) -> None:
    for command in re.findall(r"`(cyberslm [a-z ]+?)(?: [a-z]+\.yaml.*?)?`", README):
        said = subprocess.run(
            [sys.executable, "-m", *command.split(), "--help"],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, command
