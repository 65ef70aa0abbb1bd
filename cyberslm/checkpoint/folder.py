"""Model folders: what ``final/`` and every step folder are, written whole or not at all and verified when read.

    config.json  generation_config.json  model.safetensors  tokenizer files  manifest.json
    chat_template.jinja                                          (where the model has one)
    training/optimizer.safetensors  training/state.json          (step folders only)

Tensors are safetensors and the rest is JSON: reading a folder runs nothing. Every size is checked against the
file's own header before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.hf import config_from_json, disk_name, generation_config, hf_config, precision_from_json
from cyberslm.checkpoint.tensors import Kind, write_tensors
from cyberslm.checkpoint.weights import read_weights
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import Precision, precision_of, set_precision
from cyberslm.text.hf import CONFIG_FILE
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

WEIGHTS = "model.safetensors"
OPTIMIZER = "training/optimizer.safetensors"
STATE = "training/state.json"
KIND, EXPORT = "cyberslm-model", "cyberslm-export"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
JSON_LIMIT = 1 << 20


class Extras(NamedTuple):
    """What a model brings along besides network and tokenizer."""

    chat_template: str | None = None
    """Jinja source of ``chat_template.jinja``; kept as text and never run here."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end an answer besides the configuration's eos_token_id."""


class ModelFolder(NamedTuple):
    model: CyberSLM
    tokenizer: Tokenizer
    manifest: dict
    extras: Extras = Extras()


class ModelParts(NamedTuple):
    """What a folder is made of; ``tensor`` gives one parameter by name, so that not all are in memory at once."""

    config: CyberSLMConfig
    tensor: Callable[[str], Tensor]
    tokenizer: Tokenizer
    extras: Extras = Extras()
    precision: Precision = "fp32"
    """That of the tensors: `cyberslm.model.quantised`."""


class TrainingFiles(NamedTuple):
    """What resuming needs besides the model."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, object]


def save_model(
    target: Path,
    model: CyberSLM,
    tokenizer: Tokenizer,
    fields: Mapping[str, object],
    training: TrainingFiles | None = None,
    extras: Extras = Extras(),  # noqa: B008 (immutable)
) -> None:
    """Publish a model folder, replacing one that is there. ``fields`` go into the manifest.

    Raises `StorageError` when it can't be written, `IntegrityError` when a weight is not finite; what was there stays.
    """
    tensors = model.state_dict()
    precision = precision_of(model)
    save_parts(target, ModelParts(model.config, tensors.__getitem__, tokenizer, extras, precision), fields, training)


def save_parts(
    target: Path,
    parts: ModelParts,
    fields: Mapping[str, object],
    training: TrainingFiles | None = None,
    *,
    replace: bool = True,
) -> None:
    """`save_model` of a model that is read while it is written."""
    model = CyberSLM(parts.config, device="meta")
    set_precision(model, parts.precision)
    kinds = {disk_name(name): Kind.of(tensor) for name, tensor in model.state_dict().items()}
    own_name = {disk_name(name): name for name in model.state_dict()}

    def finite(name: str) -> Tensor:
        weight = parts.tensor(own_name[name]).detach()
        if not bool(torch.isfinite(weight).all()):
            raise IntegrityError(f"weight {name} is not finite: the model was not saved to {target}")
        return weight

    def fill(staging: Path) -> dict[str, object]:
        write_words(staging, parts.config, parts.tokenizer, parts.extras)
        words = parts.tokenizer.cuts_like_qwen2
        write_json(staging / "config.json", hf_config(parts.config, parts.precision, qwen2_words=words))
        write_tensors(staging / WEIGHTS, kinds, finite)
        if training is not None:
            write_training(staging, training)
        return {"kind": KIND, "tokenizer_sha256": parts.tokenizer.sha256, **fields}

    files.publish(target, fill, replace=replace)


def write_words(staging: Path, config: CyberSLMConfig, tokenizer: Tokenizer, extras: Extras) -> None:
    """The files that say how a model is asked and what ends its answers: tokenizer, chat template, stop ids."""
    template = (extras.chat_template or "").encode()
    if len(template) > JSON_LIMIT:
        raise IntegrityError(f"a chat template of {len(template):,} bytes; at most {JSON_LIMIT:,} are read")
    tokenizer.save(staging)
    write_json(staging / GENERATION, generation_config(config, extras.stop_ids))
    if extras.chat_template is not None:
        (staging / CHAT_TEMPLATE).write_bytes(template)
        _let_template_spell(staging / CONFIG_FILE)


def _let_template_spell(path: Path) -> None:
    """Other programs write a chat as text and encode it, so there text that spells a control token must become one.

    Without a template no text does, there as here; here none ever does.
    """
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**settings, "split_special_tokens": False})


def load_model(
    folder: Path | str,
    *,
    device: torch.device | str = "cpu",
    reduced: Literal["refuse", "take"] = "refuse",
    precision: Precision | None = None,
) -> ModelFolder:
    """Open a model folder, checking every file's SHA-256 first.

    A folder in fewer bits than fp32 has lost what training and export need: unless ``reduced`` is "take", `ConfigError`
    says so. With ``precision`` the weights are rounded to it while they are read, as `set_precision` would. Raises
    `IntegrityError` naming the file that is missing, damaged or doesn't fit, and what is wrong with it.
    """
    path = Path(folder)
    manifest = verify_model(path)
    where, written = str(path / "config.json"), read_json(path / "config.json")
    config, held = config_from_json(written, where=where), precision_from_json(written, where=where)
    if held != "fp32" and reduced == "refuse":
        raise ConfigError(
            f"{path} is kept in {held}, for use only: train, merge or export the folder that it was made from"
            + (f", {manifest['source']}" if isinstance(manifest.get("source"), str) else "")
        )
    model = read_weights(path / WEIGHTS, config, held, precision=precision or held, device=device)
    return ModelFolder(model.eval(), load_tokenizer(path), manifest, load_extras(path, config))


def load_extras(folder: Path, config: CyberSLMConfig) -> Extras:
    """The chat template and further stop ids of a model folder that has been verified."""
    template = read_text(folder / CHAT_TEMPLATE) if (folder / CHAT_TEMPLATE).exists() else None
    settings = read_json(folder / GENERATION)
    stops = settings.get("eos_token_id") if isinstance(settings, dict) else None
    ids = [stops] if isinstance(stops, int) else stops
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < config.vocab_size for i in ids):
        raise IntegrityError(
            f"{folder / GENERATION}: eos_token_id must be ids below {config.vocab_size}, not {stops!r:.80}"
        )
    return Extras(template, tuple(i for i in dict.fromkeys(ids) if i != config.eos_token_id))


def read_config(folder: Path) -> CyberSLMConfig:
    """The network that a model folder holds; of its files only ``config.json`` is read, and isn't verified."""
    return config_from_json(read_json(folder / "config.json"), where=str(folder / "config.json"))


