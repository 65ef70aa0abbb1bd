"""Models of other tools in and out: which importer reads a source, and what people are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyberslm import files
from cyberslm.checkpoint.adapter import WEIGHTS as ADAPTER_WEIGHTS
from cyberslm.checkpoint.adapter import is_adapter
from cyberslm.checkpoint.folder import KIND, ModelFolder, load_model
from cyberslm.errors import ConfigError
from cyberslm.files import looks_published
from cyberslm.interop import exporting, gguf, hf
from cyberslm.interop.source import Source, write_source
from cyberslm.recipes.tokenizer import Say
from cyberslm.recipes.told import next_command
from cyberslm.recipes.use import find_model, load_merged

Target = Literal["hf", "gguf"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_model(source: Path, dest: Path, *, force: bool, say: Say) -> None:
    """Write a model folder of a Hugging Face folder or a GGUF file."""
    _refuse_own(source, dest)
    _require_free(dest, force=force)
    opened = open_source(source)
    write_source(opened, dest, replace=force)
    config, tokenizer = opened.parts.config, opened.parts.tokenizer
    sizes = f"{config.num_parameters:,} parameters, {tokenizer.vocab_size:,} tokens, context {config.max_seq_len:,}"
    say(f"{dest}: {sizes}")
    say(f"weights: {opened.record['weights']}")
    for loss in tokenizer.losses:
        say(f"warning: the tokenizer doesn't keep text exactly: {loss}")
    say(next_command("generate", dest, "--prompt 'TEXT'"))


def export_model(model: Path, dest: Path, *, to: Target, dtype: str | None, force: bool, say: Say) -> None:
    """Publish a model folder, the model of a run folder, or an adapter in its base, for other tools."""
    folder = find_model(model)
    if dest.absolute() == folder.absolute():
        raise ConfigError(f"{dest} is the model itself: name another folder to export to")
    if dest.suffix == ".gguf":
        raise ConfigError(f"DEST is a folder, in which the file gets a name of its own: {dest.with_suffix('')}")
    _require_free(dest, force=force)
    found = _merged(folder, say) if is_adapter(folder) else load_model(folder)
    if to == "hf":
        made = exporting.export_hf(found, dest, dtype or "f32", replace=force)
    else:
        made = exporting.export_gguf(found, dest, dtype or "f16", name=dest.name, replace=force)
    say(f"{dest}: reopened and compared, logits differ by {made.distance:.2g} of their spread")
    for note in made.notes:
        say(f"note: {note}")


def _merged(folder: Path, say: Say) -> ModelFolder:
    """An adapter in its base, under the adapter's own hash."""
    found = load_merged(folder)
    say(f"{folder} is an adapter: what is exported is its base with it")
    name = (
        files.read_manifest(folder)["self"] if looks_published(folder) else files.sha256_file(folder / ADAPTER_WEIGHTS)
    )
    return found._replace(manifest={**found.manifest, "self": name})


def _refuse_own(source: Path, dest: Path) -> None:
    """Point the way where there is nothing to import, or something else is meant."""
    if not source.is_dir():
        return
    is_model = (source / "config.json").exists()
    if not is_model and ((source / "final").is_dir() or (source / "checkpoints").is_dir()):
        raise ConfigError(
            f"{source} is a run, whose model is taken as it is:  cyberslm generate {source} --prompt TEXT"
        )
    if is_adapter(source):
        raise ConfigError(f"{source} is an adapter; a model with it is made by  cyberslm merge BASE {source} {dest}")
    if looks_published(source) and files.read_manifest(source).get("kind") == KIND:
        raise ConfigError(f"{source} is a model folder already:  cyberslm generate {source} --prompt TEXT")
    if not is_model and (found := sorted(source.glob("*.gguf"))):
        raise ConfigError(
            f"{source} is no Hugging Face folder; of GGUF, name the file:  cyberslm import {found[0]} {dest}"
        )


def _require_free(dest: Path, *, force: bool) -> None:
    if looks_published(dest) and not force:
        raise ConfigError(f"{dest} exists: name another folder, or replace it with --force")


def open_source(source: Path) -> Source:
    """Open a source without writing anything."""
    if source.is_dir():
        return hf.read_source(source)
    if not source.is_file():
        raise ConfigError(f"{source} is not there: give a Hugging Face folder or a GGUF file")
    if source.suffix in PICKLES:
        raise ConfigError(
            f"{source} is a pickle, which can run code when it is opened, and is not read here: give a folder with"
            " safetensors, or a GGUF file"
        )
    return gguf.read_source(source)
