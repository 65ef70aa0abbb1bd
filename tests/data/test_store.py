from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import tar_of, zip_of

from cyberslm.data.config import DataConfig
from cyberslm.data.places import Places
from cyberslm.data.prepare import prepare
from cyberslm.data.shards import Place, ShardWriter
from cyberslm.data.store import Origin, SourceRange, TokenStore
from cyberslm.errors import InputError, IntegrityError

SHA = "ab" * 32


def store_of(folder: Path, sizes: list[int], *, sources: list[int] | None = None, shard_tokens: int = 10) -> TokenStore:
    with ShardWriter(folder, "train", vocab_size=9000, tokenizer_sha256=SHA, shard_tokens=shard_tokens) as writer:
        for index, size in enumerate(sizes):
            place = Place(0 if sources is None else sources[index], index, index + 1)
            trained = np.random.default_rng(index).random(size) < 0.7 if index % 3 else None
            writer.add(np.full(size, index), text_bytes=size * 2, place=place, trained=trained)
    return TokenStore.open(folder, "train", tokenizer_sha256=SHA, vocab_size=9000)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=25), st.integers(1, 30), st.data())
@settings(deadline=None, max_examples=60)
def test_documents_are_found_by_token_and_by_number(tmp_path_factory, sizes, shard_tokens, data):
    store = store_of(tmp_path_factory.mktemp("store"), sizes, shard_tokens=shard_tokens)
    owner = [index for index, size in enumerate(sizes) for _ in range(size)]
    firsts = [token for token in range(len(owner)) if token == 0 or owner[token] != owner[token - 1]]
    masks = np.concatenate(
        [np.random.default_rng(i).random(n) < 0.7 if i % 3 else np.ones(n, bool) for i, n in enumerate(sizes)]
    )
    start = data.draw(st.integers(0, len(owner)))
    stop = data.draw(st.integers(start, len(owner)))
    assert [store.document_at(token) for token in range(len(owner))] == owner
    assert store.starts_within(start, stop).tolist() == [token for token in firsts if start <= token < stop]
    assert store.trained(start, stop).tolist() == masks[start:stop].tolist()
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first + 1, len(sizes)))
    assert store.ends(first, last).tolist() == np.cumsum(sizes)[first:last].tolist()
    assert store.records(first, last)["file"].tolist() == list(range(first, last))
    assert store.records(first, last)["text_bytes"].tolist() == [size * 2 for size in sizes[first:last]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_a_source_is_a_range_of_documents_and_tokens(tmp_path_factory, sources, shard_tokens):
    sources = sorted(sources)
    sizes = [2 + index % 3 for index in range(len(sources))]
    store = store_of(tmp_path_factory.mktemp("store"), sizes, sources=sources, shard_tokens=shard_tokens)
    ends = [0, *np.cumsum(sizes).tolist()]
    wanted = []
    for source in sorted(set(sources)):
        first = sources.index(source)
        end = first + sources.count(source)
        wanted.append(SourceRange(source, first, end, ends[first], ends[end]))
    assert list(store.sources) == wanted


def test_every_token_is_traced_to_its_file_and_line(tmp_path, byte_tokenizer, write):
    write("one/a.txt", "first\n\nsecond\nline\n")
    write("one/b.txt", "third")
    two = write("two.jsonl", "".join(json.dumps({"text": f"record {number}"}) + "\n" for number in range(40)))
    config = DataConfig(sources=(str(tmp_path / "one"), two), validation_fraction=0.3, txt_unit="paragraph")
    prepared = prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})
    wanted = {"first": ("a.txt", 1), "second\nline": ("a.txt", 3), "third": ("b.txt", 1)}
    wanted |= {f"record {number}": ("two.jsonl", number + 1) for number in range(40)}
    for store in (prepared.train, prepared.validation):
        for document in range(store.num_documents):
            first, end = store.document_bounds(document)
            file, line = wanted.pop(byte_tokenizer.decode(store.slice(first, end)))
            key = f"data.sources[{int(file == 'two.jsonl')}]"
            for token in (first, end - 1):
                assert store.origin(token) == Origin(key, file, line, document)
    assert wanted == {}


