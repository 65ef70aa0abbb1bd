"""The weights of a model folder, read straight to where they stay and in the precision in which they will be used.

Every shape is checked against the file's header before memory is taken. The file is not mapped, and of weights that are
rounded only a few rows are held as they were: memory has the weights once, and a block of them besides.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cyberslm.checkpoint.hf import disk_name
from cyberslm.checkpoint.tensors import TYPES, TensorFile
from cyberslm.errors import IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.quantised import PACKED, Precision, pack, set_precision
from cyberslm.model.stretch import empty_tensors

BLOCK = 1 << 18
"""Numbers that are held in the file's precision at a time: 1 MiB."""


def read_weights(
    path: Path, config: CyberSLMConfig, held: Precision, *, precision: Precision, device: torch.device | str
) -> CyberSLM:
    """The network of ``config`` with the weights of a file that keeps them as ``held``, rounded to ``precision``.

    Raises `IntegrityError` for a file that is damaged or holds another network, `ConfigError` as `set_precision` does.
    """
    try:
        with safe_open(path, framework="pt") as archive:
            model = _model_of(config, held, archive, path)
        set_precision(model, precision)
        weights = empty_tensors(model, device)
        with TensorFile(path) as file:
            for name, target in weights.items():
                if disk_name(name) in file:
                    _fill(name, target, weights, file)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error
    model.load_state_dict(weights, strict=True, assign=True)
    model.rope.allocate(device)
    return model


def _fill(name: str, target: Tensor, weights: dict[str, Tensor], file: TensorFile) -> None:
    source, kind = disk_name(name), file.kind(disk_name(name))
    if kind.dtype == target.dtype and target.device.type == "cpu":
        file.read(source, target)
        return
    packing = PACKED.get(target.dtype) if kind.dtype.is_floating_point else None
    at_once = max(1, BLOCK // math.prod(kind.shape[1:]))
    for start in range(0, kind.shape[0], at_once):
        rows = slice(start, min(start + at_once, kind.shape[0]))
        block = torch.empty(rows.stop - start, *kind.shape[1:], dtype=kind.dtype)
        file.read(source, block, first_row=start)
        if packing is None:
            target[rows] = block
        else:
            target[rows], weights[name.removesuffix("weight") + "scales"][rows] = pack(block, packing)


def _model_of(config: CyberSLMConfig, precision: Precision, archive: safe_open, path: Path) -> CyberSLM:
    """The network of ``config`` without weights, after its header has shown that the file holds exactly those."""
    headers = {name: archive.get_slice(name) for name in archive.keys()}  # noqa: SIM118 (not a mapping)
    held = sum(math.prod(header.get_shape()) for header in headers.values())
    if held < config.num_parameters // 2 or (precision == "fp32" and held != config.num_parameters):
        raise IntegrityError(f"{path} holds {held:,} parameters, config.json asks for {config.num_parameters:,}")
    model = CyberSLM(config, device="meta")
    set_precision(model, precision)
    # detaching on the meta device would import torch's compiler
    wanted = {disk_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    if odd := sorted(set(headers) ^ set(wanted)):
        raise IntegrityError(f"{path}: tensor {odd[0]} is {'missing' if odd[0] in wanted else 'unknown'}")
    for name, tensor in wanted.items():
        if (found := headers[name].get_dtype()) != TYPES[tensor.dtype]:
            raise IntegrityError(f"{path} holds tensors of type {found}, not {TYPES[tensor.dtype]}")
        if (shape := headers[name].get_shape()) != list(tensor.shape):
            raise IntegrityError(f"{path}: tensor {name} has shape {shape}, config.json asks for {list(tensor.shape)}")
    return model
