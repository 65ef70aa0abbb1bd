"""Tensors in ordinary blocks: aligned, of any size, freed, and where one was another of its size goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("native_cache")

BEGIN = """
import torch
from cyberslm.native.heap import is_taken, take_heap
from cyberslm.training.process import keep_freed_memory
keep_freed_memory()
early = torch.arange(1000)
"""


def said(code: str, **environment: str) -> list[str]:
    """What a new process prints that runs ``code`` after `BEGIN`."""
    command = [sys.executable, "-c", BEGIN + code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return done.stdout.split()


def test_tensors_are_aligned_hold_what_they_are_given_and_may_outlive_the_change() -> None:
    code = """
assert take_heap() and is_taken() and take_heap()
sizes = [0, 1, 7, 8, 63, 64, 65, 4096, 1 << 20, (1 << 20) + 1]
kept = [torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate(sizes)]
print(all(t.data_ptr() % 64 == 0 for t in kept), all(bool((t == i).all()) for i, t in enumerate(kept)))
print(early.sum().item(), torch.empty(0).data_ptr(), early.resize_(4000)[:1000].sum().item())
print(torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward(), kept[8].clone().sum().item())
import copy
print(copy.deepcopy(kept[5]).tolist() == kept[5].tolist())
"""
    assert said(code) == ["True", "True", "499500", "0", "499500", "None", str(8 << 20), "True"]


def test_a_block_goes_where_one_of_its_size_was() -> None:
    """Of torch's own all did or none, by where the heap happened to begin: glibc wants room to align besides."""
    code = """
take_heap()
walls, blocks = [], []
for _ in range(30):  # gaps of 3 MiB with walls of 1 between
    blocks.append(torch.empty(3 << 20, dtype=torch.uint8))
    walls.append(torch.empty(1 << 20, dtype=torch.uint8))
gaps = {t.data_ptr() for t in blocks}
del blocks
again = [torch.empty(3 << 20, dtype=torch.uint8) for _ in range(30)]
print(sum(t.data_ptr() in gaps for t in again))
"""
    assert int(said(code)[0]) >= 28


def test_memory_that_is_not_there_is_said_with_its_size() -> None:
    code = """
take_heap()
for size in (1 << 55, (1 << 63) - 1):
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        print(str(error).split("bytes")[0].replace(" ", "_"))
"""
    assert said(code) == [f"can't_allocate_memory_for_a_tensor_of_{size}_" for size in (1 << 55, (1 << 63) - 1)]


def test_without_a_compiler_and_without_leave_to_compile_all_is_as_ever(tmp_path: Path) -> None:
    code = """
from cyberslm.training.process import prepare_for_training
prepare_for_training({make})
print(is_taken(), torch.ones(3).sum().item())
"""
    assert said(code.format(make=""), CXX=str(tmp_path / "none")) == ["False", "3.0"]
    assert said(code.format(make=""), CYBERSLM_CACHE="/dev/null/none") == ["False", "3.0"]
    assert said(code.format(make="make=False"), CYBERSLM_CACHE=str(tmp_path)) == ["False", "3.0"]
    assert not list(tmp_path.iterdir())
    assert said(code.format(make=""), CYBERSLM_CACHE=str(tmp_path)) == ["True", "3.0"]
    assert said(code.format(make="make=False"), CYBERSLM_CACHE=str(tmp_path)) == ["True", "3.0"]
