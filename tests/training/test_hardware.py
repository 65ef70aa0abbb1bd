from __future__ import annotations

import os
from pathlib import Path

import pytest

from cyberslm.training.hardware import busy_cores, cores, huge_pages, memory, processor

KiB, MiB = 1 << 10, 1 << 20


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, groups: str = "0::/job/step\n") -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(groups)
    (root / "proc" / "meminfo").write_text("MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 512000 kB\n")
    return root


def group(root: Path, path: str, **texts: str) -> None:
    folder = root / "sys" / "fs" / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_memory_without_groups_is_the_machines(tmp_path: Path) -> None:
    found = memory(machine(tmp_path))
    assert found == (1024000 * KiB, 512000 * KiB, None)


def test_lowest_limit_on_the_path_of_groups_counts(tmp_path: Path) -> None:
    machine(tmp_path)
    group(tmp_path, "job", memory_max=f"{300 * MiB}\n", memory_current=f"{100 * MiB}\n")
    group(tmp_path, "job/step", memory_max="max\n", memory_current=f"{90 * MiB}\n")
    assert memory(tmp_path) == (300 * MiB, 200 * MiB, 300 * MiB)
    group(tmp_path, "job/step", memory_max=f"{150 * MiB}\n")
    assert memory(tmp_path) == (150 * MiB, 60 * MiB, 150 * MiB)


def test_cached_pages_of_a_group_count_as_available(tmp_path: Path) -> None:
    machine(tmp_path)
    stat = f"anon 5\ninactive_file {40 * MiB}\n"
    group(tmp_path, "job/step", memory_max=f"{200 * MiB}", memory_current=f"{150 * MiB}", memory_stat=stat)
    assert memory(tmp_path).available == 90 * MiB


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/box\n3:cpuacct,cpu:/box\n0::/\n")
    group(tmp_path, "memory/box", memory_limit_in_bytes=str(256 * MiB), memory_usage_in_bytes=str(6 * MiB))
    box = tmp_path / "sys" / "fs" / "cgroup" / "cpu" / "box"
    box.mkdir(parents=True)
    (box / "cpu.cfs_quota_us").write_text("150000\n")
    (box / "cpu.cfs_period_us").write_text("100000\n")
    assert memory(tmp_path) == (256 * MiB, 250 * MiB, 256 * MiB)
    assert cores(tmp_path).quota == 1.5


def test_no_limit_in_version_1_is_none(tmp_path: Path) -> None:
    machine(tmp_path, "4:memory:/\n")
    group(tmp_path, "memory", memory_limit_in_bytes="9223372036854771712\n")
    assert memory(tmp_path).limit is None


def test_group_of_the_host_that_is_not_there_leaves_that_of_the_container(tmp_path: Path) -> None:
    machine(tmp_path, "0::/docker/0123\n")
    group(tmp_path, "", memory_max=f"{100 * MiB}\n", cpu_max="50000 100000\n")
    assert memory(tmp_path).limit == 100 * MiB
    assert cores(tmp_path).quota == 0.5


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("200000 100000\n", 2.0), ("odd\n", None)])
def test_quota_of_cores(tmp_path: Path, text: str, quota: float | None) -> None:
    machine(tmp_path)
    group(tmp_path, "job/step", cpu_max=text)
    assert cores(tmp_path).quota == quota


def test_usable_cores_are_those_allowed_within_the_quota(tmp_path: Path) -> None:
    machine(tmp_path)
    found = cores(tmp_path)
    assert found.usable == found.allowed == len(os.sched_getaffinity(0))
    assert found._replace(allowed=8, quota=2.6).usable == 3
    assert found._replace(allowed=8, quota=0.2).usable == 1
    assert found._replace(allowed=2, quota=64.0).usable == 2


def test_processor_and_huge_pages_are_read(tmp_path: Path) -> None:
    files(
        tmp_path,
        proc__cpuinfo="model name\t: Chip: 9\nflags\t\t: fpu avx512f amx_bf16\n\nmodel name\t: other\n",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
    )
    assert processor(tmp_path) == ("Chip: 9", {"fpu", "avx512f", "amx_bf16"})
    assert huge_pages(tmp_path) == "madvise"


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert memory(tmp_path) is None
    assert processor(tmp_path) == (None, frozenset())
    assert huge_pages(tmp_path) is None
    assert busy_cores(0.0, tmp_path) is None
    assert cores(tmp_path).quota is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: much kB\nMemAvailable:\n")
    assert memory(tmp_path) is None


def test_busy_cores_follow_from_two_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = files(tmp_path, proc__stat="cpu  100 0 50 800 50 0 0 0 9 9\ncpu0 1 2\n") / "proc" / "stat"
    monkeypatch.setattr("time.sleep", lambda _: stat.write_text("cpu  160 0 60 820 60 0 0 0 99 99\n"))
    assert busy_cores(0.5, tmp_path) == pytest.approx(0.7 * (os.cpu_count() or 1))
