"""What one CUDA GPU does, in under ten minutes, as Markdown tables.

    python scripts/gpu.py [--device cuda] [--minutes 9]
    python scripts/gpu.py --device cpu --tiny        all of its code on small shapes, in under a minute

Resume (12 steps against 6 + 6, with torch's kernels as they are and with deterministic ones), loss of 50 steps in fp32,
bf16 and fp16, isolated documents by SDPA's boolean mask and by flex attention, then speed by shape, compiling and
micro-batch. A part that fails says so and the others go on; what no time is left for is said. Each figure is a whole
optimizer step of the package's own loop; of its steps the median counts, the first two don't.

MFU is the arithmetic of `cyberslm.model.sizes.flops_per_token`, the whole attention square counted, over the GPU's
dense bf16 peak by its data sheet, for other devices over the best matrix product measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from cyberslm.data.loader import Batch
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.model import CyberSLM
from cyberslm.model.sizes import flops_per_token
from cyberslm.recipes.machine import PRODUCTS, autocast
from cyberslm.training.compiled import compile_and_try
from cyberslm.training.config import TrainConfig
from cyberslm.training.limits import product_rates
from cyberslm.training.loss import Score, next_token_loss
from cyberslm.training.loss_scale import LossScale
from cyberslm.training.optim import OptimizerConfig, build_optimizer
from cyberslm.training.process import prepare_for_training
from cyberslm.training.schedule import SchedulerConfig
from cyberslm.training.state import TrainState
from cyberslm.training.trackers import Record
from cyberslm.training.trainer import Plan, train

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12}
"""Dense bf16 operations per second by the data sheets; the first word of a name that fits counts."""
SHAPES = {
    "124 M": CyberSLMConfig(
        vocab_size=50_304, hidden_dim=768, num_layers=12, num_heads=12, ffn_hidden_dim=2_048, max_seq_len=1_024
    ),
    "350 M": CyberSLMConfig(
        vocab_size=50_304, hidden_dim=1_024, num_layers=24, num_heads=16, ffn_hidden_dim=2_816, max_seq_len=1_024
    ),
}
TINY = CyberSLMConfig(vocab_size=300, hidden_dim=32, num_layers=2, num_heads=2, ffn_hidden_dim=48, max_seq_len=32)
DOCUMENT = 300
"""Tokens of a document, where rows are made of several."""


@dataclass
class Rows:
    """Rows of random documents as a function of the step: a loader for the loop."""

    config: CyberSLMConfig
    number: int
    documents: bool = False

    def first_row(self, step: int) -> int:
        return step * self.number

    def batch(self, step: int, *, rank: int = 0, world: int = 1, passed: int = 0) -> Batch:
        length = self.config.max_seq_len
        generator = torch.Generator().manual_seed(step + passed)
        # each token depends on the one before, so that there is something to learn
        ids = torch.randint(0, 7, (self.number, length + 1), generator=generator).cumsum(1) % self.config.vocab_size
        docs = None
        if self.documents:
            each = min(DOCUMENT, length // 3)
            docs = (torch.arange(length) // each).expand(self.number, length).contiguous()
        whole = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), docs)
        return whole.rows(self.number * rank // world, self.number * (rank + 1) // world)


@dataclass
class Seen:
    """Hooks that keep the records."""

    records: list[Record] = field(default_factory=list)

    def record(self, record: Record) -> None:
        self.records.append(record)

    def validate(self, _state: TrainState) -> Score | None:
        return None

    def save(self, _state: TrainState, _score: Score | None) -> None:
        return None

    def should_save(self) -> bool:
        return False

    def should_stop(self) -> bool:
        return False

    def go_back(self, step: int) -> TrainState:
        raise RuntimeError(f"nothing to go back to at step {step}")


class Job(NamedTuple):
    """One short training."""

    config: CyberSLMConfig
    device: torch.device
    rows: int
    micro: int
    steps: int
    precision: str = "bf16"
    documents: bool = False

    def plan(self) -> Plan:
        return Plan(
            config=TrainConfig(max_steps=self.steps, micro_batch_size=self.micro, global_batch_size=self.rows),
            schedule=SchedulerConfig(name="constant", warmup_steps=2),
            seed=0,
            until=self.steps,
            validate_every=1 << 30,
            save_every=1 << 30,
            autocast=autocast(self.precision, self.device),
            loss_scale=LossScale() if self.precision == "fp16" else None,
        )

    def model(self) -> CyberSLM:
        return CyberSLM(self.config, seed=0, device=self.device)

    def run(self, model: CyberSLM) -> list[Record]:
        optimizer, seen = build_optimizer(model, OptimizerConfig(lr=1e-3)), Seen()
        train(self.plan(), model, optimizer, self.loader(), TrainState(), seen)  # type: ignore[arg-type]
        return seen.records

    def loader(self) -> Rows:
        return Rows(self.config, self.rows, documents=self.documents)


class Machine(NamedTuple):
    """The device, its peak and where that is from, and what is small for a trial of this script."""

    device: torch.device
    peak: float
    source: str
    tiny: bool

    @property
    def shapes(self) -> dict[str, CyberSLMConfig]:
        return {"tiny": TINY} if self.tiny else SHAPES


def machine(device: torch.device, *, tiny: bool) -> Machine:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    known = next((peak for part, peak in PEAKS.items() if part in name.replace("-", " ").split()), None)
    if known is not None:
        return Machine(device, known, f"{name}, data sheet", tiny)
    size = 256 if tiny else 8192
    rates = product_rates(device, torch.bfloat16, rows=size, width=size, inner=size)
    return Machine(device, rates.limit, f"{name}, measured", tiny)


def peak_memory(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else "-"


def clean(device: torch.device) -> None:
    """Nothing of the job before is left: its memory, its graphs."""
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measured(job: Job, peak: float, compiled: Callable[[CyberSLM], str | None]) -> str:
    """Tokens/s, MFU, peak memory and what there is to say, as cells."""
    clean(job.device)
    model = job.model()
    started = time.perf_counter()
    said = compiled(model)
    took = time.perf_counter() - started
    records = job.run(model)
    rate = statistics.median(float(str(record["tokens_per_second"])) for record in records[2:])
    mfu = rate * flops_per_token(job.config, job.config.max_seq_len, training=True) / peak
    note = said or (f"compiled in {took:.0f} s" if model.is_compiled else "")
    return f"{rate:,.0f} | {mfu:.1%} | {peak_memory(job.device)} | {note}"


def plain(_model: CyberSLM) -> str | None:
    return None


def compile_for(job: Job) -> Callable[[CyberSLM], str | None]:
    rows = job.loader().batch(0).rows(0, job.micro)
    return lambda model: compile_and_try(model, next_token_loss, rows, job.plan().autocast)


def without_flex(model: CyberSLM) -> str | None:
    model.compile_blocks()
    return None


Row = tuple[str, Callable[[], str]]
"""What a row of a table is about, and what measures its other cells."""


def speed(here: Machine) -> Iterator[Row]:
    """The likely best first, as time may run out."""
    for compiled in (True, False):
        for micro in (2, 4) if here.tiny else (32, 16, 64, 8):
            for name, config in here.shapes.items():
                job = Job(config, here.device, rows=4 if here.tiny else 64, micro=micro, steps=4 if here.tiny else 8)
                way = compile_for(job) if compiled else plain
                yield (
                    f"{name} | {micro} | {'yes' if compiled else 'no'}",
                    partial(measured, job, here.peak, way),
                )


def documents(here: Machine) -> Iterator[Row]:
    """Isolated documents of `DOCUMENT` tokens."""
    config = next(iter(here.shapes.values()))
    rows = (4, 2, 4) if here.tiny else (64, 32, 8)
    job = Job(config, here.device, *rows, documents=True)
    whole = job._replace(documents=False)
    yield "whole rows, compiled", partial(measured, whole, here.peak, compile_for(whole))
    yield "documents, SDPA with a mask", partial(measured, job, here.peak, plain)
    yield "documents, SDPA with a mask, compiled", partial(measured, job, here.peak, without_flex)
    yield "documents, flex attention, compiled", partial(measured, job, here.peak, compile_for(job))


def parity(here: Machine) -> Iterator[Row]:
    """The loss of the last ten of 50 steps, from the same weights on the same rows."""
    config = replace(next(iter(here.shapes.values())), num_layers=2 if here.tiny else 6)
    found: dict[str, float] = {}

    def loss(precision: str) -> str:
        clean(here.device)
        job = Job(config, here.device, rows=8, micro=4, steps=12 if here.tiny else 50, precision=precision)
        records = job.run(job.model())
        found[precision] = statistics.mean(float(str(record["loss"])) for record in records[-10:])
        apart = f"{found[precision] - found['fp32']:+.5f}" if "fp32" in found else "-"
        overflows = records[-1].get("overflows", 0)
        return f"{found[precision]:.5f} | {apart} | {overflows}"

    for precision in PRODUCTS:
        yield precision, partial(loss, precision)


def resume(here: Machine) -> Iterator[Row]:
    """Whole runs of the training recipe: 12 steps straight against 6, a new start, and 6 more."""
    for name, mode in (("torch's own kernels", nullcontext), ("deterministic kernels", deterministic)):
        for precision in ("bf16", "fp16"):
            yield f"{name} | {precision}", partial(resumed, here, precision, mode)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose sums have one order; torch's flash attention has not, in its backward pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def resumed(here: Machine, precision: str, mode: Callable[[], AbstractContextManager]) -> str:
    from safetensors.torch import load_file

    from cyberslm.recipes.config import load_run
    from cyberslm.recipes.train import run_training

    with tempfile.TemporaryDirectory() as folder, mode():
        text = Path(folder) / "text"
        text.mkdir()
        for number in range(60):
            words = (f"word{(number * place) % 97} of {number % 7}" for place in range(200))
            (text / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
        config = Path(folder) / "run.yaml"
        config.write_text(
            "data: {sources: [text], validation_fraction: 0.1}\ntokenizer: {vocab_size: 300, shrink: true}\n"
            "model: {hidden_dim: 64, num_layers: 2, num_heads: 2, ffn_hidden_dim: 128, max_seq_len: 64, dropout: 0.1}\n"
            "train: {max_steps: 12, micro_batch_size: 2, global_batch_size: 4}\nscheduler: {warmup_steps: 2}\n"
            "eval: {interval: 6, max_rows: 4}\ncheckpoint: {interval: 6}\nlogging: {plots: false, probe: false}\n"
            f"compile: false\nprecision: {precision}\ndevice: {here.device.type}\nout_dir: straight\n",
            encoding="utf-8",
        )
        run_training(load_run(config), quiet=True)
        for stop in (6, None):
            run_training(load_run(config, [f"out_dir={folder}/stopped"]), stop_at=stop, quiet=True)
        states = []
        for name in ("straight", "stopped"):
            step = Path(folder) / name / "checkpoints" / "step-00000012"
            states.append(load_file(step / "model.safetensors") | load_file(step / "training/optimizer.safetensors"))
    one, other = states
    differ = [key for key in one if not torch.equal(one[key], other[key])]
    return f"differs in {len(differ)} of {len(one)} tensors" if differ else f"equal bits in {len(one)} tensors"


PARTS: dict[str, tuple[str, Callable[[Machine], Iterator[Row]]]] = {
    "Resume, 6 + 6 steps against 12": ("kernels | precision | result", resume),
    "Loss after 50 steps": ("precision | loss of the last ten | less that of fp32 | overflows", parity),
    "Isolated documents": ("rows | tokens/s | MFU | peak memory | note", documents),
    "Speed": ("shape | micro-batch | compiled | tokens/s | MFU | peak memory | note", speed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing new after this time")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a trial of this script")
    arguments = parser.parse_args()
    prepare_for_training()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
    end = time.perf_counter() + 60 * arguments.minutes
    here = machine(torch.device(arguments.device), tiny=arguments.tiny)
    print(f"{here.source}: {here.peak / 1e12:,.1f} TFLOP/s of bf16 products; torch {torch.__version__}", flush=True)
    for title, (head, rows) in PARTS.items():
        print(f"\n## {title}\n\n| {head} |\n|{'---|' * (head.count('|') + 1)}", flush=True)
        for name, work in rows(here):
            print(f"| {name} | {cells(work, end)} |", flush=True)


def cells(work: Callable[[], str], end: float) -> str:
    if time.perf_counter() > end:
        return "no time left"
    try:
        return work()
    except Exception as error:  # noqa: BLE001 (one failure must not lose the rest)
        return f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"


if __name__ == "__main__":
    main()
