"""Settings of the whole process that make training on a CPU faster.

They are choices for a process that exists to train: the command line makes them before it loads anything else; an
import never does. What the user has set in the environment stays.

By default glibc returns large blocks to the system when they are freed, and the next step pays for fresh zeroed pages
of 4 KiB each. Kept blocks spare that, and pages of 2 MiB make what is left cheap. They are asked for where the heap
will grow to, before it does: torch's own way to them (``THP_MEM_ALLOC_ENABLE``) begins each block at a page of 2 MiB,
and what lies between two blocks is lost, a fifth of the memory of a run with many blocks. And tensors get memory that
fits into the gaps of earlier ones (`cyberslm.native.heap`).
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

from cyberslm.errors import CyberSLMError
from cyberslm.native.heap import take_heap

STRETCH = 256 << 20
"""Bytes of the heap that are reserved at once: of the address space, not of memory."""
PIN = 1 << 20
"""Bytes that stay in use, more than a gap further down would take in."""
PAGE, MADV_HUGEPAGE = 4096, 14  # madvise(2)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def prepare_for_training(*, make: bool = True) -> None:
    """All of them: freed memory kept, huge pages, tensors in it without gaps, compiled graphs in the user's own folder.

    Without ``make`` nothing is compiled for it.
    """
    if keep_freed_memory():
        ask_for_huge_pages(_memory() // 2)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (folder := _own_cache()) is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    with suppress(CyberSLMError, OSError, RuntimeError):  # without a compiler, or a folder to keep it in, as ever
        take_heap(make=make)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks; False where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


def ask_for_huge_pages(size: int) -> int:
    """Have the next ``size`` bytes that the heap grows by in pages of 2 MiB; of how many the system takes note.

    `keep_freed_memory` comes before, so that the heap keeps what is reserved here and freed at once.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks: list[int] = []
    refused = False
    while not refused and (len(blocks) + 1) * STRETCH <= size and (block := libc.malloc(STRETCH)):
        blocks.append(block)
        first = -(-block // PAGE) * PAGE
        refused = bool(libc.madvise(first, (block + STRETCH - first) // PAGE * PAGE, MADV_HUGEPAGE))
    libc.malloc(PIN)  # stays above them, as the heap's upper end would be given back
    for block in blocks:
        libc.free(block)
    return (len(blocks) - refused) * STRETCH


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _own_cache() -> Path | None:
    """A folder that only the user can write to, as what lies there is run; torch's default is in a shared one."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "cyberslm" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
