"""Peak memory of whole training processes beside the formula of `cyberslm.training.memory`, over shapes and precisions.

    python scripts/benchmarks/memory.py [--only NAME] [--threads N]

Each case is a run of its own, `cyberslm train` with four steps on made-up text, whose own record of its peak is read;
all take the loops in C++; ``lora`` is `cyberslm finetune` with adapters on a base that is made before.
The last columns are the shares of activations (``one``, ``several`` of `MEASURED`) with which the formula would be
exact: what to change them to when the loss, the network or the allocator has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import LoraConfig
from cyberslm.model.sizes import adapted_cast_bytes, cast_bytes
from cyberslm.recipes.estimate import needed_memory
from cyberslm.recipes.finetune import load_any
from cyberslm.training.distributed import Dist
from cyberslm.training.memory import kept_bytes
from cyberslm.training.process import prepare_for_training

STEPS = 4
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_dim": 64, "num_layers": 2, "num_heads": 2, "ffn_hidden_dim": 128}
    | {"max_seq_len": 64},
    "demo": {"vocab_size": 4096, "hidden_dim": 192, "num_layers": 4, "num_heads": 3, "ffn_hidden_dim": 512}
    | {"max_seq_len": 256},
    "11m": {"vocab_size": 8192, "hidden_dim": 256, "num_layers": 8, "num_heads": 4, "ffn_hidden_dim": 704}
    | {"max_seq_len": 512},
    "33m": {"max_seq_len": 512, "vocab_size": 32000},
}
CASES = {
    f"{shape} {rows} x {split} {precision}{' lora' * lora}": (shape, rows, split, precision, lora)
    for lora in (False, True)
    for shape, rows, split in (
        ("tiny", 8, 1),
        ("demo", 8, 1),
        ("demo", 32, 1),
        ("demo", 8, 4),
        ("11m", 4, 1),
        ("11m", 4, 4),
        ("33m", 2, 1),
        ("33m", 2, 2),
        ("33m", 8, 1),
    )
    for precision in ("fp32", "bf16")
}
"""Shape, rows of a micro-batch, micro-batches of a step, precision, adapters or all weights."""


class Peak(NamedTuple):
    estimated: int
    measured: int
    share: float
    """Of activations: what they seem to take beyond everything else, as a part of what they need."""


def measure(name: str, threads: int = 1) -> Peak:
    """Run one case in a process of its own."""
    shape, rows, split, precision, lora = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(Path(folder), name)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        if lora:
            small = [
                f"out_dir={folder}/base",
                "train.max_steps=1",
                "scheduler.warmup_steps=0",
                "train.global_batch_size=1",
            ]
            _run("train", config, *small, "train.micro_batch_size=1", environment=environment)
            config = write_finetune(config)
        _run("finetune" if lora else "train", config, environment=environment)
        need = needed_memory(load_any(config).value, Dist())
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    measured = max(record["peak_memory"] for record in records if record["type"] == "train")
    if need.total != records[0]["estimated_memory"]:
        raise SystemExit(f"{name}: the run estimated {records[0]['estimated_memory']}, not {need.total}")
    model, bf16 = CyberSLMConfig(**SHAPES[shape]), precision == "bf16"
    adapters = LoraConfig() if lora else None
    casts = (cast_bytes(model) if adapters is None else adapted_cast_bytes(model, adapters)) if bf16 else 0
    sure = casts + (0 if lora else 4 * model.vocab_size * model.hidden_dim)
    kept = kept_bytes(model, rows, model.max_seq_len, bf16=bf16, native=True, adapters=adapters) - sure
    return Peak(need.total, measured, (measured - (need.total - need.activations) - sure) / kept)


def _run(verb: str, config: Path, *settings: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cyberslm", verb, str(config), *settings, "--quiet"]
    subprocess.run(command, check=True, env=environment)


def write_finetune(training: Path) -> Path:
    """The configuration of a run with adapters on the base that ``training``'s settings made."""
    config = json.loads(training.read_text(encoding="utf-8"))
    del config["model"], config["tokenizer"]
    path = training.with_name("finetune.yaml")
    path.write_text(json.dumps({**config, "base": "base", "lora": {}}), encoding="utf-8")
    return path


def write_run(folder: Path, name: str) -> Path:
    """The configuration of a case, and text for it."""
    shape, rows, split, precision, _ = CASES[name]
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=4000)), encoding="utf-8")
    config = {
        "out_dir": "run",
        "device": "cpu",
        "precision": precision,
        "native": True,
        "data": {"sources": ["text"], "validation_fraction": 0.3},
        "tokenizer": {"vocab_size": 500},
        "model": SHAPES[shape],
        "train": {"max_steps": STEPS, "micro_batch_size": rows, "global_batch_size": rows * split},
        "scheduler": {"warmup_steps": 1},
        "eval": {"interval": 2, "max_rows": rows},
        "logging": {"plots": False},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    prepare_for_training()  # as the runs do, so that the formula is theirs
    print("| case | formula MiB | measured MiB | formula / measured | share |\n|---|---|---|---|---|")
    for name in CASES:
        if name.startswith(arguments.only):
            peak = measure(name, arguments.threads)
            print(
                f"| {name} | {peak.estimated >> 20:,} | {peak.measured >> 20:,}"
                f" | {peak.estimated / peak.measured:.2f} | {peak.share:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
