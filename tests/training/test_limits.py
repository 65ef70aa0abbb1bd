from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cyberslm.training import limits
from cyberslm.training.limits import FreshMemory, auto_precision, fresh_memory, memory_bandwidth, product_rates

CPU = torch.device("cpu")


def test_rates_are_operations_over_the_shortest_time(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_shortest", lambda work, seconds, device: (work(), 0.5)[1])
    rates = product_rates(CPU, torch.float32, rows=64, width=8, inner=16, seconds=9.0)
    assert rates == (2 * 64 * 8 * 16 / 0.5,) * 3
    assert rates.limit == max(rates)


def test_fewer_rows_where_a_product_would_take_too_long(monkeypatch) -> None:
    monkeypatch.setattr(limits, "_shortest", lambda work, seconds, device: (work(), 10.0)[1])
    assert product_rates(CPU, torch.float32, rows=4096, width=8, inner=16, seconds=0.1).forward == 2 * 128 * 8 * 16 / 10


def test_rates_of_this_machine_are_positive_and_repeat_in_order() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert min(product_rates(CPU, dtype, rows=64, width=32, inner=48, seconds=0.0)) > 0
    assert memory_bandwidth(CPU, size=1 << 20, seconds=0.0) > 0


def said_by(code: str) -> list[str]:
    """What a new process prints whose memory nobody has set up."""
    plain = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=plain
    ).stdout.split()


def test_memory_that_is_kept_needs_no_new_pages() -> None:
    """What `keep_freed_memory` does is seen from outside, whatever the C library says of its settings."""
    code = (
        "from cyberslm.training.process import keep_freed_memory\n"
        "from cyberslm.training.limits import fresh_memory\n"
        "before = fresh_memory()\n"
        "assert keep_freed_memory()\n"
        "print(before.kept, fresh_memory().kept)\n"
    )
    assert said_by(code) == ["False", "True"]


def test_pages_asked_for_in_advance_are_large_wherever_blocks_begin() -> None:
    """Torch began each block at a page of 2 MiB, and up to so much was lost between two of them."""
    code = (
        "import torch\n"
        "from cyberslm.training.process import ask_for_huge_pages, keep_freed_memory\n"
        "from cyberslm.training.trackers import peak_memory\n"
        "assert keep_freed_memory()\n"
        "asked = ask_for_huge_pages(1 << 30)\n"
        "before = peak_memory()\n"
        "kept = [torch.ones(2_500_000, dtype=torch.uint8) for _ in range(100)]\n"
        "lines = open('/proc/self/smaps').read().splitlines()\n"
        "huge = sum(int(line.split()[1]) for line in lines if line.startswith('AnonHugePages'))\n"
        "print(asked, (peak_memory() - before) / 250e6, huge)\n"
    )
    asked, taken, huge = map(float, said_by(code))
    assert taken < 1.1
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if mode.exists() and "[never]" not in mode.read_text():
        assert asked == 1 << 30
        assert huge > 0


def test_pages_tell_whether_they_are_large() -> None:
    assert FreshMemory(first=16_384, again=0) == (16_384, 0)
    assert not FreshMemory(first=16_384, again=0).huge
    assert FreshMemory(first=40, again=40).huge
    assert fresh_memory().first >= 0


@pytest.mark.parametrize(
    ("bf16", "capability", "precision"), [(True, (9, 0), "bf16"), (False, (7, 5), "fp16"), (False, (6, 1), "fp32")]
)
def test_gpu_gets_fp16_only_where_it_has_no_bf16(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, capability: tuple[int, int], precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert auto_precision(torch.device("cuda")) == precision


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16"), (False, "fp32")])
def test_processor_never_gets_fp16(monkeypatch: pytest.MonkeyPatch, bf16: bool, precision: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    assert auto_precision(torch.device("cpu")) == precision
