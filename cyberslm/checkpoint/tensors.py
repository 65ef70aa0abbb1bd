"""A safetensors file, written tensor by tensor or read by rows, so that all of them need not be in memory at once.

Of tensors of one type the bytes are those that the safetensors library writes (https://github.com/huggingface/safetensors):
eight bytes of header length, a JSON header filled with spaces to a multiple of eight, then the values, wide types
first and each type by name.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from cyberslm.errors import InputError, IntegrityError, StorageError

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in TYPES.items()}


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


class TensorFile:
    """Tensors of a file that the safetensors library has opened before, and so has checked, read without mapping it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._begin = 8 + length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def kind(self, name: str) -> Kind:
        entry = self._entries[name]
        return Kind(DTYPES[entry["dtype"]], tuple(entry["shape"]))

    def read(self, name: str, target: Tensor, *, first_row: int = 0) -> None:
        """Fill ``target``, contiguous and of the tensor's type, with as many of its rows. Raises `IntegrityError`."""
        kind = self.kind(name)
        start = first_row * (kind.size // kind.shape[0]) if first_row else 0
        if target.dtype != kind.dtype or start + Kind.of(target).size > kind.size:
            raise InputError(f"tensor {name} is {kind}: {Kind.of(target)} can't be read from row {first_row}")
        self._file.seek(self._begin + self._entries[name]["data_offsets"][0] + start)
        room = target.detach().view(-1).view(torch.uint8).numpy().data
        while room:
            count = self._file.readinto(room)
            if not count:
                raise IntegrityError(f"{self._path} ends within tensor {name}")
            room = room[count:]


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
