from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from strings import ALPHABETS, assert_equal, varied

from cyberslm.text.config import CHAT_MARKERS
from cyberslm.text.tokenizer import load_tokenizer
from cyberslm.text.train import TokenizerConfig, train_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def folder(request: pytest.FixtureRequest, documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    train_tokenizer(documents, TokenizerConfig(vocab_size=2000, add_bos=request.param)).tokenizer.save(folder)
    return folder


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
    markers = theirs.convert_tokens_to_ids(list(CHAT_MARKERS))
    assert markers == list(range(4, 4 + len(CHAT_MARKERS)))
    turn = [ours.bos_id, markers[1], *ours.encode("hi there", add_special_tokens=False), markers[-1]]
    assert theirs.decode(turn, skip_special_tokens=True) == ours.decode(turn) == "hi there"
    assert theirs("a", "b")["input_ids"] == ours.encode("a") + ours.encode("b")


def test_twin_saved_by_transformers_stays_equal(
    folder: Path, documents: list[str], awkward: list[str], tmp_path: Path
) -> None:
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(load_tokenizer(folder), again, awkward + varied(documents, 200))


@pytest.mark.parametrize("digits", ["single", "free"])
def test_low_entropy_text_has_the_same_merges(tmp_path: Path, digits: str) -> None:
    """Where one piece has two splits, SentencePiece takes the leftmost pair and a merge list the first split listed."""
    rng = random.Random(1)
    runs = ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 80))) for _ in range(2_500)]
    config = TokenizerConfig(vocab_size=900, shrink=True, digits=digits)
    ours = train_tokenizer(runs[:500], config).tokenizer
    ours.save(tmp_path)
    assert_equal(ours, transformers.AutoTokenizer.from_pretrained(tmp_path), runs[500:])


def test_megabyte_of_text_has_the_same_ids(folder: Path, documents: list[str]) -> None:
    text = "".join(documents) * 2
    assert len(text) > 1_000_000
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == load_tokenizer(folder).encode(text)
