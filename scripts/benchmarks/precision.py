"""Bits per byte of a model in each precision, and of int8 with other numbers of a row to a scale.

    python scripts/benchmarks/precision.py MODEL TEXTS.jsonl [...] [--texts N] [--tokens N] [--threads N]

By the first tokens of texts of 1,500 characters or more, drawn by a fixed seed from the first 4,000 lines of each file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cyberslm.checkpoint.folder import load_model
from cyberslm.generation.config import DecodingConfig
from cyberslm.generation.fast import prepare
from cyberslm.model import quantised

SHORTEST, LINES = 1500, 4000
CASES = (
    *((precision, "on", None) for precision in ("fp32", "bf16", "int8", "int4")),
    *(("int8", "off", block) for block in (32, 64, 128, 1 << 13)),
)
"""Precision, compiled step, and another `quantised.BLOCK`; the last is wider than a row."""


def texts_of(paths: Sequence[Path], count: int) -> list[str]:
    found = []
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            texts = (json.loads(line).get("text", "") for line in itertools.islice(lines, LINES))
            found += [text[:SHORTEST] for text in texts if len(text) >= SHORTEST]
    random.Random(1).shuffle(found)  # noqa: S311 (a sample)
    return found[:count]


@torch.no_grad()
def bits_per_byte(folder: Path, texts: Sequence[str], tokens: int, precision: str, fast: str) -> float:
    model, tokenizer, *_ = load_model(folder)
    model.eval()
    prepare(model, DecodingConfig(precision=precision, fast=fast))  # type: ignore[arg-type]
    bits, size = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text)[:tokens]
        row = torch.tensor([ids])
        logits: Tensor = model(row)[0, :-1].float()
        bits -= logits.log_softmax(-1).gather(1, row[0, 1:, None]).sum().item() / math.log(2)
        size += len(tokenizer.decode(ids).encode())
    return bits / size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = texts_of(arguments.files, arguments.texts)
    own = quantised.BLOCK
    print("| precision | step | numbers to a scale | bits per byte |\n|---|---|---|---|")
    for precision, fast, block in CASES:
        quantised.BLOCK = block or own
        found = bits_per_byte(arguments.model, texts, arguments.tokens, precision, fast)
        print(f"| {precision} | {fast} | {quantised.BLOCK if precision == 'int8' else ''} | {found:.5f} |", flush=True)


if __name__ == "__main__":
    main()
