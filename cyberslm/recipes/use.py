"""Open a finished model: the one way in for ``generate``, ``eval`` and Python users. Keep it in fewer bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from cyberslm.checkpoint.folder import ModelFolder, load_model, save_model
from cyberslm.checkpoint.steps import newest
from cyberslm.decoding.draft import Speculation
from cyberslm.decoding.prefixes import PrefixCache
from cyberslm.errors import ConfigError
from cyberslm.generation.chat import Chat
from cyberslm.generation.config import DecodingConfig
from cyberslm.generation.engine import Engine
from cyberslm.generation.fast import prepare
from cyberslm.model.quantised import set_precision
from cyberslm.recipes.machine import pick_device
from cyberslm.text.chat import renderer_for


def load(  # noqa: PLR0913 (one keyword a choice, as people type them)
    path: Path | str,
    *,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto",
    fast: Literal["auto", "on", "off"] = "auto",
    lookup: bool = False,
    draft: Path | str | None = None,
    prefix_bytes: int | None = None,
) -> Engine:
    """Open a model folder, or the model of a run folder (its ``final/``, else its newest checkpoint).

    ``precision`` and ``fast`` are those of `DecodingConfig`. ``lookup`` drafts what followed the same few tokens
    before, ``draft`` names a smaller model with the same tokenizer that drafts; neither changes a token
    (`Speculation`). ``prefix_bytes`` keeps what was read of prompts for those that begin alike (`PrefixCache`). Every
    file is checked against the manifest first: `IntegrityError` names one that is damaged.
    """
    config = DecodingConfig(precision=precision, fast=fast)
    folder = find_model(Path(path))
    found = load_model(folder, device=pick_device(device), reduced="take")
    prepare(found.model, config)
    return Engine(
        found.model,
        found.tokenizer,
        stop_ids=found.extras.stop_ids,
        speculation=_speculation(found, lookup=lookup, draft=draft, config=config),
        prefixes=None if prefix_bytes is None else PrefixCache(prefix_bytes),
    )


def _speculation(
    found: ModelFolder, *, lookup: bool, draft: Path | str | None, config: DecodingConfig
) -> Speculation | None:
    if draft is None:
        return Speculation(lookup=True) if lookup else None
    drafting = load_model(find_model(Path(draft)), device=found.model.device, reduced="take")
    if drafting.tokenizer.sha256 != found.tokenizer.sha256:
        raise ConfigError(f"the draft model {draft} has another tokenizer: it must be that of the model it drafts for")
    prepare(drafting.model, replace(config, precision="auto"))
    return Speculation(lookup=lookup, model=drafting.model)


def open_chat(path: Path | str, *, device: str = "auto", system: str | None = None) -> tuple[Chat, str | None]:
    """A conversation with the model of a folder, by its own chat template; and what speaks against it, if anything."""
    found = load_model(find_model(Path(path)), device=pick_device(device), reduced="take")
    prepare(found.model, DecodingConfig())
    renderer = renderer_for(found.tokenizer, template=found.extras.chat_template)
    doubt = None
    if found.extras.chat_template is None:
        doubt = (
            f"{path} has no chat template, so it wasn't trained to answer: turns are written in the {renderer.name}"
            " format (docs/sft.md shows how to train one)"
        )
    return Chat(Engine(found.model, found.tokenizer, stop_ids=found.extras.stop_ids), renderer, system=system), doubt


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


def quantize(path: Path | str, target: Path | str, *, precision: Literal["bf16", "int8", "int4"] = "int8") -> Path:
    """Write a model folder like ``path`` in fewer bits, for use: `load` opens it, training and export refuse it.

    Raises `ConfigError` where a width doesn't fit or ``path`` is in fewer bits already; other errors as in `load`.
    """
    folder = find_model(Path(path))
    found = load_model(folder)
    set_precision(found.model, precision)
    kept = {
        key: value for key, value in found.manifest.items() if key not in ("files", "self", "kind", "tokenizer_sha256")
    }
    save_model(Path(target), found.model, found.tokenizer, {**kept, "source": str(folder), "precision": precision})
    return Path(target)
