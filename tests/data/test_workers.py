"""Workers that are killed, or whose parent is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cyberslm.data.workers import map_ordered
from cyberslm.errors import DataError

PARENT = """
import os, sys, time
from cyberslm.data.workers import map_ordered

def work(item):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(0.2)
    return item

if __name__ == "__main__":
    list(map_ordered(work, range(10_000), workers=2))
"""


def double(number: int) -> int:
    return 2 * number


def leave(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_order_is_that_of_the_items(workers: int) -> None:
    assert list(map_ordered(double, range(50), workers=workers)) == list(range(0, 100, 2))


def test_worker_that_is_killed_is_one_message() -> None:
    """A worker ended by the kernel for want of memory gave 71 lines of traceback."""
    with pytest.raises(DataError, match="ended from outside, perhaps for want of memory: lower data.workers"):
        list(map_ordered(leave, range(4), workers=2))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """They went on writing parts for minutes after kill -9 of the parent."""
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = {int(parent.stdout.readline()) for _ in range(8)}
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(alive, pids))


INTERRUPTED = """
import sys, time
from cyberslm.cli import main
from cyberslm.data.workers import map_ordered

def work(item):
    time.sleep(0.1)
    return item

if __name__ == "__main__":
    def app():
        print("begun", flush=True)
        list(map_ordered(work, range(10_000), workers=2))
    main.app = app
    main.run()
"""


@pytest.mark.parametrize("delay", [0.0, 0.2, 2.0])
def test_ctrl_c_is_one_line_and_130_while_workers_start_and_work(tmp_path: Path, delay: float) -> None:
    """Each worker printed a traceback, and the process could hang on its own queue."""
    (tmp_path / "parent.py").write_text(INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert (process.returncode, said) == (130, "stopped by SIGINT\n")
