"""The verbs that look: doctor and plot. `check` is in test_cli."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FACTS = ("processor", "cores", "memory", "torch", "disk", "extras", "auto", "fp32 products", "bf16 products")


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cyberslm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_doctor_says_what_is_there_and_what_to_mend() -> None:
    said = call("doctor", CXX="no-such-compiler")
    assert (said.returncode, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert {line.partition(":")[0] for line in lines} >= {*FACTS, "allocator", "compiler", "memory speed"}
    assert (
        "               warning: install a C++ compiler (Debian, Ubuntu: apt install g++) or name one with CXX" in lines
    )
    assert lines[-1].endswith("with what to do")


def test_doctor_as_json_is_one_object_with_values_and_warnings() -> None:
    said = call("doctor", "--json", CXX="no-such-compiler")
    (line,) = said.stdout.splitlines()
    found = json.loads(line)
    assert set(found) >= {*FACTS, "warnings"}
    assert found["cores"]["usable"] >= 1
    assert found["fp32 products"]["forward"] > 0
    assert found["auto"]["device"] in ("cpu", "cuda")
    assert "compiler" in found["warnings"]


def test_plot_draws_one_run_and_several(trained: Path, tmp_path: Path) -> None:
    run, log = trained / "run", trained / "run" / "metrics.jsonl"
    for number, arguments in enumerate(
        [(run,), (run, log, "--label", "a", "--label", "b", "--x", "tokens"), (run, "--bits-per-byte", "--x", "time")]
    ):
        out = tmp_path / f"{number}.png"
        said = call("plot", *arguments, "--out", out)
        assert (said.returncode, said.stdout, said.stderr) == (0, f"plot: {out}\n", "")
        assert out.read_bytes().startswith(b"\x89PNG")
    assert len({(tmp_path / f"{number}.png").read_bytes() for number in range(3)}) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("RUN", "RUN"), "two runs are named"),
        (("RUN", "--label", "a", "--label", "b"), "--label is given 2 times for 1 runs"),
        (("EMPTY",), "is no run: there is no metrics.jsonl in it"),
        (("BEGUN",), "metrics.jsonl has no record of a step yet"),
        (("absent",), "absent is no run"),
        (("RUN", "--x", "epochs"), "Invalid value for '--x'"),
    ],
)
def test_plot_refuses_what_it_cant_draw_and_writes_nothing(
    trained: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"type": "run", "step": 0}\n{"type": "train", "st')
    names = {"RUN": trained / "run", "EMPTY": tmp_path / "empty", "BEGUN": tmp_path / "begun"}
    said = call("plot", *(names.get(word, word) for word in arguments), "--out", tmp_path / "x.png")
    assert said.returncode == 2
    assert words in said.stderr
    assert "Traceback" not in said.stderr
    assert not (tmp_path / "x.png").exists()


def test_runs_of_one_name_are_told_apart_by_their_paths(trained: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "metrics.jsonl").write_bytes((trained / "run" / "metrics.jsonl").read_bytes())
    runs = (tmp_path / "one" / "run", tmp_path / "two" / "run")
    assert call("plot", *runs, "--out", tmp_path / "x.png").returncode == 0
