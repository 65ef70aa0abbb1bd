"""Where a run's weights come from, and in which form its checkpoints keep them.

    from scratch   drawn from the seed; step folders are model folders
    from a base    the base's; step folders name it by its manifest hash, and are model folders or, with adapters, hold
                   what was trained alone

Whatever a step folder is, ``final/`` is a whole model folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from cyberslm.checkpoint.adapter import apply_adapter, load_adapter, save_adapter
from cyberslm.checkpoint.folder import Extras, ModelFolder, TrainingFiles, load_extras, load_model, save_model
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import add_adapters, keep_base_in, merge
from cyberslm.model.model import CyberSLM
from cyberslm.recipes.config import TrainRun
from cyberslm.recipes.conversations import extras_of
from cyberslm.recipes.finetune import FinetuneRun, base_tokenizer
from cyberslm.recipes.vocabulary import ROWS, extend_rows, train_new_rows
from cyberslm.text.tokenizer import Tokenizer


class Origin(Protocol):
    """Makes, keeps and reopens the model of a run."""

    @property
    def fields(self) -> dict[str, object]:
        """What every manifest of the run says of its origin."""
        ...

    def outline(self, device: torch.device | str = "meta") -> CyberSLM:
        """A model like the run's, of no weights or of random ones: for counting, and for trials of its speed."""
        ...

    def fresh(self, device: torch.device) -> CyberSLM:
        """The model before the first step."""
        ...

    def reopened(self, folder: Path, device: torch.device) -> CyberSLM:
        """The model as a step folder, which has been verified, keeps it."""
        ...

    def save(
        self,
        target: Path,
        model: CyberSLM,
        tokenizer: Tokenizer,
        fields: Mapping[str, object],
        training: TrainingFiles,
    ) -> None:
        """Write a step folder."""
        ...

    def extras(self, tokenizer: Tokenizer) -> Extras:
        """The chat template and stop ids of the run's model folders."""
        ...

    def whole(self, folder: Path) -> CyberSLM:
        """The plain model of a step folder, for ``final/``. Raises `IntegrityError` when it is damaged."""
        ...


def origin_of(run: TrainRun) -> Origin:
    return FromBase(run) if isinstance(run, FinetuneRun) else FromScratch(run)


class Moving(NamedTuple):
    """What of a run's model is trained."""

    trained: int
    """Parameters that have a gradient and moments."""
    frozen_bytes: int
    """What all others take."""
    learning: int
    """Parameters that change: of a matrix of which the new rows alone are trained, those."""


def moving(run: TrainRun) -> Moving:
    parameters = dict(origin_of(run).outline().named_parameters())
    trained = sum(each.numel() for each in parameters.values() if each.requires_grad)
    frozen = sum(each.numel() * each.element_size() for each in parameters.values() if not each.requires_grad)
    still = 0
    if isinstance(run, FinetuneRun) and run.trains_new_rows:
        old = base_tokenizer(run).vocab_size * run.model.hidden_dim
        still = old * sum(name in parameters and not run.is_trained(name) for name in ROWS)
    return Moving(trained, frozen, trained - still)


class FromScratch:
    """Weights drawn from the seed."""

    def __init__(self, run: TrainRun) -> None:
        self._run = run
        self.fields: dict[str, object] = {}

    def outline(self, device: torch.device | str = "meta") -> CyberSLM:
        return CyberSLM(self._run.model, seed=self._run.seed, device=device)

    def fresh(self, device: torch.device) -> CyberSLM:
        return self.outline(device)

    def reopened(self, folder: Path, device: torch.device) -> CyberSLM:
        return _of_shape(self._run.model, folder, device)

    def save(
        self,
        target: Path,
        model: CyberSLM,
        tokenizer: Tokenizer,
        fields: Mapping[str, object],
        training: TrainingFiles,
    ) -> None:
        save_model(target, model, tokenizer, {**self.fields, **fields}, training, self.extras(tokenizer))

    def extras(self, tokenizer: Tokenizer) -> Extras:
        return extras_of(self._run, tokenizer, Extras())

    def whole(self, folder: Path) -> CyberSLM:
        return load_model(folder).model


class FromBase:
    """Weights of the run's base."""

    def __init__(self, run: FinetuneRun) -> None:
        self._run = run
        self.fields: dict[str, object] = {"base_sha256": run.base_sha256}
        self._extras = load_extras(run.base_folder, run.model)

    def outline(self, device: torch.device | str = "meta") -> CyberSLM:
        return self._prepared(CyberSLM(self._run.model, seed=self._run.seed, device=device))

    def fresh(self, device: torch.device) -> CyberSLM:
        return self._prepared(self._base(device))

    def reopened(self, folder: Path, device: torch.device) -> CyberSLM:
        if self._run.lora is None:
            return self._prepared(_of_shape(self._run.model, folder, device))
        model = self._prepared(self._base(device))
        apply_adapter(model, load_adapter(folder))
        return model

    def save(
        self,
        target: Path,
        model: CyberSLM,
        tokenizer: Tokenizer,
        fields: Mapping[str, object],
        training: TrainingFiles,
    ) -> None:
        fields = {**self.fields, **fields}
        if self._run.lora is None:
            save_model(target, model, tokenizer, fields, training, self.extras(tokenizer))
        else:
            base = str(self._run.base_folder)
            adapted = ModelFolder(model, tokenizer, fields, self.extras(tokenizer))
            save_adapter(target, adapted, self._run.lora, base=base, training=training)

    def extras(self, tokenizer: Tokenizer) -> Extras:
        return extras_of(self._run, tokenizer, self._extras)

    def whole(self, folder: Path) -> CyberSLM:
        if self._run.lora is None:
            return load_model(folder).model
        model = self._base(torch.device("cpu"))
        apply_adapter(model, load_adapter(folder))
        return merge(model)

    def _base(self, device: torch.device) -> CyberSLM:
        run = self._run
        found = load_model(run.base_folder, device=device)
        if found.manifest["self"] != self.fields["base_sha256"]:
            raise IntegrityError(f"base: {run.base} has changed while this run was starting: start it again")
        model = found.model
        if run.extend_vocab is not None:
            model = extend_rows(model, run.model, found.tokenizer, run.extend_vocab.read())
        return model if model.config == run.model else _with_config(model, run.model)

    def _prepared(self, model: CyberSLM) -> CyberSLM:
        """Adapters, what is frozen, and in what the frozen part is kept."""
        run = self._run
        if run.lora is not None:
            add_adapters(model, run.lora, seed=run.seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad if _is_new(name) else run.is_trained(name))
        if run.trains_new_rows:
            train_new_rows(model, first=base_tokenizer(run).vocab_size)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("trainable and freeze leave nothing to train: name at least one parameter of the base")
        if run.lora is not None and run.keeps_base_in_bf16:
            keep_base_in(model, torch.bfloat16)
        return model.train()


def _is_new(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def _of_shape(config: CyberSLMConfig, folder: Path, device: torch.device) -> CyberSLM:
    found = load_model(folder, device=device)
    if found.model.config != config:
        raise ConfigError(f"{folder} holds a model of another shape than the configuration: choose another out_dir")
    return found.model


def _with_config(model: CyberSLM, config: CyberSLMConfig) -> CyberSLM:
    """The same weights under settings that matter in training alone."""
    other = CyberSLM(config, device="meta")
    other.load_state_dict(model.state_dict(), strict=True, assign=True)
    other.rope.to_empty(device=model.device)
    other.rope.reset()
    return other
