"""Open a finished model: the one way in for ``generate``, ``eval`` and Python users."""

from __future__ import annotations

from pathlib import Path

from cyberslm.checkpoint.folder import load_model
from cyberslm.checkpoint.steps import newest
from cyberslm.errors import ConfigError
from cyberslm.generation.engine import Engine
from cyberslm.recipes.machine import pick_device


def load(path: Path | str, *, device: str = "auto") -> Engine:
    """Open a model folder, or the model of a run folder (its ``final/``, else its newest checkpoint).

    Every file is checked against the manifest's SHA-256 first; `IntegrityError` names one that is damaged.
    """
    folder = find_model(Path(path))
    found = load_model(folder, device=pick_device(device))
    return Engine(found.model, found.tokenizer, stop_ids=found.extras.stop_ids)


def find_model(path: Path) -> Path:
    """The model folder meant by ``path``."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give a model folder such as runs/demo/final")
    if (path / "config.json").exists() or (path / "manifest.json").exists():
        return path
    if (path / "final").is_dir():
        return path / "final"
    step = newest(path / "checkpoints", lambda _: None)
    if step is None:
        raise ConfigError(f"{path} holds no model: no config.json, no final/ and no whole checkpoint")
    return step.path
