"""Shared small corpora, configurations and one trained run."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import yaml

from cyberslm.config import Loaded
from cyberslm.model.kernels import KERNELS
from cyberslm.native.build import BuildError, build_library, find_compiler, kept_library
from cyberslm.recipes.config import TrainRun, load_run

# One thread here and in child processes: quicker for models this small, and equal bits in both.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
if "CYBERSLM_CACHE" not in os.environ:  # one for all processes of this run of the tests, which inherit it
    os.environ["CYBERSLM_CACHE"] = _own = tempfile.mkdtemp(prefix="cyberslm-tests-")
    atexit.register(shutil.rmtree, _own, ignore_errors=True)

SMALL: dict = {
    "out_dir": "run",
    "seed": 3,
    "precision": "fp32",
    "data": {"sources": ["text"], "validation_fraction": 0.2},
    "tokenizer": {"vocab_size": 400},
    "model": {
        "hidden_dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_hidden_dim": 48,
        "max_seq_len": 32,
    },
    "train": {"max_steps": 20, "micro_batch_size": 2, "global_batch_size": 4},
    "optimizer": {"lr": 3e-3},
    "scheduler": {"warmup_steps": 4},
    "eval": {"interval": 5, "max_rows": 8},
    "checkpoint": {"interval": 5},
    "logging": {"interval": 5, "plots": False, "probe": False},
}

MakeRun = Callable[..., Path]


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Two kinds of files: text from the standard library, and JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(topics)[:documents]
    for name in names[::2]:
        (folder / f"{name}.txt").write_text(topics[name][:1500], encoding="utf-8")
    lines = [json.dumps({"text": topics[name][:1500]}) for name in names[1::2]]
    (folder / "more.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a corpus and a small run's YAML with changes such as ``{"train.max_steps": 5}``; return the YAML's path."""

    def make(changes: dict[str, object] | None = None, *, folder: Path = tmp_path) -> Path:
        write_corpus(folder / "text")
        config = json.loads(json.dumps(SMALL))
        for key, value in (changes or {}).items():
            section, _, name = key.rpartition(".")
            (config.setdefault(section, {}) if section else config)[name] = value
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    return make


@pytest.fixture
def small_run(make_run: MakeRun) -> Loaded[TrainRun]:
    return load_run(make_run())


def usable_kernels() -> list[str]:
    """The names in `KERNELS`, without the library in C++ where there is no compiler."""
    try:
        find_compiler()
    except BuildError:
        return [name for name in KERNELS if name != "native"]
    return list(KERNELS)


@pytest.fixture(scope="session")
def native_cache() -> Path:
    """The cache folder with the library in C++ in it. A source that doesn't compile is a failure, no skip."""
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(f"no compiler here: {error}")
    if kept_library(compiler) is None:
        build_library(compiler)
    return Path(os.environ["CYBERSLM_CACHE"])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished small run (``run/``, ``text/`` and ``run.yaml``); read only."""
    from cyberslm.recipes.train import run_training

    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder / "text")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    run_training(load_run(path), quiet=True)
    return folder


@pytest.fixture(scope="session")
def log_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a model of normal log lines and labelled alerts; read only."""
    from work_material import PROMPT, alerts, log

    from cyberslm.recipes.train import run_training

    folder = tmp_path_factory.mktemp("logs")
    (folder / "text").mkdir()
    (folder / "text" / "log.txt").write_text("\n".join(log(2000, seed=1)[0]) + "\n", encoding="utf-8")
    labelled = [PROMPT.replace("{text}", text).replace("{label}", label) for text, label in alerts(600, seed=2)]
    (folder / "text" / "alerts.txt").write_text("\n".join(labelled) + "\n", encoding="utf-8")
    changes = {
        "data": {"sources": ["text"], "txt_unit": "line", "validation_fraction": 0.05},
        "model": {**SMALL["model"], "hidden_dim": 48, "ffn_hidden_dim": 96, "max_seq_len": 160},
        "train": {"max_steps": 240, "micro_batch_size": 7, "global_batch_size": 7},
        "optimizer": {"lr": 5e-3},
        "eval": {"interval": 1000, "max_rows": 8},
        "checkpoint": {"interval": 1000},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes), encoding="utf-8")
    run_training(load_run(path), quiet=True)
    return folder / "run"