def test_validation_of_its_own_is_traced_to_data_validation(tmp_path, byte_tokenizer, write):
    sources = (write("a.txt", "aaaa"), write("b.txt", "bbbb"))
    config = DataConfig(sources=sources, validation=(write("v.txt", "vvvv"), write("w.txt", "wwww")))
    prepared = prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})
    assert prepared.validation.origin(9) == Origin("data.validation[1]", "w.txt", 1, 1)
    assert prepared.train.origin(9) == Origin("data.sources[1]", "b.txt", 1, 1)
    assert prepared.validation_source(1) == "data.validation[1]"


def test_members_of_archives_are_traced_by_name(tmp_path, byte_tokenizer, write):
    write("in/a.zip", zip_of({"one.txt": b"first", "sub/two.jsonl": b'{"text": "second"}\n{"text": "third"}\n'}))
    write("in/b.txt", "fourth")
    write("in/c.tar", tar_of({"empty.txt": b" ", "five.txt": b"fifth", "six.txt": b"sixth"}))
    config = DataConfig(sources=(str(tmp_path / "in"),), validation_fraction=0.3)
    prepared = prepare(config, lambda texts: byte_tokenizer, tmp_path / "out", tokenizer_settings={})
    found = {}
    for store in filter(None, (prepared.train, prepared.validation)):
        for document in range(store.num_documents):
            first, end = store.document_bounds(document)
            origin = store.origin(end - 1)
            found[byte_tokenizer.decode(store.slice(first, end))] = (origin.file, origin.line)
    assert found == {
        "first": ("a.zip!one.txt", 1),
        "second": ("a.zip!sub/two.jsonl", 1),
        "third": ("a.zip!sub/two.jsonl", 2),
        "fourth": ("b.txt", 1),
        "fifth": ("c.tar!five.txt", 1),
        "sixth": ("c.tar!six.txt", 1),
    }
    (tmp_path / "out" / "members.jsonl").unlink()
    with pytest.raises(IntegrityError, match=r"members\.jsonl its member 1; .*prepare the data again"):
        prepared.train.origin(0)


def test_a_document_of_no_file_that_was_read_is_refused(tmp_path):
    files = [{"source": "data.sources[0]", "path": name} for name in ("a.txt", "b.zip", "c.txt")]
    with Places(files, tmp_path) as places:
        assert places.of("data.sources[0]", "b.zip!x", 4) == Place(0, 1, 4, 1)
        assert places.of("data.sources[0]", "b.zip!x", 9) == Place(0, 1, 9, 1)
        assert places.of("data.sources[0]", "b.zip!y", 1) == Place(0, 1, 1, 2)
        with pytest.raises(IntegrityError, match="not the next file that was read"):
            places.of("data.sources[0]", "a.txt", 1)


@pytest.mark.parametrize("content", [None, "", "{}\n", "[]\n", "nonsense\n"])
def test_an_inputs_file_that_cannot_tell_is_named(tmp_path, content):
    store = store_of(tmp_path, [3])
    if content is not None:
        (tmp_path / "inputs.jsonl").write_text(content)
    with pytest.raises(IntegrityError, match=r"inputs\.jsonl does not tell file 0; .*prepare the data again"):
        store.origin(0)


@pytest.mark.parametrize(("ask", "message"), [("document_at", "token 3"), ("place", "document 3")])
def test_what_is_outside_the_store_is_refused(tmp_path, ask, message):
    store = store_of(tmp_path, [1, 1, 1])
    for number in (3, -1):
        with pytest.raises(InputError, match=f"{message.split()[0]} {number} is not within 0 to 2"):
            getattr(store, ask)(number)
    with pytest.raises(InputError, match="documents 2 to 4 are not within 0 to 3"):
        store.ends(2, 4)
