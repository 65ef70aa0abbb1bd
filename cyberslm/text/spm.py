"""A SentencePiece model in use: text to ids and back, exactly.

Encoding is SentencePiece's of the escaped text (``codec``), cut where no token can cross so that memory stays bounded.
A model that puts a space before each text gets it from here, once, and decoding takes it off again. Unigram sums stay
exact only up to 2^18, so its parts are shorter, and protected symbols, which it only favours, are cut out first.
A model with ``losses`` is used as SentencePiece itself would use it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from cyberslm.errors import TokenizerError
from cyberslm.text import hf, proto
from cyberslm.text.basics import checked_id, id_dtype, read_file, save_files
from cyberslm.text.codec import SPACE_MARK, Spelling, StreamDecoder, cut, escape, mend

_PART_CHARS = 1 << 16
_UNIGRAM_SUM = 1 << 17
_UNKNOWN_PENALTY = 10


class SentencePieceTokenizer:
    """A SentencePiece model and the rule whether texts begin with ``<bos>``; immutable."""

    def __init__(self, model: bytes, *, add_bos: bool | None = None, lossless: bool = True) -> None:
        self._read = read = proto.read_model(model)
        if lossless and (read.losses or read.gaps):
            faults = "; ".join(read.losses + read.gaps)
            raise TokenizerError(
                f"tokenizer model doesn't keep text or its Hugging Face twin exactly: {faults}; train one with"
                " cyberslm, or take it as it is with tokenizer.lossless: false"
            )
        self.content = model
        """The model file."""
        exact = not read.losses
        suffix = proto.WITHOUT_DUMMY_PREFIX if exact and read.dummy_prefix else b""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model + suffix)
        except RuntimeError as error:
            raise TokenizerError(f"tokenizer model is refused by SentencePiece: {error}") from error
        self.pad_id, self.unk_id, self.bos_id, self.eos_id, has_bos = read.roles
        if add_bos and not has_bos:
            raise TokenizerError("tokenizer model has no <bos>: leave out add_bos, or set it to false")
        self.add_bos = has_bos if add_bos is None else add_bos
        self.losses = tuple(read.losses + read.gaps)
        self.vocab_size = len(read.pieces)
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.control_ids = frozenset(
            index for index, piece in enumerate(read.pieces) if piece.kind in (proto.CONTROL, proto.UNKNOWN)
        )
        self._exact = exact
        self.spelling = Spelling(exact, b" " if read.dummy_prefix else b"", self.bos_id)
        self._bytes = [_piece_bytes(piece) for piece in read.pieces]
        self._joined = _joined(read.pieces)
        self._twin: dict[str, str] | None = None
        self._part_chars = _part_chars(read)
        self._symbols = _symbols(read.pieces) if exact and read.kind == proto.UNIGRAM else {}
        longest_first = sorted(self._symbols, key=len, reverse=True)
        self._symbol = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    @classmethod
    def from_proto(cls, model: bytes, *, add_bos: bool | None = None, lossless: bool = True) -> SentencePieceTokenizer:
        """From the bytes of a ``tokenizer.model``. Raises TokenizerError if damaged or not as lossless as asked."""
        return cls(model, add_bos=add_bos, lossless=lossless)

    @classmethod
    def from_file(
        cls, path: str | Path, *, add_bos: bool | None = None, lossless: bool = True
    ) -> SentencePieceTokenizer:
        """From a ``tokenizer.model`` or a folder that holds one. Raises TokenizerError."""
        path = Path(path)
        if path.is_dir():
            path = path / hf.MODEL_FILE
        model = read_file(path, limit=proto.MAX_MODEL_BYTES)
        try:
            return cls(model, add_bos=add_bos, lossless=lossless)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @property
    def cuts_like_qwen2(self) -> bool:
        return False

    @property
    def model(self) -> proto.SentencePieceModel:
        """What the file says."""
        return self._read

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, ``<bos>`` first when the tokenizer adds it; lone surrogates count as U+FFFD."""
        prefix = [self.bos_id] if add_special_tokens and self.add_bos else []
        ids: list[int] = self._encode([text], prefix, [], num_threads=1)[0].tolist()
        return ids

    def encode_documents(self, texts: Sequence[str], *, num_threads: int = 1) -> list[np.ndarray]:
        """Ids of each text between ``<bos>`` (when added) and ``<eos>``: uint16, or uint32 beyond 65,536 pieces."""
        if isinstance(texts, str) or num_threads < 1:
            raise TokenizerError(f"encode_documents needs a list of texts and 1 or more threads, not {num_threads}")
        prefix = [self.bos_id] if self.add_bos else []
        return self._encode(texts, prefix, [self.eos_id], num_threads=num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids: control ids give nothing, bytes that are not UTF-8 give U+FFFD. Raises TokenizerError."""
        return self.spelling.decode(self.token_bytes, ids)

    def stream_decoder(self, *, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder that takes one id at a time; what it returns, joined, equals ``decode`` of the ids.

        ``after`` are the ids that those to come continue, such as a prompt's.
        """
        return StreamDecoder(self.token_bytes, self.spelling, after=after)

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that an id stands for, U+2581 and U+FDD0 still escaped; empty for a control id."""
        return self._bytes[checked_id(token, self.vocab_size)]

    def piece(self, token: int) -> str:
        """The vocabulary entry of an id, as SentencePiece spells it."""
        return self._read.pieces[checked_id(token, self.vocab_size)].text

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.model`` and its Hugging Face twin into a folder, made when missing. Raises StorageError."""
        twin = {name: text.encode() for name, text in self.twin_files().items()}
        save_files(folder, {hf.MODEL_FILE: self.content, **twin})

    def twin_files(self) -> dict[str, str]:
        """The Hugging Face files of this tokenizer, name to text; worked out once, as each checkpoint holds them."""
        if self._twin is None:
            self._twin = hf.twin_files(self._read, add_bos=self.add_bos)
        return self._twin

    def _encode(self, texts: Sequence[str], first: list[int], last: list[int], *, num_threads: int) -> list[np.ndarray]:
        """Arrays, as lists of ids would be made one number after the other while all threads but one wait."""
        parts_of = [self._parts(text) for text in texts]
        flat = [part for parts in parts_of for part in parts if part not in self._symbols]
        threads = num_threads if len(flat) > 1 else 1
        encoded = iter(self._processor.encode(flat, return_type="numpy", num_threads=threads) if flat else ())
        dtype = id_dtype(self.vocab_size)
        documents = []
        for parts in parts_of:
            ids = [[self._symbols[part]] if part in self._symbols else next(encoded) for part in parts]
            # Each id is below vocab_size and so fits.
            documents.append(np.concatenate([first, *ids, last], dtype=dtype, casting="unsafe"))
        return documents

    def _parts(self, text: str) -> list[str]:
        if not isinstance(text, str):
            raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
        text = mend(text).text
        if not self._exact:
            return [text]
        if text and self._read.dummy_prefix:
            text = " " + text
        return list(self._cut(escape(text)))

    def _cut(self, text: str) -> Iterator[str]:
        if self._symbol is None:
            yield from cut(text, self._joined, self._part_chars)
            return
        for part in self._symbol.split(text):
            if part in self._symbols:
                yield part
            elif part:
                yield from cut(part, self._joined, self._part_chars)


def _symbols(pieces: Sequence[proto.Piece]) -> dict[str, int]:
    return {piece.text: index for index, piece in enumerate(pieces) if piece.kind == proto.USER_DEFINED}


def _joined(pieces: Sequence[proto.Piece]) -> frozenset[str]:
    kinds = (proto.NORMAL, proto.USER_DEFINED)
    spellings = (piece.text.replace(SPACE_MARK, " ") for piece in pieces if piece.kind in kinds)
    return frozenset(text[at : at + 2] for text in spellings for at in range(len(text) - 1))


def _part_chars(model: proto.SentencePieceModel) -> int:
    if model.kind != proto.UNIGRAM:
        return _PART_CHARS
    lowest = max((abs(piece.score) for piece in model.pieces), default=0.0)
    return max(16, int(_UNIGRAM_SUM / (lowest + _UNKNOWN_PENALTY + 1)))


def _piece_bytes(piece: proto.Piece) -> bytes:
    if piece.kind == proto.BYTE:
        return bytes([int(piece.text[3:5], 16)])
    if piece.kind in (proto.NORMAL, proto.USER_DEFINED):
        return piece.text.replace(SPACE_MARK, " ").encode()
    return b""
