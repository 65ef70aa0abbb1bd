"""A map over worker processes that keeps the order and never reads far ahead.

``ProcessPoolExecutor.map`` reads all of its input at once, so a corpus would not fit. Here at most ``AHEAD`` items a
worker are under way. The function is sent to each worker once, when it starts, and not again with each item: a step may
hold tables of many megabytes. Workers never see Ctrl-C; they leave when the far end of a pipe is closed, by the caller
or by its death.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from cyberslm.errors import DataError

AHEAD = 3

Item = TypeVar("Item")
Result = TypeVar("Result")

# Set once in each worker process, when it starts, and never in the process that called.
_in_worker: list[Callable[[Any], Any]] = []


def map_ordered(function: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Iterator[Result]:
    """``map(function, items)``, in ``workers`` processes if more than one. What ``function`` raises is raised here."""
    if workers <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    initargs = function, near
    with near, far, ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=initargs) as pool:
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                with _interrupts_wait():
                    under_way.append(pool.submit(_call, item))
                if len(under_way) >= AHEAD * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was ended from outside, perhaps for want of memory: lower data.workers"
            ) from error
        except BaseException:
            far.close()  # and nothing is cancelled: a pool that loses its workers trips over cancelled items
            raise


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold SIGINT back while a process may be started, which inherits that for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _install(function: Callable[[Any], Any], near: Connection) -> None:
    _in_worker.append(function)
    threading.Thread(target=_leave_with, args=(near,), daemon=True).start()


def _leave_with(near: Connection) -> None:
    """End this process when nobody holds the far end, whatever it is at."""
    near.poll(None)
    os._exit(1)


def _call(item: Any) -> Any:
    return _in_worker[0](item)
