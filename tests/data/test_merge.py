from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cyberslm
from cyberslm import files
from cyberslm.data import merge as module
from cyberslm.data.merge import merge
from cyberslm.data.shards import Place, ShardWriter
from cyberslm.data.store import TokenStore
from cyberslm.errors import InputError

SHA = "cd" * 32
OPTIONS = {"vocab_size": 300, "tokenizer_sha256": SHA}


def write_file(writer: ShardWriter, number: int) -> None:
    """What a worker makes of input file ``number``: some documents, a few with a loss mask."""
    draw = random.Random(number)
    for line in range(1, 1 + draw.randint(1, 5)):
        size = draw.randint(1, 12)
        trained = np.array([draw.random() < 0.8 for _ in range(size)]) if draw.random() < 0.3 else None
        ids = np.array([draw.randrange(300) for _ in range(size)])
        writer.add(ids, text_bytes=3 * size, place=Place(number // 4, number, line), trained=trained)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tokens")}


def alone(folder: Path, count: int, shard_tokens: int) -> dict[str, bytes]:
    folder.mkdir()
    with ShardWriter(folder, "train", shard_tokens=shard_tokens, **OPTIONS) as writer:
        for number in range(count):
            write_file(writer, number)
    return shards(folder)


def together(folder: Path, parts: list[Path], shard_tokens: int) -> dict[str, bytes]:
    folder.mkdir()
    stores = [TokenStore.open(part, "train", **OPTIONS) for part in parts]
    with ShardWriter(folder, "train", shard_tokens=shard_tokens, **OPTIONS) as writer:
        merge(stores, writer)
    return shards(folder)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 60), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_merged_shards_are_the_bytes_of_one_writer(tmp_path_factory, workers, shard_tokens, part_tokens, block):
    """Whoever took which file, however long their shards, in whatever blocks they are copied."""
    folder = tmp_path_factory.mktemp("merge")
    parts = []
    for worker in sorted(set(workers), reverse=True):
        part = folder / str(worker)
        part.mkdir()
        with ShardWriter(part, "train", shard_tokens=part_tokens, **OPTIONS) as writer:
            for number, owner in enumerate(workers):
                if owner == worker:
                    write_file(writer, number)
        parts.append(part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_TOKENS", block * 5)
        patch.setattr(module, "BLOCK_DOCUMENTS", block)
        merged = together(folder / "merged", parts, shard_tokens)
    assert merged == alone(folder / "alone", len(workers), shard_tokens)


def test_a_file_in_two_pieces_is_refused(tmp_path):
    for part in "ab":
        (tmp_path / part).mkdir()
        with ShardWriter(tmp_path / part, "train", **OPTIONS) as writer:
            write_file(writer, 3)
    with pytest.raises(InputError, match="file 3 is in two pieces"):
        together(tmp_path / "merged", [tmp_path / "a", tmp_path / "b"], 100)


WORKER = """
import os, sys
from pathlib import Path
from test_merge import OPTIONS, ShardWriter, files, write_file

def fill(folder):
    with ShardWriter(folder, "train", shard_tokens=20, **OPTIONS) as writer:
        for number in range(int(sys.argv[2]), 12, 3):
            write_file(writer, number)
            if sys.argv[3] == "die" and number > 6:
                os._exit(9)
    return {}

files.publish(Path(sys.argv[1]), fill)
"""


def test_work_that_was_killed_is_done_again_alone_and_the_result_is_the_same(tmp_path):
    """Three processes write a folder each; one dies in the middle and is the only one that starts again."""
    path = f"{Path(cyberslm.__file__).parents[1]}:{Path(__file__).parent}"

    def start(worker: int, how: str) -> int:
        command = [sys.executable, "-c", WORKER, str(tmp_path / f"part-{worker}"), str(worker), how]
        return subprocess.run(command, env={"PYTHONPATH": path}, check=False).returncode

    assert [start(0, "live"), start(1, "die"), start(2, "live")] == [0, 9, 0]
    parts = [tmp_path / f"part-{worker}" for worker in range(3)]
    assert [files.looks_published(part) for part in parts] == [True, False, True]
    assert start(1, "live") == 0
    assert together(tmp_path / "merged", parts, 50) == alone(tmp_path / "alone", 12, 50)
