"""Contenders measured in turn, each in a process of its own, round after round; medians and ratios as a table.

A contender is a function that measures one figure and returns it. Run with ``--only NAME`` a script measures that one
and prints it as JSON, which is how the parent process calls itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

Contender = Callable[[], float]


def seconds(work: Callable[[], object], *, warm_up: int, repeats: int) -> float:
    """Median duration of ``work``."""
    taken = []
    for turn in range(warm_up + repeats):
        start = time.perf_counter()
        work()
        if turn >= warm_up:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main(groups: Mapping[str, Mapping[str, Contender]], *, packages: tuple[str, ...]) -> None:
    """``groups``: title -> contender -> function giving milliseconds; the first of a group is what ratios refer to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        import torch

        torch.set_num_threads(arguments.threads)
        title, _, name = arguments.only.partition("|")
        json.dump(groups[title][name](), sys.stdout)
        return
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(
        f"{_processor()}, {os.cpu_count()} CPUs, {arguments.threads} threads; Python {platform.python_version()},",
        end=" ",
    )
    print(f"{versions}; medians of {arguments.rounds} interleaved rounds, load {os.getloadavg()[0]:.1f} at the start")
    for title, contenders in groups.items():
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(arguments.rounds):
            for name in contenders:
                found[name].append(_measure(title, name, arguments.threads))
        _table(title, found)


def _measure(title: str, name: str, threads: int) -> float:
    command = [sys.executable, sys.argv[0], "--only", f"{title}|{name}", "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{title}: {name} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def _table(title: str, found: Mapping[str, list[float]]) -> None:
    base = statistics.median(next(iter(found.values())))
    print(f"\n| {title} | ms | lowest to highest | time, first = 1 |\n|---|---|---|---|")
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:,.1f} | {min(values):,.1f} to {max(values):,.1f} | {middle / base:.2f} |")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 (read as it is)
            return next(line.partition(":")[2].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
