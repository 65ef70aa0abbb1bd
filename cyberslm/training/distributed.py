"""Several processes that train one model: who this one is, and the few things that they do together.

torchrun starts a process a device and tells each its rank through the environment; `joined` makes a `Dist` of that. One
process is a world of one: the same calls, without a network.

Invariants. Every rank makes the same calls in the same order, so none stands in a branch that only some take. What is
decided follows from values that all ranks have, in the order of ranks, so all decide alike to the last bit. Values
travel as numbers and JSON, never as pickles. A rank that is gone ends the others, at once where its sockets close and
after ``timeout`` seconds where it only falls silent; `first_to_tell` leaves one of them to say why.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from cyberslm.errors import ConfigError, TrainingError

T = TypeVar("T")
Strategy = Literal["ddp", "fsdp"]

LOST = re.compile(r"gloo|nccl|connection|socket|timed? ?out|broken pipe", re.IGNORECASE)
"""In the text of a torch `RuntimeError`: the network is why, or at least the other end of it."""
POLL_SECONDS = 0.02
TELL_SECONDS = 10
PAUSE_SECONDS = 2
FORGET_SECONDS = 15


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes that train one model, started by torchrun; without it none of this counts but fsdp."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """Each process holds the whole model (ddp), or its share of weights, gradients and moments (fsdp); auto = ddp."""

    timeout: float = 600.0
    """Seconds that a process waits for a silent one before it ends with an error; a step must take less."""

    wait: float = 86_400.0
    """Seconds that processes wait while the first of them prepares data or writes a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("timeout", "wait"):
            if not 1 <= getattr(self, name) <= 1e7:
                raise ConfigError(f"{name} must be from 1 to 10,000,000 seconds, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Dist:
    """This process among the ``world`` that train together; the default is alone."""

    rank: int = 0
    world: int = 1
    neighbours: int = 1
    """Ranks on this machine, this one too."""
    device: torch.device = torch.device("cpu")
    strategy: Strategy = "ddp"
    backend: str | None = None
    """What carries gradients: gloo, nccl, or None when alone."""
    waiting: c10d.ProcessGroup | None = None
    """The same ranks, with the patience of ``wait``."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints, prepares and writes."""
        return self.rank == 0

    def each(self, *numbers: float) -> list[list[float]]:
        """For every number the list of all ranks' values in their order, as fp64."""
        if self.world == 1:
            return [[float(number)] for number in numbers]
        return self.each_of(torch.tensor(numbers, dtype=torch.float64, device=self.device))

    def each_of(self, mine: Tensor) -> list[list[float]]:
        """`each` of a vector on the device, for which the host waits once."""
        found = [mine]
        if self.world > 1:
            found = [torch.empty_like(mine) for _ in range(self.world)]
            c10d.all_gather(found, mine)
        return torch.stack(found, dim=1).tolist()

    def total(self, number: float) -> float:
        return math.fsum(self.each(number)[0])

    def any(self, flag: bool) -> bool:  # noqa: FBT001 (the flag is the value)
        """Whether it is so on any rank."""
        return any(self.each(flag)[0])

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks in their order; NaN and infinity may be among them."""
        if self.world == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.each(len(text))[0]]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        mine[: len(text)] = text
        found = [torch.empty_like(mine) for _ in sizes]
        c10d.all_gather(found, mine)
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(found, sizes, strict=True)]

    def told(self, value: Any) -> Any:
        """The first rank's JSON value."""
        return self.gather(value if self.first else None)[0]

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Have the first rank do ``work`` while the others wait; they get None. An error there ends them too."""
        done = work() if self.first else None
        if self.waiting is not None:
            arrived = c10d.barrier(group=self.waiting, async_op=True)
            while not arrived.is_completed():  # not wait(), in which no signal is heard
                time.sleep(POLL_SECONDS)
            arrived.wait()
        return done


class Place(NamedTuple):
    """Where torchrun started this process: among all of the run, and among the ``neighbours`` on this machine."""

    rank: int
    world: int
    local_rank: int
    neighbours: int


def place() -> Place:
    """This process's, by the environment; alone without one. Raises `ConfigError` for what is no number there."""
    return Place(_number("RANK", 0), _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))


