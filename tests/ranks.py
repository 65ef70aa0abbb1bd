"""Run a function in several processes that train together over gloo, as torchrun would start them.

A fork server imports torch once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from cyberslm.training import distributed

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "cyberslm.recipes.train"])


class Ended(NamedTuple):
    """What the function returned or raised, if it came to that, and the exit code of its process."""

    value: Any
    error: str | None
    code: int | None


def in_ranks(work: Callable[..., Any], *args: object, world: int = 2, within: float = 60.0) -> list[Ended]:
    """``work(*args)`` on each rank; a process that doesn't end within that many seconds is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, pipe) in enumerate(pipes):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = _CONTEXT.Process(target=_rank, args=(work, args, env, pipe), daemon=True)
        process.start()
        pipe.close()
        processes.append(process)
    end = time.monotonic() + within
    return [_ended(process, pipe, end) for process, (pipe, _) in zip(processes, pipes, strict=True)]


def all_of(ended: list[Ended]) -> list[Any]:
    """The values of ranks that all ended well."""
    assert [each.error for each in ended] == [None] * len(ended)
    return [each.value for each in ended]


def _rank(work: Callable[..., Any], args: tuple, env: dict[str, object], pipe: Connection) -> None:
    os.environ.update({key: str(value) for key, value in env.items()})
    torch.set_num_threads(1)
    distributed.PAUSE_SECONDS = 0
    try:
        value = work(*args)
    except Exception as error:  # noqa: BLE001 (told to the test)
        pipe.send((None, f"{type(error).__name__}: {error}"))
    else:
        pipe.send((value, None))


def _ended(process: Any, pipe: Connection, end: float) -> Ended:
    value, error = None, "nothing was heard of it"
    if pipe.poll(max(0, end - time.monotonic())):
        try:
            value, error = pipe.recv()
        except EOFError:
            error = "it was killed"
    process.join(max(0.1, end - time.monotonic()))
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return Ended(value, error, process.exitcode)
