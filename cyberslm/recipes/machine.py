"""What this machine is and can do, as far as a run needs to know it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from cyberslm.errors import ConfigError, CyberSLMError
from cyberslm.native.build import find_compiler, kept_library, library
from cyberslm.training.compiled import is_worth_compiling
from cyberslm.training.distributed import Dist, place
from cyberslm.training.limits import auto_precision
from cyberslm.training.loss_scale import LossScale

if TYPE_CHECKING:
    from cyberslm.recipes.config import TrainRun
    from cyberslm.recipes.data import Say

PRODUCTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = ("cyberslm", "torch", "sentencepiece", "safetensors", "numpy")


def pick_device(name: str) -> torch.device:
    """The device meant by auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for and torch sees no NVIDIA GPU: use device: auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def on_this_machine(run: TrainRun) -> tuple[TrainRun, torch.device]:
    """The run with ``auto`` replaced by what it means here, and its device."""
    device = pick_device(run.device)
    precision = run.precision
    if precision == "auto":
        precision = auto_precision(device)
    return replace(run, device="cuda" if device.type == "cuda" else "cpu", precision=precision), device


def with_native(run: TrainRun, dist: Dist, say: Say) -> TrainRun:
    """The run with ``native`` as it is here: True if every process has the library; a line where one can't be made."""
    if run.native is False or dist.device.type != "cpu":
        return replace(run, native=False)
    dist.on_first(lambda: _failure_of_library(say))
    failed = next((reason for reason in dist.gather(_failure_of_library(say)) if reason is not None), None)
    if failed is not None:
        say(f"warning: slower, without the loops in C++ (native: false leaves them out): {failed}")
    return replace(run, native=failed is None)


def wants_compiling(run: TrainRun, dist: Dist) -> bool:
    """Whether `with_native`'s run is to be compiled, if that can be done."""
    if dist.strategy == "fsdp":
        return False
    if run.compile == "auto":
        return is_worth_compiling(run.row_shape, run.train, native=run.native is True)
    return run.compile


def _failure_of_library(say: Say) -> str | None:
    try:
        if kept_library(find_compiler()) is None:
            say("building the loops in C++ for this machine, once")
        library()
    except (CyberSLMError, OSError) as error:
        return str(error)
    return None


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads (0 = as it is, or this process's share of torchrun's), then as before."""
    before = torch.get_num_threads()
    processes = place().neighbours
    if not count and processes > 1:  # torchrun gives each process one thread
        count = max(1, len(os.sched_getaffinity(0)) // processes)
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(precision: str, device: torch.device) -> Callable:
    """A context for the forward pass: bf16 or fp16 matrix products on fp32 weights, or nothing."""
    if precision == "fp32":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=PRODUCTS[precision])


def products(run: TrainRun) -> torch.dtype:
    """The dtype of matrix products."""
    return PRODUCTS[run.precision]


def loss_scale(run: TrainRun) -> LossScale | None:
    """What keeps gradients from underflow, in the one precision whose range is that small."""
    return LossScale() if run.precision == "fp16" else None


def environment() -> dict[str, object]:
    """What decides numbers besides the configuration, for ``env.json``."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: package_version(name) for name in PACKAGES},
        "command": sys.argv,
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
