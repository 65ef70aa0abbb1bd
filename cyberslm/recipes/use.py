"""Open a finished model: the one way in for ``generate``, ``eval`` and Python users. Keep it in fewer bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from cyberslm import files
from cyberslm.checkpoint.adapter import Adapter, apply_adapter, is_adapter, kept_extras, kept_tokenizer, load_adapter
from cyberslm.checkpoint.folder import EXPORT, WEIGHTS, ModelFolder, load_model, save_model
from cyberslm.checkpoint.steps import newest
from cyberslm.decoding.draft import Speculation
from cyberslm.decoding.prefixes import PrefixCache
from cyberslm.errors import ConfigError
from cyberslm.generation.config import AskedPrecision, DecodingConfig
from cyberslm.generation.engine import Engine
from cyberslm.generation.fast import prepare
from cyberslm.model.lora import merge
from cyberslm.model.quantised import set_precision
from cyberslm.recipes.machine import pick_device
from cyberslm.recipes.vocabulary import with_words
from cyberslm.text.chat import renderer_for

if TYPE_CHECKING:
    from cyberslm.generation.chat import Chat
    from cyberslm.recipes.tokenizer import Say


def load(  # noqa: PLR0913 (one keyword a choice, as people type them)
    path: Path | str,
    *,
    device: str = "auto",
    precision: AskedPrecision = "auto",
    fast: Literal["auto", "on", "off"] = "auto",
    lookup: bool = False,
    draft: Path | str | None = None,
    prefix_bytes: int | None = None,
) -> Engine:
    """Open a model folder, or the model of a run folder (its ``final/``, else its newest checkpoint).

    ``precision`` and ``fast`` are those of `DecodingConfig`. ``lookup`` drafts what followed the same few tokens
    before, ``draft`` names a smaller model with the same tokenizer that drafts; neither changes a token
    (`Speculation`). ``prefix_bytes`` keeps what was read of prompts for those that begin alike (`PrefixCache`). An
    adapter is opened with its base, at the place that it names. Every file is checked against the manifest first:
    `IntegrityError` names one that is damaged.
    """
    config = DecodingConfig(precision=precision, fast=fast)
    found = _opened(path, device, precision)
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
    drafting = _opened(draft, found.model.device.type, "auto")
    if drafting.tokenizer.sha256 != found.tokenizer.sha256:
        raise ConfigError(f"the draft model {draft} has another tokenizer: it must be that of the model it drafts for")
    prepare(drafting.model, replace(config, precision="auto"))
    return Speculation(lookup=lookup, model=drafting.model)


def open_chat(path: Path | str, *, device: str = "auto", system: str | None = None) -> tuple[Chat, str | None]:
    """A conversation with the model of a folder, by its own chat template; and what speaks against it, if anything."""
    from cyberslm.generation.chat import Chat

    found = _opened(path, device, "auto")
    prepare(found.model, DecodingConfig())
    renderer = renderer_for(found.tokenizer, template=found.extras.chat_template)
    doubt = None
    if found.extras.chat_template is None:
        doubt = (
            f"{path} has no chat template, so it wasn't trained to answer: turns are written in the {renderer.name}"
            " format (docs/sft.md shows how to train one)"
        )
    engine = Engine(found.model, found.tokenizer, stop_ids=found.extras.stop_ids)
    return Chat(engine, renderer, system=system), doubt


def _opened(path: Path | str, device: str, precision: AskedPrecision) -> ModelFolder:
    """In ``precision``, but for an adapter, which is merged before its model can be rounded."""
    folder, where = find_model(Path(path)), pick_device(device)
    if is_adapter(folder):
        return load_merged(folder, device=where)
    return load_model(folder, device=where, reduced="take", precision=None if precision == "auto" else precision)


def load_merged(folder: Path, *, base: Path | None = None, device: torch.device | str = "cpu") -> ModelFolder:
    """The plain model of an adapter folder and its ``base`` (default: where it was in training), merged in fp32.

    Tokenizer, chat template and stop ids are those that the adapter was trained with. ``manifest`` is what the model's
    own should say. Raises `ConfigError` for an adapter of another base.
    """
    adapter = load_adapter(folder)
    place = _base_of(folder, adapter) if base is None else find_model(base)
    found = load_model(place, device=device)
    if adapter.base_sha256 not in (None, found.manifest["self"]):
        raise ConfigError(
            f"the adapter was trained on another base than {place}: manifest {str(adapter.base_sha256)[:12]}, not"
            f" {found.manifest['self'][:12]}"
        )
    tokenizer = kept_tokenizer(folder) or found.tokenizer
    try:
        model = with_words(found.model, found.tokenizer, tokenizer)
        apply_adapter(model, adapter)
    except ConfigError as error:
        raise ConfigError(f"{folder} doesn't fit {place}: {error}") from error
    about = files.read_manifest(folder) if files.looks_published(folder) else {}
    fields = {key: value for key, value in about.items() if key not in ("files", "self", "kind", "tokenizer_sha256")}
    fields["base_sha256"] = found.manifest["self"]
    return ModelFolder(merge(model).eval(), tokenizer, fields, kept_extras(folder, model.config, found.extras))


def _base_of(folder: Path, adapter: Adapter) -> Path:
    """The base that an adapter names."""
    if adapter.base is None:
        raise ConfigError(f"{folder} is an adapter that names no base:  cyberslm merge BASE {folder} DEST")
    try:
        return find_model(Path(adapter.base))
    except ConfigError as error:
        raise ConfigError(
            f"{folder} is an adapter, and its base: {error}; or  cyberslm merge BASE {folder} DEST"
        ) from error


def find_model(path: Path) -> Path:
    """The model or adapter folder meant by ``path``."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give a model folder such as runs/demo/final")
    if any((path / name).exists() for name in ("config.json", "manifest.json")) or is_adapter(path):
        _refuse_export(path)
        return path
    if (path / "final").is_dir():
        return path / "final"
    step = newest(path / "checkpoints", lambda _: None)
    if step is None:
        raise ConfigError(f"{path} holds no model: no config.json, no final/ and no whole checkpoint")
    return step.path


