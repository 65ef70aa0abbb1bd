from __future__ import annotations

import random

import pytest

from cyberslm.errors import ConfigError, DataError, TokenizerError
from cyberslm.text.tokenizer import SentencePieceTokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer


def vocabulary(tokenizer: SentencePieceTokenizer) -> list[str]:
    return [tokenizer.piece(i) for i in range(266, tokenizer.vocab_size)]


def test_same_documents_give_the_same_model(documents: list[str], tokenizer: SentencePieceTokenizer) -> None:
    again = train_tokenizer(iter(documents), TokenizerConfig(vocab_size=2000, add_bos=False)).tokenizer
    assert again.sha256 == tokenizer.sha256


def test_report_accounts_for_every_byte(documents: list[str]) -> None:
    tokenizer, report = train_tokenizer(documents, TokenizerConfig(vocab_size=600))
    size = sum(len(document.encode()) for document in documents)
    assert (report.documents, report.bytes, report.bytes_used) == (len(documents), size, size)
    assert (report.reserved, report.mended, report.vocab_size) == (0, 0, 600)
    assert report.vocab_size == tokenizer.vocab_size
    tokens = sum(len(ids) - 2 for ids in tokenizer.encode_documents(documents))
    assert report.bytes_per_token == pytest.approx(size / tokens, rel=0.01)


def test_newlines_tabs_and_runs_of_spaces_become_pieces(documents: list[str]) -> None:
    pieces = vocabulary(train_tokenizer(documents, TokenizerConfig(vocab_size=2000)).tokenizer)
    assert {"\n\n", "\t\t", "\u2581" * 4, "\u2581the"} <= set(pieces)


def test_digits_stand_alone_unless_told_otherwise() -> None:
    documents = ["port 443 and 4434 or 44344\n" * 50]
    apart = train_tokenizer(documents, TokenizerConfig(vocab_size=400, shrink=True)).tokenizer
    joined = train_tokenizer(documents, TokenizerConfig(vocab_size=400, shrink=True, digits="free")).tokenizer
    assert "443" in vocabulary(joined)
    assert not any(len(piece) > 1 and any(map(str.isdigit, piece)) for piece in vocabulary(apart))


def test_newlines_at_the_ends_of_documents_are_learned() -> None:
    """The trainer strips newlines at the end of what it is given, so line-shaped corpora had no newline piece."""
    tokenizer = train_tokenizer(["{abc}\r\n"] * 20, TokenizerConfig(vocab_size=300, shrink=True)).tokenizer
    assert {"\r", "\n", "}\r\n"} <= set(vocabulary(tokenizer))


def test_long_documents_are_not_dropped() -> None:
    """The trainer skips sentences over its limit: ten 20 kB lines must teach what they hold."""
    rng = random.Random(0)
    long = [" ".join(rng.choice(["needle", "haystack"]) for _ in range(2_500)) for _ in range(10)]
    tokenizer, report = train_tokenizer([*long, *["short text"] * 10], TokenizerConfig(vocab_size=400, shrink=True))
    assert report.bytes_used == sum(map(len, long)) + 100
    assert {"\u2581needle", "\u2581haystack"} <= set(vocabulary(tokenizer))


@pytest.mark.parametrize("long", ["x" * 5_000, "\u65e5" * 5_000, "\U0001f600" * 5_000, "\n" * 5_000, " " * 5_000])
def test_text_without_borders_is_used_whole(long: str) -> None:
    tokenizer, report = train_tokenizer([long], TokenizerConfig(vocab_size=1000, shrink=True))
    assert report.bytes_used == len(long.encode())
    assert tokenizer.encode(long[:1], add_special_tokens=False)[0] >= 266


