from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyberslm.data import packing
from cyberslm.data.packing import PackedRows, best_fit
from cyberslm.data.shards import ShardWriter
from cyberslm.data.store import TokenStore

SHA = "00" * 32


def store_of(folder: Path, sizes: list[int], *, shard_tokens: int = 50) -> TokenStore:
    with ShardWriter(folder, "train", vocab_size=9, tokenizer_sha256=SHA, shard_tokens=shard_tokens) as writer:
        for size in sizes:
            writer.add(np.zeros(size, np.int64), text_bytes=1)
    return TokenStore.open(folder, "train", tokenizer_sha256=SHA, vocab_size=9)


def spans(rows: PackedRows) -> list[list[tuple[int, int]]]:
    return [rows.spans(row) for row in range(rows.usage.rows)]


@given(st.integers(1, 30).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60))))
@settings(deadline=None, max_examples=200)
def test_best_fit_equals_placing_one_by_one(case):
    room, sizes = case
    row_of = best_fit(np.array(sizes, np.int64), room).tolist()
    packed = [sorted(size for size, row in zip(sizes, row_of, strict=True) if row == r) for r in sorted(set(row_of))]
    wanted = oracles.best_fit_decreasing(sizes, room)
    assert sorted(set(row_of)) == list(range(len(wanted)))
    assert Counter(map(sum, packed)) == Counter(map(sum, wanted))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(2, 16), st.booleans(), st.integers(1, 50))
@settings(deadline=None, max_examples=100)
def test_every_document_that_fits_is_whole_and_every_position_is_used_once(
    tmp_path_factory, sizes, seq_len, isolated, window
):
    store = store_of(tmp_path_factory.mktemp("pack"), sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        rows = PackedRows(store, store.sources[0], seq_len, isolated=isolated)
    found = [span for row in spans(rows) for span in row]
    wanted, cut, pieces = [], 0, 0
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        last = end - isolated
        edges = [*range(end - size, last, seq_len), last]
        wanted += zip(edges[:-1], edges[1:], strict=True)
        cut += len(edges) > 2
        pieces += len(edges) - 1 if len(edges) > 2 else 0
    assert sorted(found) == sorted(wanted)
    assert all(sum(stop - start for start, stop in row) <= seq_len for row in spans(rows))
    assert (rows.usage.cut, rows.usage.pieces) == (cut, pieces)
    assert rows.usage.positions == sum(stop - start for start, stop in found)
    assert rows.usage.padding == pytest.approx(1 - rows.usage.positions / max(1, seq_len * len(spans(rows))))


def test_window_with_nothing_to_learn_from_adds_no_row(tmp_path):
    """Rows could not be counted after a stretch of documents of one token each, which isolated rows leave out."""
    store = store_of(tmp_path, [1, 1, 5])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", 1)
        assert spans(PackedRows(store, store.sources[0], 4, isolated=True)) == [[(2, 6)]]


def test_a_realistic_mix_of_lengths_leaves_less_than_one_percent_empty(tmp_path):
    draw = np.random.default_rng(0)
    short, long = draw.lognormal(3.5, 0.8, 2000), draw.lognormal(6, 1, 1500)
    sizes = np.clip(np.concatenate([short, long]), 2, 9000).astype(int).tolist()
    store = store_of(tmp_path, sizes, shard_tokens=100_000)
    for seq_len in (256, 1024):
        assert PackedRows(store, store.sources[0], seq_len, isolated=True).usage.padding < 0.01


def test_a_plan_depends_on_the_lengths_alone(tmp_path):
    for name, shard_tokens in (("a", 9), ("b", 1000)):
        (tmp_path / name).mkdir()
        store_of(tmp_path / name, [3, 9, 2, 30, 5, 5, 1] * 9, shard_tokens=shard_tokens)
    plans = []
    for name in "ab":
        store = TokenStore.open(tmp_path / name, "train", tokenizer_sha256=SHA, vocab_size=9)
        plans.append(spans(PackedRows(store, store.sources[0], 8, isolated=True)))
    assert plans[0] == plans[1]


def test_the_plan_is_fixed_for_ever(tmp_path):
    """A change here would break the exact resumption of every earlier packed run."""
    store = store_of(tmp_path, [3, 9, 2, 30, 5, 5, 1])
    assert spans(PackedRows(store, store.sources[0], 8, isolated=True)) == [
        [(3, 11)],
        [(14, 22)],
        [(22, 30)],
        [(30, 38)],
        [(0, 2), (12, 13), (38, 43)],
        [(44, 48), (49, 53)],
    ]
