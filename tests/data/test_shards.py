from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data.shards import (
    HEADER,
    MAGIC,
    RECORD,
    VERSION,
    Place,
    ShardHeader,
    ShardWriter,
    read_header,
    token_bytes,
)
from cyberslm.data.store import TokenStore
from cyberslm.errors import DataError, InputError, IntegrityError

SHA = "ab" * 32


def write(folder: Path, documents: list[list[int]], *, vocab: int = 300, shard_tokens: int = 10**6) -> None:
    with ShardWriter(folder, "train", vocab_size=vocab, tokenizer_sha256=SHA, shard_tokens=shard_tokens) as writer:
        for ids in documents:
            writer.add(np.array(ids), text_bytes=len(ids))


def open_store(folder: Path, *, vocab: int = 300, sha: str = SHA) -> TokenStore:
    return TokenStore.open(folder, "train", tokenizer_sha256=sha, vocab_size=vocab)


DOCUMENTS = st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), min_size=1, max_size=20)


@given(DOCUMENTS, st.integers(1, 30), st.data())
@settings(deadline=None, max_examples=60)
def test_shards_read_as_one_array_equal_to_the_documents_joined(tmp_path_factory, documents, shard_tokens, data):
    folder = tmp_path_factory.mktemp("shards")
    write(folder, documents, shard_tokens=shard_tokens)
    store = open_store(folder)
    joined = [token for ids in documents for token in ids]
    assert (store.num_tokens, store.num_documents) == (len(joined), len(documents))
    assert store.text_bytes == len(joined)
    assert store.slice(0, len(joined)).tolist() == joined
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    part = store.slice(start, stop)
    assert part.dtype == np.int64
    assert part.tolist() == joined[start:stop]
    bounds = [store.document_bounds(index) for index in range(len(documents))]
    assert [joined[first:end] for first, end in bounds] == documents


def test_a_shard_ends_after_the_document_that_fills_it(tmp_path):
    write(tmp_path, [[1] * 4, [2] * 7, [3], [4] * 20, [5]], shard_tokens=10)
    assert [read_header(path).num_tokens for path in open_store(tmp_path).paths] == [11, 21, 1]


def test_the_layout_of_a_shard_is_as_documented(tmp_path):
    write(tmp_path, [[1, 2], [3]])
    raw = (tmp_path / "train-00000.tokens").read_bytes()
    assert HEADER.size == 128
    assert HEADER.unpack(raw[:128]) == (MAGIC, VERSION, 2, 300, 3, 2, 3, bytes.fromhex(SHA), 0)
    assert raw[128:134] == b"\1\0\2\0\3\0"
    assert raw[134:136] == b"\0\0"
    assert np.frombuffer(raw[136:152], "<u8").tolist() == [2, 3]
    assert np.frombuffer(raw[152:], "<u4").tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_each_document_is_kept_with_its_place_and_what_of_it_is_trained(tmp_path):
    places = [Place(0, 0, 7), Place(2, 5, 1 << 40), Place(2, (1 << 32) - 1, 3, 8)]
    masks = [None, np.array([False, True, True] * 5), np.array([True])]
    with ShardWriter(tmp_path, "train", vocab_size=300, tokenizer_sha256=SHA) as writer:
        for place, mask, size in zip(places, masks, (2, 15, 1), strict=True):
            writer.add(np.arange(size), text_bytes=size, place=place, trained=mask)
    raw = (tmp_path / "train-00000.tokens").read_bytes()
    assert HEADER.unpack(raw[:128])[-1] == 3
    assert raw[-3:] == bytes([0b11011011, 0b10110110, 0b11])  # two tokens, (no, yes, yes) five times, one token
    store = open_store(tmp_path)
    assert [store.place(index) for index in range(3)] == places
    assert store.masked
    assert store.trained(0, 18).tolist() == [True, True, *masks[1].tolist(), True]


def test_a_mask_that_leaves_nothing_out_takes_no_room(tmp_path):
    with ShardWriter(tmp_path, "train", vocab_size=300, tokenizer_sha256=SHA) as writer:
        writer.add(np.arange(4), text_bytes=4, trained=np.ones(4, bool))
    assert not open_store(tmp_path).masked


def test_a_mask_of_another_length_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, "train", vocab_size=300, tokenizer_sha256=SHA)
    with pytest.raises(InputError, match="mask of 3 does not fit a document of 4"):
        writer.add(np.arange(4), text_bytes=4, trained=np.ones(3, bool))


def test_sources_come_in_their_order(tmp_path):
    """A source is a range of documents: what reads them counts on it."""
    writer = ShardWriter(tmp_path, "train", vocab_size=300, tokenizer_sha256=SHA, shard_tokens=1)
    with writer:
        writer.add(np.arange(4), text_bytes=4, place=Place(1, 0, 1))
        with pytest.raises(InputError, match="in the order of their sources"):
            writer.add(np.arange(4), text_bytes=4, place=Place(0, 1, 1))


@pytest.mark.parametrize(("vocab", "width"), [(65_535, 2), (65_536, 2), (65_537, 4), (70_000, 4)])
def test_the_largest_id_survives_at_each_width(tmp_path, vocab, width):
    """Ids above 65,535 wrapped where 16 bits were taken for any vocabulary."""
    write(tmp_path, [[vocab - 1, 0]], vocab=vocab)
    store = open_store(tmp_path, vocab=vocab)
    assert store.slice(0, 2).tolist() == [vocab - 1, 0]
    assert read_header(store.paths[0]).token_bytes == width == token_bytes(vocab)


