"""A tokenizer of bytes with the interface of the real one, and a way to write files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest


class ByteTokenizer:
    """Ids are bytes + 4, between <bos> (when added) and <eos>."""

    pad_id, unk_id, bos_id, eos_id = 0, 1, 2, 3
    vocab_size = 260
    control_ids = frozenset({0, 1, 2, 3})

    def __init__(self, *, add_bos: bool = True) -> None:
        self.add_bos = add_bos
        self.sha256 = hashlib.sha256(b"bytes + 4").hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_id] * (add_special_tokens and self.add_bos) + [byte + 4 for byte in text.encode()]

    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        return [np.array([*self.encode(text), self.eos_id], np.uint16) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 4 for i in ids if i > 3).decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "tokenizer.model").write_bytes(b"bytes + 4, bos" if self.add_bos else b"bytes + 4")

    @classmethod
    def load(cls, folder: str | Path) -> ByteTokenizer:
        return cls(add_bos=(Path(folder) / "tokenizer.model").read_bytes().endswith(b"bos"))


@pytest.fixture
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> ByteTokenizer:
    """The byte tokenizer, which prepared folders then load in place of the real one."""
    from cyberslm.data import prepare

    monkeypatch.setattr(prepare, "load_tokenizer", ByteTokenizer.load)
    return ByteTokenizer()


@pytest.fixture
def write(tmp_path: Path):
    """Write text or bytes below the temporary folder and return the path as text."""

    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file
