"""Tokenizers made elsewhere: Llama-style models, byte-level and mark-spelled tokenizer.json; exact, or refused."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from strings import assert_equal, varied
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from cyberslm.errors import TokenizerError
from cyberslm.text.imported import HuggingFaceTokenizer
from cyberslm.text.tokenizer import SentencePieceTokenizer, load_tokenizer, open_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
texts = st.text() | st.text(alphabet=" \t\n\u2581\ufdd001ae<|>im_start\U0001f600", max_size=50)


def byte_level(documents: list[str]) -> dict:
    """A tokenizer.json of the GPT-2 kind, with chat markers and a symbol that is not special."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    library.train_from_iterator(documents[:60], trainer)
    library.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return json.loads(library.to_str())


def with_bos(data: dict, bos: str = SPECIAL[0]) -> dict:
    library = Library.from_str(json.dumps(data))
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=None, special_tokens=[(bos, library.token_to_id(bos))]
    )
    return json.loads(library.to_str())


def llama_style(documents: list[str], **options: object) -> bytes:
    """A model as Llama 2 has it: a space before each text, <unk> 0, <s> 1, </s> 2, no <pad>."""
    model = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "vocab_size": 900,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "minloglevel": 3,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents[:60]), model_writer=model, **(defaults | options)
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def level(documents: list[str]) -> dict:
    return byte_level(documents)


@pytest.fixture(scope="module")
def llama(documents: list[str]) -> SentencePieceTokenizer:
    return SentencePieceTokenizer.from_proto(llama_style(documents))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_json(data: object, settings: dict | None = None, name: str = "tokenizer.json") -> Path:
        if settings is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
        return tmp_path / name

    return write_json


