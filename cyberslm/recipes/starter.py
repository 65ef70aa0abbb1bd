"""``cyberslm init``: a commented YAML for a folder of text, with sizes that suit how much text there is, or a dial."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

from cyberslm.config import LEFT_OUT, template
from cyberslm.errors import ConfigError
from cyberslm.recipes.config import TrainRun, follow_scale
from cyberslm.recipes.data import count_text
from cyberslm.recipes.scale import MOST_EPOCHS
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


def starter(text: Path, *, out: Path, scale: str | None = None) -> str:
    """The YAML to write at ``out`` for the text in ``text``; it loads as it is.

    ``scale`` is a run's dial (docs/training.md): what follows from it is written out, with no more steps than make
    `MOST_EPOCHS` epochs of about this much text.
    """
    found = count_text(text)
    if not found.num_bytes:
        raise ConfigError(
            f"{text} holds no files that can be read (text, HTML, JSON, CSV, Parquet, mail; docs/data.md lists them)"
        )
    sizes = _preset(found.num_bytes) if scale is None else _scaled(scale, found.num_bytes)
    name = text.resolve().stem or "model"
    values: dict[str, object] = {
        "out_dir": f"runs/{name}",
        "data.sources": [str(text.resolve())],
        "data.txt_unit": "paragraph" if found.txt_files and found.num_files < FEW_FILES else "file",
        "tokenizer.shrink": True,
        "model.vocab_size": LEFT_OUT,
        **sizes,
    }
    chosen = (
        "" if scale is None else f"Sizes and rates are those of scale: {scale}, steps at most {MOST_EPOCHS} epochs.\n"
    )
    header = (
        f"Train a small language model on {text} ({count(found.num_files, 'file')}, {found.num_bytes / 1e6:.1f} MB).\n"
        f"{chosen}"
        f"Look first:  cyberslm check {out}\n"
        f"Then train:  cyberslm train {out}\n"
        "Every setting is here with its meaning; what you delete takes its default.\n"
        "Relative paths count from this file."
    )
    return template(TrainRun, values, header=header)


def _preset(num_bytes: int) -> dict[str, object]:
    preset = next(p for p in PRESETS if num_bytes <= p.max_bytes)
    steps = max(100, round(_steps(num_bytes, preset.epochs, preset.rows * preset.max_seq_len), -1))
    interval = max(10, int(steps) // 10)
    return {
        "tokenizer.vocab_size": preset.vocab_size,
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


def _scaled(scale: str, num_bytes: int) -> dict[str, object]:
    found = follow_scale({"scale": scale})
    tokens = cast(int, found["train.global_batch_size"]) * cast(int, found["model.max_seq_len"])
    most = max(2, int(_steps(num_bytes, MOST_EPOCHS, tokens)))
    steps = min(most, cast(int, found.get("train.max_steps", most)))
    return {**follow_scale({"scale": scale, "train.max_steps": steps}), "train.max_steps": steps}


def _steps(num_bytes: int, epochs: float, tokens: int) -> float:
    """Steps of ``tokens`` each that make this many epochs of about as much text."""
    return num_bytes * epochs / (tokens * BYTES_PER_TOKEN)
