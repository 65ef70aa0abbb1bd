"""Shards that several writers made -> the shards that one writer would have made.

Any number of processes or machines take whole files, in any order and by any rule, and each writes a folder of shards
of its own; `files.publish` makes each folder appear whole or not at all, so work that was cut off is known and done
again alone. `merge` then copies the documents in the order of their files. Where a shard ends depends on the documents
alone, so the bytes are those of one writer. Memory holds 24 bytes a file and one block of tokens or the longest
document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cyberslm.data.shards import ShardWriter
from cyberslm.data.store import Ints, TokenStore
from cyberslm.errors import InputError

BLOCK_TOKENS = 1 << 22
BLOCK_DOCUMENTS = 1 << 20


def merge(stores: Sequence[TokenStore], writer: ShardWriter) -> None:
    """Copy every document of ``stores`` of one split, in the order of files; InputError if two stores share a file."""
    runs = [_runs(store) for store in stores]
    parts = np.repeat(np.arange(len(stores)), [len(run) for run in runs])
    rows = np.concatenate([*runs, np.empty((0, 3), np.int64)])
    order = np.argsort(rows[:, 0], kind="stable")
    if (twice := np.flatnonzero(np.diff(rows[order, 0]) == 0)).size:
        raise InputError(f"file {rows[order[twice[0]], 0]} is in two pieces: give each file, as a whole, to one writer")
    for part, (_, first, end) in zip(parts[order].tolist(), rows[order].tolist(), strict=True):
        _copy(stores[part], first, end, writer)


def _runs(store: TokenStore) -> Ints:
    """A row for each run of documents of one file: the file's number, the first document, the end of the run."""
    found, before = [], -1
    for first in range(0, store.num_documents, BLOCK_DOCUMENTS):
        files = store.records(first, min(first + BLOCK_DOCUMENTS, store.num_documents))["file"].astype(np.int64)
        begins = np.flatnonzero(np.diff(files, prepend=before))
        found.append(np.column_stack([files[begins], begins + first]))
        before = int(files[-1])
    heads = np.concatenate(found)
    return np.column_stack([heads, np.append(heads[1:, 1], store.num_documents)])


def _copy(store: TokenStore, first: int, end: int, writer: ShardWriter) -> None:
    while first < end:
        begin = store.document_bounds(first)[0]
        ends = store.ends(first, min(end, first + BLOCK_DOCUMENTS))
        count = max(1, int(np.searchsorted(ends, begin + BLOCK_TOKENS, "right")))
        stop = int(ends[count - 1])
        mask = store.trained(begin, stop) if store.masked else None
        writer.extend(store.slice(begin, stop), ends[:count] - begin, store.records(first, first + count), mask)
        first += count
