"""Does a run that was stopped end in the bits of one that was not? Every stop of a short run, in every way of training.

    python scripts/resume_matrix.py CONFIG [--steps 24] [--out runs/resume] [--ways fp32 ...] [key=value ...]

For each way a run goes straight to its end; then for each step one run is stopped after it, one is killed (SIGKILL,
where one process trains) when its line is written and nothing else yet, and the same call goes on with both. Weights,
moments, state, loss, rate and norm of every step and the model in final/ must be equal. Prints a table; ends with 1 if
a run differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cyberslm import files
from cyberslm.checkpoint.steps import list_steps
from cyberslm.recipes.config import load_run
from cyberslm.recipes.hooks import RunHooks
from cyberslm.recipes.train import run_training

RANDOM = ("model.dropout=0.1", "model.attn_dropout=0.1")
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fp32": (1, ("precision=fp32",)),
    "fp32, compiled": (1, ("precision=fp32", "compile=true")),
    "bf16, dropout": (1, ("precision=bf16", *RANDOM)),
    "fp16, dropout": (1, ("precision=fp16", *RANDOM)),
    "Muon, running mean": (1, ("precision=fp32", "optimizer.name=muon", "train.ema_decay=0.9")),
    "DDP on 2, dropout": (2, ("precision=fp32", "distributed.strategy=ddp", *RANDOM)),
    "FSDP2 on 2, dropout": (2, ("precision=fp32", "distributed.strategy=fsdp", *RANDOM)),
}
"""Processes and settings of each."""
FILES = ("model.safetensors", "training/optimizer.safetensors", "training/state.json")
LOGGED = ("type", "step", "loss", "lr", "grad_norm", "tokens", "loss_scale", "overflows")
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["cyberslm.recipes.train"])


class Work(NamedTuple):
    """One configuration in one way, its runs side by side in ``out``."""

    config: str
    settings: list[str]
    out: Path
    steps: int

    def folder(self, name: str) -> Path:
        return self.out / name

    def train(self, name: str, *, stop_at: int | None = None) -> None:
        settings = [
            "compile=false",
            "scheduler.warmup_steps=2",
            "eval.interval=5",
            "eval.max_rows=4",
            "eval.sample_prompts=[]",
            "checkpoint.interval=7",
            "logging.plots=false",
            "logging.probe=false",
            "threads=1",
            *self.settings,
            f"train.max_steps={self.steps}",
            f"data.prepared={self.out / 'data'}",
            f"out_dir={self.folder(name)}",
        ]
        run_training(load_run(self.config, settings), stop_at=stop_at, quiet=True)

    def result(self, name: str) -> list[object]:
        """What an interruption may not change."""
        folder = self.folder(name)
        last = list_steps(folder / "checkpoints")[-1].path
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        log = [{key: record.get(key) for key in LOGGED} for record in map(json.loads, lines)]
        made = [files.sha256_file(path) for path in (*(last / name for name in FILES), folder / "final" / FILES[0])]
        return [*made, log]


def stopped(work: Work, name: str, step: int) -> None:
    work.train(name, stop_at=step)


def killed(work: Work, name: str, step: int) -> None:
    process = FORKED.Process(target=train_until_killed, args=(work, name, step))
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the run that was to be killed at step {step} ended with {process.exitcode}")


def train_until_killed(work: Work, name: str, step: int) -> None:
    record = RunHooks.record

    def last_record(self: RunHooks, entry: dict) -> None:
        record(self, entry)
        if (entry["type"], entry["step"]) == ("train", step):
            os.kill(os.getpid(), signal.SIGKILL)

    RunHooks.record = last_record  # type: ignore[method-assign, assignment]
    work.train(name)


def matrix(work: Work, ends: list[Callable[[Work, str, int], None]]) -> list[str]:
    """For each way of ending a run: that all stops gave equal bits, or which did not."""
    work.train("straight")
    first = int(os.environ.get("RANK", "0")) == 0
    wanted = work.result("straight") if first else []
    cells = []
    for end in ends:
        odd = []
        for step in range(1, work.steps):
            name = f"{end.__name__}-{step}"
            end(work, name, step)
            work.train(name)
            if first and work.result(name) != wanted:
                odd.append(step)
        cells.append(f"differs at {odd}" if odd else f"equal, {work.steps - 1} of {work.steps - 1}")
    return cells


def one_way(name: str, work: Work) -> None:
    """The row of a way, in this process or in each that torchrun started; the first prints it."""
    processes, settings = WAYS[name]
    work = work._replace(settings=[*settings, *work.settings])
    cells = matrix(work, [stopped, killed] if processes == 1 else [stopped])
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"| {name} | {' | '.join([*cells, *['-'] * (2 - len(cells))])} |", flush=True)
        sys.exit(any(cell.startswith("differs") for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/resume"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--inside", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.inside:
        work = Work(arguments.config, arguments.settings, arguments.out, arguments.steps)
        one_way(arguments.inside, work)
        return
    print("| way | stopped after a step | killed in a step |\n|---|---|---|", flush=True)
    codes = []
    for name in arguments.ways:
        start = [sys.executable]
        if (processes := WAYS[name][0]) > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        out = (arguments.out / name.replace(", ", "-").replace(" ", "-")).resolve()
        own = [arguments.config, *arguments.settings, "--steps", str(arguments.steps), "--out", str(out)]
        codes.append(subprocess.run([*start, __file__, *own, "--inside", name], check=False).returncode)
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
