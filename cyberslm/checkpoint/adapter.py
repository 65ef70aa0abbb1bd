"""Adapter folders in the file format of PEFT, which opens them as they are, as ours opens PEFT's.

    adapter_config.json  adapter_model.safetensors  manifest.json
    generation_config.json  tokenizer files  chat_template.jinja (where the model has one)
    training/optimizer.safetensors  training/state.json          (step folders only)

A folder holds what a run trained and how its model is asked, and nothing else: the adapters, what else of the base was
trained, as whole modules, and the tokenizer, chat template and stop ids of the run, which go before the base's. What it
belongs to is named by the base's manifest hash, in our manifest; PEFT has none, so an adapter of others is judged by
names and shapes alone, and the tokenizer beside it is not read. A setting of theirs that would change the result and
that we don't have is refused by name, and so are pickles.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cyberslm import files
from cyberslm.checkpoint.folder import (
    CHAT_TEMPLATE,
    GENERATION,
    Extras,
    ModelFolder,
    TrainingFiles,
    load_extras,
    read_json,
    read_text,
    write_json,
    write_training,
    write_whole,
    write_words,
)
from cyberslm.checkpoint.hf import HEAD, PREFIX, disk_name
from cyberslm.errors import ConfigError, IntegrityError
from cyberslm.model.config import CyberSLMConfig
from cyberslm.model.lora import MARK, TARGETS, LoraConfig, adapters, add_adapters
from cyberslm.model.model import CyberSLM
from cyberslm.text.tokenizer import Tokenizer, load_tokenizer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
KIND = "cyberslm-adapter"
PEFT_PREFIX = "base_model.model."
TRAINING = "training/"

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "task_type": ("CAUSAL_LM", None),
}
"""The values that some settings may have ..."""
_HARMLESS = frozenset(
    {
        *("base_model_name_or_path", "inference_mode", "peft_version", "revision", "auto_mapping", "lora_dropout"),
        *("r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "exclude_modules", "eva_config"),
        *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
        *("runtime_config",),
    }
)
"""... and those that are read, or say only which tensors are there. All others must be null, false or empty."""


class Adapter(NamedTuple):
    """What an adapter folder holds; ``tensors`` by our parameter names, fp32."""

    config: LoraConfig
    tensors: dict[str, Tensor]
    base: str | None
    """Where the base was when the adapter was written."""
    base_sha256: str | None
    """The base's manifest hash; None for an adapter of other tools."""


def trained_tensors(model: CyberSLM) -> dict[str, Tensor]:
    """Adapters, and all parameters of every module of which one is trained."""
    names = {
        name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad and not _is_adapter(name)
    }
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if _is_adapter(name) or name.rpartition(".")[0] in names
    }


