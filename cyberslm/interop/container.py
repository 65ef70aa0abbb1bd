"""A GGUF file, walked with every length checked before anything is taken by it.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: magic, version, counts, key-value
pairs, tensor infos, padding, tensor data. A damaged or hostile file ends in an `IntegrityError`; the ``gguf`` library
sees only blocks of values whose sizes fit.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cyberslm.errors import ConfigError, IntegrityError

Value = int | float | bool | str | list[str] | np.ndarray

MOST_ENTRIES = 100_000
LONGEST_ARRAY = 1 << 22
LONGEST_STRING = 64 << 20
ALIGNMENT = "general.alignment"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# Those that hold numbers a network can have. The values are the library's; it does the arithmetic.
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


class TensorInfo(NamedTuple):
    """``shape`` as numpy has it, rows first; ``start`` and ``size`` in bytes of the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    size: int


class GgufFile(NamedTuple):
    """What a file says, and its tensors as fp32 arrays by ``array(name)``."""

    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    array: Callable[[str], np.ndarray]


class _Cursor:
    """A place in the bytes from which checked reads go on."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self.at = data, path, 0

    def need(self, size: int, what: str) -> None:
        if size > len(self._data) - self.at:
            raise IntegrityError(
                f"{self._path} is damaged: {what} at byte {self.at:,} needs {size:,} bytes and"
                f" {max(0, len(self._data) - self.at):,} are left"
            )

    def number(self, form: str, what: str) -> Any:
        size = struct.calcsize(form)
        self.need(size, what)
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.at += size
        return value

    def text(self, what: str) -> str:
        size = self.number("<Q", what)
        if size > LONGEST_STRING:
            raise IntegrityError(f"{self._path}: {what} says it has {size:,} bytes; the limit is {LONGEST_STRING:,}")
        self.need(size, what)
        raw = self._data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise IntegrityError(f"{self._path}: {what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Value:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise IntegrityError(f"{self._path}: {what} is of unknown type {kind}")
        return self.number(_SCALARS[kind], what)

    def _array(self, what: str) -> Value:
        kind, length = self.number("<I", what), self.number("<Q", what)
        if length > LONGEST_ARRAY:
            raise IntegrityError(f"{self._path}: {what} says it has {length:,} items; the limit is {LONGEST_ARRAY:,}")
        if kind == _STRING:
            self.need(8 * length, what)
            return [self.text(what) for _ in range(length)]
        if kind not in _SCALARS:
            raise IntegrityError(f"{self._path}: {what} is an array of type {kind}, which is not supported")
        dtype = np.dtype(np.bool_ if kind == _BOOL else _SCALARS[kind])
        self.need(dtype.itemsize * length, what)
        found = np.frombuffer(self._data, dtype, count=length, offset=self.at).copy()
        self.at += dtype.itemsize * length
        return found


def library() -> tuple[Any, Any]:
    """The constants and the arithmetic of the gguf library. Raises `ConfigError` that names the extra."""
    try:
        from gguf import constants, quants
    except ImportError:
        raise ConfigError("a GGUF file needs the gguf library: pip install 'cyberslm[interop]'") from None
    return constants, quants


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata; tensors are read when asked for. Raises `IntegrityError` for a damaged file."""
    constants, quants = library()
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error
    cursor = _Cursor(data, path)
    counts = _counts(cursor, path)
    values = _values(cursor, counts[1], path)
    sizes = {
        constants.GGMLQuantizationType[name]: constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[name]]
        for name in _TYPES
    }
    tensors = _tensors(cursor, counts[0], path, {int(kind): (kind.name, *size) for kind, size in sizes.items()})
    aligned = _aligned(tensors, _alignment(values, path), cursor, path, len(data))

    def array(name: str) -> np.ndarray:
        info = aligned[name]
        kind = constants.GGMLQuantizationType[info.type]
        rows = np.frombuffer(data, np.uint8, count=info.size, offset=info.start)
        rows = rows.reshape(*info.shape[:-1], -1) if info.shape else rows
        return np.array(quants.dequantize(rows, kind), dtype=np.float32).reshape(info.shape)

    return GgufFile(values, aligned, array)


def _counts(cursor: _Cursor, path: Path) -> tuple[int, int]:
    magic = cursor.number("<4s", "the magic number")
    if magic != b"GGUF":
        raise IntegrityError(f"{path} is no GGUF file: it begins with {magic!r}")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        swapped = " (of a machine with the other byte order)" if version >= 1 << 16 else ""
        raise IntegrityError(f"{path} has GGUF version {version}{swapped}; 2 and 3 are supported")
    counts = cursor.number("<Q", "the number of tensors"), cursor.number("<Q", "the number of keys")
    for count, what in zip(counts, ("tensors", "keys"), strict=True):
        if count > MOST_ENTRIES:
            raise IntegrityError(f"{path} says it has {count:,} {what}; the limit is {MOST_ENTRIES:,}")
    return counts


def _values(cursor: _Cursor, count: int, path: Path) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a key")
        if key in values:
            raise IntegrityError(f"{path} has the key {key!r:.100} twice")
        values[key] = cursor.value(cursor.number("<I", f"the type of {key!r:.100}"), f"key {key!r:.100}")
    return values


def _tensors(
    cursor: _Cursor, count: int, path: Path, sizes: Mapping[int, tuple[str, int, int]]
) -> dict[str, TensorInfo]:
    """Infos with ``start`` still counted from the beginning of the data."""
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.text("a tensor's name")
        what = f"tensor {name!r:.100}"
        if name in tensors:
            raise IntegrityError(f"{path} has {what} twice")
        dimensions = cursor.number("<I", what)
        if not 1 <= dimensions <= 4:
            raise IntegrityError(f"{path}: {what} has {dimensions} dimensions; 1 to 4 are possible")
        shape = tuple(reversed([cursor.number("<Q", what) for _ in range(dimensions)]))
        kind, start = cursor.number("<I", what), cursor.number("<Q", what)
        if kind not in sizes:
            raise IntegrityError(f"{path}: {what} is of ggml type {kind}; supported are {', '.join(_TYPES)}")
        label, block, width = sizes[kind]
        if 0 in shape or shape[-1] % block:
            raise IntegrityError(f"{path}: {what} of shape {list(shape)} is empty or not made of blocks of {block}")
        tensors[name] = TensorInfo(label, shape, start, math.prod(shape) // block * width)
    return tensors


def _alignment(values: Mapping[str, Value], path: Path) -> int:
    alignment = values.get(ALIGNMENT, 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise IntegrityError(f"{path}: {ALIGNMENT} must be a power of two up to 1,048,576, not {alignment!r:.80}")
    return alignment


def _aligned(
    tensors: Mapping[str, TensorInfo], alignment: int, cursor: _Cursor, path: Path, end: int
) -> dict[str, TensorInfo]:
    begin = cursor.at + -cursor.at % alignment
    for name, info in tensors.items():
        if info.start % alignment or info.start + info.size > end - begin:
            raise IntegrityError(
                f"{path} is damaged: tensor {name!r:.100} of {info.size:,} bytes at {info.start:,} does not lie in the"
                f" {max(0, end - begin):,} bytes of data"
            )
    return {name: info._replace(start=begin + info.start) for name, info in tensors.items()}
