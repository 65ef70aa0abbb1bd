"""What a rank of many holds and sends: by formula, by simulation, and measured on two real processes.

    python scripts/scaling.py               # the tables of docs/scaling.md; some minutes, one core, no network
    python scripts/scaling.py --quick       # the smallest model alone

The simulation is the package's own sharding and a real pass of the network, with tensors that have shapes but no memory
(torch's FakeTensorMode) in a process group that counts N ranks and sends nothing (fake_pg). It records each collective.
Sent bytes are those of the ring algorithms: of N parts, N - 1 leave a rank in a gather or a scatter, and twice that in
an all-reduce. The measured column counts the same in two processes over gloo, and reads the loopback device's counter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.training.distributed import Dist, DistributedConfig, Strategy, joined
from cyberslm.training.loss import next_token_loss
from cyberslm.training.memory import gathered_bytes, kept_bytes
from cyberslm.training.optim import OptimizerConfig, build_optimizer
from cyberslm.training.sharing import Shared, cut_up, share

MODELS = {
    "33 M": CyberSLMConfig(),
    "350 M": CyberSLMConfig(hidden_dim=1024, num_layers=24, num_heads=16, ffn_hidden_dim=2816, max_seq_len=2048),
    "1 B": CyberSLMConfig(
        hidden_dim=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn_hidden_dim=5632, max_seq_len=2048
    ),
}
RANKS = (1, 8, 64, 512)
TOKENS = 64
"""Of the one row of a pass: what ranks send to each other doesn't depend on it."""
MEASURED_MICRO_BATCHES = 2


@dataclass(frozen=True)
class Held:
    """Bytes of one rank."""

    weights: int
    gradients: int
    moments: int


@dataclass(frozen=True)
class Sent:
    """Collectives of one rank in a step: how many, and the bytes that leave it."""

    gathers: int = 0
    scatters: int = 0
    reduces: int = 0
    bytes: int = 0


class Collectives(TorchDispatchMode):
    """Records the collectives below it; for fake tensors, answers 0 or True where the code looks at a value."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.counts, self.bytes = world, Counter[str](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], torch._subclasses.FakeTensor):
            return args[0].dtype is torch.bool  # all targets are trained on
        if func.namespace == "c10d":
            kind = func.name().removeprefix("c10d::").strip("_")
            size = sum(t.nbytes for t in torch.utils._pytree.tree_leaves(args[0]) if isinstance(t, Tensor))
            others = self.world - 1
            share_of = {"allgather_base": 1 / self.world, "reduce_scatter_base": 1, "allreduce": 2 / self.world}
            self.counts[kind] += 1
            self.bytes += round(size * others * share_of.get(kind, 0))  # args[0] is where the result goes
        return func(*args, **(kwargs or {}))

    def sent(self) -> Sent:
        kinds = ("allgather_base", "reduce_scatter_base", "allreduce")
        return Sent(*(self.counts[kind] for kind in kinds), self.bytes)


def one_step(shared: Shared, model: CyberSLM, micro_batches: int) -> None:
    ids = torch.zeros(1, min(TOKENS, model.max_seq_len), dtype=torch.long)
    for part in range(micro_batches):
        with shared.holding() if part < micro_batches - 1 else torch.enable_grad():
            shared.loss(model, Batch(ids, ids)).objective.backward()


def local_bytes(tensors: Iterator[Tensor | None]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in local if tensor is not None)


@contextmanager
def pretended(world: int) -> Iterator[None]:
    """A process group of that many ranks, of which this is the first and the others don't exist."""
    c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        c10d.destroy_process_group()


