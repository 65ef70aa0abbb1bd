"""``cyberslm merge``: a base and an adapter for it become one plain model folder."""

from __future__ import annotations

from pathlib import Path

from cyberslm.checkpoint.adapter import is_adapter
from cyberslm.checkpoint.folder import save_model
from cyberslm.errors import ConfigError
from cyberslm.recipes.finish import ADAPTER_FOLDER
from cyberslm.recipes.use import find_model, load_merged


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """Write the model of ``base`` with ``adapter``, a folder or a run with one, merged in fp32 to a new ``target``.

    Raises `ConfigError` for an adapter that belongs to another base or doesn't fit.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: name another folder")
    of_run = adapter / ADAPTER_FOLDER
    found = load_merged(of_run if is_adapter(of_run) else adapter, base=find_model(base))
    save_model(target, found.model, found.tokenizer, found.manifest, extras=found.extras)
    return target
