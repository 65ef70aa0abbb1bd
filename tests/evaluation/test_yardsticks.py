from __future__ import annotations

import gzip
import math
from collections import Counter
from pathlib import Path

import pytest

from cyberslm.data.loader import RowLoader
from cyberslm.data.prepare import open_prepared
from cyberslm.evaluation.yardsticks import yardsticks
from cyberslm.recipes.evaluate import evaluate


@pytest.fixture(scope="module")
def prepared(trained: Path) -> object:
    return open_prepared(trained / "run" / "data")


def loader(prepared: object) -> RowLoader:
    return RowLoader(prepared.validation, seq_len=32, batch_rows=4, seed=0, pad_id=0, bos_id=2)


def test_unigram_equals_counting_by_hand(prepared: object) -> None:
    tokenizer = prepared.tokenizer
    counts = Counter(prepared.train.slice(0, prepared.train.num_tokens).tolist())
    usable = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control_ids - {tokenizer.eos_id}]
    total = sum(counts[i] + 1 for i in usable)
    ids = prepared.validation.slice(1, prepared.validation.num_tokens).tolist()
    bits = sum(-math.log2((counts[i] + 1) / total) for i in ids if i != 2)
    found = {y.name: y.bits_per_byte for y in yardsticks(prepared.train, loader(prepared), tokenizer)}
    assert found["unigram"] == pytest.approx(bits / prepared.validation.text_bytes, rel=1e-9)


def test_compressors_see_the_held_out_bytes(prepared: object) -> None:
    tokenizer, store = prepared.tokenizer, prepared.validation
    text = tokenizer.decode(store.slice(0, store.num_tokens).tolist()).encode()
    assert len(text) == store.text_bytes
    found = {y.name: y.bits_per_byte for y in yardsticks(prepared.train, loader(prepared), tokenizer)}
    assert found["gzip"] == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))
    assert 0 < found["xz after training text"] < found["gzip"] * 1.2


def test_evaluation_scores_every_byte_of_the_split(trained: Path, prepared: object) -> None:
    found = evaluate(trained / "run")
    assert found.score.num_bytes == found.text_bytes == prepared.validation.text_bytes
    assert found.score.bits_per_byte > 0
    assert found.documents == prepared.validation.num_documents
    again = evaluate(trained / "run" / "final", data=trained / "run" / "data")
    assert again.score == found.score
