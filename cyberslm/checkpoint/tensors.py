"""A safetensors file written one tensor after the other, so that all of them need not be in memory at once.

Of tensors of one type the bytes are those that the safetensors library writes (https://github.com/huggingface/safetensors):
eight bytes of header length, a JSON header filled with spaces to a multiple of eight, then the values, wide types
first and each type by name.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cyberslm.errors import InputError, StorageError

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Kind(NamedTuple):
    """Type and shape of a tensor that is still to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def size(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_tensors(path: Path, kinds: Mapping[str, Kind], tensor: Callable[[str], Tensor]) -> None:
    """Write what ``tensor`` gives for each name, cast to its kind's type. Raises StorageError when there is no room."""
    names = sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    header = _header(names, kinds)
    total = len(header) + sum(kind.size for kind in kinds.values())
    try:
        with path.open("wb") as file:
            file.write(header)
            for name in names:
                file.write(_bytes(name, tensor(name), kinds[name]).data)
        if path.stat().st_size < total:
            raise OSError(errno.ENOSPC, "file is shorter than its tensors")
    except OSError as error:
        raise StorageError(f"{path.name} ({total:,} bytes) could not be written: {error.strerror or error}") from error


def _header(names: Sequence[str], kinds: Mapping[str, Kind]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + kinds[name].size
        dtype, shape = kinds[name]
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor, kind: Kind) -> np.ndarray:
    if tuple(tensor.shape) != kind.shape:
        raise InputError(f"tensor {name} has shape {list(tensor.shape)}, {list(kind.shape)} was announced")
    value = tensor.detach().to(device="cpu", dtype=kind.dtype).contiguous()
    return value.reshape(-1).view(torch.uint8).numpy()
