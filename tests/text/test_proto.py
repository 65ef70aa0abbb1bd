from __future__ import annotations

import random
import struct

import pytest
import sentencepiece

from cyberslm.errors import TokenizerError
from cyberslm.text.proto import BYTE, CONTROL, NORMAL, UNKNOWN, read_pieces
from cyberslm.text.tokenizer import SentencePieceTokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer


def field(number: int, value: bytes | int) -> bytes:
    """One protobuf field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def piece(text: str, score: float = -5000.0, kind: int = NORMAL) -> bytes:
    return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + field(3, kind))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    trained = train_tokenizer(["ab abc abcd bcd " * 20], TokenizerConfig(vocab_size=280, shrink=True)).tokenizer
    folder = tmp_path_factory.mktemp("model")
    trained.save(folder)
    return (folder / "tokenizer.model").read_bytes()


def test_pieces_read_are_those_that_sentencepiece_reads(model: bytes) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = read_pieces(model)
    assert [item.text for item in pieces] == [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    assert [item.score for item in pieces] == [processor.get_score(i) for i in range(processor.vocab_size())]
    assert [item.kind for item in pieces[:4]] == [CONTROL, UNKNOWN, CONTROL, CONTROL]
    assert sum(item.kind == BYTE for item in pieces) == 256


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (field(2, field(3, 1)), "not BPE"),
        (field(2, field(35, 0)), "byte fallback"),
        (field(2, field(24, 1)), "suffixes"),
        (field(2, field(43, 2**64 - 1)), "pad id -1"),
        (field(2, field(41, 1)), "bos id 1"),
        (field(3, field(2, b"charsmap")), "normalised"),
        (field(5, field(2, b"charsmap")), "normalised"),
        (field(3, field(3, 1)), "add_dummy_prefix"),
        (field(3, field(4, 1)), "whitespace is removed"),
        (field(3, field(5, 0)), "not marked"),
        (piece("ab", kind=4), "unsupported kind 4"),
        (piece("second", kind=UNKNOWN), "unsupported kind 2"),
        (piece("<pad>"), "occurs twice"),
        (piece(""), "empty"),
        (piece("a b"), "holds a space"),
        (piece("a\u00e9"), "not a piece itself"),
        (piece("cb", score=float("nan")), "not finite"),
        (piece("cb", score=-1.0), "share a score"),
        (field(1, field(1, b"\xff")), "not UTF-8"),
        (field(1, field(1, 7)), "wrong type"),
        (field(1, 7), "is a number"),
        (b"\x0a\xff\xff\xff\xff\x0f", "doesn't fit"),
        (b"\x0a", "bad number"),
        (b"\xff" * 11, "bad number"),
        (b"\x0b", "wire type 3"),
    ],
)
def test_model_that_is_damaged_or_loses_text_is_refused_by_name(model: bytes, extra: bytes, words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        read_pieces(model + extra)


def test_extra_control_piece_is_accepted_and_never_comes_out_of_text(model: bytes) -> None:
    tokenizer = SentencePieceTokenizer.from_proto(model + piece("<|user|>", 0.0, CONTROL), add_bos=True)
    user = tokenizer.vocab_size - 1
    assert user in tokenizer.control_ids
    assert user not in tokenizer.encode("<|user|>")
    assert tokenizer.decode(tokenizer.encode("<|user|>")) == "<|user|>"


def test_empty_and_oversized_models_are_refused() -> None:
    with pytest.raises(TokenizerError, match="empty"):
        read_pieces(b"")
    with pytest.raises(TokenizerError, match="limit is"):
        read_pieces(bytes(64 * 2**20 + 1))


def test_missing_byte_piece_is_refused(model: bytes) -> None:
    with pytest.raises(TokenizerError, match="256 byte pieces"):
        read_pieces(model.replace(b"<0x41>", b"<0xZZ>"))


def test_truncated_or_flipped_model_is_refused_or_still_exact(model: bytes) -> None:
    rng = random.Random(0)
    damaged = [model[: rng.randrange(1, len(model))] for _ in range(60)]
    for _ in range(300):
        flipped = bytearray(model)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    refused = 0
    for data in damaged:
        try:
            tokenizer = SentencePieceTokenizer.from_proto(data, add_bos=False)
        except TokenizerError:
            refused += 1
            continue
        assert tokenizer.decode(tokenizer.encode("abcd \u2581 abc\n")) == "abcd \u2581 abc\n"
    assert refused > 60