@pytest.mark.parametrize("reserved", ["\0", "\u2585"])
def test_reserved_characters_cost_nothing_around_them(reserved: str) -> None:
    document = f"before{reserved}after{reserved}" * 10
    tokenizer, report = train_tokenizer([document], TokenizerConfig(vocab_size=400, shrink=True))
    assert report.reserved == 20
    assert {"before", "after"} <= set(vocabulary(tokenizer))
    assert tokenizer.decode(tokenizer.encode(document)) == document


def test_control_and_byte_spellings_in_the_text_do_no_harm() -> None:
    document = "<pad> <eos> <0x0A> <unk> text with markers <eos>\n" * 40
    tokenizer = train_tokenizer([document], TokenizerConfig(vocab_size=400, shrink=True)).tokenizer
    assert tokenizer.decode(tokenizer.encode(document)) == document
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(document, add_special_tokens=False))


def test_space_marks_and_surrogates_in_the_text_are_learned_as_what_they_are() -> None:
    tokenizer, report = train_tokenizer(["\u2581 \ufdd0 a\ud800" * 20], TokenizerConfig(vocab_size=400, shrink=True))
    assert report.mended == 20
    assert tokenizer.decode(tokenizer.encode("\u2581 \ufdd0 ")) == "\u2581 \ufdd0 "


def test_sample_is_within_the_limit_and_spread_evenly() -> None:
    """Each tenth of the stream has its own word; a tenth of the bytes must still hold them all."""
    documents = [f"{'abcdefghij'[at // 100] * 5} " * 20 for at in range(1_000)]
    config = TokenizerConfig(vocab_size=400, shrink=True, max_train_bytes=12_000)
    tokenizer, report = train_tokenizer(documents, config)
    assert report.bytes == 120_000
    assert 12_000 - 120 < report.bytes_used <= 12_000
    assert {f"\u2581{letter * 5}" for letter in "abcdefghij"} <= set(vocabulary(tokenizer))


@pytest.mark.parametrize("documents", [["ab"], ["word and word\n"] * 20, ["x" * 5_000]])
@pytest.mark.parametrize("vocab_size", [400, 32_000])
def test_vocabulary_too_large_names_the_largest_that_works(documents: list[str], vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size: .*largest workable size is \d+.*shrink") as caught:
        train_tokenizer(documents, TokenizerConfig(vocab_size=vocab_size))
    largest = int(str(caught.value).split("largest workable size is ")[1].split(";")[0])
    shrunk = train_tokenizer(documents, TokenizerConfig(vocab_size=vocab_size, shrink=True))
    assert train_tokenizer(documents, TokenizerConfig(vocab_size=largest)).report.vocab_size == largest
    assert shrunk.report.vocab_size == largest


def test_vocabulary_too_small_for_the_characters_names_the_smallest(documents: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size: 275 is too small.*at least \d+") as caught:
        train_tokenizer(documents, TokenizerConfig(vocab_size=275, shrink=True))
    smallest = int(str(caught.value).split("at least ")[1].split(";")[0])
    assert train_tokenizer(documents, TokenizerConfig(vocab_size=smallest)).report.vocab_size == smallest


@pytest.mark.parametrize("documents", [[], [""], ["", "\0\0", "\u2585"]])
def test_no_text_is_its_own_error(documents: list[str]) -> None:
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(documents, TokenizerConfig())


def test_bytes_are_not_a_document() -> None:
    with pytest.raises(TokenizerError, match="bytes"):
        train_tokenizer([b"abc"], TokenizerConfig())  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 5),
        ("vocab_size", 2_000_000),
        ("character_coverage", 0.5),
        ("character_coverage", 1.1),
        ("character_coverage", float("nan")),
        ("max_piece_length", 0),
        ("max_piece_length", 513),
        ("max_train_bytes", 0),
        ("path", ""),
    ],
)
def test_setting_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: "):
        TokenizerConfig(**{name: value})  # type: ignore[arg-type]


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(["some text\n" * 20], TokenizerConfig(vocab_size=400, shrink=True))
    assert capfd.readouterr() == ("", "")
