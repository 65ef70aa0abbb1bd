"""The tokenizer that the rest of the package uses: text to ids and back, and how one is opened.

``decode(encode(s)) == s`` for every valid Unicode string unless ``losses`` names what a given file can't keep, and text
never becomes a control id, whatever it spells. Decoding is a table of bytes, so that decoding at once and token by
token give the same text by construction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from cyberslm.errors import TokenizerError
from cyberslm.text import hf
from cyberslm.text.basics import read_file
from cyberslm.text.codec import Spelling, StreamDecoder
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.spm import SentencePieceTokenizer

MODEL_FILE = hf.MODEL_FILE

_MAX_SETTINGS_BYTES = 4 << 20


class Tokenizer(Protocol):
    """What data, generation and evaluation ask of a tokenizer; ``SentencePieceTokenizer`` says what each does."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def unk_id(self) -> int: ...
    @property
    def bos_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def control_ids(self) -> frozenset[int]: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def spelling(self) -> Spelling: ...
    @property
    def losses(self) -> tuple[str, ...]: ...
    @property
    def sha256(self) -> str: ...
    @property
    def cuts_like_qwen2(self) -> bool:
        """Whether it cuts text into words as Qwen2's does, which a network's ``config.json`` has to say."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def stream_decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder: ...
    def token_bytes(self, token: int) -> bytes: ...
    def piece(self, token: int) -> str: ...
    def save(self, folder: str | Path) -> None: ...


class SavedRules(NamedTuple):
    """What ``tokenizer_config.json`` notes; None where it says nothing."""

    add_bos: bool | None
    lossless: bool


def open_tokenizer(path: str | Path, *, add_bos: bool | None = None, lossless: bool = True) -> Tokenizer:
    """A tokenizer.model or a Hugging Face tokenizer.json, or the one in a folder.

    ``add_bos`` None follows the rule that was saved with it. Raises TokenizerError when it is damaged, or when it can't
    keep text exactly and ``lossless`` asks for that.
    """
    file = tokenizer_file(path)
    saved = saved_rules(file.parent).add_bos
    if file.suffix == ".json":
        return HuggingFaceTokenizer.from_file(file, add_bos=add_bos, lossless=lossless)
    return SentencePieceTokenizer.from_file(file, add_bos=saved if add_bos is None else add_bos, lossless=lossless)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that ``save`` wrote into a folder, with its rules. Raises TokenizerError."""
    folder = Path(folder)
    rules = saved_rules(folder)
    if rules.add_bos is None:
        path = folder / hf.CONFIG_FILE
        problem = "add_bos_token must be true or false" if path.exists() else "no such file"
        raise TokenizerError(f"can't read {path}: {problem}")
    return open_tokenizer(folder, add_bos=rules.add_bos, lossless=rules.lossless)


def tokenizer_file(path: str | Path) -> Path:
    """The file meant by a path: itself, or the tokenizer.model, else tokenizer.json of a folder."""
    path = Path(path)
    found = [path / name for name in (MODEL_FILE, hf.JSON_FILE) if (path / name).is_file()] if path.is_dir() else [path]
    if not found or not found[0].is_file():
        raise TokenizerError(f"{path} is no tokenizer.model or tokenizer.json, nor a folder that holds one")
    return found[0]


def saved_rules(folder: str | Path) -> SavedRules:
    """The rules that were saved with a tokenizer in a folder. Raises TokenizerError for a damaged note."""
    path = Path(folder) / hf.CONFIG_FILE
    if not path.exists():
        return SavedRules(None, lossless=True)
    try:
        settings = json.loads(read_file(path, limit=_MAX_SETTINGS_BYTES))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} doesn't hold an object")
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise TokenizerError(f"{path}: add_bos_token must be true or false, not {add_bos!r:.40}")
    return SavedRules(add_bos, lossless=settings.get("lossless") is not False)
