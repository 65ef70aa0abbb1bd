"""`FinetuneRun`: a training run that begins with the weights of another model instead of random ones.

It is a `TrainRun` whose model and tokenizer are the base's, with what only such runs have: which weights move,
adapters, a general corpus replayed so that little is forgotten, and new tokens. One loop trains both.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cyberslm import files
from cyberslm.checkpoint.adapter import is_adapter
from cyberslm.checkpoint.folder import read_config, read_precision
from cyberslm.config import Loaded, PathStr, differences, load, top_keys
from cyberslm.data.config import DataConfig
from cyberslm.errors import ConfigError, CyberSLMError
from cyberslm.model.config import LONGEST
from cyberslm.model.lora import LoraConfig
from cyberslm.recipes.config import TrainRun, load_run, with_chat, without_step_limit
from cyberslm.recipes.use import find_model
from cyberslm.text.config import MAX_SYMBOL_CHARS, MAX_SYMBOLS, TokenizerConfig
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer, saved_rules
from cyberslm.training.optim import OptimizerConfig
from cyberslm.training.preference import PreferenceConfig

MAX_TOKEN_FILE = 1 << 20
OWN_CHOICE = frozenset({"dropout", "attn_dropout"})
"""Settings of the model that a base doesn't decide: they matter in training alone."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """A general corpus mixed in, so that what the base knew is kept; it is validated by itself."""

    path: PathStr
    """File, folder or glob of general text, read and cleaned as data.sources are."""

    weight: float = 0.1
    """Share of the trained tokens that come from it."""

    validation: PathStr | None = None
    """General text to measure on; null holds out data.validation_fraction of path. Needed with data.validation."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ConfigError(f"weight must be above 0 and below 1, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """Tokens to add to the base's vocabulary; each begins as the mean of the pieces that spelled it."""

    tokens: tuple[str, ...] = ()
    """Texts that become one token wherever they stand, such as CVE-."""

    file: PathStr | None = None
    """A UTF-8 file with one token a line, besides."""

    train: bool = True
    """Train the new rows of an embedding and head that are frozen otherwise."""

    def __post_init__(self) -> None:
        if not self.tokens and self.file is None:
            raise ConfigError("tokens is empty and file is null: give one of them, or leave extend_vocab out")

    def read(self) -> tuple[str, ...]:
        """All tokens, those of the file last. Raises `ConfigError` naming one that can't be added."""
        found = list(self.tokens)
        if self.file is not None:
            try:
                if Path(self.file).stat().st_size > MAX_TOKEN_FILE:
                    raise ConfigError(f"extend_vocab.file: {self.file} is larger than {MAX_TOKEN_FILE:,} bytes")
                found += [line for line in Path(self.file).read_text(encoding="utf-8").splitlines() if line]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"extend_vocab.file: {self.file} can't be read: {error}") from error
        if len(found) > MAX_SYMBOLS:
            raise ConfigError(f"extend_vocab: {len(found):,} tokens; at most {MAX_SYMBOLS:,} can be added")
        for token in found:
            if not 1 <= len(token) <= MAX_SYMBOL_CHARS:
                raise ConfigError(
                    f"extend_vocab: {token!r:.80} has {len(token)} characters, outside 1 to {MAX_SYMBOL_CHARS}"
                )
        if twice := next((token for token in found if found.count(token) > 1), None):
            raise ConfigError(f"extend_vocab: {twice!r} is there twice")
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class FinetuneRun(TrainRun):
    """One fine-tuning run, from a base model and text to a model folder."""

    base: PathStr
    """The model to begin with: a model folder, or a run folder. Its sizes and its tokenizer are the run's."""

    objective: Literal["next_token", "dpo"] = "next_token"
    """What is learned: the next token, of text or of answers (data.format chat); or with dpo, which of two answers is
    better (data.format preference)."""

    dpo: PreferenceConfig = field(default_factory=PreferenceConfig)

    lora: LoraConfig | None = None
    """Train low-rank adapters beside a frozen base; null trains the base's own weights."""

    replay: ReplayConfig | None = None

    extend_vocab: VocabularyConfig | None = None

    trainable: tuple[str, ...] = ()
    """Names of parameters that are trained, such as layers.2[0-9].* or norm.weight (* and ? as in file names); the
    others are frozen. Empty: all, or with lora only the adapters."""

    freeze: tuple[str, ...] = ()
    """Names of parameters that stay as they are, such as embed_tokens.weight; * and ? as in file names."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4, weight_decay=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        partly = bool(self.lora is not None or self.trainable or self.freeze)
        problems = {
            "scale is for train: a fine-tuned model has the sizes of its base": self.scale is not None,
            "distributed.strategy: fsdp can't cut up a base that is partly frozen: take ddp": (
                partly and self.distributed.strategy == "fsdp"
            ),
            "optimizer.name: muon is for whole matrices: with lora take adamw": (
                self.lora is not None and self.optimizer.name == "muon"
            ),
            "freeze: with lora the base is frozen already: leave it out": self.lora is not None and bool(self.freeze),
            "optimizer.weight_decay would move the old rows of a frozen embedding, of which extend_vocab trains the new"
            " ones: give optimizer.decay_embeddings=false": self._decays_old_rows(),
            **self._replay_problems(),
            **self._objective_problems(),
        }
        for problem, there in problems.items():
            if there:
                raise ConfigError(problem)

    def _decays_old_rows(self) -> bool:
        rows_alone = self.trains_new_rows and not self.is_trained("embed_tokens.weight")
        return rows_alone and self.optimizer.weight_decay > 0 and self.optimizer.decay_embeddings

    def _replay_problems(self) -> dict[str, bool]:
        if self.replay is None:
            return {}
        own, general = bool(self.data.validation), self.replay.validation is not None
        return {
            "replay.validation: data.validation is given, so name general text to measure on too": own and not general,
            "replay.validation is given, so name the domain's text to measure on too: data.validation": general
            and not own,
        }

    def _objective_problems(self) -> dict[str, bool]:
        dpo = self.objective == "dpo"
        return {
            f"objective is {self.objective} and data.format {self.data.format}: dpo learns from preference, next_token"
            " from text or chat": dpo != (self.data.format == "preference"),
            f"dpo has settings, and objective is {self.objective}: set objective: dpo": (
                not dpo and self.dpo != PreferenceConfig()
            ),
            "replay: a general corpus has no preferences: leave it out with objective: dpo": (
                dpo and self.replay is not None
            ),
            "train.z_loss is of the next token: leave it out with objective: dpo": dpo and self.train.z_loss > 0,
            "distributed.strategy: fsdp doesn't go with objective: dpo: take ddp": (
                dpo and self.distributed.strategy == "fsdp"
            ),
        }

    @property
    def longest_row(self) -> int:
        return LONGEST  # the base says, and `fitted` looks

    @property
    def corpus(self) -> DataConfig:
        """The run's own text and, as the last source, the general one."""
        if self.replay is None or not self.data.sources:
            return self.data
        validation = self.data.validation
        if self.replay.validation is not None:
            validation = (*validation, self.replay.validation)
        return replace(self.data, sources=(*self.data.sources, self.replay.path), validation=validation, mixture={})

    def is_trained(self, name: str) -> bool:
        """Whether the base's parameter of that name moves."""
        if self.trainable:
            chosen = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.trainable)
        else:
            chosen = self.lora is None
        return chosen and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.freeze)

    @property
    def trains_new_rows(self) -> bool:
        """Whether rows for new tokens are trained where the others are frozen."""
        return self.extend_vocab is not None and self.extend_vocab.train

    @property
    def keeps_base_in_bf16(self) -> bool:
        """Where the frozen matrices are halved; a run whose precision is still auto doesn't know yet."""
        if self.lora is None or self.lora.base_precision == "fp32":
            return False
        return self.lora.base_precision == "bf16" or self.precision == "bf16"

    @property
    def base_folder(self) -> Path:
        try:
            found = find_model(Path(self.base))
        except CyberSLMError as error:
            raise ConfigError(f"base: {error}") from error
        if found.resolve().is_relative_to(self.folder.resolve()):
            raise ConfigError(f"base: {self.base} lies in out_dir, which this run is to fill: choose another out_dir")
        if is_adapter(found):
            raise ConfigError(f"base: {found} is an adapter: make a model of it first with  cyberslm merge")
        return found

    @property
    def base_sha256(self) -> str:
        """The base's manifest hash, which names it."""
        return str(files.read_manifest(self.base_folder)["self"])


