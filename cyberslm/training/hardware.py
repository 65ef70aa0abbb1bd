"""What the machine gives this process, read from Linux's own files without torch.

A container or a job scheduler often gives less than the machine has: a CPU affinity, a CPU quota, a memory limit. The
limits of control groups hold along the whole path from the process's group to the root, in version 1
(https://docs.kernel.org/admin-guide/cgroup-v1) and version 2 (cgroup-v2) alike; the lowest counts. Elsewhere than on
Linux what can't be read is None. ``root`` is where the files are looked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
UNLIMITED = 1 << 60  # version 1 writes the largest page-aligned number where there is no limit


class Memory(NamedTuple):
    """Bytes. ``total`` is the smaller of the machine's memory and ``limit``, the control groups' where one is set."""

    total: int
    available: int
    limit: int | None


class Cores(NamedTuple):
    present: int
    allowed: int
    """Those that the process may run on (affinity)."""
    quota: float | None
    """Cores' worth of time that its control groups may take."""

    @property
    def usable(self) -> int:
        return self.allowed if self.quota is None else max(1, min(self.allowed, round(self.quota)))


class Processor(NamedTuple):
    name: str | None
    flags: frozenset[str]
    """As Linux spells them, such as avx512f, avx512_bf16, amx_bf16."""


def memory(root: Path = ROOT) -> Memory | None:
    """Memory that this process can have, None where it can't be read."""
    fields = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    try:
        total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return None
    limit = None
    for group in _groups(root, "memory"):
        most = _number(group, "memory.max", "memory.limit_in_bytes")
        if most is None or most >= UNLIMITED:
            continue
        limit = most if limit is None else min(limit, most)
        used = _number(group, "memory.current", "memory.usage_in_bytes") or 0
        available = min(available, max(0, most - used + _reclaimable(group)))
    return Memory(total if limit is None else min(total, limit), min(available, total), limit)


def cores(root: Path = ROOT) -> Cores:
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    return Cores(present, allowed, min(quotas, default=None))


def processor(root: Path = ROOT) -> Processor:
    name, flags = None, ""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = value
            break
    return Processor(name, frozenset(flags.split()))


def huge_pages(root: Path = ROOT) -> str | None:
    """The kernel's mode of transparent huge pages: always, madvise or never."""
    found = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return found[found.find("[") + 1 : found.find("]")] or None if "[" in found else None


def busy_cores(seconds: float, root: Path = ROOT) -> float | None:
    """Cores that others keep busy, seen while this process waits for ``seconds``."""
    before = _ticks(root)
    time.sleep(seconds)
    after = _ticks(root)
    if before is None or after is None:
        return None
    total, idle = after[0] - before[0], after[1] - before[1]
    return (1 - idle / total) * (os.cpu_count() or 1) if total > 0 else None


def _ticks(root: Path) -> tuple[int, int] | None:
    """Time of all cores since boot, and how much of it was idle or waiting for a disk (proc_stat(5))."""
    first = _text(root / "proc/stat").partition("\n")[0].split()
    try:
        ticks = [int(word) for word in first[1:9]]
    except ValueError:
        return None
    return (sum(ticks), ticks[3] + ticks[4]) if len(ticks) > 4 else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups for ``controller``, each with its parents."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        top = base / controller if names else base
        inner = top / path.strip("/")
        # In a container the path is often that of the host, which isn't there: its limits are then those of the top.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top) and folder.is_dir())


def _quota(group: Path) -> float | None:
    with suppress(ValueError):
        words = _text(group / "cpu.max").split() or [
            _text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        quota, period = int(words[0]), int(words[1])
        if quota > 0 and period > 0:
            return quota / period
    return None


def _reclaimable(group: Path) -> int:
    """Cached file pages of a group, which count as used and are given up when memory is needed."""
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that holds one."""
    return next((int(text) for name in names if (text := _text(group / name).strip()).isdigit()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