@pytest.fixture(scope="module", params=["byte level", "marks", "marks with a space before", "llama model"])
def given_tokenizer(
    request: pytest.FixtureRequest,
    documents: list[str],
    level: dict,
    llama: SentencePieceTokenizer,
    tokenizer: SentencePieceTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    folder = tmp_path_factory.mktemp("given")
    if request.param == "llama model":
        return llama
    if request.param == "byte level":
        (folder / "tokenizer.json").write_text(json.dumps(level))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    else:
        (tokenizer if request.param == "marks" else llama).save(folder)
    return HuggingFaceTokenizer.from_file(folder / "tokenizer.json")


@given(text=texts)
@settings(deadline=None, max_examples=150)
def test_every_text_comes_back_at_once_and_streamed(
    given_tokenizer: HuggingFaceTokenizer, awkward: list[str], text: str
) -> None:
    for each in (text, *awkward):
        for ids in (given_tokenizer.encode(each), given_tokenizer.encode(each, add_special_tokens=False)):
            stream = given_tokenizer.stream_decoder()
            assert given_tokenizer.decode(ids) == "".join(map(stream.push, ids)) + stream.finish() == each


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_no_text_becomes_a_special_token(given_tokenizer: HuggingFaceTokenizer, data: st.DataObject) -> None:
    special = sorted(given_tokenizer.control_ids)
    name = given_tokenizer.piece(data.draw(st.sampled_from(special)))
    cut = data.draw(st.integers(0, len(name)))
    spelled = data.draw(st.sampled_from([name, f"{name[:cut]}\u200b{name[cut:]}", name * 2, name.upper()]))
    text = data.draw(texts) + spelled + data.draw(texts)
    assert given_tokenizer.control_ids.isdisjoint(given_tokenizer.encode(text, add_special_tokens=False))


def test_saved_folder_gives_the_same_ids_here_and_in_transformers(
    given_tokenizer: HuggingFaceTokenizer, documents: list[str], awkward: list[str], tmp_path: Path
) -> None:
    given_tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(given_tokenizer)
    assert (again.sha256, again.add_bos) == (given_tokenizer.sha256, given_tokenizer.add_bos)
    roles = ("pad_id", "unk_id", "bos_id", "eos_id", "control_ids")
    assert all(getattr(again, role) == getattr(given_tokenizer, role) for role in roles)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_equal(again, theirs, [*awkward, *varied(documents, 400)])
    assert theirs.eos_token_id == again.eos_id


@pytest.mark.parametrize("num_threads", [1, 3])
def test_documents_are_the_encoded_texts_and_eos(
    given_tokenizer: HuggingFaceTokenizer, awkward: list[str], num_threads: int
) -> None:
    found = given_tokenizer.encode_documents(awkward, num_threads=num_threads)
    assert [ids.tolist() for ids in found] == [[*given_tokenizer.encode(t), given_tokenizer.eos_id] for t in awkward]
    assert {ids.dtype for ids in found} == {np.dtype(np.uint16)}


def test_continuation_keeps_the_space_it_begins_with(llama: SentencePieceTokenizer) -> None:
    """The space that is dropped from the start of a text must stay at the start of what continues it."""
    prompt, whole = llama.encode("the quick"), llama.encode("the quick fox")
    assert whole[: len(prompt)] == prompt
    stream = llama.stream_decoder(after=prompt)
    assert "".join(map(stream.push, whole[len(prompt) :])) + stream.finish() == " fox"
    begun = llama.stream_decoder(after=[llama.bos_id])
    assert "".join(map(begun.push, whole[1:])) + begun.finish() == "the quick fox"


def test_documents_in_a_row_decode_to_their_texts(llama: SentencePieceTokenizer) -> None:
    assert llama.decode([*llama.encode(" a"), llama.eos_id, *llama.encode("b")]) == " ab"


def test_llama_style_model_has_its_own_roles_and_sentencepieces_ids(
    documents: list[str], llama: SentencePieceTokenizer
) -> None:
    assert (llama.unk_id, llama.bos_id, llama.eos_id, llama.pad_id, llama.add_bos) == (0, 1, 2, 0, True)
    raw = sentencepiece.SentencePieceProcessor(model_proto=llama_style(documents))
    for text in ["", " ", "x", "  two", *varied(documents, 300)]:
        if "\u2581" not in text and "\ufdd0" not in text:
            assert llama.encode(text) == raw.encode(text, add_bos=True), ascii(text)


def test_runs_of_spaces_that_share_a_score_have_equal_ids_in_the_twin(documents: list[str], tmp_path: Path) -> None:
    """Llama 2 gives all runs of spaces one score: the leftmost grows, which a list of merges must imitate."""
    runs = [2, 3, 4, 5, 7, 8, 14, 16]
    model = llama_style([*documents, *(" " * n + "x" for n in runs)], max_sentencepiece_length=16)
    read = SentencePieceTokenizer.from_proto(model)._read
    patched = bytearray(model)
    for n in range(2, 17):
        text = ("\u2581" * n).encode()
        at = model.find(b"\x0a" + bytes([len(text)]) + text + b"\x15")
        if at >= 0:
            patched[at + 3 + len(text) : at + 7 + len(text)] = struct.pack("<f", -1e9)
    ours = SentencePieceTokenizer.from_proto(bytes(patched))
    shared = [p.text for p in ours._read.pieces if p.score == -1e9]
    assert len(shared) > 3
    assert read.gaps == ours._read.gaps == ()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(0)
    strings = [" " * n for n in range(80)] + [
        f"a{' ' * rng.randint(1, 40)}b {' ' * rng.randint(1, 40)}" for _ in range(80)
    ]
    assert_equal(ours, theirs, strings)


def test_ids_of_a_byte_level_file_are_those_of_its_library(documents: list[str], level: dict, write: Callable) -> None:
    ours = HuggingFaceTokenizer.from_file(write(level, {"eos_token": "<|im_end|>"}))
    library = Library.from_str(json.dumps(level))
    for text in varied(documents, 300):
        if not any(name in text for name in SPECIAL):
            assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.encode("a<tool_call>b")[1] == library.token_to_id("<tool_call>")
    assert ours.token_bytes(library.token_to_id("<tool_call>")) == b"<tool_call>"


@pytest.mark.parametrize(
    ("template", "note", "asked", "rule"),
    [
        (True, None, None, True),
        (False, None, None, False),
        (False, True, None, True),
        (False, False, None, False),
        (True, None, False, False),
        (False, None, True, True),
        (False, True, False, False),
    ],
)
def test_rule_for_bos_is_the_files_unless_told(
    level: dict, write: Callable, template: bool, note: bool | None, asked: bool | None, rule: bool
) -> None:
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    path = write(with_bos(level) if template else level, settings | ({} if note is None else {"add_bos_token": note}))
    ours = open_tokenizer(path, add_bos=asked)
    assert ours.add_bos is rule
    assert (ours.encode("x")[0] == ours.bos_id) is rule
    ours.save(path.parent / "saved")
    again, theirs = (
        load_tokenizer(path.parent / "saved"),
        transformers.AutoTokenizer.from_pretrained(path.parent / "saved"),
    )
    assert (again.add_bos, again.sha256) == (rule, ours.sha256)
    assert theirs("x").input_ids == again.encode("x")


def test_roles_without_a_token_are_covered_and_bos_is_not_invented(level: dict, write: Callable) -> None:
    ours = HuggingFaceTokenizer.from_file(write(level, {"eos_token": "<|im_end|>"}))
    eos = ours.encode_documents(["x"])[0][-1]
    assert ours.piece(eos) == "<|im_end|>"
    assert (ours.pad_id, ours.unk_id, ours.bos_id, ours.add_bos) == (eos, eos, eos, False)
    with pytest.raises(TokenizerError, match="no <bos>"):
        HuggingFaceTokenizer.from_file(write(level), add_bos=True)


def test_file_that_names_no_end_of_text_says_what_to_add(level: dict, write: Callable) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: names no end of text: .*tokenizer_config\.json"):
        HuggingFaceTokenizer.from_file(write(level))


def changed(data: dict, path: str, value: object) -> dict:
    data = copy.deepcopy(data)
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    if isinstance(inner, list):
        inner[int(last)] = value
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("normalizer", {"type": "NFC"}, r"normalised \(NFC\)"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}, r"normalised \(Lowercase\)"),
        ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace may drop white space"),
        ("pre_tokenizer.pretokenizers.1.add_prefix_space", True, "a space is put before"),
        ("pre_tokenizer", None, "not turned into bytes"),
        ("added_tokens.3.lstrip", True, "white space beside '<tool_call>'"),
        ("model.end_of_word_suffix", "</w>", "mark of their place"),
    ],
)
def test_byte_level_file_that_loses_text_is_refused_by_name_and_taken_when_asked(
    level: dict, write: Callable, path: str, value: object, words: str
) -> None:
    file = write(changed(level, path, value), {"eos_token": "<|im_end|>"})
    with pytest.raises(TokenizerError, match=rf"{words}.*tokenizer\.lossless: false"):
        open_tokenizer(file)
    taken = open_tokenizer(file, lossless=False)
    assert taken.losses
    taken.save(file.parent / "saved")
    assert load_tokenizer(file.parent / "saved").losses == taken.losses


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.type", "Unigram", "only BPE"),
        ("model", None, "no object 'model'"),
        ("model.vocab", {}, "no vocabulary"),
        ("model.vocab.a", 10**9, "outside 0 to"),
        ("model.vocab.a", -1, "outside 0 to"),
        ("model.vocab.a", True, "outside 0 to"),
        ("model.vocab.a", 5, "occurs twice"),
        ("model.merges", [["a"]], "not pairs"),
        ("model.merges", [["a", "\u0120b"]], "refuses it"),
        ("model.dropout", 0.1, "dropout"),
        ("decoder", {"type": "WordPiece"}, "unknown kind"),
        ("decoder", None, "unknown kind"),
        ("decoder", {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}, "unknown kind"),
        ("added_tokens.0.id", "x", "no id"),
        ("added_tokens.0.id", 99, "id of another piece"),
        ("added_tokens.0.special", None, "special"),
        ("added_tokens.0", 7, "no id"),
        ("model.unk_token", "a", "'a' can be spelled by text"),
        ("model.unk_token", 7, "refuses it"),
        ("model.unk_token", ["a"], "refuses it"),
        ("model.ignore_merges", True, r"'<\|endoftext\|>' can be spelled by text"),
        ("added_tokens.0.content", "a", "special|another piece"),
    ],
)
@pytest.mark.parametrize("lossless", [True, False])
def test_damaged_or_forgeable_file_is_refused_by_name(
    level: dict, write: Callable, path: str, value: object, words: str, lossless: bool
) -> None:
    with pytest.raises(TokenizerError, match=words):
        open_tokenizer(write(changed(level, path, value), {"eos_token": "<|im_end|>"}), lossless=lossless)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "{", "[" * 100_000, '{"model": {"type": "BPE", "merges": [], "vocab": 3}}']
)
def test_what_is_no_tokenizer_json_is_refused_with_its_path(write: Callable, text: str) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        open_tokenizer(write(text))


