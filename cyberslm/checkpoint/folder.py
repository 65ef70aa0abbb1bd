"""Model folders: what ``final/`` and every step folder are, written whole or not at all and verified when read.

    config.json  generation_config.json  model.safetensors  tokenizer files  manifest.json
    training/optimizer.safetensors  training/state.json          (step folders only)

Tensors are safetensors and the rest is JSON: reading a folder runs nothing. Every size is checked against the
file's own header before memory is taken.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.hf import config_from_json, disk_name, generation_config, hf_config, precision_from_json
from cyberslm.errors import ConfigError, IntegrityError, StorageError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import Precision, precision_of, set_precision
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

WEIGHTS = "model.safetensors"
OPTIMIZER = "training/optimizer.safetensors"
STATE = "training/state.json"
KIND = "cyberslm-model"
JSON_LIMIT = 1 << 20
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}


class ModelFolder(NamedTuple):
    model: CyberSLM
    tokenizer: Tokenizer
    manifest: dict


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
) -> None:
    """Publish a model folder, replacing one that is there. ``fields`` go into the manifest.

    Raises `StorageError` when it can't be written, `IntegrityError` when a weight is not finite; what was there stays.
    """
    weights = _tensors(model)
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise IntegrityError(f"weight {name} is not finite: the model was not saved to {target}")

    def fill(staging: Path) -> dict[str, object]:
        _write_json(staging / "config.json", hf_config(model.config, precision_of(model)))
        _write_json(staging / "generation_config.json", generation_config(model.config))
        _write_tensors(staging / WEIGHTS, weights)
        tokenizer.save(staging)
        if training is not None:
            (staging / "training").mkdir()
            _write_tensors(staging / OPTIMIZER, training.tensors)
            _write_json(staging / STATE, training.state)
        return {"kind": KIND, "tokenizer_sha256": tokenizer.sha256, **fields}

    files.publish(target, fill, replace=True)


def load_model(
    folder: Path | str, *, device: torch.device | str = "cpu", reduced: Literal["refuse", "take"] = "refuse"
) -> ModelFolder:
    """Open a model folder, checking every file's SHA-256 first.

    A folder in fewer bits than fp32 has lost what training and export need: unless ``reduced`` is "take", `ConfigError`
    says so. Raises `IntegrityError` naming the file that is missing, damaged or doesn't fit, and what is wrong with it.
    """
    path = Path(folder)
    manifest = verify_model(path)
    where, written = str(path / "config.json"), read_json(path / "config.json")
    config, precision = config_from_json(written, where=where), precision_from_json(written, where=where)
    if precision != "fp32" and reduced == "refuse":
        raise ConfigError(
            f"{path} is kept in {precision}, for use only: train, merge or export the folder that it was made from"
            + (f", {manifest['source']}" if isinstance(manifest.get("source"), str) else "")
        )
    try:
        with safe_open(path / WEIGHTS, framework="pt", device=str(torch.device(device))) as archive:
            model = _model_of(config, precision, archive, path / WEIGHTS)
            weights = {name: archive.get_tensor(disk_name(name)) for name in model.state_dict(keep_vars=True)}
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path / WEIGHTS} can't be read: {error}") from error
    model.load_state_dict(weights, strict=True, assign=True)
    model.rope.allocate(device)
    return ModelFolder(model.eval(), load_tokenizer(path), manifest)


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
        if path.stat().st_size > JSON_LIMIT:
            raise IntegrityError(f"{path} is larger than {JSON_LIMIT:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error


def _tensors(model: CyberSLM) -> dict[str, Tensor]:
    """What is saved of a model, by its name on disk. Detaching on the meta device would import torch's compiler."""
    return {disk_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def _model_of(config: CyberSLMConfig, precision: Precision, archive: safe_open, path: Path) -> CyberSLM:
    """The network of ``config`` without weights, after its header has shown that the file holds exactly those."""
    headers = {name: archive.get_slice(name) for name in archive.keys()}  # noqa: SIM118 (not a mapping)
    held = sum(math.prod(header.get_shape()) for header in headers.values())
    if held < config.num_parameters // 2 or (precision == "fp32" and held != config.num_parameters):
        raise IntegrityError(f"{path} holds {held:,} parameters, config.json asks for {config.num_parameters:,}")
    model = CyberSLM(config, device="meta")
    set_precision(model, precision)
    wanted = _tensors(model)
    if odd := sorted(set(headers) ^ set(wanted)):
        raise IntegrityError(f"{path}: tensor {odd[0]} is {'missing' if odd[0] in wanted else 'unknown'}")
    for name, tensor in wanted.items():
        if (found := headers[name].get_dtype()) != DTYPES[tensor.dtype]:
            raise IntegrityError(f"{path} holds tensors of type {found}, not {DTYPES[tensor.dtype]}")
        if (shape := headers[name].get_shape()) != list(tensor.shape):
            raise IntegrityError(f"{path}: tensor {name} has shape {shape}, config.json asks for {list(tensor.shape)}")
    return model


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        save_file({name: t.detach().contiguous().cpu() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise StorageError(f"{path.name} ({needed:,} bytes) could not be written: {error}") from error
    if path.stat().st_size < needed:
        raise OSError(errno.ENOSPC, "file is shorter than its tensors", str(path))
