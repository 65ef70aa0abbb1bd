"""scripts/scale_datatrove.py: the same documents and tokens as one machine makes, by an existing engine."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cyberslm.data.clean.config import LengthConfig, QualityConfig, StepConfig, TripwiresConfig
from cyberslm.data.config import DataConfig
from cyberslm.data.prepare import clean_corpus
from cyberslm.data.redact.config import RedactConfig
from cyberslm.recipes.config import load_run
from cyberslm.recipes.data import ensure_prepared

pytest.importorskip("datatrove", reason="the engine is not installed: pip install 'cyberslm[scale]'")
pytest.importorskip("orjson", reason="the engine's writer needs orjson: pip install 'cyberslm[scale]'")

SCRIPT = Path(__file__).parents[2] / "scripts" / "scale_datatrove.py"
SECRET = "AKIA" + "IOSFODNN7" + "QWERTYU"
CONFIG = """
out_dir: run
data:
  sources: [one, two.jsonl, three]
  validation_fraction: 0.1
  on_bad_input: skip
  redact: {key_file: key}
  steps:
    - tripwires: {}
    - length: {min_characters: 30}
    - quality: {}
    - exact_duplicates: {}
    - length: {min_characters: 60}
    - near_duplicates: {}
tokenizer: {vocab_size: 600, shrink: true}
"""


def write_corpus(folder: Path) -> Path:
    """Three sources with copies across them, secrets, a damaged line, one that leaves nothing; files for 3 tasks."""
    words = ["gate", "proxy", "relay", "kernel", "patch", "audit", "token", "probe", "route", "agent"]
    texts = [
        f"Report {at} on the {words[at % 10]} and the {words[at // 10]}:\n\n{' '.join(words[at % 7 :])} x{at * at}y\n"
        for at in range(90)
    ]
    (folder / "one").mkdir()
    for at, text in enumerate(texts[:40]):
        (folder / "one" / f"{at:03}.txt").write_text(text)
    for at in range(2100):
        (folder / "one" / f"note-{at}.txt").write_text(
            f"{at} {words[at % 9]} of {at // 7} and {words[at % 8]} {at ^ 77}"
        )
    (folder / "one" / "key.txt.gz").write_bytes(gzip.compress(f"The key is {SECRET}, and {words}".encode()))
    lines = [json.dumps({"text": text}) for text in texts[30:] + [f"mail jane.roe@corp.acme.com\u2028about {words}"]]
    (folder / "two.jsonl").write_text("\n".join([*lines, "{damaged", json.dumps({"text": "short"})]) + "\n")
    (folder / "three").mkdir()
    (folder / "three" / "x.txt").write_text("too short")
    (folder / "key").write_text("0123456789abcdef" * 4)
    (folder / "my.yaml").write_text(CONFIG)
    return folder / "my.yaml"


def on_the_engine(config: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(config), str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def documents_of(out: Path) -> list[tuple[str, str, str, int]]:
    found = []
    for path in sorted((out / "documents").glob("*/*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            record = json.loads(line)
            found.append((record["text"], record["source"], record["name"], record["line"]))
    return found


@pytest.mark.slow
def test_the_engine_gives_the_documents_and_then_the_tokens_of_one_machine(tmp_path: Path) -> None:
    config, out = write_corpus(tmp_path), tmp_path / "out"
    done = on_the_engine(config, out, "--tasks", "3", "--workers", "2")
    assert done.returncode == 0, done.stderr[-2000:]

    alone = DataConfig(
        sources=tuple(str(tmp_path / name) for name in ("one", "two.jsonl", "three")),
        on_bad_input="skip",
        redact=RedactConfig(key_file=str(tmp_path / "key")),
        steps=(
            StepConfig(tripwires=TripwiresConfig()),
            StepConfig(length=LengthConfig(min_characters=30)),
            StepConfig(quality=QualityConfig()),
        ),
    )
    (tmp_path / "scratch").mkdir()
    with clean_corpus(alone, tmp_path / "scratch") as corpus:
        pieces = [
            (piece.text, piece.key, piece.name, piece.line) for piece in corpus.pieces(corpus.new_counts(), "tokens")
        ]
    assert sorted(documents_of(out)) == sorted(pieces)
    assert len(pieces) > 90
    assert len(list((out / "documents").glob("*/*.jsonl"))) > 2

    kept = "".join(text for text, *_ in documents_of(out))
    everything = "".join(path.read_text("utf-8", "replace") for path in out.rglob("*") if path.is_file())
    assert "[redacted:aws" in kept
    assert SECRET not in everything
    assert "jane.roe" not in everything

    by_engine = ensure_prepared(load_run(out / "prepare.yaml").value, lambda _: None)
    by_one = ensure_prepared(load_run(config).value, lambda _: None)
    assert by_engine.tokenizer.sha256 == by_one.tokenizer.sha256
    for split in ("train", "validation"):
        ours, theirs = getattr(by_one, split), getattr(by_engine, split)
        assert ours.num_documents == theirs.num_documents
        assert (ours.slice(0, ours.num_tokens) == theirs.slice(0, theirs.num_tokens)).all()


@pytest.mark.slow
def test_a_folder_begun_with_other_settings_is_refused(tmp_path: Path) -> None:
    config, out = write_corpus(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_text('{"tasks": 3}')
    done = on_the_engine(config, out, "--tasks", "3")
    assert done.returncode == 1
    assert "was begun with other settings" in done.stderr


@pytest.mark.slow
def test_tasks_need_one_redaction_key(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    config.write_text(CONFIG.replace("{key_file: key}", "{}"))
    done = on_the_engine(config, tmp_path / "out")
    assert done.returncode == 1
    assert "data.redact.key_file is not set" in done.stderr


@pytest.mark.slow
def test_an_error_in_a_task_names_the_place_and_quotes_no_text(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    config.write_text(CONFIG.replace("on_bad_input: skip", "on_bad_input: error"))
    done = on_the_engine(config, tmp_path / "out", "--tasks", "2", "--workers", "2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "two.jsonl" in done.stderr.splitlines()[-1]
    logs = done.stderr + "".join(path.read_text() for path in (tmp_path / "out" / "logs").rglob("*") if path.is_file())
    assert "{damaged" not in logs
    assert SECRET not in logs