@contextmanager
def joined(config: DistributedConfig, device: torch.device) -> Iterator[Dist]:
    """This process's place among those that torchrun started, while the block runs.

    Raises `ConfigError` for an environment that doesn't fit, `TrainingError` when another rank is gone.
    """
    rank, world, local_rank, neighbours = place()
    strategy: Strategy = "fsdp" if config.strategy == "fsdp" else "ddp"
    if world == 1 and strategy == "ddp":
        yield Dist(device=device)
        return
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} are seen):"
                " lower torchrun's --nproc-per-node or give device: cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    with _contact(rank), _group(config, device, rank, world) as waiting:
        backend = "nccl" if device.type == "cuda" else "gloo"
        yield Dist(
            rank=rank,
            world=world,
            neighbours=neighbours,
            device=device,
            strategy=strategy,
            backend=backend,
            waiting=waiting,
        )


@contextmanager
def _group(config: DistributedConfig, device: torch.device, rank: int, world: int) -> Iterator[c10d.ProcessGroup]:
    if c10d.is_initialized():
        raise ConfigError("torch.distributed is in use by this program already: train in a process of its own")
    if world > 1 and (missing := [key for key in ("RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]):
        raise ConfigError(f"WORLD_SIZE is {world} but {missing[0]} is not set: start the processes with torchrun")
    c10d.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        store=c10d.HashStore() if world == 1 else _meet(rank, world, config.timeout),
        timeout=timedelta(seconds=config.timeout),
    )
    try:
        yield c10d.new_group(backend="gloo", timeout=timedelta(seconds=config.wait))
    finally:
        c10d.destroy_process_group()


def _meet(rank: int, world: int, timeout: float) -> c10d.Store:
    """A part of the launcher's store that only the processes of this start use.

    torchrun keeps its store when it starts processes again, and the addresses in it of those before would be taken for
    these. So the first rank names a meeting, the others answer with a word of their own, and a meeting counts for a
    rank once its word was repeated.
    """
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    word = secrets.token_hex(8)
    if rank == 0:
        store.set("meeting", word)
        heard = [store.get(f"{word}/{other}").decode() for other in range(1, world)]
        store.set(f"{word}/heard", json.dumps([word, *heard]))
        return c10d.PrefixStore(word, store)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        name = store.get("meeting").decode()
        store.set(f"{name}/{rank}", word)
        if store.check([f"{name}/heard"]) and json.loads(store.get(f"{name}/heard"))[rank] == word:
            return c10d.PrefixStore(name, store)
        time.sleep(POLL_SECONDS)
    raise TrainingError(f"rank {rank} did not meet the other {world - 1} within distributed.timeout: did all start?")


@contextmanager
def _contact(rank: int) -> Iterator[None]:
    """Say that another rank is gone instead of what the network library says."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, c10d.DistError) and not LOST.search(str(error)):
            raise
        time.sleep(PAUSE_SECONDS)  # the one that knows why speaks first
        raise TrainingError(
            f"rank {rank} lost another rank, which ended or was silent for distributed.timeout"
            f" ({str(error).strip().splitlines()[0]}). The last checkpoint is whole: the same command goes on from it"
        ) from error


def first_to_tell() -> bool:
    """Whether no other process of this run has just told an error; asks the store that torchrun keeps.

    True when alone, or when nobody can be asked.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    now = f"{time.time()} {secrets.token_hex(8)}"
    with suppress(KeyError, ValueError, RuntimeError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = c10d.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TELL_SECONDS))
        told = store.compare_set("cyberslm/told", "", now).decode()
        if time.time() - float(told.split()[0]) > FORGET_SECONDS:  # by processes of an earlier start
            told = store.compare_set("cyberslm/told", told, now).decode()
        return told == now
    return True


def _number(key: str, least: int) -> int:
    value = os.environ.get(key, str(least))
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(
            f"the environment's {key} must be a whole number from {least} on, not {value!r}: torchrun sets it"
        )
    return int(value)
