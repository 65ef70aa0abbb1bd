"""import and export on the command line, and every command of docs/interop.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import byte_level, save_family

from cyberslm.checkpoint.folder import load_model
from cyberslm.interop.exporting import export_gguf
from cyberslm.interop.hf import read_source
from cyberslm.interop.source import write_source

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")


def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cyberslm", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GGUF file and a Hugging Face folder, under the names that the page has."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("sources")
    save_family("llama tied", folder / "Llama-folder", byte_level(list(topics.values())[:20]))
    write_source(read_source(folder / "Llama-folder"), folder / "kept" / "ours")
    export_gguf(load_model(folder / "kept" / "ours"), folder / "kept" / "gguf", "q4_0")
    (folder / "kept" / "gguf" / "model-q4_0.gguf").rename(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder


def test_commands_of_the_page_run(sources: Path, tmp_path: Path) -> None:
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "Llama-folder"):
        (tmp_path / name).symlink_to(sources / name)
    (tmp_path / "bin").mkdir()
    verb = tmp_path / "bin" / "cyberslm"
    verb.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cyberslm "$@"\n')
    verb.chmod(0o755)
    environment = os.environ | {"PATH": f"{verb.parent}:{os.environ['PATH']}"}
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        said = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
        )
        assert said.returncode == 0, f"{command}\n{said.stderr}"
    assert {path.name for path in (tmp_path / "out" / "smollm2-gguf").iterdir()} == {
        *("model-q8_0.gguf", "Modelfile", "manifest.json")
    }


def test_import_says_what_it_made_and_replaces_only_when_told(sources: Path, tmp_path: Path) -> None:
    said = call("import", sources / "SmolLM2-135M-Instruct.Q4_1.gguf", "m", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, "")
    assert "roundings to F16, Q4_0, Q8_0" in said.stderr or "roundings to Q4_0, Q8_0" in said.stderr
    assert "cyberslm generate m" in said.stderr
    again = call("import", sources / "Llama-folder", "m", cwd=tmp_path)
    assert again.returncode == 2
    assert "m exists: name another folder, or replace it with --force" in again.stderr
    assert load_model(tmp_path / "m").manifest["source"]["kind"] == "gguf"
    assert call("import", sources / "Llama-folder", "m", "--force", cwd=tmp_path).returncode == 0
    assert load_model(tmp_path / "m").manifest["source"]["kind"] == "huggingface"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import", "nowhere", "m"), "nowhere is not there"),
        (("import", "weights.bin", "m"), "weights.bin is a pickle"),
        (("import", "empty", "m"), "empty has no config.json"),
        (("import", "notes.txt", "m"), "notes.txt is no GGUF file"),
        (("export", "RUN", "out", "--to", "hf", "--dtype", "q8_0"), "'q8_0' is not known for --to hf"),
        (("export", "RUN", "out.gguf", "--to", "gguf"), "DEST is a folder"),
        (("export", "RUN", "RUN", "--to", "hf"), "is the model itself"),
        (("export", "empty", "out"), "empty holds no model"),
    ],
)
def test_mistakes_end_in_one_line(trained: Path, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("hello")
    final = str(trained / "run" / "final")
    said = call(*(final if one == "RUN" else one for one in arguments), cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    (line,) = said.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_run_folder_is_exported_and_a_damaged_one_is_not(trained: Path, tmp_path: Path) -> None:
    said = call("export", trained / "run", "out", "--to", "gguf", "--dtype", "f32", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "reopened and compared, logits differ by" in said.stderr
    assert "note: text with U+2581" in said.stderr
    again = call("import", "out/model-f32.gguf", "back", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    ours, back = load_model(trained / "run" / "final"), load_model(tmp_path / "back")
    assert all((a == b).all() for a, b in zip(ours.model.parameters(), back.model.parameters(), strict=True))
    with (tmp_path / "back" / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\xff")
    damaged = call("export", "back", "never", cwd=tmp_path)
    assert damaged.returncode == 2
    assert "SHA-256" in damaged.stderr
    assert not (tmp_path / "never").exists()