def load_finetune(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[FinetuneRun]:
    """Read a fine-tuning run's YAML and overrides, and the sizes of its base."""
    if "base" not in top_keys(path, overrides):
        raise ConfigError(
            f"{path}: names no base: add  base: MODEL  to train one on; from scratch it is  cyberslm train {path}"
        )
    loaded = load(path, FinetuneRun, overrides)
    run = without_step_limit(loaded)
    fitted_run = fitted(run)
    _refuse_given(loaded, fitted_run)
    return replace(loaded, value=fitted_run, given=loaded.given | {"tokenizer.path", "model.vocab_size"})


def load_any(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[TrainRun] | Loaded[FinetuneRun]:
    """Read a configuration of either kind: one with a ``base`` fine-tunes."""
    return load_finetune(path, overrides) if "base" in top_keys(path, overrides) else load_run(path, overrides)


def kept_run(path: Path) -> TrainRun:
    """The resolved configuration that a run keeps in its folder."""
    return load(path, FinetuneRun if "base" in top_keys(path) else TrainRun).value


def fitted(run: FinetuneRun) -> FinetuneRun:
    """The run with the model and tokenizer of its base."""
    folder = run.base_folder
    config, precision = read_config(folder), read_precision(folder)
    if precision != "fp32":
        raise ConfigError(f"base: {folder} is kept in {precision}, for use only: name the folder that it was made from")
    config = replace(config, dropout=run.model.dropout, attn_dropout=run.model.attn_dropout)
    tokenizer = TokenizerConfig(path=str(folder), lossless=saved_rules(folder).lossless)
    if run.extend_vocab is not None:
        tokens = run.extend_vocab.read()
        own = load_tokenizer(folder)
        config = replace(config, vocab_size=max(config.vocab_size, own.vocab_size + len(tokens)))
        tokenizer = replace(tokenizer, path=str(run.folder / "tokenizer"))
    run = replace(run, model=config, tokenizer=tokenizer)
    if run.seq_len > config.max_seq_len:
        raise ConfigError(f"train.seq_len {run.seq_len} must be at most the base's context, {config.max_seq_len}")
    return with_chat(run, str(folder))


def base_tokenizer(run: FinetuneRun) -> Tokenizer:
    return load_tokenizer(run.base_folder)


def has_adapters(run: TrainRun) -> bool:
    return isinstance(run, FinetuneRun) and run.lora is not None


def replayed(run: TrainRun) -> ReplayConfig | None:
    return run.replay if isinstance(run, FinetuneRun) else None


def _refuse_given(loaded: Loaded[FinetuneRun], run: FinetuneRun) -> None:
    """Sizes and tokenizer are the base's; saying the same again does no harm, as a resolved configuration does."""
    for section, before, now in (
        ("model", loaded.value.model, run.model),
        ("tokenizer", loaded.value.tokenizer, run.tokenizer),
    ):
        for key, (asked, own) in differences(before, now).items():
            if any(given == f"{section}.{key}" or given.startswith(f"{section}.{key}.") for given in loaded.given):
                raise ConfigError(
                    f"{section}.{key} is the base's, {own}, not {asked}: leave it out"
                    + (" (rows may be shorter: train.seq_len)" if key == "max_seq_len" else "")
                )
