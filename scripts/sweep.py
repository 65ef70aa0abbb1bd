"""Train one configuration with every combination of some settings; a table, best first, as docs/lab.md records it.

    python scripts/sweep.py CONFIG OUT [key=value ...] --try optimizer.lr=1e-3,2e-3 --try model.qk_norm=false,true

Runs share the prepared data of the first. One that is finished is not run again, so that a sweep can be stopped and
widened.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path


def run(config: str, folder: Path, settings: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "cyberslm", "train", config, f"out_dir={folder}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [record["bits_per_byte"] for record in records if record["type"] == "validation"]
    seconds = sum(record["seconds"] for record in records if record["type"] == "train")
    if done.returncode or not scores:
        print(done.stderr, file=sys.stderr)
    return {"bits per byte": min(scores, default=float("nan")), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="KEY=A,B")
    arguments = parser.parse_args()
    axes = []
    for text in arguments.tries:
        key, _, values = text.partition("=")
        axes.append([f"{key}={value}" for value in values.split(",")])
    rows = []
    first: Path | None = None
    for chosen in itertools.product(*axes):
        folder = arguments.out / ("_".join(chosen).replace("/", "-") or "base")
        shared = [f"data.prepared={first / 'data'}"] if first is not None and first != folder else []
        figures = run(arguments.config, folder, [*arguments.settings, *shared, *chosen])
        first = first or folder
        rows.append((figures["bits per byte"], figures["seconds"], chosen))
        print(f"{figures['bits per byte']:.4f} bits/byte, {figures['seconds']:.0f} s: {' '.join(chosen)}", flush=True)
    print("\n| bits per byte | seconds | settings |\n|---|---|---|")
    for score, seconds, chosen in sorted(rows):
        print(f"| {score:.4f} | {seconds:.0f} | {', '.join(f'`{setting}`' for setting in chosen)} |")


if __name__ == "__main__":
    main()