@cache
def simulated(
    config: CyberSLMConfig, world: int, *, precision: str = "fp32", micro_batches: int = 1
) -> tuple[Held, Sent]:
    """The first rank of an FSDP2 step; its parts are the largest."""
    model = CyberSLM(config, device="meta")
    with pretended(world):
        mesh = init_device_mesh("cpu", (world,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.load_state_dict({name: torch.empty(p.shape) for name, p in model.named_parameters()}, assign=True)
            model.rope.cos, model.rope.sin = (torch.empty(table.shape) for table in (model.rope.cos, model.rope.sin))
            shared = cut_up(model, next_token_loss, mesh, precision=precision)
            with Collectives(world) as seen:
                one_step(shared, model, micro_batches)
            weights = local_bytes(iter(model.parameters()))
            gradients = local_bytes(p.grad for p in model.parameters())
    return Held(weights, gradients, 2 * weights), seen.sent()


def ddp_by_formula(config: CyberSLMConfig, world: int) -> tuple[Held, int]:
    """What each rank of DDP holds, and the bytes that leave it: gradients once around the ring and back."""
    size = 4 * config.num_parameters
    return Held(size, size, 2 * size), 2 * size * (world - 1) // world


def counted(config: CyberSLMConfig, dist: Dist, *, micro_batches: int) -> tuple[Held, Sent, int]:
    """What this rank holds after a real step and sends in it, and the bytes on the loopback device meanwhile."""
    model = CyberSLM(config)
    shared = share(model, next_token_loss, dist, precision="fp32")
    optimizer = build_optimizer(model, OptimizerConfig())
    one_step(shared, model, 1)  # the first makes buckets and buffers
    optimizer.step()
    optimizer.zero_grad()
    dist.gather(None)
    before = _loopback()
    with Collectives(dist.world) as seen:
        one_step(shared, model, micro_batches)
    sent = seen.sent()
    dist.gather(None)
    moments = (state[kind] for state in optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq"))
    gradients = (p.grad for p in model.parameters())
    held = Held(local_bytes(iter(model.parameters())), local_bytes(gradients), local_bytes(moments))
    return held, sent, _loopback() - before


def _rank(rank: int, port: int, config: CyberSLMConfig, strategy: Strategy, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    with joined(DistributedConfig(strategy=strategy), torch.device("cpu")) as dist:
        pipe.send(counted(config, dist, micro_batches=MEASURED_MICRO_BATCHES))


def _loopback() -> int:
    """Bytes that went through the loopback device so far, both ways counted once."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)


def measured(config: CyberSLMConfig, strategy: Strategy) -> tuple[Held, Sent, int]:
    """What `counted` gives on the first of two real processes."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, port, config, strategy, pipe), daemon=True)
        for rank, (_, pipe) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    found, _ = (pipe.recv() for pipe, _ in pipes)
    for rank in ranks:
        rank.join()
    return found


def mb(number: float) -> str:
    return f"{number / 1e6:,.1f}" if number < 1e8 else f"{number / 1e6:,.0f}"


def memory_table(models: dict[str, CyberSLMConfig]) -> Iterator[str]:
    yield "| model | ranks | | weights | gradients | moments | gathered | sum |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|"
    for name, config in models.items():
        held, _ = ddp_by_formula(config, 1)
        rows = [("any", "ddp", held, 0)]
        rows += [(str(n), "fsdp", simulated(config, n)[0], gathered_bytes(config)) for n in RANKS[1:]]
        for ranks, strategy, each, gathered in rows:
            parts = (each.weights, each.gradients, each.moments, gathered)
            cells = " | ".join(mb(part) for part in (*parts, sum(parts)))
            yield f"| {name} ({config.num_parameters:,}) | {ranks} | {strategy} | {cells} |"


def activation_table(models: dict[str, CyberSLMConfig]) -> Iterator[str]:
    yield "| model | context | kept for a row | with `activation_checkpointing` |"
    yield "|---|---:|---:|---:|"
    for name, config in models.items():
        kept = [mb(kept_bytes(config, 1, config.max_seq_len, recompute=again)) for again in (False, True)]
        yield f"| {name} | {config.max_seq_len:,} | {kept[0]} | {kept[1]} |"


def sent_table(models: dict[str, CyberSLMConfig]) -> Iterator[str]:
    yield "| model | ranks | ddp | fsdp | fsdp, bf16 | fsdp, bf16, four micro-batches | collectives of the last |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, config in models.items():
        for world in RANKS[1:]:
            _, ddp = ddp_by_formula(config, world)
            each = [
                simulated(config, world, precision=precision, micro_batches=parts)[1]
                for precision, parts in (("fp32", 1), ("bf16", 1), ("bf16", 4))
            ]
            cells = " | ".join(mb(sent) for sent in (ddp, *(found.bytes for found in each)))
            yield f"| {name} | {world} | {cells} | {each[-1].gathers} + {each[-1].scatters} |"


def measured_table(config: CyberSLMConfig) -> Iterator[str]:
    yield "| | weights | gradients | moments | collectives | sent by a rank | on the wire, a rank |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    held, ddp = ddp_by_formula(config, 2)
    yield _row("ddp, formula", held, Sent(bytes=ddp), "")
    yield _row("ddp, measured", *_real(config, "ddp"))
    yield _row("fsdp, simulated", *simulated(config, 2, micro_batches=MEASURED_MICRO_BATCHES), "")
    yield _row("fsdp, measured", *_real(config, "fsdp"))


def _row(name: str, held: Held, sent: Sent, wire: str) -> str:
    names = {"gathers": sent.gathers, "scatters": sent.scatters, "all-reduces": sent.reduces}
    counts = ", ".join(f"{number} {kind}" for kind, number in names.items() if number)
    cells = " | ".join(mb(part) for part in (held.weights, held.gradients, held.moments))
    return f"| {name} | {cells} | {counts} | {mb(sent.bytes)} | {wire} |"


def _real(config: CyberSLMConfig, strategy: Strategy) -> tuple[Held, Sent, str]:
    held, sent, wire = measured(config, strategy)
    return held, sent, mb(wire / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model alone")
    models = dict(list(MODELS.items())[: 1 if parser.parse_args().quick else None])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"Made by `python scripts/scaling.py` on {_processor()} ({machine}). MB are 10^6 bytes.\n")
    tables = {
        "Memory of a rank, MB, without activations": memory_table(models),
        "Activations of a row, MB, fp32": activation_table(models),
        "Bytes that leave a rank in a step, MB": sent_table(models),
        "Two ranks, 33 M, two micro-batches, MB: formula, simulation, and two processes": measured_table(
            models["33 M"]
        ),
    }
    for title, lines in tables.items():
        print(f"### {title}\n")
        for line in lines:
            print(line, flush=True)
        print()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a processor")


if __name__ == "__main__":
    main()
