"""Open a finished model: the one way in for ``generate``, ``eval`` and Python users."""

from __future__ import annotations

from pathlib import Path

from cyberslm.checkpoint.folder import load_model
from cyberslm.checkpoint.steps import newest
from cyberslm.errors import ConfigError
from cyberslm.generation.chat import Chat
from cyberslm.generation.engine import Engine
from cyberslm.recipes.machine import pick_device
from cyberslm.text.chat import renderer_for


def load(path: Path | str, *, device: str = "auto") -> Engine:
    """Open a model folder, or the model of a run folder (its ``final/``, else its newest checkpoint).

    Every file is checked against the manifest's SHA-256 first; `IntegrityError` names one that is damaged.
    """
    folder = find_model(Path(path))
    found = load_model(folder, device=pick_device(device))
    return Engine(found.model, found.tokenizer, stop_ids=found.extras.stop_ids)


def open_chat(path: Path | str, *, device: str = "auto", system: str | None = None) -> tuple[Chat, str | None]:
    """A conversation with the model of a folder, by its own chat template; and what speaks against it, if anything."""
    found = load_model(find_model(Path(path)), device=pick_device(device))
    renderer = renderer_for(found.tokenizer, template=found.extras.chat_template)
    doubt = None
    if found.extras.chat_template is None:
        doubt = (
            f"{path} has no chat template, so it wasn't trained to answer: turns are written in the {renderer.name}"
            " format (docs/sft.md shows how to train one)"
        )
    engine = Engine(found.model, found.tokenizer, stop_ids=found.extras.stop_ids)
    return Chat(engine, renderer, system=system), doubt


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
