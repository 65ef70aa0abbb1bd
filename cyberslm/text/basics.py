"""What both kinds of tokenizer do alike: read and write their files, check ids."""

from __future__ import annotations

import operator
from pathlib import Path

import numpy as np

from cyberslm import files
from cyberslm.errors import StorageError, TokenizerError


def checked_id(token: int, vocab_size: int) -> int:
    """The id as a plain int. Raises TokenizerError when it is no integer or outside the vocabulary."""
    try:
        index = operator.index(token)
    except TypeError:
        raise TokenizerError(f"a token id must be an integer, not {type(token).__name__}") from None
    if not 0 <= index < vocab_size:
        raise TokenizerError(f"token id {index} is outside the vocabulary of {vocab_size:,}")
    return index


def read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a file of at most ``limit``. Raises TokenizerError."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise TokenizerError(f"can't read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise TokenizerError(f"{path} is larger than {limit:,} bytes, the limit for this file")
    return data


def save_files(folder: str | Path, contents: dict[str, bytes]) -> None:
    """Write files into a folder, made when missing. Raises StorageError."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"can't make the folder {folder}: {error.strerror}") from error
    for name, data in contents.items():
        files.write_bytes(folder / name, data)


def varint(number: int) -> bytes:
    """A number from 0 on as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest type that holds every id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
