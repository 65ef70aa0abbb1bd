"""A SentencePiece model file, read and judged before SentencePiece sees it.

The file is one protobuf message (sentencepiece_model.proto): pieces, trainer settings, normaliser settings. It is
walked here with every length checked: a damaged or hostile file ends in a ``TokenizerError``, never in native code.

What a sound file can't do is listed, not raised. ``losses`` are ways in which text doesn't come back as it was.
``gaps`` are reasons why no Hugging Face twin has equal ids: byte-pair merges need distinct scores (but for runs of
spaces) and pieces spelled from single-character pieces; the likeliest path (unigram) needs scores on a grid of 1/64, on
which sums are exact in the fp32 of one library and the fp64 of the other, so that both break ties alike.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cyberslm.errors import TokenizerError
from cyberslm.text.codec import SPACE_MARK

MAX_MODEL_BYTES = 64 * 2**20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BPE, UNIGRAM = 2, 1
GRID = 64
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""Appended to a model file, this field replaces its normaliser's add_dummy_prefix by false."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_SCORE = struct.Struct("<f")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")

Value = int | bytes
Settings = dict[int, Value]


class Piece(NamedTuple):
    """One vocabulary entry; ``kind`` is the SentencePiece type, ``score`` orders merges or is a log-probability."""

    text: str
    score: float
    kind: int


class Roles(NamedTuple):
    """Ids. A file without <pad> pads with <unk>, one without <bos> begins with <eos> if told to add one."""

    pad: int
    unk: int
    bos: int
    eos: int
    has_bos: bool


class SentencePieceModel(NamedTuple):
    """What a model file says; index in ``pieces`` = id."""

    pieces: list[Piece]
    kind: int
    roles: Roles
    dummy_prefix: bool
    losses: tuple[str, ...]
    gaps: tuple[str, ...]


def read_model(proto: bytes) -> SentencePieceModel:
    """Read a model file. Raises TokenizerError when it is damaged or has no <unk> or <eos>."""
    if not proto:
        raise TokenizerError("tokenizer model is empty (0 bytes)")
    if len(proto) > MAX_MODEL_BYTES:
        raise TokenizerError(f"tokenizer model has {len(proto):,} bytes; the limit is {MAX_MODEL_BYTES:,}")
    if _TIKTOKEN.match(proto):
        raise TokenizerError("tokenizer model is a list of tiktoken ranks, not SentencePiece: give its tokenizer.json")
    pieces: list[Piece] = []
    trainer: Settings = {}
    normalizer: Settings = {}
    denormalizer: Settings = {}
    settings = {2: trainer, 3: normalizer, 5: denormalizer}
    for number, value, _ in _fields(proto):
        if number != 1 and number not in settings:
            continue
        if isinstance(value, int):
            raise TokenizerError(f"tokenizer model is damaged: field {number} is a number, not a message")
        if number == 1:
            pieces.append(_piece(value, len(pieces)))
        else:
            settings[number].update(_values(value))
    _check_pieces(pieces)
    kind = trainer.get(3, UNIGRAM)
    dummy_prefix = bool(normalizer.get(3, 1))
    return SentencePieceModel(
        pieces,
        kind if isinstance(kind, int) else 0,
        _roles(pieces, trainer),
        dummy_prefix,
        _losses(pieces, trainer, normalizer, denormalizer),
        _gaps(pieces, kind, dummy_prefix=dummy_prefix),
    )


def scores_on_grid(proto: bytes) -> bytes:
    """The model file with each score rounded to the grid."""
    patched = bytearray(proto)
    for number, value, start in _fields(proto):
        if number != 1 or isinstance(value, int):
            continue
        for inner, score, at in _fields(value):
            if inner == 2 and isinstance(score, bytes) and len(score) == 4:
                rounded = round(struct.unpack("<f", score)[0] * GRID) / GRID
                patched[start + at : start + at + 4] = struct.pack("<f", rounded)
    return bytes(patched)


def _fields(data: bytes) -> Iterator[tuple[int, Value, int]]:
    """Number, value and place of each field of a message; a value's bytes lie wholly inside ``data``."""
    at = 0
    while at < len(data):
        key, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            start = at
            value, at = _varint(data, at)
            yield number, value, start
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif not (size := _FIXED.get(wire, 0)):
            raise TokenizerError(f"tokenizer model is damaged: unknown wire type {wire} at byte {at}")
        if number == 0 or size > len(data) - at:
            raise TokenizerError(f"tokenizer model is damaged: field {number} of {size} bytes at byte {at} doesn't fit")
        yield number, data[at : at + size], at
        at += size


def _values(data: bytes) -> Settings:
    return {number: value for number, value, _ in _fields(data)}


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
    """A piece, in whatever order its fields come; text, score and kind at once where they come as they are written."""
    if (usual := _usual_piece(data)) is not None:
        return usual
    values = _values(data)
    text, score, kind = values.get(1, b""), values.get(2, bytes(4)), values.get(3, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or not isinstance(kind, int):
        raise TokenizerError(f"tokenizer model is damaged: piece {index} has a field of the wrong type")
    try:
        return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)
    except UnicodeDecodeError:
        raise TokenizerError(f"tokenizer model is damaged: piece {index} is not UTF-8") from None


