"""What the machine reaches when nothing but one thing is done: matrix products, moving memory, fresh memory.

A training step can't be faster than its matrix products alone, so their rate is the limit that throughput is compared
with. The product measured is that of a feed-forward, in the three forms that a step has: forward, and the gradients of
its input and of its weight. The best of several passes counts, as a limit is what can be reached.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

FRESH = 64 << 20


class ProductRates(NamedTuple):
    """Operations per second of the three products of a linear layer in training."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def limit(self) -> float:
        return max(self)


class FreshMemory(NamedTuple):
    """Pages that the kernel had to make for a block of 64 MiB, and again for the next one after it was freed."""

    first: int
    again: int

    @property
    def kept(self) -> bool:
        """Freed memory is used again as it is."""
        return self.again * resource.getpagesize() < FRESH // 4

    @property
    def huge(self) -> bool:
        """Pages are larger than the smallest."""
        return self.first * resource.getpagesize() < FRESH // 4


def product_rates(
    device: torch.device, dtype: torch.dtype, *, rows: int, width: int, inner: int, seconds: float = 0.15
) -> ProductRates:
    """Rates of ``(rows, width) x (width, inner)``; takes about three times ``seconds``.

    Fewer rows are used where ``rows`` would take much longer than that.
    """

    def best(make: Callable[[int], Callable[[], object]]) -> float:
        few = min(rows, 128)
        work = make(few)
        work()
        number = max(few, min(rows, int(few * seconds / max(1e-9, _shortest(work, 0.0, device)))))
        return 2 * number * width * inner / _shortest(make(number), seconds, device)

    def new(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    def forward(number: int) -> Callable[[], object]:
        x, weight = new(number, width), new(inner, width)
        return lambda: x @ weight.T

    def input_gradient(number: int) -> Callable[[], object]:
        gradient, weight = new(number, inner), new(inner, width)
        return lambda: gradient @ weight

    def weight_gradient(number: int) -> Callable[[], object]:
        gradient, x = new(number, inner), new(number, width)
        return lambda: gradient.T @ x

    with torch.no_grad():
        return ProductRates(best(forward), best(input_gradient), best(weight_gradient))


def memory_bandwidth(device: torch.device, *, size: int = 128 << 20, seconds: float = 0.3) -> float:
    """Bytes per second, read and written, of copying ``size`` bytes, which should be more than the caches hold."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _shortest(lambda: target.copy_(source), seconds, device)


def fresh_memory() -> FreshMemory:
    """How this process gets memory now: shows what allocator settings do, whoever made them."""

    def faults(size: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(size, dtype=torch.uint8).fill_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # glibc before 2.38 doesn't put an aligned block into a gap of just its size: the second is a little smaller
    return FreshMemory(faults(FRESH), faults(FRESH - (64 << 10)))


def _shortest(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The shortest of the passes that begin within ``seconds``, one at least after one to warm up."""
    work()
    end = time.perf_counter() + seconds
    shortest = float("inf")
    while True:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        now = time.perf_counter()
        shortest = min(shortest, now - start)
        if now >= end:
            return shortest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def auto_precision(device: torch.device) -> Literal["fp32", "bf16", "fp16"]:
    """What ``precision: auto`` is there: bf16 where the processor has products of it.

    On a GPU that has none, fp16 where it has tensor cores (compute capability 7); emulated bf16 is slower than fp32.
    """
    if device.type != "cuda":
        return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "fp32"
