"""Memory for torch's tensors on a CPU whose blocks fit into the gaps of earlier ones (`heap.cpp`).

In a training process a third of the memory was gaps. It is torch's own interface for allocators, so the source is
compiled against the headers that come with torch, in about a second. Only a process that exists to train takes it
(`cyberslm.training.process`).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from cyberslm.native.build import Plan, built, find_compiler, kept

_taken = False


def take_heap(*, make: bool = True) -> bool:
    """Let this process's tensors from now on have such memory; whether they do.

    Without ``make`` only where an earlier process has compiled it. Raises `BuildError`, `StorageError`.
    """
    global _taken  # noqa: PLW0603 (as the allocator is the process's)
    if not _taken:
        compiler, plan = find_compiler(), _plan()
        library = kept(plan, compiler) or (built(plan, compiler) if make else None)
        if library is not None:
            library.take_heap()
            _taken = True
    return _taken


def is_taken() -> bool:
    return _taken


def _plan() -> Plan:
    import torch

    folder = Path(torch.__file__).parent
    return Plan(
        units=("heap.cpp",),
        options=(
            *("-O2", "-std=c++17", "-shared", "-fPIC", f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        declare=_declare,
        version=torch.__version__,
    )


def _declare(library: ctypes.CDLL) -> None:
    library.take_heap.argtypes, library.take_heap.restype = [], None
