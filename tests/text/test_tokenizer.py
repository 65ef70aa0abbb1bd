from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.errors import StorageError, TokenizerError
from cyberslm.text.config import CHAT_MARKERS, ROLES
from cyberslm.text.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer

FIRST_BYTE = len(ROLES) + len(CHAT_MARKERS)
FIRST_LEARNED = FIRST_BYTE + 256

texts = st.one_of(st.text(), st.text(alphabet=" \t\n\r\0\u2581\ufdd001ae\u2585\ufeff\U0001f600", max_size=60))


def plain_encode(tokenizer: SentencePieceTokenizer, text: str) -> list[int]:
    """Slow truth: merge the best-scored neighbouring pair, leftmost first, until none is left."""
    pieces = {tokenizer.piece(i): i for i in range(FIRST_LEARNED, tokenizer.vocab_size)}
    symbols = list(text.replace("\ufdd0", "\ufdd00").replace("\u2581", "\ufdd01").replace(" ", "\u2581"))
    rank = {piece: index for index, piece in enumerate(pieces)}
    while True:
        found = [
            (rank[a + b], at) for at, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in rank
        ]
        if not found:
            break
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [pieces[symbol]] if symbol in pieces else [FIRST_BYTE + byte for byte in symbol.encode()]
    return ids


