from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import TokenizerError
from cyberslm.text.config import TokenizerConfig
from cyberslm.text.extend import extended
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer
from cyberslm.text.train import train_tokenizer

TEXTS = [f"The server {n} at 10.0.0.{n} answered with code {n * 7}, and the log said so twice.\n" for n in range(200)]
TOKENS = ("CVE-", "Mimikatz", "naïve☃")


def trained(kind: str) -> Tokenizer:
    return train_tokenizer(TEXTS, TokenizerConfig(vocab_size=420, model_type=kind, shrink=True)).tokenizer


@pytest.fixture(scope="module", params=["bpe", "unigram", "json"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer and its extension."""
    own = trained("bpe" if request.param == "json" else request.param)
    if request.param == "json":
        folder = tmp_path_factory.mktemp("twin")
        own.save(folder)
        own = HuggingFaceTokenizer.from_file(folder / "tokenizer.json")
    return own, extended(own, TOKENS)


def test_new_tokens_follow_the_old_ones_which_stay(pair: tuple[Tokenizer, Tokenizer]) -> None:
    old, new = pair
    assert new.vocab_size == old.vocab_size + 3
    assert [new.piece(i) for i in range(old.vocab_size)] == [old.piece(i) for i in range(old.vocab_size)]
    assert new.control_ids == old.control_ids
    assert new.add_bos == old.add_bos
    assert [new.encode(token, add_special_tokens=False) for token in TOKENS] == [
        [old.vocab_size],
        [old.vocab_size + 1],
        [old.vocab_size + 2],
    ]
    ids = new.encode("xCVE-1Mimikatz", add_special_tokens=False)
    assert {old.vocab_size, old.vocab_size + 1} <= set(ids)


@settings(deadline=None, max_examples=60)
@given(
    text=st.lists(
        st.sampled_from(["CVE-", "CVE", "Mimi", "Mimikatz", "naïve☃", " ", "\n", "the", "<eos>", "▁", "\ufdd0", "é"])
    ).map("".join)
)
def test_text_comes_back_exactly(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    assert pair[1].decode(pair[1].encode(text)) == text


def test_text_without_new_tokens_has_the_ids_that_it_had(pair: tuple[Tokenizer, Tokenizer]) -> None:
    for text in TEXTS[:20]:
        assert pair[1].encode(text) == pair[0].encode(text)


def test_saved_extension_comes_back_and_opens_in_transformers(
    pair: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    new = pair[1]
    new.save(tmp_path)
    assert load_tokenizer(tmp_path).sha256 == new.sha256
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS[:5], "CVE-2024-1 Mimikatz, naïve☃ x CVE-CVE-", " CVE-"]:
        assert theirs.encode(text) == new.encode(text)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] == new.add_bos


@pytest.mark.parametrize(
    ("token", "message"),
    [("a b", "holds white space"), ("", "it is empty"), ("▁x", "a reserved character"), ("e", "is one token already")],
)
def test_tokens_that_cant_be_are_refused(token: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        extended(trained("bpe"), [token])


def test_token_that_another_new_one_begins_is_still_one() -> None:
    new = extended(trained("bpe"), ["CVE-", "CVE-2024-"])
    assert len(new.encode("CVE-2024-", add_special_tokens=False)) == 1
