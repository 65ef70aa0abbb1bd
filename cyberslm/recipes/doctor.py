"""What this machine has, what it reaches, and what that means for training: the checks of ``cyberslm doctor``.

A check gives a `Finding`: a value for programs, a line for people, and where something is off what to do about it.
Nothing is written and nothing but this machine is asked.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from cyberslm.errors import ConfigError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.native.build import BuildError, find_compiler, kept_library
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.machine import on_this_machine, package_version
from cyberslm.training import hardware, limits
from cyberslm.training.trackers import short

GiB = 1 << 30
ROWS = 4 * 1024
"""Tokens of the measured products: four rows of the default context."""
LITTLE_MEMORY = 2 * GiB
LITTLE_DISK = 5 * GiB
EXTRAS = {
    "plots": "matplotlib",
    "trackers": "tensorboard",
    "data": "pyarrow",
    "serve": "fastapi",
    "constrain": "llguidance",
    "interop": "tokenizers",
    "eval": "lm_eval",
    "scale": "datatrove",
}
"""One module of each extra of the package, by which it is known to be installed."""


@dataclass(frozen=True)
class Finding:
    """``value`` is what JSON shows, ``text`` what people read, ``fix`` what to do where something is off."""

    name: str
    value: object
    text: str
    fix: str | None = None


def doctor() -> Iterator[Finding]:
    """Every finding, the slow measurements last; under five seconds in all where nothing else is running."""
    for check in (_processor, _cores, _load, _memory, _pages, _allocator, _gpus, _torch, _compiler, _disk, _extras):
        yield from check()
    yield from _choices()
    yield from _measured()


def _processor() -> Iterator[Finding]:
    found = hardware.processor()
    has = {
        "AVX-512": "avx512f" in found.flags,
        "bf16": bool({"avx512_bf16", "amx_bf16"} & found.flags),
        "AMX": "amx_bf16" in found.flags,
    }
    able = ", ".join(name for name, there in has.items() if there) or "none of AVX-512, bf16, AMX"
    bf16 = "bf16 products are computed by the processor" if has["bf16"] else "bf16 products are emulated, and slow"
    yield Finding(
        "processor",
        {"name": found.name, "architecture": platform.machine()} | has,
        f"{found.name or platform.machine()}, {able}: {bf16}",
    )


def _cores() -> Iterator[Finding]:
    found = hardware.cores()
    quota = "" if found.quota is None else f", quota of {found.quota:.1f}"
    fix = None
    if found.usable == 1:
        fix = "one core: training has one thread. Give the process more (taskset, CPU limit of the container or job)"
    elif found.quota is not None and found.quota < found.allowed:
        fix = f"more threads than the quota are stopped again and again: set threads: {found.usable}"
    yield Finding(
        "cores",
        found._asdict() | {"usable": found.usable},
        f"{found.usable} usable of {found.present} (allowed {found.allowed}{quota})",
        fix,
    )


def _load() -> Iterator[Finding]:
    busy = hardware.busy_cores(0.3)
    if busy is None:
        return
    fix = None
    if busy > 0.3:
        fix = "other programs are computing: training is slower, and so are the rates measured here. See them with: top"
    yield Finding("other load", busy, f"{busy:.1f} of {os.cpu_count()} cores are busy with other programs", fix)


def _memory() -> Iterator[Finding]:
    found = hardware.memory()
    if found is None:
        return
    limit = "" if found.limit is None else f" (limit of its control group {_gib(found.limit)})"
    fix = None
    if found.available < LITTLE_MEMORY:
        fix = "little memory: lower train.micro_batch_size and model.max_seq_len; cyberslm check says what a run needs"
    yield Finding("memory", found._asdict(), f"{_gib(found.available)} free of {_gib(found.total)}{limit}", fix)


def _pages() -> Iterator[Finding]:
    mode = hardware.huge_pages()
    meaning = {
        "always": "large blocks get them without asking",
        "madvise": "programs that ask get them",
        "never": "memory comes in pages of 4 KiB, and training is slower",
    }
    if mode is None:
        return
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled" if mode == "never" else None
    yield Finding("huge pages", mode, f"{mode}: {meaning.get(mode, 'unknown mode')}", fix)


def _allocator() -> Iterator[Finding]:
    """Seen from how many pages the kernel makes, so it holds for every allocator and however it was set."""
    found = limits.fresh_memory()
    kept = "freed memory is kept for the next step" if found.kept else "freed memory goes back to the system"
    fix = None if found.kept else "every step pays for new pages: this C library isn't glibc, whose settings are known"
    yield Finding(
        "allocator",
        found._asdict() | {"kept": found.kept, "huge": found.huge},
        f"{kept}, new memory comes in {'huge' if found.huge else 'small'} pages (as cyberslm train sets it)",
        fix,
    )


def _gpus() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            value = {"name": name, "total": total, "free": free, "bf16": bf16}
            yield Finding(f"gpu {index}", value, f"{name}, {_gib(free)} free of {_gib(total)}")
        return
    fix = None
    if Path("/proc/driver/nvidia").exists():
        fix = "there is an NVIDIA driver and torch sees no GPU: install a CUDA build of torch (see pytorch.org)"
    yield Finding("gpu", None, "none: training runs on the processor", fix)


def _torch() -> Iterator[Finding]:
    threads, usable = torch.get_num_threads(), hardware.cores().usable
    library = "MKL" if torch.backends.mkl.is_available() else "another BLAS than MKL"
    products = "oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN"
    fix = None
    if threads != usable:
        fix = f"{threads} threads on {usable} usable cores: set threads: {usable} (OMP_NUM_THREADS may hold it down)"
    value = {
        "version": torch.__version__,
        "threads": threads,
        "blas": library,
        "onednn": torch.backends.mkldnn.is_available(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    yield Finding(
        "torch",
        value,
        f"{torch.__version__}, {threads} threads, {library}, {products}, {value['instructions']} instructions",
        fix,
    )


def _compiler() -> Iterator[Finding]:
    try:
        found = find_compiler()
    except BuildError as error:
        fix = "install a C++ compiler (Debian, Ubuntu: apt install g++) or name one with CXX"
        yield Finding("compiler", None, f"{error}: neither loops in C++ nor torch.compile on the processor", fix)
        return
    kept = "built" if kept_library(found) is not None else "not built yet"
    yield Finding("compiler", str(found), f"{found}: loops in C++ ({kept}) and torch.compile can be used")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    each = 12 * CyberSLMConfig().num_parameters
    text = f"{_gib(free)} free in this folder, {free // each:,} checkpoints of the default model"
    fix = "little room: free some, or set out_dir to a larger disk" if free < LITTLE_DISK else None
    yield Finding("disk", free, text, fix)


def _extras() -> Iterator[Finding]:
    there = [name for name, module in EXTRAS.items() if find_spec(module) is not None]
    absent = [name for name in EXTRAS if name not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    if absent:
        text += f"; not: {', '.join(absent)} (pip install 'cyberslm[NAME]')"
    yield Finding("extras", {"installed": there, "absent": absent}, f"cyberslm {package_version('cyberslm')}; {text}")


def _choices() -> Iterator[Finding]:
    """What ``auto`` means here, asked from the code that decides it."""
    try:
        run, device = on_this_machine(TrainRun(out_dir="."))
    except ConfigError as error:
        yield Finding("auto", None, str(error))
        return
    value = {"device": device.type, "precision": run.precision}
    yield Finding("auto", value, f"device: auto is {device.type}, precision: auto is {run.precision}")


def _measured() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = CyberSLMConfig()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        rates = limits.product_rates(device, dtype, rows=ROWS, width=shape.hidden_dim, inner=shape.ffn_hidden_dim)
        yield Finding(
            f"{name} products",
            rates._asdict(),
            f"{_rate(rates.forward)} forward, {_rate(rates.input_gradient)} and {_rate(rates.weight_gradient)} in the"
            f" backward pass ({shape.hidden_dim} x {shape.ffn_hidden_dim}, {ROWS:,} tokens)",
        )
    copied = limits.memory_bandwidth(device)
    yield Finding("memory speed", copied, f"{short(copied, 'B/s')} read and written")


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.fix is not None]


def line(finding: Finding) -> str:
    warning = "" if finding.fix is None else f"\n{'':15}warning: {finding.fix}"
    return f"{finding.name + ':':15}{finding.text}{warning}"


def _gib(number: float) -> str:
    return f"{number / GiB:.1f} GiB"


def _rate(flops: float) -> str:
    return short(flops, "FLOP/s")
