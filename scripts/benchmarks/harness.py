"""Contenders measured in turn, each in a process of its own, round after round; medians and ratios as a table.

A contender is a function that measures one figure and returns it, or several by name, of which the first is compared.
Run with ``--only NAME`` a script measures that one
and prints it as JSON, which is how the parent process calls itself. What all contenders need, such as a text, is made
once, before the first round, in a temporary folder that they find by ``material``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

MATERIAL = "CYBERSLM_BENCH_MATERIAL"

Figures = dict[str, float]
Contender = Callable[[], float | Figures]


class Group(NamedTuple):
    """Contenders whose figures have one unit; the first is what ratios refer to."""

    contenders: Mapping[str, Contender]
    unit: str = "ms"


def material() -> Path:
    """The folder that ``make_material`` of `main` has filled."""
    return Path(os.environ[MATERIAL])


def seconds(work: Callable[[], object], *, warm_up: int, repeats: int) -> float:
    """Median duration of ``work``."""
    taken = []
    for turn in range(warm_up + repeats):
        start = time.perf_counter()
        work()
        if turn >= warm_up:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main(
    groups: Mapping[str, Group],
    *,
    packages: tuple[str, ...],
    make_material: Callable[[Path], object] | None = None,
) -> None:
    """Measure every group, or those whose titles begin as ``--group`` says; prints what ``make_material`` returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--group", action="append", help="the beginning of titles to measure; repeat for several")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        title, _, name = arguments.only.partition("|")
        json.dump(groups[title].contenders[name](), sys.stdout)
        return
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(
        f"{_processor()}, {os.cpu_count()} CPUs, {arguments.threads} threads; Python {platform.python_version()},",
        end=" ",
    )
    print(f"{versions}; medians of {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory() as folder:
        if make_material is not None:
            os.environ[MATERIAL] = folder
            print(make_material(Path(folder)))
        for title, group in groups.items():
            if title.startswith(tuple(arguments.group or [""])):
                _table(title, group.unit, _rounds(title, group, arguments.rounds, arguments.threads))
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def peak_mib() -> float:
    """Most memory that this process has had. (``ru_maxrss`` begins with that of the process which started it.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) / 1024  # type: ignore[index]


def _rounds(title: str, group: Group, rounds: int, threads: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in group.contenders}
    for _ in range(rounds):
        for name in group.contenders:
            figures = _measure(title, name, threads)
            found[name].append(figures if isinstance(figures, dict) else {group.unit: figures})
    return found


def _measure(title: str, name: str, threads: int) -> float | Figures:
    command = [sys.executable, sys.argv[0], "--only", f"{title}|{name}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{title}: {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _table(title: str, unit: str, found: Mapping[str, list[Figures]]) -> None:
    main_figure, *others = next(iter(found.values()))[0]
    base = statistics.median(figures[main_figure] for figures in next(iter(found.values())))
    print(f"\n| {title} | {' | '.join([unit, 'lowest to highest', 'first = 1', *others])} |")
    print(f"|{'---|' * (4 + len(others))}", flush=True)
    for name, rounds in found.items():
        values = [figures[main_figure] for figures in rounds]
        middle = statistics.median(values)
        rest = [f"{statistics.median(figures[other] for figures in rounds):,.0f}" for other in others]
        cells = [f"{middle:,.2f}", f"{min(values):,.2f} to {max(values):,.2f}", f"{middle / base:.3g}", *rest]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 (read as it is)
            return next(line.partition(":")[2].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
