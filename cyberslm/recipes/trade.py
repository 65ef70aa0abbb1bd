"""Models of other tools in and out: which importer reads a source, and what people are told of it."""

from __future__ import annotations

from pathlib import Path

from cyberslm.errors import ConfigError
from cyberslm.interop import gguf, hf
from cyberslm.interop.source import Source, write_source
from cyberslm.recipes.tokenizer import Say

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def import_model(source: Path, dest: Path, say: Say) -> None:
    """Write a model folder of a Hugging Face folder or a GGUF file."""
    opened = open_source(source)
    write_source(opened, dest)
    config, tokenizer = opened.parts.config, opened.parts.tokenizer
    sizes = f"{config.num_parameters:,} parameters, {tokenizer.vocab_size:,} tokens, context {config.max_seq_len:,}"
    say(f"{dest}: {sizes}")
    say(f"weights: {opened.record['weights']}")
    for loss in tokenizer.losses:
        say(f"warning: the tokenizer doesn't keep text exactly: {loss}")
    say(f'next:  cyberslm generate {dest} --prompt "..."')


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
