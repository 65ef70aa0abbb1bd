"""``cyberslm init``: a commented YAML for a folder of text, with sizes that suit how much text there is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cyberslm.config import LEFT_OUT, template
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import count_text
from cyberslm.training.trackers import count

FEW_FILES = 20


class Preset(NamedTuple):
    """Sizes for up to ``max_bytes`` of text."""

    max_bytes: float
    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    ffn_hidden_dim: int
    max_seq_len: int
    rows: int
    epochs: float


PRESETS = (
    Preset(2e6, 2_048, 128, 4, 2, 352, 256, 8, 8),
    Preset(3e7, 4_096, 192, 6, 3, 512, 256, 8, 4),
    Preset(3e8, 16_000, 384, 8, 6, 1_024, 512, 16, 2),
    Preset(float("inf"), 32_000, 384, 12, 6, 1_024, 1_024, 32, 1),
)
BYTES_PER_TOKEN = 3.7


def starter(text: Path, *, out: Path) -> str:
    """The YAML to write at ``out`` for the text in ``text``; it loads as it is."""
    found = count_text(text)
    if not found.num_bytes:
        raise ConfigError(
            f"{text} holds no files that can be read (text, HTML, JSON, CSV, Parquet, mail; docs/data.md lists them)"
        )
    preset = next(p for p in PRESETS if found.num_bytes <= p.max_bytes)
    step_bytes = preset.rows * preset.max_seq_len * BYTES_PER_TOKEN
    steps = max(100, round(found.num_bytes * preset.epochs / step_bytes, -1))
    interval = max(10, int(steps) // 10)
    name = text.resolve().stem or "model"
    values: dict[str, object] = {
        "out_dir": f"runs/{name}",
        "data.sources": [str(text.resolve())],
        "data.txt_unit": "paragraph" if found.txt_files and found.num_files < FEW_FILES else "file",
        "tokenizer.vocab_size": preset.vocab_size,
        "tokenizer.shrink": True,
        "model.vocab_size": LEFT_OUT,
        "model.hidden_dim": preset.hidden_dim,
        "model.num_layers": preset.num_layers,
        "model.num_heads": preset.num_heads,
        "model.ffn_hidden_dim": preset.ffn_hidden_dim,
        "model.max_seq_len": preset.max_seq_len,
        "train.max_steps": int(steps),
        "train.micro_batch_size": min(8, preset.rows),
        "train.global_batch_size": preset.rows,
        "optimizer.lr": 1e-3,
        "scheduler.warmup_steps": min(100, max(1, int(steps) // 20)),
        "eval.interval": interval,
        "checkpoint.interval": interval,
    }
    header = (
        f"Train a small language model on {text} ({count(found.num_files, 'file')}, {found.num_bytes / 1e6:.1f} MB).\n"
        f"Look first:  cyberslm check {out}\n"
        f"Then train:  cyberslm train {out}\n"
        "Every setting is here with its meaning; what you delete takes its default.\n"
        "Relative paths count from this file."
    )
    return template(TrainRun, values, header=header)
