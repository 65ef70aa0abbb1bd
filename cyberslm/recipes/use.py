"""Open a finished model: the one way in for ``generate``, ``eval`` and Python users."""

from __future__ import annotations

from pathlib import Path

import torch

from cyberslm import files
from cyberslm.checkpoint.adapter import apply_adapter, is_adapter, load_adapter
from cyberslm.checkpoint.folder import ModelFolder, load_model
from cyberslm.checkpoint.steps import newest
from cyberslm.errors import ConfigError
from cyberslm.generation.chat import Chat
from cyberslm.generation.engine import Engine
from cyberslm.model.lora import merge
from cyberslm.recipes.machine import pick_device
from cyberslm.text.chat import renderer_for


def load(path: Path | str, *, device: str = "auto") -> Engine:
    """Open a model folder, or the model of a run folder (its ``final/``, else its newest checkpoint).

    An adapter is opened with its base, at the place that it names. Every file is checked against the manifest's SHA-256
    first; `IntegrityError` names one that is damaged.
    """
    folder, where = find_model(Path(path)), pick_device(device)
    found = load_merged(folder, device=where) if is_adapter(folder) else load_model(folder, device=where)
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


def load_merged(folder: Path, *, base: Path | None = None, device: torch.device | str = "cpu") -> ModelFolder:
    """The plain model of an adapter folder and its ``base`` (default: where it was in training), merged in fp32.

    ``manifest`` is what the model's own should say. Raises `ConfigError` for an adapter of another base.
    """
    adapter = load_adapter(folder)
    if base is None and adapter.base is None:
        raise ConfigError(f"{folder} is an adapter that names no base: cyberslm merge BASE {folder} DEST")
    place = find_model(base or Path(str(adapter.base)))
    found = load_model(place, device=device)
    if adapter.base_sha256 not in (None, found.manifest["self"]):
        raise ConfigError(
            f"the adapter was trained on another base than {place}: manifest {str(adapter.base_sha256)[:12]}, not"
            f" {found.manifest['self'][:12]}"
        )
    try:
        apply_adapter(found.model, adapter)
    except ConfigError as error:
        raise ConfigError(f"{folder} doesn't fit {place}: {error}") from error
    about = files.read_manifest(folder) if files.looks_published(folder) else {}
    fields = {key: value for key, value in about.items() if key not in ("files", "self", "kind", "tokenizer_sha256")}
    fields["base_sha256"] = found.manifest["self"]
    return ModelFolder(merge(found.model).eval(), found.tokenizer, fields, found.extras)


def find_model(path: Path) -> Path:
    """The model folder meant by ``path``."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give a model folder such as runs/demo/final")
    if any((path / name).exists() for name in ("config.json", "manifest.json")) or is_adapter(path):
        return path
    if (path / "final").is_dir():
        return path / "final"
    step = newest(path / "checkpoints", lambda _: None)
    if step is None:
        raise ConfigError(f"{path} holds no model: no config.json, no final/ and no whole checkpoint")
    return step.path
