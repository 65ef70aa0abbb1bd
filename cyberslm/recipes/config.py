"""`TrainRun`: the whole configuration of a training run, one section a consumer. Only recipes see all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from cyberslm.checkpoint.steps import list_steps
from cyberslm.config import Loaded, PathStr, load, top_keys
from cyberslm.data.config import DataConfig
from cyberslm.errors import ConfigError, TokenizerError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.recipes.scale import GPU_RATE, RATES, Dial, derive
from cyberslm.text.chat import TEMPLATE_FILE
from cyberslm.text.config import TokenizerConfig
from cyberslm.text.tokenizer import open_tokenizer
from cyberslm.training.config import NO_LIMIT, TrainConfig
from cyberslm.training.distributed import DistributedConfig, place
from cyberslm.training.elsewhere import TRACKERS
from cyberslm.training.hardware import cores
from cyberslm.training.limits import auto_precision
from cyberslm.training.optim import OptimizerConfig
from cyberslm.training.schedule import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training."""

    interval: int = 250
    """Steps between validations; checkpoints at checkpoint.interval and at the end are validated too."""

    max_rows: int = 0
    """Rows per validation, spread evenly over the split; 0 = the whole split."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts continued at every validation, shown and kept in samples.jsonl."""

    sample_tokens: int = 48
    """New tokens of each sample."""

    def __post_init__(self) -> None:
        _at_least(self, interval=1, max_rows=0, sample_tokens=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Step folders of the run."""

    interval: int = 500
    """Steps between checkpoints; there is one more at each best validation, at the end and on a signal."""

    keep_last: int = 2
    """Newest checkpoints to keep; the one with the best validation loss is kept besides."""

    final: Literal["best", "last"] = "best"
    """Which checkpoint becomes final/: the one with the best validation loss, or the last."""

    def __post_init__(self) -> None:
        _at_least(self, interval=1, keep_last=1)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is shown while training."""

    interval: int = 10
    """Steps between lines on the screen; metrics.jsonl always has every step."""

    plots: bool = True
    """Draw plots/loss.png at each checkpoint (needs the plots extra)."""

    trackers: tuple[str, ...] = ()
    """Where numbers and samples go besides metrics.jsonl: tensorboard (needs the trackers extra)."""

    probe: bool = True
    """Measure the model's speed and the machine's limit for some seconds before the first step: gives the time to
    finish, and the share of the limit that is used."""

    def __post_init__(self) -> None:
        _at_least(self, interval=1)
        for name in self.trackers:
            if name not in TRACKERS:
                raise ConfigError(f"trackers has {name!r}: known are {', '.join(TRACKERS)}")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"trackers names one twice: {', '.join(self.trackers)}")


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """One training run, from text to model folder."""

    out_dir: PathStr
    """Folder of the run: checkpoints, metrics, plots and final/."""

    scale: str | int | None = None
    """Size of the run, as parameters (500k, 33M, 1.5B) or as a time (90s, 10min, 2h), from which all sizes and rates
    follow that are not given."""

    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of matrix products; weights and moments are always fp32. auto = bf16 where the processor has it; fp16,
    with a loss scale, only on a GPU that has no bf16."""

    compile: Literal["auto", True, False] = "auto"
    """Fuse the work between matrix products by torch.compile, which needs a C++ compiler; auto = for runs of some ten
    minutes or more, but not with fsdp, and not where native leaves nothing to fuse."""

    native: Literal["auto", True, False] = "auto"
    """Loops in C++ for what lies between matrix products on a CPU, built once for the machine in some ten seconds; auto
    = where there is a C++ compiler."""

    threads: int = 0
    """CPU threads of a process; 0 = all cores, shared evenly by this machine's processes. Results are bit-identical
    only for the same number."""

    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: CyberSLMConfig = field(default_factory=CyberSLMConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        if self.scale is not None:
            Dial.of(self.scale)
        if not 0 <= self.seed < 1 << 62:
            raise ConfigError(f"seed must be from 0 to 2^62 - 1, not {self.seed}")
        if not 0 <= self.threads <= 4096:
            raise ConfigError(f"threads must be from 0 to 4096, not {self.threads}")
        if self.compile is True and self.distributed.strategy == "fsdp":
            raise ConfigError("compile: true doesn't go with distributed.strategy: fsdp; take ddp, or compile: auto")
        if self.scheduler.warmup_steps >= self.train.max_steps:
            raise ConfigError(
                f"scheduler.warmup_steps {self.scheduler.warmup_steps} must be below train.max_steps"
                f" {self.train.max_steps}"
            )

        if self.train.seq_len is not None and self.train.seq_len > self.longest_row:
            raise ConfigError(
                f"train.seq_len {self.train.seq_len} must be at most model.max_seq_len {self.model.max_seq_len}"
            )

    @property
    def longest_row(self) -> int:
        """Tokens that a row may have."""
        return self.model.max_seq_len

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.train.seq_len or self.model.max_seq_len

    @property
    def row_shape(self) -> CyberSLMConfig:
        """The model with a context of one row: what formulas of a step's cost go by."""
        return replace(self.model, max_seq_len=self.seq_len)

    @property
    def corpus(self) -> DataConfig:
        """All text that is prepared."""
        return self.data

    @property
    def folder(self) -> Path:
        return Path(self.out_dir)

    @property
    def prepared(self) -> Path:
        return Path(self.data.prepared) if self.data.prepared else self.folder / "data"


AnyRun = TypeVar("AnyRun", bound=TrainRun)

