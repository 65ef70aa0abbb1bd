"""Models of other tools in and out: which importer reads a source, and what people are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyberslm.checkpoint.folder import load_model
from cyberslm.errors import ConfigError
from cyberslm.files import looks_published
from cyberslm.interop import exporting, gguf, hf
from cyberslm.interop.source import Source, write_source
from cyberslm.recipes.tokenizer import Say
from cyberslm.recipes.told import next_command
from cyberslm.recipes.use import find_model

Target = Literal["hf", "gguf"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_model(source: Path, dest: Path, *, force: bool, say: Say) -> None:
    """Write a model folder of a Hugging Face folder or a GGUF file."""
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
    """Publish a model folder, or the model of a run folder, for other tools."""
    folder = find_model(model)
    if dest.absolute() == folder.absolute():
        raise ConfigError(f"{dest} is the model itself: name another folder to export to")
    if dest.suffix == ".gguf":
        raise ConfigError(f"DEST is a folder, in which the file gets a name of its own: {dest.with_suffix('')}")
    _require_free(dest, force=force)
    found = load_model(folder)
    if to == "hf":
        made = exporting.export_hf(found, dest, dtype or "f32", replace=force)
    else:
        made = exporting.export_gguf(found, dest, dtype or "f16", name=dest.name, replace=force)
    say(f"{dest}: reopened and compared, logits differ by {made.distance:.2g} of their spread")
    for note in made.notes:
        say(f"note: {note}")


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