def _refuse_export(path: Path) -> None:
    if files.looks_published(path) and files.read_manifest(path).get("kind") == EXPORT:
        source = next(iter(sorted(path.glob("*.gguf"))), path)
        raise ConfigError(
            f"{path} is an export for other tools: name the model that it was made of, or bring it back with "
            f" cyberslm import {source} DEST"
        )


def quantize(
    path: Path | str,
    target: Path | str,
    *,
    precision: Literal["bf16", "int8", "int4"] = "int8",
    say: Say = lambda _: None,
) -> Path:
    """Write a model folder like ``path`` in fewer bits, for use: `load` opens it, training and export refuse it.

    Raises `ConfigError` where a width doesn't fit, ``path`` is in fewer bits already or ``target`` exists; other errors
    as in `load`.
    """
    if Path(target).exists():
        raise ConfigError(f"{target} exists: name another folder")
    folder = find_model(Path(path))
    found = load_merged(folder) if is_adapter(folder) else load_model(folder, precision=precision)
    set_precision(found.model, precision)
    kept = {
        key: value for key, value in found.manifest.items() if key not in ("files", "self", "kind", "tokenizer_sha256")
    }
    fields = {**kept, "source": str(folder), "precision": precision}
    save_model(Path(target), found.model, found.tokenizer, fields, extras=found.extras)
    before, after = 4 * found.model.config.num_parameters, (Path(target) / WEIGHTS).stat().st_size
    say(f"{target}: {precision}, {before:,} bytes of weights -> {after:,}")
    say("what is lost: compare the bits per byte that cyberslm eval MODEL --data DATA gives for both")
    return Path(target)
