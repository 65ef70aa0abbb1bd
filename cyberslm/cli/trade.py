"""Verbs that bring models in from other tools, and out to them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cyberslm.cli.options import Model, say

Force = Annotated[bool, typer.Option("--force", help="Replace DEST when it is a CyberSLM folder.")]


class Target(StrEnum):
    hf = "hf"
    gguf = "gguf"


def import_model(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder or a GGUF file.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The model folder to write.")],
    force: Force = False,
) -> None:
    """Turn another tool's model into a model folder.

    Llama, Mistral, Qwen2, Qwen3, SmolLM2. Nothing in the source is run; what isn't known is refused by name.
    """
    from cyberslm.recipes.trade import import_model as run

    run(source, dest, force=force, say=say)


def export_model(
    model: Model,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[
        Target, typer.Option(help="hf: transformers, vLLM and others; gguf: llama.cpp and Ollama.")
    ] = Target.hf,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights. hf: f32 (default), bf16, f16; gguf: f32, f16 (default), bf16, q8_0, q4_0."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write a model for other tools.

    It is reopened and compared with the model before it gets its name; what the target can't express is refused.
    """
    from cyberslm.recipes.trade import export_model as run

    run(model, dest, to=to.value, dtype=dtype, force=force, say=say)
