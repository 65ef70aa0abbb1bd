"""Honest yardsticks for bits per byte, computed on the very bytes that the model is scored on.

A compressor is a language model: its output size over the input size is a number of bits per byte (Deletang et al.
2023, https://arxiv.org/abs/2309.10668). A model that has learned anything beyond repeated strings and word frequencies
must beat all of these:

- ``gzip``: DEFLATE at its best level on the held-out bytes alone.
- ``xz after training text``: what LZMA needs for the held-out bytes when it has just seen the end of the training text,
  as the model has; the text is limited to what fits its window here.
- ``unigram``: the frequencies of the tokenizer's own tokens in the training split, add-one smoothed.
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cyberslm.data.loader import IGNORE, RowLoader
from cyberslm.data.store import TokenStore
from cyberslm.text.tokenizer import Tokenizer

WINDOW = 64 << 20
CHUNK = 1 << 22


class Yardstick(NamedTuple):
    name: str
    bits_per_byte: float


def yardsticks(train: TokenStore, held_out: RowLoader, tokenizer: Tokenizer) -> list[Yardstick]:
    """Every yardstick for the held-out split. The compressors see all of its text, the unigram model its targets."""
    text = _text(held_out.store, tokenizer, held_out.store.num_tokens)
    before = _text(train, tokenizer, train.num_tokens, limit=WINDOW)
    return [
        Yardstick("unigram", unigram_bits_per_byte(train, held_out, tokenizer)),
        Yardstick("gzip", 8 * len(gzip.compress(text, 9)) / max(1, len(text))),
        Yardstick("xz after training text", 8 * (_xz(before + text) - _xz(before)) / max(1, len(text))),
    ]


def unigram_bits_per_byte(train: TokenStore, held_out: RowLoader, tokenizer: Tokenizer) -> float:
    """Bits that the smoothed token frequencies of ``train`` need for a byte of the targets of ``held_out``."""
    counts = np.ones(tokenizer.vocab_size)
    for ids in _chunks(train, 0, train.num_tokens, trained=True):
        counts += np.bincount(ids, minlength=tokenizer.vocab_size)
    targets_too = {tokenizer.eos_id, tokenizer.unk_id} if tokenizer.losses else {tokenizer.eos_id}
    if not train.masked:  # in conversations other control tokens end an answer
        counts[sorted(tokenizer.control_ids - targets_too)] = 0.0
    with np.errstate(divide="ignore"):
        bits = -np.log2(counts / counts.sum())
    lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    total, num_bytes = 0.0, 0
    for batch in held_out.sequential(256):
        targets = batch.targets[batch.targets != IGNORE].numpy()
        total += float(bits[targets].sum())
        num_bytes += int(lengths[targets].sum())
    return total / max(1, num_bytes) if math.isfinite(total) else math.inf


def _text(store: TokenStore, tokenizer: Tokenizer, stop: int, *, limit: int | None = None) -> bytes:
    """The trained bytes of documents up to token ``stop``, one after another; at most the last ``limit`` of them."""
    table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    start = 0 if limit is None else max(0, stop - limit)
    chunks = _chunks(store, start, stop, trained=True)
    text = b"".join(b"".join(map(table.__getitem__, ids.tolist())) for ids in chunks)
    return text if limit is None else text[-limit:]


def _chunks(store: TokenStore, start: int, stop: int, *, trained: bool = False) -> Iterator[np.ndarray]:
    for first in range(start, stop, CHUNK):
        ids = store.slice(first, min(first + CHUNK, stop))
        yield ids[store.trained(first, min(first + CHUNK, stop))] if trained and store.masked else ids


def _xz(data: bytes) -> int:
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": min(max(1 << 16, len(data)), 2 * WINDOW)}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=chain))
