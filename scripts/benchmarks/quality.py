"""Time to quality: bits per byte of held-out text over seconds of training, on one prepared corpus with one tokenizer.

    python scripts/benchmarks/quality.py PREPARED OUT [--seconds 600] [--threads 2] [--config configs/speedrun.yaml]

Contenders have the demo's size (width 192, 4 layers, 3 heads, rows of 256 tokens), the same rows, and the whole time
for their own schedule. Validation and compilation are not counted. PREPARED is the data folder of a run of CONFIG.

transformers   Llama with the defaults of its Trainer: AdamW, rate 5e-5 falling linearly to 0, no decay, 8 rows, fp32
nanoGPT        GPT-2's network with the settings of nanoGPT's train.py: AdamW, rate 6e-4, betas 0.9 and 0.95, decay 0.1,
               12 rows, cosine to a tenth, bf16, compiled; its warm-up of 2,000 steps is cut to a tenth of the run
cyberslm       `cyberslm train CONFIG` with train.max_time
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cyberslm.data.loader import IGNORE, Batch, RowLoader
from cyberslm.data.prepare import open_prepared
from cyberslm.recipes.data import bytes_per_id
from cyberslm.training.loss import LossOutput, measure

WIDTH, LAYERS, HEADS, INNER, TOKENS = 192, 4, 3, 512, 256
CHECKS = 20
Point = tuple[float, float]


def llama(vocab_size: int) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
        )
    )


def gpt2(vocab_size: int) -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocab_size,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=TOKENS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def peer_loss(run: Callable, cast: Callable, _model: Any, batch: Batch) -> LossOutput:
    with cast():
        logits = run(batch.input_ids, use_cache=False).logits
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return LossOutput(total, total.detach(), (batch.targets != IGNORE).sum())


def linear(share: float) -> float:
    return 1 - share


def warm_cosine(share: float) -> float:
    return share / 0.1 if share < 0.1 else 0.1 + 0.9 * (1 + math.cos(math.pi * (share - 0.1) / 0.9)) / 2


PEERS: dict[str, dict[str, Any]] = {
    "transformers": {"make": llama, "rows": 8, "lr": 5e-5, "rate": linear, "options": {"weight_decay": 0.0}},
    "nanoGPT": {
        "make": gpt2,
        "rows": 12,
        "lr": 6e-4,
        "rate": warm_cosine,
        "options": {"weight_decay": 0.1, "betas": (0.9, 0.95)},
        "bf16": True,
    },
}


def train_peer(name: str, prepared_folder: Path, seconds: float) -> Iterator[Point]:
    peer, prepared = PEERS[name], open_prepared(prepared_folder)
    torch.manual_seed(0)
    model = peer["make"](prepared.tokenizer.vocab_size).train()
    cast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=peer.get("bf16", False))
    loss = partial(peer_loss, torch.compile(model, dynamic=False) if "bf16" in peer else model, cast)
    plain = partial(peer_loss, model, cast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peer["lr"], fused=True, **peer["options"])
    loader = partial(RowLoader, seq_len=TOKENS, seed=1, pad_id=0)
    rows, held_out = loader(prepared.train, batch_rows=peer["rows"]), loader(prepared.validation, batch_rows=8)
    sizes = bytes_per_id(prepared.tokenizer)
    loss(model, rows.batch(0)).objective.backward()  # compiles
    optimizer.zero_grad(set_to_none=True)
    spent, step, due = 0.0, 0, 0.0
    while True:
        if spent >= due or spent >= seconds:
            yield spent, measure(model, held_out.sequential(8), sizes, plain).bits_per_byte
            due += seconds / CHECKS
        if spent >= seconds:
            return
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = peer["lr"] * peer["rate"](min(1.0, spent / seconds))
        output = loss(model, rows.batch(step))
        (output.objective / output.num_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent, step = spent + time.perf_counter() - started, step + 1


def train_own(config: str, prepared: Path, out: Path, seconds: float, threads: int) -> Iterator[Point]:
    settings = [
        f"out_dir={out}",
        f"data.prepared={prepared.resolve()}",
        "data.sources=[]",
        f"train.max_time={round(seconds)}s",
        f"threads={threads}",
    ]
    command = [sys.executable, "-m", "cyberslm", "train", config, *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spent = 0.0
    for record in map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["type"] == "train":
            spent += record["seconds"]
        elif record["type"] == "validation":
            yield spent, record["bits_per_byte"]


def draw(curves: dict[str, list[Point]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for (name, points), color in zip(curves.items(), ("#7a9a3a", "#c8501e", "#1f4e8c"), strict=False):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=name)
    axes.set(xlabel="seconds of training", ylabel="bits per byte of held-out text", ylim=(None, 3.0))
    axes.set_title("Time to quality: one corpus, one tokenizer, models of the demo's size")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prepared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--config", default="configs/speedrun.yaml")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Point]] = {}
    for name in [*PEERS, "cyberslm"]:
        kept = arguments.out / f"{name}.json"
        if not kept.exists():
            if name in PEERS:
                found = train_peer(name, arguments.prepared, arguments.seconds)
            else:
                folder = arguments.out / "run"
                found = train_own(arguments.config, arguments.prepared, folder, arguments.seconds, arguments.threads)
            kept.write_text(json.dumps(list(found)), encoding="utf-8")
        curves[name] = [tuple(point) for point in json.loads(kept.read_text(encoding="utf-8"))]
    draw(curves, arguments.out / "quality.png")
    print("| contender | bits per byte at the end | seconds until cyberslm is as good | share |\n|---|---|---|---|")
    for name, points in curves.items():
        seconds, score = points[-1]
        reached = next((at for at, own in curves["cyberslm"] if own <= score), math.inf)
        print(f"| {name} | {score:.4f} in {seconds:.0f} s | {reached:.0f} | {reached / seconds:.2f} |")


if __name__ == "__main__":
    main()
