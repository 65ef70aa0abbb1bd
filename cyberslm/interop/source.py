"""What every importer returns, and how it becomes a model folder: read, checked, published whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from cyberslm import files
from cyberslm.checkpoint.folder import ModelParts, save_parts
from cyberslm.checkpoint.hf import disk_name
from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Source(NamedTuple):
    """A foreign model, opened: its tensors are read when asked for. ``record`` says where it came from."""

    parts: ModelParts
    record: Mapping[str, object]


def write_source(source: Source, target: Path, *, replace: bool = False) -> None:
    """Publish the model folder. Raises `StorageError` when it can't be written or something is in the way."""
    config = source.parts.config
    files.require_space(
        target.absolute().parent, 4 * config.num_parameters, what=f"a model of {config.num_parameters:,} parameters"
    )
    save_parts(target, source.parts, {"source": source.record}, replace=replace)


def assembled(parts: ModelParts) -> CyberSLM:
    """The network of the parts, in memory."""
    model = CyberSLM(parts.config, device="meta")
    weights = {name: parts.tensor(name).to(torch.float32) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=True, assign=True)
    model.rope.to_empty(device="cpu")
    model.rope.reset()
    return model.eval()


def parameter_shapes(config: CyberSLMConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by its name."""
    return {name: tuple(parameter.shape) for name, parameter in CyberSLM(config, device="meta").named_parameters()}


def check_tensors(config: CyberSLMConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise `ConfigError` that names the first tensor that is missing, unknown or of another shape.

    ``found`` holds shapes by the names that Hugging Face's files have. No memory is taken.
    """
    layers = {int(match[1]) for name in found if (match := _LAYER.match(name))}
    if config.num_layers > len(layers):  # before that many are made
        first = next(layer for layer in range(config.num_layers) if layer not in layers)
        raise ConfigError(f"{where}: {config.num_layers:,} layers are asked for, tensors of layers.{first} are missing")
    wanted = {disk_name(name): shape for name, shape in parameter_shapes(config).items()}
    for name in sorted(set(found) ^ set(wanted)):
        state = "is missing" if name in wanted else "is unknown, and leaving it out would change the result"
        raise ConfigError(f"{where}: tensor {name!r:.120} {state}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(
                f"{where}: tensor {name} has shape {list(found[name])}, its settings ask for {list(shape)}"
            )


def file_records(paths: Iterator[Path] | list[Path]) -> dict[str, dict[str, object]]:
    """Size and SHA-256 of files by their names."""
    return {path.name: {"sha256": files.sha256_file(path), "size": path.stat().st_size} for path in paths}
