"""Does the loss stay what it is in fp32? The same run in every way of computing it, and the largest difference.

    python scripts/parity.py CONFIG [--steps 200] [--out runs/parity] [key=value ...]

Runs `cyberslm train` once for each way below, on the same rows from the same weights. Prints each one's validation loss
at the end and the largest difference of its training loss from that of fp32, as means of 20 steps: single steps differ
by the noise of rounding, means must not. The curves lie over each other in OUT/parity.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MEAN_OF = 20
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
WAYS: dict[str, tuple[list[str], list[str]]] = {
    "fp32": ([sys.executable, "-m"], ["precision=fp32", "compile=false"]),
    "bf16": ([sys.executable, "-m"], ["precision=bf16", "compile=false"]),
    "fp32, compiled": ([sys.executable, "-m"], ["precision=fp32", "compile=true"]),
    "bf16, compiled": ([sys.executable, "-m"], ["precision=bf16", "compile=true"]),
    "fp32, DDP on 2": (TORCHRUN, ["precision=fp32", "compile=false", "distributed.strategy=ddp", "threads=1"]),
    "fp32, FSDP2 on 2": (TORCHRUN, ["precision=fp32", "compile=false", "distributed.strategy=fsdp", "threads=1"]),
}


def run(config: str, folder: Path, way: tuple[list[str], list[str]], settings: list[str]) -> Path:
    command, own = way
    done = [*command, "cyberslm", "train", config, f"out_dir={folder}", *settings, *own]
    subprocess.run(done, check=True, stdout=subprocess.DEVNULL)
    return folder


def losses(folder: Path, kind: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["type"] == kind]


def means(values: list[float]) -> list[float]:
    return [sum(values[i : i + MEAN_OF]) / MEAN_OF for i in range(0, len(values) - MEAN_OF + 1, MEAN_OF)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    arguments = parser.parse_intermixed_args()
    settings = [
        f"train.max_steps={arguments.steps}",
        f"eval.interval={arguments.steps}",
        f"checkpoint.interval={arguments.steps}",
        "eval.sample_prompts=[]",
        *arguments.settings,
    ]
    found: dict[str, Path] = {}
    for name, way in WAYS.items():
        folder = arguments.out / name.replace(", ", "-").replace(" ", "-")
        shared = [f"data.prepared={found['fp32'] / 'data'}"] if found else []
        found[name] = run(arguments.config, folder, way, [*settings, *shared])
        apart = [abs(a - b) for a, b in zip(*(means(losses(found[n], "train")) for n in (name, "fp32")), strict=True)]
        last = losses(found[name], "validation")[-1]
        print(
            f"{name}: validation loss {last:.4f}, largest difference of {MEAN_OF}-step means {max(apart):.5f}",
            flush=True,
        )
    plot = [
        sys.executable,
        "-m",
        "cyberslm",
        "plot",
        *map(str, found.values()),
        "--out",
        str(arguments.out / "parity.png"),
    ]
    subprocess.run(plot, check=True)


if __name__ == "__main__":
    main()
