from __future__ import annotations

import math
import random
import re
import struct

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from cyberslm.errors import TokenizerError
from cyberslm.text import proto
from cyberslm.text.proto import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, read_model, scores_on_grid
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
    trained = train_tokenizer(["ab abc abcd bcd " * 20], TokenizerConfig(vocab_size=290, shrink=True)).tokenizer
    folder = tmp_path_factory.mktemp("model")
    trained.save(folder)
    return (folder / "tokenizer.model").read_bytes()


def test_pieces_read_are_those_that_sentencepiece_reads(model: bytes) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = read_model(model).pieces
    assert [item.text for item in pieces] == [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    assert [item.score for item in pieces] == [processor.get_score(i) for i in range(processor.vocab_size())]
    assert [item.kind for item in pieces[:4]] == [CONTROL, UNKNOWN, CONTROL, CONTROL]
    assert sum(item.kind == BYTE for item in pieces) == 256


FIELDS = st.sampled_from(
    [
        *(field(1, text.encode()) for text in ("", "a", "\u2581b", "x" * 127, "x" * 128, "x" * 300)),
        *(b"\x15" + struct.pack("<f", score) for score in (0.0, -1.5, math.inf)),
        *(field(3, kind) for kind in (0, 1, 6, 127, 128, 1 << 40)),
        *(field(1, b"\xff"), field(2, 7), field(3, b"x"), field(9, 1), b"\x15\x00", b"\x0a\x05a"),
    ]
)


@given(st.one_of(st.lists(FIELDS, max_size=5).map(b"".join), st.binary(max_size=12)))
def test_a_piece_is_read_alike_field_by_field_and_at_once(data: bytes) -> None:
    def read() -> object:
        try:
            return proto._piece(data, 3)
        except TokenizerError as error:
            return str(error)

    at_once = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proto, "_usual_piece", lambda _data: None)
        assert read() == at_once


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (field(2, field(3, 4)), "neither merges"),
        (field(2, field(24, 1)), "suffixes"),
        (field(3, field(4, 1)), "whitespace is removed"),
        (field(3, field(5, 0)), "not marked"),
        (piece("a b"), "holds a space"),
        (piece("a\u00e9"), "not a piece itself"),
        (piece("cb", score=-1.0), "share a score"),
        (piece("\u2581x", kind=USER_DEFINED), "protected symbol holds a space"),
        (field(3, field(3, 1)) + piece("x-", kind=USER_DEFINED), "protected symbols and puts a space"),
        (field(2, field(3, 1)), "not multiples of 1/64|not a piece itself"),
    ],
)
def test_model_that_is_not_exact_is_refused_by_name_and_taken_when_asked(
    model: bytes, extra: bytes, words: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"({words}).*lossless: false"):
        SentencePieceTokenizer.from_proto(model + extra)
    taken = SentencePieceTokenizer.from_proto(model + extra, lossless=False)
    assert re.search(words, "; ".join(taken.losses))
    assert taken.decode(taken.encode("ab")) == "ab"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (field(2, field(35, 0)), "byte fallback"),
        (field(3, field(2, b"charsmap")), "normalised"),
        (field(5, field(2, b"charsmap")), "normalised"),
    ],
)
def test_what_the_library_itself_refuses_is_a_tokenizer_error(model: bytes, extra: bytes, words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        SentencePieceTokenizer.from_proto(model + extra)
    with pytest.raises(TokenizerError, match="refused by SentencePiece"):
        SentencePieceTokenizer.from_proto(model + extra, lossless=False)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (field(2, field(40, 0)), "unk id 0"),
        (field(2, field(41, 1)), "bos id 1"),
        (field(2, field(42, 9_999)), "eos id 9999"),
        (field(2, field(42, 2**64 - 1)), "no <eos>"),
        (field(2, field(43, 2**64 - 2)), "pad id -2"),
        (piece("second", kind=UNKNOWN), "second <unk>"),
        (piece("ab", kind=7), "occurs twice"),
        (piece("odd", kind=7), "unsupported kind 7"),
        (piece("<pad>"), "occurs twice"),
        (piece(""), "empty"),
        (piece("<0xZZ>", kind=BYTE), "256 bytes"),
        (piece("cb", score=float("nan")), "not finite"),
        (field(1, field(1, b"\xff")), "not UTF-8"),
        (field(1, field(1, 7)), "wrong type"),
        (field(1, 7), "is a number"),
        (b"\x0a\xff\xff\xff\xff\x0f", "doesn't fit"),
        (b"\x0a", "bad number"),
        (b"\xff" * 11, "bad number"),
        (b"\x0b", "wire type 3"),
    ],
)
@pytest.mark.parametrize("lossless", [True, False])
def test_damaged_model_is_refused_by_name(model: bytes, extra: bytes, words: str, lossless: bool) -> None:
    with pytest.raises(TokenizerError, match=words):
        SentencePieceTokenizer.from_proto(model + extra, lossless=lossless)


def test_roles_that_a_model_lacks_are_covered_by_others(model: bytes) -> None:
    none = 2**64 - 1
    bare = SentencePieceTokenizer.from_proto(model + field(2, field(43, none) + field(41, none)))
    assert (bare.pad_id, bare.unk_id, bare.bos_id, bare.eos_id, bare.add_bos) == (1, 1, 3, 3, False)
    with pytest.raises(TokenizerError, match="no <bos>"):
        SentencePieceTokenizer.from_proto(model + field(2, field(41, none)), add_bos=True)


def test_tiktoken_ranks_are_told_from_a_damaged_model() -> None:
    with pytest.raises(TokenizerError, match=r"tiktoken ranks.*tokenizer\.json"):
        read_model(b"IQ== 0\nIg== 1\n")


def test_grid_moves_scores_by_less_than_a_hundredth_and_nothing_else(model: bytes) -> None:
    before = read_model(model + piece("cb", score=-3.14159)).pieces
    after = read_model(scores_on_grid(model + piece("cb", score=-3.14159))).pieces
    assert [item[::2] for item in before] == [item[::2] for item in after]
    assert after[-1].score == -3.140625


def test_extra_control_piece_is_accepted_and_never_comes_out_of_text(model: bytes) -> None:
    tokenizer = SentencePieceTokenizer.from_proto(model + piece("<|judge|>", 0.0, CONTROL), add_bos=True)
    judge = tokenizer.vocab_size - 1
    assert judge in tokenizer.control_ids
    assert judge not in tokenizer.encode("<|judge|>")
    assert tokenizer.decode(tokenizer.encode("<|judge|>")) == "<|judge|>"


def test_empty_and_oversized_models_are_refused() -> None:
    with pytest.raises(TokenizerError, match="empty"):
        read_model(b"")
    with pytest.raises(TokenizerError, match="limit is"):
        read_model(bytes(64 * 2**20 + 1))


def test_missing_byte_piece_is_refused(model: bytes) -> None:
    with pytest.raises(TokenizerError, match="256 byte"):
        SentencePieceTokenizer.from_proto(model.replace(b"<0x41>", b"<0xZZ>"))


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
