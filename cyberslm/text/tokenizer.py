"""The tokenizer that the rest of the package uses: text to ids and back, exactly.

``decode(encode(s)) == s`` for every valid Unicode string, and text never becomes a control id, whatever it spells.
Encoding is SentencePiece's byte-pair merging of the escaped text; decoding is this package's own table of bytes, so
decoding at once and token by token give the same text by construction. Ids: pad 0, unk 1, bos 2, eos 3.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from cyberslm import files
from cyberslm.errors import StorageError, TokenizerError
from cyberslm.text import hf, proto
from cyberslm.text.codec import SPACE_MARK, StreamDecoder, cut, decode_bytes, escape, mend

MODEL_FILE = "tokenizer.model"

_PART_CHARS = 1 << 16
_MAX_SETTINGS_BYTES = 1 << 20


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
    def sha256(self) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def stream_decoder(self) -> StreamDecoder: ...
    def token_bytes(self, token: int) -> bytes: ...
    def piece(self, token: int) -> str: ...
    def save(self, folder: str | Path) -> None: ...


class SentencePieceTokenizer:
    """A lossless SentencePiece BPE model and the rule whether texts begin with ``<bos>``; immutable."""

    pad_id = proto.PAD
    unk_id = proto.UNK
    bos_id = proto.BOS
    eos_id = proto.EOS

    def __init__(self, model: bytes, *, add_bos: bool) -> None:
        self._pieces = proto.read_pieces(model)
        self._model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise TokenizerError(f"tokenizer model is refused by SentencePiece: {error}") from error
        self.add_bos = add_bos
        self.vocab_size = len(self._pieces)
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.control_ids = frozenset(
            index for index, piece in enumerate(self._pieces) if piece.kind in (proto.CONTROL, proto.UNKNOWN)
        )
        self._bytes = [_piece_bytes(piece) for piece in self._pieces]
        spellings = (piece.text.replace(SPACE_MARK, " ") for piece in self._pieces if piece.kind == proto.NORMAL)
        self._joined = frozenset(text[at : at + 2] for text in spellings for at in range(len(text) - 1))

    @classmethod
    def from_proto(cls, model: bytes, *, add_bos: bool) -> SentencePieceTokenizer:
        """From the bytes of a ``tokenizer.model``. Raises TokenizerError if damaged or not lossless."""
        return cls(model, add_bos=add_bos)

    @classmethod
    def from_file(cls, path: str | Path, *, add_bos: bool) -> SentencePieceTokenizer:
        """From a ``tokenizer.model`` or a folder that holds one. Raises TokenizerError."""
        path = Path(path)
        if path.is_dir():
            path = path / MODEL_FILE
        model = _read(path, limit=proto.MAX_MODEL_BYTES)
        try:
            return cls(model, add_bos=add_bos)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, ``<bos>`` first when the tokenizer adds it; lone surrogates count as U+FFFD."""
        ids = [self.bos_id] if add_special_tokens and self.add_bos else []
        for part in self._parts(text):
            ids += self._processor.encode(part, out_type=int)
        return ids

    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids of each text between ``<bos>`` (when added) and ``<eos>``: uint16, or uint32 beyond 65,536 pieces."""
        if isinstance(texts, str) or num_threads < 1:
            raise TokenizerError(f"encode_documents needs a list of texts and 1 or more threads, not {num_threads}")
        parts_of = [self._parts(text) for text in texts]
        flat = [part for parts in parts_of for part in parts]
        encoded = iter(self._processor.encode(flat, out_type=int, num_threads=num_threads) if flat else ())
        prefix = [self.bos_id] if self.add_bos else []
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        documents = []
        for parts in parts_of:
            ids = prefix.copy()
            for _ in parts:
                ids += next(encoded)
            ids.append(self.eos_id)
            documents.append(np.array(ids, dtype=dtype))
        return documents

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: control ids give nothing, bytes that are not UTF-8 give U+FFFD. Raises TokenizerError."""
        return decode_bytes(b"".join(map(self.token_bytes, ids)))

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that takes one id at a time; what it returns, joined, equals ``decode`` of the ids."""
        return StreamDecoder(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that an id stands for, U+2581 and U+FDD0 still escaped; empty for a control id."""
        return self._bytes[self._index(token)]

    def piece(self, token: int) -> str:
        """The vocabulary entry of an id, as SentencePiece spells it."""
        return self._pieces[self._index(token)].text

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.model`` and its Hugging Face twin into a folder, made when missing. Raises StorageError."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"can't make the folder {folder}: {error.strerror}") from error
        files.write_bytes(folder / MODEL_FILE, self._model)
        for name, text in hf.twin_files(self._pieces, add_bos=self.add_bos).items():
            files.write_text(folder / name, text)

    def _parts(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
        return cut(escape(mend(text).text), self._joined, _PART_CHARS)

    def _index(self, token: int) -> int:
        try:
            index = operator.index(token)
        except TypeError:
            raise TokenizerError(f"a token id must be an integer, not {type(token).__name__}") from None
        if not 0 <= index < self.vocab_size:
            raise TokenizerError(f"token id {index} is outside the vocabulary of {self.vocab_size:,}")
        return index


def load_tokenizer(folder: str | Path) -> SentencePieceTokenizer:
    """The tokenizer that ``save`` wrote into a folder, with its ``<bos>`` rule. Raises TokenizerError."""
    add_bos = saved_bos_rule(folder)
    if add_bos is None:
        raise TokenizerError(f"can't read {Path(folder) / hf.CONFIG_FILE}: no such file")
    return SentencePieceTokenizer.from_file(Path(folder) / MODEL_FILE, add_bos=add_bos)


def saved_bos_rule(folder: str | Path) -> bool | None:
    """Whether texts begin with ``<bos>``, as ``save`` noted in a folder; None without a note. Raises TokenizerError."""
    path = Path(folder) / hf.CONFIG_FILE
    if not path.exists():
        return None
    try:
        settings = json.loads(_read(path, limit=_MAX_SETTINGS_BYTES))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    add_bos = settings.get("add_bos_token") if isinstance(settings, dict) else None
    if not isinstance(add_bos, bool):
        raise TokenizerError(f"{path}: add_bos_token must be true or false, not {add_bos!r}")
    return add_bos


def _read(path: Path, *, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise TokenizerError(f"can't read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise TokenizerError(f"{path} is larger than {limit:,} bytes, the limit for this file")
    return data


def _piece_bytes(piece: proto.Piece) -> bytes:
    if piece.kind == proto.BYTE:
        return bytes([int(piece.text[3:5], 16)])
    if piece.kind == proto.NORMAL:
        return piece.text.replace(SPACE_MARK, " ").encode()
    return b""
