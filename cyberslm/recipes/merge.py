"""``cyberslm merge``: a base and an adapter for it become one plain model folder."""

from __future__ import annotations

from pathlib import Path

from cyberslm import files
from cyberslm.checkpoint.adapter import CONFIG, Adapter, apply_adapter, load_adapter
from cyberslm.checkpoint.folder import ModelFolder, load_model, save_model
from cyberslm.errors import ConfigError
from cyberslm.model.lora import merge
from cyberslm.recipes.use import find_model


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """Write the model of ``base`` with ``adapter`` merged in fp32 to ``target``, which may not exist.

    Raises `ConfigError` for an adapter that belongs to another base or doesn't fit.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: name another folder")
    found = merged(find_model(base), _adapter_folder(adapter))
    save_model(target, found.model, found.tokenizer, found.manifest, extras=found.extras)
    return target


def merged(base: Path, folder: Path) -> ModelFolder:
    """The plain model of a base and an adapter; ``manifest`` is what its own should say."""
    adapter, found = load_adapter(folder), load_model(base)
    _refuse_other_base(adapter, found.manifest, base)
    try:
        apply_adapter(found.model, adapter)
    except ConfigError as error:
        raise ConfigError(f"{folder} doesn't fit {base}: {error}") from error
    about = files.read_manifest(folder) if files.looks_published(folder) else {}
    fields = {key: value for key, value in about.items() if key not in ("files", "self", "kind", "tokenizer_sha256")}
    fields["base_sha256"] = found.manifest["self"]
    return ModelFolder(merge(found.model).eval(), found.tokenizer, fields, found.extras)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, ours or PEFT's, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def _adapter_folder(path: Path) -> Path:
    """An adapter folder, or the one of a run."""
    last = path / "final-adapter"
    return last if not is_adapter(path) and is_adapter(last) else path


def _refuse_other_base(adapter: Adapter, manifest: dict, base: Path) -> None:
    if adapter.base_sha256 not in (None, manifest["self"]):
        raise ConfigError(
            f"the adapter was trained on another base than {base}: manifest {str(adapter.base_sha256)[:12]}, not"
            f" {manifest['self'][:12]}"
        )
