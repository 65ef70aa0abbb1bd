"""A map over worker processes that keeps the order and never reads far ahead.

``ProcessPoolExecutor.map`` reads all of its input at once, so a corpus would not fit. Here at most ``AHEAD`` items a
worker are under way. The function is sent to each worker once, when it starts, and not again with each item: a step may
hold tables of many megabytes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
    initargs = function, os.getpid()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=initargs) as pool:
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(_call, item))
                if len(under_way) >= AHEAD * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was ended from outside, perhaps for want of memory: lower data.workers"
            ) from error
        finally:
            for future in under_way:
                future.cancel()


def _install(function: Callable[[Any], Any], parent: int) -> None:
    _in_worker.append(function)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, which may have been killed without a word."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(item: Any) -> Any:
    return _in_worker[0](item)
