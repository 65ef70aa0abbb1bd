"""A SentencePiece model file, read and judged before SentencePiece sees it.

The file is one protobuf message (sentencepiece_model.proto): pieces, trainer settings, normaliser settings. It is
walked here with every length checked: a damaged or hostile file ends in a ``TokenizerError``, never in native code.

Accepted is what encodes without loss and has a Hugging Face twin with equal ids: byte-pair merges with distinct scores,
byte fallback, identity normalisation, every piece spelled from single-character pieces, control ids 0 to 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cyberslm.errors import TokenizerError
from cyberslm.text.codec import SPACE_MARK

MAX_MODEL_BYTES = 64 * 2**20
PAD, UNK, BOS, EOS = range(4)
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))

Value = int | bytes


class Piece(NamedTuple):
    """One vocabulary entry; ``kind`` is the SentencePiece type, ``score`` orders the merges, highest first."""

    text: str
    score: float
    kind: int


def read_pieces(proto: bytes) -> list[Piece]:
    """The vocabulary of a model file, index = id.

    Raises TokenizerError when the file is damaged or isn't a lossless BPE model with this package's control ids.
    """
    if not proto:
        raise TokenizerError("tokenizer model is empty (0 bytes)")
    if len(proto) > MAX_MODEL_BYTES:
        raise TokenizerError(f"tokenizer model has {len(proto):,} bytes; the limit is {MAX_MODEL_BYTES:,}")
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    denormalizer: dict[int, Value] = {}
    settings = {2: trainer, 3: normalizer, 5: denormalizer}
    for number, value in _fields(proto):
        if number != 1 and number not in settings:
            continue
        if isinstance(value, int):
            raise TokenizerError(f"tokenizer model is damaged: field {number} is a number, not a message")
        if number == 1:
            pieces.append(_piece(value, len(pieces)))
        else:
            settings[number].update(_fields(value))
    _check_settings(trainer, normalizer, denormalizer)
    _check_roles(pieces, trainer)
    _check_spelling(pieces)
    return pieces


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message; a value's bytes lie wholly inside ``data``."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif not size:
            raise TokenizerError(f"tokenizer model is damaged: unknown wire type {wire} at byte {at}")
        if number == 0 or size > len(data) - at:
            raise TokenizerError(f"tokenizer model is damaged: field {number} of {size} bytes at byte {at} doesn't fit")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise TokenizerError(f"tokenizer model is damaged: bad number at byte {at}")


def _piece(data: bytes, index: int) -> Piece:
    values = dict(_fields(data))
    text, score, kind = values.get(1, b""), values.get(2, bytes(4)), values.get(3, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise TokenizerError(f"tokenizer model is damaged: piece {index} has a field of the wrong type")
    try:
        return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)
    except UnicodeDecodeError:
        raise TokenizerError(f"tokenizer model is damaged: piece {index} is not UTF-8") from None


def _check_settings(trainer: dict[int, Value], normalizer: dict[int, Value], denormalizer: dict[int, Value]) -> None:
    """Field numbers and defaults are those of sentencepiece_model.proto."""
    faults = {
        "model type is not BPE": trainer.get(3, 1) != _BPE,
        "byte fallback is off": not trainer.get(35, 0),
        "spaces are suffixes": bool(trainer.get(24, 0)),
        "text is normalised": bool(normalizer.get(2) or denormalizer.get(2)),
        "a space is put before the text (add_dummy_prefix)": bool(normalizer.get(3, 1)),
        "extra whitespace is removed": bool(normalizer.get(4, 1)),
        "spaces are not marked": not normalizer.get(5, 1),
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise TokenizerError(f"tokenizer model doesn't keep text exactly: {'; '.join(found)}; train one with cyberslm")


def _check_roles(pieces: list[Piece], trainer: dict[int, Value]) -> None:
    roles = (("pad", CONTROL, 43, -1), ("unk", UNKNOWN, 40, 0), ("bos", CONTROL, 41, 1), ("eos", CONTROL, 42, 2))
    for index, (name, kind, field, default) in enumerate(roles):
        declared = trainer.get(field, default)
        if declared != index:
            raise TokenizerError(f"tokenizer model has {name} id {_signed(declared)!r}; it must be {index}")
        if index >= len(pieces) or pieces[index].kind != kind:
            raise TokenizerError(f"tokenizer model: piece {index} is not of the kind that {name} needs")
    for index, piece in enumerate(pieces):
        if piece.kind not in (NORMAL, CONTROL, BYTE) and index != UNK:
            raise TokenizerError(f"tokenizer model: piece {index} {piece.text!r} is of unsupported kind {piece.kind}")


def _signed(value: Value) -> Value:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _check_spelling(pieces: list[Piece]) -> None:
    """Each rule removes one way in which SentencePiece and a merge list could disagree."""
    seen = {piece.text for piece in pieces}
    if len(seen) != len(pieces) or "" in seen:
        raise TokenizerError("tokenizer model is damaged: a piece is empty or occurs twice")
    if sorted(piece.text for piece in pieces if piece.kind == BYTE) != sorted(_BYTE_PIECES):
        raise TokenizerError("tokenizer model doesn't hold each of the 256 byte pieces once")
    normal = [piece for piece in pieces if piece.kind == NORMAL]
    letters = {piece.text for piece in normal if len(piece.text) == 1}
    scores = [piece.score for piece in normal if len(piece.text) > 1]
    for piece in normal:
        if " " in piece.text:
            raise TokenizerError(f"tokenizer model: piece {piece.text!r} holds a space, not its mark {SPACE_MARK!r}")
        if not letters.issuperset(piece.text):
            raise TokenizerError(f"tokenizer model: a character of piece {piece.text!r} is not a piece itself")
    if len(set(scores)) != len(scores) or not all(map(math.isfinite, scores)):
        raise TokenizerError("tokenizer model: two pieces share a score or a score is not finite")