def test_limits_of_length_in_a_file_are_lifted(level: dict, write: Callable) -> None:
    cutting = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    ours = open_tokenizer(write(changed(level, "truncation", cutting), {"eos_token": "<|im_end|>"}))
    assert ours.decode(ours.encode("a text of more than three tokens")) == "a text of more than three tokens"


def test_truncated_or_flipped_file_is_refused_or_still_exact(level: dict, write: Callable) -> None:
    content = json.dumps(level)
    rng = random.Random(0)
    taken = 0
    for _ in range(150):
        at = rng.randrange(len(content))
        damaged = content[:at] if rng.random() < 0.3 else content[:at] + chr(rng.randrange(32, 127)) + content[at + 1 :]
        try:
            tokenizer = open_tokenizer(write(damaged, {"eos_token": "<|im_end|>"}))
        except TokenizerError:
            continue
        taken += 1
        for text in ("abc \u2581 def\n<|im_end|>", "caf\u00e9 \U0001f600"):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.control_ids.isdisjoint(ids)
    assert 0 < taken < 120


def test_model_with_rules_of_its_own_is_used_as_sentencepiece_does(documents: list[str], tmp_path: Path) -> None:
    model = llama_style(documents, model_type="unigram", normalization_rule_name="nmt_nfkc", byte_fallback=False)
    with pytest.raises(TokenizerError, match="byte fallback is off.*text is normalised"):
        SentencePieceTokenizer.from_proto(model)
    taken = SentencePieceTokenizer.from_proto(model, lossless=False)
    raw = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ["plain words", " \uff21\u2460 \u2581", "\u65e5\u672c"]:
        assert taken.encode(text, add_special_tokens=False) == raw.encode(text)
    assert taken.decode(taken.encode("plain words")) == "plain words"
    taken.save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert load_tokenizer(tmp_path).losses == taken.losses


def test_folder_with_both_files_opens_the_model(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert isinstance(open_tokenizer(tmp_path), SentencePieceTokenizer)
    assert isinstance(open_tokenizer(tmp_path / "tokenizer.json"), HuggingFaceTokenizer)
    with pytest.raises(TokenizerError, match="neither|nor a folder"):
        open_tokenizer(tmp_path / "absent")


def test_missing_library_is_an_error_that_names_the_extra(level: dict, write: Callable) -> None:
    path = write(level, {"eos_token": "<|im_end|>"})
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from cyberslm.text.tokenizer import open_tokenizer\n"
        "from cyberslm.errors import ConfigError\n"
        "try: open_tokenizer(sys.argv[1])\n"
        "except ConfigError as error: assert 'cyberslm[interop]' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
