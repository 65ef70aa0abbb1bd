"""Settings of the whole process that make training on a CPU faster.

They are choices for a process that exists to train: the command line makes them, before torch is loaded; an import
never does. What the user has set in the environment stays.

By default glibc returns large blocks to the system when they are freed, and the next step pays for fresh zeroed pages
of 4 KiB each. Kept blocks spare that, and pages of 2 MiB make what is left cheap. Peak memory stays what it was; it is
only not given back in between.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def prepare_for_training() -> None:
    """All of them: keep freed memory, huge pages for what torch allocates, compiled graphs in the user's own folder."""
    keep_freed_memory()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (folder := _own_cache()) is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks; False where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) and libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


def _own_cache() -> Path | None:
    """A folder that only the user can write to, as what lies there is run; torch's default is in a shared one."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "cyberslm" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
