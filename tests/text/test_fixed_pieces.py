"""Control markers, protected symbols, digits and both kinds of model: exact, and equal in transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strings import assert_equal, varied

from cyberslm.errors import ConfigError
from cyberslm.text.config import CHAT_MARKERS, ROLES, SECURITY_SYMBOLS, TokenizerConfig
from cyberslm.text.tokenizer import SentencePieceTokenizer
from cyberslm.text.train import train_tokenizer

SHORT = ("1.", "12", "CVE-2", "<|", "|>")
SYMBOLS = SECURITY_SYMBOLS + SHORT
ALPHABET = [
    *CHAT_MARKERS,
    *ROLES,
    *SYMBOLS,
    "<0x41>",
    "CVE",
    "-",
    "2021",
    " ",
    "  ",
    "x",
    "\n",
    "\u2581",
    "\ufdd0",
    "\u65e5",
]
KINDS = [(kind, digits) for kind in ("bpe", "unigram") for digits in ("single", "triple", "free")]

mixtures = st.lists(st.sampled_from(ALPHABET) | st.text(max_size=3), max_size=24).map("".join)


def security(documents: list[str]) -> list[str]:
    return [*documents[:60], "see CVE-2021-44228 at hxxp://a[.]b, HKLM\\Run, 10.20.30.40 and 1234567890\n" * 40]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def made(request: pytest.FixtureRequest, documents: list[str]) -> SentencePieceTokenizer:
    kind, digits = request.param
    config = TokenizerConfig(model_type=kind, digits=digits, vocab_size=1200, protected=SYMBOLS)
    return train_tokenizer(security(documents), config).tokenizer


def strings(count: int) -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 25))) for _ in range(count)]


def test_markers_and_symbols_have_the_ids_after_eos(made: SentencePieceTokenizer) -> None:
    fixed = [*ROLES, *CHAT_MARKERS, *SYMBOLS]
    assert [made.piece(i) for i in range(len(fixed) + 1)] == [*fixed, "<0x00>"]
    assert made.control_ids == set(range(len(ROLES) + len(CHAT_MARKERS)))
    assert made.token_bytes(len(fixed) - len(SHORT)) == b"1."


@given(mixtures)
@settings(deadline=None, max_examples=100)
def test_every_text_comes_back_at_once_and_streamed(made: SentencePieceTokenizer, text: str) -> None:
    ids = made.encode(text)
    stream = made.stream_decoder()
    assert made.decode(ids) == "".join(map(stream.push, ids)) + stream.finish() == text


@pytest.mark.parametrize("marker", [*ROLES, *CHAT_MARKERS])
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_no_text_that_spells_a_control_piece_becomes_one(
    made: SentencePieceTokenizer, marker: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(marker)))
    between = data.draw(st.sampled_from(["", "\u200b", " ", "\ufeff"]))
    spelled = data.draw(st.sampled_from([marker, marker.upper(), marker[:at] + between + marker[at:]]))
    text = data.draw(mixtures) + spelled + data.draw(mixtures)
    assert made.control_ids.isdisjoint(made.encode(text, add_special_tokens=False))
    split = made.encode_documents([text[: len(text) // 2], text[len(text) // 2 :]])
    assert all(made.control_ids.isdisjoint(ids[1:-1].tolist()) for ids in split)


@given(mixtures, mixtures)
@settings(deadline=None, max_examples=50)
def test_protected_symbol_is_one_token_wherever_it_stands(
    made: SentencePieceTokenizer, before: str, after: str
) -> None:
    text = f"{before}\nGHSA-\n{after}"
    spelled = [made.piece(i) for i in made.encode(text)]
    assert spelled.count("GHSA-") == text.count("GHSA-")


def test_ids_and_text_are_those_of_transformers(
    made: SentencePieceTokenizer, documents: list[str], awkward: list[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    made.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(made, theirs, [*awkward, *varied(documents, 500), *strings(500), "".join(documents)[:100_000]])


def test_unigram_is_the_likeliest_path(documents: list[str]) -> None:
    """Slow truth: the best sum of scores over all ways to spell a text, the first found where two are equal."""
    tokenizer = train_tokenizer(documents[:60], TokenizerConfig(model_type="unigram", vocab_size=900)).tokenizer
    scores = {piece.text: piece.score for piece in tokenizer._read.pieces if piece.kind == 1}
    for text in ["the quick brown fox", "aaaa bbbb", "x = getattr(self, name)", *documents[5][:400].split("\n")]:
        marked = text.replace(" ", "\u2581")
        best: list[tuple[float, list[str]]] = [(0.0, [])]
        for end in range(1, len(marked) + 1):
            ways = [(best[at][0] + scores[marked[at:end]], at) for at in range(end) if marked[at:end] in scores]
            score, at = max(ways, key=lambda way: (way[0], -way[1]))
            best.append((score, [*best[at][1], marked[at:end]]))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.piece(i) for i in ids] == best[-1][1]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_same_documents_give_the_same_model(documents: list[str], kind: str) -> None:
    config = TokenizerConfig(model_type=kind, vocab_size=800, protected=("CVE-",), digits="triple")
    first, second = (train_tokenizer(security(documents), config).tokenizer for _ in range(2))
    assert first.sha256 == second.sha256


@pytest.mark.parametrize(("digits", "most"), [("single", 1), ("triple", 3), ("free", 10)])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_no_token_has_more_digits_than_asked(kind: str, digits: str, most: int) -> None:
    text = "".join(f"port 443 and 44344 or 1-442 id7 v12.5 1234567890 {n}\n" for n in range(1000, 1200))
    config = TokenizerConfig(model_type=kind, digits=digits, vocab_size=700, shrink=True)
    tokenizer = train_tokenizer([text], config).tokenizer
    learned = [tokenizer.piece(i) for i in range(266, tokenizer.vocab_size)]
    found = max(sum(map(str.isdigit, piece)) for piece in learned)
    assert found <= most
    assert kind == "unigram" or digits == "free" or found == most
    assert digits == "free" or not any(any(map(str.isdigit, p)) and not p.strip("\u2581").isdigit() for p in learned)


def test_without_markers_and_symbols_the_pieces_are_only_moved(documents: list[str]) -> None:
    plain = train_tokenizer(documents, TokenizerConfig(vocab_size=800, control_pieces=())).tokenizer
    chat = train_tokenizer(documents, TokenizerConfig(vocab_size=806)).tokenizer
    assert [plain.piece(i) for i in range(4, 800)] == [chat.piece(i) for i in range(10, 806)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"control_pieces": ("<a>", "<a>")}, "control_pieces: '<a>' is there twice"),
        ({"control_pieces": ("<eos>",)}, "control_pieces: '<eos>' is there twice or already"),
        ({"protected": ("<|user|>",)}, "protected: .* already a control piece"),
        ({"protected": ("",)}, "protected: '' has 0 characters"),
        ({"protected": ("x" * 65,)}, "has 65 characters, outside 1 to 64"),
        ({"protected": ("a b",)}, "holds white space"),
        ({"protected": ("a\u2581",)}, "holds white space or a character"),
        ({"protected": ("<0x41>",)}, "holds white space or a character"),
        ({"protected": ("\ud800",)}, "holds white space or a character"),
        ({"protected": tuple(map(str, range(1001)))}, "1,001 entries; the limit is 1,000"),
        ({"vocab_size": 265}, "vocab_size: 265 is outside 266"),
        ({"vocab_size": 270, "protected": tuple("abcde")}, "vocab_size: 270 is outside 271"),
    ],
)
def test_unfit_symbols_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TokenizerConfig(**changes)


def test_symbols_with_commas_quotes_and_backslashes_are_kept(tmp_path: Path) -> None:
    symbols = ("a,b", 'c"d', "\\\\srv\\", "'", ",")
    config = TokenizerConfig(vocab_size=600, shrink=True, protected=symbols, control_pieces=("<,>", '<">'))
    tokenizer = train_tokenizer(["text a,b and more 'text'\n" * 40], config).tokenizer
    assert [tokenizer.piece(i) for i in range(4, 11)] == ["<,>", '<">', *symbols]
    for symbol in symbols:
        assert tokenizer.encode(symbol, add_special_tokens=False) == [6 + symbols.index(symbol)]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabulary_that_does_not_suit_the_text_names_one_that_does(kind: str) -> None:
    text = ["some text of words and words\n" * 20]
    config = {"model_type": kind, "protected": ("CVE-",)}
    with pytest.raises(ConfigError, match=r"largest workable size is \d+") as caught:
        train_tokenizer(text, TokenizerConfig(vocab_size=5_000, **config))
    largest = int(str(caught.value).split("workable size is ")[1].split(";")[0])
    assert train_tokenizer(text, TokenizerConfig(vocab_size=5_000, shrink=True, **config)).report.vocab_size == largest
    with pytest.raises(ConfigError, match=r"too small.*11 fixed pieces, 256 bytes.*at least \d+") as caught:
        train_tokenizer(text, TokenizerConfig(vocab_size=268, **config))
    smallest = int(str(caught.value).split("at least ")[1].split(";")[0])
    assert train_tokenizer(text, TokenizerConfig(vocab_size=smallest, **config)).report.vocab_size == smallest
