"""The demo's own path on its stand-in corpus: offline text, a few steps, evaluation, text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, cwd: Path) -> str:
    said = subprocess.run(list(map(str, command)), cwd=cwd, check=False, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stdout


@pytest.mark.parametrize("steps", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_demo_runs_without_any_index(tmp_path: Path, steps: int) -> None:
    corpus = run(sys.executable, ROOT / "scripts" / "demo_corpus.py", "corpora/demo", "--offline", cwd=tmp_path)
    assert corpus.splitlines()[-1].startswith("corpus: topics")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text((ROOT / "configs" / "demo.yaml").read_text())
    cyberslm = (sys.executable, "-m", "cyberslm")
    settings = (
        f"train.max_steps={steps}",
        "scheduler.warmup_steps=10",
        "train.global_batch_size=2",
        "eval.max_rows=16",
    )
    run(*cyberslm, "train", "configs/demo.yaml", "out_dir=runs/demo", *settings, cwd=tmp_path)
    found = json.loads(run(*cyberslm, "eval", "runs/demo", "--json", cwd=tmp_path))
    assert found["bits_per_byte"] < (6.0 if steps == 30 else found["yardsticks"]["unigram"])
    made = run(*cyberslm, "generate", "runs/demo/final", "--prompt", "The ", "--seed", 1, cwd=tmp_path)
    assert made.startswith("The ")
