from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from cyberslm.recipes import doctor
from cyberslm.recipes.doctor import EXTRAS, Finding, line, problems
from cyberslm.training.hardware import Cores, Memory
from cyberslm.training.limits import FreshMemory


def only(findings: Iterable[Finding]) -> Finding:
    (found,) = findings
    return found


def test_every_extra_is_looked_for() -> None:
    pyproject = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert set(EXTRAS) == set(pyproject["project"]["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (Cores(8, 8, None), None),
        (Cores(8, 1, None), "training has one thread"),
        (Cores(8, 8, 2.0), "set threads: 2"),
        (Cores(8, 8, 0.5), "training has one thread"),
        (Cores(8, 2, 4.0), None),
    ],
)
def test_few_cores_and_quotas_are_warned_of(monkeypatch: pytest.MonkeyPatch, cores: Cores, words: str | None) -> None:
    monkeypatch.setattr(doctor.hardware, "cores", lambda: cores)
    found = only(doctor._cores())
    assert (found.fix is None) == (words is None)
    assert words is None or words in str(found.fix)
    assert found.value["usable"] == cores.usable


@pytest.mark.parametrize(("mode", "warned"), [("always", False), ("madvise", False), ("never", True)])
def test_huge_pages_that_are_off_are_warned_of(monkeypatch: pytest.MonkeyPatch, mode: str, warned: bool) -> None:
    monkeypatch.setattr(doctor.hardware, "huge_pages", lambda: mode)
    assert ("tee /sys/kernel" in str(only(doctor._pages()).fix)) == warned


@pytest.mark.parametrize(("gib", "warned"), [(1, True), (8, False)])
def test_little_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch, gib: int, warned: bool) -> None:
    monkeypatch.setattr(doctor.hardware, "memory", lambda: Memory(16 << 30, gib << 30, 16 << 30))
    found = only(doctor._memory())
    assert ("micro_batch_size" in str(found.fix)) == warned
    assert found.text == f"{gib}.0 GiB free of 16.0 GiB (limit of its control group 16.0 GiB)"


@pytest.mark.parametrize(("busy", "warned"), [(0.1, False), (1.5, True)])
def test_other_load_is_warned_of(monkeypatch: pytest.MonkeyPatch, busy: float, warned: bool) -> None:
    monkeypatch.setattr(doctor.hardware, "busy_cores", lambda _: busy)
    assert (only(doctor._load()).fix is not None) == warned


@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_that_goes_back_is_warned_of(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(doctor.limits, "fresh_memory", lambda: FreshMemory(16_384, 0 if kept else 16_384))
    found = only(doctor._allocator())
    assert found.value == {"first": 16_384, "again": 0 if kept else 16_384, "kept": kept, "huge": False}
    assert (found.fix is None) == kept


def test_missing_compiler_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = only(doctor._compiler())
    assert found.value is None
    assert "apt install g++" in str(found.fix)


def test_threads_that_are_not_the_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    for usable, warned in ((threads, False), (threads + 1, True)):
        monkeypatch.setattr(doctor.hardware, "cores", lambda usable=usable: Cores(64, usable, None))
        assert (only(doctor._torch()).fix is not None) == warned


def test_full_disk_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 900_000_000})())
    found = only(doctor._disk())
    assert "0.8 GiB free in this folder, 2 checkpoints" in found.text
    assert found.fix is not None


def test_warning_stands_under_its_line() -> None:
    good, bad = Finding("disk", 5, "much"), Finding("cores", 1, "one", fix="get more")
    assert line(good) == "disk:          much"
    assert line(bad).splitlines() == ["cores:         one", "               warning: get more"]
    assert problems([good, bad]) == [bad]