@pytest.mark.parametrize("bad", [[300], [-1], [5, 70_000]])
def test_an_id_outside_the_vocabulary_is_refused_when_written(tmp_path, bad):
    with pytest.raises(DataError, match="outside the vocabulary of 300"):
        write(tmp_path, [[1], bad])


def test_a_document_without_tokens_is_refused(tmp_path):
    with pytest.raises(DataError, match="without tokens"):
        write(tmp_path, [[]])


def test_an_id_beyond_the_vocabulary_on_disk_is_refused_when_read(tmp_path):
    write(tmp_path, [[1, 2, 3]])
    damage(tmp_path, 130, b"\xff\xff")
    store = open_store(tmp_path)
    assert store.slice(0, 1).tolist() == [1]
    with pytest.raises(IntegrityError, match=r"train-00000\.tokens holds token id 65535"):
        store.slice(0, 3)


def test_tokens_beyond_4_gib_are_read_right(tmp_path):
    """Byte offsets in 32 bits overflowed and read other data; the file is sparse."""
    header = ShardHeader(2, 300, 2_600_000_000, 2, 0, SHA)
    path = tmp_path / "train-00000.tokens"
    with path.open("wb") as stream:
        stream.write(header.pack())
        stream.seek(128 + 2 * (header.num_tokens - 3))
        stream.write(np.array([7, 8, 9], "<u2").tobytes())
        stream.seek(header.ends_offset)
        stream.write(np.array([header.num_tokens - 2, header.num_tokens], "<u8").tobytes())
        stream.write(np.array([(1, 9, 0, 0, 0), (2, 9, 0, 3, 0)], RECORD).tobytes())
        mask_bytes = header.num_tokens // 8
        stream.seek(mask_bytes - 1, 1)
        stream.write(b"\xa0")
        stream.seek(0)
        stream.write(header._replace(mask_bytes=mask_bytes).pack())
    assert path.stat().st_size > 5_000_000_000
    store = open_store(tmp_path)
    assert store.trained(header.num_tokens - 4, header.num_tokens).tolist() == [False, True, False, True]
    assert store.document_at(header.num_tokens - 3) == 0
    assert store.place(store.document_at(header.num_tokens - 2)) == Place(0, 3, 2)
    assert store.starts_within(1, header.num_tokens).tolist() == [header.num_tokens - 2]
    assert store.slice(header.num_tokens - 4, header.num_tokens).tolist() == [0, 7, 8, 9]
    assert store.document_bounds(1) == (header.num_tokens - 2, header.num_tokens)


def damage(folder: Path, offset: int, data: bytes) -> None:
    with (folder / "train-00000.tokens").open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "problem"),
    [
        (0, b"X", "not a finished token shard"),
        (8, b"\1", "format version 1, this program reads 2"),
        (12, b"\4", "says 4 bytes a token"),
        (16, b"\0\0\2", "says 2 bytes a token, but a vocabulary of 131072 takes 4"),
        (24, b"\4", "bytes, its header asks for|documents end at"),
        (24, b"\xff" * 8, "bytes, its header asks for"),
        (32, b"\1", "bytes, its header asks for"),
        (32, b"\0", "says 0 documents"),
        (32, b"\xff" * 8, "documents and"),
        (48, b"\0", "was written with tokenizer 00abab"),
        (80, b"\2", "bytes of mask"),
        (144, b"\4", "documents end at 4, not 3"),
    ],
)
def test_a_damaged_header_or_index_is_refused_with_the_file_and_the_fix(tmp_path, offset, data, problem):
    write(tmp_path, [[1, 2], [3]])
    damage(tmp_path, offset, data)
    with pytest.raises(IntegrityError, match=rf"train-00000\.tokens.*({problem}).*prepare the data again"):
        open_store(tmp_path)


def test_a_file_cut_anywhere_or_with_more_at_its_end_is_refused(tmp_path):
    write(tmp_path, [[1, 2], [3]])
    path = tmp_path / "train-00000.tokens"
    whole = path.read_bytes()
    for content in [*(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match=r"train-00000\.tokens"):
            open_store(tmp_path)
    path.write_bytes(whole)
    assert open_store(tmp_path).num_tokens == 3


def test_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    write(tmp_path, [[1]])
    with pytest.raises(IntegrityError, match="written with tokenizer abababababab, not cdcdcdcdcdcd"):
        open_store(tmp_path, sha="cd" * 32)
    with pytest.raises(IntegrityError, match="for 300 ids, the tokenizer has 301"):
        open_store(tmp_path, vocab=301)


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(IntegrityError, match=r"train-00000\.tokens is missing"):
        open_store(tmp_path)
    write(tmp_path, [[1], [2], [3]], shard_tokens=1)
    (tmp_path / "train-00001.tokens").unlink()
    with pytest.raises(IntegrityError, match=r"train-00001\.tokens is missing"):
        open_store(tmp_path)


def test_an_unfinished_shard_never_looks_whole(tmp_path):
    def interrupted() -> None:
        with ShardWriter(tmp_path, "train", vocab_size=9, tokenizer_sha256=SHA) as writer:
            writer.add(np.array([1, 2]), text_bytes=2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(IntegrityError, match="not a finished token shard"):
        open_store(tmp_path, vocab=9)


def test_a_writer_without_documents_writes_no_file(tmp_path):
    write(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_a_slice_outside_the_tokens_is_refused(tmp_path, start, stop):
    write(tmp_path, [[1, 2], [3]])
    with pytest.raises(InputError, match="not within 0 to 3"):
        open_store(tmp_path).slice(start, stop)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_document_outside_the_store_is_refused(tmp_path, index):
    write(tmp_path, [[1, 2], [3]])
    with pytest.raises(InputError, match="not within 0 to 1"):
        open_store(tmp_path).document_bounds(index)