_SIZES = {"model.vocab_size", "tokenizer.vocab_size"}
NOT_THE_RESULT = frozenset(
    {
        "out_dir",
        "scale",
        "threads",
        "compile",
        "native",
        "train.micro_batch_size",
        "train.max_bad_steps",
        "train.max_rollbacks",
        "train.activation_checkpointing",
        "checkpoint.keep_last",
        "checkpoint.final",
        "data.threads",
        "data.prepared",
        "data.sources",
        "data.validation",
        "data.chat.template",
        "base",
        "replay.path",
        "replay.validation",
        "extend_vocab.file",
        "tokenizer.path",
        "tokenizer.lossless",
    }
)
"""Keys that may change between two starts of one run: they leave its result alone (but for rounding, in the case of
threads, processes, compile, native and micro_batch_size), only say when it gives up, or what they name is compared by
content."""
NOT_THE_RESULT_SECTIONS = ("eval.sample_", "logging.", "distributed.")


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[TrainRun]:
    """Read a run's YAML and overrides.

    A size of the vocabulary that is given once counts for tokenizer and model. A time budget without a number of steps
    sets no limit to them.
    """
    if "base" in top_keys(path, overrides):
        raise ConfigError(f"{path}: names a base, so it trains that on: use  cyberslm finetune {path}")
    loaded = load(path, TrainRun, overrides, follow=follow_scale)
    run = without_step_limit(loaded)
    if run.data.format == "preference":
        raise ConfigError(
            f"{path}: data.format: preference compares with a base: use cyberslm finetune, objective: dpo"
        )
    if run.tokenizer.path is None and loaded.given & _SIZES == {"model.vocab_size"}:
        run = replace(run, tokenizer=replace(run.tokenizer, vocab_size=run.model.vocab_size))
    elif "model.vocab_size" not in loaded.given:
        run = replace(run, model=replace(run.model, vocab_size=run.tokenizer.vocab_size))
    sure = not run.tokenizer.shrink and run.tokenizer.path is None  # else the tokenizer tells its size later
    if sure and run.model.vocab_size < run.tokenizer.vocab_size:
        raise ConfigError(
            f"{path}: model.vocab_size {run.model.vocab_size} is below tokenizer.vocab_size"
            f" {run.tokenizer.vocab_size}: give only one of them, or make the model's at least as large"
        )
    return replace(loaded, value=with_chat(run, run.tokenizer.path))


def with_chat(run: AnyRun, beside: str | None) -> AnyRun:
    """The run with what ``data.chat`` leaves open: the length of a row, and the template in the folder ``beside``."""
    if run.data.format == "text":
        return run
    chat = run.data.chat
    if chat.max_tokens is None:
        chat = replace(chat, max_tokens=run.seq_len)
    if chat.template is None and chat.style == "auto" and beside is not None:
        folder = Path(beside) if Path(beside).is_dir() else Path(beside).parent
        found = folder / TEMPLATE_FILE
        chat = replace(chat, template=str(found) if found.is_file() else None)
    return replace(run, data=replace(run.data, chat=chat))


def without_step_limit(loaded: Loaded[AnyRun]) -> AnyRun:
    """The run, with no limit to its steps where a time budget alone is given."""
    run = loaded.value
    if run.train.max_time is not None and "train.max_steps" not in loaded.given:
        return replace(run, train=replace(run.train, max_steps=NO_LIMIT))
    return run


def follow_scale(given: Mapping[str, Any]) -> Mapping[str, object]:
    """What follows from ``scale``, by dotted key, for a run of which ``given`` is given.

    A run that has begun keeps what followed when it began, so that it goes on where there are other threads too.
    """
    if given.get("scale") is None:
        return {}
    dial, vocabulary = Dial.of(given["scale"]), {}
    if given.get("tokenizer.path") is not None and "model.vocab_size" not in given:
        vocabulary = {"model.vocab_size": _size_of_tokenizer(given)}
    found = derive(dial, {**given, **vocabulary}, rate=_operations_per_second(given))
    before = _begun(given)
    if before is None or before.scale != given["scale"]:
        return found
    return {key: reduce(getattr, key.split("."), before) for key in found}


def _size_of_tokenizer(given: Mapping[str, Any]) -> int:
    lossless = given.get("tokenizer.lossless", TokenizerConfig.lossless)
    try:
        return open_tokenizer(
            given["tokenizer.path"], add_bos=given.get("tokenizer.add_bos"), lossless=lossless
        ).vocab_size
    except TokenizerError as error:
        raise ConfigError(f"tokenizer.path: {error}") from error


def _operations_per_second(given: Mapping[str, Any]) -> float:
    """What all processes together are counted on to train with."""
    _, world, _, neighbours = place()
    device = torch.device("cuda" if given.get("device") != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return world * GPU_RATE
    precision = given.get("precision", "auto")
    threads = given.get("threads") or cores().usable / neighbours
    return world * threads * RATES[auto_precision(device) if precision == "auto" else precision]


def _begun(given: Mapping[str, Any]) -> TrainRun | None:
    """The run that ``out_dir`` holds checkpoints of."""
    folder = Path(given.get("out_dir", ""))
    kept = folder / "config.yaml"
    return load(kept, TrainRun).value if list_steps(folder / "checkpoints") and kept.exists() else None


def _at_least(config: object, **limits: int) -> None:
    for name, limit in limits.items():
        if getattr(config, name) < limit:
            raise ConfigError(f"{name} must be at least {limit}, not {getattr(config, name)}")
