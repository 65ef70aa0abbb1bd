"""Peak memory of processes that load a model and generate, beside weights once plus the cache by formula.

    python scripts/benchmarks/generation_memory.py [--only NAME] [--threads N]

Each case is a process of its own. What it has after imports and after a network of one layer has generated, which
brings in the libraries' code and the allocator's pools, is taken from its peak; the rest is the model's. The ratio is
to stay below 1.15. Weights are random, of the 33.5 M shape; the peak is the kernel's own record of it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PROMPT, NEW, CONTEXT = 32, 256, 2048
CASES = {
    f"{kept} folder, {used}, step {fast}": (kept, used, fast)
    for kept, used in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("fp32", "bf16"), ("fp32", "int8"))
    for fast in ("on", "off")
}
"""Precision of the folder and of its use, and the compiled step."""


class Peak(NamedTuple):
    formula: int
    measured: int


def write_models(folder: Path) -> None:
    """The model in each precision, and a small one to warm up with."""
    from cyberslm.checkpoint.folder import save_model
    from cyberslm.model.config import CyberSLMConfig
    from cyberslm.model.model import CyberSLM
    from cyberslm.recipes.use import quantize
    from cyberslm.text.config import TokenizerConfig
    from cyberslm.text.train import train_tokenizer

    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text], TokenizerConfig(vocab_size=400)).tokenizer
    small = CyberSLMConfig(vocab_size=400, hidden_dim=64, num_layers=1, num_heads=1, ffn_hidden_dim=64, max_seq_len=64)
    save_model(folder / "small", CyberSLM(small), tokenizer, {})
    save_model(folder / "fp32", CyberSLM(CyberSLMConfig(max_seq_len=CONTEXT)), tokenizer, {})
    for precision in ("bf16", "int8"):
        quantize(folder / "fp32", folder / precision, precision=precision)  # type: ignore[arg-type]


def measure(folder: Path, case: str, threads: int) -> Peak:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--inside", str(folder), "--only", case]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    said = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return Peak(*map(int, said.split()))


def inside(folder: Path, case: str) -> Peak:
    """Load and generate in this process."""

    import cyberslm
    from cyberslm.model.sizes import cache_bytes_per_token

    kept, used, fast = CASES[case]
    _generate(cyberslm.load(folder / "small", device="cpu", precision=used, fast=fast).model, 32)
    before = _bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    model = cyberslm.load(folder / kept, device="cpu", precision=used, fast=fast).model
    _generate(model, NEW)
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    wide = model.new_cache(1, 1).layers[0].keys.element_size()
    cache = cache_bytes_per_token(model.config, bytes_per_number=wide) * (PROMPT + NEW)
    return Peak(weights + cache, _bytes("VmHWM") - before)


def _generate(model: object, new: int) -> None:
    import torch

    prompt = torch.arange(4, 4 + PROMPT).unsqueeze(0)
    made = model.generate(prompt, new, min_new_tokens=new)  # type: ignore[attr-defined]
    if made.shape[1] != PROMPT + new:
        raise SystemExit(f"{made.shape[1]} tokens instead of {PROMPT + new}")


def _bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise SystemExit(f"the kernel doesn't tell {name}")
    return int(found[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(*inside(arguments.inside, arguments.only))
        return
    print("| case | weights + cache MiB | measured MiB | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for name in CASES:
            if name.startswith(arguments.only):
                peak = measure(Path(folder), name, arguments.threads)
                ratio = peak.measured / peak.formula
                print(
                    f"| {name} | {peak.formula / 2**20:.1f} | {peak.measured / 2**20:.1f} | {ratio:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