def save_adapter(
    target: Path,
    adapted: ModelFolder,
    config: LoraConfig,
    *,
    base: str,
    training: TrainingFiles | None = None,
) -> None:
    """Publish what was trained of an ``adapted`` model and how it is asked, replacing an adapter folder that is there.

    Its ``manifest`` is the folder's own, such as ``base_sha256``; ``base`` is the path that PEFT looks for the base at.
    Raises `StorageError` when it can't be written, `IntegrityError` when a weight is not finite; what was there stays.
    """
    model, tokenizer, fields, extras = adapted
    tensors = {_peft_name(name): tensor for name, tensor in trained_tensors(model).items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(f"weight {name} is not finite: the adapter was not saved to {target}")

    def fill(staging: Path) -> dict[str, object]:
        write_json(staging / CONFIG, peft_config(model, config, base=base))
        write_whole(staging / WEIGHTS, tensors)
        write_words(staging, model.config, tokenizer, extras)
        if training is not None:
            write_training(staging, training)
        return {"kind": KIND, "tokenizer_sha256": tokenizer.sha256, **fields}

    files.publish(target, fill, replace=True)


def copy_adapter(source: Path, target: Path) -> None:
    """Publish an adapter folder of ours without what only its training needs."""
    manifest = verify_adapter(source)

    def fill(staging: Path) -> dict[str, object]:
        for name in (name for name in manifest["files"] if not name.startswith(TRAINING)):
            shutil.copyfile(source / name, staging / name)
        return {key: value for key, value in manifest.items() if key not in ("files", "self")}

    files.publish(target, fill, replace=True)


def peft_config(model: CyberSLM, config: LoraConfig, *, base: str) -> dict[str, object]:
    """The content of ``adapter_config.json``."""
    modules = sorted(
        {disk_name(name).rpartition(".")[0] for name in trained_tensors(model) if not _is_adapter(name)}
        - {"model.embed_tokens"}  # PEFT would untie it; its tensor is found by name
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "target_modules": list(_target_modules(model)),
        "modules_to_save": modules or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def load_adapter(folder: Path | str) -> Adapter:
    """Read an adapter folder of ours, each file checked against its manifest, or of PEFT.

    Raises `IntegrityError` for one that is damaged, `ConfigError` naming a setting or tensor that can't be used.
    """
    path = Path(folder)
    manifest: Mapping[str, object] = verify_adapter(path) if files.looks_published(path) else {}
    settings = read_json(_config_file(path))
    if not isinstance(settings, dict):
        raise IntegrityError(f"{path / CONFIG} does not hold an object")
    tensors = _read_tensors(path / WEIGHTS)
    config = _lora_config(settings, tensors, where=str(path / CONFIG))
    base, digest = settings.get("base_model_name_or_path"), manifest.get("base_sha256")
    return Adapter(config, tensors, str(base) if base else None, None if digest is None else str(digest))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, ours or PEFT's, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def verify_adapter(folder: Path) -> dict:
    """The manifest of a whole, undamaged adapter folder of ours; `IntegrityError` otherwise."""
    manifest = files.verify(folder)
    if manifest.get("kind") != KIND:
        raise IntegrityError(f"{folder} is a finished folder of kind {manifest.get('kind')!r}, not a {KIND}")
    return manifest


def kept_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that an adapter of ours, which has been verified, was trained with; None where it has none."""
    ours = files.looks_published(folder) and "tokenizer_sha256" in files.read_manifest(folder)
    return load_tokenizer(folder) if ours else None


def kept_extras(folder: Path, config: CyberSLMConfig, base: Extras) -> Extras:
    """The chat template and stop ids that an adapter was trained with; those of the ``base`` where it has none."""
    if (folder / GENERATION).is_file():
        return load_extras(folder, config)
    if (folder / CHAT_TEMPLATE).is_file():
        return base._replace(chat_template=read_text(folder / CHAT_TEMPLATE))
    return base


def apply_adapter(model: CyberSLM, adapter: Adapter) -> None:
    """Put an adapter on its base, in place: layers are adapted, what else was trained replaces the base's.

    Raises `ConfigError` naming a tensor that the model has no place for, or of another shape.
    """
    if not adapters(model):
        names = sorted({name.rpartition(".")[0] for name in adapter.tensors if _is_adapter(name)})
        add_adapters(model, adapter.config, only=names)
    parameters = dict(model.named_parameters())
    adapted = {name for name in parameters if _is_adapter(name)}
    if odd := sorted((adapted ^ set(filter(_is_adapter, adapter.tensors))) | (set(adapter.tensors) - set(parameters))):
        raise ConfigError(f"adapter tensor {odd[0]} is {'missing' if odd[0] in parameters else 'unknown to the base'}")
    for name, tensor in adapter.tensors.items():
        if tensor.shape != parameters[name].shape:
            raise ConfigError(
                f"adapter tensor {name} has shape {list(tensor.shape)}, its base wants {list(parameters[name].shape)}"
            )
        parameters[name].data.copy_(tensor)


def _config_file(path: Path) -> Path:
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is no adapter folder: it has no {CONFIG}")
    if not (path / WEIGHTS).is_file():
        pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        why = (
            f"{pickles[0].name} is a pickle, which could run code: save it as safetensors" if pickles else "is missing"
        )
        raise ConfigError(f"{path}: {WEIGHTS}: {why}")
    return path / CONFIG


def _lora_config(settings: Mapping[str, object], tensors: Mapping[str, Tensor], *, where: str) -> LoraConfig:
    for key, value in settings.items():
        allowed = _NEUTRAL.get(key)
        if (value not in allowed) if allowed is not None else (bool(value) and key not in _HARMLESS):
            raise ConfigError(f"{where}: {key} is {value!r:.60}, which is not supported here")
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type is {settings.get('peft_type')!r:.60}, not 'LORA'")
    rank, alpha, dropout = (
        settings.get(key, other) for key, other in (("r", 8), ("lora_alpha", 8), ("lora_dropout", 0))
    )
    if type(rank) is not int or not isinstance(alpha, int | float) or not isinstance(dropout, int | float):
        raise ConfigError(
            f"{where}: r, lora_alpha and lora_dropout must be numbers, not {rank!r}, {alpha!r}, {dropout!r}"
        )
    targets = {name.split(".")[-2] for name in tensors if _is_adapter(name)}
    if odd := sorted(targets - set(TARGETS)):
        raise ConfigError(
            f"{where}: adapts {odd[0]!r:.60}; adapters go on {', '.join(TARGETS)} (embedding and head may be tied)"
        )
    if not targets:
        raise ConfigError(f"{where}: {WEIGHTS} holds no adapter")
    ordered = tuple(target for target in TARGETS if target in targets)
    try:
        config = LoraConfig(
            rank=rank,
            alpha=float(alpha),
            dropout=float(dropout),
            targets=ordered,
            rslora=settings.get("use_rslora") is True,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for name, tensor in tensors.items():
        if _is_adapter(name) and tensor.shape[0 if name.endswith("A") else -1] != rank:
            raise ConfigError(f"{where}: r is {rank} and {name} has shape {list(tensor.shape)}")
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors as fp32 under our names; sizes come from the file's header, which the library checks first."""
    found = {}
    try:
        with safe_open(path, framework="pt") as archive:
            for key in archive.keys():  # noqa: SIM118 (not a mapping)
                header = archive.get_slice(key)
                if header.get_dtype() not in ("F32", "F16", "BF16") or not math.prod(header.get_shape()):
                    raise IntegrityError(f"{path}: tensor {key} is {header.get_dtype()} {header.get_shape()}")
                found[_own_name(key, path)] = archive.get_tensor(key).to(torch.float32)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path} can't be read: {error}") from error
    return found


def _target_modules(model: CyberSLM) -> list[str]:
    """Last parts of names where they say which layers are adapted, else whole names."""
    adapted = adapters(model)
    last = {name.rpartition(".")[2] for name in adapted}
    every = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    if every == set(adapted):
        return [target for target in TARGETS if target in last]
    return [disk_name(name) for name in adapted]


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2].startswith(MARK)


def _peft_name(name: str) -> str:
    return f"{PEFT_PREFIX}{disk_name(name)}{'.weight' if _is_adapter(name) else ''}"


def _own_name(key: str, path: Path) -> str:
    name = key.removeprefix(PEFT_PREFIX)
    if name == key or not name.startswith((PREFIX, HEAD)):
        raise ConfigError(f"{path}: tensor {key!r:.120} is unknown; adapters of causal language models are read")
    name = name if name.startswith(HEAD) else name.removeprefix(PREFIX)
    for mark in ("lora_A", "lora_B"):
        name = name.replace(f".{mark}.weight", f".{mark}")
    return name
