from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cyberslm
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.recipes.machine import pick_device
from cyberslm.recipes.use import find_model


def test_run_folder_means_its_final_or_else_its_newest_checkpoint(trained: Path, tmp_path: Path) -> None:
    run = trained / "run"
    assert find_model(run) == run / "final"
    assert find_model(run / "final") == run / "final"
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("final"))
    assert find_model(tmp_path / "run").name == "step-00000020"


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        cyberslm.load(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        cyberslm.load(tmp_path / "absent")


def test_damaged_model_names_the_file(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run" / "final", tmp_path / "m")
    with (tmp_path / "m" / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(IntegrityError, match="tokenizer.json"):
        cyberslm.load(tmp_path / "m")


def test_opening_and_generating_do_not_load_the_compiler(trained: Path) -> None:
    """A second of every start went into importing torch's compiler, for an initialisation that nothing needed."""
    code = (
        "import sys, cyberslm\n"
        "cyberslm.load(sys.argv[1]).generate('x', max_new_tokens=2)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(trained / "run")], check=True)


def test_examples_of_the_generation_page_run(trained: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "generate.md"
    first, session = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    code = (first + session).replace("runs/demo", str(trained / "run")).replace("=40", "=5")
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "TokenEvent(row=0" in said.stdout


def test_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        pick_device("cuda")


def test_facade_has_every_name_it_lists() -> None:
    for name in cyberslm.__all__:
        assert getattr(cyberslm, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cyberslm.nonsense