@given(texts)
@settings(deadline=None, max_examples=300)
def test_decode_undoes_encode(tokenizer: SentencePieceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_awkward_text_round_trips(tokenizer: SentencePieceTokenizer, awkward: list[str]) -> None:
    assert [tokenizer.decode(tokenizer.encode(text)) for text in awkward] == awkward


@given(texts)
@settings(deadline=None, max_examples=100)
def test_encode_equals_the_plain_merges(tokenizer: SentencePieceTokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == plain_encode(tokenizer, text)


def test_awkward_text_equals_the_plain_merges(tokenizer: SentencePieceTokenizer, awkward: list[str]) -> None:
    for each in awkward:
        assert tokenizer.encode(each, add_special_tokens=False) == plain_encode(tokenizer, each)


@given(texts)
@settings(deadline=None, max_examples=100)
def test_cut_text_gives_the_ids_of_the_whole(tokenizer: SentencePieceTokenizer, text: str) -> None:
    text = text + " the quick  brown\n\n\tfox " + text
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_part_chars", 1)
        assert tokenizer.encode(text) == whole
        assert tokenizer.encode_documents([text])[0].tolist() == [*whole, tokenizer.eos_id]


@given(st.lists(st.integers(0, 1999), max_size=40))
@settings(deadline=None)
def test_stream_equals_decode_for_any_ids(tokenizer: SentencePieceTokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream_decoder()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_ids_and_bos_rule(tokenizer: SentencePieceTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
    assert tokenizer.control_ids == set(range(FIRST_BYTE))
    assert tokenizer.encode("") == [2]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.encode("x")[1:] == tokenizer.encode("x", add_special_tokens=False)


def test_text_never_becomes_a_control_id(tokenizer: SentencePieceTokenizer, awkward: list[str]) -> None:
    for text in ["<pad>", "<unk>", "<bos>", "<eos>", "<e\u200bos>", "</s><s>", "x<eos>y", *awkward]:
        assert tokenizer.control_ids.isdisjoint(tokenizer.encode(text, add_special_tokens=False))


def test_control_ids_decode_to_nothing_but_can_be_shown(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode([2, *tokenizer.encode("a  b", add_special_tokens=False), 3, 0, 1]) == "a  b"
    assert [tokenizer.piece(i) for i in range(FIRST_BYTE + 1)] == [*ROLES, *CHAT_MARKERS, "<0x00>"]
    assert [tokenizer.token_bytes(i) for i in (2, 5, FIRST_BYTE, FIRST_BYTE + 255)] == [b"", b"", b"\0", b"\xff"]


def test_invalid_bytes_decode_to_replacement_characters(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode([FIRST_BYTE + byte for byte in b"\xffa\xf0\x9f"]) == "\ufffda\ufffd"


def test_documents_equal_the_plain_path_with_any_number_of_threads(
    tokenizer: SentencePieceTokenizer, documents: list[str], awkward: list[str]
) -> None:
    batch = [*awkward, *documents[:20], "word " * 40_000]
    plain = [[*tokenizer.encode(text), tokenizer.eos_id] for text in batch]
    for num_threads in (1, 3):
        encoded = tokenizer.encode_documents(batch, num_threads=num_threads)
        assert [ids.tolist() for ids in encoded] == plain
        assert {ids.dtype for ids in encoded} == {np.dtype(np.uint16)}
    assert tokenizer.encode_documents([]) == []


def test_documents_without_bos_still_end_in_eos(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    bare = SentencePieceTokenizer.from_file(tmp_path, add_bos=False)
    assert bare.encode_documents(["", "a"])[0].tolist() == [3]
    assert bare.encode("a") == tokenizer.encode("a")[1:]


def test_lone_surrogates_become_replacement_characters(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b\ud83d\ude00")) == "a\ufffdb\U0001f600"


@pytest.mark.parametrize("text", [b"bytes", None, 3, ["a"]])
def test_what_is_not_text_is_refused(tokenizer: SentencePieceTokenizer, text: object) -> None:
    with pytest.raises(TokenizerError, match=type(text).__name__):
        tokenizer.encode(text)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match=type(text).__name__):
        tokenizer.encode_documents(["fine", text])  # type: ignore[list-item]


def test_one_string_is_not_a_list_of_documents(tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(TokenizerError, match="list of texts"):
        tokenizer.encode_documents("abc")
    with pytest.raises(TokenizerError, match="0"):
        tokenizer.encode_documents(["abc"], num_threads=0)


@pytest.mark.parametrize("token", [-1, 2000, 10**30, 1.0, "1", None])
def test_id_outside_the_vocabulary_is_refused(tokenizer: SentencePieceTokenizer, token: object) -> None:
    for use in (tokenizer.token_bytes, tokenizer.piece, tokenizer.stream_decoder().push):
        with pytest.raises(TokenizerError):
            use(token)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError):
        tokenizer.decode([5, token])  # type: ignore[list-item]


def test_numpy_ids_decode(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_documents(["log  line\n"])[0]) == "log  line\n"


@pytest.mark.parametrize("add_bos", [True, False])
def test_save_and_load_keep_the_model_and_the_bos_rule(
    tokenizer: SentencePieceTokenizer, tmp_path: Path, add_bos: bool
) -> None:
    tokenizer.save(tmp_path / "first")
    given: Tokenizer = SentencePieceTokenizer.from_file(tmp_path / "first" / "tokenizer.model", add_bos=add_bos)
    given.save(tmp_path / "second")
    loaded = load_tokenizer(tmp_path / "second")
    assert (loaded.sha256, loaded.add_bos) == (tokenizer.sha256, add_bos)
    assert loaded.encode("a b\n") == given.encode("a b\n")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_saving_where_a_file_stands_is_refused(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="taken"):
        tokenizer.save(tmp_path / "taken")


def test_folder_without_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        SentencePieceTokenizer.from_file(tmp_path, add_bos=True)


@pytest.mark.parametrize("settings_text", ["", "[]", "{}", '{"add_bos_token": 1}', "[" * 100_000, "\ud800"])
def test_damaged_settings_are_refused(tokenizer: SentencePieceTokenizer, tmp_path: Path, settings_text: str) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(settings_text.encode("utf-8", "surrogatepass"))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_damaged_model_is_refused_with_its_path(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    model = tmp_path / "tokenizer.model"
    model.write_bytes(model.read_bytes()[:-7])
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_saved_settings_name_the_rule_that_loading_reads(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is True
