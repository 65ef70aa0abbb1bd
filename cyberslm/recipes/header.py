"""The block of lines that opens a run, and `check`: what is about to be trained, on how much text, where."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cyberslm.data.loader import RowLoader
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.data import describe_rows
from cyberslm.recipes.finetune import FinetuneRun
from cyberslm.recipes.origin import Origin, moving
from cyberslm.recipes.scale import MOST_EPOCHS, Dial, planned_tokens
from cyberslm.training.config import NO_LIMIT
from cyberslm.training.distributed import Dist
from cyberslm.training.optim import group_sizes

FAR_OFF = 0.25
"""How far from its dial, as a share, a model is before a word is said."""


def header(run: TrainRun, origin: Origin, loader: RowLoader, device: torch.device) -> list[str]:
    """The block that opens a run: what is about to be trained, on how much, where."""
    config = run.model
    total = config.num_parameters
    short_of_text = loader.store.num_tokens <= run.seq_len
    return [
        *(["warning: a row is longer than the training text: rows are mostly padding"] * short_of_text),
        f"model: {total:,} parameters ({total - config.num_embedding_parameters:,} without embeddings),"
        f" {config.num_layers} layers, width {config.hidden_dim}, context {config.max_seq_len},"
        f" vocabulary {config.vocab_size:,}",
        *_base_lines(run, origin),
        _steps_line(run, loader),
        *_repetition(run, loader),
        *_off_the_dial(run),
        *describe_rows(loader),
        _optimizer_line(run, origin),
        f"device: {device}, {run.precision}, {torch.get_num_threads()} threads{_loops(run)}, seed {run.seed}",
        f"folder: {run.folder}",
    ]


def _loops(run: TrainRun) -> str:
    return ", loops in C++" if run.native is True else ""


def processes(run: TrainRun, dist: Dist) -> list[str]:
    """How several processes share the work."""
    if dist.backend is None:
        return []
    least, rest = divmod(run.train.global_batch_size, dist.world)
    rows = f"{least} to {least + 1}" if rest else f"{least}"
    return [f"processes: {dist.world} ({dist.strategy}, {dist.backend}), each {rows} rows of a step"]


def _steps_line(run: TrainRun, loader: RowLoader) -> str:
    settings, length = run.train, run.seq_len
    batch = settings.global_batch_size
    stages = "".join(f"{steps:,} of {rows * length:,}, then " for steps, rows in settings.batch_ramp)
    each = (
        f"{stages}{batch * length:,} tokens ({batch} rows, {min(batch, settings.micro_batch_size)} at a time),"
        f" {loader.rows_per_epoch / batch:,.1f} steps per epoch"
    )
    if settings.max_steps == NO_LIMIT:
        return f"steps: as many as {settings.max_time} allow, of {each}"
    most = f" (at most, in {settings.max_time})" if settings.max_time else ""
    rows = loader.first_row(settings.max_steps)
    return (
        f"steps: {settings.max_steps:,}{most} of {each}, {rows / loader.rows_per_epoch:,.2f} epochs,"
        f" {rows * length / run.model.num_parameters:,.1f} tokens per parameter"
    )


def _repetition(run: TrainRun, loader: RowLoader) -> Iterator[str]:
    """A word where text is repeated more often than it teaches. In a time it is as often as ``scale`` planned for."""
    steps, length = run.train.max_steps, run.seq_len
    if steps != NO_LIMIT:
        rows = loader.first_row(steps)
    elif run.scale is not None:
        rows = planned_tokens(run.model) // length
    else:
        return
    if (epochs := rows / loader.rows_per_epoch) > MOST_EPOCHS:
        yield (
            f"warning: {epochs:,.0f} epochs, and text teaches little after {MOST_EPOCHS}: more text, fewer"
            " train.max_steps or a smaller scale"
        )


def _off_the_dial(run: TrainRun) -> Iterator[str]:
    """A word where what is given beside ``scale`` leaves it no say."""
    target = None if run.scale is None else Dial.of(run.scale).parameters
    if target is not None and abs(run.model.num_parameters / target - 1) > FAR_OFF:
        yield (
            f"warning: scale: {run.scale} doesn't make the model: sizes that are given under model: or tokenizer: stay,"
            f" and with them it has {run.model.num_parameters:,} parameters"
        )


def _base_lines(run: TrainRun, origin: Origin) -> Iterator[str]:
    """From what a fine-tuning run begins, and what of it moves."""
    if not isinstance(run, FinetuneRun):
        return
    yield f"base: {run.base_folder} (manifest {str(origin.fields['base_sha256'])[:12]})"
    total = sum(each.numel() for each in origin.outline().parameters())
    adapters = "" if run.lora is None else f", adapters of rank {run.lora.rank} on {', '.join(run.lora.targets)}"
    yield f"trained: {moving(run).learning:,} of {total:,} parameters{adapters}"


def _optimizer_line(run: TrainRun, origin: Origin) -> str:
    groups = group_sizes(origin.outline(), run.optimizer)
    shown = (
        f"{name} {group['parameters']:,} ({group['algorithm']}, lr {group['lr']:g}, decay {group['weight_decay']:g})"
        for name, group in groups.items()
    )
    return f"optimizer: {', '.join(shown)}"