def _usual_piece(data: bytes) -> Piece | None:
    """Text of up to 127 bytes, score and perhaps a kind, in this order and nothing else: tags 0x0A, 0x15 and 0x18."""
    if len(data) < 7 or data[0] != 0x0A:
        return None
    end = 2 + data[1]
    kind, rest = NORMAL, len(data) - end
    if rest == 7 and data[end + 5] == 0x18:
        kind = data[end + 6]
    elif rest != 5:
        return None
    if data[1] > 0x7F or kind > 0x7F or data[end] != 0x15:
        return None
    try:
        return Piece(data[2:end].decode("utf-8"), _SCORE.unpack_from(data, end + 1)[0], kind)
    except UnicodeDecodeError:
        return None


def _check_pieces(pieces: list[Piece]) -> None:
    if len({piece.text for piece in pieces}) != len(pieces) or any(not piece.text for piece in pieces):
        raise TokenizerError("tokenizer model is damaged: a piece is empty or occurs twice")
    for index, piece in enumerate(pieces):
        if piece.kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE):
            raise TokenizerError(f"tokenizer model: piece {index} {piece.text!r} is of unsupported kind {piece.kind}")
        if not math.isfinite(piece.score):
            raise TokenizerError(f"tokenizer model is damaged: the score of piece {index} is not finite")
        if piece.kind == BYTE and piece.text not in _BYTE_PIECES:
            raise TokenizerError(
                f"tokenizer model is damaged: piece {index} {piece.text!r} is not one of the 256 bytes"
            )


def _roles(pieces: list[Piece], trainer: Settings) -> Roles:
    unk = _role(pieces, trainer, 40, default=0, kind=UNKNOWN, name="unk")
    bos = _role(pieces, trainer, 41, default=1, kind=CONTROL, name="bos")
    eos = _role(pieces, trainer, 42, default=2, kind=CONTROL, name="eos")
    pad = _role(pieces, trainer, 43, default=-1, kind=CONTROL, name="pad")
    if unk is None or eos is None:
        raise TokenizerError(f"tokenizer model has no {'<unk>' if unk is None else '<eos>'}; one is needed")
    others = [index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN and index != unk]
    if others:
        raise TokenizerError(f"tokenizer model: piece {others[0]} is a second <unk>")
    return Roles(unk if pad is None else pad, unk, eos if bos is None else bos, eos, bos is not None)


def _role(pieces: list[Piece], trainer: Settings, field: int, *, default: int, kind: int, name: str) -> int | None:
    value = trainer.get(field, default)
    index = value - 2**64 if isinstance(value, int) and value >= 2**63 else value
    if index == -1:
        return None
    if not isinstance(index, int) or not 0 <= index < len(pieces) or pieces[index].kind != kind:
        raise TokenizerError(f"tokenizer model has {name} id {index!r:.20}, which is not a piece of the kind it needs")
    return index


def _losses(pieces: list[Piece], trainer: Settings, normalizer: Settings, denormalizer: Settings) -> tuple[str, ...]:
    """Field numbers and defaults are those of sentencepiece_model.proto."""
    spaced = [piece.text for piece in pieces if piece.kind in (NORMAL, USER_DEFINED) and " " in piece.text]
    faults = {
        "it has neither merges (BPE) nor likelihoods (unigram)": trainer.get(3, UNIGRAM) not in (BPE, UNIGRAM),
        "byte fallback is off, so that unknown characters are lost": not trainer.get(35, 0),
        "it doesn't hold each of the 256 byte pieces": sum(piece.kind == BYTE for piece in pieces) != 256,
        "spaces are suffixes": bool(trainer.get(24, 0)),
        "text is normalised": bool(normalizer.get(2) or denormalizer.get(2)),
        "extra whitespace is removed": bool(normalizer.get(4, 1)),
        "spaces are not marked": not normalizer.get(5, 1),
        f"a piece holds a space, not its mark {SPACE_MARK!r}": bool(spaced),
    }
    return tuple(fault for fault, present in faults.items() if present)


def _gaps(pieces: list[Piece], kind: Value, *, dummy_prefix: bool) -> tuple[str, ...]:
    """Each rule removes one way in which SentencePiece and its twin could disagree."""
    normal = [piece for piece in pieces if piece.kind == NORMAL]
    letters = {piece.text for piece in normal if len(piece.text) == 1}
    symbols = [piece.text for piece in pieces if piece.kind == USER_DEFINED]
    unspelled = next((piece.text for piece in normal if not letters.issuperset(piece.text)), None)
    faults = {
        f"a character of piece {unspelled!r} is not a piece itself": unspelled is not None,
        "a protected symbol holds a space": any(SPACE_MARK in symbol for symbol in symbols),
        "it has protected symbols and puts a space before each text": bool(symbols) and dummy_prefix,
    }
    if kind == BPE:
        faults["two pieces share a score"] = _ambiguous(normal)
    else:
        fixed = {piece.text for piece in pieces if piece.kind in (UNKNOWN, CONTROL, BYTE)}
        faults["scores are not multiples of 1/64"] = any((piece.score * GRID) % 1 for piece in normal)
        faults["a score is beyond 4,096"] = any(abs(piece.score) > 1 << 12 for piece in normal)
        faults["a character of a control piece is not a piece itself"] = not letters.issuperset("".join(fixed))
    return tuple(fault for fault, present in faults.items() if present)


def _ambiguous(normal: list[Piece]) -> bool:
    """Whether pieces that share a score are anything but runs of the space mark, for which the twin has a rule."""
    of_score: dict[float, list[str]] = {}
    for piece in normal:
        if len(piece.text) > 1:
            of_score.setdefault(piece.score, []).append(piece.text)
    return any(len(texts) > 1 and set("".join(texts)) != {SPACE_MARK} for texts in of_score.values())