def read_precision(folder: Path) -> Precision:
    """The same for the bits that its matrices are kept in."""
    return precision_from_json(read_json(folder / "config.json"), where=str(folder / "config.json"))


def load_training(folder: Path) -> TrainingFiles:
    """The training part of a step folder that has been verified."""
    try:
        tensors = load_file(folder / OPTIMIZER)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{folder / OPTIMIZER} can't be read: {error}") from error
    return TrainingFiles(tensors, load_state(folder))


def load_state(folder: Path) -> dict[str, object]:
    """The state of a step folder that has been verified, without its tensors."""
    state = read_json(folder / STATE)
    if not isinstance(state, dict):
        raise IntegrityError(f"{folder / STATE} does not hold an object")
    return state


def verify_model(folder: Path) -> dict:
    """The manifest of a whole, undamaged model folder; `IntegrityError` otherwise."""
    manifest = files.verify(folder)
    if manifest.get("kind") != KIND:
        raise IntegrityError(f"{folder} is a finished folder of kind {manifest.get('kind')!r}, not a {KIND}")
    return manifest


def read_json(path: Path) -> object:
    """A small JSON file; `IntegrityError` names it when it is missing, too large or not JSON."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error


def read_text(path: Path) -> str:
    """A small UTF-8 file; `IntegrityError` names it when it is missing, too large or not text."""
    try:
        with path.open("rb") as file:
            data = file.read(JSON_LIMIT + 1)
        if len(data) > JSON_LIMIT:
            raise IntegrityError(f"{path} is larger than {JSON_LIMIT:,} bytes")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error


def write_training(staging: Path, training: TrainingFiles) -> None:
    """The training part of a step folder."""
    (staging / "training").mkdir()
    write_whole(staging / OPTIMIZER, training.tensors)
    write_json(staging / STATE, training.state)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n", encoding="utf-8")


def write_whole(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors that are in memory. Raises `StorageError` when they don't fit on the disk."""
    write_tensors(path, {name: Kind.of(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)
