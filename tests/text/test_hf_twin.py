from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cyberslm.text.tokenizer import SentencePieceTokenizer, load_tokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

transformers = pytest.importorskip("transformers")
ALPHABETS = [" ", "0", "A", "-", "ab", "01", "a ", " \n\t", "aab", "=-", "/\\", "abc", "0123456789abcdef", "<eos>"]


def varied(documents: list[str], count: int) -> list[str]:
    """Deterministic strings of text, code, hex, base64-like runs, URLs, emoji, CJK and control spellings."""
    rng = random.Random(0)
    text = "".join(documents)
    strings: list[str] = []
    while len(strings) < count:
        at = rng.randrange(len(text) - 200)
        alphabet = rng.choice([*ALPHABETS, "\u65e5\u672c\u8a9e ", "\U0001f600\U0001f44d\u200d", "\u2581\ufdd001 "])
        strings += [
            text[at : at + rng.randint(1, 200)],
            "".join(rng.choices(alphabet, k=rng.randint(1, 60))),
            f"https://host.example/{rng.randbytes(6).hex()}?q=%20a&b={rng.randint(0, 10**9)} ",
            f"  {rng.randbytes(12).hex(' ')}  |{rng.choice(['<eos>', '<pad>', '<s>'])}|\r\n",
        ]
    return strings


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def folder(request: pytest.FixtureRequest, documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    train_tokenizer(documents, TokenizerConfig(vocab_size=2000, add_bos=request.param)).tokenizer.save(folder)
    return folder


def assert_equal(ours: SentencePieceTokenizer, theirs: object, strings: list[str]) -> None:
    encoded = theirs(strings)["input_ids"]  # type: ignore[operator]
    bare = theirs(strings, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    for text, with_special, without in zip(strings, encoded, bare, strict=True):
        assert with_special == ours.encode(text), ascii(text)
        assert without == ours.encode(text, add_special_tokens=False), ascii(text)
        assert theirs.decode(with_special, skip_special_tokens=True) == text  # type: ignore[attr-defined]
        assert ours.decode(with_special) == text


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3"])
def test_auto_tokenizer_gives_the_same_ids_and_text(
    folder: Path, documents: list[str], awkward: list[str], tmp_path: Path, model_type: str | None
) -> None:
    ours = load_tokenizer(folder)
    ours.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(ours, theirs, awkward + varied(documents, 1_000 if model_type is None else 100))
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2, 3)
    assert theirs.vocab_size == ours.vocab_size
    assert theirs("a", "b")["input_ids"] == ours.encode("a") + ours.encode("b")


def test_twin_saved_by_transformers_stays_equal(
    folder: Path, documents: list[str], awkward: list[str], tmp_path: Path
) -> None:
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(load_tokenizer(folder), again, awkward + varied(documents, 200))


@pytest.mark.parametrize("split_digits", [True, False])
def test_low_entropy_text_has_the_same_merges(tmp_path: Path, split_digits: bool) -> None:
    """Where one piece has two splits, SentencePiece takes the leftmost pair and a merge list the first split listed."""
    rng = random.Random(1)
    runs = ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 80))) for _ in range(2_500)]
    config = TokenizerConfig(vocab_size=900, shrink=True, split_digits=split_digits)
    ours = train_tokenizer(runs[:500], config).tokenizer
    ours.save(tmp_path)
    assert_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), runs[500:])


def test_megabyte_of_text_has_the_same_ids(folder: Path, documents: list[str]) -> None:
    text = "".join(documents) * 2
    assert len(text) > 1_000_000
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == load_tokenizer(folder).encode(text)
